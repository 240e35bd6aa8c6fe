"""Options of ``ckptctl delta make`` and ``ckptctl delta apply``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from ckptctl import option_checks as checks
from ckptctl import shared_options as opt
from ckptctl.conversion.conversion_options import ConversionOptions, WriteOptions
from ckptctl.options import Option, OptionConflict, Options
from ckptctl.tree import TreePath

Compression = Literal["zstd", "deflate"]


Overwrite = Annotated[bool, Option("Replace the destination if it is a delta.", panel="Safety")]
Compress = Annotated[
    Compression | None,
    Option("Compression: zstd or deflate.  [default: zstd if installed]", metavar="NAME"),
]


@dataclass(frozen=True, kw_only=True)
class DeltaOptions(opt.ModelOptions, opt.SourceOptions):
    """Options of ``delta make`` (``ckptctl delta make --help``)."""

    sizes: opt.Sizes = None
    reference: opt.Reference = None
    dtype: Annotated[
        str | None,
        Option(
            "Cast the tensors of NEW, e.g. to bf16.",
            metavar="DTYPE",
            check=checks.check_floating_dtype,
            offers=checks.list_floating_dtypes,
        ),
    ] = None
    compression: Compress = None
    weight_version: Annotated[
        int | None,
        Option(
            "Write version N for SGLang, slime and miles. BASE is version N - 1.",
            metavar="N",
            check=checks.check_positive,
            excludes=(OptionConflict("compression", "that layout always uses zstd"),),
        ),
    ] = None
    allow_overflow: opt.AllowOverflow = False
    overwrite: Overwrite = False
    jobs: opt.Jobs = None

    def to_conversion_options(self, path: TreePath, *, is_new: bool) -> ConversionOptions:
        """Return the options of a conversion of *path* to the canonical layout."""
        return _build_canonical_options(self, path, dtype=self.dtype if is_new else None)


@dataclass(frozen=True, kw_only=True)
class DeltaVerifyOptions(opt.ModelOptions, opt.SourceOptions):
    """Options of ``delta verify`` (``ckptctl delta verify --help``)."""

    base: Annotated[
        checks.AnyPath | None,
        Option(
            "Checkpoint to which the first delta applies. Its data is also compared.",
            metavar="BASE",
            check=checks.check_location,
        ),
    ] = None
    sizes: opt.Sizes = None
    reference: opt.Reference = None
    jobs: opt.Jobs = None

    def to_conversion_options(self, path: TreePath) -> ConversionOptions:
        """Return the options of a conversion of the base at *path* to the canonical layout."""
        return _build_canonical_options(self, path)


def _build_canonical_options(
    options: DeltaOptions | DeltaVerifyOptions, path: TreePath, **changed: Any
) -> ConversionOptions:
    """Build the options of a conversion of *path* to the canonical layout.

    Options that select among weights only apply to formats that have a choice.
    """
    from ckptctl import formats

    source = formats.detect_format(path)
    selected = {
        name: getattr(options, name)
        for name in ("weights", "tag", "rules", "ranks")
        if name in source.read_options
    }
    return ConversionOptions(
        to="peft" if source.adapters else "hf",
        model_type=options.model_type,
        converter=options.converter,
        sizes=options.sizes,
        reference=options.reference,
        **selected,
        **changed,
    )


@dataclass(frozen=True, kw_only=True)
class DeltaSquashOptions(Options):
    """Options of ``delta squash`` (``ckptctl delta squash --help``)."""

    compression: Compress = None
    overwrite: Overwrite = False
    jobs: opt.Jobs = None


@dataclass(frozen=True, kw_only=True)
class DeltaApplyOptions(WriteOptions):
    """Options of ``delta apply`` (``ckptctl delta apply --help``)."""

    to: Annotated[
        str | None,
        opt.target_format_option(f"Format to write: {opt.FORMATS}.  [default: format of BASE]"),
    ] = None


NON_APPLY_OPTIONS = (
    *("only", "fill_from", "allow_missing", "verify_replicas", "lora_alpha", "carry", "step"),
)
"""Conversion options that ``delta apply`` lacks, because a delta covers a complete model."""
