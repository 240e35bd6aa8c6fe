"""Completion and validation of option values."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import SupportsIndex

from ckptctl.errors import UsageError, spell_option
from ckptctl.options import Given, among
from ckptctl.tree import TreePath, UrlPath
from ckptctl.units import counted

MOST_THREADS = 1024
STEPS = "ckptctl.steps"
"""Entry point group for steps of conversions."""
READ_HERE = "pass a path; `.` is the working directory"
AnyPath = str | Path | UrlPath


def readable_formats(_: Given | None = None) -> list[str]:
    """List the formats that can be read, including those of installed packages."""
    from ckptctl import formats

    return [*formats.names(), *formats.added()]


def writable_formats(_: Given | None = None) -> list[str]:
    """List the formats that can be written, including those of installed packages."""
    from ckptctl import formats
    from ckptctl.formats.base import WritableFormat

    added = formats.added().items()
    more = (name for name, found in added if isinstance(found, WritableFormat))
    return [*formats.writable(), *more]


def model_types(given: Given) -> list[str]:
    """List all model types, including that of ``converter``."""
    from ckptctl import families

    with families.using(given.get("converter")):
        return list(families.names())


def layouts(given: Given) -> list[str]:
    """List the layouts of the given model type, or of all."""
    from ckptctl import families

    named = given.get("model_type") or given.get("family")
    with families.using(given.get("converter")):
        if named:
            return list(families.family(named).layouts)
        return families.layouts(families.families().values())


def tensors(given: Given) -> list[str]:
    """List the tensor names of the first checkpoint on the command line."""
    from ckptctl import formats

    path = given.get("")
    # Completion never accesses the network, and names in another layout are not in the checkpoint.
    if not path or ":/" in str(path) or given.get("layout"):
        return []
    chosen = given.get("from_format") or given.get("format")
    return list(formats.open_checkpoint(Path(path), chosen).tensors)


def floating_dtypes(_: Given | None = None) -> list[str]:
    """List the dtypes that tensors can be cast to."""
    from ckptctl.dtypes import BY_NAME

    short = (dtype.short for dtype in BY_NAME.values() if dtype.floating)
    return [f"fp{name[1:]}" if name[1:].isdigit() else name for name in short]


def dequantized_dtypes(_: Given | None = None) -> list[str]:
    """List the dtypes that quantized tensors can be dequantized to."""
    return ["bf16", "fp32"]


def quantization_schemes(_: Given | None = None) -> list[str]:
    """List the schemes that weights can be quantized with."""
    from ckptctl.numerics.quantization.recipes import recipes

    return list(recipes())


# ---------------------------------------------------------------------------------- checks


def path(value: str | TreePath, hint: str = READ_HERE) -> TreePath:
    """Return a path, or raise with *hint* if it is empty."""
    from ckptctl.storage.urls import to_path_text  # not needed for `--help`

    if not to_path_text(value):
        raise UsageError("the path is empty", hint=hint)
    return Path(value)


def place(value: str | TreePath, hint: str = READ_HERE) -> TreePath:
    """Parse the path or URL of a checkpoint, without looking it up."""
    from ckptctl.storage.paths import parse_path

    path(value, hint)
    return parse_path(value)


new_place = partial(place, hint="pass the path of the output")


def output_file(value: str | TreePath) -> Path:
    """Return the local path of an output file, which may be given as a ``file://`` URL."""
    from ckptctl.storage.destinations import require_local_path
    from ckptctl.storage.paths import parse_path

    path(value, "pass the file to write")
    require_local_path(value)
    return Path(parse_path(value))


def globs(value: Iterable[str]) -> tuple[str, ...]:
    """Return globs as a tuple. A single string is one glob."""
    if not isinstance(value, Iterable):
        raise UsageError(f"{value!r} is neither a glob nor a list of globs")
    several = (value,) if isinstance(value, str) else tuple(value)
    for one in several:
        if not isinstance(one, str):
            raise UsageError(f"{one!r} is not a glob")
    return several


def added_steps(_: Given | None = None) -> list[str]:
    """List the steps that installed packages add to a conversion."""
    from ckptctl import installed

    return sorted(installed.entry_points(STEPS))


def steps(value: Iterable[str]) -> tuple[str, ...]:
    """Raise if a step is unknown or is given twice."""
    several = globs(value)
    names = [one.partition("=")[0] for one in several]
    for name in names:
        among(name, "step", added_steps())
        if names.count(name) > 1:
            raise UsageError(f"step `{name}` is given twice", hint="give it once")
    return several


def readable(value: str) -> str:
    """Raise if a format cannot be read. Only unknown names search installed packages."""
    from ckptctl import formats

    return value if value in formats.names() else _format(value, readable_formats())


def writable(value: str) -> str:
    """Raise if a format cannot be written."""
    from ckptctl import formats

    if value in formats.writable():
        return value
    if isinstance(value, str) and value.lower() == "gguf":
        hint = (
            f"pass {spell_option('--to hf')}, and convert the result with llama.cpp's "
            "`convert_hf_to_gguf.py`"
        )
        raise UsageError("writing GGUF is not supported", hint=hint)
    known = writable_formats()
    if value in formats.names() and value not in known:
        written = ", ".join(known)
        raise UsageError(f"format `{value}` can only be read", why=f"writable formats: {written}")
    return _format(value, known)


def _format(value: str, known: Sequence[str]) -> str:
    from ckptctl import formats

    return among(value, "format", known, formats.other_names(), "ckptctl formats")


def positive(value: int) -> int:
    """Raise unless *value* is an integer above 0."""
    if type(value) is not int or value < 1:
        raise UsageError(f"{value} is not a positive number")
    return value


def number_check(
    noun: str, fits: Callable[[float], bool], why: str | None = None
) -> Callable[[float], float]:
    """Return a check that raises unless *fits* accepts the number."""

    def checked(value: float) -> float:
        if type(value) not in (int, float) or not fits(value):
            raise UsageError(f"{value} is not {noun}", why=why)
        return value

    return checked


factor = number_check("a positive number", lambda value: 0 < value < math.inf)
share = number_check(
    "a fraction", lambda value: 0 < value <= 1, why="it must be above 0 and at most 1"
)
tolerated = number_check("a non-negative number", lambda value: 0 <= value <= sys.float_info.max)


def at_least(least: int) -> Callable[[SupportsIndex], int]:
    """Return a check for integers, including NumPy's, of at least *least*."""

    def checked(value: SupportsIndex) -> int:
        number = operator.index(value) if hasattr(value, "__index__") else least - 1
        if number < least:
            raise UsageError(f"{value!r} is not an integer >= {least}")
        return number

    return checked


def step(value: SupportsIndex) -> int:
    """Return a step number, which may be an integer of NumPy or torch, as an int."""
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if number < 0:
        raise UsageError(f"{value!r} is not a step number")
    return number


def thread_count(value: int) -> int:
    """Raise if *value* is not a supported number of threads."""
    if positive(value) > MOST_THREADS:
        raise UsageError(
            f"cannot use {counted(value, 'thread')}", why=f"the maximum is {MOST_THREADS}"
        )
    return value


def axis_sizes(value: Mapping[str, int]) -> dict[str, int]:
    """Raise if a size is not positive."""
    if not isinstance(value, Mapping):
        raise UsageError(f"{value!r} is not a dictionary of sizes")
    for name, size in value.items():
        if type(size) is not int or size < 1:
            raise UsageError(f"{size} is not a positive number", where=f"sizes: {name}")
    return dict(value)


def parse_sizes(texts: Sequence[str]) -> dict[str, int]:
    """Parse ``NAME=VALUE`` texts. Raise if a name has different values."""
    sizes: dict[str, int] = {}
    for text in texts:
        name, _, number = text.partition("=")
        if not name or not (number.isascii() and number.isdigit()) or int(number[:19]) == 0:
            raise UsageError(
                f"`{text}` does not have the form NAME=VALUE, e.g. num_attention_heads=32"
            )
        if sizes.setdefault(name, int(number[:19])) != int(number[:19]):
            raise UsageError(f"`{name}` is given twice with different values")
    return sizes


def dtype_check(kind: str, known: Callable[[], list[str]]) -> Callable[[str], str]:
    """Return a check that raises for other than *known* dtypes, and returns torch's name."""

    def checked(value: str) -> str:
        from ckptctl import dtypes

        name = dtypes.parse(str(value))
        if name not in map(dtypes.parse, known()):
            among(str(value), kind, known())
        return str(name)

    return checked


floating = dtype_check("floating dtype", floating_dtypes)
dequantized = dtype_check("dtype", dequantized_dtypes)


def scheme(value: str) -> str:
    """Raise if a quantization scheme is unknown."""
    return among(str(value), "scheme", quantization_schemes())
