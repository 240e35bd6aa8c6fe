"""Optimizer state by ranges of buffers, laid out here as Megatron's distributed optimizer does."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl
from ckptctl import formats
from ckptctl.errors import RefusedError
from ckptctl.formats.mcore.buckets import split_flat_range
from tests.checkpoints.mcore import write

TENSOR, STAGES, DATA, LAYERS, D, F, V = 2, 2, 3, 4, 10, 14, 24
LAYER = {
    "self_attention.linear_proj.weight": ((D, 8), 1),
    "self_attention.linear_qkv.layer_norm_weight": ((D,), None),
    "self_attention.linear_qkv.weight": ((12, D), 0),
    "self_attention.q_layernorm.weight": ((4,), None),
    "self_attention.k_layernorm.weight": ((4,), None),
    "mlp.linear_fc1.layer_norm_weight": ((D,), None),
    "mlp.linear_fc1.weight": ((2 * F, D), "gated"),
    "mlp.linear_fc2.weight": ((D, F), 1),
}
"""Shape and sharded dimension of each parameter, in the order of Transformer Engine's modules."""
STATES = ("param", "exp_avg", "exp_avg_sq")
Shards = dict[str, list[torch.Tensor]]


def stage_parameters(stage: int) -> Iterator[tuple[str, tuple[int, ...], Any]]:
    if stage == 0:
        yield "embedding.word_embeddings.weight", (V, D), 0
    for layer in range(stage * LAYERS // STAGES, (stage + 1) * LAYERS // STAGES):
        for name, (shape, axis) in LAYER.items():
            yield f"decoder.layers.{layer}.{name}", shape, axis
    if stage == STAGES - 1:
        yield "decoder.final_layernorm.weight", (D,), None
        yield "output_layer.weight", (V, D), 0


def shard(tensor: torch.Tensor, axis: Any, rank: int) -> torch.Tensor:
    if axis is None:
        return tensor
    if axis == "gated":
        return torch.cat([half.chunk(TENSOR)[rank] for half in tensor.chunk(2)])
    return tensor.chunk(TENSOR, axis)[rank]


def write_run(
    folder: Path, *, swapped: bool = False, other_master: bool = False
) -> tuple[Path, dict[str, torch.Tensor]]:
    """Write a run of TENSOR x STAGES x DATA ranks; return it and the state of each parameter."""
    generator = torch.Generator().manual_seed(3)
    expected: dict[str, torch.Tensor] = {}
    saved: dict[str, torch.Tensor] = {}
    cuts: dict[str, tuple[int, ...]] = {}
    edges: dict[str, list[int]] = {}
    objects: dict[str, Any] = {}
    for stage in range(STAGES):
        for name, shape, axis in stage_parameters(stage):
            for state in STATES:
                expected[f"optimizer.state.{state}.{name}"] = torch.randn(
                    shape, generator=generator
                )
            master = expected[f"optimizer.state.param.{name}"]
            saved[name] = (master + other_master).bfloat16()
            if axis is not None:
                cuts[name] = {0: (TENSOR,), 1: (1, TENSOR), "gated": (2 * TENSOR,)}[axis]
    for stage, rank in product(range(STAGES), range(TENSOR)):
        group = f"optimizer.distributed.dp_group_idx_{rank + TENSOR * stage}"
        objects[f"{group}.optimizer/shard_0_1"] = {"param_groups": [{"lr": 0.1, "step": 7}]}
        objects[f"{group}.per_bucket_numel/shard_0_1"] = [{}]
        backwards = list(stage_parameters(stage))[::-1]
        if swapped:
            backwards[1:3] = backwards[2:0:-1]
        half = len(backwards) // 2
        for bucket, members in enumerate((backwards[:half], backwards[half:])):
            key = f"{group}.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_{bucket}"
            for state in STATES:
                parts: list[torch.Tensor] = []
                marks, end = {0}, 0
                for name, _, axis in members:
                    tensor = shard(expected[f"optimizer.state.{state}.{name}"], axis, rank)
                    padding = -end % 64
                    parts += [torch.full((padding,), 9.0), tensor.flatten()]
                    marks |= {end, end + padding}
                    end += padding + tensor.numel()
                padded = -(-end // 384) * 384
                marks |= {padded // DATA * number for number in range(1, DATA)}
                saved[f"{key}.{state}"] = torch.cat(parts)
                edges[f"{key}.{state}"] = sorted(mark for mark in marks if mark < end)
    target = folder / "iter_0000010"
    write(target, saved, cuts=cuts, edges=edges, objects=objects)
    common = {
        "args": Namespace(tensor_model_parallel_size=TENSOR, pipeline_model_parallel_size=STAGES),
        "iteration": 10,
        "optimizer": {"param_state_sharding_type": "dp_reshardable"},
        "content_metadata": {"distrib_optim_sharding_type": "dp_reshardable"},
    }
    torch.save(common, target / "common.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("10")
    return folder, expected


def test_buckets_become_state_of_parameters(tmp_path: Path) -> None:
    run, expected = write_run(tmp_path / "run")
    ckptctl.convert(run, tmp_path / "out.pt", to="torch", only="all", exclude=["args"])
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert not any("distributed" in str(name) for name in found)
    assert found["optimizer"]["optimizer"]["param_groups"] == [{"lr": 0.1, "step": 7}]
    assert found["optimizer"]["param_state_sharding_type"] == "fully_reshardable"
    assert found["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"


@pytest.mark.parametrize("change", ["swapped", "other_master"])
def test_buckets_of_another_order_are_refused(change: str, tmp_path: Path) -> None:
    run, _ = write_run(tmp_path / "run", **{change: True})
    catalog = formats.open_checkpoint(run)
    (note,) = (note for note in catalog.notes if "dp_reshardable" in note)
    assert "`" in note and "cannot be mapped to parameters" in note
    with pytest.raises(RefusedError, match="Megatron-Core cannot load this optimizer state"):
        ckptctl.convert(run, tmp_path / "never", to="mcore", only="all", exclude=["args"])


def test_layer_wise_optimizer_is_named(tmp_path: Path) -> None:
    other = write(
        tmp_path / "muon",
        {
            "decoder.layers.0.mlp.linear_fc2.weight": torch.ones(2, 2),
            "chained_0.optimizer.state.momentum_buffer.decoder.x": torch.ones(2, 2),
            "chained_1.optimizer.distributed.dp_group_idx_0.gbuf_idx_0"
            ".dtype_(torch.bfloat16, torch.float32).bucket_idx_0.param": torch.ones(4),
        },
    )
    (note,) = (n for n in formats.open_checkpoint(other).notes if "dp_reshardable" in n)
    assert "Muon" in note


@pytest.mark.parametrize("sizes", [(7,), (3, 4), (2, 3, 4), (1, 5), (2, 1, 3)])
def test_flat_ranges_are_cut_into_boxes(sizes: tuple[int, ...]) -> None:
    whole = torch.arange(torch.Size(sizes).numel()).reshape(sizes)
    for start, end in product(range(whole.numel()), range(whole.numel() + 1)):
        if start >= end:
            continue
        found: list[int] = []
        for flat, offsets, counts in split_flat_range(sizes, start, end):
            spans = tuple(slice(o, o + n) for o, n in zip(offsets, counts, strict=True))
            elements = whole[spans].flatten().tolist()
            assert elements[0] == flat
            found += elements
        assert found == list(range(start, end))
