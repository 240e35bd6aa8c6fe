"""``diff`` and ``extract`` over every format and across layouts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import ckptctl
from tests.checkpoints import save_dcp, save_hf, save_meta, save_torch, tiny_llama
from tests.checkpoints.meta import to_interleaved
from tests.contract.samples import SAMPLES
from tests.contract.support import WRITABLE, build
from tests.integration.test_imports import PROGRAM, REPOSITORY
from tests.sweeps import one_in

CHANGED = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def llama():
    return tiny_llama("llama3", dtype="float32")


@pytest.fixture(scope="module")
def sources(tmp_path_factory, llama) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    return {name: build(name, folder, *llama) for name in WRITABLE}


@pytest.fixture(scope="module")
def changed(tmp_path_factory, llama) -> dict[str, Path]:
    """The same model with one element of one key projection changed."""
    state, config = llama
    other = {name: value.clone() for name, value in state.items()}
    other[CHANGED][5, 3] += 0.5
    folder = tmp_path_factory.mktemp("changed")
    return {name: build(name, folder, other, config) for name in WRITABLE}


@pytest.mark.parametrize("b", one_in(4, WRITABLE))
@pytest.mark.parametrize("a", WRITABLE)
def test_diff_across_formats_finds_only_changed_tensor(sources, changed, llama, a, b):
    found = ckptctl.diff(sources[a], sources[b], only="model", model_type="llama3")
    assert found.same, (found.a.only, found.b.only, found.tensors, found.notes)
    assert found.compared == len(llama[0])
    other = ckptctl.diff(sources[a], changed[b], only="model", model_type="llama3")
    assert len(other.tensors) == 1 and not other.same
    (one,) = other.tensors
    assert one.values.differing == 1
    x, y = llama[0][CHANGED][5, 3].double(), (llama[0][CHANGED][5, 3] + 0.5).double()
    assert one.values.max_abs == float((x - y).abs())
    assert one.values.max_rel == float((x - y).abs() / y.abs())


def test_diff_undoes_meta_rope_permutation(tmp_path, llama):
    """The same bytes under Meta's names, but in the order of Hugging Face, are another model."""
    state, config = llama
    hf = save_hf(tmp_path / "hf", state, config)
    meta = save_meta(tmp_path / "meta", state, config, mp=1)
    assert ckptctl.diff(hf, meta).same
    file = next(meta.glob("*.pth"))
    held = torch.load(file)
    name = "layers.0.attention.wq.weight"
    held[name] = state["model.layers.0.self_attn.q_proj.weight"].clone()
    assert not torch.equal(held[name], to_interleaved(held[name], config["num_attention_heads"]))
    torch.save(held, file)
    found = ckptctl.diff(hf, meta)
    assert [one.name for one in found.tensors] == ["model.layers.0.self_attn.q_proj.weight"]
    assert found.tensors[0].sources == (name,)


def test_diff_of_torchtitan_dcp_with_other_formats_is_same(tmp_path, llama, sources):
    target = tmp_path / "titan"
    ckptctl.convert(sources["hf"], target, to="dcp", to_layout="torchtitan@0.3")
    for a, b in ((target, sources["hf"]), (sources["meta"], target), (sources["torch"], target)):
        assert ckptctl.diff(a, b).same


def test_diff_across_layouts_compares_common_tensors(tmp_path, llama, sources):
    state, config = llama
    part = {name: value for name, value in state.items() if name != CHANGED}
    found = ckptctl.diff(sources["meta"], save_hf(tmp_path / "hf", part, config))
    assert found.a.only == ("layers.1.attention.wk.weight",)
    assert not found.b.only and not found.tensors and found.compared == len(part)
    found = ckptctl.diff(save_hf(tmp_path / "again", part, config), sources["meta"])
    assert found.b.only == ("layers.1.attention.wk.weight",) and not found.a.only


def test_diff_ignores_tied_head_but_reports_untied_one(tmp_path):
    """A head that is the embedding is no difference; another one is."""
    state, config = tiny_llama("llama3_2")
    hf = save_hf(tmp_path / "hf", state, config)
    meta = save_meta(tmp_path / "meta", state, config, mp=1)
    assert ckptctl.diff(hf, meta).same
    file = next(meta.glob("*.pth"))
    held = torch.load(file)
    held["output.weight"] = held["output.weight"] + 1
    torch.save(held, file)
    assert ckptctl.diff(hf, meta).b.only == ("output.weight",)


def test_diff_compares_optimizer_tensors_and_step(tmp_path):
    state = {
        "model": {"w": torch.randn(4, 4)},
        "optimizer": {"exp_avg": torch.randn(4, 4)},
        "step": 3,
    }
    a = save_dcp(tmp_path / "dcp", state)
    b = save_torch(tmp_path / "b.pt", state)
    found = ckptctl.diff(a, b)
    assert found.same and found.compared == 2 and found.compared_leaves == 1
    c = save_torch(tmp_path / "c.pt", {**state, "step": 4})
    found = ckptctl.diff(a, c)
    assert [(one.name, one.a, one.b) for one in found.leaves] == [("step", "3", "4")]
    assert ckptctl.diff(a, c, only="model").same


@pytest.mark.parametrize("name", WRITABLE)
def test_extract_and_open_return_same_values_in_every_format(sources, tmp_path, llama, name):
    key = "model.layers.1.self_attn.q_proj.weight"
    layout = "hf"
    target = tmp_path / "out.npy"
    found = ckptctl.extract(
        sources[name], f"{key}[3:9, 2]", target, layout=layout, model_type="llama3"
    )
    assert (np.load(target) == llama[0][key][3:9, 2].numpy()).all()
    assert found.tensors[0].whole == tuple(llama[0][key].shape)
    state = ckptctl.open(sources[name], layout=layout, model_type="llama3")
    assert state.keys() == llama[0].keys()
    assert torch.equal(state[key][3:9, 2], llama[0][key][3:9, 2])
    shown = ckptctl.extract(sources[name], f"{key}[5, 2]", layout=layout, model_type="llama3")
    assert float(shown.tensors[0].preview) == pytest.approx(float(llama[0][key][5, 2]), rel=1e-4)


@pytest.mark.slow
def test_diff_and_extract_do_not_import_torch(sources, tmp_path):
    commands = [
        ["diff", str(sources["hf"]), str(path), "--only", "model"] for path in sources.values()
    ]
    commands = [[*one, "-m", "llama3"] for one in commands]
    hf = str(sources["hf"])
    commands.append(["extract", hf, CHANGED, "-o", str(tmp_path / "a.npy")])
    commands.append(["extract", hf, CHANGED, "--layout", "hf", "-o", str(tmp_path / "a.pt")])
    commands.append(["extract", hf, CHANGED])
    heavy = ("torch", "numpy", "safetensors.torch", "transformers", "huggingface_hub")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(heavy=heavy), repr(commands)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_diff_imports_torch_only_when_values_differ(sources, changed):
    """The control: only where bytes differ is there something to compute."""
    code = (
        "import sys, ckptctl; found = ckptctl.diff(sys.argv[1], sys.argv[2]);"
        "assert all(one.shape for one in ckptctl.open(sys.argv[2]).values());"
        "print(found.same, 'torch' in sys.modules)"
    )
    for other, expected in ((sources["hf"], "True False"), (changed["hf"], "False True")):
        done = subprocess.run(
            [sys.executable, "-c", code, str(sources["hf"]), str(other)],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == expected


@pytest.mark.parametrize("name", one_in(3, [n for n, one in SAMPLES.items() if not one.refused]))
def test_sample_equals_itself_and_opens_as_inspected(data, name):
    """Whatever can be read can be compared, and a tensor of it be taken out."""
    path = SAMPLES[name].path(data)
    found = ckptctl.diff(path, path)
    assert found.same and found.compared, found.notes
    catalog = ckptctl.inspect(path)
    smallest = min(catalog.tensors, key=lambda one: one.nbytes)
    taken = ckptctl.extract(path, smallest.name)
    assert taken.tensors[0].whole == smallest.shape
    with ckptctl.open(path) as state:
        assert [(one.name, one.dtype, one.shape) for one in state.values()] == [
            (one.name, one.dtype, one.shape) for one in catalog.tensors
        ]
        assert state[smallest.name][...].shape == smallest.shape
