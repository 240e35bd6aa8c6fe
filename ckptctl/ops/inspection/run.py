"""A run as ``inspect`` describes it: its checkpoints, each verified as ``ls`` does."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from ckptctl import formats
from ckptctl.errors import CkptError
from ckptctl.ops.inspection.result import Inspection, Member
from ckptctl.ops.runs.entries import is_run
from ckptctl.ops.runs.health import Checkpoint
from ckptctl.ops.runs.listing import read_run
from ckptctl.storage.paths import shown, source_path


def overview(path: str | Path) -> Inspection | None:
    """Describe the run that *path* is as ``inspect`` does.

    None: it is a checkpoint itself, or none in it is named as in a run.
    """
    root = source_path(path)
    if not is_run(root) or formats.sniff(root):
        return None
    run = read_run(root)
    return Inspection.of_members(shown(path), tuple(map(_member, run.checkpoints)), run)


def _member(one: Checkpoint) -> Member:
    problems = () if one.complete else (one.problem,)
    size = 0, 0
    with suppress(CkptError, OSError):
        catalog = formats.open_checkpoint(one.path)
        size = len(catalog.tensors), catalog.nbytes
    return Member(str(one.path), one.format, *size, problems, one.verdict, one.read_failed)
