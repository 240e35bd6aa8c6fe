"""Notes for users about a checkpoint or an operation.

Functions add notes to a :class:`Notes` argument. Results show the notes grouped by kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal[
    "note", "warning", "dropped", "skipped", "missing", "not copied", "decided"
]


class Note(NamedTuple):
    """Note for users about a checkpoint or an operation.

    Attributes:
        kind: ``note`` and ``warning`` are messages. All other kinds are reasons why a tensor, value
            or file is not in the output, or why a value was used for a fact.
        subject: Name of the tensor, value, file or fact that the note explains, or an empty string
            for a message.
        text: Text of the message or reason.
    """

    kind: Kind
    subject: str
    text: str


class Notes(list[Note]):
    """List of notes in the order in which they were added."""

    __slots__ = ()

    def add(self, *texts: str, kind: Kind = "note") -> None:
        """Add each text as a note of *kind* without a subject."""
        self.extend(Note(kind, "", text) for text in texts)

    def explain(self, kind: Kind, reasons: Mapping[str, str]) -> None:
        """Add a note of *kind* for each subject in *reasons*.

        If a subject is added again, the new reason replaces the previous one.
        """
        self.extend(Note(kind, subject, text) for subject, text in reasons.items())

    def get_texts(self, kind: Kind = "note") -> tuple[str, ...]:
        """Return the texts of all notes of *kind*, without duplicates."""
        return tuple(dict.fromkeys(note.text for note in self if note.kind == kind))

    def get_reasons(self, kind: Kind) -> dict[str, str]:
        """Return the reasons in notes of *kind*, by subject."""
        return {note.subject: note.text for note in self if note.kind == kind}
