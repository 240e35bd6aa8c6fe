"""What readers say of a checkpoint of which they read a part."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ckptctl.catalog import Finding, Severity
from ckptctl.errors import CkptError, CoverageError, DamagedError, SourceNotFoundError

_PLACE = re.compile(r"(.+), (at byte [0-9,]+|`.*`)")


def severity_of(error: CkptError) -> Severity:
    """Return whether *error* is evidence that a checkpoint is torn.

    A file that is damaged or gone is. Elements that are absent are none by themselves: no file is
    known to lack them. Nor is what is not understood, or a disk that fails.
    """
    if isinstance(error, CoverageError):
        return "unknown"
    return "error" if isinstance(error, DamagedError | SourceNotFoundError) else "unknown"


def of_error(
    error: CkptError,
    root: Path | None = None,
    tensor: str | None = None,
    *,
    file: str | None = None,
) -> Finding:
    """Return what *error* says as a finding.

    Args:
        error: What a reader raised.
        root: Directory of the checkpoint, which is left out of paths.
        tensor: The tensor that was being looked at.
        file: The file that was being looked at; None: the error names it.
    """
    named = error.where.replace(f"{root}/", "") if error.where else None
    why, place = error.why, _PLACE.fullmatch(named or "")
    if place:
        named, inside = place.groups()
        why = f"{inside}: {why}" if why else inside
    return Finding(error.what, why, severity_of(error), file=file or named, tensor=tensor)


def weighed(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return *findings*, those about a leaf no surer than what is said of the file it lies in.

    A tensor that is missing because its file is not understood is no evidence of damage; nor are
    elements that are absent and that no file is named for, unless some file is damaged.
    """
    findings = tuple(findings)
    torn: dict[str | None, bool] = {}
    for one in findings:
        if one.tensor is None:
            torn[one.file] = torn.get(one.file, False) or one.severity == "error"
    torn[None] = any(torn.values())
    return tuple(
        replace(one, severity="unknown")
        if one.tensor and one.severity == "error" and torn.get(one.file) is False
        else one
        for one in findings
    )
