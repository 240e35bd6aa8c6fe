"""Save planner for torch's ``dcp.save`` with the global plan of ``ckptctl.save``.

Ranks send descriptions of their shards (:mod:`ckptctl.save_load.saving.local_shards`), the
coordinator assigns the shards to ranks (:mod:`ckptctl.save_load.saving.global_plan`), and each rank
makes write items for its share. Any storage writer accepts the items, and :class:`Writer` uses the
share.
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
    add_error_notes,
    build_metadata,
    build_properties,
    to_box,
    to_chunk,
)
from ckptctl.distributed.group import choose_thread_count
from ckptctl.distributed.plan_cache import PlanCache
from ckptctl.distributed.saving.local_state import (
    LocalState,
    build_local_state,
    compute_replica_digests,
)
from ckptctl.distributed.state import flatten_state
from ckptctl.errors import MappingError, RefusedError, quote_names
from ckptctl.formats.base import OutputTensor
from ckptctl.planner.boxes import intersect_boxes
from ckptctl.save_load.saving.global_plan import (
    RankShare,
    make_global_plan,
    make_output_tensor,
    make_rank_local_plan,
)
from ckptctl.save_load.saving.local_shards import (
    LocalShards,
    PackedShards,
    assign_values_to_ranks,
    compute_digest,
)
from ckptctl.save_load.saving.save_files import iterate_boxes
from ckptctl.units import pluralize

MAX_PLANS = 8
KEY_VERSION = 1
"""Version number of the data from which cache keys of plans are computed."""


@dataclass(frozen=True)
class SharePlan(SavePlan):
    """Save plan that sends a rank's shards to the coordinator, and returns the rank's share."""

    key: bytes = b""  # digest of everything on which the rank's plan depends, except values
    values: bytes = b""  # digests of the non-tensor values and of small tensors
    packed: PackedShards | None = None  # the rank's shards, or None if unchanged for this key
    generation: bytes = b""  # generation of the cached plan, later that of the new plan
    share: RankShare | None = None  # None if the plan of this generation is reused
    kept: tuple[bytes, ...] = ()  # generations that the coordinator keeps


@dataclass(frozen=True, slots=True)
class _AgreedPlan:
    """Global plan of an earlier save, which the coordinator caches for reuse."""

    packed: Sequence[PackedShards]
    keys: Sequence[bytes]
    written: Sequence[dict[str, str]]
    metadata: Metadata


@dataclass(frozen=True, slots=True)
class _SavedShare:
    """Share of an earlier global plan that this rank has written, cached for reuse."""

    key: bytes
    generation: bytes
    share: RankShare
    items: list[WriteItem]
    agreed_plan: _AgreedPlan | None  # only on the coordinator

    @property
    def nbytes(self) -> int:
        """Approximate memory size of the cached plan in bytes."""
        return 1000 * len(self.items)


class SavePlanner(DefaultSavePlanner):
    """Planner for ``dcp.save(state, planner=SavePlanner())``, with any storage writer.

    Replicated tensors are divided among the ranks by bytes, and large ones are split. Dtypes,
    shapes and coverage are verified for all ranks. If a planner is used again in the same process
    group, it reuses the plans of states with the same structure.

    Args:
        per_rank: Action if non-tensor values, or small tensors that are neither DTensors nor
            ShardedTensors, differ between ranks. ``"keep"`` saves all of them, with the prefix
            ``rank_N.`` for all ranks but the lowest, and ``"error"`` raises.
        plans: Number of plans to cache.
        trusted: Option of :func:`ckptctl.save`.
        compare_replicas: Option of :func:`ckptctl.save`. Ranks compare only when they plan.
    """

    def __init__(
        self,
        *,
        per_rank: Literal["keep", "error"] = "keep",
        plans: int = MAX_PLANS,
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
        self._agreed_plan: _AgreedPlan | None = None

    @add_error_notes
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
        self._state = flatten_state(state_dict)
        self.local_state: LocalState = build_local_state(self._state, trusted=self._trusted)

    @add_error_notes
    def create_local_plan(self) -> SavePlan:
        """Describe this rank's shards, or send only the key of its cached plan if one matches."""
        packed = self.local_state.packed_shards
        key = compute_digest((KEY_VERSION, packed.sharding))
        cached = next(
            (saved_share for saved_share in self._plans.list_plans() if saved_share.key == key),
            None,
        )
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if cached is None and self._compare_replicas and ranks > 1:
            packed = packed.with_replicas(
                compute_replica_digests(self.local_state, choose_thread_count(0))
            )
        self.plan = SharePlan(
            [],
            usable=cached is None,
            key=key,
            values=packed.values,
            packed=None if cached else packed,
            generation=cached.generation if cached else b"",
        )
        return self.plan

    @add_error_notes
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Divide the shards among the ranks, only on the coordinator.

        Raises:
            MappingError: Ranks disagree on a tensor, or on a value and *per_rank* is ``"error"``.
            CoverageError: The boxes of all ranks do not tile a tensor.
        """
        plans = [_require_own_plan_class(plan) for plan in all_plans]
        current = compute_digest([plan.key for plan in plans])
        shards = [self._get_packed_shards(rank, plan) for rank, plan in enumerate(plans)]
        older = [plan.generation for plan in self._plans.list_plans() if plan.generation != current]
        kept = (*reversed(older), current)[-self._limit :] if self._limit else ()
        cached = self._plans.get(current)
        reusable = not any(plan.usable or plan.generation != current for plan in plans)
        if (
            cached
            and cached.agreed_plan
            and reusable
            and cached.agreed_plan.written == _list_written_values(shards)
        ):
            self._agreed_plan = cached.agreed_plan
            self.global_plan = [
                replace(plan, generation=current, kept=kept, values=b"") for plan in plans
            ]
            self.metadata = replace(cached.agreed_plan.metadata)
            return self.global_plan, self.metadata
        # Without collectives, each rank makes its own plan.
        is_single = not dist.is_initialized() or dist.get_world_size() == 1
        divided = (
            make_global_plan(shards)
            if len(shards) > 1 or is_single
            else make_rank_local_plan(0, 1, shards[0])
        )
        differing = {
            name for part in divided.shares for name, under in part.values.items() if name != under
        }
        if differing and self._per_rank == "error":
            raise MappingError(
                f"{pluralize(len(differing), 'value differs', 'values differ')} between ranks",
                where=quote_names(sorted(differing)),
                hint="pass `per_rank='keep'` to save the values of all ranks",
            )
        metadata = build_metadata(divided)
        written = [dict(share.values) for share in divided.shares]
        self._agreed_plan = _AgreedPlan(shards, [plan.key for plan in plans], written, metadata)
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

    @add_error_notes
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Create this rank's write items, or reuse the items of the cached plan."""
        plan, key = _require_own_plan_class(new_plan), cast(SharePlan, self.plan).key
        if plan.share is None:
            cached = self._plans.get(plan.generation)
            assert cached
            plan = replace(plan, items=cached.items, share=cached.share, usable=True)
        else:
            plan = replace(
                plan, items=list(iterate_write_items(self.local_state.shards, plan.share))
            )
        assert plan.share
        if self._limit:
            saved = _SavedShare(key, plan.generation, plan.share, plan.items, self._agreed_plan)
            self._plans.put(plan.generation, saved)
        self._plans.keep_only(lambda saved_share: saved_share.generation in plan.kept)
        self._agreed_plan = None
        self._names = {under: name for name, under in plan.share.values.items()}
        self.plan = plan
        return plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the data of *write_item*, either a tensor view or the bytes of a value."""
        name = self._names.get(write_item.index.fqn, write_item.index.fqn)
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self.local_state.values[name])
        assert write_item.tensor_data
        box = to_box(write_item.tensor_data.chunk)
        piece = next(
            shard.select_box(box).tensor
            for shard in self._state.tensors[name].shards
            if box in (shard.box, intersect_boxes(shard.box, box))
        )
        return piece.resolve_conj().resolve_neg()

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the non-tensor value of the state that the write item at *index* saves."""
        return self.state_dict[self._names.get(index.fqn, index.fqn)]

    def _get_packed_shards(self, rank: int, plan: SharePlan) -> PackedShards:
        if plan.packed:
            return plan.packed
        for agreed_plan in (
            saved_share.agreed_plan
            for saved_share in self._plans.list_plans()
            if saved_share.agreed_plan
        ):
            if len(agreed_plan.keys) > rank and agreed_plan.keys[rank] == plan.key:
                # Replicas are not compared again.
                return replace(agreed_plan.packed[rank], values=plan.values, replicas=b"")
        raise RefusedError(
            f"rank {rank} has a plan that the coordinator does not know",
            hint="use one SavePlanner per process group",
        )


def _require_own_plan_class(plan: SavePlan) -> SharePlan:
    if not isinstance(plan, SharePlan):
        raise RefusedError(
            "all ranks must save with the same planner",
            why=f"one rank sent a {type(plan).__name__}",
        )
    return plan


def _list_written_values(all_packed: Sequence[PackedShards]) -> list[dict[str, str]]:
    structures = {
        entry.identity: entry.structure for entry in reversed(all_packed) if entry.structure
    }
    return [dict(entry) for entry in assign_values_to_ranks(all_packed, structures).written_by_rank]


def iterate_write_items(shards: LocalShards, share: RankShare) -> Iterator[WriteItem]:
    """Yield one write item per chunk and value of a rank's share, in the order of the share."""
    for index, box in iterate_boxes(shards, share):
        name = shards.chunks[index].name
        yield _build_tensor_item(name, make_output_tensor(name, shards.tensors[name]), box)
    for name, under in share.values.items():
        if name in shards.tensors:
            tensor = make_output_tensor(name, shards.tensors[name])
            yield _build_tensor_item(under, tensor, Box.whole(tensor.shape))
        else:
            yield WriteItem(MetadataIndex(under), WriteItemType.BYTE_IO)


def _build_tensor_item(name: str, tensor: OutputTensor, box: Box) -> WriteItem:
    chunk = to_chunk(box)
    kind = WriteItemType.TENSOR if box == Box.whole(tensor.shape) else WriteItemType.SHARD
    data = TensorWriteData(chunk, build_properties(tensor), torch.Size(tensor.shape))
    return WriteItem(MetadataIndex(name, chunk.offsets), kind, tensor_data=data)
