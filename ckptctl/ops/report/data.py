"""What a report holds: frozen, torch-free, JSON-able."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from ckptctl.catalog import Box
from ckptctl.errors import CkptError
from ckptctl.ops.inspection.result import Inspection, TensorInfo
from ckptctl.ops.verification.result import Verification

if TYPE_CHECKING:
    from ckptctl.ops.comparison.result import Difference, Side

INSPECTED = (
    "model_type",
    "candidates",
    "layout",
    "root",
    "parameters",
    "bytes",
    "dtypes",
    "assets",
)
"""What a report says as an inspection does."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor.

    Attributes:
        box: The part of the tensor.
        file: Where it lies, or should lie; None: it is computed when it is read, or, of a part
            that is missing, no file is known to hold it.
    """

    box: Box
    file: str | None

    def to_json(self, files: Mapping[str, int]) -> dict[str, object]:
        """Return the published object (``docs/reference/json.md``).

        Args:
            files: The place of each file in the list of files.
        """
        return {
            "file": files[self.file] if self.file else None,
            "offsets": list(self.box.offsets),
            "sizes": list(self.box.sizes),
        }


@dataclass(frozen=True, slots=True)
class ChunkMap:
    """Which file covers which box of a tensor.

    Attributes:
        chunks: The boxes that are there; as many as there is room for.
        holes: Those that are not; likewise.
        missing: Number of holes.
    """

    chunks: tuple[Chunk, ...] = ()
    holes: tuple[Chunk, ...] = ()
    missing: int = 0


@dataclass(frozen=True, slots=True)
class TensorReport:
    """One tensor.

    Attributes:
        info: What an inspection says of it.
        map: Where it lies.
    """

    info: TensorInfo
    map: ChunkMap

    def to_json(self, files: Mapping[str, int]) -> dict[str, object]:
        """Return the published object (``docs/reference/json.md``)."""
        return {
            **self.info.to_json(),
            "missing": self.map.missing,
            "map": [chunk.to_json(files) for chunk in self.map.chunks],
            "holes": [hole.to_json(files) for hole in self.map.holes],
        }


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What a report has no room for, or was not asked for.

    Attributes:
        tensors: Number of tensors that are not listed.
        nbytes: Their bytes.
        chunks: Boxes of listed tensors that are not listed.
        holes: Missing boxes of listed tensors that are not listed.
        findings: Findings that are not listed.
        differences: Tensors that differ, or that one side lacks, that are not listed.
    """

    tensors: int = 0
    nbytes: int = 0
    chunks: int = 0
    holes: int = 0
    findings: int = 0
    differences: int = 0

    def to_json(self) -> dict[str, object]:
        """Return the published object (``docs/reference/json.md``)."""
        return {
            "tensors": self.tensors,
            "bytes": self.nbytes,
            "chunks": self.chunks,
            "holes": self.holes,
            "findings": self.findings,
            "differences": self.differences,
        }


@dataclass(frozen=True, slots=True)
class Report:
    """What a page about a checkpoint shows.

    Attributes:
        path: The checkpoint, as it was named.
        verification: Whether it is whole, and what is wrong.
        inspection: What it holds; None: its index cannot be read.
        tensors: The tensors that are listed.
        findings: How many findings are listed.
        left_out: What is not listed.
        unusable: Files that parts of tensors should lie in, and that are missing or damaged.
        ranks: For each file of which the name says it, the rank that wrote it.
        stats: Whether values were read.
        other: The second checkpoint, as it was named.
        difference: How the two differ; None: there is no second one, or it cannot be compared.
        differences: How many of each list of the difference are listed.
        error: Why it cannot be compared.
        output: The page that was written; None: none was.
    """

    path: str
    verification: Verification
    inspection: Inspection | None
    tensors: tuple[TensorReport, ...]
    findings: int
    left_out: LeftOut
    unusable: tuple[str, ...]
    ranks: Mapping[str, int]
    stats: bool = False
    other: str | None = None
    difference: Difference | None = None
    differences: int = 0
    error: CkptError | None = None
    output: str | None = None

    @property
    def readable(self) -> bool:
        """Return whether anything of the checkpoint could be read."""
        return self.inspection is not None

    def _notes(self) -> list[str]:
        more = self.inspection.notes if self.inspection else ()
        return list(dict.fromkeys((*self.verification.notes, *more)))

    def to_json(self) -> dict[str, object]:
        """Return the published document without its envelope (``docs/reference/json.md``)."""
        verified = self.verification
        sizes: dict[str, int | None] = {**verified.files, **dict.fromkeys(self.unusable)}
        order = {name: number for number, name in enumerate(sizes)}
        return {
            "path": self.path,
            "output": self.output,
            "readable": self.readable,
            "verdict": verified.verdict,
            "whole": verified.whole,
            "level": verified.level,
            "errors": len(verified.errors),
            "unknown": len(verified.unknown),
            "warnings": len(verified.warnings),
            "findings": [found.to_json() for found in verified.findings[: self.findings]],
            "format": verified.format,
            **_inspected(self.inspection or Inspection("", verified.format)),
            "file_bytes": verified.nbytes,
            "notes": self._notes(),
            "files": [
                {"path": name, "bytes": size, "rank": self.ranks.get(name)}
                for name, size in sizes.items()
            ],
            "stats": self.stats,
            "tensors": [tensor.to_json(order) for tensor in self.tensors],
            "left_out": self.left_out.to_json(),
            "other": self.other,
            "difference": self.difference and _bounded(self.difference, self.differences).to_json(),
            "difference_error": self.error and self.error.to_json(),
        }


def _inspected(found: Inspection) -> dict[str, object]:
    said = replace(found, tensors=(), blobs=()).to_json()
    sizes = {"tensor_count": len(found.tensors), "leaf_count": len(found.blobs)}
    return {**{name: said[name] for name in INSPECTED}, **sizes}


def _bounded(found: Difference, limit: int) -> Difference:
    """Return a difference with lists no longer than *limit*."""
    return replace(
        found,
        a=_bounded_side(found.a, limit),
        b=_bounded_side(found.b, limit),
        tensors=found.tensors[:limit],
        leaves=found.leaves[:limit],
    )


def _bounded_side(side: Side, limit: int) -> Side:
    return replace(
        side,
        only=side.only[:limit],
        only_leaves=side.only_leaves[:limit],
        left_out=dict(islice(side.left_out.items(), limit)),
    )
