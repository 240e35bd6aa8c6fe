"""What cannot be used of a checkpoint in ranks' files that is read in part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ckptctl.catalog import Box, Finding, Severity, TensorEntry
from ckptctl.errors import (
    CkptError,
    DamagedError,
    FormatError,
    SourceNotFoundError,
    StorageError,
    UnsupportedError,
)
from ckptctl.formats.shared.findings import of_error

T = TypeVar("T")
UNUSABLE = (DamagedError, SourceNotFoundError, StorageError, UnsupportedError)
"""What is raised about one file among others: it is damaged, gone, not understood, or may not be
read."""
Lost = dict[str, tuple[tuple[Box, str], ...]]
"""As :attr:`ckptctl.catalog.Catalog.lost`."""


@dataclass(slots=True)
class Faults:
    """Collects what a reader of whole checkpoints would refuse.

    Attributes:
        findings: What is wrong.
        files: The files that are missing or cannot be read, relative to the checkpoint's root.
        errors: What was raised about those that are there.
    """

    findings: list[Finding] = field(default_factory=list)
    files: set[str] = field(default_factory=set)
    errors: dict[str, CkptError] = field(default_factory=dict)

    def missing(self, file: str, why: str) -> None:
        """Note a file that is not there."""
        self.files.add(file)
        self.findings.append(Finding("a file of the checkpoint is missing", why, file=file))

    def unreadable(self, file: str, error: CkptError) -> None:
        """Note a file that *error* was raised about."""
        self.files.add(file)
        self.errors[file] = error
        self.findings.append(of_error(error, file=file))

    def require_kind(self, names: Sequence[str]) -> None:
        """Raise the error about *names* if all of them are of a kind that is not read."""
        errors = [self.errors[name] for name in names if name in self.errors]
        if errors and all(isinstance(error, FormatError) for error in errors):
            raise errors[0]

    def nowhere(self, name: str, why: str, file: str | None = None) -> None:
        """Note a tensor of which nothing but its name is known.

        That is evidence of damage where *file* is the file that should hold it; of files that
        are all there it may be in a place that is not known.
        """
        severity: Severity = "error" if file else "unknown"
        self.findings.append(Finding("a tensor is missing", why, severity, file, name))

    def read(self, names: Sequence[str], reader: Callable[[str], T]) -> list[T | None]:
        """Return what *reader* makes of each file; None for those that cannot be used.

        Args:
            names: Files; those in :attr:`files` are not looked at.
            reader: Raises CkptError for a file that it cannot read.
        """
        return [None if name in self.files else self._read(name, reader) for name in names]

    def _read(self, name: str, reader: Callable[[str], T]) -> T | None:
        try:
            return reader(name)
        except CkptError as error:
            self.unreadable(name, error)
            return None

    def usable(self, tensors: Mapping[str, TensorEntry]) -> tuple[dict[str, TensorEntry], Lost]:
        """Return *tensors* without the boxes in files that cannot be used, and those boxes."""
        found: dict[str, TensorEntry] = {}
        lost: Lost = {}
        for name, entry in tensors.items():
            gone = tuple((e.box, e.file) for e in entry.extents if e.file in self.files)
            if gone:
                lost[name] = gone
                kept = tuple(e for e in entry.extents if e.file not in self.files)
                entry = replace(entry, extents=kept)
            found[name] = entry
        return found, lost
