"""The options that several operations share: one spelling, one meaning, one check each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from ckptctl.ops.option_checks import (
    AnyPath,
    axis_sizes,
    dequantized,
    dequantized_dtypes,
    floating,
    floating_dtypes,
    globs,
    layouts,
    model_types,
    new_place,
    parse_sizes,
    path,
    place,
    positive,
    quantization_schemes,
    readable,
    readable_formats,
    scheme,
    tensors,
    thread_count,
    writable,
    writable_formats,
)
from ckptctl.options import Argument, Option, Options, group

WeightsOf = Literal["master", "module"]
Part = Literal["model", "all"]

FORMATS = "dcp, deepseek, hf, mcore, meta, mistral, peft or torch"
LAYOUTS = "hf, hf-v5, meta, mistral, torchtune, torchtitan@0.3, ...; see `ckptctl models`"


Source = Annotated[
    Path, Argument("Checkpoint: directory, file or URL.", metavar="SRC", check=place)
]
Destination = Annotated[
    Path, Argument("Where the result appears: path or URL.", metavar="DST", check=new_place)
]
Checkpoint = Annotated[Path, Argument("Checkpoint.", metavar="PATH", check=place)]
Root = Annotated[Path, Argument("Folder of checkpoints.", metavar="ROOT", check=place)]
RootOrHere = Annotated[
    Path, Argument("Folder of checkpoints; else here.", metavar="ROOT", check=place)
]


# --------------------------------------------------------------------------------- options


def source_format(text: str, flags: str = "") -> Option:
    """Return the option for the format of a source, with *text* as its help."""
    return Option(
        text,
        flags=flags,
        metavar="FORMAT",
        check=readable,
        offers=readable_formats,
        panel="Format and model",
    )


def target_format(text: str) -> Option:
    """Return the option for the format to write, with *text* as its help."""
    return Option(text, metavar="FORMAT", check=writable, offers=writable_formats)


def layout(text: str) -> Option:
    """Return an option for a layout, with *text* as its help."""
    return Option(text, metavar="LAYOUT", offers=layouts, panel="Format and model")


From = Annotated[
    str | None,
    source_format("Format of the source, if not detected; `ckptctl formats` lists them.", "--from"),
]
To = Annotated[str, target_format(f"Format to write: {FORMATS}.")]
Weights = Annotated[
    WeightsOf | None,
    Option(
        "master (fp32 copies of the optimizer) or module, where there are both.",
        metavar="KIND",
        panel="Select",
    ),
]
Tag = Annotated[
    str | None,
    Option(
        "Which save of several, if not the one that the source names.",
        metavar="NAME",
        panel="Select",
    ),
]
Ranks = Annotated[
    int | None,
    Option(
        "How many ranks saved it, where files do not say.",
        metavar="N",
        check=positive,
        panel="Expert",
    ),
]
Rules = Annotated[
    AnyPath | None,
    Option(
        "TOML that says how ranks divide tensors, or megatron-core, where files do not say.",
        metavar="FILE",
        check=path,
        panel="Expert",
    ),
]
ModelType = Annotated[
    str | None,
    Option(
        "Model type, if not detected; `ckptctl models` lists them.",
        flags="-m --model-type",
        metavar="NAME",
        offers=model_types,
        panel="Format and model",
    ),
]
Converter = Annotated[
    AnyPath | None,
    Option(
        "Python file that defines one more model type; it is run.",
        metavar="FILE.py",
        check=path,
        panel="Expert",
    ),
]
Sizes = Annotated[
    Mapping[str, int] | None,
    Option(
        "Size that no configuration states: num_attention_heads=32; repeatable.",
        python='Sizes that no configuration states: ``{"num_attention_heads": 32}``.',
        flags="--set",
        metavar="NAME=VALUE",
        parse=parse_sizes,
        check=axis_sizes,
        panel="Format and model",
    ),
]
FromLayout = Annotated[str | None, layout("How the source names its tensors, if not detected.")]
DType = Annotated[
    str | None,
    Option(
        "Cast floating tensors: bf16, fp16, fp32, ...; those pinned to fp32 stay.",
        metavar="DTYPE",
        check=floating,
        offers=floating_dtypes,
    ),
]
Dequantize = Annotated[
    str | None,
    Option(
        "Turn quantized tensors into bf16 or fp32.",
        metavar="DTYPE",
        check=dequantized,
        offers=dequantized_dtypes,
    ),
]
Quantize = Annotated[
    str | None,
    Option(
        "Quantize linear weights of layers, without data: fp8-block, fp8-channel, mxfp8, mxfp4 or "
        "nvfp4; no norms, embeddings, routers, gates, convolutions, vision towers or lm_head.",
        metavar="SCHEME",
        check=scheme,
        offers=quantization_schemes,
    ),
]
QuantizeAlso = Annotated[
    Sequence[str],
    Option(
        "Quantize these as well, as lm_head.weight; repeatable.",
        metavar="GLOB",
        check=globs,
        panel="Expert",
    ),
]
QuantizeNot = Annotated[
    Sequence[str],
    Option(
        "Do not quantize these; repeatable.",
        metavar="GLOB",
        check=globs,
        panel="Expert",
    ),
]
Include = Annotated[
    Sequence[str],
    Option(
        "Only tensors that match; repeatable.",
        metavar="GLOB",
        check=globs,
        offers=tensors,
        panel="Select",
    ),
]
Exclude = Annotated[
    Sequence[str],
    Option(
        "Not the tensors that match; repeatable.",
        metavar="GLOB",
        check=globs,
        offers=tensors,
        panel="Select",
    ),
]
Prefix = Annotated[
    str | None,
    Option(
        "Prefix of the model's names, if not detected; `.` is none.",
        metavar="PREFIX",
        panel="Format and model",
    ),
]
Assets = Annotated[
    AnyPath | None,
    Option(
        "Where configuration and tokenizer come from: a folder, a URL, or ORG/NAME on the Hub.",
        metavar="DIR",
        check=place,
        panel="Output",
    ),
]
TrustAssets = Annotated[
    bool, Option("Believe --assets where other files contradict it.", panel="Expert")
]
AllowOverflow = Annotated[
    bool, Option("Accept elements that become infinite, NaN or saturated.", panel="Safety")
]
Jobs = Annotated[
    int | None,
    Option(
        "Threads; by default as many as cores, up to 16.",
        metavar="N",
        check=thread_count,
        panel="Expert",
    ),
]


@group
class ModelOptions(Options):
    """Which model it is."""

    model_type: ModelType = None
    converter: Converter = None

    def __post_init__(self) -> None:
        """Check all values; a model type has to be known, whether or not it will be needed."""
        super().__post_init__()
        if self.model_type is not None:
            from ckptctl import families

            with families.using(self.converter):
                families.family(self.model_type)


@group
class FormatOptions(Options):
    """What a checkpoint is."""

    format: From = None


@group
class SourceOptions(Options):
    """Which of several answers a checkpoint gives."""

    weights: Weights = None
    tag: Tag = None
    rules: Rules = None
    ranks: Ranks = None


@dataclass(frozen=True, kw_only=True)
class MapOptions(Options):
    """Of which model a key is, and where it goes; see ``ckptctl map --help``."""

    to_layout: Annotated[str, layout(f"Where the key goes to: {LAYOUTS}.")]
    model_type: Annotated[
        str | None,
        Option(
            "Model type, if no --config says so; `ckptctl models` lists them.",
            flags="-m --model-type",
            metavar="NAME",
            offers=model_types,
        ),
    ] = None
    from_layout: Annotated[str | None, layout("The layout of KEY, where several have it.")] = None
    sizes: Sizes = None
    config: Annotated[
        AnyPath | None,
        Option(
            "config.json or params.json, or their folder: states model type and sizes.",
            metavar="PATH",
            check=place,
        ),
    ] = None
    converter: Converter = None


@dataclass(frozen=True, kw_only=True)
class ModelsOptions(Options):
    """Which model types are listed; see ``ckptctl models --help``."""

    family: Annotated[
        str | None,
        Argument("Show the tables of this model type.", metavar="FAMILY", offers=model_types),
    ] = field(default=None, kw_only=False)
    layout: Annotated[str | None, layout("Only what has this layout.")] = None
    converter: Converter = None
