"""What a verification returns: frozen, torch-free, JSON-able."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ckptctl.catalog import Finding, Severity
from ckptctl.errors import DamagedError, UnsupportedError
from ckptctl.formats.shared.findings import of_error as of_error
from ckptctl.ops.verification.options import Level

Verdict = Literal["whole", "torn", "not understood"]


@dataclass(frozen=True, slots=True)
class Verification:
    """How whole a checkpoint is.

    Attributes:
        path: What was verified, as it was named.
        format: Its format.
        level: How much was read: ``fast``, ``headers`` or ``full``.
        tensors: Number of tensors that could be read.
        nbytes: Bytes of all data files.
        files: The data files, with their sizes in bytes.
        proven: For each data file the bytes that a checksum proves; empty below ``full``.
        nan: Whether floating values were searched for NaN and Inf.
        findings: Everything that is wrong, errors first.
        manifest: The list of SHA-256 sums that was written; None: none was.
        notes: What else a reader should know.
        seconds: Time that it took.
    """

    path: str
    format: str
    level: Level
    tensors: int = 0
    files: Mapping[str, int] = field(default_factory=dict)
    proven: Mapping[str, int] = field(default_factory=dict)
    nan: bool = False
    findings: tuple[Finding, ...] = ()
    manifest: str | None = None
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def nbytes(self) -> int:
        """Return the bytes of all data files."""
        return sum(self.files.values())

    @property
    def verdict(self) -> Verdict:
        """Return the answer: evidence that it is torn outweighs what is not understood."""
        if self.errors:
            return "torn"
        return "not understood" if self.unknown else "whole"

    @property
    def whole(self) -> bool:
        """Return whether all that was looked at is understood and right; warnings do not count."""
        return self.verdict == "whole"

    @property
    def exit_code(self) -> int:
        """Return what a command ends with that has nothing else to say of the checkpoint."""
        return {
            "whole": 0,
            "torn": DamagedError.exit_code,
            "not understood": UnsupportedError.exit_code,
        }[self.verdict]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """Return the evidence that the checkpoint is torn."""
        return self._of("error")

    @property
    def unknown(self) -> tuple[Finding, ...]:
        """Return the findings about what is not understood, or cannot be read."""
        return self._of("unknown")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """Return the other findings."""
        return self._of("warning")

    def _of(self, severity: Severity) -> tuple[Finding, ...]:
        return tuple(found for found in self.findings if found.severity == severity)

    @property
    def proven_bytes(self) -> int | None:
        """Return the bytes that a checksum proves; None: no checksum was looked at."""
        return sum(self.proven.values()) if self.level == "full" else None

    @property
    def structure_only_bytes(self) -> int | None:
        """Return the bytes that no checksum covers; None: no checksum was looked at."""
        proven = self.proven_bytes
        return None if proven is None else self.nbytes - proven

    def to_json(self) -> dict[str, object]:
        """Return the published object (``docs/reference/json.md``)."""
        full = self.level == "full"
        return {
            "path": self.path,
            "format": self.format,
            "level": self.level,
            "verdict": self.verdict,
            "whole": self.whole,
            "tensors": self.tensors,
            "bytes": self.nbytes,
            "proven_bytes": self.proven_bytes,
            "structure_only_bytes": self.structure_only_bytes,
            "nan_checked": self.nan,
            "files": [
                {"path": name, "bytes": size, "proven": self.proven.get(name, 0) if full else None}
                for name, size in self.files.items()
            ],
            "errors": len(self.errors),
            "unknown": len(self.unknown),
            "warnings": len(self.warnings),
            "findings": [found.to_json() for found in self.findings],
            "manifest": self.manifest,
            "notes": list(self.notes),
            "seconds": round(self.seconds, 3),
        }


def unsaid(known: Iterable[Finding], more: Iterable[Finding]) -> list[Finding]:
    """Return those of *more* that do not say of a file what one of *known* says of it."""
    said = {(found.what, found.why, found.file) for found in known}
    return [found for found in more if (found.what, found.why, found.file) not in said]
