"""GPT models of Megatron-Core on gloo ranks, which load what ckptctl lays out."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.oracle.megatron_ranks import Case, _models
from tests.unit.formats.mcore.written import write

APART = {"non_homogeneous_layers": True}
"""What makes Megatron-Core name each layer by itself, as layout ``mcore`` does."""


def load(rank: int, _: int, folder: Path, case: Case, stacked: bool) -> None:
    """Let a model of other values load a checkpoint; all that it holds has to be that, then."""
    from megatron.core import dist_checkpointing

    models = _models(case)
    if rank == 0:
        _write(folder, _all_chunks(models), stacked)
    else:
        _all_chunks(models)
    dist.barrier()
    inner = str(folder / "release")
    metadata = dist_checkpointing.load_content_metadata(inner)
    assert metadata is not None
    state, missing, unexpected = dist_checkpointing.load(
        _asked(models, metadata), inner, strict="return_all"
    )
    assert not unexpected, unexpected
    assert not {key for key in missing if not key.endswith("._extra_state")}, missing
    dist_checkpointing.load(_asked(models, metadata), inner)  # as Megatron-LM does
    for number, model in enumerate(models):
        model.load_state_dict(state[f"model{number}"])
    for key, shape, offset, data in _chunks(models):
        at = tuple(slice(o, o + s) for o, s in zip(offset, data.shape, strict=True))
        assert torch.equal(data, _values(key, shape)[at]), key


def _asked(models: list[Any], metadata: dict[str, Any]) -> dict[str, Any]:
    from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

    metadata = ensure_metadata_has_dp_cp_group(dict(metadata))
    return {f"model{n}": one.sharded_state_dict(metadata=metadata) for n, one in enumerate(models)}


def _chunks(models: list[Any]) -> list[tuple[str, tuple[int, ...], tuple[int, ...], Any]]:
    """What the models hold: key, whole shape, place, elements."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    state = _asked(models, APART)
    apply_factories(state)
    found = (one for one in nested_values(state) if isinstance(one, ShardedTensor))
    return [
        (one.key, tuple(one.global_shape), tuple(one.global_offset), _with_axes(one))
        for one in found
    ]


def _with_axes(one: Any) -> torch.Tensor:
    data: torch.Tensor = one.data.detach()
    return data.view((1,) * one.prepend_axis_num + tuple(one.local_shape))


def _all_chunks(models: list[Any]) -> dict[str, tuple[int, ...]]:
    """The tensors that the models of all ranks are parts of, and their shapes."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, [(key, shape) for key, shape, _, _ in _chunks(models)])
    return dict(pair for found in gathered for pair in found)


def _write(folder: Path, shapes: dict[str, tuple[int, ...]], stacked: bool) -> None:
    tensors = {key: _values(key, shape) for key, shape in shapes.items()}
    write(folder, tensors, stack_layers=stacked)


def _values(key: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(key.encode())))
