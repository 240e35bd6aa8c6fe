"""Declarations of options that several commands share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from ckptctl.option_checks import (
    AnyPath,
    check_axis_sizes,
    check_dequantized_dtype,
    check_device,
    check_floating_dtype,
    check_globs,
    check_location,
    check_new_location,
    check_path,
    check_positive,
    check_readable_format,
    check_scheme,
    check_thread_count,
    check_writable_format,
    list_dequantized_dtypes,
    list_floating_dtypes,
    list_layouts,
    list_model_types,
    list_quantization_schemes,
    list_readable_formats,
    list_tensor_names,
    list_writable_formats,
    parse_sizes,
)
from ckptctl.options import Argument, Option, OptionConflict, Options, Panel, option_group
from ckptctl.tree import TreePath

WeightsKind = Literal["master", "module"]
Part = Literal["model", "all"]
ReferenceName = Literal["transformers", "none"]

FORMATS = "dcp, deepseek, hf, mcore, meta, mistral, peft or torch"
CONFLICTS_WITH_MISSING = OptionConflict("allow_missing", "it needs a complete source")
LAYOUTS = (
    "hf, meta or torchtune. Others include hf-v5, mistral and torchtitan@0.3. See `ckptctl models`."
)


Source = Annotated[
    TreePath,
    Argument("Source checkpoint: directory, file or URL.", metavar="SRC", check=check_location),
]
Destination = Annotated[
    TreePath, Argument("Destination path or URL.", metavar="DST", check=check_new_location)
]
Checkpoint = Annotated[
    TreePath, Argument("Checkpoint: directory, file or URL.", metavar="PATH", check=check_location)
]
Root = Annotated[
    TreePath,
    Argument("Folder of a training run's checkpoints.", metavar="ROOT", check=check_location),
]
RootOrHere = Annotated[
    TreePath,
    Argument(
        "Folder of a training run's checkpoints.  [default: current directory]",
        metavar="ROOT",
        check=check_location,
    ),
]


# --------------------------------------------------------------------------------- options


def source_format_option(text: str, flags: str = "") -> Option:
    """Declare the option for the source format, with *text* as its help."""
    return Option(
        text,
        flags=flags,
        metavar="FORMAT",
        check=check_readable_format,
        offers=list_readable_formats,
        panel="Format and model",
    )


def target_format_option(text: str, python: str = "") -> Option:
    """Declare the option for the output format, with *text* as its help."""
    return Option(
        text,
        metavar="FORMAT",
        check=check_writable_format,
        offers=list_writable_formats,
        python=python,
    )


def layout_option(text: str, *, panel: Panel = "Format and model", brief: bool = False) -> Option:
    """Declare an option whose value is a layout, with *text* as its help."""
    return Option(text, metavar="LAYOUT", offers=list_layouts, panel=panel, brief=brief)


def reference_option(default: str) -> Option:
    """Declare the option for the source of the tensors of models without a table."""
    return Option(
        "Source of the tensors that a model must have, if no table describes its type: "
        f"transformers or none.  [default: {default}]",
        metavar="NAME",
        panel="Format and model",
    )


def trust_assets_option(requires: str = "") -> Option:
    """Declare the option that lets ``--assets`` take precedence over other model descriptions."""
    return Option(
        "Prefer --assets over other files that contradict it.",
        python="Prefer `assets` over other files that contradict it.",
        panel="Advanced",
        requires=requires,
    )


From = Annotated[
    str | None,
    source_format_option(
        "Format of the source. See `ckptctl formats`.  [default: detected]", "--from"
    ),
]
To = Annotated[str, target_format_option(f"Format to write: {FORMATS}.")]
Weights = Annotated[
    WeightsKind | None,
    Option(
        "Weights to read if the checkpoint has both: master (the optimizer's fp32 "
        "copies) or module.  [default: master]",
        metavar="KIND",
        panel="Select",
    ),
]
Tag = Annotated[
    str | None,
    Option(
        "Tag of the save to read, if the folder has several.  [default: the one in `latest`]",
        metavar="NAME",
        panel="Select",
    ),
]
Ranks = Annotated[
    int | None,
    Option(
        "Number of ranks that saved the checkpoint, if its files do not record it.",
        metavar="N",
        check=check_positive,
        panel="Advanced",
    ),
]
Rules = Annotated[
    AnyPath | None,
    Option(
        "Rules by which ranks split tensors, if the files do not record them: a TOML file or "
        "megatron-core.",
        metavar="FILE",
        check=check_path,
        panel="Advanced",
    ),
]
ModelType = Annotated[
    str | None,
    Option(
        "Model type. See `ckptctl models`.  [default: detected]",
        flags="-m --model-type",
        metavar="NAME",
        offers=list_model_types,
        panel="Format and model",
        brief=True,
    ),
]
Reference = Annotated[
    ReferenceName | None,
    reference_option("transformers if it is installed"),
]
Converter = Annotated[
    AnyPath | None,
    Option(
        "Python file that defines an additional model type. The file is executed.",
        metavar="FILE.py",
        check=check_path,
        panel="Advanced",
    ),
]
Sizes = Annotated[
    Mapping[str, int] | None,
    Option(
        "Model size missing from the configuration, e.g. num_attention_heads=32. Repeatable.",
        python='Model sizes missing from the configuration, e.g. ``{"num_attention_heads": 32}``.',
        flags="--set",
        metavar="NAME=VALUE",
        parse=parse_sizes,
        check=check_axis_sizes,
        panel="Format and model",
    ),
]
FromLayout = Annotated[str | None, layout_option("Layout of the source.  [default: detected]")]
ToLayout = Annotated[str | None, layout_option(f"Layout to write, e.g. {LAYOUTS}", brief=True)]
DType = Annotated[
    str | None,
    Option(
        "Cast floating-point tensors, e.g. to bf16 or fp16. Tensors that the model "
        "pins to fp32 are not cast.",
        metavar="DTYPE",
        check=check_floating_dtype,
        offers=list_floating_dtypes,
    ),
]
Dequantize = Annotated[
    str | None,
    Option(
        "Dequantize quantized tensors to bf16 or fp32.",
        metavar="DTYPE",
        check=check_dequantized_dtype,
        offers=list_dequantized_dtypes,
        excludes=(CONFLICTS_WITH_MISSING,),
    ),
]
Quantize = Annotated[
    str | None,
    Option(
        "Quantize linear weights, e.g. to fp8-block or int4. Other schemes are "
        "fp8-channel, int8, int8-channel, mxfp4, mxfp8 and nvfp4. Requires no calibration data. "
        "Skips norms, embeddings, routers, gates, convolutions, vision towers and lm_head.",
        metavar="SCHEME",
        check=check_scheme,
        offers=list_quantization_schemes,
        excludes=(CONFLICTS_WITH_MISSING,),
    ),
]
QuantizeAlso = Annotated[
    Sequence[str],
    Option(
        "Quantize additional weights that match, e.g. lm_head.weight. Repeatable.",
        metavar="GLOB",
        check=check_globs,
        panel="Select",
    ),
]
QuantizeNot = Annotated[
    Sequence[str],
    Option(
        "Exclude matching weights from quantization. Repeatable.",
        metavar="GLOB",
        check=check_globs,
        panel="Select",
    ),
]
Include = Annotated[
    Sequence[str],
    Option(
        "Include only matching tensors. Repeatable.",
        metavar="GLOB",
        check=check_globs,
        offers=list_tensor_names,
        panel="Select",
        brief=True,
    ),
]
Exclude = Annotated[
    Sequence[str],
    Option(
        "Exclude matching tensors. Repeatable.",
        metavar="GLOB",
        check=check_globs,
        offers=list_tensor_names,
        panel="Select",
    ),
]
Prefix = Annotated[
    str | None,
    Option(
        "Prefix of the model's keys, or `.` for none.  [default: detected]",
        metavar="PREFIX",
        panel="Format and model",
    ),
]
Assets = Annotated[
    AnyPath | None,
    Option(
        "Source of config and tokenizer files. Accepts a folder, a URL or a Hub "
        "repository (ORG/NAME).",
        metavar="DIR",
        check=check_location,
        panel="Output",
        brief=True,
    ),
]
TrustAssets = Annotated[bool, trust_assets_option()]
AllowOverflow = Annotated[
    bool, Option("Allow elements to become infinite, NaN or saturated.", panel="Safety")
]
Device = Annotated[
    str | None,
    Option(
        "Device for arithmetic: cpu, cuda (all GPUs) or cuda:N.  [default: cpu]",
        metavar="DEVICE",
        check=check_device,
        panel="Performance",
    ),
]
Jobs = Annotated[
    int | None,
    Option(
        "Number of threads.  [default: one per core, at most 16]",
        metavar="N",
        check=check_thread_count,
        panel="Performance",
        brief=True,
    ),
]


@option_group
class ModelOptions(Options):
    """Options that select the model type."""

    model_type: ModelType = None
    converter: Converter = None

    def __post_init__(self) -> None:
        """Check all values. Raise if the model type is unknown, even if it is not needed."""
        super().__post_init__()
        if self.model_type is not None:
            from ckptctl import families

            with families.use_converter_file(self.converter):
                families.family(self.model_type)


@option_group
class FormatOptions(Options):
    """Option for the format of a checkpoint."""

    format: From = None


@option_group
class SourceOptions(Options):
    """Options that select among the saves and weights of a checkpoint."""

    weights: Weights = None
    tag: Tag = None
    rules: Rules = None
    ranks: Ranks = None


@dataclass(frozen=True, kw_only=True)
class MapOptions(Options):
    """Options of ``ckptctl map``."""

    to_layout: Annotated[str, layout_option(f"Target layout, e.g. {LAYOUTS}", panel="Common")]
    model_type: Annotated[
        str | None,
        Option(
            "Model type. See `ckptctl models`.  [default: from --config]",
            python="Model type. See `ckptctl models`.  [default: from `config`]",
            flags="-m --model-type",
            metavar="NAME",
            offers=list_model_types,
        ),
    ] = None
    from_layout: Annotated[
        str | None, layout_option("Layout of KEY, if several layouts have this key.")
    ] = None
    sizes: Sizes = None
    config: Annotated[
        AnyPath | None,
        Option(
            "Path of config.json, params.json or their folder, which states the model "
            "type and sizes.",
            metavar="PATH",
            check=check_location,
        ),
    ] = None
    converter: Converter = None


@dataclass(frozen=True, kw_only=True)
class ModelsOptions(Options):
    """Options of ``ckptctl models``."""

    family: Annotated[
        str | None,
        Argument("Model type to show in detail.", metavar="NAME", offers=list_model_types),
    ] = field(default=None, kw_only=False)
    layout: Annotated[
        str | None, layout_option("Show only model types and tables of this layout.")
    ] = None
    converter: Converter = None
