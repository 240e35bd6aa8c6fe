"""Model-parallel shards with tensors that are fused in each rank: Llama 4 in Meta's format."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl
from ckptctl import formats
from ckptctl.catalog import Box
from ckptctl.errors import CkptError, UnsupportedError
from ckptctl.formats.base import ReadOptions
from ckptctl.planner.boxes import compute_coverage
from tests.checkpoints import save_hf
from tests.sweeps import one_in

D, F, M, H, K, E, X, V = 32, 24, 16, 8, 2, 4, 4, 48
PARAMS: dict[str, Any] = {
    "dim": D,
    "n_layers": 2,
    "n_heads": H,
    "n_kv_heads": K,
    "vocab_size": V,
    "norm_eps": 1e-5,
    "moe_args": {"num_experts": X},
}
State = dict[str, torch.Tensor]


def hf() -> State:
    """Return a Llama 4 of a dense layer and one with experts."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (V, D),
        "model.norm.weight": (D,),
        "lm_head.weight": (V, D),
    }
    for layer in range(2):
        at = f"model.layers.{layer}."
        shapes |= {
            at + "self_attn.q_proj.weight": (H * E, D),
            at + "self_attn.k_proj.weight": (K * E, D),
            at + "self_attn.v_proj.weight": (K * E, D),
            at + "self_attn.o_proj.weight": (D, H * E),
            at + "input_layernorm.weight": (D,),
            at + "post_attention_layernorm.weight": (D,),
        }
    at = "model.layers.0.feed_forward."
    shapes |= {at + "gate_proj.weight": (F, D), at + "up_proj.weight": (F, D)}
    shapes |= {at + "down_proj.weight": (D, F)}
    at = "model.layers.1.feed_forward."
    shapes |= {
        at + "router.weight": (X, D),
        at + "experts.gate_up_proj": (X, D, 2 * M),
        at + "experts.down_proj": (X, M, D),
        at + "shared_expert.gate_proj.weight": (M, D),
        at + "shared_expert.up_proj.weight": (M, D),
        at + "shared_expert.down_proj.weight": (D, M),
    }
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def shard(state: State, rank: int, ranks: int) -> State:
    """Return what rank *rank* of Meta's Llama 4 holds, written from its modules."""

    def rows(name: str) -> torch.Tensor:
        return state[name].chunk(ranks)[rank]

    def columns(name: str) -> torch.Tensor:
        return state[name].chunk(ranks, -1)[rank]

    def heads(name: str) -> torch.Tensor:
        count = max(K, ranks)
        value = state[name].view(K, E, D).repeat_interleave(count // K, 0)
        return value.chunk(ranks)[rank].reshape(-1, D)

    found = {
        "tok_embeddings.weight": rows("model.embed_tokens.weight"),
        "norm.weight": state["model.norm.weight"],
        "output.weight": rows("lm_head.weight"),
    }
    for layer in range(2):
        at, to = f"model.layers.{layer}.", f"layers.{layer}."
        q = rows(at + "self_attn.q_proj.weight")
        k, v = (heads(f"{at}self_attn.{name}_proj.weight") for name in "kv")
        found[to + "attention.wqkv.weight"] = torch.cat([q, k, v])
        found[to + "attention.wo.weight"] = columns(at + "self_attn.o_proj.weight")
        found[to + "attention.wqkv.layer_norm_weight"] = state[at + "input_layernorm.weight"]
        norm = "mlp.layer_norm_weight" if layer == 0 else "norm.weight"
        found[f"{to}feed_forward.{norm}"] = state[at + "post_attention_layernorm.weight"]
    at, to = "model.layers.0.feed_forward.", "layers.0.feed_forward.mlp."
    gate, up = rows(at + "gate_proj.weight"), rows(at + "up_proj.weight")
    found[to + "fc1_weight"] = torch.cat([gate, up])
    found[to + "fc2_weight"] = columns(at + "down_proj.weight")
    at, to = "model.layers.1.feed_forward.", "layers.1.feed_forward."
    gate, up = state[at + "experts.gate_up_proj"].chunk(2, -1)
    down = state[at + "experts.down_proj"].chunk(ranks, 1)[rank]
    found |= {
        to + "router_DE": state[at + "router.weight"].T,
        to + "experts.moe_w_in_eD_F": gate.chunk(ranks, -1)[rank].reshape(X * D, -1),
        to + "experts.moe_w_swiglu_eD_F": up.chunk(ranks, -1)[rank].reshape(X * D, -1),
        to + "experts.moe_w_out_eF_D": down.reshape(-1, D),
        to + "w_in_shared_FD.weight": rows(at + "shared_expert.gate_proj.weight"),
        to + "w_swiglu_FD.weight": rows(at + "shared_expert.up_proj.weight"),
        to + "w_out_shared_DF.weight": columns(at + "shared_expert.down_proj.weight"),
    }
    return {name: value.contiguous().clone() for name, value in found.items()}


def meta(folder: Path, ranks: int, **extra: object) -> Path:
    """Write Meta's files of :func:`hf` with torch alone."""
    folder.mkdir()
    for rank in range(ranks):
        held = shard(hf(), rank, ranks) | extra
        torch.save(held, folder / f"consolidated.{rank:02d}.pth")
    params = PARAMS | {"n_kv_heads": max(K, ranks)}
    (folder / "params.json").write_text(json.dumps(params))
    return folder


def shards(folder: Path) -> list[State]:
    return [torch.load(file, weights_only=True) for file in sorted(folder.glob("*.pth"))]


def same(found: State, expected: State) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], value) for name, value in expected.items()
    )


@pytest.fixture
def source(tmp_path: Path) -> Path:
    config = {
        "model_type": "llama4_text",
        "num_attention_heads": H,
        "num_key_value_heads": K,
        "head_dim": E,
        "hidden_size": D,
        "num_local_experts": X,
        "vocab_size": V,
        "num_hidden_layers": 2,
        "interleave_moe_layer_step": 2,
        "intermediate_size": M,
        "intermediate_size_mlp": F,
    }
    return save_hf(tmp_path / "hf", hf(), config)


@pytest.fixture
def assets(tmp_path: Path) -> Path:
    folder = tmp_path / "assets"
    folder.mkdir()
    (folder / "params.json").write_text(json.dumps(PARAMS))
    return folder


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_meta_shards_match_reference_sharding(
    tmp_path: Path, source: Path, assets: Path, ranks: int
) -> None:
    out = tmp_path / "out"
    ckptctl.convert(source, out, to="meta", mp=ranks, assets=assets, verify=True)
    found = shards(out)
    assert len(found) == ranks
    for rank, held in enumerate(found):
        assert same(held, shard(hf(), rank, ranks))
    stated = json.loads((out / "params.json").read_text())
    assert stated == PARAMS | {"n_kv_heads": max(K, ranks)}


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_meta_shards_convert_to_hf_layout(tmp_path: Path, ranks: int) -> None:
    given = meta(tmp_path / "meta", ranks)
    out = tmp_path / "out.pt"
    ckptctl.convert(given, out, to="torch", to_layout="hf")
    assert same(torch.load(out, weights_only=True), hf())


def test_single_kv_head_shards_convert_to_hf_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each part of a rank's tensor is as large as the whole keys, or the whole values."""
    monkeypatch.setattr(f"{__name__}.K", 1)
    given = meta(tmp_path / "meta", 4)
    (given / "config.json").write_text(json.dumps({"num_key_value_heads": 1}))
    out = tmp_path / "out.pt"
    ckptctl.convert(given, out, to="torch", to_layout="hf", model_type="llama4_text")
    assert same(torch.load(out, weights_only=True), hf())


@pytest.mark.parametrize("ranks", [2, 8])
def test_planned_boxes_cover_each_tensor_exactly(tmp_path: Path, ranks: int) -> None:
    plan = ckptctl.plan_conversion(meta(tmp_path / "in", 1), tmp_path / "out", to="meta", mp=ranks)
    for copy in plan.plan.transfers:
        boxes = dict.fromkeys(Box(target.start, target.sizes) for target in copy.targets)
        assert compute_coverage(copy.tensor.shape, list(boxes)).is_exact, copy.name
        held = sum(math.prod(axis.size for axis in part.axes) for part in copy.tensor.parts)
        assert held == math.prod(copy.tensor.shape), copy.name


@pytest.mark.parametrize(("before", "after"), one_in(3, [(1, 4), (2, 4), (4, 2), (4, 8), (8, 1)]))
def test_meta_shards_are_resharded(tmp_path: Path, before: int, after: int) -> None:
    given = meta(tmp_path / "meta", before)
    out = tmp_path / "out"
    ckptctl.convert(given, out, to="meta", mp=after, verify=True)
    for rank, held in enumerate(shards(out)):
        assert same(held, shard(hf(), rank, after))
    found = formats.open_checkpoint(out)
    assert found.tensors["layers.0.attention.wqkv.weight"].shape == ((H + 2 * K) * E, D)
    assert found.documents["params.json"]["n_kv_heads"] == K


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_leftovers_are_dropped_by_name(tmp_path: Path, ranks: int) -> None:
    names = {
        "rope.freqs": torch.ones(2),
        "layers.1.feed_forward.running_gate_stats_3E": torch.ones(3, X),
        "layers.0.attention.wo._extra_state": io.BytesIO(b"os.system('touch here')"),
    }
    given = meta(tmp_path / "meta", ranks, **names)
    done = ckptctl.convert(given, tmp_path / "out.pt", to="torch", to_layout="hf")
    assert same(torch.load(tmp_path / "out.pt", weights_only=True), hf())
    gone = done.plan.dropped.keys() | done.plan.left_out.keys()
    assert gone == names.keys()


def test_contradictory_repeated_kv_heads_are_refused(tmp_path: Path) -> None:
    given = meta(tmp_path / "meta", 4)
    (given / "config.json").write_text(json.dumps({"num_key_value_heads": K}))
    held = shards(given)[1]
    held["layers.0.attention.wqkv.weight"][-1] += 1
    torch.save(held, given / "consolidated.01.pth")
    with pytest.raises(UnsupportedError, match="wqkv"):
        formats.open_checkpoint(given, options=ReadOptions(model_type="llama4_text"))


def test_config_that_cannot_be_generated_is_an_error(tmp_path: Path, source: Path) -> None:
    """Neither file says all that the other one has to: better none than a wrong one."""
    for given, target in ((source, "meta"), (meta(tmp_path / "meta", 2), "hf")):
        with pytest.raises(CkptError, match="cannot generate") as caught:
            ckptctl.convert(given, tmp_path / "out", to=target)
        assert "assets=DIR" in str(caught.value.hint)


def test_experts_not_divisible_by_ranks_are_an_error(
    tmp_path: Path, source: Path, assets: Path
) -> None:
    with pytest.raises(CkptError, match="cannot be divided among 3"):
        ckptctl.convert(source, tmp_path / "out", to="meta", mp=3, assets=assets)


def test_different_statistics_across_ranks_are_noted(tmp_path: Path) -> None:
    given = meta(tmp_path / "meta", 2, **{"rope.freqs": torch.ones(2)})
    held = shards(given)[1] | {"rope.freqs": torch.zeros(2)}
    torch.save(held, given / "consolidated.01.pth")
    found = formats.open_checkpoint(given)
    assert any("rope.freqs" in note for note in found.notes)


def test_duplicated_shard_file_is_noted(tmp_path: Path) -> None:
    given = meta(tmp_path / "meta", 2)
    assert not formats.open_checkpoint(given).notes
    (given / "consolidated.01.pth").write_bytes((given / "consolidated.00.pth").read_bytes())
    found = formats.open_checkpoint(given)
    assert any("`consolidated.01.pth` records the same" in note for note in found.notes)
