"""Result of ``verify``, in frozen dataclasses that convert to JSON and do not require torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from ckptctl.catalog import Finding
from ckptctl.errors import DamagedError, StorageError, UnsupportedError
from ckptctl.results import JsonField, Result, count_items, round_seconds
from ckptctl.verbs.verification.verify_options import Level
from ckptctl.verdict import (
    COMPLETE,
    REFERENCE,
    SCOPE,
    DataCheck,
    Scope,
    Severity,
    Verdict,
    decide_verdict,
    has_file_damage,
    is_complete,
)


@dataclass(frozen=True, slots=True)
class VerifiedFile:
    """Data file, and the number of its bytes that match a checksum."""

    path: Annotated[str, JsonField("path relative to the checkpoint")]
    nbytes: Annotated[int, JsonField("size in bytes", name="bytes")]
    verified: Annotated[int | None, JsonField("bytes that match a checksum; null below `full`")]


@dataclass(frozen=True, slots=True)
class Verification(
    Result,
    order="path format level verdict complete scope reference data tensors verified_tensors bytes "
    "verified_bytes structure_only_bytes bytes_read nan_checked files errors unknown warnings",
):
    """Result of verifying a checkpoint, and how much data was compared with checksums.

    Attributes:
        files: Sizes of the data files in bytes.
        verified: Bytes of each data file that match a checksum; empty below ``full``.
        compared: Whether recorded checksums of data were compared; None if they were not read.
        require_verified: Whether data without a checksum is a failure.
    """

    path: Annotated[str, JsonField("path as given")]
    format: Annotated[str, JsonField("[format](formats.md)")]
    level: Annotated[Level, JsonField("`fast`, `headers` or `full`")]
    tensors: Annotated[int, JsonField("number of readable tensors")] = 0
    files: Mapping[str, int] = field(default_factory=dict)
    verified: Mapping[str, int] = field(default_factory=dict)
    verified_tensors: Annotated[
        int | None, JsonField("number of tensors fully verified by checksums; null below `full`")
    ] = None
    bytes_read: Annotated[
        int,
        JsonField("data bytes read, to compare checksums (`full`) or to search for NaN (`--nan`)"),
    ] = 0
    compared: bool | None = None
    scope: Annotated[Scope, JsonField(SCOPE)] = "structure"
    reference: Annotated[str | None, JsonField(REFERENCE)] = None
    require_verified: bool = False
    checksum_lists: Annotated[tuple[str, ...], JsonField("checksum files that `full` uses")] = ()
    nan: Annotated[
        bool,
        JsonField(
            "whether floating-point values were searched for NaN and Inf", name="nan_checked"
        ),
    ] = False
    findings: Annotated[tuple[Finding, ...], JsonField("findings, errors first")] = ()
    manifest: Annotated[str | None, JsonField("written list of SHA-256 sums, or null")] = None
    notes: Annotated[tuple[str, ...], JsonField("further notes")] = ()
    seconds: Annotated[float, JsonField("elapsed time", to=round_seconds)] = 0.0

    @property
    def nbytes(self) -> Annotated[int, JsonField(name="bytes")]:
        """Size of all data files."""
        return sum(self.files.values())

    @property
    def verdict(self) -> Annotated[Verdict, JsonField("`complete`, `damaged` or `unknown`")]:
        """Verdict, in which evidence of damage outweighs findings that are unknown."""
        return decide_verdict(self.findings)

    @property
    def complete(self) -> Annotated[bool | None, JsonField(COMPLETE)]:
        """Whether nothing is missing, or None if that cannot be determined."""
        return is_complete(self.verdict, self.scope)

    @property
    def shows_damaged_files(self) -> bool:
        """Whether files show damage; see :func:`~ckptctl.verdict.has_file_damage`."""
        return has_file_damage(self.findings)

    @property
    def data(
        self,
    ) -> Annotated[
        DataCheck,
        JsonField(
            "`verified` (all tensors match checksums), `partly verified`, `not "
            "verified` (no data matches the recorded checksums), `not verifiable` (no "
            "checksums recorded), `not compared` (below `full`, read only for "
            "`--nan`) or `not read` (below `full`, or the index cannot be read)"
        ),
    ]:
        """How much of the data was compared with checksums in this run."""
        if self.compared is None:
            return "not compared" if self.bytes_read else "not read"
        if self.tensors and self.verified_tensors == self.tensors:
            return "verified"
        if any(self.verified.values()):
            return "partly verified"
        return "not verified" if self.compared else "not verifiable"

    @property
    def exit_code(self) -> int:
        """Exit code of the verdict, or of data that had to be verified and was not."""
        if self.read_failed and not self.errors:
            return StorageError.exit_code
        unverified = self.require_verified and self.data != "verified"
        return {
            Verdict.COMPLETE: UnsupportedError.exit_code if unverified else 0,
            Verdict.DAMAGED: DamagedError.exit_code,
            Verdict.UNKNOWN: UnsupportedError.exit_code,
        }[self.verdict]

    @property
    def read_failed(self) -> bool:
        """Whether the operating system failed a read, so that findings may be missing."""
        return any(finding.read_failed for finding in self.findings)

    @property
    def errors(self) -> Annotated[tuple[Finding, ...], JsonField(to=count_items)]:
        """Number of findings with evidence of damage."""
        return self._select_findings("error")

    @property
    def unknown(self) -> Annotated[tuple[Finding, ...], JsonField(to=count_items)]:
        """Number of findings with severity `unknown`."""
        return self._select_findings("unknown")

    @property
    def warnings(self) -> Annotated[tuple[Finding, ...], JsonField(to=count_items)]:
        """Number of other findings."""
        return self._select_findings("warning")

    def _select_findings(self, severity: Severity) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == severity)

    @property
    def verified_files(self) -> Annotated[tuple[VerifiedFile, ...], JsonField(name="files")]:
        """All data files."""
        full = self.level == "full"
        return tuple(
            VerifiedFile(name, size, self.verified.get(name, 0) if full else None)
            for name, size in self.files.items()
        )

    @property
    def verified_bytes(self) -> Annotated[int | None, JsonField()]:
        """Bytes that match a checksum; null below `full`."""
        return sum(self.verified.values()) if self.level == "full" else None

    @property
    def structure_only_bytes(self) -> Annotated[int | None, JsonField()]:
        """Bytes without a checksum; null below `full`."""
        verified = self.verified_bytes
        return None if verified is None else self.nbytes - verified


def exclude_known_findings(known: Iterable[Finding], more: Iterable[Finding]) -> list[Finding]:
    """Return the findings in *more* that *known* does not contain."""
    known_keys = {(finding.what, finding.why, finding.file) for finding in known}
    return [
        finding for finding in more if (finding.what, finding.why, finding.file) not in known_keys
    ]
