"""A run as ``inspect`` describes it: the checkpoints that ``ls`` lists, in the same words."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from ckptctl import formats
from ckptctl.errors import CkptError
from ckptctl.ops.inspection.result import Inspection, Member
from ckptctl.ops.runs.entries import is_run
from ckptctl.ops.runs.listing import Checkpoint, Run, read_run
from ckptctl.planner.retention import NOT_UNDERSTOOD
from ckptctl.storage.remote.path import path_of, shown


def run_at(path: str | Path) -> Run | None:
    """Return the run that *path* is; None: it is a checkpoint, or none is named as in a run."""
    root = path_of(path)
    return read_run(root) if is_run(root) and not formats.sniff(root) else None


def overview(path: str | Path, run: Run) -> Inspection:
    """Describe *run*.

    Args:
        path: As it was named.
        run: What :func:`run_at` returns.
    """
    problems = tuple(
        f"`{one.entry.path}`: {one.candidate.problem}"
        for one in run.checkpoints
        if not one.complete
    )
    members = tuple(map(_member, run.checkpoints))
    torn = any(member.torn for member in members)
    return Inspection(shown(path), "run", problems=problems, torn=torn, checkpoints=members)


def _member(one: Checkpoint) -> Member:
    problems = () if one.complete else (one.candidate.problem,)
    torn = not one.complete and one.candidate.state != NOT_UNDERSTOOD
    size = 0, 0
    with suppress(CkptError, OSError):
        catalog = formats.open_checkpoint(one.entry.path)
        size = len(catalog.tensors), catalog.nbytes
    return Member(str(one.entry.path), one.format, *size, problems, torn)
