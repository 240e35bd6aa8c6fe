"""Options that several commands share: one spelling, one meaning, one check each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ckptctl.cli import checks, choices, completion

FORMATS = "dcp, deepseek, hf, meta, mistral, peft or torch"
LAYOUTS = "hf, hf-v5, meta, mistral, torchtune, torchtitan@0.3, ...; see `ckptctl models`"


def examples(*lines: str) -> str:
    """Return an epilog that shows *lines* as they are."""
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in lines)))


def source_format(text: str, *names: str) -> Any:
    """Return an option for the format of a source, with *text* as its help.

    Args:
        text: The help.
        *names: What it is called, where its parameter is called otherwise.
    """
    return typer.Option(
        *names,
        metavar="FORMAT",
        callback=checks.readable,
        autocompletion=choices.readable_formats,
        help=text,
    )


def weights_of(text: str) -> Any:
    """Return an option for the kind of weights of a source, with *text* as its help."""
    return typer.Option(
        metavar="KIND", callback=checks.weights, autocompletion=choices.weights, help=text
    )


def part(text: str) -> Any:
    """Return an option for the part of a checkpoint that counts, with *text* as its help."""
    return typer.Option(
        metavar="PART", callback=checks.only, autocompletion=choices.parts, help=text
    )


Source = Annotated[
    Path,
    typer.Argument(
        parser=checks.place,
        metavar="SRC",
        show_default=False,
        help="Checkpoint: directory, file or URL.",
    ),
]
Destination = Annotated[
    Path,
    typer.Argument(
        parser=checks.place,
        metavar="DST",
        show_default=False,
        help="Where the result appears: path or URL.",
    ),
]
From = Annotated[
    str | None,
    source_format("Format of the source, if not detected; `ckptctl formats` lists them.", "--from"),
]
Weights = Annotated[
    str | None,
    weights_of("master (fp32 copies of the optimizer) or module, where there are both."),
]
Tag = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Which save, where the source holds several."),
]
ATol = Annotated[
    float | None,
    typer.Option("--atol", metavar="X", callback=checks.tolerance, help="Let |a - b| be up to X."),
]
RTol = Annotated[
    float | None,
    typer.Option(
        "--rtol", metavar="X", callback=checks.tolerance, help="Let |a - b| be up to X |b|."
    ),
]
IgnoreDType = Annotated[
    bool, typer.Option("--ignore-dtype", help="Other dtypes with equal numbers are the same.")
]
Rules = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="TOML that says how ranks divide tensors, or megatron-core, where files do not say.",
    ),
]


def target(text: str) -> Any:
    """Return the option for the format to write, with *text* as its help."""
    return typer.Option(
        "--to",
        metavar="FORMAT",
        callback=checks.writable,
        autocompletion=choices.writable_formats,
        show_default=False,
        help=text,
    )


To = Annotated[str, target(f"Format to write: {FORMATS}.")]
ModelType = Annotated[
    str | None,
    typer.Option(
        "--model-type",
        "-m",
        metavar="NAME",
        callback=checks.model_type,
        autocompletion=choices.model_types,
        help="Model type, if not detected; `ckptctl models` lists them.",
    ),
]
Converter = Annotated[
    Path | None,
    typer.Option(
        "--converter",
        metavar="FILE.py",
        is_eager=True,
        callback=checks.use_converter,
        help="Python file that defines one more model type; it is run.",
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        callback=checks.sizes,
        help="Size that no configuration states: num_attention_heads=32; repeatable.",
    ),
]
Include = Annotated[
    list[str] | None,
    typer.Option(
        "--include",
        metavar="GLOB",
        autocompletion=completion.tensors,
        help="Only tensors that match; repeatable.",
    ),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        "--exclude",
        metavar="GLOB",
        autocompletion=completion.tensors,
        help="Not the tensors that match; repeatable.",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", "-n", help="Show the plan; read no weights, write nothing.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace DST if it is a checkpoint.")]
Jobs = Annotated[
    int | None,
    typer.Option("--jobs", metavar="N", callback=checks.positive, help="Threads that copy."),
]
Memory = Annotated[
    str | None,
    typer.Option(
        "--memory", metavar="SIZE", callback=checks.size, help="Budget for buffers, as in 256MiB."
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
UploadYes = Annotated[
    bool, typer.Option("--yes", "-y", help="Do not ask before files go to the Hub.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print names or paths alone, one per line.")
]
FromLayout = Annotated[
    str | None,
    typer.Option(
        metavar="LAYOUT",
        autocompletion=completion.layouts,
        help="How the source names its tensors, if not detected.",
    ),
]
ToLayout = Annotated[
    str | None,
    typer.Option(
        metavar="LAYOUT",
        autocompletion=completion.layouts,
        help=f"How DST is to name its tensors: {LAYOUTS}.",
    ),
]
DType = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE",
        callback=checks.dtype,
        autocompletion=choices.dtypes,
        help="Cast floating tensors: bf16, fp16, fp32, ...; those pinned to fp32 stay.",
    ),
]
Dequantize = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE",
        callback=checks.dequantize,
        autocompletion=choices.dequantized,
        help="Turn quantised tensors into bf16 or fp32.",
    ),
]
Only = Annotated[str, part("model, or all: optimizer state too.")]
Root = Annotated[
    str | None,
    typer.Option(
        metavar="PREFIX", help="Prefix of the model's names, if not detected; `.` is none."
    ),
]
MaxShardSize = Annotated[
    str,
    typer.Option(
        metavar="SIZE",
        callback=checks.size,
        help="Bytes of tensors per file: hf, mistral, dcp.",
    ),
]
MP = Annotated[
    int,
    typer.Option(
        metavar="N",
        callback=checks.positive,
        help="Number of model-parallel files: meta, deepseek.",
    ),
]
Assets = Annotated[
    Path | None,
    typer.Option(
        parser=checks.place, metavar="DIR", help="Where configuration and tokenizer come from."
    ),
]
TrustAssets = Annotated[
    bool,
    typer.Option("--trust-assets", help="Believe --assets where other files contradict it."),
]
Carry = Annotated[
    list[str] | None,
    typer.Option(metavar="GLOB", help="Copy other files beside the weights, too; repeatable."),
]
Like = Annotated[
    Path | None,
    typer.Option(
        parser=checks.place, metavar="DIR", help="Put the same keys in the same files as this one."
    ),
]
VocabSize = Annotated[
    int | None,
    typer.Option(
        "--vocab-size",
        metavar="N",
        callback=checks.positive,
        help="Pad the vocabulary with zeros, or cut it, to N rows.",
    ),
]
Untie = Annotated[bool, typer.Option("--untie", help="Write both of two tied tensors.")]
Tied = Annotated[
    str | None,
    typer.Option(
        metavar="HOW",
        callback=checks.tied,
        autocompletion=choices.tied,
        help="Tensors that share memory: drop all but one, or copy each in full.",
    ),
]
AllowOverflow = Annotated[
    bool,
    typer.Option(
        "--allow-overflow", help="Accept elements that become infinite, NaN or saturated."
    ),
]
AllowMissing = Annotated[
    bool,
    typer.Option("--allow-missing", help="Write what is there, list what is missing, exit with 7."),
]
VerifyReplicas = Annotated[
    bool, typer.Option("--verify-replicas", help="Compare all copies of the same elements first.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.")]
Verify = Annotated[bool, typer.Option("--verify", help="Read DST again and compare its checksums.")]
NoChecksum = Annotated[
    bool, typer.Option("--no-checksum", help="Compute no checksums; may be faster.")
]
LoraAlpha = Annotated[
    float | None,
    typer.Option(
        metavar="NUMBER",
        callback=checks.factor,
        help="Strength of an adapter, where no adapter_config.json says so.",
    ),
]
