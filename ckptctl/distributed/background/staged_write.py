"""What a save in the background is made of: what is found, and how its copy is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypedDict

from ckptctl.distributed.background.staging import Staged
from ckptctl.distributed.background.writer_process import WriterProcess, require_shared
from ckptctl.distributed.saving.collective import plan_key
from ckptctl.distributed.saving.options import SaveOptions
from ckptctl.distributed.saving.plans import PLANS, SavedPlan
from ckptctl.distributed.saving.rank_local import write_alone
from ckptctl.distributed.saving.rank_output import Held, held
from ckptctl.distributed.saving.save import write
from ckptctl.distributed.state import StateDict, state_of
from ckptctl.ops.ranks.coordinator import Coordinator
from ckptctl.ops.saving.holdings import pack
from ckptctl.planner.plan import Plan
from ckptctl.storage.advance import Advance
from ckptctl.storage.execution.executor import execute
from ckptctl.storage.execution.options import Execution, ExecutionOptions


class SaveKeywords(TypedDict, total=False):
    """The options of :func:`ckptctl.save`; see :class:`SaveOptions`."""

    overwrite: bool
    files: int
    jobs: int
    memory: int
    sync: bool
    checksum: bool
    trusted: bool


class Found(NamedTuple):
    """What a rank holds, and the plan that it has for that."""

    held: Held
    plan: SavedPlan | None


def find(state_dict: StateDict, ranks: Coordinator, how: SaveOptions, collectives: bool) -> Found:
    """Return what this rank holds of a state dict.

    Args:
        state_dict: The state.
        ranks: With which it saves.
        how: Options.
        collectives: Whether the ranks share a plan.

    Raises:
        CkptError: It cannot be saved.
    """
    own = held(state_of(state_dict), trusted=how.trusted)
    if not collectives or ranks.world == 1:
        return Found(own, None)
    return Found(own, PLANS.get(plan_key(own, pack(own.holding), ranks, how)))


def write_staged(
    staged: Staged, path: Path, ranks: Coordinator, how: SaveOptions, *, collectives: bool
) -> Path:
    """Write and publish a copy; see :func:`ckptctl.save`.

    Args:
        staged: The copy.
        path: Where the checkpoint will appear.
        ranks: The group.
        how: Options.
        collectives: Whether the ranks save together.
    """
    if collectives:
        return write(staged.held, path, ranks, how)
    return write_alone(staged.held, path, ranks.rank, ranks.world, how)


def executor(staged: Staged, writer: WriterProcess | None) -> Callable[..., Execution]:
    """Return what carries out a plan, with nothing but what was copied.

    Args:
        staged: The copy.
        writer: Does it; None: this process.
    """
    regions = [staged.region] if staged.region else []
    if writer and regions:
        return partial(writer.execute, regions=regions)

    def execute_here(
        plan: Plan,
        root: Path,
        options: ExecutionOptions,
        progress: Advance,
        memory: Mapping[str, memoryview],
    ) -> Execution:
        require_shared(memory, regions)
        return execute(plan, root, options, progress, memory=memory)

    return execute_here
