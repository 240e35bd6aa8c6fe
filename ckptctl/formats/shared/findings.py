"""Problems of a checkpoint, which are raised, or collected as findings in a partial read."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TypeVar

from ckptctl.catalog import Box, Finding, TensorEntry
from ckptctl.errors import (
    MAX_LISTED_NAMES,
    CkptError,
    CoverageError,
    DamagedError,
    FormatError,
    MissingTensorsError,
    SourceNotFoundError,
    StorageError,
    UnsafePickleError,
    UnsupportedError,
    quote_names,
)
from ckptctl.storage.files import SourceFiles
from ckptctl.tree import TreePath
from ckptctl.verdict import Basis, Severity

T = TypeVar("T")
UNUSABLE = (DamagedError, SourceNotFoundError, StorageError, UnsupportedError)
"""Errors about a single file: it is damaged, missing, unsupported or unreadable."""

Lost = dict[str, tuple[tuple[Box, str], ...]]
"""See :attr:`ckptctl.catalog.Catalog.lost`."""

NO_TENSOR = "a tensor is missing"
"""Message about a tensor of which only the name is known."""
MAX_MISSING = 1024
"""Limit for listed missing files of ranks; if there are more, an error is raised instead."""
_AT_BYTE = re.compile(r"at byte [0-9,]+")


def _place(where: str) -> tuple[str, str]:
    """Split *where* into the file and the byte offset or other place in it."""
    for mark in (", at byte ", ", `"):
        at = where.rfind(mark, 0, len(where) - 1)
        inside = where[at + 2 :]
        if at > 0 and (where.endswith("`") if mark == ", `" else _AT_BYTE.fullmatch(inside)):
            return where[:at], inside
    return where, ""


def severity_of(error: CkptError) -> Severity:
    """Return ``error`` if *error* is evidence of damage, else ``unknown``.

    Unsupported content and failing disks are not evidence of damage.
    """
    return "error" if isinstance(error, DamagedError | SourceNotFoundError) else "unknown"


def basis_of(error: CkptError) -> Basis:
    """Return the source of the evidence for *error*.

    If chunks do not tile a tensor, the evidence is the index; no file is known to be damaged.
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
    """Convert *error* to a finding, with paths relative to *root*.

    *file* is the file that was being read; None to take it from the error.
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
    """Downgrade findings about a tensor whose file has only ``unknown`` findings.

    A tensor missing because its file is unsupported is not evidence of damage. Missing elements
    without a file are evidence from the index only, unless a file is damaged. If a file is
    unsupported, it may contain them.
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
    """Make the error for files of different saves."""
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
    """Make the error for missing files of ranks, or return None if none is missing.

    Args:
        where: The checkpoint.
        present: Numbers of the existing files.
        wanted: Numbers of all files; a range may be as long as a file name can claim.
        named: Function that returns the name of a file by its number.
        what: Plural noun for the files.
        hint: Suggested action.
    """
    few = [
        named(number)
        for number in islice((n for n in wanted if n not in present), MAX_LISTED_NAMES)
    ]
    if not few:
        return None
    total = wanted.stop - wanted.start if isinstance(wanted, range) else len(wanted)
    count = total - sum(number in wanted for number in present)
    more = f" and {count - MAX_LISTED_NAMES:,} more" if count > MAX_LISTED_NAMES else ""
    what = f"{count:,} of {total:,} {what} are missing"
    return DamagedError(what, where=str(where), why=quote_names(few) + more, hint=hint)


@dataclass(slots=True)
class Faults:
    """Collector of problems, which are raised, or become findings in a partial read.

    Attributes:
        root: The checkpoint's folder.
        partial: Whether to collect findings instead of raising errors.
        findings: The problems so far.
        files: Unusable files relative to *root*, with the error, or None for a missing file.
        lost: Boxes of each tensor in unusable files, with these files.
    """

    root: TreePath
    partial: bool = False
    findings: list[Finding] = field(default_factory=list)
    files: dict[str, CkptError | None] = field(default_factory=dict)
    lost: Lost = field(default_factory=dict)

    def missing(
        self, file: str, why: str | None = None, what: str = "a file of the checkpoint is missing"
    ) -> None:
        """Add a finding for a missing file."""
        self.files[file] = None
        self.findings.append(Finding(what, why, file=file))

    def require_ranks(
        self,
        present: Collection[int],
        wanted: Collection[int],
        named: Callable[[int], str],
        of: str = "",
    ) -> list[int]:
        """Raise for missing files of ranks, or add findings and return these ranks."""
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
        """Raise, or add a finding, for missing files of ranks (see :func:`missing_error`)."""
        if error := missing_error(self.root, present, wanted, named, what, hint):
            self.unreadable(error, named(next(n for n in wanted if n not in present)))

    def unreadable(
        self, error: CkptError, file: str | None = None, *, tensor: str | None = None
    ) -> None:
        """Add a finding for *error*, or raise it if it is unsafe or the read is not partial.

        *file* is the unusable file; None if the error is about a *tensor*, or names its file.
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
        """Call *reader* on a file, or return None and add a finding if the file is unusable.

        Errors of other classes than *refused* do not concern only this file and propagate.
        """
        if file in self.files:
            return None
        try:
            return reader(file)
        except refused as error:
            self.unreadable(error, file)
            return None

    def require_kind(self, names: Sequence[str]) -> None:
        """Raise the first error about *names* if all of these files are in unsupported formats."""
        errors = [error for name in names if (error := self.files.get(name)) is not None]
        if errors and all(isinstance(error, FormatError) for error in errors):
            raise errors[0]

    def nowhere(self, name: str, why: str, file: str | None = None) -> None:
        """Add a finding for a missing tensor whose dtype and shape are unknown.

        This is evidence of damage if *file*, which should contain it, is given. Otherwise, all
        files exist, and the tensor may be in an unknown place.
        """
        severity: Severity = "error" if file else "unknown"
        self.findings.append(Finding(NO_TENSOR, why, severity, file, name))

    def usable(self, tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
        """Remove the boxes in unusable files from *tensors*, and record them as lost."""
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
        """Return the sizes of files in bytes, except for unusable files that cannot be opened."""
        found: dict[str, int] = {}
        for name in names:
            try:
                found[name] = files.size(name)
            except StorageError:
                if name not in self.files:
                    raise
        return found
