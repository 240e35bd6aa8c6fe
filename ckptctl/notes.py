"""What is said about a checkpoint or a run: one ordered channel for all of it.

Whoever does a part of the work gets a :class:`Notes` and adds to it; results show it by kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal[
    "note", "warning", "dropped", "skipped", "missing", "not copied", "decided"
]


class Note(NamedTuple):
    """One statement.

    Attributes:
        kind: ``note`` and ``warning`` are for people; the others are reasons why a tensor, value or
            file is not in the output, or why a fact has the value that was used.
        subject: Name of that tensor, value, file or fact; empty for a note or a warning.
        text: The text of a note, or the reason.
    """

    kind: Kind
    subject: str
    text: str


class Notes(list[Note]):
    """Statements, in the order in which they were made."""

    __slots__ = ()

    def add(self, *texts: str, kind: Kind = "note") -> None:
        """Add texts for people."""
        self.extend(Note(kind, "", text) for text in texts)

    def explain(self, kind: Kind, reasons: Mapping[str, str]) -> None:
        """Add reasons by subject; the last one given for a subject counts."""
        self.extend(Note(kind, subject, text) for subject, text in reasons.items())

    def texts(self, kind: Kind = "note") -> tuple[str, ...]:
        """Return the texts of a kind, each once."""
        return tuple(dict.fromkeys(note.text for note in self if note.kind == kind))

    def reasons(self, kind: Kind) -> dict[str, str]:
        """Return the reasons of a kind by subject."""
        return {note.subject: note.text for note in self if note.kind == kind}
