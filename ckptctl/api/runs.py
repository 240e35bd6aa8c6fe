"""Public functions for training runs: list, find and prune checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Annotated

from ckptctl.conversion.conversion_options import ConversionOptions
from ckptctl.keywords import accept_keywords
from ckptctl.option_checks import AnyPath, check_location, check_new_location
from ckptctl.options import Option
from ckptctl.run_options import PruneOptions, SelectionOptions
from ckptctl.runs import removal
from ckptctl.runs.listing import Newest, RunFolder, find_newest_checkpoint, read_run
from ckptctl.runs.removal import PrunePlan, PruneResult
from ckptctl.runs.run_store import open_run_store
from ckptctl.tree import TreePath
from ckptctl.verbs import run_conversion, run_verification
from ckptctl.verbs.run_conversion_result import (
    ConvertedCheckpoint,
    RunConversionPlan,
    RunConversionResult,
)
from ckptctl.verbs.run_verification import RunVerification, VerifiedCheckpoint
from ckptctl.verbs.verification.verify_options import VerifyOptions

_REPORT = Option("Function called with the result for each checkpoint when it is finished.")


@dataclass(frozen=True, kw_only=True)
class _RunPlan(ConversionOptions, SelectionOptions):
    """Options of a conversion and of the selection of checkpoints."""


@dataclass(frozen=True, kw_only=True)
class _RunConversion(_RunPlan):
    report: Annotated[Callable[[ConvertedCheckpoint], None] | None, _REPORT] = None


@dataclass(frozen=True, kw_only=True)
class _RunVerification(VerifyOptions, SelectionOptions):
    report: Annotated[Callable[[VerifiedCheckpoint], None] | None, _REPORT] = None


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


@accept_keywords(_RunPlan)
def plan_run_conversion(run: AnyPath, dst: AnyPath, options: _RunPlan) -> RunConversionPlan:
    """Plan the conversion of each checkpoint of a training run, without writing anything.

    Args:
        run: Folder of the training run's checkpoints.
        dst: Folder of the outputs, or a path or URL in which ``{name}`` or ``{step}`` is replaced.
        options: All other arguments. Without *keep* options and *steps*, all checkpoints are
            converted.

    Raises:
        CkptError: The run, the options or the destination are not usable. Errors of a single
            checkpoint are in the plan.
    """
    return run_conversion.plan_conversions(
        check_location(run), check_new_location(dst), options, options, _get_environment(options)
    )


@accept_keywords(_RunConversion)
def convert_run(run: AnyPath, dst: AnyPath, options: _RunConversion) -> RunConversionResult:
    """Convert each checkpoint of a training run, and publish each result atomically.

    A failure does not stop the others. ``checkpoints`` of the result have a ``status``, and
    ``require_complete()`` raises if one was not converted. A destination that is shown to hold the
    conversion already is not written again.

    Args:
        run: Folder of the training run's checkpoints. It is never changed.
        dst: Folder of the outputs, or a path or URL in which ``{name}`` or ``{step}`` is replaced.
        options: All other arguments. Without *keep* options and *steps*, all checkpoints are
            converted.

    Raises:
        CkptError: The run, the options or the destination are not usable. Nothing was written.
    """
    plan = run_conversion.plan_conversions(
        check_location(run), check_new_location(dst), options, options, _get_environment(options)
    )
    return run_conversion.run_conversions(plan, options.report or _ignore, lambda *_: nullcontext())


@accept_keywords(_RunVerification)
def verify_run(run: AnyPath, options: _RunVerification) -> RunVerification:
    """Verify each checkpoint of a training run. Damage is a finding, not an error.

    Args:
        run: Folder of the training run's checkpoints. It is never changed, except that *manifest*
            adds a file to each checkpoint.
        options: All other arguments. Without *keep* options and *steps*, all checkpoints are
            verified.

    Raises:
        CkptError: The folder is missing or is not a run.
    """
    selection = run_verification.select_to_verify(
        check_location(run), options, options, _get_environment(options)
    )
    return run_verification.verify_checkpoints(
        selection, options, options.report or _ignore, lambda *_: nullcontext()
    )


def _get_environment(options: SelectionOptions) -> Mapping[str, str]:
    """Return the variables that may select a task, which only the task ``/N`` reads in Python."""
    return os.environ if options.task else {}


def _ignore(_: object) -> None:
    """Do nothing."""
