"""Public functions about the folder of a run: its checkpoints, the newest one, and which go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptctl.keywords import keywords
from ckptctl.option_checks import AnyPath, place
from ckptctl.runs.run_options import PruneOptions
from ckptctl.tree import TreePath

if TYPE_CHECKING:
    from ckptctl.runs.listing import Newest, RunFolder
    from ckptctl.runs.removal import PrunePlan, PruneResult


def ls(root: AnyPath = ".") -> RunFolder:
    """List the checkpoints of a training run, with their verdicts and protections.

    Args:
        root: Folder of the training run's checkpoints.

    Raises:
        CkptError: The folder is missing or cannot be read.
    """
    from ckptctl.runs.listing import read_run

    return read_run(_looked_at_anew(root))


def latest(root: AnyPath = ".") -> Newest:
    """Find the newest complete checkpoint of a training run (``path``).

    Args:
        root: Folder of the training run's checkpoints.

    Raises:
        SourceNotFoundError: No checkpoint in the folder is complete.
        UnsupportedError: The verdict on the newest checkpoint is unknown. It may be complete.
    """
    from ckptctl.runs.listing import newest

    return newest(_looked_at_anew(root))


def _looked_at_anew(root: AnyPath) -> TreePath:
    """Return the folder of a run; what an earlier call saw behind a URL is forgotten."""
    from ckptctl.runs.run_store import run_store

    path = place(root)
    run_store(path).refresh()
    return path


@keywords(PruneOptions)
def plan_prune(root: AnyPath, options: PruneOptions) -> PrunePlan:
    """Plan which checkpoints of a training run to remove, without changing anything.

    Args:
        root: Folder of the training run's checkpoints.
        options: All others. What *keep* or one of its kind keeps stays.

    Raises:
        CkptError: No option selects checkpoints to keep, or the removal would not be safe.
    """
    from ckptctl.runs.removal import plan_prune

    policy, thin = options.policy(), options.thin is not None
    return plan_prune(place(root), policy, force=options.force, thin=thin)


@keywords(PruneOptions)
def prune(root: AnyPath, options: PruneOptions) -> PruneResult:
    """Remove the checkpoints of a training run that no option keeps, without confirmation.

    The newest complete checkpoint always stays, and so do checkpoints that a pointer such as
    ``latest`` names.

    Args:
        root: Folder of the training run's checkpoints.
        options: All others.

    Raises:
        PartialError: Some checkpoints could not be removed.
        CkptError: The removal failed. Nothing was removed.
    """
    from ckptctl.runs.removal import plan_prune, run_prune

    policy, thin = options.policy(), options.thin is not None
    result = run_prune(plan_prune(place(root), policy, force=options.force, thin=thin))
    result.require_all()
    return result
