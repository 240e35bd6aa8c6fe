"""What is wrong with a checkpoint: refused, or noted where a part of it was asked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TypeVar

from ckptctl.catalog import Box, Finding, TensorEntry
from ckptctl.errors import (
    SHOWN,
    CkptError,
    CoverageError,
    DamagedError,
    FormatError,
    MissingTensorsError,
    SourceNotFoundError,
    StorageError,
    UnsafePickleError,
    UnsupportedError,
    listed,
)
from ckptctl.storage.files import SourceFiles
from ckptctl.tree import TreePath
from ckptctl.verdict import Basis, Severity

T = TypeVar("T")
UNUSABLE = (DamagedError, SourceNotFoundError, StorageError, UnsupportedError)
"""What is raised about one file among others: it is damaged, gone, not understood, or may not be
read."""

Lost = dict[str, tuple[tuple[Box, str], ...]]
"""As :attr:`ckptctl.catalog.Catalog.lost`."""

NO_TENSOR = "a tensor is missing"
"""What is said of one of which nothing but its name is known."""
MAX_MISSING = 1024
"""So many missing files of ranks are named; of more none is."""
_AT_BYTE = re.compile(r"at byte [0-9,]+")


def _place(where: str) -> tuple[str, str]:
    """Return the file that *where* names, and the byte or what else is named in it."""
    for mark in (", at byte ", ", `"):
        at = where.rfind(mark, 0, len(where) - 1)
        inside = where[at + 2 :]
        if at > 0 and (where.endswith("`") if mark == ", `" else _AT_BYTE.fullmatch(inside)):
            return where[:at], inside
    return where, ""


def severity_of(error: CkptError) -> Severity:
    """Return whether *error* is evidence of damage.

    What cannot be interpreted is none, nor is a disk that fails.
    """
    return "error" if isinstance(error, DamagedError | SourceNotFoundError) else "unknown"


def basis_of(error: CkptError) -> Basis:
    """Return where the evidence of *error* comes from.

    Chunks that do not tile a tensor are evidence from the index: no file is known to be torn.
    """
    if isinstance(error, MissingTensorsError):
        return "model"
    return "index" if isinstance(error, CoverageError) else "files"


def of_error(
    error: CkptError,
    root: TreePath | None = None,
    tensor: str | None = None,
    *,
    file: str | None = None,
) -> Finding:
    """Return what *error* says as a finding, its paths relative to *root*.

    *file* is the one that was being looked at; None: the error names it.
    """
    named = error.where.replace(f"{root}/", "") if error.where else None
    why, inside = error.why, ""
    if named:
        named, inside = _place(named)
    if inside:
        why = f"{inside}: {why}" if why else inside
    severity, basis = severity_of(error), basis_of(error)
    failed = isinstance(error, StorageError)
    return Finding(error.what, why, severity, file or named, tensor, None, basis, failed)


def weighed(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return *findings*, those about a tensor no surer than those about the file it lies in.

    A tensor that is missing because its file cannot be interpreted is no evidence of damage.
    Elements that are missing and that no file is named for are evidence from the index alone,
    unless some file is damaged; where a file cannot be interpreted, they may be in that.
    """
    findings = tuple(findings)
    files: dict[str | None, Severity] = {}
    for one in findings:
        if one.tensor is None and files.get(one.file) != "error":
            files[one.file] = one.severity

    def weigh(one: Finding) -> Finding:
        if not one.tensor or one.severity != "error":
            return one
        if one.file is not None:
            known = files.get(one.file, "error")
            return one if known == "error" else replace(one, severity="unknown")
        if "error" in files.values():
            return one
        doubtful = "unknown" in files.values()
        return replace(one, severity="unknown") if doubtful else replace(one, basis="index")

    return tuple(map(weigh, findings))


def mixed_saves(where: TreePath | str, why: str) -> UnsupportedError:
    """Return the error for files that are not of one save."""
    return UnsupportedError(
        "the folder contains files of several saves",
        where=str(where),
        why=why,
        hint="move the files of the other saves away",
    )


def missing_error(
    where: TreePath | str,
    present: Collection[int],
    wanted: Collection[int],
    named: Callable[[int], str],
    what: str,
    hint: str | None = None,
) -> DamagedError | None:
    """Return the error for files of ranks that are missing, or None if all are there.

    Args:
        where: The checkpoint.
        present: The numbers of those that are there.
        wanted: Those of all; a range may be as long as a file name can claim.
        named: Returns the name of the file of a number.
        what: What they are, in the plural.
        hint: What to do about it.
    """
    few = [named(number) for number in islice((n for n in wanted if n not in present), SHOWN)]
    if not few:
        return None
    total = wanted.stop - wanted.start if isinstance(wanted, range) else len(wanted)
    count = total - sum(number in wanted for number in present)
    more = f" and {count - SHOWN:,} more" if count > SHOWN else ""
    what = f"{count:,} of {total:,} {what} are missing"
    return DamagedError(what, where=str(where), why=listed(few) + more, hint=hint)


@dataclass(slots=True)
class Faults:
    """What is wrong with a checkpoint: refused, or noted where a part of it was asked for.

    Attributes:
        root: The checkpoint's folder.
        partial: Whether a part was asked for.
        findings: What is wrong.
        files: The files that cannot be used, relative to *root*, and what was raised about those
            that are there.
        lost: For each tensor the boxes in files that cannot be used, and those files.
    """

    root: TreePath
    partial: bool = False
    findings: list[Finding] = field(default_factory=list)
    files: dict[str, CkptError | None] = field(default_factory=dict)
    lost: Lost = field(default_factory=dict)

    def missing(
        self, file: str, why: str | None = None, what: str = "a file of the checkpoint is missing"
    ) -> None:
        """Note a file that is not there."""
        self.files[file] = None
        self.findings.append(Finding(what, why, file=file))

    def require_ranks(
        self,
        present: Collection[int],
        wanted: Collection[int],
        named: Callable[[int], str],
        of: str = "",
    ) -> list[int]:
        """Refuse that ranks' files are missing, or note it and return those ranks."""
        missing = list(islice((rank for rank in wanted if rank not in present), MAX_MISSING + 1))
        hint = "copy the files from the nodes of their ranks (each rank writes a separate file)"
        error = missing_error(self.root, present, wanted, named, f"ranks' files{of}", hint)
        if error and (not self.partial or len(missing) > MAX_MISSING):
            raise error
        missing = [rank for rank in missing if named(rank) not in self.files]
        for rank in missing:
            self.missing(named(rank), what="a rank's file is missing")
        return missing

    def require_all(
        self,
        present: Collection[int],
        wanted: range,
        named: Callable[[int], str],
        what: str,
        hint: str | None = None,
    ) -> None:
        """Refuse, or note, that files of ranks are missing; see :func:`missing_error`."""
        if error := missing_error(self.root, present, wanted, named, what, hint):
            self.unreadable(error, named(next(n for n in wanted if n not in present)))

    def unreadable(
        self, error: CkptError, file: str | None = None, *, tensor: str | None = None
    ) -> None:
        """Note what *error* says of a file, or raise it: where all was asked for, or it is unsafe.

        *file* is the one that cannot be used; None: it is about a *tensor*, or names its file.
        """
        if not self.partial or isinstance(error, UnsafePickleError):
            raise error
        if file is not None:
            self.files[file] = error
        self.findings.append(of_error(error, self.root, tensor, file=file))

    def read(
        self,
        file: str,
        reader: Callable[[str], T],
        refused: tuple[type[CkptError], ...] = UNUSABLE,
    ) -> T | None:
        """Return what *reader* makes of a file; None: it cannot be used, which is noted.

        Only errors of the *refused* classes are about this file among others.
        """
        if file in self.files:
            return None
        try:
            return reader(file)
        except refused as error:
            self.unreadable(error, file)
            return None

    def require_kind(self, names: Sequence[str]) -> None:
        """Raise the error about *names* if all of them are of a kind that is not read."""
        errors = [error for name in names if (error := self.files.get(name)) is not None]
        if errors and all(isinstance(error, FormatError) for error in errors):
            raise errors[0]

    def nowhere(self, name: str, why: str, file: str | None = None) -> None:
        """Note a tensor of which nothing but its name is known.

        That is evidence of damage where *file* is the file that should hold it; of files that
        are all there it may be in a place that is not known.
        """
        severity: Severity = "error" if file else "unknown"
        self.findings.append(Finding(NO_TENSOR, why, severity, file, name))

    def usable(self, tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
        """Return *tensors* without the boxes in files that cannot be used, which are lost."""
        found: dict[str, TensorEntry] = {}
        for name, entry in tensors.items():
            gone = tuple((e.box, e.file) for e in entry.extents if e.file in self.files)
            if gone:
                self.lost[name] = gone
                kept = tuple(e for e in entry.extents if e.file not in self.files)
                entry = replace(entry, extents=kept)
            found[name] = entry
        return found

    def sizes(self, files: SourceFiles, names: Iterable[str]) -> dict[str, int]:
        """Return the sizes of files in bytes, but for those that cannot be used nor opened."""
        found: dict[str, int] = {}
        for name in names:
            try:
                found[name] = files.size(name)
            except StorageError:
                if name not in self.files:
                    raise
        return found
