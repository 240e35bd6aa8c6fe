"""Verdicts on a checkpoint, which are derived from findings.

``complete`` means that the index covers all tensors. If a table describes the model, no tensor of
the model is missing, either. ``damaged`` requires evidence. ``unknown`` means undetermined. The
comparison of *data* with checksums is reported separately from the verdict.
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
COMPLETE = (
    "whether nothing is missing; null if the structure is complete but the model type is unknown"
)
STRUCTURE_COMPLETE = "structure complete; "
"""Prefix of notes about a checkpoint that no table describes."""
UNKNOWN_MODEL = (
    f"{STRUCTURE_COMPLETE}the model type is unknown, so missing tensors cannot be detected"
)


class Verdict(StrEnum):
    """Verdict on a checkpoint. Only evidence from files allows deletion."""

    COMPLETE = "complete"
    DAMAGED = "damaged"
    UNKNOWN = "unknown"


class Evidence(Protocol):
    """Attributes of a finding that determine the verdict."""

    @property
    def severity(self) -> Severity:
        """``error`` (evidence of damage), ``unknown`` or ``warning`` (no effect on the verdict)."""

    @property
    def basis(self) -> Basis:
        """Source of the evidence."""


def decide_verdict(findings: Iterable[Evidence]) -> Verdict:
    """Decide the verdict from *findings*. Evidence of damage outweighs unknown findings."""
    severities = {finding.severity for finding in findings}
    if "error" in severities:
        return Verdict.DAMAGED
    return Verdict.UNKNOWN if "unknown" in severities else Verdict.COMPLETE


def combine_verdicts(verdicts: Iterable[Verdict]) -> Verdict:
    """Combine the verdicts on several checkpoints. The worst verdict counts."""
    present = {*verdicts}
    by_severity = (Verdict.DAMAGED, Verdict.UNKNOWN)
    return next((verdict for verdict in by_severity if verdict in present), Verdict.COMPLETE)


def is_complete(verdict: Verdict, scope: Scope) -> bool | None:
    """Return whether the checkpoint is complete, or None if only its structure was checked."""
    if verdict is not Verdict.COMPLETE:
        return False
    return True if scope == "model" else None


def strip_structure_claim(notes: Iterable[str]) -> Iterator[str]:
    """Remove the claim that the structure is complete from *notes*."""
    return (note.removeprefix(STRUCTURE_COMPLETE) for note in notes)


def has_file_damage(findings: Iterable[Evidence]) -> bool:
    """Check if *findings* contain evidence from files, the only kind that allows deletion.

    An index with a hole, or a model without a required tensor, may have been saved intentionally.
    """
    return any(finding.severity == "error" and finding.basis == "files" for finding in findings)
