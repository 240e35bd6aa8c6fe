"""``ckptctl.save``: the state of all ranks as one DCP directory that appears when it is whole.

Where plans hold there is one exchange before a byte is written, in which ranks agree that they do,
and one afterwards, in which rank 0 learns that all are done and publishes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import torch.distributed as dist

from ckptctl.catalog import Blob, memory_key
from ckptctl.distributed.group import coordinator, threads
from ckptctl.distributed.plan_cache import PlanCache
from ckptctl.distributed.positions import note_position
from ckptctl.distributed.saving.destination import RankFolder, SaveTarget, require_local, target_at
from ckptctl.distributed.saving.local_state import LocalState, local_state, replica_digests
from ckptctl.distributed.saving.options import SaveOptions
from ckptctl.distributed.state import State, StateDict, state_of
from ckptctl.errors import StorageError
from ckptctl.formats.base import OutputTensor
from ckptctl.formats.dcp.metadata import Item, Origin
from ckptctl.formats.dcp.metadata_writer import TensorMetadata
from ckptctl.keywords import in_python, keywords
from ckptctl.ops.ranks.agreement import (
    RankStatement,
    first_to_say,
    generation,
    new_nonce,
    require_agreement,
    unchanged,
)
from ckptctl.ops.ranks.coordinator import Coordinator, sendable, through_first
from ckptctl.ops.saving.files import (
    RankItems,
    TensorFiles,
    rank_files,
    tensor_files,
    tensor_metadata,
    with_values,
)
from ckptctl.ops.saving.global_plan import GlobalPlan, RankShare, make_global_plan, own_plan
from ckptctl.ops.saving.local_shards import (
    Groups,
    Packed,
    digest,
    group_digests,
    pack,
    path_of,
    tensor_apart,
    unpack_groups,
    written_now,
)
from ckptctl.options import Option
from ckptctl.storage.paths import named
from ckptctl.storage.threads import no_collection
from ckptctl.storage.tree import TreePath

VERSION = 1
"""Of what the key of a plan is made of."""
NOTHING = RankItems((), (), (), ())


@dataclass(slots=True)
class SavedPlan:
    """A plan that a rank has carried out; no position in it depends on a value."""

    generation: bytes
    files: TensorFiles
    groups: Groups  # its values by the groups in which ranks compare them
    metadata: TensorMetadata | None = None  # rank 0 only: of the tensors

    @property
    def nbytes(self) -> int:
        """Return about how much memory it takes."""
        return 1000 * len(self.files.plan.records) + (self.metadata.nbytes if self.metadata else 0)


PLANS = PlanCache[SavedPlan]()
"""The plans of this process."""


@dataclass(frozen=True, kw_only=True)
class _Save(SaveOptions):
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


@keywords(_Save)
def save(state_dict: StateDict, path: str | TreePath, options: _Save) -> TreePath:
    """Save *state_dict* atomically as a DCP directory. Call it on all ranks.

    Args:
        state_dict: Nested dictionaries of tensors, DTensors, ShardedTensors and other values. For
            objects with ``state_dict()``, that method is called. It is not changed.
        path: Destination, on a file system that all ranks share, or a URL (``s3://``, ``gs://``).
            For a URL, ``.metadata`` is uploaded last.
        options: All other arguments.

    Returns:
        The absolute path.

    Raises:
        CkptError: The save failed on some rank. It is raised on every rank, and nothing was
            published.
    """
    ranks = coordinator(options.process_group)
    if options.collectives:
        with no_collection():  # training waits, and a search takes as long as gigabytes
            return write(state_dict, named(path), ranks, options)
    require_local(path)
    return write_alone(state_of(state_dict), Path(path), ranks.rank, ranks.world, options)


def write(
    state: State | StateDict | LocalState,
    path: TreePath,
    ranks: Coordinator,
    options: SaveOptions,
    plans: PlanCache[SavedPlan] = PLANS,
) -> TreePath:
    """Plan, write and publish the state of all ranks; see :func:`save`."""
    with in_python(SaveOptions), ExitStack() as stack:
        run = CollectiveSave(ranks, path, options, plans)
        said = ranks.all_gather(run.prepare(state, stack))
        run.agree(said)
        return run.carry_out(said)


def write_alone(
    state: State | LocalState, path: TreePath, rank: int, world: int, options: SaveOptions
) -> TreePath:
    """Write this rank's state, and metadata of it, below *path*."""
    place = RankFolder(path, rank, options)
    own = local_state(state, trusted=options.trusted)
    global_plan = own_plan(rank, world, pack(own.shards))
    files = rank_files(
        rank, own.shards, global_plan.shares[rank], own.steps, own.values, options.file_count
    )
    with ExitStack() as stack:
        place.make_room(stack)
        place.fill(files.plan, own.pieces)
        items = [files.tensors.items if other == rank else NOTHING for other in range(world)]
        values = [(Blob(name, own.shards.paths[name]), item) for name, item in files.items.items()]
        origin = Origin(new_nonce().hex(), world)
        place.publish(tensor_metadata(global_plan, items).complete(values, origin))
    return place.target


class CollectiveSave:
    """One save."""

    _held: LocalState
    _packed: Packed
    _key: bytes
    _place: SaveTarget
    _global_plan: GlobalPlan
    _plan: SavedPlan | None = None
    _error: BaseException | None = None

    def __init__(
        self, ranks: Coordinator, path: TreePath, options: SaveOptions, plans: PlanCache[SavedPlan]
    ) -> None:
        self._ranks = ranks
        self._target = path
        self._options = options
        self._plans = plans

    def prepare(self, state: State | StateDict | LocalState, stack: ExitStack) -> RankStatement:
        """Collect this rank's shards; on rank 0 also make room beside the destination."""
        options = self._options
        try:
            self._place = target_at(self._target, options)
            self._target = self._place.target
            self._held = local_state(state, trusted=options.trusted)
            self._packed = pack(self._held.shards)
            self._key = plan_key(self._held, self._packed, self._ranks, options)
            self._plan = plan = self._plans.get(self._key)
            if self._ranks.rank == 0:
                self._place.make_room(stack)
            return RankStatement(
                str(self._target),
                {"files": options.files, "overwrite": options.overwrite},
                new_nonce(),
                self._packed.identity,
                plan.generation if plan else b"",
                group_digests(plan.groups, self._held.shards.values) if plan else {},
            )
        except BaseException as error:
            self._error = error
            return RankStatement(str(self._target), problem=sendable(error))

    def agree(self, said: Sequence[RankStatement]) -> None:
        """Go on only if all ranks do, and mean the same."""
        if self._error is not None:
            raise self._error
        require_agreement(said, self._ranks.rank)

    def carry_out(self, said: Sequence[RankStatement]) -> TreePath:
        """Write this rank's files; rank 0 adds the metadata and publishes when all are done.

        The plan that all ranks have holds, or they make a new one.
        """
        rank, held = self._ranks.rank, self._held
        made = generation(said)
        self._save_id = made.hex()
        known = self._plan if unchanged(said) else None
        share = None if known else self._share(first_to_say(said, rank))

        def work() -> WriteReport:
            if share:
                count = self._options.file_count
                files = tensor_files(rank, held.shards, share, held.steps, count)
                groups = unpack_groups(list(held.shards.paths), share.groups)
                self._plan, written = SavedPlan(made, files, groups), share.values
            else:
                assert known
                files, groups = known.files, known.groups
                written = written_now(rank, groups, held.shards, [one.groups for one in said])
            output = with_values(rank, files, written, held.values)
            self._place.fill(output.plan, held.pieces)
            sizes = {file.path: file.size for file in output.plan.files}
            values = [(self._leaf(*one), output.items[one[1]]) for one in written.items()]
            return WriteReport(sizes, values, files.items if share else None)

        through_first(self._ranks, work, self._publish)
        assert self._plan
        self._plans.put(self._key, self._plan)
        note_position(self._target)
        return self._target

    def _share(self, first: bool) -> RankShare:
        packed = self._packed if first else self._packed.shortened()

        def compared() -> Packed:
            """Return what is sent, with digests of what other ranks may hold as well."""
            options = self._options
            if not options.compare_replicas or self._ranks.world == 1:
                return packed
            digests = options.digests or partial(replica_digests, jobs=threads(options.jobs))
            return packed.with_replicas(digests(self._held))

        def answer(found: list[Packed]) -> Sequence[RankShare]:
            self._global_plan = make_global_plan(found)
            return self._global_plan.shares

        return through_first(self._ranks, compared, answer)

    def _leaf(self, name: str, under: str) -> OutputTensor | Blob:
        """Return the description of a leaf, or of a tensor that this rank keeps apart."""
        rank, shards = self._ranks.rank, self._held.shards
        if name in shards.tensors:
            return tensor_apart(rank, under, shards.tensors[name])
        return Blob(under, path_of(rank, name, under, shards.paths))

    def _publish(self, written: list[WriteReport]) -> Sequence[None]:
        plan = self._plan
        assert plan
        self._require_files(written)
        items = [one.items for one in written if one.items is not None]
        if items:
            plan.metadata = tensor_metadata(self._global_plan, items)
        assert plan.metadata
        values = [value for one in written for value in one.values]
        content = plan.metadata.complete(values, Origin(self._save_id, self._ranks.world))
        self._place.publish(content)
        return [None] * len(written)

    def _require_files(self, written: Sequence[WriteReport]) -> None:
        """Make sure that rank 0 sees all files of the other ranks."""
        for rank, one in enumerate(written):
            for name, size in one.sizes.items():
                if self._place.size(name) != size:
                    raise StorageError(
                        f"a file that rank {rank} wrote is missing",
                        where=f"{self._target}, {name}",
                        why="rank 0 does not see the complete file",
                        hint="save to a file system that all ranks share, or with "
                        "collectives=False",
                    )


def plan_key(own: LocalState, packed: Packed, ranks: Coordinator, options: SaveOptions) -> bytes:
    """Return a digest of all that a rank's plan depends on; *packed* is *own* as it is sent."""
    how = (options.files, threads(options.jobs), options.compare_replicas)
    here = (VERSION, ranks.rank, ranks.world, *how)
    return digest((here, packed.sharding, own.steps))


class WriteReport(NamedTuple):
    """The report of a rank that has written its files."""

    sizes: dict[str, int]
    values: list[tuple[OutputTensor | Blob, Item]]
    items: RankItems | None


def chunks_of(plan: SavedPlan) -> set[int]:
    """Return the indices of the chunks that a rank writes."""
    transfers = plan.files.plan.transfers
    return {int(memory_key(file)) for copy in transfers for file in copy.files()}
