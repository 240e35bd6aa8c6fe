import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckptctl
from ckptctl.catalog import Box, Extent, TensorEntry
from ckptctl.conversion.contents import build_output_tensors, choose_cast_dtype, find_main_dtype
from ckptctl.errors import UnsupportedError
from ckptctl.planner.mapping.mapped import ComposedTensor
from tests.checkpoints import save_torch, tiny_llama


def entry(name, dtype="bfloat16"):
    return TensorEntry(name, dtype, (4,), (Extent(Box((0,), (4,)), "f", 0, 8),), (name,))


def mapped(name, logical):
    return replace(ComposedTensor.from_unchanged(name, logical, (4,)), key=name)


def planned(entries, tensors, **options):
    placed = {item.key: (item.key,) for item in tensors}
    options = {"dtype": None, "pinned": (), "aliases": True, **options}
    return build_output_tensors({item.key: item for item in tensors}, entries, placed, **options)


def test_cast_changes_only_floats_and_skips_pinned_tensors():
    entries = {"w": entry("w"), "bias": entry("bias", "float32"), "n": entry("n", "int64")}
    tensors = [mapped("w", "w.0"), mapped("bias", "router_bias.0"), mapped("n", "n")]
    found = planned(entries, tensors, dtype="float16", pinned=("router_bias",))
    assert [tensor.dtype for tensor in found] == ["float16", "float32", "int64"]


def test_scale_dtype_is_not_cast():
    assert choose_cast_dtype("float8_e8m0fnu", "float32") == "float8_e8m0fnu"
    assert choose_cast_dtype("float8_e4m3fn", "float32") == "float32"


def test_aliases_stay_shared_or_are_written_twice():
    entries = {"a": entry("a"), "b": TensorEntry("b", "bfloat16", (4,), (), ("b",), alias_of="a")}
    tensors = [mapped("a", "a"), mapped("b", "b")]
    assert [t.alias_of for t in planned(entries, tensors)] == [None, "a"]
    assert [t.alias_of for t in planned(entries, tensors, aliases=False)] == [None, None]


def test_hf_output_duplicates_ties_unknown_to_transformers(tmp_path: Path) -> None:
    state, config = tiny_llama("llama3", tied=True)
    one, other = (f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(2))
    source = tmp_path / "source"
    save_torch(source / "pytorch_model.bin", {**state, other: state[one]})
    (source / "config.json").write_text(json.dumps(config))
    ckptctl.convert(source, tmp_path / "hf", to="hf")
    assert {one, other} < load_file(tmp_path / "hf" / "model.safetensors").keys()


def test_main_dtype_has_most_bytes():
    entries = {"a": entry("a"), "b": entry("b", "float32"), "n": entry("n", "int64")}
    tensors = [mapped(name, name) for name in entries]
    assert find_main_dtype(planned(entries, tensors)) == "float32"
    assert find_main_dtype(planned({"n": entries["n"]}, [tensors[2]])) is None


@pytest.mark.parametrize("to", ["hf", "dcp", "torch"])
def test_single_tensor_file_is_unsupported(tmp_path: Path, to: str) -> None:
    torch.save(torch.tensor(2.0), tmp_path / "step.pt")
    with pytest.raises(UnsupportedError, match="a single tensor"):
        ckptctl.plan_conversion(tmp_path / "step.pt", tmp_path / "out", to=to)
