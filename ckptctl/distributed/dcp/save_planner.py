"""Save planner for torch's ``dcp.save`` with the global plan of ``ckptctl.save``.

Ranks send descriptions of their shards (:mod:`ckptctl.save_load.saving.local_shards`), the
coordinator divides them (:mod:`ckptctl.save_load.saving.global_plan`), and each rank makes write
items of its share. Any storage writer accepts the items, and :class:`Writer` uses the share.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from ckptctl.catalog import Box
from ckptctl.distributed.dcp.metadata import (
    box_of,
    chunk_of,
    metadata_of,
    properties_of,
    with_notes,
)
from ckptctl.distributed.group import threads
from ckptctl.distributed.plan_cache import PlanCache
from ckptctl.distributed.saving.local_state import LocalState, local_state, replica_digests
from ckptctl.distributed.state import state_of
from ckptctl.errors import MappingError, RefusedError, quote_names
from ckptctl.formats.base import OutputTensor
from ckptctl.planner.boxes import intersect_boxes
from ckptctl.save_load.saving.global_plan import (
    RankShare,
    make_global_plan,
    output_tensor,
    own_plan,
)
from ckptctl.save_load.saving.local_shards import LocalShards, Packed, digest, divide_values
from ckptctl.save_load.saving.save_files import boxes_of
from ckptctl.units import pluralize

PLANS = 8
VERSION = 1
"""Version of the contents of a plan's key."""


@dataclass(frozen=True)
class SharePlan(SavePlan):
    """Save plan that carries a rank's shards to the coordinator, and its share back."""

    key: bytes = b""  # digest of everything on which the rank's plan depends, except values
    values: bytes = b""  # digests of the non-tensor values and of small tensors
    packed: Packed | None = None  # the rank's shards, or None if unchanged for this key
    generation: bytes = b""  # of the rank's cached plan for the key, then of the new plan
    share: RankShare | None = None  # None if the plan of this generation is reused
    kept: tuple[bytes, ...] = ()  # generations that the coordinator keeps


@dataclass(frozen=True, slots=True)
class _AgreedPlan:
    """Global plan, cached by the coordinator."""

    packed: Sequence[Packed]
    keys: Sequence[bytes]
    written: Sequence[dict[str, str]]
    metadata: Metadata


@dataclass(frozen=True, slots=True)
class _SavedShare:
    """Executed plan of this rank."""

    key: bytes
    generation: bytes
    share: RankShare
    items: list[WriteItem]
    made: _AgreedPlan | None  # only on the coordinator

    @property
    def nbytes(self) -> int:
        """Approximate memory size in bytes."""
        return 1000 * len(self.items)


class SavePlanner(DefaultSavePlanner):
    """Planner for ``dcp.save(state, planner=SavePlanner())``, with any storage writer.

    Replicated tensors are divided among the ranks by bytes, and large ones are split. Dtypes,
    shapes and coverage are verified for all ranks. If a planner is used again in the same process
    group, it reuses the plans of states with the same structure.

    Args:
        per_rank: Action if non-tensor values, or small tensors that are neither DTensors nor
            ShardedTensors, differ between ranks. ``"keep"`` saves all of them, those of further
            ranks with names below ``rank_N.``, and ``"error"`` raises.
        plans: Number of plans to cache.
        trusted: Option of :func:`ckptctl.save`.
        compare_replicas: Option of :func:`ckptctl.save`. Ranks compare only when they plan.
    """

    def __init__(
        self,
        *,
        per_rank: Literal["keep", "error"] = "keep",
        plans: int = PLANS,
        trusted: bool = False,
        compare_replicas: bool = True,
    ) -> None:
        super().__init__()
        self._trusted = trusted
        self._compare_replicas = compare_replicas
        self._per_rank = per_rank
        self._limit = plans
        # By generation. Ranks evict by `kept`, not by size.
        self._plans: PlanCache[_SavedShare] = PlanCache(plans, sys.maxsize)
        self._made: _AgreedPlan | None = None

    @with_notes
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Set the state of this rank to save.

        Raises:
            CkptError: A value cannot be saved.
        """
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self._state = state_of(state_dict)
        self.local_state: LocalState = local_state(self._state, trusted=self._trusted)

    @with_notes
    def create_local_plan(self) -> SavePlan:
        """Describe this rank's shards, or only their key if a cached plan matches."""
        packed = self.local_state.packed
        key = digest((VERSION, packed.sharding))
        known = next((one for one in self._plans.plans() if one.key == key), None)
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if known is None and self._compare_replicas and ranks > 1:
            packed = packed.with_replicas(replica_digests(self.local_state, threads(0)))
        self.plan = SharePlan(
            [],
            usable=known is None,
            key=key,
            values=packed.values,
            packed=None if known else packed,
            generation=known.generation if known else b"",
        )
        return self.plan

    @with_notes
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Divide the shards among the ranks, only on the coordinator.

        Raises:
            MappingError: Ranks disagree on a tensor, or on a value and *per_rank* is ``"error"``.
            CoverageError: The boxes of all ranks do not tile a tensor.
        """
        plans = [_require_share_plan(plan) for plan in all_plans]
        current = digest([plan.key for plan in plans])
        held = [self._packed(rank, plan) for rank, plan in enumerate(plans)]
        others = [plan.generation for plan in self._plans.plans() if plan.generation != current]
        kept = (*reversed(others), current)[-self._limit :] if self._limit else ()
        known = self._plans.get(current)
        holds = not any(plan.usable or plan.generation != current for plan in plans)
        if known and known.made and holds and known.made.written == _written(held):
            self._made = known.made
            self.global_plan = [
                replace(plan, generation=current, kept=kept, values=b"") for plan in plans
            ]
            self.metadata = replace(known.made.metadata)
            return self.global_plan, self.metadata
        # Without collectives, each rank makes its own plan.
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        divided = make_global_plan(held) if len(held) > 1 or alone else own_plan(0, 1, held[0])
        apart = {n for one in divided.shares for n, under in one.values.items() if n != under}
        if apart and self._per_rank == "error":
            raise MappingError(
                f"{pluralize(len(apart), 'value differs', 'values differ')} between ranks",
                where=quote_names(sorted(apart)),
                hint="pass `per_rank='keep'` to save the values of all ranks",
            )
        metadata = metadata_of(divided)
        written = [dict(share.values) for share in divided.shares]
        self._made = _AgreedPlan(held, [plan.key for plan in plans], written, metadata)
        self.global_plan = [
            SharePlan(
                [],
                plan.storage_data,
                metadata.planner_data,
                generation=current,
                share=share,
                kept=kept,
            )
            for plan, share in zip(plans, divided.shares, strict=True)
        ]
        self.metadata = replace(metadata)
        return self.global_plan, self.metadata

    @with_notes
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Create this rank's write items, or reuse those of the cached plan."""
        plan, key = _require_share_plan(new_plan), cast(SharePlan, self.plan).key
        if plan.share is None:
            known = self._plans.get(plan.generation)
            assert known
            plan = replace(plan, items=known.items, share=known.share, usable=True)
        else:
            plan = replace(plan, items=list(items_of(self.local_state.shards, plan.share)))
        assert plan.share
        if self._limit:
            saved = _SavedShare(key, plan.generation, plan.share, plan.items, self._made)
            self._plans.put(plan.generation, saved)
        self._plans.keep(lambda one: one.generation in plan.kept)
        self._made = None
        self._names = {under: name for name, under in plan.share.values.items()}
        self.plan = plan
        return plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the data of an item, either a view of a tensor or the bytes of a value."""
        name = self._names.get(write_item.index.fqn, write_item.index.fqn)
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self.local_state.values[name])
        assert write_item.tensor_data
        wanted = box_of(write_item.tensor_data.chunk)
        piece = next(
            shard.part(wanted).tensor
            for shard in self._state.tensors[name].shards
            if wanted in (shard.box, intersect_boxes(shard.box, wanted))
        )
        return piece.resolve_conj().resolve_neg()

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return a value of the state by the name of its item."""
        return self.state_dict[self._names.get(index.fqn, index.fqn)]

    def _packed(self, rank: int, plan: SharePlan) -> Packed:
        if plan.packed:
            return plan.packed
        for made in (one.made for one in self._plans.plans() if one.made):
            if len(made.keys) > rank and made.keys[rank] == plan.key:
                # Replicas are not compared again.
                return replace(made.packed[rank], values=plan.values, replicas=b"")
        raise RefusedError(
            f"rank {rank} has a plan that the coordinator does not know",
            hint="use one SavePlanner per process group",
        )


def _require_share_plan(plan: SavePlan) -> SharePlan:
    if not isinstance(plan, SharePlan):
        raise RefusedError(
            "all ranks must save with the same planner",
            why=f"one rank sent a {type(plan).__name__}",
        )
    return plan


def _written(held: Sequence[Packed]) -> list[dict[str, str]]:
    structures = {one.identity: one.structure for one in reversed(held) if one.structure}
    return [dict(one) for one in divide_values(held, structures).written]


def items_of(shards: LocalShards, share: RankShare) -> Iterator[WriteItem]:
    """Yield the write items of a rank's share, in its order."""
    for index, box in boxes_of(shards, share):
        name = shards.chunks[index].name
        yield _tensor_item(name, output_tensor(name, shards.tensors[name]), box)
    for name, under in share.values.items():
        if name in shards.tensors:
            tensor = output_tensor(name, shards.tensors[name])
            yield _tensor_item(under, tensor, Box.whole(tensor.shape))
        else:
            yield WriteItem(MetadataIndex(under), WriteItemType.BYTE_IO)


def _tensor_item(name: str, tensor: OutputTensor, box: Box) -> WriteItem:
    chunk = chunk_of(box)
    kind = WriteItemType.TENSOR if box == Box.whole(tensor.shape) else WriteItemType.SHARD
    data = TensorWriteData(chunk, properties_of(tensor), torch.Size(tensor.shape))
    return WriteItem(MetadataIndex(name, chunk.offsets), kind, tensor_data=data)
