"""A save planner for torch's own functions, with the global plan of ``ckptctl.save``.

Ranks send what they hold in the form of :mod:`ckptctl.ops.saving.local_shards`, the coordinator
decides with :mod:`ckptctl.ops.saving.global_plan`; write items are made of that. Any storage writer
takes them.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from ckptctl.catalog import Box
from ckptctl.distributed.dcp.metadata import box_of, chunk_of, metadata_of, noted, properties_of
from ckptctl.distributed.group import threads
from ckptctl.distributed.plan_cache import PlanCache
from ckptctl.distributed.saving.local_state import LocalState, local_state, replica_digests
from ckptctl.distributed.state import HeldShard, state_of
from ckptctl.errors import MappingError, RefusedError, listed
from ckptctl.formats.base import OutputTensor
from ckptctl.ops.saving.global_plan import GlobalPlan, make_global_plan, own_plan
from ckptctl.ops.saving.local_shards import Packed, digest, divide_values, pack
from ckptctl.planner.boxes import intersect
from ckptctl.units import counted

PLANS = 8
VERSION = 1
"""Of what the key of a plan is made of."""


@dataclass(frozen=True)
class HeldPlan(SavePlan):
    """A plan as ranks send it: before the global plan without items, after it without the rest."""

    key: bytes = b""  # digest of all that the plan of this rank depends on, values of leaves apart
    values: bytes = b""  # digests of the leaves that are no tensors, and of small tensors
    packed: Packed | None = None  # what the rank holds; None: what it held with this key
    generation: bytes = b""  # of the plan that the rank has for the key; of the new one
    # Leaves that are no tensors and are written under another name, by that.
    names: dict[str, str] = field(default_factory=dict)
    kept: tuple[bytes, ...] = ()  # the generations that the coordinator knows from now on

    @property
    def nbytes(self) -> int:
        """Return about how much memory it takes."""
        return 1000 * len(self.items)


@dataclass(frozen=True, slots=True)
class _Global:
    """A global plan as the coordinator keeps it."""

    packed: Sequence[Packed]
    keys: Sequence[bytes]
    written: Sequence[dict[str, str]]
    metadata: Metadata

    @property
    def nbytes(self) -> int:
        """Return about how much memory it takes."""
        return 1000 * len(self.metadata.state_dict_metadata)


class SavePlanner(DefaultSavePlanner):
    """For ``dcp.save(state, planner=SavePlanner())``, with any storage writer.

    Replicated tensors are divided by the bytes of their boxes, large ones in parts; dtypes, shapes
    and coverage are proven for all ranks. A planner that is used again, in the same process group,
    keeps its plans: a state that is structured as it was then is not planned again.

    Args:
        per_rank: Leaves that are no tensors, and small tensors that are neither DTensors nor
            ShardedTensors, which differ between ranks: ``keep`` all of them, those of other ranks
            than the lowest below ``rank_N.``; or an ``error``.
        plans: How many plans are kept.
        trusted: See :class:`~ckptctl.distributed.saving.destination.SaveOptions`.
        compare_replicas: Likewise. Ranks compare when they plan.
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
        # What ranks keep and what the coordinator does is told by `kept`, not by how large it is.
        self._own: PlanCache[HeldPlan] = PlanCache(plans, sys.maxsize)
        self._all: PlanCache[_Global] = PlanCache(plans, sys.maxsize)
        self._made: tuple[bytes, _Global] | None = None
        self._names: dict[str, str] = {}

    @noted
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the state of this rank; see ``torch.distributed.checkpoint.SavePlanner``.

        Raises:
            CkptError: A leaf cannot be saved.
        """
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self._held: LocalState = local_state(state_of(state_dict), trusted=self._trusted)
        self._chunks: dict[str, list[HeldShard]] = {}
        for chunk, piece in zip(self._held.shards.chunks, self._held.pieces, strict=True):
            shard = HeldShard(chunk.name, Box(chunk.offsets, chunk.sizes), piece)
            self._chunks.setdefault(chunk.name, []).append(shard)

    @noted
    def create_local_plan(self) -> SavePlan:
        """Return this rank's shards, or only that nothing has changed."""
        packed = pack(self._held.shards)
        key = digest((VERSION, packed.sharding))
        known = self._own.get(key)
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if known is None and self._compare_replicas and ranks > 1:
            packed = packed.with_replicas(replica_digests(self._held, threads(0)))
        self.plan = HeldPlan(
            [],
            usable=known is None,
            key=key,
            values=packed.values,
            packed=None if known else packed,
            generation=known.generation if known else b"",
        )
        return self.plan

    @noted
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Divide the shards among the ranks; on the coordinator only.

        Raises:
            MappingError: Ranks disagree on a tensor, or on a leaf where that is an error.
            CoverageError: The boxes of all ranks do not tile a tensor.
        """
        said = [self._checked(plan) for plan in all_plans]
        current = digest([one.key for one in said])
        held = [self._packed(rank, one) for rank, one in enumerate(said)]
        known = self._all.get(current)
        kept = self._kept(current)
        again = not any(one.usable or one.generation != current for one in said)
        if known and again and known.written == _written(held):
            self._made = (current, known)
            self.global_plan = [
                replace(one, generation=current, kept=kept, values=b"") for one in said
            ]
            self.metadata = replace(known.metadata)
            return self.global_plan, self.metadata
        # Without collectives each rank has its own plan.
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        divided = make_global_plan(held) if len(held) > 1 or alone else own_plan(0, 1, held[0])
        apart = {n for one in divided.shares for n, under in one.values.items() if n != under}
        if apart and self._per_rank == "error":
            raise MappingError(
                f"{counted(len(apart), 'value differs', 'values differ')} between ranks",
                where=listed(sorted(apart)),
                hint="pass `per_rank='keep'` to save the values of all ranks",
            )
        metadata = metadata_of(divided)
        written = [dict(share.values) for share in divided.shares]
        self._made = (current, _Global(held, [one.key for one in said], written, metadata))
        items = items_of(divided)
        self.global_plan = [
            HeldPlan(
                own,
                one.storage_data,
                metadata.planner_data,
                generation=current,
                names={under: name for name, under in share.values.items()},
                kept=kept,
            )
            for one, own, share in zip(said, items, divided.shares, strict=True)
        ]
        self.metadata = replace(metadata)
        return self.global_plan, self.metadata

    @noted
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return this rank's items, of the new plan or of the one that it has."""
        plan, key = self._checked(new_plan), cast(HeldPlan, self.plan).key
        if not plan.usable:
            own = self._own.get(key)
            assert own
            plan = replace(plan, items=own.items, names=own.names, usable=True)
        elif self._limit:
            self._own.put(key, replace(plan, storage_data=None, planner_data=None))
        self._own.keep(lambda one: one.generation in plan.kept)
        if self._made and self._limit:
            self._all.put(*self._made)
        self._made = None
        self._names, self.plan = plan.names, plan
        return plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the data of an item: a view of a tensor, or the bytes of another leaf."""
        name = write_item.index.fqn
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._held.values[self._names.get(name, name)])
        assert write_item.tensor_data
        chunk = write_item.tensor_data.chunk
        wanted = box_of(chunk)
        shards = self._chunks[self._names.get(name, name)]
        return next(
            shard.part(wanted).tensor
            for shard in shards
            if wanted in (shard.box, intersect(shard.box, wanted))
        )

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return a leaf of the state, by its name there."""
        return self.state_dict[self._names.get(index.fqn, index.fqn)]

    def _checked(self, plan: SavePlan) -> HeldPlan:
        if not isinstance(plan, HeldPlan):
            raise RefusedError(
                "all ranks must save with the same planner",
                why=f"one rank sent a {type(plan).__name__}",
            )
        return plan

    def _packed(self, rank: int, said: HeldPlan) -> Packed:
        if said.packed:
            return said.packed
        for one in self._all.plans():
            if len(one.keys) > rank and one.keys[rank] == said.key:
                # Digests of replicas are those of an earlier save.
                return replace(one.packed[rank], values=said.values, replicas=b"")
        raise RefusedError(
            f"rank {rank} has a plan that the coordinator does not know",
            hint="use one SavePlanner per process group",
        )

    def _kept(self, current: bytes) -> tuple[bytes, ...]:
        known = [one for one in self._all.keys() if one != current]  # noqa: SIM118
        return (*known, current)[-self._limit :] if self._limit else ()


def _written(held: Sequence[Packed]) -> list[dict[str, str]]:
    structures = {one.identity: one.structure for one in reversed(held) if one.structure}
    return [dict(one) for one in divide_values(held, structures).written]


def items_of(global_plan: GlobalPlan) -> list[list[WriteItem]]:
    """Return the write items of each rank."""
    items: list[list[WriteItem]] = [[] for _ in global_plan.shares]
    for tensor, boxes, ranks in zip(
        global_plan.tensors, global_plan.boxes, global_plan.writers, strict=True
    ):
        kind = WriteItemType.SHARD if len(boxes) > 1 else WriteItemType.TENSOR
        size, properties = torch.Size(tensor.shape), properties_of(tensor)
        for number, (box, rank) in enumerate(zip(boxes, ranks, strict=True)):
            chunk = chunk_of(box)
            index = MetadataIndex(tensor.name, chunk.offsets, number)
            data = TensorWriteData(chunk, properties, size)
            items[rank].append(WriteItem(index, kind, tensor_data=data))
    for own, share in zip(items, global_plan.shares, strict=True):
        for under in share.values.values():
            if under in global_plan.apart:
                own.append(_whole(global_plan.apart[under]))
            else:
                own.append(WriteItem(MetadataIndex(under), WriteItemType.BYTE_IO))
    return items


def _whole(tensor: OutputTensor) -> WriteItem:
    chunk = chunk_of(Box.whole(tensor.shape))
    data = TensorWriteData(chunk, properties_of(tensor), torch.Size(tensor.shape))
    return WriteItem(MetadataIndex(tensor.name, chunk.offsets, 0), WriteItemType.TENSOR, None, data)
