"""Saving a state dict of one rank or many as a DCP directory that appears when it is whole."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ckptctl.catalog import Blob
from ckptctl.distributed.group import coordinator
from ckptctl.distributed.host_memory import host_views
from ckptctl.distributed.plan_cache import PlanCache, SavedPlan
from ckptctl.distributed.state import State, StateDict, state_of
from ckptctl.errors import CkptError, StorageError
from ckptctl.formats.dcp_metadata import METADATA, Item
from ckptctl.ops.agreement import (
    Statement,
    first_to_say,
    generation,
    require_agreement,
    unchanged,
)
from ckptctl.ops.coordinator import Coordinator, through_first
from ckptctl.ops.holdings import Chunk, Holding, Packed, digest, pack
from ckptctl.ops.overwrite import replaceable
from ckptctl.ops.save_decision import Decision, Share, decide
from ckptctl.ops.save_values import group_digests, unpack_groups, written_now
from ckptctl.ops.saving import (
    RankFiles,
    RankItems,
    TensorFiles,
    metadata,
    tensor_files,
    with_values,
)
from ckptctl.planner.copies import MIB
from ckptctl.planner.plan import Plan
from ckptctl.storage.executor import ExecutionOptions, execute
from ckptctl.storage.publish import Staging, destination, staging, staging_directory
from ckptctl.storage.sync import sync_directory

VERSION = 1
"""Of what a plan's key is made of."""

PLANS = PlanCache()
"""The plans of this process."""


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """How a checkpoint is written.

    Attributes:
        overwrite: Whether to replace a checkpoint of that name, in one step.
        files: Files per rank; threads do not wait for each other when they write several.
        jobs: Threads per rank; 0: one per core, at most four.
        memory: Bytes of buffers per rank, for tensors that have to be reordered or copied from a
            device on their way.
        sync: Whether it has to be on disk before it gets its name. Without, a crash of the machine
            can leave a checkpoint whose data is not there.
        checksum: Whether records carry CRC-32, as torch writes them; ``verify`` needs them.
    """

    overwrite: bool = False
    files: int = 1
    jobs: int = 0
    memory: int = 64 * MIB
    sync: bool = True
    checksum: bool = True

    def execution(self) -> ExecutionOptions:
        """Return what the executor is told."""
        return ExecutionOptions(
            jobs=self.jobs,
            memory=self.memory,
            checksum=self.checksum,
            sync=self.sync,
            shared=True,
        )


def save(
    state_dict: StateDict,
    path: str | Path,
    *,
    process_group: dist.ProcessGroup | None = None,
    collectives: bool = True,
    overwrite: bool = False,
    files: int = 1,
    jobs: int = 0,
    memory: int = 64 * MIB,
    sync: bool = True,
    checksum: bool = True,
) -> Path:
    """Save *state_dict* as a DCP directory, whole or not at all; all ranks call it.

    Args:
        state_dict: Nested dictionaries of tensors, DTensors, ShardedTensors and other leaves;
            objects with ``state_dict()`` are asked for theirs. It stays as it is.
        path: Where the checkpoint will appear; on a file system that all ranks see.
        process_group: The ranks, in a group whose backend takes CPU tensors (gloo); None: the
            default group, or this process alone.
        collectives: Without, every rank writes all that it holds, and metadata of its own, and
            waits for nobody: the directory is complete when the last rank is done.
        overwrite: See :class:`SaveOptions`, also for all that follow.
        files: How many per rank.
        jobs: Threads per rank.
        memory: Bytes of buffers per rank.
        sync: Whether it has to be on disk before it gets its name.
        checksum: Whether records carry CRC-32.

    Returns:
        The absolute path.

    Raises:
        CkptError: Nothing was published; on every rank, whichever failed.
    """
    options = SaveOptions(overwrite, files, jobs, memory, sync, checksum)
    ranks = coordinator(process_group)
    if collectives:
        return write(state_dict, Path(path), ranks, options)
    from ckptctl.distributed.rank_local import write_alone

    return write_alone(state_dict, Path(path), ranks.rank, ranks.world, options)


def write(
    state: State | StateDict,
    path: Path,
    ranks: Coordinator,
    options: SaveOptions,
    plans: PlanCache = PLANS,
) -> Path:
    """Plan, write and publish what all ranks hold; see :func:`save`.

    Args:
        state: What this rank holds.
        path: Where the checkpoint will appear.
        ranks: The group.
        options: How.
        plans: Where plans are kept for the next save.
    """
    with ExitStack() as stack:
        run = _Run(ranks, path, options, plans, stack)
        said = ranks.all_gather(run.prepare(state))
        run.agree(said)
        files = run.planned(said)
        return run.carry_out(files)


class _Run:
    """One save, as one rank goes through it."""

    def __init__(
        self,
        ranks: Coordinator,
        path: Path,
        options: SaveOptions,
        plans: PlanCache,
        stack: ExitStack,
    ) -> None:
        self._ranks = ranks
        self._path = path
        self._options = options
        self._plans = plans
        self._stack = stack
        self._target = path
        self._error: BaseException | None = None
        self._stage: Staging | None = None
        self._plan: SavedPlan | None = None
        self._decision: Decision | None = None

    def prepare(self, state: State | StateDict) -> Statement:
        """Find out what this rank holds; on rank 0 also make room beside the destination."""
        try:
            self._target = destination(self._path.expanduser().absolute())
            self._hold(state if isinstance(state, State) else state_of(state))
            self._plan = self._plans.get(self._key)
            groups = group_digests(self._plan.groups, self._held.values) if self._plan else {}
            if self._ranks.rank == 0:
                self._stage = self._stack.enter_context(
                    staging(
                        self._target,
                        overwrite=self._options.overwrite,
                        is_checkpoint=replaceable,
                    )
                )
        except BaseException as error:
            self._error = error
            return Statement(str(self._target), problem=as_error(error))
        kept = self._plan.generation if self._plan else b""
        how = {"files": self._options.files, "overwrite": self._options.overwrite}
        return Statement(str(self._target), how, self._key, self._packed.identity, kept, groups)

    def _hold(self, state: State) -> None:
        self._values = {name: pickled(leaf.value) for name, leaf in state.values.items()}
        self._held = holding(state, self._values)
        self._packed = pack(self._held)
        self._pieces = [piece.tensor for one in state.tensors.values() for piece in one.pieces]
        self._steps = [tuple(tensor.stride()) for tensor in self._pieces]
        self._key = self._digest()

    def _digest(self) -> bytes:
        """Return the digest of all that this rank's part of a plan depends on."""
        boxes = [[(box.offsets, box.sizes) for box in boxes] for boxes in self._packed.boxes]
        here = (VERSION, self._ranks.rank, self._ranks.world, self._options.files)
        found = (here, self._packed.identity, boxes, self._packed.which, self._steps)
        return digest(found)

    def agree(self, said: Sequence[Statement]) -> None:
        """Go on only if all ranks do, and mean the same."""
        if self._error is not None:
            raise self._error
        require_agreement(said, self._ranks.rank)

    def planned(self, said: Sequence[Statement]) -> RankFiles:
        """Return what this rank writes, by the plan that all ranks have or by a new one."""
        if self._plan and unchanged(said):
            groups = [one.groups for one in said]
            written = written_now(self._ranks.rank, self._plan.groups, self._held.paths, groups)
            return with_values(self._ranks.rank, self._plan.files, written, self._values)
        share = self._share(first=first_to_say(said, self._ranks.rank))
        files = tensor_files(
            self._ranks.rank, self._held, share, self._steps, self._options.files
        )
        self._plan = SavedPlan(
            generation(said),
            files,
            frozenset(share.chunks),
            unpack_groups(list(self._held.paths), share.groups),
            self._held.paths,
        )
        return with_values(self._ranks.rank, files, share.values, self._values)

    def _share(self, *, first: bool) -> Share:
        packed = self._packed if first else self._packed.without_structure()

        def answer(held: list[Packed]) -> Sequence[Share]:
            self._decision = decide(held)
            return self._decision.shares

        return through_first(self._ranks, lambda: packed, answer)

    def carry_out(self, files: RankFiles) -> Path:
        """Write this rank's files; rank 0 adds the metadata and publishes when all are done."""
        assert self._plan
        self._laid_out = self._plan.files
        chunks = self._plan.chunks
        data = staging_directory(self._target) / "data"
        new = self._plan.generation != b"" and self._plans.get(self._key) is not self._plan

        def work() -> _Written:
            fill(files.plan, self._pieces, chunks, data, self._options)
            sizes = {file.path: file.size for file in files.plan.files}
            values = [
                (under, self._held.paths[name], files.values[under])
                for name, under in files.written.items()
            ]
            return _Written(sizes, values, self._laid_out.items if new else None)

        through_first(self._ranks, work, self._finish)
        self._plans.put(self._key, self._plan)
        return self._target
