"""What a verification returns: frozen, torch-free, JSON-able."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from ckptctl.catalog import Finding, Severity
from ckptctl.errors import DamagedError, UnsupportedError
from ckptctl.formats.shared.findings import loss
from ckptctl.ops.verification.options import Level
from ckptctl.results import JsonField, Result, count, rounded

Verdict = Literal["whole", "torn", "not understood"]
Condition = Literal["whole", "incomplete", "damaged", "not understood"]


@dataclass(frozen=True, slots=True)
class ProvenFile:
    """A data file, and how much of it a checksum proves."""

    path: Annotated[str, JsonField("relative to the checkpoint")]
    nbytes: Annotated[int, JsonField("its size", name="bytes")]
    proven: Annotated[int | None, JsonField("its bytes that a checksum proves; null below `full`")]


@dataclass(frozen=True, slots=True)
class Verification(
    Result,
    order="path format level verdict whole tensors bytes proven_bytes structure_only_bytes "
    "nan_checked files errors unknown warnings",
):
    """How whole a checkpoint is.

    Attributes:
        files: The data files, with their sizes in bytes.
        proven: For each data file the bytes that a checksum proves; empty below ``full``.
        absent: The files with errors that are not there.
    """

    path: Annotated[str, JsonField("as it was named")]
    format: Annotated[str, JsonField("[format](formats.md)")]
    level: Annotated[Level, JsonField("`fast`, `headers` or `full`")]
    tensors: Annotated[int, JsonField("tensors that could be read")] = 0
    files: Mapping[str, int] = field(default_factory=dict)
    proven: Mapping[str, int] = field(default_factory=dict)
    proven_tensors: Annotated[
        int | None, JsonField("tensors that checksums prove as a whole; null below `full`")
    ] = None
    checksum_lists: Annotated[
        tuple[str, ...], JsonField("files that lie there and that `full` compares with")
    ] = ()
    nan: Annotated[
        bool,
        JsonField("whether floating values were searched for NaN and Inf", name="nan_checked"),
    ] = False
    findings: Annotated[tuple[Finding, ...], JsonField("all that is wrong, errors first")] = ()
    manifest: Annotated[str | None, JsonField("the list of SHA-256 sums that was written")] = None
    notes: Annotated[tuple[str, ...], JsonField("what else a reader should know")] = ()
    seconds: Annotated[float, JsonField("time that it took", to=rounded)] = 0.0
    absent: frozenset[str] = frozenset()

    @property
    def nbytes(self) -> Annotated[int, JsonField(name="bytes")]:
        """Size of all data files."""
        return sum(self.files.values())

    @property
    def verdict(
        self,
    ) -> Annotated[Verdict, JsonField("`whole`, `torn` (with evidence) or `not understood`")]:
        """Return the answer: evidence that it is torn outweighs what is not understood."""
        if self.errors:
            return "torn"
        return "not understood" if self.unknown else "whole"

    @property
    def condition(self) -> Condition:
        """Return the verdict, of a torn one whether nothing but files are missing."""
        return loss(self.errors, self.absent) if self.verdict == "torn" else self.verdict

    @property
    def whole(self) -> Annotated[bool, JsonField("whether the verdict is `whole`")]:
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
    def errors(self) -> Annotated[tuple[Finding, ...], JsonField(to=count)]:
        """Findings that are evidence of its being torn."""
        return self._of("error")

    @property
    def unknown(self) -> Annotated[tuple[Finding, ...], JsonField(to=count)]:
        """Findings about what is not understood, or cannot be read."""
        return self._of("unknown")

    @property
    def warnings(self) -> Annotated[tuple[Finding, ...], JsonField(to=count)]:
        """The other findings."""
        return self._of("warning")

    def _of(self, severity: Severity) -> tuple[Finding, ...]:
        return tuple(found for found in self.findings if found.severity == severity)

    @property
    def proven_files(self) -> Annotated[tuple[ProvenFile, ...], JsonField(name="files")]:
        """Every data file."""
        full = self.level == "full"
        return tuple(
            ProvenFile(name, size, self.proven.get(name, 0) if full else None)
            for name, size in self.files.items()
        )

    @property
    def proven_bytes(self) -> Annotated[int | None, JsonField()]:
        """Bytes that a checksum proves; null below `full`."""
        return sum(self.proven.values()) if self.level == "full" else None

    @property
    def structure_only_bytes(self) -> Annotated[int | None, JsonField()]:
        """Bytes that no checksum covers; null below `full`."""
        proven = self.proven_bytes
        return None if proven is None else self.nbytes - proven


def unsaid(known: Iterable[Finding], more: Iterable[Finding]) -> list[Finding]:
    """Return those of *more* that do not say of a file what one of *known* says of it."""
    said = {(found.what, found.why, found.file) for found in known}
    return [found for found in more if (found.what, found.why, found.file) not in said]
