"""Checks of what options are given: each returns the value, or says what is wrong with it.

Raises:
    typer.BadParameter: By all of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import typer

from ckptctl.cli import choices
from ckptctl.errors import UsageError, nearest
from ckptctl.units import parse_bytes

FEW = 8
"""Names that a message lists."""


def among(
    value: str | None,
    kind: str,
    known: Sequence[str],
    elsewhere: Mapping[str, str] | None = None,
    lists: str | None = None,
) -> str | None:
    """Return *value* if it is known.

    Args:
        value: What was given.
        kind: What it is, for the message.
        known: What may be given.
        elsewhere: Other words for it.
        lists: The command that lists what is known; it is named where a message cannot.

    Raises:
        typer.BadParameter: It is not known; the message says what is, and the nearest.
    """
    if value is None or value in known:
        return value
    word = value.lower()
    meant = (elsewhere or {}).get(word)
    close = meant if meant in known else nearest(word, known)
    many = lists is not None and len(known) > FEW
    listed = f"`{lists}` lists all {len(known)}." if many else f"Known: {', '.join(known)}."
    suggestion = [f"Did you mean '{close}'?"] if close else []
    said = [*suggestion, listed] if many else [listed, *suggestion]
    raise typer.BadParameter(" ".join((f"unknown {kind} {value!r}.", *said)))


def _format(value: str | None, known: Sequence[str]) -> str | None:
    return among(value, "format", known, choices.FORMATS_ELSEWHERE, "ckptctl formats")


def place(text: str) -> Path:
    """Return what names a checkpoint: a path, or a URL, which is not looked at yet.

    Raises:
        typer.BadParameter: The text is empty, as of a variable of a script that was not set. Taken
            as a path it would be the working directory.
    """
    from ckptctl.storage.paths import named

    if not text:
        raise typer.BadParameter("it is empty; `.` is the working directory")
    return named(text)


def output(text: str) -> Path:
    """Return what names a file to write.

    Raises:
        typer.BadParameter: The text is empty.
    """
    from ckptctl.storage.paths import named

    if not text:
        raise typer.BadParameter("it is empty; name a file")
    return named(text)


def readable(value: str | None) -> str | None:
    """Refuse a format that cannot be read; packages are searched for one that is not built in."""
    from ckptctl import formats

    known = value is None or value in formats.names()
    return value if known else _format(value, choices.readable_formats())


def writable(value: str | None) -> str | None:
    """Refuse a format that cannot be written; see :func:`readable`."""
    from ckptctl import formats

    if value is None or value in formats.writable():
        return value
    known = choices.writable_formats()
    if value in formats.names() and value not in known:
        written = ", ".join(known)
        raise typer.BadParameter(f"format {value!r} is read, not written. Written: {written}.")
    return _format(value, known)


def model_type(value: str | None) -> str | None:
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


def sizes(value: list[str] | None) -> list[str] | None:
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


def dtype(value: str | None) -> str | None:
    """Refuse what is no floating dtype."""
    from ckptctl import dtypes

    name = dtypes.parse(value) if value else None
    if value and not (name and dtypes.BY_NAME[name].floating):
        among(value, "floating dtype", choices.dtypes())
        raise typer.BadParameter(f"{value!r} is not a floating dtype")
    return value


def dequantize(value: str | None) -> str | None:
    """Refuse what quantised tensors are not turned into."""
    from ckptctl import dtypes

    known = choices.dequantized()
    if value and dtypes.parse(value) in {dtypes.parse(name) for name in known}:
        return value
    return among(value, "dtype", known)


def size(value: str | None) -> str | None:
    """Refuse what is no size in bytes."""
    if value is not None:
        try:
            parse_bytes(value)
        except UsageError as error:
            raise typer.BadParameter(error.what) from None
    return value


def tolerance(value: float | None) -> float | None:
    """Refuse what is no finite number of 0 or more."""
    if value is not None and not 0 <= value < float("inf"):
        raise typer.BadParameter(f"{value} is not a tolerance")
    return value


def weights(value: str | None) -> str | None:
    """Refuse anything but master and module."""
    if value not in (None, "master", "module"):
        raise typer.BadParameter("it is neither `master` nor `module`")
    return value


def tied(value: str | None) -> str | None:
    """Refuse anything but drop and copy."""
    if value not in (None, "drop", "copy"):
        raise typer.BadParameter("it is neither `drop` nor `copy`")
    return value


def positive(value: int | None) -> int | None:
    """Refuse zero and below."""
    if value is not None and value < 1:
        raise typer.BadParameter(f"{value} is not a positive number")
    return value


def factor(value: float | None) -> float | None:
    """Refuse what is no finite number above 0."""
    if value is not None and not 0 < value < float("inf"):
        raise typer.BadParameter(f"{value} is not a positive number")
    return value


def only(value: str) -> str:
    """Refuse what is neither ``model`` nor ``all``."""
    among(value, "part", ("model", "all"))
    return value


def sort(value: str) -> str:
    """Refuse what is neither ``name`` nor ``size``."""
    among(value, "order", ("name", "size"))
    return value
