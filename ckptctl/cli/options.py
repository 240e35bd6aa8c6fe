"""Options that several commands share: one spelling, one meaning, one check each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ckptctl.cli import choices, completion
from ckptctl.errors import UsageError, nearest
from ckptctl.units import parse_bytes

FORMATS = "dcp, deepseek, hf, meta, mistral, peft or torch"
LAYOUTS = "hf, hf-v5, meta, mistral, torchtune, torchtitan@0.3, ...; see `ckptctl models`"


def examples(*lines: str) -> str:
    """Return an epilog that shows *lines* as they are."""
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in lines)))


def among(value: str | None, kind: str, known: Sequence[str]) -> str | None:
    """Return *value* if it is known.

    Raises:
        typer.BadParameter: It is not; the message lists what is, and the nearest.
    """
    if value is None or value in known:
        return value
    close = nearest(value, known)
    suggestion = f" Did you mean '{close}'?" if close else ""
    raise typer.BadParameter(f"unknown {kind} {value!r}. Known: {', '.join(known)}.{suggestion}")


def place(text: str) -> Path:
    """Return what names a checkpoint: a path, or a URL, which is not looked at yet.

    Raises:
        typer.BadParameter: The text is empty, as of a variable of a script that was not set. Taken
            as a path it would be the working directory.
    """
    from ckptctl.storage.remote_path import named

    if not text:
        raise typer.BadParameter("it is empty; `.` is the working directory")
    return named(text)


def check_readable(value: str | None) -> str | None:
    """Refuse a format that cannot be read; packages are searched for one that is not built in."""
    from ckptctl import formats

    known = value is None or value in formats.names()
    return value if known else among(value, "format", choices.readable_formats())


def check_writable(value: str | None) -> str | None:
    """Refuse a format that cannot be written; see :func:`check_readable`."""
    from ckptctl import formats

    known = value is None or value in formats.writable()
    return value if known else among(value, "format", choices.writable_formats())


def check_model_type(value: str | None) -> str | None:
    """Refuse a model type without a family."""
    if value is not None:
        from ckptctl import families

        try:
            families.family(value)
        except UsageError as error:
            said = filter(None, (error.what, error.why, error.hint))
            raise typer.BadParameter("; ".join(said)) from None
    return value


def use_converter(context: typer.Context, value: Path | None) -> Path | None:
    """Let the family in a file be known while the command runs, whatever the order of options."""
    from ckptctl import families

    context.with_resource(families.using(value))
    return value


def check_sizes(value: list[str] | None) -> list[str] | None:
    """Refuse what is not ``NAME=VALUE`` with a positive number, and a name given twice."""
    sizes_of(value)
    return value


def sizes_of(value: Sequence[str] | None) -> dict[str, int]:
    """Return what ``--set`` says.

    Raises:
        typer.BadParameter: Something else than names, each once, and positive numbers.
    """
    sizes: dict[str, int] = {}
    for text in value or ():
        name, _, number = text.partition("=")
        if not name or not (number.isascii() and number.isdigit()) or int(number[:19]) == 0:
            raise typer.BadParameter(f"{text!r} is not NAME=VALUE, as in num_attention_heads=32")
        if sizes.setdefault(name, int(number[:19])) != int(number[:19]):
            raise typer.BadParameter(f"{name!r} is given twice")
    return sizes


def check_dtype(value: str | None) -> str | None:
    """Refuse what is no floating dtype."""
    from ckptctl import dtypes

    name = dtypes.parse(value) if value else None
    if value and not (name and dtypes.BY_NAME[name].floating):
        among(value, "floating dtype", choices.dtypes())
        raise typer.BadParameter(f"{value!r} is not a floating dtype")
    return value


def check_dequantize(value: str | None) -> str | None:
    """Refuse what quantised tensors are not turned into."""
    from ckptctl import dtypes

    known = choices.dequantized()
    if value and dtypes.parse(value) in {dtypes.parse(name) for name in known}:
        return value
    return among(value, "dtype", known)


def check_size(value: str | None) -> str | None:
    """Refuse what is no size in bytes."""
    if value is not None:
        try:
            parse_bytes(value)
        except UsageError as error:
            raise typer.BadParameter(error.what) from None
    return value


def check_weights(value: str | None) -> str | None:
    """Refuse anything but master and module."""
    if value not in (None, "master", "module"):
        raise typer.BadParameter("it is neither `master` nor `module`")
    return value


def check_tied(value: str | None) -> str | None:
    """Refuse anything but drop and copy."""
    if value not in (None, "drop", "copy"):
        raise typer.BadParameter("it is neither `drop` nor `copy`")
    return value


def check_positive(value: int | None) -> int | None:
    """Refuse zero and below."""
    if value is not None and value < 1:
        raise typer.BadParameter(f"{value} is not a positive number")
    return value


def check_factor(value: float | None) -> float | None:
    """Refuse what is no finite number above 0."""
    if value is not None and not 0 < value < float("inf"):
        raise typer.BadParameter(f"{value} is not a positive number")
    return value


def check_only(value: str) -> str:
    """Refuse what is neither ``model`` nor ``all``."""
    among(value, "part", ("model", "all"))
    return value


def check_sort(value: str) -> str:
    """Refuse what is neither ``name`` nor ``size``."""
    among(value, "order", ("name", "size"))
    return value


Source = Annotated[
    Path,
    typer.Argument(
        parser=place, metavar="SRC", show_default=False, help="Checkpoint: directory, file or URL."
    ),
]
Destination = Annotated[
    Path,
    typer.Argument(
        parser=place,
        metavar="DST",
        show_default=False,
        help="Where the result appears: path or URL.",
    ),
]
From = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="FORMAT",
        callback=check_readable,
        autocompletion=choices.readable_formats,
        help="Format of the source, if not detected; `ckptctl formats` lists them.",
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        metavar="KIND",
        callback=check_weights,
        help="master (fp32 copies of the optimizer) or module, where there are both.",
    ),
]
Tag = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Which save, where the source holds several."),
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
        callback=check_writable,
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
        callback=check_model_type,
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
        callback=use_converter,
        help="Python file that defines one more model type; it is run.",
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        callback=check_sizes,
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
    typer.Option("--jobs", metavar="N", callback=check_positive, help="Threads that copy."),
]
Memory = Annotated[
    str | None,
    typer.Option(
        "--memory", metavar="SIZE", callback=check_size, help="Budget for buffers, as in 256MiB."
    ),
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
        callback=check_dtype,
        autocompletion=choices.dtypes,
        help="Cast floating tensors: bf16, fp16, fp32, ...; those pinned to fp32 stay.",
    ),
]
Dequantize = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE",
        callback=check_dequantize,
        autocompletion=choices.dequantized,
        help="Turn quantised tensors into bf16 or fp32.",
    ),
]
Only = Annotated[
    str,
    typer.Option(metavar="PART", callback=check_only, help="model, or all: optimizer state too."),
]
Root = Annotated[
    str | None,
    typer.Option(metavar="PREFIX", help="What stands before the model's names, if not detected."),
]
MaxShardSize = Annotated[
    str,
    typer.Option(
        metavar="SIZE",
        callback=check_size,
        help="Bytes of tensors per file: hf, mistral, dcp.",
    ),
]
MP = Annotated[
    int,
    typer.Option(
        metavar="N",
        callback=check_positive,
        help="Number of model-parallel files: meta, deepseek.",
    ),
]
Assets = Annotated[
    Path | None,
    typer.Option(parser=place, metavar="DIR", help="Where configuration and tokenizer come from."),
]
Like = Annotated[
    Path | None,
    typer.Option(
        parser=place, metavar="DIR", help="Put the same keys in the same files as this one."
    ),
]
VocabSize = Annotated[
    int | None,
    typer.Option(
        "--vocab-size",
        metavar="N",
        callback=check_positive,
        help="Pad the vocabulary with zeros, or cut it, to N rows.",
    ),
]
Untie = Annotated[bool, typer.Option("--untie", help="Write both of two tied tensors.")]
Tied = Annotated[
    str | None,
    typer.Option(
        metavar="HOW",
        callback=check_tied,
        help="Tensors that share memory: drop all but one, or copy each in full.",
    ),
]
AllowMissing = Annotated[
    bool, typer.Option("--allow-missing", help="Write what is whole, list the rest, exit with 7.")
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
        callback=check_factor,
        help="Strength of an adapter, where no adapter_config.json says so.",
    ),
]
