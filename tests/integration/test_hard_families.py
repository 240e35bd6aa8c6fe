"""Mapping of checkpoints that are shared, tied, partial or resized in ways that could go wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl
from ckptctl.errors import CkptError, MappingError, RefusedError, UsageError
from tests.checkpoints.golden import Golden, State, family_of

VISION = "language_model.model.layers."


def converted(source: Path, out: Path, **options: Any) -> State:
    ckptctl.convert(source, out, to="torch", **options)
    found: State = torch.load(out, weights_only=True)
    return found


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.numpy().tobytes() == other.numpy().tobytes()


@pytest.mark.parametrize("shared", ["q", "k", "v", "qk", "qkv"])
def test_fusing_shared_parts_keeps_other_layers_apart(tmp_path: Path, shared: str) -> None:
    """One part that two layers share does not make their fused tensors one."""
    hf = Golden.read("phi3").save(tmp_path / "hf")
    state = converted(hf, tmp_path / "tune.pt", to_layout="torchtune")
    key = "layers.{}.attn.{}_proj.weight"
    for part in shared:
        state[key.format(1, part)] = state[key.format(0, part)]
    torch.save(state, tmp_path / "shared.pt")
    found = converted(tmp_path / "shared.pt", tmp_path / "out.pt", to_layout="hf", assets=hf)
    for layer in (0, 1):
        whole = torch.cat([state[key.format(layer, part)] for part in "qkv"])
        assert same(found[f"model.layers.{layer}.self_attn.qkv_proj.weight"], whole)
    one, other = (found[f"model.layers.{n}.self_attn.qkv_proj.weight"] for n in (0, 1))
    assert (one.data_ptr() == other.data_ptr()) == (shared == "qkv")


@pytest.mark.parametrize("chosen", [["4.*"], ["3.*", "5.*"]])
def test_partial_conversion_keeps_layer_numbers(tmp_path: Path, chosen: list[str]) -> None:
    """Layers 1 and 4 attend to pictures: layer 4 is the second one of them, 5 the fourth other."""
    source = Golden.read("llama3_vision").save(tmp_path / "hf")
    whole = converted(source, tmp_path / "whole.pt", to_layout="meta")
    include = [VISION + pattern for pattern in chosen]
    part = converted(source, tmp_path / "part.pt", to_layout="meta", include=include)
    assert part and all(same(part[key], whole[key]) for key in part)


@pytest.mark.parametrize(("row", "column"), [(0, 0), (2, 0), (2, -1)])
def test_diff_reports_irregular_tile_embeddings(tmp_path: Path, row: int, column: int) -> None:
    """Rows for aspect ratios repeat the tiles of others, and are zero behind them."""
    golden = Golden.read("llama3_vision")
    converted(golden.save(tmp_path / "hf"), tmp_path / "meta.pt", to_layout="meta")
    state = golden.state()
    name = "vision_model.pre_tile_positional_embedding.embedding.weight"
    state[name] = state[name].clone()
    state[name][row, column] += 1
    torch.save(state, tmp_path / "other.pt")
    found = ckptctl.diff(tmp_path / "meta.pt", tmp_path / "other.pt", model_type="llama3_vision")
    assert not found.same and found.b.only == (name,)


def test_cross_attention_layers_contradicting_config_are_an_error(tmp_path: Path) -> None:
    source = Golden.read("llama3_vision").save(tmp_path / "hf")
    config = json.loads((source / "config.json").read_text())
    config["text_config"]["cross_attention_layers"] = [1, 3]
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(MappingError, match="disagree on which layers") as caught:
        converted(source, tmp_path / "out.pt", to_layout="torchtune")
    assert caught.value.why == "it lists [1, 3], but the tensor names show [1, 4]"


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_untie_writes_both_embeddings(tmp_path: Path, to: str, nested: bool) -> None:
    golden = Golden.read("qwen2.tied")
    source = golden.save(tmp_path / "hf")
    if nested:
        torch.save({"model": golden.state()}, tmp_path / "in.pt")
    first = tmp_path / "in.pt" if nested else source
    options: dict[str, Any] = {"assets": source, "model_type": family_of("qwen2.tied")}
    ckptctl.convert(first, tmp_path / "mid", to=to, untie=True, **options)
    found = converted(tmp_path / "mid", tmp_path / "out.pt")
    assert same(found["lm_head.weight"], found["model.embed_tokens.weight"])
    assert len(found) == len(golden.tensors) + 1


def test_include_selects_one_of_untied_pair(tmp_path: Path) -> None:
    golden = Golden.read("qwen2.tied")
    source = golden.save(tmp_path / "hf")
    state = golden.state()
    state["lm_head.weight"] = torch.ones_like(state["model.embed_tokens.weight"])
    torch.save(state, tmp_path / "in.pt")
    found = converted(
        tmp_path / "in.pt",
        tmp_path / "out.pt",
        to_layout="torchtune",
        untie=True,
        include=["lm_head*"],
        assets=source,
    )
    assert list(found) == ["output.weight"] and found["output.weight"].eq(1).all()


@pytest.mark.parametrize("layout", ["hf", "torchtune"])
@pytest.mark.parametrize("size", [120, 136])
def test_vocab_size_with_optimizer_state_is_refused(tmp_path: Path, layout: str, size: int) -> None:
    golden = Golden.read("llama3")
    source = golden.save(tmp_path / "hf")
    moments = {key: {"exp_avg": value * 0.5} for key, value in golden.state().items()}
    torch.save({"model": golden.state(), "optimizer": {"state": moments}}, tmp_path / "in.pt")
    options: dict[str, Any] = {"to_layout": layout, "vocab_size": size, "assets": source}
    with pytest.raises(RefusedError, match="another vocabulary size"):
        converted(tmp_path / "in.pt", tmp_path / "out.pt", only="all", **options)
    assert converted(tmp_path / "in.pt", tmp_path / "out.pt", **options)


@pytest.mark.parametrize("size", [-5, 0, 1 << 33, 1 << 70])
def test_invalid_vocab_size_is_a_usage_error(tmp_path: Path, size: int) -> None:
    source = Golden.read("llama3").save(tmp_path / "hf")
    with pytest.raises(UsageError, match=r"vocab.*size|is not a positive number") as caught:
        converted(source, tmp_path / "out.pt", to_layout="torchtune", vocab_size=size)
    assert "vocab" in f"{caught.value.what} {caught.value.where}"


def test_stacking_experts_of_mixed_dtypes_needs_cast_first(tmp_path: Path) -> None:
    """What the message tells the user to do works."""
    golden = Golden.read("mixtral")
    source = golden.save(tmp_path / "hf")
    state = golden.state()
    key = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
    state[key] = state[key].half()
    torch.save(state, tmp_path / "in.pt")
    options: dict[str, Any] = {"dtype": "bf16", "assets": source, "allow_overflow": True}
    with pytest.raises(CkptError, match="different dtypes") as caught:
        converted(tmp_path / "in.pt", tmp_path / "out.pt", to_layout="hf-v5", **options)
    assert "in the same layout" in str(caught.value.hint)
    converted(tmp_path / "in.pt", tmp_path / "alike.pt", **options)
    done = converted(tmp_path / "alike.pt", tmp_path / "o.pt", to_layout="hf-v5", assets=source)
    assert done["model.layers.0.mlp.experts.gate_up_proj"].dtype == torch.bfloat16


def test_untie_without_model_type_needs_shared_tensors(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(3)}, tmp_path / "in.pt")
    with pytest.raises(UsageError, match="`untie=True` requires a known model type"):
        converted(tmp_path / "in.pt", tmp_path / "out.pt", untie=True)
    one = torch.zeros(3)
    torch.save({"a": one, "b": one}, tmp_path / "shared.pt")
    found = converted(tmp_path / "shared.pt", tmp_path / "out.pt", untie=True)
    assert found["a"].data_ptr() != found["b"].data_ptr()
