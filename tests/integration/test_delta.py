"""``ckptctl delta``, compared with tensors that safetensors and torch read."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import zstandard
from safetensors import safe_open
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from typer.testing import CliRunner

import ckptctl
from ckptctl import delta
from ckptctl.cli.app import app
from ckptctl.conversion.convert import run_conversion
from ckptctl.errors import (
    ChangedError,
    CkptError,
    DamagedError,
    MappingError,
    MissingPackageError,
    RefusedError,
    UnsupportedError,
    UsageError,
)
from ckptctl.formats.delta import (
    DeltaManifest,
    FileRecord,
    TensorChange,
    compute_digest,
    read_manifest,
)
from ckptctl.storage import zstd
from ckptctl.storage.files import source_files
from ckptctl.verbs.deltas import delta_files
from ckptctl.verbs.deltas.chain import OpenedDelta
from ckptctl.verbs.deltas.delta_options import DeltaOptions
from ckptctl.verbs.deltas.live import Check
from ckptctl.verbs.deltas.make import DeltaMaker
from tests.checkpoints import differences, dtype_matrix, save_dcp, save_hf, save_torch, tiny_llama
from tests.checkpoints.deltas import apply_delta
from tests.checkpoints.readers import raw_bytes

State = dict[str, torch.Tensor]


def read(folder: Path) -> State:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def require_equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert raw_bytes(found[name]) == raw_bytes(tensor), name


def flip_bits(tensor: torch.Tensor, share: float, seed: int = 0) -> torch.Tensor:
    """Return a tensor some of whose bytes are random; all bit patterns are possible."""
    generator = torch.Generator().manual_seed(seed)
    result = tensor.clone()
    if tensor.dtype == torch.bool:
        return result ^ (torch.rand(tensor.shape, generator=generator) < share)
    content = result.reshape(-1).view(torch.uint8)
    chosen = torch.rand(content.shape, generator=generator) < share
    noise = torch.randint(0, 256, content.shape, dtype=torch.uint8, generator=generator)
    content[chosen] = noise[chosen]
    return content.view(tensor.dtype).view(tensor.shape)


def trained(state: State, seed: int, lr: float = 2e-5) -> State:
    """Return a state after an update that, as in training, moves few elements of bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (tensor.float() + lr * torch.randn(tensor.shape, generator=generator)).to(
            tensor.dtype
        )
        for name, tensor in state.items()
    }


@pytest.fixture
def base(tmp_path: Path) -> Path:
    state, config = tiny_llama("llama3")
    return save_hf(tmp_path / "base", {k: v.bfloat16() for k, v in state.items()}, config) or (
        tmp_path / "base"
    )


def save(folder: Path, state: State) -> Path:
    save_hf(folder, state, tiny_llama("llama3")[1])
    return folder


# ------------------------------------------------------------------------------- lossless


@pytest.mark.parametrize(
    ("share", "compression"), [(0.0005, "zstd"), (0.02, "deflate"), (0.3, "zstd"), (0.9, "deflate")]
)
def test_random_changes_of_every_dtype_are_bit_exact(
    tmp_path: Path, share: float, compression: Any
) -> None:
    old = {k: v.clone() for k, v in dtype_matrix("safetensors.torch").items()}
    generator = torch.Generator().manual_seed(1)
    for name, shape in {
        "bfloat16": (1031, 533),
        "float32": (300_001,),
        "int8": (3, 7, 60_003),
        "float64": (257, 525),
    }.items():
        dtype = getattr(torch, name)
        count = math.prod(shape) * dtype.itemsize
        content = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
        old[f"{name}.large"] = content.view(dtype).view(shape)
    new = {name: flip_bits(tensor, share, len(name)) for name, tensor in old.items()}
    for folder, state in (("old", old), ("new", new)):
        (tmp_path / folder).mkdir()
        save_file(state, tmp_path / folder / "model.safetensors")
    result = delta.make(
        tmp_path / "old", tmp_path / "new", tmp_path / "delta", compression=compression
    )
    assert result.compression == compression
    delta.apply(tmp_path / "old", tmp_path / "delta", tmp_path / "out")
    require_equal(read(tmp_path / "out"), new)
    by_hand = apply_delta(old, tmp_path / "delta")
    assert by_hand == {name: raw_bytes(tensor) for name, tensor in new.items()}


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_dtypes_that_safetensors_lacks_are_bit_exact(tmp_path: Path) -> None:
    old = dtype_matrix("torch")
    new = {name: flip_bits(tensor, 0.1) for name, tensor in old.items()}
    save_torch(tmp_path / "old.pt", old)
    save_torch(tmp_path / "new.pt", new)
    delta.make(tmp_path / "old.pt", tmp_path / "new.pt", tmp_path / "delta")
    delta.apply(tmp_path / "old.pt", tmp_path / "delta", tmp_path / "out.pt")
    require_equal(torch.load(tmp_path / "out.pt", weights_only=True), new)


def test_nan_payloads_and_negative_zero_are_kept(tmp_path: Path) -> None:
    bits = torch.tensor([0x7FC0, -64, 0x7F81, -32768, 0, 0x3F80], dtype=torch.int16)
    old = {"a": bits.view(torch.bfloat16), "b": bits.clone().view(torch.bfloat16)}
    new = {"a": bits.flip(0).view(torch.bfloat16), "b": bits.view(torch.bfloat16)}
    for folder, state in (("old", old), ("new", new)):
        (tmp_path / folder).mkdir()
        save_file(state, tmp_path / folder / "model.safetensors")
    assert delta.make(tmp_path / "old", tmp_path / "new", tmp_path / "delta").changed == ("a",)
    delta.apply(tmp_path / "old", tmp_path / "delta", tmp_path / "out")
    require_equal(read(tmp_path / "out"), new)


def test_added_removed_reshaped_and_cast_tensors_are_bit_exact(tmp_path: Path) -> None:
    old = {
        "kept": torch.randn(40, 3),
        "removed": torch.randn(5),
        "reshaped": torch.arange(12.0).view(3, 4),
        "cast": torch.randn(100),
    }
    new = {
        "kept": old["kept"],
        "added": torch.randn(700, 801).half(),
        "reshaped": torch.arange(12.0).view(4, 3),
        "cast": old["cast"].bfloat16(),
        "empty": torch.empty(0, 4),
    }
    for folder, state in (("old", old), ("new", new)):
        (tmp_path / folder).mkdir()
        save_file(state, tmp_path / folder / "model.safetensors")
    result = delta.make(tmp_path / "old", tmp_path / "new", tmp_path / "delta")
    assert ({*result.added}, result.removed) == ({"added", "empty"}, ("removed",))
    delta.apply(tmp_path / "old", tmp_path / "delta", tmp_path / "out")
    require_equal(read(tmp_path / "out"), new)
    assert apply_delta(old, tmp_path / "delta") == {k: raw_bytes(v) for k, v in new.items()}
    with pytest.raises(RefusedError, match="already applied"):
        delta.apply(tmp_path / "new", tmp_path / "delta", tmp_path / "again")


def test_unchanged_checkpoint_has_an_empty_delta(tmp_path: Path, base: Path) -> None:
    result = delta.make(base, base, tmp_path / "delta")
    assert result.changed == () and result.base_sha256 == result.result_sha256
    delta.apply(base, tmp_path / "delta", tmp_path / "out")
    require_equal(read(tmp_path / "out"), read(base))


# ------------------------------------------------------------------------ formats and layouts


def test_dcp_step_against_hf_base_applies_in_any_layout(tmp_path: Path, base: Path) -> None:
    new = trained(read(base), 1)
    ckptctl.convert(save(tmp_path / "new", new), tmp_path / "meta", to="meta")
    ckptctl.convert(tmp_path / "new", tmp_path / "titan", to="dcp", to_layout="torchtitan@0.3")
    digests = set()
    for source in ("new", "meta", "titan"):
        result = delta.make(base, tmp_path / source, tmp_path / f"{source}.delta")
        assert (result.model_type, result.layout) == ("llama3", "hf")
        digests.add((result.base_sha256, result.result_sha256))
    assert len(digests) == 1
    assert apply_delta(read(base), tmp_path / "titan.delta") == {
        name: raw_bytes(tensor) for name, tensor in new.items()
    }
    ckptctl.convert(base, tmp_path / "base-titan", to="dcp", to_layout="torchtitan@0.3")
    delta.apply(
        tmp_path / "base-titan", tmp_path / "meta.delta", tmp_path / "out", to="hf", assets=base
    )
    require_equal(read(tmp_path / "out"), new)
    delta.apply(base, tmp_path / "titan.delta", tmp_path / "out-meta", to="meta", mp=2)
    ckptctl.convert(tmp_path / "out-meta", tmp_path / "back", to="hf", assets=base)
    require_equal(read(tmp_path / "back"), new)


def test_fp32_weights_of_a_trainer_are_cast_with_dtype(tmp_path: Path, base: Path) -> None:
    new = {name: tensor.float() + 1e-4 for name, tensor in read(base).items()}
    save_dcp(tmp_path / "step", new)
    result = delta.make(base, tmp_path / "step", tmp_path / "delta", dtype="bf16")
    delta.apply(base, tmp_path / "delta", tmp_path / "out")
    require_equal(read(tmp_path / "out"), {k: v.bfloat16() for k, v in new.items()})
    assert result.nbytes < result.full_bytes
    new["model.norm.weight"][0] = 3e38
    shutil.rmtree(tmp_path / "step")
    save_dcp(tmp_path / "step", new)
    with pytest.raises(RefusedError, match="infinite, NaN"):
        delta.make(base, tmp_path / "step", tmp_path / "lost", dtype="fp16")
    assert not (tmp_path / "lost").exists()


def save_training_state(folder: Path, state: State, step: int) -> Path:
    moments = {
        name: {"exp_avg": torch.full_like(tensor, step), "step": torch.tensor(step)}
        for name, tensor in state.items()
    }
    optimizer = {"state": moments, "param_groups": [{"lr": 1e-5}]}
    save_dcp(folder, {"model": state, "optimizer": optimizer, "epoch": step})
    return folder


def test_optimizer_state_is_reported_as_left_out(tmp_path: Path, base: Path) -> None:
    before = save_training_state(tmp_path / "before", read(base), 1)
    new = trained(read(base), 1)
    after = save_training_state(tmp_path / "after", new, 2)
    folder = tmp_path / "delta"
    made = delta.make(before, after, folder, model_type="llama3")
    expected = {
        *(f"optimizer.state.{name}.{key}" for name in new for key in ("exp_avg", "step")),
        *("optimizer.param_groups.0.lr", "epoch"),
    }
    assert made.left_out == dict.fromkeys(made.left_out, "not part of the model")
    assert made.left_out.keys() == expected
    manifest = json.loads((folder / "ckptctl.delta.json").read_text())
    assert {*manifest["left_out"]["not part of the model"]} == expected
    assert delta.verify(folder).left_out.keys() == expected
    plan = delta.plan(before, folder, tmp_path / "out", model_type="llama3")
    assert plan.conversion.left_out.keys() == plan.delta_left_out.keys() == expected
    assert plan.conversion.summary.left_out == 2 * len(new)
    # A base without optimizer state leaves out nothing itself.
    plan = delta.plan(base, folder, tmp_path / "out")
    assert not plan.conversion.left_out
    assert plan.delta_left_out.keys() == expected
    second = save_training_state(tmp_path / "second", trained(new, 2), 3)
    delta.make(after, second, tmp_path / "next", model_type="llama3")
    squashed = delta.squash([folder, tmp_path / "next"], tmp_path / "squashed")
    assert squashed.left_out.keys() == expected
    for arguments, note in (
        (["make", str(base), str(after), str(tmp_path / "made")], "skipped, not part of"),
        (["verify", str(folder)], "skipped, not part of the model"),
        (["apply", str(base), str(folder), str(tmp_path / "out")], "not in the deltas, not"),
        (
            ["apply", str(before), str(folder), str(tmp_path / "dcp"), "--model-type", "llama3"],
            "note: skipped, not part of the model",
        ),
    ):
        result = CliRunner().invoke(app, ["delta", *arguments])
        assert result.exit_code == 0, result.output
        assert note in result.stderr
        assert result.stderr.count("under `optimizer`, `epoch`") == 1


def test_files_of_a_trainer_are_reported_as_left_out(tmp_path: Path, base: Path) -> None:
    new = save(tmp_path / "checkpoint-2", trained(read(base), 1))
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({"state": {}}, new / name)
    (new / "trainer_state.json").write_text('{"global_step": 2}')
    made = delta.make(base, new, tmp_path / "delta")
    assert made.left_out == dict.fromkeys(
        ["optimizer.pt", "rng_state.pth", "scheduler.pt", "trainer_state.json"],
        "unknown kind of file",
    )
    (new / "generation_config.json").write_text("{}")
    published = delta.make(base, new, tmp_path / "weight_v000001", weight_version=1)
    assert published.left_out == {
        **made.left_out,
        "generation_config.json": "a weight update has no such files",
    }


def test_options_of_convert_apply_to_the_result(tmp_path: Path, base: Path) -> None:
    new = trained(read(base), 2)
    delta.make(base, save(tmp_path / "new", new), tmp_path / "delta")
    delta.apply(base, tmp_path / "delta", tmp_path / "out", dtype="fp32", verify=True)
    require_equal(read(tmp_path / "out"), {k: v.float() for k, v in new.items()})
    delta.apply(base, tmp_path / "delta", tmp_path / "norms", include=["*norm.weight"])
    require_equal(
        read(tmp_path / "norms"), {k: v for k, v in new.items() if k.endswith("norm.weight")}
    )
    plan = delta.plan(base, tmp_path / "delta", tmp_path / "quantized", quantize="fp8-block")
    assert plan.conversion.quantized


def test_tied_tensors_are_stored_once(tmp_path: Path) -> None:
    state, config = tiny_llama("llama3_2")
    save_hf(tmp_path / "base", state, config)
    new = {name: flip_bits(tensor, 0.01) for name, tensor in state.items()}
    save_hf(tmp_path / "new", new, config)
    # The trainer has both names, and its format stores both.
    save_dcp(tmp_path / "step", {**new, "lm_head.weight": new["model.embed_tokens.weight"]})
    for source in ("new", "step"):
        result = delta.make(tmp_path / "base", tmp_path / source, tmp_path / f"{source}.delta")
        delta.apply(tmp_path / "base", tmp_path / f"{source}.delta", tmp_path / f"{source}-out")
        found = read(tmp_path / f"{source}-out")
        head = found.pop("lm_head.weight", new["model.embed_tokens.weight"])
        require_equal({**found, "head": head}, {**new, "head": new["model.embed_tokens.weight"]})
        assert result.added == (() if source == "new" else ("lm_head.weight",))


def test_alias_in_a_torch_file_is_stored_once_and_can_be_untied(tmp_path: Path) -> None:
    shared = torch.randn(300, 7)
    tied = {"a": shared, "b": shared, "c": torch.ones(2)}
    moved = shared + 1
    tied_new = {"a": moved, "b": moved, "c": torch.ones(2)}
    untied = {"a": moved + 1, "b": moved, "c": torch.ones(2)}
    paths = []
    for number, state in enumerate((tied, tied_new, untied, tied_new)):
        paths.append(save_torch(tmp_path / f"{number}.pt", state))
    deltas = []
    for number, (before, after) in enumerate(pairwise(paths)):
        deltas.append(tmp_path / f"d{number}")
        delta.make(before, after, deltas[-1])
    for number, state in enumerate((tied_new, untied, tied_new), 1):
        out = tmp_path / f"out{number}.pt"
        delta.apply(paths[0], deltas[:number], out)
        require_equal(torch.load(out, weights_only=True), state)
    result = torch.load(tmp_path / "out1.pt", weights_only=True)
    assert result["a"].data_ptr() == result["b"].data_ptr()
    with pytest.raises(UnsupportedError, match="cannot be squashed"):
        delta.squash(deltas[:2], tmp_path / "squashed")
    delta.squash(deltas, tmp_path / "all")
    delta.apply(paths[0], tmp_path / "all", tmp_path / "all.pt")
    require_equal(torch.load(tmp_path / "all.pt", weights_only=True), tied_new)


def test_quantized_model_keeps_weights_and_scales(tmp_path: Path, base: Path) -> None:
    ckptctl.convert(base, tmp_path / "q", to="hf", quantize="fp8-block")
    new = save(tmp_path / "new", trained(read(base), 3, 1e-2))
    ckptctl.convert(new, tmp_path / "q-new", to="hf", quantize="fp8-block")
    result = delta.make(tmp_path / "q", tmp_path / "q-new", tmp_path / "delta")
    assert any(name.endswith("_scale_inv") for name in result.changed)
    delta.apply(tmp_path / "q", tmp_path / "delta", tmp_path / "out")
    require_equal(read(tmp_path / "out"), read(tmp_path / "q-new"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    delta.apply(tmp_path / "q", tmp_path / "delta", tmp_path / "plain", dequantize="bf16")
    ckptctl.convert(tmp_path / "q-new", tmp_path / "expected", to="hf", dequantize="bf16")
    require_equal(read(tmp_path / "plain"), read(tmp_path / "expected"))


def test_changed_configuration_and_tokenizer_are_carried(tmp_path: Path, base: Path) -> None:
    (base / "tokenizer.json").write_text('{"version": 1}')
    (base / "generation_config.json").write_text("{}")
    new = tmp_path / "new"
    shutil.copytree(base, new)
    config = json.loads((new / "config.json").read_text())
    (new / "config.json").write_text(json.dumps({**config, "rope_theta": 1_000_000.0}))
    (new / "tokenizer.json").write_text('{"version": 2}')
    (new / "chat_template.jinja").write_text("hello")
    result = delta.make(base, new, tmp_path / "delta")
    assert set(result.assets) == {"config.json", "tokenizer.json", "chat_template.jinja"}
    delta.apply(base, tmp_path / "delta", tmp_path / "out")
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "out" / name).read_text() == (
            (new if name != "generation_config.json" else base) / name
        ).read_text()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_theta"] == 1e6
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "tokenizer.json").write_text('{"version": 3}')
    delta.apply(base, tmp_path / "delta", tmp_path / "out2", assets=tmp_path / "given")
    assert (tmp_path / "out2" / "tokenizer.json").read_text() == '{"version": 3}'


# ----------------------------------------------------------------------------------- chains


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path], list[State]]:
    """Return a base, 50 deltas, and the states after each of them."""
    folder = tmp_path_factory.mktemp("chain")
    state, config = tiny_llama("llama3")
    state = {name: tensor.bfloat16() for name, tensor in state.items()}
    save_hf(folder / "base", state, config)
    deltas: list[Path] = []
    states: list[State] = []
    previous = folder / "base"
    for number in range(50):
        state = trained(state, number, 1e-4) if number != 20 else dict(state)
        if number == 30:
            state["model.norm.weight"] = states[0]["model.norm.weight"]
        save_hf(folder / f"step-{number}", state, config)
        deltas.append(folder / f"{number}.delta")
        delta.make(previous, folder / f"step-{number}", deltas[-1], jobs=1)
        previous = folder / f"step-{number}"
        states.append(state)
    return folder / "base", deltas, states


@pytest.mark.slow
def test_chain_of_fifty_and_its_squashed_delta_are_bit_exact(
    tmp_path: Path, chain: tuple[Path, list[Path], list[State]]
) -> None:
    base, deltas, states = chain
    delta.apply(base, deltas, tmp_path / "out")
    require_equal(read(tmp_path / "out"), states[-1])
    squashed = delta.squash(deltas, tmp_path / "squashed")
    direct = delta.make(base, tmp_path / "out", tmp_path / "direct")
    assert squashed.result_sha256 == direct.result_sha256
    assert squashed.nbytes == pytest.approx(direct.nbytes, rel=0.05)
    delta.apply(base, tmp_path / "squashed", tmp_path / "out2")
    require_equal(read(tmp_path / "out2"), states[-1])
    delta.squash([*deltas[:5]], tmp_path / "five")
    delta.apply(base, [tmp_path / "five", *deltas[5:7]], tmp_path / "out3")
    require_equal(read(tmp_path / "out3"), states[6])
    assert apply_delta(read(base), tmp_path / "five") == {
        name: raw_bytes(tensor) for name, tensor in states[4].items()
    }


def test_chain_is_checked_before_a_byte_is_written(
    tmp_path: Path, chain: tuple[Path, list[Path], list[State]]
) -> None:
    base, deltas, _ = chain
    with pytest.raises(RefusedError, match="do not follow each other") as broken:
        delta.apply(base, [deltas[1], deltas[0], deltas[2]], tmp_path / "out")
    assert "0.delta 1.delta 2.delta" in str(broken.value.hint)
    with pytest.raises(RefusedError, match="do not follow each other"):
        delta.apply(base, [deltas[0], deltas[2]], tmp_path / "out")
    with pytest.raises(RefusedError, match="not the checkpoint that the delta was made from"):
        delta.apply(base, deltas[1:4], tmp_path / "out")
    step = deltas[3].parent / "step-3"
    with pytest.raises(RefusedError, match="the deltas are already applied"):
        delta.apply(step, deltas[:4], tmp_path / "out")
    with pytest.raises(RefusedError, match="the first delta is already applied"):
        delta.apply(deltas[0].parent / "step-0", deltas[:2], tmp_path / "out")
    with pytest.raises(RefusedError, match="the first 4 deltas are already applied") as partly:
        delta.apply(step, deltas[:6], tmp_path / "out")
    assert "3.delta" in str(partly.value.hint)
    assert list(tmp_path.iterdir()) == []


def test_base_with_other_tensors_is_refused_with_their_names(tmp_path: Path, base: Path) -> None:
    delta.make(base, save(tmp_path / "new", trained(read(base), 1)), tmp_path / "delta")
    other = read(base)
    other["model.norm.weight"] = other["model.norm.weight"] + 1
    for action in (
        lambda: delta.apply(save(tmp_path / "other", other), tmp_path / "delta", tmp_path / "out"),
        lambda: delta.verify(tmp_path / "delta", base=tmp_path / "other"),
    ):
        with pytest.raises(RefusedError, match="made from") as refused:
            action()
        assert "1 tensor differ: `model.norm.weight`" in str(refused.value.why)
    assert not (tmp_path / "out").exists()


def test_another_model_is_refused(tmp_path: Path, base: Path) -> None:
    state, config = tiny_llama("llama2")
    save_hf(tmp_path / "llama2", state, config)
    with pytest.raises(MappingError):
        delta.make(base, tmp_path / "llama2", tmp_path / "delta", model_type=None)
    (tmp_path / "odd").mkdir()
    save_file({"x": torch.ones(2)}, tmp_path / "odd" / "model.safetensors")
    with pytest.raises(MappingError):
        delta.make(base, tmp_path / "odd", tmp_path / "delta")
    delta.make(base, base, tmp_path / "delta")
    with pytest.raises(MappingError):
        delta.apply(tmp_path / "odd", tmp_path / "delta", tmp_path / "out")


def test_base_of_another_model_type_is_refused(tmp_path: Path, base: Path) -> None:
    """The tensors are equal, so only the configuration shows the difference."""
    new = save(tmp_path / "new", trained(read(base), 1))
    delta.make(base, new, tmp_path / "delta")
    config = json.loads((base / "config.json").read_text())
    other = {key: value for key, value in config.items() if not key.startswith("rope_")}
    other |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    save_hf(tmp_path / "other", read(base), other)
    for path in (base, new):
        shutil.copytree(path, tmp_path / f"bare-{path.name}", ignore=lambda *_: ["config.json"])
    bare_base, bare_new = tmp_path / f"bare-{base.name}", tmp_path / "bare-new"
    options: dict[str, Any] = {"reference": "none"}
    delta.make(bare_base, bare_new, tmp_path / "bare-delta", **options)
    wrong = (tmp_path / "other", tmp_path / "delta"), (base, tmp_path / "bare-delta")
    for path, made in wrong:
        for action in (
            lambda path=path, made=made: delta.apply(path, made, tmp_path / "out"),
            lambda path=path, made=made: delta.verify(made, base=path),
        ):
            with pytest.raises(MappingError, match="belongs to another model type") as refused:
                action()
            assert "model_type" in str(refused.value.hint)
    delta.apply(bare_base, tmp_path / "delta", tmp_path / "out", assets=base)
    require_equal(read(tmp_path / "out"), read(new))


# ----------------------------------------------------------------------------------- damage


@pytest.fixture
def made(tmp_path: Path, base: Path) -> Path:
    """Return a delta with payloads and an asset."""
    new = save(tmp_path / "new", trained(read(base), 1, 1e-3))
    (new / "tokenizer.json").write_text('{"version": 2}')
    delta.make(base, new, tmp_path / "delta")
    return tmp_path / "delta"


@pytest.mark.parametrize("kind", ["flip", "truncate", "extend", "delete"])
def test_damage_of_any_file_is_noticed(made: Path, base: Path, tmp_path: Path, kind: str) -> None:
    files = [path for path in made.rglob("*") if path.is_file()]
    assert len(files) == 3
    generator = random.Random(0)
    for path in files:
        content = path.read_bytes()
        places = sorted(generator.sample(range(len(content)), min(12, len(content))))
        for place in places if kind in ("flip", "truncate") else [0]:
            if kind == "flip":
                wrong = bytearray(content)
                wrong[place] ^= 1 << generator.randrange(8)
                path.write_bytes(bytes(wrong))
            elif kind == "truncate":
                path.write_bytes(content[:place])
            elif kind == "extend":
                path.write_bytes(content + b"\0")
            else:
                path.unlink()
            for action in (
                lambda: delta.verify(made),
                lambda: delta.apply(base, made, tmp_path / "out"),
                lambda: delta.squash([made, made], tmp_path / "squashed"),
                lambda: delta.apply_to(read(base), made),
            ):
                with pytest.raises(CkptError):
                    action()
            assert not (tmp_path / "out").exists()
            path.write_bytes(content)
    delta.verify(made, base=base)


def test_payload_that_matches_its_digest_but_not_the_result_is_damaged(
    made: Path, base: Path, tmp_path: Path
) -> None:
    """A manifest whose own digests are right, such as one that a faulty program wrote."""
    with source_files(made) as files:
        manifest = read_manifest(files)
    name = manifest.changed[0]
    change = manifest.tensors[name]
    assert change.result
    wrong = replace(change, result=replace(change.result, sha256="0" * 64))
    tensors = {**manifest.tensors, name: wrong}
    results = [(key, item.result) for key, item in tensors.items() if item.result]
    forged = replace(manifest, tensors=tensors, result_sha256=compute_digest(results))
    (made / "ckptctl.delta.json").write_bytes(forged.encode())
    delta.verify(made)
    for action in (
        lambda: delta.apply(base, made, tmp_path / "out"),
        lambda: delta.verify(made, base=base),
        lambda: delta.apply_to(read(base), made),
    ):
        with pytest.raises(DamagedError, match=r"digest|did not become"):
            action()
    assert not (tmp_path / "out").exists()
    escaping = replace(manifest, files={**manifest.files, "../x": FileRecord(0, "0" * 64)})
    (made / "ckptctl.delta.json").write_bytes(escaping.encode())
    with pytest.raises(DamagedError, match="not the path of a file of a delta"):
        delta.verify(made)


def write_forged(folder: Path, manifest: DeltaManifest) -> None:
    """Write a manifest after all of its digests are computed again."""
    sides = [
        [(key, record) for key, item in manifest.tensors.items() if (record := getattr(item, side))]
        for side in ("base", "result")
    ]
    digests = [compute_digest(side) for side in sides]
    forged = replace(manifest, base_sha256=digests[0], result_sha256=digests[1])
    (folder / "ckptctl.delta.json").write_bytes(forged.encode())


def test_ties_without_an_original_are_damaged(made: Path, base: Path, tmp_path: Path) -> None:
    with source_files(made) as files:
        manifest = read_manifest(files)
    name = manifest.changed[0]
    record = manifest.tensors[name].result
    assert record
    for ties in ({"x": "x"}, {"x": "y", "y": "x"}, {"x": "y", "y": name}, {"x": "missing"}):
        added = {
            key: TensorChange(result=replace(record, alias_of=value)) for key, value in ties.items()
        }
        write_forged(made, replace(manifest, tensors={**manifest.tensors, **added}))
        for action in (
            lambda: delta.verify(made),
            lambda: delta.apply(base, made, tmp_path / "out"),
        ):
            with pytest.raises(DamagedError, match="tied"):
                action()


def test_blocks_that_divide_an_element_are_malformed(made: Path) -> None:
    with source_files(made) as files:
        manifest = read_manifest(files)
    write_forged(made, replace(manifest, block_bytes=1025))
    with pytest.raises(UnsupportedError, match="malformed"):
        delta.verify(made)


def test_configuration_that_is_no_object_is_noticed(tmp_path: Path, base: Path) -> None:
    new = save(tmp_path / "new", trained(read(base), 1))
    config = json.loads((new / "config.json").read_text())
    (new / "config.json").write_text(json.dumps({**config, "unused": 1}))
    delta.make(base, new, tmp_path / "delta")
    content = b"[1]"
    (tmp_path / "delta" / "assets" / "config.json").write_bytes(content)
    with source_files(tmp_path / "delta") as files:
        manifest = read_manifest(files)
    record = FileRecord(len(content), hashlib.sha256(content).hexdigest())
    files_with_record = {**manifest.files, "assets/config.json": record}
    write_forged(tmp_path / "delta", replace(manifest, files=files_with_record))
    for action in (
        lambda: delta.verify(tmp_path / "delta"),
        lambda: delta.verify(tmp_path / "delta", base=base),
        lambda: delta.apply(base, tmp_path / "delta", tmp_path / "out"),
    ):
        with pytest.raises(UnsupportedError, match="not a JSON object"):
            action()


@pytest.mark.parametrize(
    "name",
    [
        *("model.safetensors.index.json", "other.safetensors", "x/pytorch_model.bin"),
        *(".git/config", "tokenizer/.hidden", "ckptctl.manifest.json", "a//b", "../x", ""),
        *("ckptctl.delta.json", "ckptctl.lock", "config.json\n"),
    ],
)
def test_assets_that_no_model_copies_are_damaged(made: Path, name: str) -> None:
    with source_files(made) as files:
        manifest = read_manifest(files)
    write_forged(
        made, replace(manifest, files={**manifest.files, f"assets/{name}": FileRecord(0, "0" * 64)})
    )
    with pytest.raises(DamagedError, match="not the path of a file of a delta"):
        delta.verify(made)


def test_block_that_is_larger_than_its_elements_is_damaged(
    made: Path, base: Path, tmp_path: Path
) -> None:
    """Otherwise, a delta determines how much memory its reader needs."""
    with source_files(made) as files:
        manifest = read_manifest(files)
    path = made / "delta-00001.safetensors"
    with safe_open(path, "np") as opened:
        payloads = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    name = manifest.changed[0]
    payload = payloads[name]
    (size,) = struct.unpack_from("<I", payload, 1)
    padding = (2 << 20) + 1
    table = np.frombuffer(struct.pack("<BI", payload[0], size + padding), np.uint8)
    payloads[name] = np.concatenate([table, payload[5:], np.zeros(padding, np.uint8)])
    save_numpy(payloads, path)
    content = path.read_bytes()
    record = FileRecord(len(content), hashlib.sha256(content).hexdigest())
    write_forged(made, replace(manifest, files={**manifest.files, path.name: record}))
    for action in (
        lambda: delta.apply(base, made, tmp_path / "out"),
        lambda: delta.apply_to(read(base), made, check="none"),
    ):
        with pytest.raises(DamagedError) as damaged:
            action()
        assert "for a block of 1,048,576" in str(damaged.value.why)


@pytest.mark.slow
def test_blocks_that_do_not_decode_are_damaged_not_a_crash(
    made: Path, base: Path, tmp_path: Path
) -> None:
    """Every bit of the payload's table and of the first blocks, under digests that match."""

    with source_files(made) as files:
        manifest = read_manifest(files)
    path = made / "delta-00001.safetensors"
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    generator = random.Random(1)
    for place in [*range(start, start + 40), *generator.sample(range(start, len(content)), 40)]:
        wrong = bytearray(content)
        wrong[place] ^= 1 << generator.randrange(8)
        path.write_bytes(bytes(wrong))
        record = FileRecord(len(wrong), hashlib.sha256(wrong).hexdigest())
        forged = replace(manifest, files={**manifest.files, path.name: record})
        (made / "ckptctl.delta.json").write_bytes(forged.encode())
        try:  # a bit of a compressed frame may be without meaning
            delta.apply(base, made, tmp_path / "out")
        except DamagedError:
            assert not (tmp_path / "out").exists()
        else:
            require_equal(read(tmp_path / "out"), read(tmp_path / "new"))
            shutil.rmtree(tmp_path / "out")


# ------------------------------------------------------------------ changes after the checks


def rewrite(path: Path) -> None:
    """Change a file in place, and restore its size and modification time."""
    status, content = path.stat(), bytearray(path.read_bytes())
    content[-1] ^= 1
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.fixture
def with_asset(base: Path, tmp_path: Path) -> Path:
    """Return a delta with a changed configuration."""
    new = save(tmp_path / "with-asset", trained(read(base), 1))
    config = json.loads((new / "config.json").read_text())
    (new / "config.json").write_text(json.dumps({**config, "eos_token_id": 3}))
    (new / "generation_config.json").write_text('{"eos_token_id": 3}')
    delta.make(base, new, tmp_path / "asset.delta")
    return tmp_path / "asset.delta"


def rewrite_after_check(patch: pytest.MonkeyPatch, path: Path) -> None:
    """Change *path* as soon as the files of a delta are compared with their digests."""
    check = OpenedDelta.check_files

    def check_and_rewrite(self: OpenedDelta) -> None:
        check(self)
        rewrite(path)

    patch.setattr(OpenedDelta, "check_files", check_and_rewrite)


@pytest.mark.parametrize("name", ["delta-00001.safetensors", "assets/generation_config.json"])
def test_delta_that_changes_after_its_check_is_not_used(
    with_asset: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    second = save(tmp_path / "second", trained(read(base), 2))
    delta.make(tmp_path / "with-asset", second, tmp_path / "second.delta")
    rewrite_after_check(monkeypatch, with_asset / name)
    for use in (
        lambda: delta.apply(base, with_asset, tmp_path / "out"),
        lambda: delta.squash([with_asset, tmp_path / "second.delta"], tmp_path / "out"),
        lambda: delta.verify(with_asset),
        lambda: delta.apply_to(read(base), with_asset, check="none"),
    ):
        with pytest.raises((ChangedError, DamagedError)):
            use()
        rewrite(with_asset / name)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["delta-00001.safetensors", "assets/generation_config.json"])
def test_delta_that_changes_before_it_is_copied_is_not_published(
    with_asset: Path, base: Path, tmp_path: Path, name: str
) -> None:
    plan = delta.plan(base, with_asset, tmp_path / "out")
    plan.check()
    rewrite(with_asset / name)
    with pytest.raises(ChangedError, match=Path(name).name):
        run_conversion(plan.conversion)
    assert not (tmp_path / "out").exists()


def test_configuration_is_compared_when_it_is_read(
    with_asset: Path, base: Path, tmp_path: Path
) -> None:
    path = with_asset / "assets" / "config.json"
    content = path.read_text()
    path.write_text(content.replace('"eos_token_id": 3', '"eos_token_id": 4'))
    with pytest.raises(DamagedError, match="does not match its digest"):
        delta.plan(base, with_asset, tmp_path / "out")


def test_checkpoint_that_changes_while_it_is_compared_is_an_error(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = save(tmp_path / "new", trained(read(base), 1))
    add = DeltaMaker._add_payloads

    def add_and_rewrite(self: DeltaMaker, *arguments: Any) -> Any:
        added = add(self, *arguments)
        rewrite(new / "model.safetensors")
        return added

    monkeypatch.setattr(DeltaMaker, "_add_payloads", add_and_rewrite)
    with pytest.raises(ChangedError, match=r"model\.safetensors"):
        delta.make(base, new, tmp_path / "delta")
    assert not (tmp_path / "delta").exists()


def test_configuration_that_changes_before_it_is_stored_is_an_error(
    base: Path, tmp_path: Path
) -> None:
    new = save(tmp_path / "new", trained(read(base), 1))
    maker = DeltaMaker(base, new, tmp_path / "delta", DeltaOptions())
    rewrite(new / "config.json")
    with pytest.raises(ChangedError, match=r"config\.json"):
        maker.run(lambda _: None)
    assert not (tmp_path / "delta").exists()


def test_size_of_manifest_and_assets_is_bounded(
    with_asset: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = with_asset / "ckptctl.delta.json"
    os.truncate(manifest, 1 << 40)  # a hole takes no room
    with pytest.raises(UnsupportedError, match="JSON text is too large"):
        delta.verify(with_asset)
    shutil.rmtree(with_asset)
    delta.make(base, tmp_path / "with-asset", with_asset)
    asset = with_asset / "assets" / "generation_config.json"
    os.truncate(asset, 1 << 40)
    with manifest.open("r+") as file:
        content = json.load(file)
        content["files"]["assets/generation_config.json"]["size"] = 1 << 40
        del content["sha256"]
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        content["sha256"] = hashlib.sha256(text.encode()).hexdigest()
        file.seek(0)
        json.dump(content, file)
        file.truncate()
    with pytest.raises(DamagedError, match="larger than a configuration"):
        delta.verify(with_asset)
    monkeypatch.setattr(delta_files, "MAX_MANIFEST_BYTES", 1000)
    with pytest.raises(UnsupportedError, match="larger than readers accept"):
        delta.make(base, tmp_path / "with-asset", tmp_path / "too-large")
    assert not (tmp_path / "too-large").exists()


@pytest.mark.slow
def test_apply_killed_at_random_leaves_complete_or_none(tmp_path: Path) -> None:
    state, config = tiny_llama("llama3", hidden=512, vocab=8192, ffn=1536)
    save_hf(tmp_path / "base", state, config)
    new = {name: flip_bits(tensor, 0.01) for name, tensor in state.items()}
    save_hf(tmp_path / "new", new, config)
    delta.make(tmp_path / "base", tmp_path / "new", tmp_path / "delta")
    expected = {name: raw_bytes(tensor) for name, tensor in new.items()}

    def start(target: Path) -> subprocess.Popen[bytes]:
        words = ["delta", "apply", str(tmp_path / "base"), str(tmp_path / "delta"), str(target)]
        return subprocess.Popen([sys.executable, "-m", "ckptctl", *words, "-q"])

    began = time.monotonic()
    assert start(tmp_path / "whole").wait() == 0
    seconds, generator, killed = time.monotonic() - began, random.Random(0), 0
    for trial in range(10):
        target = tmp_path / f"out-{trial}"
        process = start(target)
        if trial:
            time.sleep(generator.uniform(0.4, 1.05) * seconds)
        else:
            while process.poll() is None and not list(tmp_path.glob(f".{target.name}.*")):
                time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        killed += process.wait() != 0
        if target.exists():
            assert {k: raw_bytes(v) for k, v in read(target).items()} == expected
        else:
            assert start(target).wait() == 0
    assert killed


PEAK = """
import sys
from ckptctl import delta
getattr(delta, sys.argv[1])(*sys.argv[2:], jobs=2)
with open("/proc/self/status") as status:
    print(next(line.split()[1] for line in status if line.startswith("VmHWM")))
"""


@pytest.mark.slow
def test_peak_memory_does_not_depend_on_the_size_of_tensors(tmp_path: Path) -> None:
    peaks: dict[str, list[int]] = {"make": [], "apply": []}
    for rows in (20_000, 160_000):
        folder = tmp_path / str(rows)
        old = torch.randn(rows, 1000).bfloat16()
        for name, tensor in (("old", old), ("new", flip_bits(old, 0.01))):
            (folder / name).mkdir(parents=True)
            save_file({"weight": tensor}, folder / name / "model.safetensors")
        for verb, names in (("make", ("old", "new", "delta")), ("apply", ("old", "delta", "out"))):
            done = subprocess.run(
                [sys.executable, "-c", PEAK, verb, *(str(folder / name) for name in names)],
                capture_output=True,
                text=True,
                check=True,
                env={**os.environ, "MALLOC_ARENA_MAX": "1"},
            )
            peaks[verb].append(int(done.stdout) * 1024)
    for small, large in peaks.values():
        assert large < small + 60_000_000, peaks


# ----------------------------------------------------------------------- a delta is no checkpoint


def test_delta_is_not_taken_for_a_checkpoint(made: Path, base: Path, tmp_path: Path) -> None:
    for path in (made, made / "delta-00001.safetensors"):
        actions: list[Callable[[], Any]] = [
            partial(ckptctl.inspect, path),
            partial(ckptctl.convert, path, tmp_path / "out", to="dcp"),
            partial(ckptctl.convert, path, tmp_path / "out", to="dcp", from_format="hf"),
            partial(ckptctl.diff, base, path),
        ]
        for action in actions:
            with pytest.raises(UnsupportedError, match="delta") as refused:
                action()
            assert "ckptctl delta apply BASE" in str(refused.value.hint)
    run = tmp_path / "run"
    shutil.copytree(base, run / "step-1")
    shutil.copytree(made, run / "step-2")
    assert [item.name for item in ckptctl.ls(run).checkpoints if item.verdict == "complete"] == [
        "step-1"
    ]
    ckptctl.prune(run, keep_last=1)
    assert (run / "step-1").is_dir() and (run / "step-2").is_dir()


def test_checkpoint_is_not_taken_for_a_delta(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a delta"):
        delta.apply(base, base, tmp_path / "out")
    with pytest.raises(UsageError, match="not a delta"):
        delta.verify(tmp_path)


def test_overwrite_only_replaces_a_delta(made: Path, base: Path, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="destination exists"):
        delta.make(base, tmp_path / "new", made)
    delta.make(base, base, made, overwrite=True)
    assert delta.verify(made).changed == 0
    (made / "delta-notes.txt").write_text("mine")
    for wrong in (base, tmp_path / "new", made):
        with pytest.raises(RefusedError):
            delta.make(base, tmp_path / "new", wrong, overwrite=True)
    assert (made / "delta-notes.txt").read_text() == "mine"
    with pytest.raises(RefusedError):
        delta.make(base, tmp_path / "new", base / "inside")


def test_later_layout_and_other_versions_are_refused(made: Path) -> None:
    path = made / "ckptctl.delta.json"
    path.write_text(path.read_text().replace("ckptctl.delta/1", "ckptctl.delta/2"))
    with pytest.raises(UnsupportedError, match="has the layout"):
        delta.verify(made)


# --------------------------------------------------------------------------- without zstandard


def test_deflate_is_used_without_zstandard_and_reading_zstd_is_an_error(
    made: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zstd, "MODULES", ())
    assert delta.make(base, tmp_path / "new", tmp_path / "other").compression == "deflate"
    delta.apply(base, tmp_path / "other", tmp_path / "out")
    require_equal(read(tmp_path / "out"), read(tmp_path / "new"))
    with pytest.raises(MissingPackageError, match="reading this checkpoint requires `zstandard`"):
        delta.apply(base, made, tmp_path / "out2")
    choices: list[dict[str, Any]] = [{"compression": "zstd"}, {"weight_version": 1}]
    for options in choices:
        with pytest.raises(MissingPackageError, match="writing this checkpoint requires `zstand"):
            delta.make(base, tmp_path / "new", tmp_path / "third", **options)
    assert not (tmp_path / "third").exists()


# ------------------------------------------------------------------------------ live tensors


def test_apply_to_changes_live_tensors_in_place(
    chain: tuple[Path, list[Path], list[State]],
) -> None:
    base, deltas, states = chain
    live = read(base)
    pointers = {name: tensor.data_ptr() for name, tensor in live.items()}
    names = delta.apply_to(live, deltas[0])
    assert set(names) <= live.keys()
    require_equal(live, states[0])
    with pytest.raises(RefusedError, match="already applied"):
        delta.apply_to(live, deltas[0])
    require_equal(live, states[0])
    delta.apply_to(live, deltas[1:10])
    require_equal(live, states[9])
    assert pointers == {name: tensor.data_ptr() for name, tensor in live.items()}
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.norm.weight"):
        live = {key: tensor.clone() for key, tensor in states[9].items()}
        live[name].view(-1)[0] += 1
        before = {key: tensor.clone() for key, tensor in live.items()}
        with pytest.raises(RefusedError, match="not those that the delta was made from"):
            delta.apply_to(live, deltas[10], check="all")
        require_equal(live, before)
    with pytest.raises(UsageError, match="unknown check"):
        delta.apply_to(live, deltas[10], check=True)  # type: ignore[arg-type]


def test_apply_to_maps_names_and_strided_views(
    chain: tuple[Path, list[Path], list[State]],
) -> None:
    """An engine that fuses projections passes views of its own tensors."""
    base, deltas, states = chain
    state = read(base)
    parts = [f"model.layers.0.self_attn.{key}_proj.weight" for key in "qkv"]
    fused = torch.cat([state[name] for name in parts])
    sizes = [len(state[name]) for name in parts]
    wide = torch.stack([state["model.norm.weight"], torch.zeros(64).bfloat16()], 1)
    live = {
        **{f"engine.{name}": tensor for name, tensor in state.items()},
        **{
            f"engine.{name}": view
            for name, view in zip(parts, torch.split(fused, sizes), strict=True)
        },
        "engine.model.norm.weight": torch.nn.Parameter(wide)[:, 0],
    }
    delta.apply_to(live, deltas[:3], names={name: f"engine.{name}" for name in state})
    require_equal({k.removeprefix("engine."): v.detach() for k, v in live.items()}, states[2])
    assert raw_bytes(fused) == b"".join(raw_bytes(states[2][name]) for name in parts)


def test_apply_to_changes_tensors_of_several_blocks(tmp_path: Path) -> None:
    old = {
        "bfloat16": (torch.randn(1_300, 1_000) * 0.02).bfloat16(),
        "complex128": torch.randn(150_000, dtype=torch.complex128),
        "transposed": torch.randn(700, 900),
    }
    new = {
        name: flip_bits(tensor, share)
        for (name, tensor), share in zip(old.items(), (0.001, 0.9, 0.05), strict=True)
    }
    save_torch(tmp_path / "old.pt", old)
    save_torch(tmp_path / "new.pt", new)
    delta.make(tmp_path / "old.pt", tmp_path / "new.pt", tmp_path / "delta")
    live = {name: tensor.clone() for name, tensor in old.items()}
    live["transposed"] = old["transposed"].t().contiguous().t()
    assert not live["transposed"].is_contiguous()
    delta.apply_to(live, tmp_path / "delta", check="none")
    require_equal(live, new)


def to_meta(state: State, config: dict[str, Any]) -> State:
    """Rename and reorder as ``convert_llama_weights_to_hf.py`` of transformers, backwards."""
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    names = {
        "self_attn.q_proj": "attention.wq",
        "self_attn.k_proj": "attention.wk",
        "self_attn.v_proj": "attention.wv",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "model.embed_tokens": "tok_embeddings",
        "lm_head": "output",
        "model.": "",
    }
    result = {}
    for name, tensor in state.items():
        for key, count in (("q_proj", heads), ("k_proj", groups)):
            if key in name:
                halves = tensor.view(count, 2, -1, tensor.shape[1])
                tensor = halves.transpose(1, 2).reshape(tensor.shape)
        for old, new in names.items():
            name = name.replace(old, new)
        result[name] = tensor.clone()
    return result


def to_megatron(state: State, config: dict[str, Any]) -> State:
    """Fuse as Megatron-Core does: for each group its queries, its key and its value."""
    groups = config["num_key_value_heads"]
    result = {
        "embedding.word_embeddings.weight": state["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": state["model.norm.weight"],
        "output_layer.weight": state["lm_head.weight"],
    }
    for number in range(config["num_hidden_layers"]):
        old, new = f"model.layers.{number}.", f"decoder.layers.{number}."
        rows = [
            state[f"{old}self_attn.{key}_proj.weight"].view(
                groups, -1, state["model.norm.weight"].shape[0]
            )
            for key in "qkv"
        ]
        result |= {
            f"{new}self_attention.linear_qkv.weight": torch.cat(rows, 1).flatten(0, 1),
            f"{new}self_attention.linear_qkv.layer_norm_weight": state[
                f"{old}input_layernorm.weight"
            ],
            f"{new}self_attention.linear_proj.weight": state[f"{old}self_attn.o_proj.weight"],
            f"{new}mlp.linear_fc1.weight": torch.cat(
                [state[f"{old}mlp.{key}_proj.weight"] for key in ("gate", "up")]
            ),
            f"{new}mlp.linear_fc1.layer_norm_weight": state[
                f"{old}post_attention_layernorm.weight"
            ],
            f"{new}mlp.linear_fc2.weight": state[f"{old}mlp.down_proj.weight"],
        }
    return {name: tensor.clone() for name, tensor in result.items()}


@pytest.mark.parametrize(
    ("layout", "to_layout"), [("meta", to_meta), ("mcore", to_megatron)], ids=["meta", "mcore"]
)
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
def test_apply_to_changes_tensors_of_another_layout(
    chain: tuple[Path, list[Path], list[State]],
    layout: str,
    to_layout: Callable[[State, dict[str, Any]], State],
    strided: bool,
) -> None:
    base, deltas, states = chain
    config = json.loads((base / "config.json").read_text())
    live = to_layout(read(base), config)
    if strided:  # parameters of an engine may be views, such as transposed ones
        live = {
            name: tensor.t().contiguous().t() if tensor.ndim == 2 else tensor
            for name, tensor in live.items()
        }
    pointers = {name: tensor.data_ptr() for name, tensor in live.items()}
    for check in get_args(Check):
        with pytest.raises(MappingError):
            delta.apply_to(live, deltas[0], check=check)
    delta.apply_to(live, deltas[:3], layout=layout, config=config, check="all")
    require_equal(live, to_layout(states[2], config))
    delta.apply_to(live, deltas[3], layout=layout, config=config, check="none")
    require_equal(live, to_layout(states[3], config))
    assert pointers == {name: tensor.data_ptr() for name, tensor in live.items()}
    with pytest.raises(RefusedError, match="already applied"):
        delta.apply_to(live, deltas[3], layout=layout, config=config)
    live.pop(next(name for name in live if "1" in name and ("wq" in name or "qkv" in name)))
    with pytest.raises(CkptError):
        delta.apply_to(live, deltas[4], layout=layout, config=config)
    wrong = {**config, "num_key_value_heads": config["num_attention_heads"]}
    with pytest.raises(CkptError) as contradiction:
        delta.apply_to(to_layout(states[3], config), deltas[4], layout=layout, config=wrong)
    assert "as `config`" in str(contradiction.value.hint)
    for options in ({"layout": layout, "names": {"a": "b"}}, {"config": config}):
        with pytest.raises(UsageError, match=r"cannot be combined|requires"):
            delta.apply_to(live, deltas[4], **options)


def test_apply_to_changes_rows_of_fused_tensors(
    chain: tuple[Path, list[Path], list[State]],
) -> None:
    base, deltas, states = chain
    fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ("gate_proj", "up_proj")}

    def fuse(state: State) -> State:
        live = {f"engine.{name}": tensor.clone() for name, tensor in state.items()}
        for module, parts in fused.items():
            for name in [name for name in live if f".{parts[0]}." in name]:
                rows = [live.pop(name.replace(parts[0], part)) for part in parts]
                live[name.replace(parts[0], module)] = torch.cat(rows)
        return live

    live = fuse(read(base))
    modules = {
        name.removeprefix("engine."): name for name in live if "qkv_proj" in name or "_up_" in name
    }
    names = {**modules, **{name: f"engine.{name}" for name in read(base)}}
    delta.apply_to(live, deltas[:2], names=names, fused=fused, check="all")
    require_equal(live, fuse(states[1]))
    name = "engine.model.layers.1.self_attn.qkv_proj.weight"
    for wrong in (live[name][:-1], live[name].float()):
        with pytest.raises(MappingError, match="another dtype or shape"):
            delta.apply_to({**live, name: wrong}, deltas[2], names=names, fused=fused)
    with pytest.raises(MappingError, match=r"changed tensors of the delta are missing"):
        delta.apply_to(live, deltas[2], names={name: names[name] for name in read(base)})
    with pytest.raises(MappingError, match=r"`names` has tensors that are not in") as unknown:
        delta.apply_to(live, deltas[2], names=names)
    assert f"{min(modules)}`" in str(unknown.value.why)
    require_equal(live, fuse(states[1]))


def test_apply_to_refuses_missing_and_cast_tensors(
    chain: tuple[Path, list[Path], list[State]],
) -> None:
    base, deltas, _ = chain
    live = read(base)
    norm = live.pop("model.norm.weight")
    with pytest.raises(MappingError, match="1 changed tensor of the delta is missing"):
        delta.apply_to(live, deltas[0])
    live["model.norm.weight"] = norm.float()
    with pytest.raises(MappingError, match="another dtype or shape"):
        delta.apply_to(live, deltas[0])
    require_equal({**live, "model.norm.weight": norm}, read(base))


def test_apply_to_changes_tensors_that_share_memory_once(tmp_path: Path) -> None:
    old = (torch.randn(300, 70) * 0.02).bfloat16()
    new = trained({"a": old}, 1)["a"]
    save_torch(tmp_path / "old.pt", {"a": old, "b": old.clone()})
    save_torch(tmp_path / "new.pt", {"a": new, "b": new.clone()})
    delta.make(tmp_path / "old.pt", tmp_path / "new.pt", tmp_path / "both")
    for check in get_args(Check):
        tied = old.clone()
        delta.apply_to({"a": tied, "b": tied}, tmp_path / "both", check=check)
        require_equal({"a": tied}, {"a": new})
    save_torch(tmp_path / "one.pt", {"a": new, "b": old})
    delta.make(tmp_path / "old.pt", tmp_path / "one.pt", tmp_path / "one")
    for check in get_args(Check):
        tied = old.clone()
        with pytest.raises(MappingError, match="share memory"):
            delta.apply_to({"a": tied, "b": tied}, tmp_path / "one", check=check)
        require_equal({"a": tied}, {"a": old})


def test_apply_to_checks_all_tensors_but_missing_tied_ones(tmp_path: Path) -> None:
    old = (torch.randn(300, 70) * 0.02).bfloat16()
    new = trained({"a": old}, 1)["a"]
    for name, tensor in (("old", old), ("new", new)):
        save_torch(tmp_path / f"{name}.pt", {"a": tensor, "b": tensor})
    delta.make(tmp_path / "old.pt", tmp_path / "new.pt", tmp_path / "delta")
    live = {"a": old.clone()}
    delta.apply_to(live, tmp_path / "delta", check="all")
    require_equal(live, {"a": new})
    with pytest.raises(MappingError, match="missing"):
        delta.apply_to({}, tmp_path / "delta", check="all")


def test_apply_to_refuses_a_config_or_fused_modules_of_another_type(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a mapping"):
        delta.apply_to({}, tmp_path, layout="mcore", config="config.json")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="`fused` is a string"):
        delta.apply_to({}, tmp_path, fused={"qkv_proj": "q_proj"})
    wrong: Any
    for wrong in (["a"], "a", torch.nn.Linear(1, 1), None):
        with pytest.raises(UsageError, match="`tensors` is not a mapping"):
            delta.apply_to(wrong, tmp_path)
    for options in ({"names": ["a"]}, {"fused": ["a"]}):
        wrong = options
        with pytest.raises(UsageError, match="is not a mapping"):
            delta.apply_to({}, tmp_path, **wrong)


def test_apply_to_refuses_what_it_cannot_change(
    chain: tuple[Path, list[Path], list[State]],
) -> None:
    base, deltas, _ = chain
    live = read(base)
    name = next(key for key in delta.apply_to(read(base), deltas[0]) if live[key].dim() == 1)
    wrong: Any
    for wrong in (live[name].float().numpy(), None, live[name][:1].expand(live[name].shape)):
        with pytest.raises(MappingError, match=r"is not a tensor|share memory"):
            delta.apply_to({**live, name: wrong}, deltas[0], check="none")
        with pytest.raises(MappingError):
            delta.apply_to({**live, name: wrong}, deltas[0], check="none", layout="hf")
    require_equal(live, read(base))


def test_apply_to_refuses_distributed_and_meta_tensors(
    chain: tuple[Path, list[Path], list[State]],
) -> None:
    base, deltas, _ = chain
    live = read(base)
    name = delta.apply_to(read(base), deltas[0])[0]
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for tensor in (distribute_tensor(live[name], mesh, [Shard(0)]), live[name].to("meta")):
            with pytest.raises(MappingError, match=r"is a DTensor|has no data"):
                delta.apply_to({**live, name: tensor}, deltas[0], check="none")
    finally:
        torch.distributed.destroy_process_group()
    require_equal(live, read(base))


def test_apply_to_refuses_a_delta_that_ties_different_tensors(tmp_path: Path) -> None:
    a, b = ((torch.randn(300, 70) * 0.02).bfloat16() for _ in range(2))
    moved = trained({"a": a}, 1)["a"]
    save_torch(tmp_path / "old.pt", {"a": a, "b": b})
    for name, shared in (("tied", a), ("moved", moved)):
        save_torch(tmp_path / f"{name}.pt", {"a": shared, "b": shared})
        delta.make(tmp_path / "old.pt", tmp_path / f"{name}.pt", tmp_path / name)
        live = {"a": a.clone(), "b": b.clone()}
        with pytest.raises(MappingError, match="ties tensors"):
            delta.apply_to(live, tmp_path / name, check="none")
        require_equal(live, {"a": a, "b": b})
    # Tensors that were equal before can be tied, whether or not they share memory in the engine.
    save_torch(tmp_path / "equal.pt", {"a": a, "b": a.clone()})
    delta.make(tmp_path / "equal.pt", tmp_path / "moved.pt", tmp_path / "equal")
    live = {"a": a.clone(), "b": a.clone()}
    delta.apply_to(live, tmp_path / "equal")
    require_equal(live, {"a": moved, "b": moved})


# ------------------------------------------------------------------------------------ program


def test_command_line_makes_verifies_squashes_and_applies(tmp_path: Path, base: Path) -> None:
    one = trained(read(base), 1)
    two = trained(one, 2)
    save(tmp_path / "one", one)
    save(tmp_path / "two", two)

    def run(*words: object) -> str:
        done = CliRunner().invoke(app, [str(word) for word in words], prog_name="ckptctl")
        assert done.exit_code == 0, done.output
        return done.stdout

    run("delta", "make", base, tmp_path / "one", tmp_path / "d1")
    run("delta", "make", tmp_path / "one", tmp_path / "two", tmp_path / "d2")
    run("delta", "verify", tmp_path / "d1", tmp_path / "d2", "--base", base)
    run("delta", "squash", tmp_path / "d1", tmp_path / "d2", tmp_path / "d12")
    run("delta", "apply", base, tmp_path / "d1", tmp_path / "d2", tmp_path / "out", "--to", "dcp")
    found = json.loads(run("delta", "apply", base, tmp_path / "d12", tmp_path / "hf", "--json"))
    assert found["schema"] == "ckptctl.delta-apply/1" and found["deltas"]
    require_equal(read(tmp_path / "hf"), two)
    ckptctl.convert(tmp_path / "out", tmp_path / "back", to="hf", assets=base)
    assert not differences(read(tmp_path / "back"), two)
    before = sorted(path.name for path in tmp_path.iterdir())
    run("delta", "apply", base, tmp_path / "d1", tmp_path / "dry", "--dry-run")
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    wrong = CliRunner().invoke(app, ["delta"], prog_name="ckptctl")
    assert wrong.exit_code == 2 and "make, apply, verify, squash" in wrong.output
    for words in (("delta", "--help"), ("delta", "-h"), ("help", "delta")):
        lines = run(*words).splitlines()
        assert lines[0] == "Usage: ckptctl delta COMMAND ..."
        assert [line.split()[1] for line in lines if line.startswith("  delta ")] == [
            *("make", "apply", "verify", "squash")
        ]


# ------------------------------------------------------- updates as slime and SGLang publish them


def pull(local: State, folder: Path) -> State:
    """Apply an update as SGLang's ``/pull_weights`` does: XOR of bytes, then Adler-32."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {
        "version": "000001",
        "base_version": "000000",
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": "adler32",
    }
    result = dict(local)
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "np") as opened:
            checksums = opened.metadata()
            for name in opened.keys():  # noqa: SIM118
                assert index["weight_map"][name] == file.name
                stream = zstandard.ZstdDecompressor().stream_reader(opened.get_tensor(name))
                xor = np.frombuffer(stream.read(), np.uint8)
                new = np.frombuffer(raw_bytes(local[name]), np.uint8) ^ xor
                assert f"{zlib.adler32(new.tobytes()):08x}" == checksums[name]
                words = torch.from_numpy(new.copy()).view(local[name].dtype)
                result[name] = words.view(local[name].shape)
    return result


def test_weight_version_is_what_sglang_pulls(tmp_path: Path, base: Path) -> None:
    new = trained(read(base), 1, 1e-3)
    save(tmp_path / "new", new)
    out = tmp_path / "weight_v000001"
    delta.make(base, tmp_path / "new", out, weight_version=1)
    require_equal(pull(read(base), out), new)
    for action in (
        lambda: ckptctl.convert(out, tmp_path / "x", to="dcp"),
        lambda: ckptctl.inspect(out),
    ):
        with pytest.raises(UnsupportedError, match="published update"):
            action()
    delta.make(base, out, tmp_path / "delta")
    delta.make(base, tmp_path / "new", tmp_path / "direct")
    same = [(tmp_path / name / "ckptctl.delta.json").read_text() for name in ("delta", "direct")]
    assert same[0] == same[1]
    torch.save({"state": {}}, base / "optimizer.pt")
    assert delta.make(base, out, tmp_path / "again").left_out == {}
    with pytest.raises(RefusedError, match="does not match the base"):
        delta.make(tmp_path / "new", out, tmp_path / "wrong")
    published = {item.name: item.read_bytes() for item in out.iterdir()}
    with pytest.raises(RefusedError, match="destination exists"):
        delta.make(base, tmp_path / "new", out, weight_version=1)
    delta.make(base, tmp_path / "new", out, weight_version=1, overwrite=True)
    assert {item.name: item.read_bytes() for item in out.iterdir()} == published
    (out / "notes.txt").touch()
    with pytest.raises(RefusedError, match="is not a delta and is not overwritten"):
        delta.make(base, tmp_path / "new", out, weight_version=1, overwrite=True)
    (out / "notes.txt").unlink()
    with pytest.raises(MappingError, match="requires the same tensors"):
        delta.make(base, tmp_path / "new", tmp_path / "v2", weight_version=2, dtype="fp32")
    with pytest.raises(UsageError, match="does not apply to a weight update"):
        delta.make(base, out, tmp_path / "wrong", dtype="fp32")
    index = out / "model.safetensors.index.json"
    emptied = json.loads(index.read_text()) | {"weight_map": {}}
    listed = index.read_text()
    index.write_text(json.dumps(emptied))
    with pytest.raises(DamagedError, match="does not list `model-"):
        delta.make(base, out, tmp_path / "wrong")
    index.write_text(listed)
    file = next(out.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-20] ^= 4
    file.write_bytes(bytes(content))
    with pytest.raises(CkptError):
        delta.make(base, out, tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


def test_weight_version_of_a_tied_tensor_is_refused(tmp_path: Path) -> None:
    """Its change would also change the other tensor, which the update does not state."""
    old = torch.randn(300, 7)
    save_torch(tmp_path / "untied.pt", {"a": old, "b": old.clone()})
    save_torch(tmp_path / "new.pt", {"a": old, "b": old + 1})
    save_torch(tmp_path / "tied.pt", {"a": old, "b": old})
    out = tmp_path / "weight_v000001"
    assert delta.make(
        tmp_path / "untied.pt", tmp_path / "new.pt", out, weight_version=1
    ).changed == ("b",)
    with pytest.raises(MappingError, match="tied in the base"):
        delta.make(tmp_path / "tied.pt", out, tmp_path / "delta")
