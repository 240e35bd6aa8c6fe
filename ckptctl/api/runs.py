"""Public functions about the folder of a run: its checkpoints, the newest one, and which go."""

from __future__ import annotations

from ckptctl.keywords import keywords
from ckptctl.option_checks import AnyPath, place
from ckptctl.runs import removal
from ckptctl.runs.listing import Newest, RunFolder, newest, read_run
from ckptctl.runs.removal import PrunePlan, PruneResult
from ckptctl.runs.run_options import PruneOptions
from ckptctl.runs.run_store import run_store
from ckptctl.tree import TreePath


def ls(root: AnyPath = ".") -> RunFolder:
    """List the checkpoints of a training run, with their verdicts and protections.

    Args:
        root: Folder of the training run's checkpoints.

    Raises:
        CkptError: The folder is missing or cannot be read.
    """
    return read_run(_looked_at_anew(root))


def latest(root: AnyPath = ".") -> Newest:
    """Find the newest complete checkpoint of a training run (``path``).

    Args:
        root: Folder of the training run's checkpoints.

    Raises:
        SourceNotFoundError: No checkpoint in the folder is complete.
        UnsupportedError: The verdict on the newest checkpoint is unknown. It may be complete.
    """
    return newest(_looked_at_anew(root))


def _looked_at_anew(root: AnyPath) -> TreePath:
    """Return the folder of a run; what an earlier call saw behind a URL is forgotten."""
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
    policy, thin = options.policy(), options.thin is not None
    return removal.plan_prune(place(root), policy, force=options.force, thin=thin)


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
    policy, thin = options.policy(), options.thin is not None
    plan = removal.plan_prune(place(root), policy, force=options.force, thin=thin)
    result = removal.run_prune(plan)
    result.require_all()
    return result
