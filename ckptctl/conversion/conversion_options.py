"""Options of conversions, merges, consolidations and averages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from ckptctl import option_checks as checks
from ckptctl import shared_options as opt
from ckptctl.errors import UsageError, format_option
from ckptctl.options import Argument, Option, OptionConflict, Options, list_options, option_group
from ckptctl.units import parse_bytes, parse_file_size

if TYPE_CHECKING:
    from ckptctl.storage.execution.execution_options import ExecutionOptions


Schedule: TypeAlias = Literal["linear", "cosine", "1-sqrt"]
_WEIGHTS_CONFLICT = "both set the weights"


@option_group
class _SourceFormatOptions(Options):
    """Option for the format of the source checkpoint."""

    from_format: opt.From = None


@option_group
class _TargetFormatOptions(Options):
    """Option for the format of the output checkpoint."""

    to: opt.To


@dataclass(frozen=True, kw_only=True)
class WriteOptions(opt.ModelOptions, opt.SourceOptions, _SourceFormatOptions):
    """Options of all operations that write a checkpoint, except the target format."""

    sizes: opt.Sizes = None
    reference: opt.Reference = None
    from_layout: opt.FromLayout = None
    to_layout: opt.ToLayout = None
    dtype: opt.DType = None
    dequantize: opt.Dequantize = None
    quantize: opt.Quantize = None
    quantize_also: opt.QuantizeAlso = ()
    quantize_not: opt.QuantizeNot = ()
    include: opt.Include = ()
    exclude: opt.Exclude = ()
    only: Annotated[
        opt.Part,
        Option(
            "Part to write: model, or all (with optimizer state).",
            metavar="PART",
            panel="Select",
            brief=True,
        ),
    ] = "model"
    root: opt.Prefix = None
    max_shard_size: Annotated[
        int | str | None,
        Option(
            "Maximum size of the tensors in a file, e.g. 5GB. Applies to hf, mistral, dcp and "
            "mcore.  [default: 1/16 of the total size, but 256MB to 5GB]",
            metavar="SIZE",
            check=parse_file_size,
            panel="Output",
            brief=True,
        ),
    ] = None
    mp: Annotated[
        int,
        Option(
            "Number of model-parallel files. Applies to meta and deepseek.",
            metavar="N",
            check=checks.check_positive,
            panel="Output",
        ),
    ] = 1
    assets: opt.Assets = None
    trust_assets: Annotated[bool, opt.trust_assets_option(requires="assets")] = False
    fill_from: Annotated[
        checks.AnyPath | None,
        Option(
            "Fill missing tensors from a base checkpoint of the same model.",
            metavar="BASE",
            check=checks.check_location,
            panel="Output",
            excludes=(
                OptionConflict("allow_missing", "it needs an otherwise complete source"),
                OptionConflict("only=all", "the base has no training state for filled tensors"),
            ),
        ),
    ] = None
    carry: Annotated[
        Sequence[str],
        Option(
            "Copy additional files from the folder of the source. Repeatable.",
            metavar="GLOB",
            check=checks.check_globs,
            panel="Output",
        ),
    ] = ()
    like: Annotated[
        checks.AnyPath | None,
        Option(
            "Place each key in the same file as in this checkpoint.",
            metavar="DIR",
            check=checks.check_location,
            panel="Output",
            excludes=(
                OptionConflict("mp", "both set the number of shards"),
                OptionConflict("max_shard_size", "both determine the files"),
            ),
        ),
    ] = None
    untie: Annotated[
        bool,
        Option(
            "Write both tensors of a tied pair, e.g. embeddings and lm_head.",
            panel="Format and model",
            excludes=(OptionConflict("tied=drop"),),
        ),
    ] = False
    tied: Annotated[
        Literal["drop", "copy"] | None,
        Option(
            "Tensors that share memory: drop (write only one) or copy (write each in full).",
            metavar="HOW",
            panel="Format and model",
        ),
    ] = None
    vocab_size: Annotated[
        int | None,
        Option(
            "Pad the vocabulary with zeros, or truncate it, to N rows.",
            metavar="N",
            check=checks.check_positive,
            panel="Format and model",
            python="Pad the vocabulary with zeros, or truncate it, to this number of rows.",
        ),
    ] = None
    stack_layers: Annotated[
        bool,
        Option(
            "Stack corresponding tensors of layers, for older loaders. Applies to mcore.",
            panel="Advanced",
        ),
    ] = False
    lora_alpha: Annotated[
        float | None,
        Option(
            "LoRA alpha, if no adapter_config.json sets it.",
            metavar="NUMBER",
            check=checks.check_factor,
            panel="Format and model",
            excludes=(OptionConflict("scaling", "both set the scale"),),
        ),
    ] = None
    step: Annotated[
        Sequence[str],
        Option(
            "Apply a step that an installed package adds. Repeatable.",
            metavar="NAME[=VALUE]",
            check=checks.check_steps,
            offers=checks.list_added_steps,
            panel="Advanced",
        ),
    ] = ()
    allow_overflow: opt.AllowOverflow = False
    allow_missing: Annotated[
        bool,
        Option(
            "Write the available tensors, list the missing ones and exit with code 7.",
            python="Write the available tensors. ``missing`` of plan and result lists the others.",
            panel="Safety",
        ),
    ] = False
    verify_replicas: Annotated[
        bool, Option("Compare all copies of the same elements before writing.", panel="Safety")
    ] = False
    overwrite: Annotated[
        bool, Option("Replace the destination if it is a checkpoint.", panel="Safety", brief=True)
    ] = False
    resume: Annotated[
        bool,
        Option(
            "Resume an interrupted run.",
            panel="Safety",
            brief=True,
            excludes=(OptionConflict("restart"),),
        ),
    ] = False
    restart: Annotated[
        bool,
        Option("Discard partial output from an interrupted run and start over.", panel="Safety"),
    ] = False
    verify: Annotated[
        bool,
        Option(
            "Read the result back and compare its checksums.",
            panel="Safety",
            brief=True,
            excludes=(OptionConflict("checksum", "it compares checksums"),),
        ),
    ] = False
    checksum: Annotated[
        bool,
        Option(
            "Do not compute checksums. This may be faster.",
            flags="--no-checksum",
            python="Compute checksums while writing.",
            panel="Performance",
        ),
    ] = True
    jobs: opt.Jobs = None
    device: opt.Device = None
    memory: Annotated[
        int | str | None,
        Option(
            "Memory for buffers, e.g. 256MiB.  [default: 64MiB]",
            metavar="SIZE",
            check=parse_bytes,
            panel="Performance",
        ),
    ] = None

    def with_target_format(self, to: str, **changed: Any) -> ConversionOptions:
        """Return a copy of the options for a conversion to format *to*.

        Keyword arguments replace further fields.
        """
        current_values = {
            option.name: getattr(self, option.name) for option in fields(WriteOptions)
        }
        return ConversionOptions(**{**current_values, **changed}, to=to)

    @property
    def format(self) -> str | None:
        """Format of the source, or None to detect it."""
        return self.from_format

    def to_execution_options(self) -> ExecutionOptions:
        """Return the options for executing the plan."""
        from ckptctl.storage.execution.execution_options import ExecutionOptions

        default = ExecutionOptions()
        return ExecutionOptions(
            jobs=self.jobs or default.jobs,
            memory=parse_bytes(self.memory) if self.memory else default.memory,
            checksum=self.checksum,
            resume=self.resume,
            device=self.device,
        )


@dataclass(frozen=True, kw_only=True)
class ConversionOptions(WriteOptions, _TargetFormatOptions):
    """Options of a conversion (``ckptctl convert --help``)."""

    repack: Annotated[
        Literal["compressed-tensors", "mxfp4"] | None,
        Option(
            "Store quantized weights (AWQ, GPTQ, ModelOpt, MXFP4) in another format without "
            "requantizing: compressed-tensors, or mxfp4 for gpt-oss.",
            metavar="FORMAT",
            panel="Format and model",
            excludes=(
                OptionConflict("dequantize", "repacked weights stay quantized"),
                OptionConflict("quantize", "the weights are quantized already"),
                OptionConflict("dtype", "repacked weights keep their values"),
                OptionConflict("allow_missing", "it needs a complete source"),
            ),
        ),
    ] = None
    experts: Annotated[
        Literal["apart", "stacked"] | None,
        Option(
            "Layout of the LoRA factors of experts: apart (vLLM, transformers 4) or stacked "
            "(transformers 5). Applies to peft.",
            metavar="HOW",
            panel="Format and model",
        ),
    ] = None


@option_group
class _MergeTargetOptions(Options):
    """Options for the output format and the adapter scale of a merge."""

    to: Annotated[
        str | None,
        opt.target_format_option(f"Format to write: {opt.FORMATS}.  [default: format of BASE]"),
    ] = None
    scaling: Annotated[
        float | None,
        Option(
            "Scale of the adapter, instead of alpha / rank.",
            metavar="FACTOR",
            check=checks.check_factor,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class MergeOptions(WriteOptions, _MergeTargetOptions):
    """Options of a merge (``ckptctl merge --help``)."""


@option_group
class _ConsolidationTargetOptions(Options):
    """Options for the destination and contents of a consolidation."""

    dst: Annotated[
        checks.AnyPath | None,
        Argument(
            "Destination path or URL. Omit it with --metadata-only.",
            python="Destination path or URL. Omit it with `metadata_only`.",
            metavar="DST",
            check=checks.check_new_location,
        ),
    ] = field(default=None, kw_only=False)
    to: Annotated[
        str | None,
        opt.target_format_option(
            f"Format to write: {opt.FORMATS}.  [default: hf, or dcp with --optimizer]",
            python=f"Format to write: {opt.FORMATS}.  [default: hf, or dcp with `optimizer`]",
        ),
    ] = None
    metadata_only: Annotated[bool, Option("Add missing .metadata without copying tensors.")] = False
    optimizer: Annotated[
        bool,
        Option(
            "Keep the optimizer state. Requires --to dcp, mcore or torch.",
            python="Keep the optimizer state. Requires `to` dcp, mcore or torch.",
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class ConsolidationOptions(WriteOptions, _ConsolidationTargetOptions):
    """Options of a consolidation (``ckptctl consolidate --help``)."""

    def __post_init__(self) -> None:
        """Check all values, and raise if ``--metadata-only`` is combined with other options."""
        super().__post_init__()
        if self.metadata_only and self.dst is not None:
            raise UsageError(
                f"DST conflicts with {format_option('--metadata-only')} (it adds a file to SRC)",
                where=str(self.dst),
            )
        if not self.metadata_only and self.dst is None:
            raise UsageError(
                "missing argument DST (destination path or URL)",
                hint=f"pass DST, or {format_option('--metadata-only')} to add a file to SRC",
            )
        metadata_only = format_option("--metadata-only")
        for option in list_options(type(self)) if self.metadata_only else ():
            if option.name != "metadata_only" and getattr(self, option.name) != option.default:
                raise UsageError(
                    f"{format_option(option.display_name)} is not supported with {metadata_only}",
                    why="no tensor is written",
                )

    def to_conversion_options(self) -> ConversionOptions:
        """Return the options of a conversion with the same effect as this consolidation."""
        only: opt.Part = "all" if self.optimizer else "model"
        return self.with_target_format(self.to or ("dcp" if self.optimizer else "hf"), only=only)


NON_CONSOLIDATION_OPTIONS = (
    *("converter", "sizes", "from_layout", "to_layout", "dequantize", "only", "mp", "like"),
    *("quantize", "quantize_also", "quantize_not"),
    *("untie", "vocab_size", "stack_layers", "lora_alpha", "step"),
)
"""Conversion options that ``consolidate`` lacks, because it keeps tensor names and sizes."""


@dataclass(frozen=True, kw_only=True)
class AverageOptions(WriteOptions):
    """Options of an average (``ckptctl average --help``)."""

    to: Annotated[
        str | None,
        opt.target_format_option(
            f"Format to write: {opt.FORMATS}.  [default: format of the last SRC]"
        ),
    ] = None
    # Replaces the option that selects master or module weights, whose default applies.
    weights: Annotated[
        Sequence[float] | None,
        Option(
            "Weights of the checkpoints, in order, e.g. 1,1,2. They are divided by their sum.  "
            "[default: equal weights]",
            metavar="W,W,...",
            parse=checks.parse_weights,
            check=checks.check_weights,
            python="Weights of the checkpoints, in order. They are divided by their sum.  "
            "[default: equal weights]",
            excludes=(
                OptionConflict("ema", _WEIGHTS_CONFLICT),
                OptionConflict("schedule", _WEIGHTS_CONFLICT),
            ),
        ),
    ] = None  # type: ignore[assignment]
    ema: Annotated[
        float | None,
        Option(
            "Exponential moving average, e.g. 0.9.",
            metavar="DECAY",
            check=checks.check_fraction,
            excludes=(OptionConflict("schedule", _WEIGHTS_CONFLICT),),
        ),
    ] = None
    schedule: Annotated[
        Schedule | None,
        Option(
            "Emulated decay (WSM): linear, cosine or 1-sqrt.",
            metavar="SHAPE",
        ),
    ] = None
    last: Annotated[
        int | None,
        Option(
            "Average the newest N complete checkpoints of a run. SRC is the run's folder.",
            metavar="N",
            check=checks.build_minimum_check(2),
        ),
    ] = None
    every: Annotated[
        int | None,
        Option(
            "Select checkpoints of a run with a step divisible by K. SRC is the run's folder.",
            metavar="K",
            check=checks.check_positive,
        ),
    ] = None


NON_AVERAGE_OPTIONS = (
    "tag",
    "ranks",
    "fill_from",
    "allow_missing",
    "verify_replicas",
    "lora_alpha",
)
"""Conversion options that ``average`` lacks, because they apply to a single source."""
