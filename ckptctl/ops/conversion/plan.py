"""The plan and the result of a conversion, as people and programs see them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ckptctl.catalog import Catalog
from ckptctl.formats.base import OutputTensor
from ckptctl.ops.conversion.options import ConversionOptions
from ckptctl.ops.recognition.recognise import Recognition
from ckptctl.planner.copying.copies import permutes
from ckptctl.planner.mapping.tensors import Change
from ckptctl.planner.plan import Plan
from ckptctl.storage.kinds import needs_torch
from ckptctl.storage.out_of_range import OutOfRange
from ckptctl.units import format_bytes

START_UP = 32 << 20
PER_TENSOR = 7_000
TORCH = 270 << 20


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """What a conversion will do, complete before a byte moves.

    Attributes:
        source: The source's catalog, resolved.
        recognition: What it was recognised as.
        options: What was asked for.
        change: How the layout changes.
        output: The tensors that will be written, in order.
        plan: What the executor does.
        must_equal: Names in the source, kept and left out, whose bytes have to be the same.
        dropped: Source keys that are left out by a rule of the family, and why.
        left_out: Other leaves that do not travel, and why.
        notes: What the user should know.
        free_bytes: Free space where the output will be.
        upload: Whether its files are uploaded one by one: the destination is a URL.
        missing: What would be written if it were whole: tensors, other leaves, and files of which
            nothing tells what they hold; and why it is not there.
        not_carried: What lies beside the weights and does not travel, and why.
        replicated: The tensors with copies that are to be compared; None: none are.
        warnings: What is probably not what the user wants.
    """

    source: Catalog
    recognition: Recognition
    options: ConversionOptions
    change: Change
    output: tuple[OutputTensor, ...]
    plan: Plan
    must_equal: tuple[tuple[str, str], ...]
    dropped: Mapping[str, str]
    left_out: Mapping[str, str]
    notes: tuple[str, ...]
    free_bytes: int
    upload: bool = False
    missing: Mapping[str, str] = field(default_factory=dict)
    not_carried: Mapping[str, str] = field(default_factory=dict)
    replicated: Catalog | None = None
    warnings: tuple[str, ...] = ()

    @property
    def from_format(self) -> str:
        """Return the source's format."""
        return self.source.format

    @property
    def to_format(self) -> str:
        """Return the target's format."""
        return self.options.to

    @property
    def from_layout(self) -> str | None:
        """Return the source's layout; None: unknown family."""
        return self.change.source_layout

    @property
    def to_layout(self) -> str | None:
        """Return the target's layout; None: unknown family."""
        return self.change.target_layout

    @property
    def model_type(self) -> str | None:
        """Return the family, if one is known."""
        return self.change.family.name if self.change.family else self.recognition.model_type

    @property
    def tensors(self) -> int:
        """Return the number of tensors in the output."""
        return len(self.output)

    @property
    def mapped(self) -> int:
        """Return how many of them have another name or axis order than in the source."""
        moved = (m for m in self.change.tensors if m.sources[0].key != m.targets[0].key)
        return sum(1 for _ in moved)

    @property
    def files(self) -> tuple[tuple[str, int], ...]:
        """Return the output files with their sizes in bytes."""
        return tuple((file.path, file.size) for file in self.plan.files)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the whole output."""
        return self.plan.nbytes

    @property
    def arithmetic(self) -> bool:
        """Return whether elements are computed, cast or transposed one by one: with torch."""
        if any(map(needs_torch, self.plan.computed.values())):
            return True
        return any(t.source_dtype != t.target_dtype or permutes(t) for t in self.plan.transfers)

    @property
    def memory_bytes(self) -> int:
        """Return an estimate of the peak memory: start-up, index and buffers."""
        options = self.options.execution()
        limits = options.limits()
        each = limits.widest
        if any(map(permutes, self.plan.transfers)):
            # A tile of the target, and what is read for it.
            each = 2 * limits.arithmetic
        buffers = options.threads * each
        index = PER_TENSOR * max(len(self.plan.transfers), len(self.source.tensors))
        return START_UP + index + buffers + (TORCH if self.arithmetic else 0)

    @property
    def statement(self) -> str:
        """Return one line that says what was recognised and what becomes of it."""
        layouts = (
            f"{self.from_layout} → {self.to_layout}"
            if self.from_layout != self.to_layout
            else self.from_layout or "names kept"
        )
        parts = [
            f"{self.from_format} → {self.to_format}",
            self.model_type or self.recognition.named,
            f"layout {layouts}" if self.from_layout else layouts,
            f"{self.tensors:,} tensors, {format_bytes(sum(t.nbytes for t in self.output))}",
        ]
        if self.recognition.root:
            parts.insert(2, f"model under `{self.recognition.root.rstrip('.')}`")
        return " · ".join(parts)

    def to_json(self) -> dict[str, object]:
        """Return the published object (``docs/reference/json.md``)."""
        return {
            "source": self.source.path,
            "target": self.plan.target,
            "from_format": self.from_format,
            "to_format": self.to_format,
            "model_type": self.model_type,
            "candidates": list(self.recognition.candidates),
            "from_layout": self.from_layout,
            "to_layout": self.to_layout,
            "root": self.recognition.root,
            "tensors": self.tensors,
            "mapped": self.mapped,
            "bytes": self.nbytes,
            "free_bytes": self.free_bytes,
            "memory_bytes": self.memory_bytes,
            "arithmetic": self.arithmetic,
            "digest": self.plan.digest,
            "files": [{"path": path, "bytes": nbytes} for path, nbytes in self.files],
            "dropped": dict(self.dropped),
            "left_out": dict(self.left_out),
            "missing": dict(self.missing),
            "decided": dict(self.change.decided),
            "not_carried": dict(self.not_carried),
            "notes": [*self.warnings, *self.notes],
        }


@dataclass(frozen=True, slots=True)
class ConversionResult:
    """What a conversion did.

    Attributes:
        plan: The plan that was carried out.
        target: What was published.
        nbytes: Bytes of the output.
        seconds: Time that copying and publishing took.
        resumed_bytes: Bytes that an earlier run had written already.
        verified: Whether the published output was read again and found right.
        notes: What the user should know.
        out_of_range: What became infinite, NaN or saturated, by the name of the tensor in the
            output.
    """

    plan: ConversionPlan
    target: Path
    nbytes: int
    seconds: float
    resumed_bytes: int
    verified: bool
    notes: tuple[str, ...]
    out_of_range: Mapping[str, OutOfRange] = field(default_factory=dict)

    @property
    def missing(self) -> Mapping[str, str]:
        """Return what was not written because it is not whole, and why."""
        return self.plan.missing

    def to_json(self) -> dict[str, object]:
        """Return the published object (``docs/reference/json.md``)."""
        return {
            **self.plan.to_json(),
            "seconds": round(self.seconds, 3),
            "resumed_bytes": self.resumed_bytes,
            "verified": self.verified,
            "out_of_range": {name: asdict(lost) for name, lost in self.out_of_range.items()},
            "notes": [*self.plan.warnings, *self.plan.notes, *self.notes],
        }
