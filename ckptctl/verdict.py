"""Verdicts on a checkpoint, which are derived from the findings of a check.

The verdict ``complete`` means that the index covers all tensors and, if a table describes the
model, that no tensor of the model is missing. The verdict ``damaged`` requires evidence. Otherwise,
the verdict is ``unknown``. Whether the *data* matches its checksums is reported separately.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Literal, Protocol

Severity = Literal["error", "unknown", "warning"]
Basis = Literal["files", "index", "model"]
Scope = Literal["model", "structure"]
DataCheck = Literal[
    "verified", "partly verified", "not verified", "not verifiable", "not compared", "not read"
]
SCOPE = (
    "scope of the verdict: the `model`, or only the `structure` if the model type is unknown "
    "(missing tensors then cannot be detected)"
)
REFERENCE = (
    "package, version and class that determine the tensors of a model without a table; null if a "
    "table describes the model, or if missing tensors cannot be detected"
)
COMPLETE = (
    "whether nothing is missing; null if the structure is complete but the model type is unknown"
)
STRUCTURE_COMPLETE = "structure complete; "
"""Prefix of notes about a checkpoint whose model no table describes."""
UNKNOWN_MODEL = (
    f"{STRUCTURE_COMPLETE}the model type is unknown, so missing tensors cannot be detected"
)


class Verdict(StrEnum):
    """Verdict on whether a checkpoint is complete or damaged.

    A damaged checkpoint may only be deleted if the evidence comes from its files.
    """

    COMPLETE = "complete"
    DAMAGED = "damaged"
    UNKNOWN = "unknown"


class Evidence(Protocol):
    """Protocol with the attributes of a finding that determine the verdict."""

    @property
    def severity(self) -> Severity:
        """``error`` (evidence of damage), ``unknown`` or ``warning`` (no effect on the verdict)."""

    @property
    def basis(self) -> Basis:
        """Kind of source that the evidence comes from, such as the files of the checkpoint."""


def decide_verdict(findings: Iterable[Evidence]) -> Verdict:
    """Derive the verdict on a checkpoint from *findings*.

    Evidence of damage takes precedence over findings with severity ``unknown``.
    """
    severities = {finding.severity for finding in findings}
    if "error" in severities:
        return Verdict.DAMAGED
    return Verdict.UNKNOWN if "unknown" in severities else Verdict.COMPLETE


def combine_verdicts(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst of the verdicts on several checkpoints."""
    present = {*verdicts}
    by_severity = (Verdict.DAMAGED, Verdict.UNKNOWN)
    return next((verdict for verdict in by_severity if verdict in present), Verdict.COMPLETE)


def is_complete(verdict: Verdict, scope: Scope) -> bool | None:
    """Return whether the checkpoint is complete, or None if only its structure was checked."""
    if verdict is not Verdict.COMPLETE:
        return False
    return True if scope == "model" else None


def strip_structure_claim(notes: Iterable[str]) -> Iterator[str]:
    """Yield *notes* without the prefix which claims that the structure is complete."""
    return (note.removeprefix(STRUCTURE_COMPLETE) for note in notes)


def has_file_damage(findings: Iterable[Evidence]) -> bool:
    """Check if *findings* contain evidence of damage from files, which is required for deletion.

    Other damage does not allow deletion, because an index with a hole, or a model without a
    required tensor, may have been saved intentionally.
    """
    return any(finding.severity == "error" and finding.basis == "files" for finding in findings)
