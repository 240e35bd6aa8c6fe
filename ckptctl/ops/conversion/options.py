"""What a conversion, a merge or a consolidation is asked to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ckptctl.errors import UsageError
from ckptctl.ops import option_checks as checks
from ckptctl.ops import options as opt
from ckptctl.options import Argument, Option, Options, declared, group
from ckptctl.units import parse_bytes, parse_file_size

if TYPE_CHECKING:
    from ckptctl.storage.execution.options import ExecutionOptions


@group
class _From(Options):
    """What a checkpoint that is converted is."""

    from_format: opt.From = None


@group
class _To(Options):
    """What is written."""

    to: opt.To


@dataclass(frozen=True, kw_only=True)
class WriteOptions(opt.ModelOptions, opt.SourceOptions, _From):
    """What everything that writes a checkpoint takes, beside the format."""

    sizes: opt.Sizes = None
    from_layout: opt.FromLayout = None
    to_layout: Annotated[
        str | None, opt.layout(f"How the output is to name its tensors: {opt.LAYOUTS}.")
    ] = None
    dtype: opt.DType = None
    dequantize: opt.Dequantize = None
    quantize: opt.Quantize = None
    quantize_also: opt.QuantizeAlso = ()
    quantize_not: opt.QuantizeNot = ()
    include: opt.Include = ()
    exclude: opt.Exclude = ()
    only: Annotated[
        opt.Part, Option("model, or all: optimizer state too.", metavar="PART", panel="Select")
    ] = "model"
    root: opt.Prefix = None
    max_shard_size: Annotated[
        int | str | None,
        Option(
            "Bytes of tensors per file: hf, mistral, dcp, mcore; else a sixteenth, 256MB to 5GB.",
            metavar="SIZE",
            check=parse_file_size,
            panel="Output",
        ),
    ] = None
    mp: Annotated[
        int,
        Option(
            "Number of model-parallel files: meta, deepseek.",
            metavar="N",
            check=checks.positive,
            panel="Output",
        ),
    ] = 1
    assets: opt.Assets = None
    trust_assets: opt.TrustAssets = False
    fill_from: Annotated[
        checks.AnyPath | None,
        Option(
            "Take what the source lacks of its model from this checkpoint of the same.",
            metavar="BASE",
            check=checks.place,
            panel="Output",
        ),
    ] = None
    carry: Annotated[
        Sequence[str],
        Option(
            "Copy other files beside the weights, too; repeatable.",
            metavar="GLOB",
            check=checks.globs,
            panel="Output",
        ),
    ] = ()
    like: Annotated[
        checks.AnyPath | None,
        Option(
            "Put the same keys in the same files as here.",
            metavar="DIR",
            check=checks.place,
            panel="Expert",
        ),
    ] = None
    untie: Annotated[bool, Option("Write both of two tied tensors.", panel="Expert")] = False
    tied: Annotated[
        Literal["drop", "copy"] | None,
        Option(
            "Tensors that share memory: drop all but one, or copy each in full.",
            metavar="HOW",
            panel="Expert",
        ),
    ] = None
    vocab_size: Annotated[
        int | None,
        Option(
            "Pad the vocabulary with zeros, or cut it, to so many rows.",
            metavar="N",
            check=checks.positive,
            panel="Expert",
        ),
    ] = None
    stack_layers: Annotated[
        bool,
        Option("Write equal layers as one tensor: mcore, for older loaders.", panel="Expert"),
    ] = False
    lora_alpha: Annotated[
        float | None,
        Option(
            "Strength of an adapter, where no adapter_config.json says so.",
            metavar="NUMBER",
            check=checks.factor,
            panel="Format and model",
        ),
    ] = None
    allow_overflow: opt.AllowOverflow = False
    allow_missing: Annotated[
        bool,
        Option(
            "Write what is there, list what is missing, exit with 7.",
            python="Write what is there; ``missing`` of plan and result says what is not.",
            panel="Safety",
        ),
    ] = False
    verify_replicas: Annotated[
        bool, Option("Compare all copies of the same elements first.", panel="Safety")
    ] = False
    overwrite: Annotated[
        bool,
        Option("Replace the destination if it is a checkpoint.", panel="Safety"),
    ] = False
    resume: Annotated[bool, Option("Go on with an interrupted run.", panel="Safety")] = False
    restart: Annotated[
        bool, Option("Throw away what an interrupted run left, and begin anew.", panel="Safety")
    ] = False
    verify: Annotated[
        bool,
        Option("Read the result again and compare its checksums.", panel="Safety"),
    ] = False
    checksum: Annotated[
        bool,
        Option(
            "Compute no checksums; may be faster.",
            flags="--no-checksum",
            python="Compute checksums on the way.",
            panel="Expert",
        ),
    ] = True
    jobs: opt.Jobs = None
    memory: Annotated[
        int | str | None,
        Option(
            "Budget for buffers, as in 256MiB; else 64MiB.",
            metavar="SIZE",
            check=parse_bytes,
            panel="Expert",
        ),
    ] = None

    def to_format(self, to: str, **changed: Any) -> ConversionOptions:
        """Return the options of a conversion to a format, otherwise alike."""
        same = {one.name: getattr(self, one.name) for one in fields(WriteOptions)}
        return ConversionOptions(**{**same, **changed}, to=to)

    @property
    def format(self) -> str | None:
        """Return the format of the source; None: detect it."""
        return self.from_format

    def execution(self) -> ExecutionOptions:
        """Return how the plan is to be carried out."""
        from ckptctl.storage.execution.options import ExecutionOptions

        default = ExecutionOptions()
        return ExecutionOptions(
            jobs=self.jobs or default.jobs,
            memory=parse_bytes(self.memory) if self.memory else default.memory,
            checksum=self.checksum,
            resume=self.resume,
        )


@dataclass(frozen=True, kw_only=True)
class ConversionOptions(WriteOptions, _To):
    """What a conversion is asked to do; see ``ckptctl convert --help``."""

    experts: Annotated[
        Literal["apart", "stacked"] | None,
        Option(
            "Factors of experts: apart (vLLM, transformers 4) or stacked (5); peft.",
            metavar="HOW",
            panel="Expert",
        ),
    ] = None


@group
class _MergedTo(Options):
    """What is written, and how strongly the adapter counts."""

    to: Annotated[
        str | None, opt.target_format(f"Format to write, if not that of BASE: {opt.FORMATS}.")
    ] = None
    scaling: Annotated[
        float | None,
        Option(
            "Factor of the change itself, instead of alpha / rank.",
            metavar="FACTOR",
            check=checks.factor,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class MergeOptions(WriteOptions, _MergedTo):
    """What a merge is asked to do; see ``ckptctl merge --help``."""


@group
class _Consolidated(Options):
    """What is made of what ranks left."""

    dst: Annotated[
        checks.AnyPath | None,
        Argument(
            "What to write; none with --metadata-only.", metavar="DST", check=checks.new_place
        ),
    ] = field(default=None, kw_only=False)
    to: Annotated[
        str | None,
        opt.target_format(f"Format to write: {opt.FORMATS}.  [default: hf; dcp with --optimizer]"),
    ] = None
    metadata_only: Annotated[
        bool, Option("Add the .metadata that ranks left out; move no tensor.")
    ] = False
    optimizer: Annotated[bool, Option("Keep the optimizer state: --to dcp or torch.")] = False


@dataclass(frozen=True, kw_only=True)
class ConsolidationOptions(WriteOptions, _Consolidated):
    """What a consolidation is asked to do; see ``ckptctl consolidate --help``."""

    def __post_init__(self) -> None:
        """Check all values, and that those that say how tensors are written have a meaning."""
        super().__post_init__()
        if self.metadata_only and self.dst is not None:
            raise UsageError(
                "--metadata-only adds a file to SRC and takes no DST", where=str(self.dst)
            )
        if not self.metadata_only and self.dst is None:
            raise UsageError("DST is missing", hint="only --metadata-only needs none")
        for one in declared(type(self)) if self.metadata_only else ():
            if one.name != "metadata_only" and getattr(self, one.name) != one.default:
                raise UsageError(
                    f"{one.shown} has no meaning with --metadata-only", why="no tensor is written"
                )

    def conversion(self) -> ConversionOptions:
        """Return the conversion that makes one checkpoint of it."""
        only: opt.Part = "all" if self.optimizer else "model"
        return self.to_format(self.to or ("dcp" if self.optimizer else "hf"), only=only)


NOT_CONSOLIDATED = (
    *("converter", "sizes", "from_layout", "to_layout", "dequantize", "only", "mp", "like"),
    *("quantize", "quantize_also", "quantize_not"),
    *("untie", "vocab_size", "stack_layers", "lora_alpha"),
)
"""Options of a conversion that a consolidation has not: names stay as the trainer wrote them."""
