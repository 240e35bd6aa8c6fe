"""``ckptctl.extract``: tensors and slices, read back with numpy, torch and safetensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptctl
from ckptctl.errors import MappingError, RefusedError, UsageError
from ckptctl.verbs.extraction.tensor_files import NUMPY_DTYPES
from tests.checkpoints import dtype_matrix

SLICES = ["", "[0:2]", "[:, 1]", "[-1]", "[..., -1]", "[1:, 2:4, 0]", "[1, 2, 3]", "[3:1]", "[:-1]"]


@pytest.fixture
def source(tmp_path):
    state = {
        "a.x": torch.arange(3 * 4 * 5, dtype=torch.float32).view(3, 4, 5),
        "a.y": torch.randn(6).bfloat16(),
        "b": torch.tensor(7, dtype=torch.int64),
    }
    save_file(state, tmp_path / "source.safetensors")
    return tmp_path / "source.safetensors", state


@pytest.mark.parametrize("text", SLICES)
@pytest.mark.parametrize("kind", ["safetensors", "pt", "npy"])
def test_extracted_slice_matches_numpy(source, tmp_path, text, kind):
    path, state = source
    target = tmp_path / f"out.{kind}"
    found = ckptctl.extract(path, f"a.x{text}", target)
    expected = eval(f"value{text}", {"value": state["a.x"].numpy()})
    if kind == "npy":
        value = np.load(target, allow_pickle=False)
    elif kind == "pt":
        value = torch.load(target, weights_only=True)["a.x"].numpy()
    else:
        value = load_file(target)["a.x"].numpy()
    assert value.dtype == expected.dtype and value.shape == expected.shape
    assert (value == expected).all()
    assert found.tensors[0].shape == expected.shape
    assert found.nbytes == target.stat().st_size


def test_extract_reads_only_requested_bytes(tmp_path):
    save_file({"big": torch.zeros(1024, 1024), "small": torch.ones(4)}, tmp_path / "a.safetensors")
    found = ckptctl.extract(tmp_path / "a.safetensors", "big[5]", tmp_path / "row.npy")
    assert found.bytes_read <= 4096
    shown = ckptctl.extract(tmp_path / "a.safetensors", "big")
    assert shown.bytes_read == 6 * 6 * 4


@pytest.mark.parametrize("dtype", sorted(NUMPY_DTYPES))
def test_npy_output_supports_every_numpy_dtype(tmp_path, dtype):
    value = torch.arange(6).view(2, 3).to(getattr(torch, dtype))
    torch.save({"w": value}, tmp_path / "a.pt")
    ckptctl.extract(tmp_path / "a.pt", "w", tmp_path / "w.npy")
    found = np.load(tmp_path / "w.npy")
    assert found.dtype == value.numpy().dtype and (found == value.numpy()).all()
    data = (tmp_path / "w.npy").read_bytes()
    assert (len(data) - value.nbytes) % 64 == 0


def test_bf16_to_npy_needs_dtype_conversion(source, tmp_path):
    path, state = source
    with pytest.raises(RefusedError, match="does not support bfloat16") as caught:
        ckptctl.extract(path, "a.y", tmp_path / "y.npy")
    assert "dtype='fp32'" in (caught.value.hint or "")
    assert not (tmp_path / "y.npy").exists()
    ckptctl.extract(path, "a.y", tmp_path / "y.npy", dtype="fp32")
    assert (np.load(tmp_path / "y.npy") == state["a.y"].float().numpy()).all()


def test_glob_extracts_matching_tensors(source, tmp_path):
    path, state = source
    ckptctl.extract(path, "a.*", tmp_path / "out.safetensors", slice="[0:2]")
    found = load_file(tmp_path / "out.safetensors")
    assert found.keys() == {"a.x", "a.y"}
    assert all(torch.equal(value, state[name][0:2]) for name, value in found.items())
    with pytest.raises(UsageError, match=r"a \.npy file stores one tensor"):
        ckptctl.extract(path, "a.*", tmp_path / "out.npy")


def test_existing_output_is_replaced_only_with_overwrite(source, tmp_path):
    path, _ = source
    for name in ("x.npy", "x.pt", "x.safetensors"):
        target = tmp_path / name
        ckptctl.extract(path, "a.x", target)
        before = target.read_bytes()
        with pytest.raises(RefusedError):
            ckptctl.extract(path, "a.x[0]", target)
        assert target.read_bytes() == before
        ckptctl.extract(path, "a.x[0]", target, overwrite=True)
        assert target.read_bytes() != before
    (tmp_path / "notes.npy").write_text("mine")
    with pytest.raises(RefusedError):
        ckptctl.extract(path, "a.x", tmp_path / "notes.npy", overwrite=True)
    with pytest.raises(RefusedError):
        ckptctl.extract(path, "a.x", path, overwrite=True)


@pytest.mark.parametrize("text", ["[::2]", "[5]", "[-4]", "[0,0,0,0]", "[..., 0, ...]", "[x]"])
def test_invalid_slice_is_a_usage_error(source, text):
    with pytest.raises(UsageError):
        ckptctl.extract(source[0], "a.x", slice=text)


def test_unknown_tensor_or_file_extension_is_an_error(source, tmp_path):
    with pytest.raises(MappingError) as caught:
        ckptctl.extract(source[0], "a.z")
    assert "did you mean" in (caught.value.hint or "")
    with pytest.raises(UsageError, match="unknown file extension"):
        ckptctl.extract(source[0], "a.x", tmp_path / "out.bin")
    save_file({"w[0:2]": torch.ones(3)}, tmp_path / "odd.safetensors")
    assert ckptctl.extract(tmp_path / "odd.safetensors", "w[0:2]").tensors[0].shape == (3,)


def test_extract_previews_values(source, tmp_path):
    path, state = source
    shown = ckptctl.extract(path, "a.x[0, :, 1:3]").tensors[0].preview
    assert shown.count("[") == 5
    values = np.array([float(word) for word in shown.replace("[", " ").replace("]", " ").split()])
    assert (values.reshape(4, 2) == state["a.x"][0, :, 1:3].numpy()).all()
    assert ckptctl.extract(path, "b").tensors[0].preview == "7"
    rows = torch.arange(900.0).view(30, 30)
    save_file({"w": rows}, tmp_path / "w.safetensors")
    first, *_, last = (
        ckptctl.extract(tmp_path / "w.safetensors", "w").tensors[0].preview.split("\n")
    )
    assert first.strip("[]").split() == ["0", "1", "2", "...", "27", "28", "29"]
    assert last.strip("[] ").split() == ["870", "871", "872", "...", "897", "898", "899"]


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_extract_previews_every_dtype(tmp_path):
    state = dtype_matrix()
    torch.save(state, tmp_path / "a.pt")
    for name in state:
        assert ckptctl.extract(tmp_path / "a.pt", name).tensors[0].preview is not None


# ------------------------------------------------------------------------- what the readers offer


DATA = Path(__file__).parents[3] / "data"
ZERO = DATA / "deepspeed" / "z1_bf16" / "ckpt"


@pytest.mark.parametrize(("weights", "dtype"), [("master", "float32"), ("module", "bfloat16")])
def test_weights_option_selects_master_or_module(tmp_path, weights, dtype):
    ckptctl.extract(ZERO, "module.fc1.weight", tmp_path / "w.pt", weights=weights)
    (found,) = torch.load(tmp_path / "w.pt", weights_only=True).values()
    saved = torch.load(ZERO / "global_step2" / "mp_rank_00_model_states.pt", weights_only=False)
    assert str(found.dtype) == f"torch.{dtype}"
    theirs = next(value for name, value in saved["module"].items() if name.endswith("fc1.weight"))
    assert torch.equal(found.bfloat16(), theirs)


def test_unknown_tag_is_a_usage_error():
    with pytest.raises(UsageError, match="nowhere"):
        ckptctl.extract(ZERO, "module.fc1.weight", tag="nowhere")
    assert ckptctl.extract(ZERO, "module.fc1.weight", tag="global_step2").tensors


def test_rules_join_tensor_parallel_ranks():
    ranks = DATA / "megatron" / "tp2_pp2_vp2" / "ckpt"
    with pytest.raises(MappingError):
        ckptctl.extract(ranks, "*word_embeddings.weight")
    (found,) = ckptctl.extract(ranks, "*word_embeddings.weight", rules="megatron-core").tensors
    assert found.shape == found.whole


def test_quantized_tensor_slice_is_dequantized(tmp_path):
    weight = torch.randn(256, 128).to(torch.float8_e4m3fn)
    quantized = {"l.weight": weight, "l.weight_scale_inv": torch.full((2, 1), 0.5)}
    save_file(quantized, tmp_path / "q.safetensors")
    out = tmp_path / "w.safetensors"
    ckptctl.extract(tmp_path / "q.safetensors", "l.weight[1:3]", out, dequantize="fp32")
    assert torch.equal(load_file(out)["l.weight"], (weight.float() * 0.5)[1:3])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[0:2]", None),
        ("[-3:]", None),
        ("[:, 0:4]", None),
        ("[0:99]", "the slice of `a.x` is truncated: dimension 0 has size 3"),
        ("[:, -99:2]", "the slice of `a.x` is truncated: dimension 1 has size 4"),
        ("[7:9]", "the slice of `a.x` is empty: dimension 0 has size 3"),
        ("[2:1]", "the slice of `a.x` is empty: dimension 0 has size 3"),
    ],
)
def test_truncated_slice_is_noted(source, text, said):
    assert ckptctl.extract(source[0], "a.x", slice=text).notes == ((said,) if said else ())


def test_truncated_slices_of_several_tensors_share_one_note(source):
    (note,) = ckptctl.extract(source[0], "a.*", slice="[0:9]").notes
    assert note == "the slice of `a.x` is truncated: dimension 0 has size 3; also for 1 more"


def test_partial_name_hints_at_full_name(source):
    with pytest.raises(MappingError) as raised:
        ckptctl.extract(source[0], "x")
    assert raised.value.hint == "did you mean `a.x`?"
