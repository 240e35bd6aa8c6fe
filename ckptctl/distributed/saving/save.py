"""Saving a state dict of one rank or many as a DCP directory that appears when it is whole."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist

from ckptctl.distributed.group import coordinator
from ckptctl.distributed.plan_cache import PlanCache
from ckptctl.distributed.saving.collective import CollectiveSave
from ckptctl.distributed.saving.options import SaveOptions
from ckptctl.distributed.saving.plans import PLANS, SavedPlan
from ckptctl.distributed.saving.rank_local import write_alone
from ckptctl.distributed.saving.rank_output import Held, require_local
from ckptctl.distributed.state import State, StateDict, state_of
from ckptctl.ops.ranks.coordinator import Coordinator
from ckptctl.planner.copying.tile import MIB
from ckptctl.storage.paths import named


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
    trusted: bool = False,
) -> Path:
    """Save *state_dict* as a DCP directory, whole or not at all; all ranks call it.

    Args:
        state_dict: Nested dictionaries of tensors, DTensors, ShardedTensors and other leaves;
            objects with ``state_dict()`` are asked for theirs. It stays as it is.
        path: Where the checkpoint will appear; on a file system that all ranks see, or behind a URL
            (``s3://``, ``gs://``), where ``.metadata`` is uploaded last.
        process_group: The ranks, in a group whose backend takes CPU tensors (gloo); None: the
            default group, or this process alone.
        collectives: Without, every rank writes all that it holds, and metadata of its own, and
            waits for nobody: the directory is complete when the last rank is done.
        overwrite: See :class:`SaveOptions`, also for all that follow.
        files: How many per rank.
        jobs: Threads per rank; 0: its part of the host's cores, at most four.
        memory: Bytes of buffers per rank.
        sync: Whether it has to be on disk before it gets its name.
        checksum: Whether records carry CRC-32.
        trusted: Whether leaves are saved, too, that only ``load(trusted=True)`` reads again.

    Returns:
        The absolute path.

    Raises:
        CkptError: Nothing was published; on every rank, whichever failed.
    """
    options = SaveOptions(overwrite, files, jobs, memory, sync, checksum, trusted)
    ranks = coordinator(process_group)
    if collectives:
        return write(state_dict, named(path), ranks, options)
    require_local(path)
    return write_alone(state_of(state_dict), Path(path), ranks.rank, ranks.world, options)


def write(
    state: State | StateDict | Held,
    path: Path,
    ranks: Coordinator,
    options: SaveOptions,
    plans: PlanCache[SavedPlan] = PLANS,
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
        run = CollectiveSave(ranks, path, options, plans, stack)
        said = ranks.all_gather(run.prepare(state))
        run.agree(said)
        return run.carry_out(run.planned(said))
