"""Public functions for training runs: list, find and prune checkpoints."""

from __future__ import annotations

from ckptctl.keywords import accept_keywords
from ckptctl.option_checks import AnyPath, check_location
from ckptctl.runs import removal
from ckptctl.runs.listing import Newest, RunFolder, find_newest_checkpoint, read_run
from ckptctl.runs.removal import PrunePlan, PruneResult
from ckptctl.runs.run_options import PruneOptions
from ckptctl.runs.run_store import open_run_store
from ckptctl.tree import TreePath


def ls(root: AnyPath = ".") -> RunFolder:
    """List the checkpoints of a training run, with their verdicts and protections.

    Args:
        root: Folder of the training run's checkpoints.

    Raises:
        CkptError: The folder is missing or cannot be read.
    """
    return read_run(_refresh_run(root))


def latest(root: AnyPath = ".") -> Newest:
    """Find the newest complete checkpoint of a training run (``path``).

    Args:
        root: Folder of the training run's checkpoints.

    Raises:
        SourceNotFoundError: No checkpoint in the folder is complete.
        UnsupportedError: The verdict on the newest checkpoint is unknown. It may be complete.
    """
    return find_newest_checkpoint(_refresh_run(root))


def _refresh_run(root: AnyPath) -> TreePath:
    """Parse the path or URL of a run, and drop cached listings of its folder."""
    path = check_location(root)
    open_run_store(path).refresh_listing()
    return path


@accept_keywords(PruneOptions)
def plan_prune(root: AnyPath, options: PruneOptions) -> PrunePlan:
    """Plan which checkpoints of a training run to remove, without changing anything.

    Args:
        root: Folder of the training run's checkpoints.
        options: All other arguments. Checkpoints that any *keep* option matches are kept.

    Raises:
        CkptError: No option selects checkpoints to keep, or the removal would not be safe.
    """
    policy, thin = options.build_policy(), options.thin is not None
    return removal.plan_prune(check_location(root), policy, force=options.force, thin=thin)


@accept_keywords(PruneOptions)
def prune(root: AnyPath, options: PruneOptions) -> PruneResult:
    """Remove the checkpoints of a training run that no option keeps, without confirmation.

    The newest complete checkpoint is always kept, and so are targets of pointers such as
    ``latest``.

    Args:
        root: Folder of the training run's checkpoints.
        options: All other arguments.

    Raises:
        PartialError: Some checkpoints could not be removed.
        CkptError: The removal failed. Nothing was removed.
    """
    policy, thin = options.build_policy(), options.thin is not None
    plan = removal.plan_prune(check_location(root), policy, force=options.force, thin=thin)
    result = removal.run_prune(plan)
    result.require_no_failures()
    return result
