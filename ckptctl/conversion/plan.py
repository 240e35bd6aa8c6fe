"""Plan and result of a conversion, as shown to users."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, TypeAlias

from ckptctl import formats
from ckptctl.catalog import Catalog
from ckptctl.conversion.assets import build_file_notes
from ckptctl.conversion.conversion_options import ConversionOptions
from ckptctl.conversion.draft import Draft, Quantization
from ckptctl.conversion.recognition.model import Model
from ckptctl.conversion.replicas import select_replicated_tensors
from ckptctl.conversion.summary import Summary
from ckptctl.errors import quote_names
from ckptctl.formats.base import OutputTensor
from ckptctl.notes import Notes
from ckptctl.planner.copying.copies import needs_permutation
from ckptctl.planner.mapping.mapped import RedundantData
from ckptctl.planner.mapping.tensors import LayoutChange
from ckptctl.planner.plan import Plan
from ckptctl.results import Inline, JsonField, Result, round_seconds
from ckptctl.storage.compute_device import CPU, PINNED_BYTES_PER_THREAD
from ckptctl.storage.computed import needs_arithmetic
from ckptctl.storage.outcome import NO_ROUNDING, OUT_OF_RANGE, ROUNDED, OutOfRange, Rounding
from ckptctl.tree import TreePath
from ckptctl.units import format_bytes, pluralize
from ckptctl.verdict import REFERENCE

START_UP_BYTES = 32 << 20
BYTES_PER_TENSOR = 7_000
"""Estimated memory in bytes that a conversion needs per stored tensor of the source."""
BYTES_PER_TRANSFER = 3_000
"""Estimated memory in bytes that a conversion needs per written tensor.

A conversion with 36,945 expert tensors used 2,400 bytes per tensor.
"""
TORCH_BYTES = 270 << 20
QUANTIZING_BYTES = 32 << 20
"""Estimated memory in bytes per quantizing thread.

A thread needs buffers for half a million elements in several dtypes.
"""


Reasons: TypeAlias = Mapping[str, Annotated[str, JsonField("reason")]]

DRY_RUN = JsonField(
    "whether this is a plan; if true, `seconds`, `resumed_bytes`, `verified`, "
    "`out_of_range` and `rounding` are absent"
)


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """File of the output."""

    path: Annotated[str, JsonField("path relative to the target")]
    nbytes: Annotated[int, JsonField("size in bytes", name="bytes")]


def list_planned_files(files: tuple[tuple[str, int], ...]) -> list[PlannedFile]:
    """Convert ``(name, size)`` pairs to the file records that ``--json`` prints."""
    return [PlannedFile(*file) for file in files]


@dataclass(frozen=True)
class ConversionPlan(
    Result,
    order="dry_run source target from_format to_format model_type candidates from_layout to_layout "
    "root reference tensors mapped bytes free_bytes memory_bytes threads arithmetic digest files "
    "summary dropped left_out missing base taken decided not_carried quantized notes",
):
    """Complete plan of a conversion, before anything is written.

    Attributes:
        source: The source's catalog, resolved.
        recognition: Model recognized in the source.
        options: Options of the conversion.
        change: Change of layout.
        output: Tensors that will be written, in order.
        plan: Plan for the executor.
        redundant: Dropped elements of the source, whose redundancy is verified before the run.
        upload: Whether the destination is a URL, to which files are uploaded one by one.
        replicated: Tensors with replicas to compare, or None.
        log: Notes of the planning, and reasons for items that are not in the output.
        quantization: Quantized tensors, or None.
    """

    source: Annotated[Catalog, JsonField("absolute path", name="source", of="path")]
    recognition: Annotated[
        Model,
        JsonField("matching model types", of="candidates"),
        JsonField(
            "prefix of the model in the source, including the dot; empty without a prefix",
            of="root",
        ),
    ]
    options: ConversionOptions
    change: LayoutChange
    output: tuple[OutputTensor, ...]
    plan: Annotated[
        Plan,
        JsonField("absolute path", of="target"),
        JsonField("SHA-256 of the plan; equal digests mean equal outputs", of="digest"),
    ]
    redundant: tuple[RedundantData, ...]
    summary: Annotated[Summary, JsonField("tensor counts before and after")]
    log: Notes
    free_bytes: Annotated[int, JsonField("free bytes on the target file system")]
    upload: bool = False
    base: Annotated[
        str | None,
        JsonField("absolute path of the `--fill-from` base, or null if it supplied no tensor"),
    ] = None
    taken: Annotated[
        Mapping[
            str,
            Annotated[
                str, JsonField("name in the base; the first name if several tensors became one")
            ],
        ],
        JsonField("tensors from `--fill-from`, by name in the layout of the source"),
    ] = field(default_factory=dict)
    reference: Annotated[str | None, JsonField(REFERENCE)] = None
    replicated: Catalog | None = None
    quantization: Quantization | None = None

    @property
    def dry_run(self) -> Annotated[bool, DRY_RUN]:
        """Always True, because a plan has not been run."""
        return True

    @property
    def from_format(self) -> Annotated[str, JsonField()]:
        """[format](formats.md) of the source."""
        return self.source.format

    @property
    def to_format(self) -> Annotated[str, JsonField()]:
        """Format of the output."""
        return self.options.to

    @property
    def from_layout(self) -> Annotated[str | None, JsonField()]:
        """Layout of the source, or null if unknown."""
        return self.change.source_layout

    @property
    def to_layout(self) -> Annotated[str | None, JsonField()]:
        """Layout of the output."""
        layout = self.quantization.layout if self.quantization else None
        return layout or self.change.target_layout

    @property
    def model_type(
        self,
    ) -> Annotated[
        str | None,
        JsonField(
            "[model type](models.md) as given, or if exactly one matches; with suffix "
            "`-lora` for adapters"
        ),
    ]:
        """Model type of the change, or else of the recognized model."""
        if self.change.family:
            return self.change.family.name
        dequantized_types = {name for name, _ in self.recognition.dequantized_pairs}
        only_type = dequantized_types.pop() if len(dequantized_types) == 1 else None
        return self.recognition.model_type or only_type

    @property
    def tensors(self) -> Annotated[int, JsonField()]:
        """Number of tensors in the output."""
        return len(self.output)

    @property
    def mapped(
        self,
    ) -> Annotated[int, JsonField("number of tensors with a new name or axis order")]:
        """Number of tensors with another name or axis order than in the source."""
        zero_keys = {zeros.key for zeros in self.change.zeros}
        first = (
            (mapped_tensor.sources[0].key, mapped_tensor.targets[0].key)
            for mapped_tensor in self.change.tensors
        )
        return sum(source != target and source not in zero_keys for source, target in first)

    @property
    def files(self) -> Annotated[tuple[tuple[str, int], ...], JsonField(to=list_planned_files)]:
        """All files of the output."""
        return tuple((file.path, file.size) for file in self.plan.files)

    @property
    def nbytes(self) -> Annotated[int, JsonField(name="bytes")]:
        """Size of the whole output."""
        return self.plan.nbytes

    @property
    def dropped(self) -> Annotated[Reasons, JsonField()]:
        """Source keys dropped by a rule of the model type or by `--tied drop`."""
        return self.log.get_reasons("dropped")

    @property
    def left_out(self) -> Annotated[Reasons, JsonField()]:
        """Other source values that are not copied."""
        return self.log.get_reasons("skipped")

    @property
    def missing(
        self,
    ) -> Annotated[
        Reasons,
        JsonField(
            "incomplete tensors, values and files skipped by `--allow-missing`, by "
            "name in the source; files are listed if their contents are unknown"
        ),
    ]:
        """Incomplete or missing items that are not written, and the reason for each."""
        return self.log.get_reasons("missing")

    @property
    def decided(
        self,
    ) -> Annotated[
        Mapping[str, Annotated[str, JsonField("value used and its source")]],
        JsonField("contradictory facts about the model that `--trust-assets` resolved"),
    ]:
        """Contradictory facts, with the value that was used for each."""
        return self.log.get_reasons("decided")

    @property
    def not_carried(
        self,
    ) -> Annotated[
        Reasons,
        JsonField(
            "files next to the weights that are not copied, by relative path; folders "
            "end with a slash"
        ),
    ]:
        """Sidecar files that are not copied, and the reason for each."""
        return self.log.get_reasons("not copied")

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user."""
        return self.log.get_texts()

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for the user."""
        return self.log.get_texts("warning")

    @property
    def all_notes(self) -> Annotated[tuple[str, ...], JsonField(name="notes")]:
        """Further notes."""
        return (*self.warnings, *self.notes)

    @property
    def quantized(self) -> Annotated[tuple[str, ...], JsonField()]:
        """Names, before quantization, of the weights that `--quantize` quantizes."""
        quantization = self.quantization
        return quantization.weights if quantization and not quantization.is_lossless else ()

    @property
    def repacked(self) -> Annotated[tuple[str, ...], JsonField()]:
        """Dequantized names of the weights that `--repack` stores in another format."""
        quantization = self.quantization
        return quantization.weights if quantization and quantization.is_lossless else ()

    @property
    def unquantized(self) -> Annotated[dict[str, int], JsonField()]:
        """Matrices that `--quantize` does not quantize: bytes by name."""
        return (
            {tensor.name: tensor.nbytes for tensor in self.quantization.unquantized}
            if self.quantization
            else {}
        )

    @property
    def arithmetic(self) -> Annotated[bool, JsonField("whether elements are cast")]:
        """Whether elements are computed, cast or transposed, which requires torch."""
        return needs_arithmetic(self.plan) or self.needs_permutation

    @cached_property
    def needs_permutation(self) -> bool:
        """Whether some tensors must be transposed in memory before they are written."""
        return any(map(needs_permutation, self.plan.transfers))

    @property
    def threads(self) -> Annotated[int, JsonField()]:
        """Number of threads."""
        return self.options.to_execution_options().threads

    @property
    def memory_bytes(self) -> Annotated[int, JsonField()]:
        """Estimated peak memory."""
        options = self.options.to_execution_options()
        limits = options.compute_tile_limits()
        each = limits.max_tile_bytes
        if self.needs_permutation:
            # A tile of the target, and the elements that are read for it.
            each = 2 * limits.permuted_tile_bytes
        buffers = self.threads * (each + (QUANTIZING_BYTES if self.quantization else 0))
        if self.arithmetic and options.device not in (None, CPU):
            buffers += self.threads * PINNED_BYTES_PER_THREAD
        transfers = BYTES_PER_TRANSFER * len(self.plan.transfers)
        index = max(BYTES_PER_TENSOR * len(self.source.tensors), transfers)
        return START_UP_BYTES + index + buffers + (TORCH_BYTES if self.arithmetic else 0)

    @property
    def statement(self) -> str:
        """One-line summary of formats, model type, layouts, number of tensors and total size."""
        before, after = self.from_layout, self.to_layout
        layouts = f"{before} → {after}" if before != after else before or "keys unchanged"
        model_type, evidence = self.model_type, self.recognition.evidence
        if not model_type:
            model_type = self.recognition.display_name
        elif self.options.model_type:
            model_type += " (from --model-type)"
        elif evidence and not formats.get_format(self.source.format).self_described:
            files = ("config.json", "params.json")
            stated_files = (file for file in files for text in evidence if f"{file}:" in text)
            model_type += f" (from {next(stated_files, 'keys')})"
        nbytes = sum(tensor.nbytes for tensor in self.output)
        parts = [
            f"{self.source.format} → {self.options.to}",
            model_type,
            f"layout {layouts}" if before else layouts,
            f"{pluralize(len(self.output), 'tensor')}, {format_bytes(nbytes)}",
        ]
        if self.recognition.root:
            parts.insert(2, f"model under `{self.recognition.root.rstrip('.')}`")
        return " · ".join(parts)


def build_conversion_plan(
    draft: Draft, plan: Plan, summary: Summary, source_notes: Notes
) -> ConversionPlan:
    """Build the conversion plan that the public API returns.

    It includes the notes about the source and about the planning.
    """
    options, source = draft.options, draft.source
    skipped = draft.notes.get_reasons("skipped")
    replicas = source.replicas.keys() - draft.missing.keys() - skipped.keys()
    notes = Notes()
    notes.add(*draft.catalog.notes)
    if unread := formats.list_unread_parts(draft.catalog):
        notes.add(f"not copied (other checkpoints): {quote_names(unread)}")
        notes.explain("not copied", dict.fromkeys(unread, "another checkpoint"))
    notes += source_notes
    notes += build_file_notes(draft.assets, options.assets, draft.target, draft.written)
    notes += draft.notes
    return ConversionPlan(
        source=draft.located,
        recognition=draft.model,
        options=options,
        change=draft.change,
        output=draft.tensors,
        plan=plan,
        redundant=draft.redundant,
        taken=draft.filled_from,
        base=str(draft.base.path) if draft.base and draft.filled_from else None,
        summary=summary,
        log=notes,
        free_bytes=draft.destination.count_free_bytes(),
        upload=draft.destination.is_upload,
        reference=draft.reference or None,
        replicated=select_replicated_tensors(source, replicas) if options.verify_replicas else None,
        quantization=draft.quantization,
    )


@dataclass(frozen=True, slots=True)
class ConversionResult(Result):
    """Result of a conversion.

    Attributes:
        target: Path or URL of the output.
        nbytes: Size of the output in bytes.
        log: Notes of the run.
        rounded: Quantization errors, by tensor name in the output.
    """

    plan: Annotated[ConversionPlan, Inline()]
    target: TreePath
    nbytes: int
    seconds: Annotated[float, JsonField("time for copying and publishing", to=round_seconds)]
    resumed_bytes: Annotated[int, JsonField("bytes written by an earlier, resumed run")]
    verified: Annotated[bool, JsonField("whether the result was read again and verified")]
    log: Notes
    out_of_range: Annotated[Mapping[str, OutOfRange], OUT_OF_RANGE] = field(default_factory=dict)
    rounded: Mapping[str, Rounding] = field(default_factory=dict)

    @property
    def rounding(self) -> Annotated[dict[str, Rounding], ROUNDED]:
        """Quantization error of each weight, by its name before quantization."""
        quantization = self.plan.quantization
        if quantization is None or quantization.is_lossless:
            return {}
        errors: dict[str, Rounding] = {}
        for part_name, rounding in self.rounded.items():
            name = quantization.parts[part_name]
            errors[name] = errors.get(name, NO_ROUNDING) + rounding
        return {name: errors.get(name, NO_ROUNDING) for name in quantization.weights}

    @property
    def dry_run(self) -> Annotated[bool, DRY_RUN]:
        """Always False, because the conversion was run."""
        return False

    @property
    def missing(self) -> Mapping[str, str]:
        """Incomplete or missing items that were not written, and the reason for each."""
        return self.plan.missing

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes about the run."""
        return self.log.get_texts()

    @property
    def all_notes(self) -> Annotated[tuple[str, ...], JsonField(name="notes")]:
        """Further notes."""
        return (*self.plan.all_notes, *self.notes)
