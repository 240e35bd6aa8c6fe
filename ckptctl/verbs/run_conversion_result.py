"""Plan and result of the conversion of a run's checkpoints, as shown to users."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from ckptctl.conversion.conversion_options import ConversionOptions
from ckptctl.errors import CkptError, PartialError, quote_names
from ckptctl.results import JsonField, Result, empty_to_none, round_seconds
from ckptctl.runs.health import Checkpoint
from ckptctl.runs.selection import OtherEntries, RunSelection
from ckptctl.storage.urls import is_hub_repository
from ckptctl.tree import TreePath
from ckptctl.units import format_bytes, pluralize

Action = Literal["convert", "verify", "skip", "fail"]
Status = Literal["converted", "present", "skipped", "failed"]
DRY_RUN = JsonField(
    "whether this is a plan; if true, `seconds` and `checkpoints` are absent, else `decisions`"
)
_TASK = JsonField("task I/N, or null if there is only one")


@dataclass(frozen=True, slots=True)
class PlannedCheckpoint(Result):
    """Checkpoint of a run, and what to do with it.

    Attributes:
        statement: Summary of the conversion, without what differs between checkpoints.
        notes: Notes on the conversion.
    """

    checkpoint: Annotated[
        Checkpoint,
        JsonField("name of the checkpoint", of="name"),
        JsonField("step in its name", of="step"),
        JsonField("path of the checkpoint", of="path", name="source"),
        JsonField("`complete`, `damaged` or `unknown`", of="verdict"),
        JsonField("size of the checkpoint", of="entry.nbytes", name="source_bytes"),
    ]
    target: Annotated[TreePath, JsonField("destination")]
    action: Annotated[
        Action,
        JsonField(
            "`convert`; `verify`, if the destination exists, to skip it if it is this conversion; "
            "`skip`, if the checkpoint is not complete; or `fail`, if it cannot be converted"
        ),
    ]
    reason: Annotated[
        str, JsonField("why it is skipped, fails or must be verified", to=empty_to_none)
    ] = ""
    nbytes: Annotated[int, JsonField("size of the output", name="bytes")] = 0
    tensors: Annotated[int, JsonField("number of tensors in the output")] = 0
    tensor_bytes: Annotated[int, JsonField("size of these tensors")] = 0
    model_type: Annotated[str | None, JsonField("[model type](models.md), or null")] = None
    error: CkptError | None = None
    statement: str = ""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the checkpoint."""
        return self.checkpoint.name

    @property
    def model(self) -> str:
        """Model type and sizes, which all checkpoints of a run usually share."""
        tensors = f"{pluralize(self.tensors, 'tensor')}, {format_bytes(self.tensor_bytes)}"
        return f"{self.model_type or 'unknown model type'}: {tensors}"


@dataclass(frozen=True, slots=True)
class RunConversionPlan(
    Result,
    order="dry_run root destination task total to_format bytes counts decisions others notes",
):
    """Plan of the conversion of a run, or of one task's part of it.

    Attributes:
        checkpoints: Checkpoints of the task, by series and step.
    """

    selection: Annotated[RunSelection, JsonField("folder of the run", of="root")]
    destination: Annotated[
        TreePath, JsonField("destination as given, or the folder of the destinations")
    ]
    options: Annotated[
        ConversionOptions, JsonField("format of the output", of="to", name="to_format")
    ]
    checkpoints: Annotated[
        tuple[PlannedCheckpoint, ...],
        JsonField("plan for each checkpoint of this task, by series and step", name="decisions"),
    ]

    @property
    def dry_run(self) -> Annotated[bool, DRY_RUN]:
        """Always true for a plan."""
        return True

    @property
    def task(self) -> Annotated[str | None, _TASK]:
        """Task I/N, or None if there is only one."""
        return self.selection.task_text

    @property
    def total(self) -> Annotated[int, JsonField()]:
        """Number of selected checkpoints of all tasks."""
        return self.selection.total

    @property
    def others(self) -> Annotated[OtherEntries, JsonField()]:
        """Other entries of the run, except hidden ones and pointers, unless `--steps` is given."""
        return self.selection.others

    @property
    def nbytes(self) -> Annotated[int, JsonField(name="bytes")]:
        """Size of all outputs to write, if none of those to verify must be written again."""
        return sum(item.nbytes for item in self.checkpoints if item.action == "convert")

    @property
    def counts(
        self,
    ) -> Annotated[Mapping[str, Annotated[int, JsonField("number")]], JsonField()]:
        """Number of checkpoints by action."""
        return Counter(item.action for item in self.checkpoints)

    @property
    def is_hub_upload(self) -> bool:
        """Whether the outputs are commits in a repository of the Hub, unlike those in a bucket."""
        return is_hub_repository(str(self.destination))

    def require_complete(self) -> None:
        """Raise `PartialError` if a checkpoint is skipped or cannot be converted."""
        lacking = [item for item in self.checkpoints if item.action in ("skip", "fail")]
        if lacking:
            raise PartialError(
                f"{len(lacking):,} of {pluralize(len(self.checkpoints), 'checkpoint')} cannot be "
                "converted",
                where=quote_names([item.name for item in lacking]),
                why=f"`{lacking[0].name}`: {lacking[0].reason}",
                hint=lacking[0].error.hint if lacking[0].error else None,
            )

    @property
    def all_notes(self) -> Annotated[tuple[str, ...], JsonField(name="notes")]:
        """Notes on the conversions and on differences between them."""
        return (*self.warnings, *self.notes)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the conversions, without repetitions."""
        return tuple(dict.fromkeys(note for item in self.checkpoints for note in item.notes))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about the conversions, and about checkpoints of another model."""
        warnings: dict[str, list[str]] = {}
        for item in self.checkpoints:
            for warning in item.warnings:
                warnings.setdefault(warning, []).append(item.name)
        texts = [f"{quote_names(names)}: {text}" for text, names in warnings.items()]
        return (*texts, *self._find_other_models())

    def _find_other_models(self) -> list[str]:
        """Describe the checkpoints whose model differs from that of most others."""
        planned = [item for item in self.checkpoints if item.action in ("convert", "verify")]
        names: dict[str, list[str]] = {}
        for item in planned:
            names.setdefault(item.model, []).append(item.name)
        common, *others = sorted(names, key=lambda model: len(names[model]), reverse=True) or [""]
        return [
            f"{quote_names(names[other])}: another model than most checkpoints ({other}, not "
            f"{common})"
            for other in others
        ]


@dataclass(frozen=True, slots=True)
class ConvertedCheckpoint(Result):
    """Outcome for one checkpoint of a run."""

    planned: Annotated[
        PlannedCheckpoint,
        JsonField("name of the checkpoint", of="checkpoint.name"),
        JsonField("step in its name", of="checkpoint.step"),
        JsonField("path of the checkpoint", of="checkpoint.path", name="source"),
        JsonField("`complete`, `damaged` or `unknown`", of="checkpoint.verdict"),
        JsonField("destination", of="target"),
    ]
    status: Annotated[
        Status,
        JsonField(
            "`converted`; `present`, if the destination was shown to be this conversion; "
            "`skipped`, if the checkpoint is not complete; or `failed`"
        ),
    ]
    reason: Annotated[str, JsonField("why it was skipped or failed, or null", to=empty_to_none)] = (
        ""
    )
    nbytes: Annotated[int, JsonField("bytes written, or verified if present", name="bytes")] = 0
    seconds: Annotated[float, JsonField("elapsed time", to=round_seconds)] = 0.0
    error: Annotated[CkptError | None, JsonField("error, or null")] = None
    missing: Annotated[
        int, JsonField("number of items that are missing in the output (`--allow-missing`)")
    ] = 0
    warnings: Annotated[tuple[str, ...], JsonField("warnings")] = ()
    digest: str = ""
    source_fingerprint: str = ""

    @property
    def name(self) -> str:
        """Name of the checkpoint."""
        return self.planned.name

    @property
    def is_success(self) -> bool:
        """Whether the destination holds the complete output."""
        return self.status in ("converted", "present") and not self.missing


@dataclass(frozen=True, slots=True)
class RunConversionResult(
    Result,
    order="dry_run root destination task total to_format bytes seconds counts checkpoints others "
    "notes",
):
    """Result of the conversion of a run, or of one task's part of it."""

    plan: Annotated[
        RunConversionPlan,
        JsonField("folder of the run", of="selection.root"),
        JsonField("destination as given", of="destination"),
        JsonField("number of selected checkpoints of all tasks", of="selection.total"),
        JsonField("format of the output", of="options.to", name="to_format"),
        JsonField("notes on the conversions", of="all_notes", name="notes"),
    ]
    checkpoints: Annotated[
        tuple[ConvertedCheckpoint, ...], JsonField("checkpoints of this task, by series and step")
    ]
    seconds: Annotated[float, JsonField("elapsed time", to=round_seconds)]

    @property
    def dry_run(self) -> Annotated[bool, DRY_RUN]:
        """Always false for a result."""
        return False

    @property
    def task(self) -> Annotated[str | None, _TASK]:
        """Task I/N, or None if there is only one."""
        return self.plan.selection.task_text

    @property
    def others(self) -> Annotated[OtherEntries, JsonField()]:
        """Other entries of the run, except hidden ones and pointers, unless `--steps` is given."""
        return self.plan.others

    @property
    def nbytes(self) -> Annotated[int, JsonField("bytes written", name="bytes")]:
        """Bytes written."""
        return sum(item.nbytes for item in self.checkpoints if item.status == "converted")

    @property
    def counts(
        self,
    ) -> Annotated[Mapping[str, Annotated[int, JsonField("number")]], JsonField()]:
        """Number of checkpoints by status."""
        return Counter(item.status for item in self.checkpoints)

    def require_complete(self) -> None:
        """Raise `PartialError` unless all checkpoints of the task were converted or present."""
        lacking = [item for item in self.checkpoints if not item.is_success]
        if not lacking:
            return
        first, is_one = lacking[0], len(lacking) == 1
        outcome = "was not converted" if is_one else "were not converted"
        if all(item.status in ("converted", "present") for item in lacking):
            outcome = "is incomplete" if is_one else "are incomplete"
        raise PartialError(
            f"{len(lacking):,} of {pluralize(len(self.checkpoints), 'checkpoint')} {outcome}",
            where=quote_names([item.name for item in lacking]),
            why=f"`{first.name}`: {first.reason}",
            hint=(first.error.hint if first.error else None)
            or "run the same command again when the cause is removed",
        )
