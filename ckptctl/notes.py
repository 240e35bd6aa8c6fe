"""Notes about a checkpoint or a run, in one ordered list.

Functions add notes to a :class:`Notes` argument. Results show the notes by kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal[
    "note", "warning", "dropped", "skipped", "missing", "not copied", "decided"
]


class Note(NamedTuple):
    """One note.

    Attributes:
        kind: ``note`` and ``warning`` are messages. The others are reasons why a tensor, value or
            file is not in the output, or why a value was used for a fact.
        subject: Name of the tensor, value, file or fact; empty for a note or a warning.
        text: Text of the message, or the reason.
    """

    kind: Kind
    subject: str
    text: str


class Notes(list[Note]):
    """Notes in the order in which they were added."""

    __slots__ = ()

    def add(self, *texts: str, kind: Kind = "note") -> None:
        """Add texts for users."""
        self.extend(Note(kind, "", text) for text in texts)

    def explain(self, kind: Kind, reasons: Mapping[str, str]) -> None:
        """Add reasons by subject. The last reason for a subject counts."""
        self.extend(Note(kind, subject, text) for subject, text in reasons.items())

    def get_texts(self, kind: Kind = "note") -> tuple[str, ...]:
        """Return the texts of a kind, each once."""
        return tuple(dict.fromkeys(note.text for note in self if note.kind == kind))

    def get_reasons(self, kind: Kind) -> dict[str, str]:
        """Return the reasons of a kind by subject."""
        return {note.subject: note.text for note in self if note.kind == kind}
