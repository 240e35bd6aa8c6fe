"""Saving the state of all ranks as one atomically published DCP directory (``ckptctl.save``).

If the ranks reuse cached plans, they communicate twice. Before writing, they agree on the plans.
After writing, rank 0 learns that all ranks have finished, and publishes the checkpoint. Without
valid cached plans, the ranks make a new plan in an additional exchange before writing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import torch.distributed as dist

from ckptctl.catalog import Blob, parse_memory_key
from ckptctl.distributed.group import choose_thread_count, get_rank_collectives
from ckptctl.distributed.plan_cache import PlanCache
from ckptctl.distributed.positions import record_visited_checkpoint
from ckptctl.distributed.saving.destination import (
    RankFolderTarget,
    SaveTarget,
    build_target,
    require_local_target,
    require_visible_rank_files,
)
from ckptctl.distributed.saving.local_state import (
    LocalState,
    build_local_state,
    compute_replica_digests,
)
from ckptctl.distributed.saving.save_options import SaveOptions
from ckptctl.distributed.state import FlatState, StateDict, flatten_state
from ckptctl.formats.base import OutputTensor
from ckptctl.formats.dcp.metadata import Item, Origin
from ckptctl.formats.dcp.metadata_writer import EncodedTensorMetadata
from ckptctl.keywords import accept_keywords, show_options_as_keywords
from ckptctl.options import Option
from ckptctl.ranks.coordinator import RankCollectives, gather_and_scatter, to_sendable_error
from ckptctl.save_load.rank_agreement import (
    RankStatement,
    are_cached_plans_valid,
    compute_generation,
    is_first_with_identity,
    make_nonce,
    require_agreement,
)
from ckptctl.save_load.saving.global_plan import (
    GlobalPlan,
    RankShare,
    make_global_plan,
    make_rank_local_plan,
)
from ckptctl.save_load.saving.local_shards import (
    Groups,
    PackedShards,
    choose_values_to_write,
    compute_digest,
    compute_group_digests,
    get_written_path,
    make_rank_tensor,
    unpack_groups,
)
from ckptctl.save_load.saving.save_files import (
    RankItems,
    TensorFiles,
    append_values,
    lay_out_rank_files,
    lay_out_tensors,
    make_tensor_metadata,
)
from ckptctl.storage.paths import parse_path
from ckptctl.storage.threads import pause_gc
from ckptctl.tree import TreePath

KEY_VERSION = 1
"""Version number of the data from which cache keys of plans are computed.

Increment it when that data changes.
"""
NO_ITEMS = RankItems((), (), (), ())


@dataclass(slots=True)
class CachedSavePlan:
    """Plan that a rank has executed.

    It can be reused, because the file positions of tensors do not depend on their elements.
    """

    generation: bytes
    files: TensorFiles
    groups: Groups  # values by the groups in which ranks compare them
    metadata: EncodedTensorMetadata | None = None  # of the tensors, only on rank 0

    @property
    def nbytes(self) -> int:
        """Approximate memory size of the plan in bytes."""
        return 1000 * len(self.files.plan.records) + (self.metadata.nbytes if self.metadata else 0)


SAVE_PLANS = PlanCache[CachedSavePlan]()
"""Cache of the save plans that this process has executed."""


@dataclass(frozen=True, kw_only=True)
class _SaveCallOptions(SaveOptions):
    process_group: Annotated[
        dist.ProcessGroup | None,
        Option(
            "Process group of the ranks, with a backend for CPU tensors (gloo). None "
            "uses the default group, or only this process if there is none."
        ),
    ] = None
    collectives: Annotated[
        bool,
        Option(
            "Coordinate the ranks. If False, each rank writes all its data and separate "
            "metadata without waiting. The directory is then complete when the last rank "
            "is done."
        ),
    ] = True


@accept_keywords(_SaveCallOptions)
def save(state_dict: StateDict, path: str | TreePath, options: _SaveCallOptions) -> TreePath:
    """Save *state_dict* atomically as a DCP directory. Call it on all ranks.

    Args:
        state_dict: Nested dictionaries of tensors, DTensors, ShardedTensors and other values. For
            objects with ``state_dict()``, that method is called. *state_dict* is not changed.
        path: Destination, on a file system that all ranks share, or a URL (``s3://``, ``gs://``).
            For a URL, ``.metadata`` is uploaded last.
        options: All other arguments.

    Returns:
        The absolute path.

    Raises:
        CkptError: The save failed on some rank. It is raised on every rank, and nothing was
            published.
    """
    ranks = get_rank_collectives(options.process_group)
    if options.collectives:
        with pause_gc():  # a garbage collection would take as long as writing gigabytes
            return write_collectively(state_dict, parse_path(path), ranks, options)
    require_local_target(path)
    return write_rank_local(flatten_state(state_dict), Path(path), ranks.rank, ranks.world, options)


def write_collectively(
    state: FlatState | StateDict | LocalState,
    path: TreePath,
    ranks: RankCollectives,
    options: SaveOptions,
    plans: PlanCache[CachedSavePlan] = SAVE_PLANS,
) -> TreePath:
    """Plan, write and publish the state of all ranks, as :func:`save` does."""
    with show_options_as_keywords(SaveOptions), ExitStack() as stack:
        save = CollectiveSave(ranks, path, options, plans)
        statements = ranks.all_gather(save.prepare(state, stack))
        save.require_agreement(statements)
        return save.write_and_publish(statements)


def write_rank_local(
    state: FlatState | LocalState, path: TreePath, rank: int, world: int, options: SaveOptions
) -> TreePath:
    """Write this rank's state and a separate metadata file to *path*, without collectives."""
    target = RankFolderTarget(path, rank, options)
    local = build_local_state(state, trusted=options.trusted)
    global_plan = make_rank_local_plan(rank, world, local.packed_shards)
    files = lay_out_rank_files(
        rank,
        local.shards,
        global_plan.shares[rank],
        local.strides,
        local.values,
        options.choose_file_count,
    )
    with ExitStack() as stack:
        target.prepare_target(stack)
        target.write_files(files.plan, local.pieces)
        items = [
            files.tensors.items if rank_number == rank else NO_ITEMS for rank_number in range(world)
        ]
        values = [
            (Blob(name, local.shards.paths[name]), item) for name, item in files.items.items()
        ]
        origin = Origin(make_nonce().hex(), world)
        target.publish(make_tensor_metadata(global_plan, items).add_values(values, origin))
    return target.target


class CollectiveSave:
    """Collective operation in which all ranks save one checkpoint."""

    _local: LocalState
    _plan_key: bytes
    _save_target: SaveTarget
    _global_plan: GlobalPlan
    _plan: CachedSavePlan | None = None
    _error: BaseException | None = None

    def __init__(
        self,
        ranks: RankCollectives,
        path: TreePath,
        options: SaveOptions,
        plans: PlanCache[CachedSavePlan],
    ) -> None:
        self._ranks = ranks
        self._target = path
        self._options = options
        self._plans = plans

    def prepare(self, state: FlatState | StateDict | LocalState, stack: ExitStack) -> RankStatement:
        """Collect this rank's shards, and on rank 0 also prepare the destination.

        Errors are not raised here but in :meth:`require_agreement`, so that all ranks raise.
        """
        options = self._options
        try:
            self._save_target = build_target(self._target, options)
            self._target = self._save_target.target
            self._local = build_local_state(state, trusted=options.trusted)
            self._plan_key = compute_plan_key(self._local, self._ranks, options)
            self._plan = plan = self._plans.get(self._plan_key)
            if self._ranks.rank == 0:
                self._save_target.prepare_target(stack)
            return RankStatement(
                str(self._target),
                {"files": options.files, "overwrite": options.overwrite},
                make_nonce(),
                self._local.packed_shards.identity,
                plan.generation if plan else b"",
                compute_group_digests(plan.groups, self._local.shards.values) if plan else {},
            )
        except BaseException as error:
            self._error = error
            return RankStatement(str(self._target), problem=to_sendable_error(error))

    def require_agreement(self, statements: Sequence[RankStatement]) -> None:
        """Raise on all ranks if any rank failed to prepare, or if paths or options differ."""
        if self._error is not None:
            raise self._error
        require_agreement(statements, self._ranks.rank)

    def write_and_publish(self, statements: Sequence[RankStatement]) -> TreePath:
        """Write this rank's files, and on rank 0 write the metadata and publish the checkpoint.

        The ranks reuse their cached plans if these are valid on all ranks. Otherwise, they make a
        new plan.
        """
        rank, local = self._ranks.rank, self._local
        new_generation = compute_generation(statements)
        self._save_id = new_generation.hex()
        reused_plan = self._plan if are_cached_plans_valid(statements) else None
        share = (
            None if reused_plan else self._make_new_plan(is_first_with_identity(statements, rank))
        )

        def write_files() -> WriteReport:
            if share:
                choose_file_count = self._options.choose_file_count
                files = lay_out_tensors(rank, local.shards, share, local.strides, choose_file_count)
                groups = unpack_groups(list(local.shards.paths), share.groups)
                self._plan, stored_names = (
                    CachedSavePlan(new_generation, files, groups),
                    share.values,
                )
            else:
                assert reused_plan
                files, groups = reused_plan.files, reused_plan.groups
                stored_names = choose_values_to_write(
                    rank, groups, local.shards, [entry.groups for entry in statements]
                )
            output = append_values(rank, files, stored_names, local.values)
            self._save_target.write_files(output.plan, local.pieces)
            sizes = {file.path: file.size for file in output.plan.files}
            values = [
                (self._describe_value(*entry), output.items[entry[1]])
                for entry in stored_names.items()
            ]
            return WriteReport(sizes, values, files.items if share else None)

        gather_and_scatter(self._ranks, write_files, self._publish_metadata)
        assert self._plan
        self._plans.put(self._plan_key, self._plan)
        record_visited_checkpoint(self._target)
        return self._target

    def _make_new_plan(self, first: bool) -> RankShare:
        packed = (
            self._local.packed_shards if first else self._local.packed_shards.without_structure()
        )

        def add_replica_digests() -> PackedShards:
            """Return the description of this rank's shards, with digests of possible replicas."""
            options = self._options
            if not options.compare_replicas or self._ranks.world == 1:
                return packed
            digests = options.digests or partial(
                compute_replica_digests, jobs=choose_thread_count(options.jobs)
            )
            return packed.with_replicas(digests(self._local))

        def plan_globally(all_packed: list[PackedShards]) -> Sequence[RankShare]:
            self._global_plan = make_global_plan(all_packed)
            return self._global_plan.shares

        return gather_and_scatter(self._ranks, add_replica_digests, plan_globally)

    def _describe_value(self, name: str, under: str) -> OutputTensor | Blob:
        """Describe a value or small tensor *name*, which this rank writes with the name *under*."""
        rank, shards = self._ranks.rank, self._local.shards
        if name in shards.tensors:
            return make_rank_tensor(rank, under, shards.tensors[name])
        return Blob(under, get_written_path(rank, name, under, shards.paths))

    def _publish_metadata(self, reports: list[WriteReport]) -> Sequence[None]:
        plan = self._plan
        assert plan
        require_visible_rank_files(
            self._save_target, {rank: report.sizes for rank, report in enumerate(reports)}
        )
        items = [report.items for report in reports if report.items is not None]
        if items:
            plan.metadata = make_tensor_metadata(self._global_plan, items)
        assert plan.metadata
        values = [value for report in reports for value in report.values]
        content = plan.metadata.add_values(values, Origin(self._save_id, self._ranks.world))
        self._save_target.publish(content)
        return [None] * len(reports)


def compute_plan_key(state: LocalState, ranks: RankCollectives, options: SaveOptions) -> bytes:
    """Compute a digest of everything on which a rank's plan depends."""
    options_key = (options.files, choose_thread_count(options.jobs), options.compare_replicas)
    context = (KEY_VERSION, ranks.rank, ranks.world, *options_key)
    return compute_digest((context, state.packed_shards.sharding, state.strides))


class WriteReport(NamedTuple):
    """Sizes and positions of the data in the files that one rank has written."""

    sizes: dict[str, int]
    values: list[tuple[OutputTensor | Blob, Item]]
    items: RankItems | None


def list_chunks_read_by_plan(plan: CachedSavePlan) -> set[int]:
    """List the indices of the chunks that a rank writes when it executes *plan*."""
    transfers = plan.files.plan.transfers
    return {int(parse_memory_key(file)) for copy in transfers for file in copy.list_files()}
