"""Contents of a report, in frozen dataclasses that convert to JSON and do not require torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Annotated, Literal

from ckptctl.catalog import Box, Finding
from ckptctl.conversion.recognition.roots import Part
from ckptctl.errors import CkptError
from ckptctl.results import Inline, JsonField, Result, count_items
from ckptctl.verbs.comparison.diff_result import Difference, Side
from ckptctl.verbs.comparison.movement import LayerMovement
from ckptctl.verbs.inspection.inspect_result import Inspection, TensorInfo
from ckptctl.verbs.verification.verify_result import Verification

FileState = Literal["present", "missing", "damaged", "unknown"]
_STATE_BY_SEVERITY: Mapping[str, FileState] = {"error": "damaged", "unknown": "unknown"}
"""State of a file, by the severity of its worst finding."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Box of a tensor, and the file that contains it.

    Attributes:
        file: File that contains the box, or should contain it if the box is missing. None if the
            box is computed on read, or if the file of a missing box is unknown.
    """

    box: Box
    file: str | None


@dataclass(frozen=True, slots=True)
class ChunkMap:
    """Boxes of a tensor, stored or missing, with the files that contain them.

    Attributes:
        chunks: Stored boxes, up to the limit.
        holes: Missing boxes, up to the limit.
        missing: Number of holes.
        missing_bytes: Bytes of all holes.
    """

    chunks: tuple[Chunk, ...] = ()
    holes: tuple[Chunk, ...] = ()
    missing: int = 0
    missing_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TensorReport:
    """Tensor in a report, with the location of its data.

    Attributes:
        info: Description of the tensor.
        part: Part of the checkpoint that it belongs to.
        map: Boxes of the tensor and the files that contain them.
    """

    info: TensorInfo
    part: Part
    map: ChunkMap


@dataclass(frozen=True, slots=True)
class ListedChunk:
    """Box of a tensor, with its file as an index into the report's list of files."""

    file: Annotated[
        int | None,
        JsonField("file of the box, as an index into `files`; null if unknown or computed"),
    ]
    box: Annotated[Box, Inline()]


@dataclass(frozen=True, slots=True)
class ListedTensor:
    """Tensor, with its files as indices into the report's list of files."""

    info: Annotated[TensorInfo, Inline()]
    part: Annotated[Part, JsonField("`model`, `optimizer`, `scheduler`, `loader` or `rest`")]
    missing: Annotated[int, JsonField("number of missing boxes of the tensor")]
    missing_bytes: Annotated[
        int | None,
        JsonField("bytes of the missing boxes; absent if none is missing", optional=True),
    ]
    map: Annotated[
        list[ListedChunk],
        JsonField("stored boxes; `file` is null for boxes that are computed on read"),
    ]
    holes: Annotated[
        list[ListedChunk], JsonField("missing boxes; `file` is null if their file is unknown")
    ]


@dataclass(frozen=True, slots=True)
class ListedFile:
    """Data file of the checkpoint, which may be missing."""

    path: Annotated[str, JsonField("path relative to the checkpoint")]
    nbytes: Annotated[
        int | None, JsonField("size in bytes; null if it is missing or unusable", name="bytes")
    ]
    rank: Annotated[int | None, JsonField("rank that wrote it, if its name contains the rank")]
    state: Annotated[FileState, JsonField("`present`, `missing`, `damaged` or `unknown`")]


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Numbers of entries that a report omits."""

    tensors: Annotated[int, JsonField("number of unlisted tensors")] = 0
    nbytes: Annotated[int, JsonField("bytes of these tensors", name="bytes")] = 0
    chunks: Annotated[int, JsonField("number of unlisted boxes of listed tensors")] = 0
    holes: Annotated[int, JsonField("number of unlisted missing boxes of listed tensors")] = 0
    findings: Annotated[int, JsonField("number of unlisted findings")] = 0
    differences: Annotated[int, JsonField("number of unlisted differences")] = 0


@dataclass(frozen=True, slots=True)
class Presence:
    """Share of a checkpoint that is present."""

    missing_tensors: Annotated[
        int,
        JsonField("number of missing tensors known only by name; all others are in `tensor_count`"),
    ] = 0
    present_bytes: Annotated[int, JsonField("bytes of the tensors found")] = 0
    total_bytes: Annotated[
        int | None, JsonField("bytes of the complete checkpoint; null if unknown")
    ] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSummary(Result):
    """Head of a page about a checkpoint.

    Attributes:
        verification: Verdict and findings.
        inspection: Contents, or None if the index cannot be read.
        presence: Share of the checkpoint's tensor data that is present.
        absent: Missing files that tensors require.
    """

    path: Annotated[str, JsonField("path as given")]
    verification: Annotated[
        Verification,
        Inline("verdict complete scope data level errors unknown warnings format"),
        JsonField("size of all data files", of="nbytes", name="file_bytes"),
        JsonField("number of data files found", of="files", name="file_count", to=count_items),
    ]
    inspection: Inspection | None
    presence: Annotated[Presence, Inline()] = Presence()
    absent: Annotated[
        frozenset[str], JsonField("number of missing files", name="missing_files", to=count_items)
    ] = frozenset()

    @property
    def readable(self) -> Annotated[bool, JsonField()]:
        """Whether the checkpoint could be read; if false, the exit code is 4 or 9."""
        return self.inspection is not None

    @property
    def problem(self) -> Annotated[str | None, JsonField()]:
        """Summary of the problem in one line, or null."""
        findings = (*self.verification.errors, *self.verification.unknown)
        if not findings:
            return None
        first = findings[0]
        further = f" (and {len(findings) - 1:,} more)" if len(findings) > 1 else ""
        where = "" if first.file and first.file in first.what else first.where
        return ": ".join(filter(None, (first.what, where))) + further

    @property
    def described(
        self,
    ) -> Annotated[
        Inspection,
        Inline("model_type candidates layout root parameters bytes dtypes assets fit"),
        JsonField(
            "number of tensors, listed or not", of="tensors", name="tensor_count", to=count_items
        ),
        JsonField("number of non-tensor values", of="blobs", name="leaf_count", to=count_items),
    ]:
        """Description of the contents, as far as they can be read."""
        return self.inspection or Inspection("", self.verification.format)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(
    CheckpointSummary,
    order="path output readable verdict complete scope data problem level errors unknown warnings "
    "findings format model_type candidates layout root parameters bytes present_bytes total_bytes "
    "dtypes assets tensor_count missing_tensors leaf_count file_bytes file_count missing_files "
    "notes files stats tensors left_out other other_summary difference",
):
    """Contents of a page about a checkpoint.

    Attributes:
        tensors: Listed tensors.
        findings: Number of listed findings.
        unusable: Missing or damaged files that tensors require.
        ranks: Rank that wrote each file, if its name contains the rank.
        difference: Difference from the second checkpoint; None without one, or if they cannot be
            compared.
        differences: Maximum number of entries in each list of the difference.
    """

    tensors: tuple[TensorReport, ...]
    findings: int
    left_out: Annotated[LeftOut, JsonField("counts of entries omitted for size or by options")]
    unusable: tuple[str, ...]
    ranks: Mapping[str, int]
    stats: Annotated[bool, JsonField("whether values were read")] = False
    other: Annotated[str | None, JsonField("path of the second checkpoint as given")] = None
    other_summary: Annotated[
        CheckpointSummary | None, JsonField("summary of the second checkpoint")
    ] = None
    difference: Difference | None = None
    differences: int = 0
    error: Annotated[
        CkptError | None,
        JsonField("reason they cannot be compared, or null", name="difference_error"),
    ] = None
    output: Annotated[str | None, JsonField("written page")] = None
    movement: Annotated[
        tuple[LayerMovement, ...] | None,
        JsonField("how far each layer moved; only with `--movement`", optional=True),
    ] = None

    @property
    def listed_findings(self) -> Annotated[tuple[Finding, ...], JsonField(name="findings")]:
        """Findings, errors first; at most 1,000."""
        return self.verification.findings[: self.findings]

    @property
    def notes(self) -> Annotated[tuple[str, ...], JsonField()]:
        """Further notes."""
        return tuple(dict.fromkeys((*self.verification.notes, *self.described.notes)))

    @property
    def files(self) -> Annotated[tuple[ListedFile, ...], JsonField()]:
        """All data files, including missing ones."""
        sizes = {**self.verification.files, **dict.fromkeys(self.unusable)}
        file_findings = (
            finding for finding in self.verification.findings if finding.basis == "files"
        )
        states = {finding.file: finding.severity for finding in reversed((*file_findings,))}

        def find_state(file: str) -> FileState:
            severity = states.get(file, "warning")
            if file in self.absent:
                return "missing"
            return _STATE_BY_SEVERITY.get(severity, "present")

        return tuple(
            ListedFile(file, nbytes, self.ranks.get(file), find_state(file))
            for file, nbytes in sizes.items()
        )

    @property
    def listed_tensors(self) -> Annotated[list[ListedTensor], JsonField(name="tensors")]:
        """Listed tensors, in the order of the checkpoint."""
        places = {file.path: n for n, file in enumerate(self.files)}

        def list_chunks(chunks: tuple[Chunk, ...]) -> list[ListedChunk]:
            return [
                ListedChunk(places[chunk.file] if chunk.file else None, chunk.box)
                for chunk in chunks
            ]

        return [
            ListedTensor(
                tensor.info,
                tensor.part,
                tensor.map.missing,
                tensor.map.missing_bytes or None,
                list_chunks(tensor.map.chunks),
                list_chunks(tensor.map.holes),
            )
            for tensor in self.tensors
        ]

    @property
    def listed_difference(
        self,
    ) -> Annotated[
        Difference | None,
        JsonField(
            "differences as reported by `ckptctl diff`; null without a second "
            "checkpoint or if they cannot be compared",
            name="difference",
        ),
    ]:
        """Difference with its lists shortened to the limit."""
        difference, limit = self.difference, self.differences
        return difference and replace(
            difference,
            a=_limit_side(difference.a, limit),
            b=_limit_side(difference.b, limit),
            tensors=difference.tensors[:limit],
            leaves=difference.leaves[:limit],
        )


def _limit_side(side: Side, limit: int) -> Side:
    return replace(
        side,
        only=side.only[:limit],
        only_leaves=side.only_leaves[:limit],
        left_out=dict(islice(side.left_out.items(), limit)),
    )
