"""What is wrong with a checkpoint: refused, or noted where a part of it was asked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

from ckptctl.catalog import Box, Finding, Severity, TensorEntry
from ckptctl.catalog import Path as KeyPath
from ckptctl.errors import (
    SHOWN,
    CkptError,
    CoverageError,
    DamagedError,
    FormatError,
    SourceNotFoundError,
    StorageError,
    UnsafePickleError,
    UnsupportedError,
    listed,
)
from ckptctl.storage.files import SourceFiles

T = TypeVar("T")
UNUSABLE = (DamagedError, SourceNotFoundError, StorageError, UnsupportedError)
"""What is raised about one file among others: it is damaged, gone, not understood, or may not be
read."""

Lost = dict[str, tuple[tuple[Box, str], ...]]
"""As :attr:`ckptctl.catalog.Catalog.lost`."""

_PLACE = re.compile(r"(.+), (at byte [0-9,]+|`.*`)")


MAX_MISSING = 1024
_NEXT = "values that this rank has for itself are taken from the lowest rank that can be read"
FileLeaves = Iterable[tuple[KeyPath, object]]


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
    """Return what *error* says as a finding, its paths relative to *root*.

    *file* is the one that was being looked at; None: the error names it.
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


@dataclass(slots=True)
class Faults:
    """What a reader of whole checkpoints refuses, and one of a part collects.

    Attributes:
        partial: Whether a part was asked for.
        findings: What is wrong.
        files: The files that are missing or cannot be read, relative to the checkpoint's root.
        errors: What was raised about those that are there.
    """

    partial: bool = False
    findings: list[Finding] = field(default_factory=list)
    files: set[str] = field(default_factory=set)
    errors: dict[str, CkptError] = field(default_factory=dict)

    def missing(self, file: str, why: str) -> None:
        """Note a file that is not there."""
        self.files.add(file)
        self.findings.append(Finding("a file of the checkpoint is missing", why, file=file))

    def unreadable(self, file: str, error: CkptError) -> None:
        """Note a file that *error* was raised about, or raise it where all was asked for."""
        if not self.partial:
            raise error
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

    def read(self, names: Iterable[str], reader: Callable[[str], T]) -> list[T | None]:
        """Return what *reader* makes of each file; None for those that cannot be used."""
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


class Gap(NamedTuple):
    """A file of a rank that cannot be used."""

    rank: int
    head: KeyPath
    file: str


@dataclass(slots=True)
class Gaps:
    """What cannot be used."""

    root: Path
    partial: bool
    found: list[Gap] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def require(
        self,
        head: KeyPath,
        present: Collection[int],
        wanted: Collection[int],
        named: Callable[[int], str],
        of: str = "",
    ) -> None:
        """Refuse, or note, that ranks' files are missing."""
        missing = list(islice((rank for rank in wanted if rank not in present), MAX_MISSING + 1))
        if not missing:
            return
        if not self.partial or len(missing) > MAX_MISSING:
            count = len(wanted) - sum(rank in wanted for rank in present)
            few = listed([named(rank) for rank in missing[:SHOWN]])
            raise DamagedError(
                f"{count:,} of {len(wanted):,} ranks' files{of} are missing",
                where=str(self.root),
                why=few + (f" and {count - SHOWN:,} more" if count > SHOWN else ""),
                hint="every rank writes its own file; copy them from the nodes they are on",
            )
        for rank in missing:
            gap = Gap(rank, head, named(rank))
            self._add(gap, Finding("a rank's file is missing", file=gap.file))

    def usable(self, gap: Gap, leaves: Iterator[tuple[KeyPath, object]]) -> FileLeaves:
        """Return the *leaves* of a file, or nothing where it cannot be read and that is noted."""
        if not self.partial:
            return leaves
        try:
            return list(leaves)
        except UnsafePickleError:
            raise
        except UNUSABLE as error:
            self._add(gap, of_error(error, file=gap.file))
        return ()

    def sizes(self, files: SourceFiles, names: Iterable[str]) -> dict[str, int]:
        """Return the sizes of files in bytes, but for those of gaps that cannot be opened."""
        found, gone = {}, {gap.file for gap in self.found}
        for name in names:
            try:
                found[name] = files.size(name)
            except StorageError:
                if name not in gone:
                    raise
        return found

    def _add(self, gap: Gap, finding: Finding) -> None:
        if gap in self.found:
            return
        self.found.append(gap)
        why = "; ".join(filter(None, (finding.why, None if gap.rank else _NEXT)))
        self.findings.append(replace(finding, why=why or None))
