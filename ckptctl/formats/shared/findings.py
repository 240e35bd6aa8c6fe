"""Handle problems of a checkpoint, which raise errors, or become findings in a partial read."""

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
UNUSABLE_ERRORS = (DamagedError, SourceNotFoundError, StorageError, UnsupportedError)
"""Errors that mean that a file is damaged, missing, unsupported or unreadable."""

Lost = dict[str, tuple[tuple[Box, str], ...]]
"""Lost boxes by tensor name, each with its file, as in :attr:`ckptctl.catalog.Catalog.lost`."""

MISSING_TENSOR_MESSAGE = "a tensor is missing"
"""Message of findings for a missing tensor whose dtype and shape are unknown."""
MAX_MISSING_FILES = 1024
"""Maximum number of missing rank files in a partial read, above which an error is raised."""
_AT_BYTE = re.compile(r"at byte [0-9,]+")


def _split_location(where: str) -> tuple[str, str]:
    """Split *where* into a file and a detail, such as ``at byte 8`` or a tensor name.

    The detail is empty if *where* contains none.
    """
    for separator in (", at byte ", ", `"):
        position = where.rfind(separator, 0, len(where) - 1)
        detail = where[position + 2 :]
        if position > 0 and (
            where.endswith("`") if separator == ", `" else _AT_BYTE.fullmatch(detail)
        ):
            return where[:position], detail
    return where, ""


def classify_severity(error: CkptError) -> Severity:
    """Return severity ``error`` if *error* proves damage, and ``unknown`` otherwise.

    Unsupported content and I/O errors do not prove that the checkpoint is damaged.
    """
    return "error" if isinstance(error, DamagedError | SourceNotFoundError) else "unknown"


def classify_basis(error: CkptError) -> Basis:
    """Return whether the evidence for *error* is in the files, the index or the model family.

    If chunks do not tile a tensor, the evidence is the index, because no file is known to be
    damaged.
    """
    if isinstance(error, MissingTensorsError):
        return "model"
    return "index" if isinstance(error, CoverageError) else "files"


def finding_from_error(
    error: CkptError,
    root: TreePath | None = None,
    tensor: str | None = None,
    *,
    file: str | None = None,
) -> Finding:
    """Convert *error* to a finding, with paths relative to *root*.

    *file* is the file that was read, or None to use the file that the error names.
    """
    location = error.where.replace(f"{root}/", "") if error.where else None
    why, detail = error.why, ""
    if location:
        location, detail = _split_location(location)
    if detail:
        why = f"{detail}: {why}" if why else detail
    severity, basis = classify_severity(error), classify_basis(error)
    failed = isinstance(error, StorageError)
    return Finding(error.what, why, severity, file or location, tensor, None, basis, failed)


def downgrade_unproven_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return *findings*, with lower severity for tensors that may not be damaged.

    A finding about a tensor becomes ``unknown`` if all findings about its file are ``unknown``, for
    example because the file is in an unsupported format. If the file of a tensor is not known, the
    finding becomes ``unknown`` if an unusable file may contain the missing elements. If all files
    are usable, its basis becomes the index.
    """
    findings = tuple(findings)
    files: dict[str | None, Severity] = {}
    for finding in findings:
        if finding.tensor is None and files.get(finding.file) != "error":
            files[finding.file] = finding.severity

    def downgrade(finding: Finding) -> Finding:
        if not finding.tensor or finding.severity != "error":
            return finding
        if finding.file is not None:
            severity = files.get(finding.file, "error")
            return finding if severity == "error" else replace(finding, severity="unknown")
        if "error" in files.values():
            return finding
        doubtful = "unknown" in files.values()
        return replace(finding, severity="unknown") if doubtful else replace(finding, basis="index")

    return tuple(map(downgrade, findings))


def mixed_saves_error(where: TreePath | str, why: str) -> UnsupportedError:
    """Build the error for a folder that contains files of different saves."""
    return UnsupportedError(
        "the folder contains files of several saves",
        where=str(where),
        why=why,
        hint="move the files of the other saves away",
    )


def missing_files_error(
    where: TreePath | str,
    present: Collection[int],
    required: Collection[int],
    format_name: Callable[[int], str],
    noun: str,
    hint: str | None = None,
) -> DamagedError | None:
    """Build the error for missing numbered files, or return None if none is missing.

    Args:
        where: Path of the checkpoint.
        present: Numbers of the existing files.
        required: Numbers of all files, which may be a huge range if a file name is wrong.
        format_name: Function that returns the name of a file by its number.
        noun: Plural noun for the files, used in the message.
        hint: Suggested action, or None for an error without a hint.
    """
    shown = [
        format_name(number)
        for number in islice((n for n in required if n not in present), MAX_LISTED_NAMES)
    ]
    if not shown:
        return None
    total = required.stop - required.start if isinstance(required, range) else len(required)
    count = total - sum(number in required for number in present)
    more = f" and {count - MAX_LISTED_NAMES:,} more" if count > MAX_LISTED_NAMES else ""
    noun = f"{count:,} of {total:,} {noun} are missing"
    return DamagedError(noun, where=str(where), why=quote_names(shown) + more, hint=hint)


@dataclass(slots=True)
class FaultCollector:
    """Collector of problems, which raise an error, or become findings in a partial read.

    Attributes:
        root: Folder of the checkpoint.
        partial: Whether to collect findings instead of raising errors.
        findings: Problems found so far.
        unusable_files: Error of each unusable file by path relative to *root*, or None if the file
            is missing.
        lost: Boxes of each tensor that are in unusable files, with the names of these files.
    """

    root: TreePath
    partial: bool = False
    findings: list[Finding] = field(default_factory=list)
    unusable_files: dict[str, CkptError | None] = field(default_factory=dict)
    lost: Lost = field(default_factory=dict)

    def add_missing_file(
        self,
        file: str,
        why: str | None = None,
        message: str = "a file of the checkpoint is missing",
    ) -> None:
        """Add a finding for the missing file *file*, and record it as unusable."""
        self.unusable_files[file] = None
        self.findings.append(Finding(message, why, file=file))

    def require_rank_files(
        self,
        present: Collection[int],
        required: Collection[int],
        format_name: Callable[[int], str],
        suffix: str = "",
    ) -> list[int]:
        """Raise an error if rank files are missing, or add findings in a partial read.

        See :func:`missing_files_error` for the parameters. *suffix* is appended to the noun in the
        message. Returns the ranks whose files were recorded as missing by this call.
        """
        missing = list(
            islice((rank for rank in required if rank not in present), MAX_MISSING_FILES + 1)
        )
        hint = "copy the files from the nodes of their ranks (each rank writes a separate file)"
        error = missing_files_error(
            self.root, present, required, format_name, f"ranks' files{suffix}", hint
        )
        if error and (not self.partial or len(missing) > MAX_MISSING_FILES):
            raise error
        missing = [rank for rank in missing if format_name(rank) not in self.unusable_files]
        for rank in missing:
            self.add_missing_file(format_name(rank), message="a rank's file is missing")
        return missing

    def require_files(
        self,
        present: Collection[int],
        required: range,
        format_name: Callable[[int], str],
        noun: str,
        hint: str | None = None,
    ) -> None:
        """Raise an error if files are missing, or add one finding in a partial read.

        See :func:`missing_files_error` for the parameters.
        """
        if error := missing_files_error(self.root, present, required, format_name, noun, hint):
            self.add_or_raise(error, format_name(next(n for n in required if n not in present)))

    def add_or_raise(
        self, error: CkptError, file: str | None = None, *, tensor: str | None = None
    ) -> None:
        """Add a finding for *error* in a partial read, or raise it.

        Errors about unsafe pickles are always raised.

        Args:
            error: Error that describes the problem.
            file: File to record as unusable, or None to record none. The finding then names the
                file in the error.
            tensor: Name of the tensor that the error is about, if any.
        """
        if not self.partial or isinstance(error, UnsafePickleError):
            raise error
        if file is not None:
            self.unusable_files[file] = error
        self.findings.append(finding_from_error(error, self.root, tensor, file=file))

    def try_read(
        self,
        file: str,
        reader: Callable[[str], T],
        expected_errors: tuple[type[CkptError], ...] = UNUSABLE_ERRORS,
    ) -> T | None:
        """Call *reader* with *file*, or add a finding and return None if the file is unusable.

        Only *expected_errors* mean that the file is unusable. Other exceptions propagate.
        """
        if file in self.unusable_files:
            return None
        try:
            return reader(file)
        except expected_errors as error:
            self.add_or_raise(error, file)
            return None

    def require_supported_files(self, names: Sequence[str]) -> None:
        """Raise the first error recorded for the files *names* if all of them are FormatErrors."""
        errors = [error for name in names if (error := self.unusable_files.get(name)) is not None]
        if errors and all(isinstance(error, FormatError) for error in errors):
            raise errors[0]

    def add_missing_tensor(self, name: str, why: str, file: str | None = None) -> None:
        """Add a finding for a missing tensor whose dtype and shape are unknown.

        If *file* names the file that should contain the tensor, the finding has severity ``error``.
        If it is None, the severity is ``unknown``, because another file may contain the tensor.
        """
        severity: Severity = "error" if file else "unknown"
        self.findings.append(Finding(MISSING_TENSOR_MESSAGE, why, severity, file, name))

    def drop_unusable_boxes(self, tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
        """Return *tensors* without boxes in unusable files, and record these boxes as lost."""
        usable_tensors: dict[str, TensorEntry] = {}
        for name, entry in tensors.items():
            lost_boxes = tuple(
                (e.box, e.file) for e in entry.extents if e.file in self.unusable_files
            )
            if lost_boxes:
                self.lost[name] = lost_boxes
                usable_extents = tuple(
                    e for e in entry.extents if e.file not in self.unusable_files
                )
                entry = replace(entry, extents=usable_extents)
            usable_tensors[name] = entry
        return usable_tensors

    def read_sizes(self, files: SourceFiles, names: Iterable[str]) -> dict[str, int]:
        """Map the file names *names* to sizes in bytes, without unusable files that do not open."""
        file_sizes: dict[str, int] = {}
        for name in names:
            try:
                file_sizes[name] = files.size(name)
            except StorageError:
                if name not in self.unusable_files:
                    raise
        return file_sizes
