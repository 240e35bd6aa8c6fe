"""Verification of the checkpoints of a run, one by one."""

from __future__ import annotations

import time as clock
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Annotated

from ckptctl import families
from ckptctl.errors import CkptError, PartialError, StorageError, quote_names
from ckptctl.results import JsonField, Result, round_seconds
from ckptctl.run_options import SelectionOptions
from ckptctl.runs.health import Checkpoint
from ckptctl.runs.selection import OtherEntries, RunSelection, select_checkpoints
from ckptctl.storage.threads import Advance
from ckptctl.tree import TreePath
from ckptctl.units import pluralize
from ckptctl.verbs.verification.verify import verify_checkpoint
from ckptctl.verbs.verification.verify_options import VerifyOptions
from ckptctl.verbs.verification.verify_result import Verification
from ckptctl.verdict import Verdict

StartItem = Callable[[str, int], AbstractContextManager[Advance | None]]
"""Starts the progress display of an activity for a number of bytes."""


@dataclass(frozen=True, slots=True)
class VerifiedCheckpoint(Result):
    """Verification of one checkpoint of a run."""

    checkpoint: Annotated[
        Checkpoint,
        JsonField("name of the checkpoint", of="name"),
        JsonField("step in its name", of="step"),
        JsonField("path of the checkpoint", of="path"),
        JsonField("size of the checkpoint", of="entry.nbytes", name="bytes"),
    ]
    verification: Annotated[
        Verification | None, JsonField("document of `verify`, or null if it could not be verified")
    ] = None
    error: Annotated[
        CkptError | None, JsonField("error, or null if the checkpoint was verified")
    ] = None

    @property
    def verdict(self) -> Annotated[Verdict, JsonField("`complete`, `damaged` or `unknown`")]:
        """Verdict, which is unknown if the checkpoint could not be verified."""
        return self.verification.verdict if self.verification else Verdict.UNKNOWN

    @property
    def is_success(self) -> bool:
        """Whether ``verify`` of this checkpoint exits with code 0."""
        return self.verification is not None and self.verification.exit_code == 0

    @property
    def reason(self) -> str:
        """First problem, or an empty string if there is none."""
        if self.error is not None:
            return self.error.summary
        if self.verification is None or self.is_success:
            return ""
        problems = (*self.verification.errors, *self.verification.unknown)
        return problems[0].summary if problems else f"data {self.verification.data}"


@dataclass(frozen=True, slots=True)
class RunVerification(Result, order="root task total counts seconds checkpoints others"):
    """Verification of the checkpoints of a run, or of one task's part of it."""

    selection: Annotated[
        RunSelection,
        JsonField("folder of the run", of="root"),
        JsonField("number of selected checkpoints of all tasks", of="total"),
    ]
    checkpoints: Annotated[
        tuple[VerifiedCheckpoint, ...], JsonField("checkpoints of this task, by series and step")
    ]
    seconds: Annotated[float, JsonField("elapsed time", to=round_seconds)]

    @property
    def task(
        self,
    ) -> Annotated[str | None, JsonField("task I/N, or null if there is only one")]:
        """Task I/N, or None if there is only one."""
        return self.selection.task_text

    @property
    def others(self) -> Annotated[OtherEntries, JsonField()]:
        """Other entries of the run, except hidden ones and pointers, unless `--steps` is given."""
        return self.selection.others

    @property
    def counts(
        self,
    ) -> Annotated[Mapping[str, Annotated[int, JsonField("number")]], JsonField()]:
        """Number of checkpoints by verdict."""
        return Counter(str(item.verdict) for item in self.checkpoints)

    def require_complete(self) -> None:
        """Raise `PartialError` unless all checkpoints of the task passed."""
        failed = [item for item in self.checkpoints if not item.is_success]
        if failed:
            raise PartialError(
                f"{len(failed):,} of {pluralize(len(self.checkpoints), 'checkpoint')} did not pass",
                where=quote_names([item.checkpoint.name for item in failed]),
                why=f"`{failed[0].checkpoint.name}`: {failed[0].reason}",
            )


def select_to_verify(
    root: TreePath,
    options: VerifyOptions,
    selection_options: SelectionOptions,
    environment: Mapping[str, str],
) -> RunSelection:
    """Select the checkpoints of a run to verify.

    Args:
        root: Folder of the run.
        options: Options of each verification.
        selection_options: Options that select checkpoints.
        environment: Environment variables that select the task of a job array, if any.
    """
    with families.use_converter_file(options.converter):
        return select_checkpoints(root, selection_options, environment, model=options.model)


def verify_checkpoints(
    selection: RunSelection,
    options: VerifyOptions,
    report: Callable[[VerifiedCheckpoint], None],
    start_item: StartItem,
) -> RunVerification:
    """Verify the checkpoints of a run one by one. An error does not stop the others.

    Args:
        selection: Checkpoints to verify.
        options: Options of each verification.
        report: Called with the result for each checkpoint.
        start_item: Starts the progress display for each checkpoint.
    """
    start = clock.monotonic()
    verified = []
    for number, checkpoint in enumerate(selection.checkpoints, 1):
        label = f"verifying {checkpoint.name} ({number} of {len(selection.checkpoints)})"
        item = _verify_checkpoint(checkpoint, options, label, start_item)
        verified.append(item)
        report(item)
    return RunVerification(selection, tuple(verified), clock.monotonic() - start)


def _verify_checkpoint(
    checkpoint: Checkpoint, options: VerifyOptions, label: str, start_item: StartItem
) -> VerifiedCheckpoint:
    try:
        verification = verify_checkpoint(
            checkpoint.path, options, lambda nbytes: start_item(label, nbytes)
        )
    except CkptError as error:
        return VerifiedCheckpoint(checkpoint, error=error)
    except OSError as error:
        failure = StorageError.from_os_error(error, "access", error.filename or checkpoint.path)
        return VerifiedCheckpoint(checkpoint, error=failure)
    return VerifiedCheckpoint(checkpoint, verification)
