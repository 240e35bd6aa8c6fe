"""The three verdicts on a checkpoint, and the one function that decides between them.

``complete``: the index covers its tensors, and the tensors cover the model as far as a table knows
it. ``damaged``: there is evidence. ``unknown``: it could not be determined. Whether the *data* was
compared with checksums is another statement, which stands beside the verdict.
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
"""How notes begin on a checkpoint that no table describes."""
UNKNOWN_MODEL = (
    f"{STRUCTURE_COMPLETE}the model type is unknown, so missing tensors cannot be detected"
)


class Verdict(StrEnum):
    """What is known of a checkpoint; see ``shows_torn_write`` for what allows deletion."""

    COMPLETE = "complete"
    DAMAGED = "damaged"
    UNKNOWN = "unknown"


class Evidence(Protocol):
    """A finding, as far as a verdict depends on it."""

    @property
    def severity(self) -> Severity:
        """``error``: evidence of damage; ``unknown``; ``warning``: changes no verdict."""

    @property
    def basis(self) -> Basis:
        """Where the evidence comes from."""


def decide_verdict(findings: Iterable[Evidence]) -> Verdict:
    """Decide from *findings*: evidence of damage outweighs what could not be determined."""
    severities = {finding.severity for finding in findings}
    if "error" in severities:
        return Verdict.DAMAGED
    return Verdict.UNKNOWN if "unknown" in severities else Verdict.COMPLETE


def worst_verdict(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the verdict on several checkpoints together."""
    known = {*verdicts}
    worse = (Verdict.DAMAGED, Verdict.UNKNOWN)
    return next((verdict for verdict in worse if verdict in known), Verdict.COMPLETE)


def is_complete(verdict: Verdict, scope: Scope) -> bool | None:
    """Return whether nothing is missing, or None if only the structure could be checked."""
    if verdict is not Verdict.COMPLETE:
        return False
    return True if scope == "model" else None


def drop_structure_claim(notes: Iterable[str]) -> Iterator[str]:
    """Yield *notes* without the claim that the structure is complete, where it is not."""
    return (note.removeprefix(STRUCTURE_COMPLETE) for note in notes)


def shows_torn_write(findings: Iterable[Evidence]) -> bool:
    """Return whether *findings* hold evidence from files, which alone allows deletion.

    An index that leaves a hole, or a model without a tensor that its table requires, may be what
    somebody saved on purpose.
    """
    return any(one.severity == "error" and one.basis == "files" for one in findings)
