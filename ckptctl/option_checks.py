"""What options may be given: what completion offers of it, and the check of it, one each."""

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
"""The group of entry points with steps of conversions."""
READ_HERE = "pass a path; `.` is the working directory"
AnyPath = str | Path | UrlPath


def readable_formats(_: Given | None = None) -> list[str]:
    """Return the formats that can be read, those of installed packages included."""
    from ckptctl import formats

    return [*formats.names(), *formats.added()]


def writable_formats(_: Given | None = None) -> list[str]:
    """Return the formats that can be written, those of installed packages included."""
    from ckptctl import formats
    from ckptctl.formats.base import WritableFormat

    added = formats.added().items()
    more = (name for name, found in added if isinstance(found, WritableFormat))
    return [*formats.writable(), *more]


def model_types(given: Given) -> list[str]:
    """Return the names of all families, that of ``converter`` included."""
    from ckptctl import families

    with families.using(given.get("converter")):
        return list(families.names())


def layouts(given: Given) -> list[str]:
    """Return the layouts of the model type that is named, or of all."""
    from ckptctl import families

    named = given.get("model_type") or given.get("family")
    with families.using(given.get("converter")):
        if named:
            return list(families.family(named).layouts)
        return families.layouts(families.families().values())


def tensors(given: Given) -> list[str]:
    """Return the names of the tensors of the checkpoint that is named first."""
    from ckptctl import formats

    path = given.get("")
    # The network is not asked on TAB, and names in another layout are not in the checkpoint.
    if not path or ":/" in str(path) or given.get("layout"):
        return []
    chosen = given.get("from_format") or given.get("format")
    return list(formats.open_checkpoint(Path(path), chosen).tensors)


def floating_dtypes(_: Given | None = None) -> list[str]:
    """Return the dtypes that a cast may go to."""
    from ckptctl.dtypes import BY_NAME

    short = (dtype.short for dtype in BY_NAME.values() if dtype.floating)
    return [f"fp{name[1:]}" if name[1:].isdigit() else name for name in short]


def dequantized_dtypes(_: Given | None = None) -> list[str]:
    """Return the dtypes that quantized tensors may be turned into."""
    return ["bf16", "fp32"]


def quantization_schemes(_: Given | None = None) -> list[str]:
    """Return the names of the ways in which weights can be quantized."""
    from ckptctl.numerics.quantization.recipes import recipes

    return list(recipes())


# ---------------------------------------------------------------------------------- checks


def path(value: str | TreePath, hint: str = READ_HERE) -> TreePath:
    """Return the path of a file; *hint* is for one who gives none."""
    from ckptctl.storage.urls import path_text  # which `--help` need not

    if not path_text(value):
        raise UsageError("the path is empty", hint=hint)
    return Path(value)


def place(value: str | TreePath, hint: str = READ_HERE) -> TreePath:
    """Return the path or URL of a checkpoint, which is not looked at yet; see :func:`path`."""
    from ckptctl.storage.paths import named

    path(value, hint)
    return named(value)


new_place = partial(place, hint="pass the path of the output")


def output_file(value: str | TreePath) -> Path:
    """Return where a file is written: on this machine, with ``file://`` before it or without."""
    from ckptctl.storage.destinations import require_path
    from ckptctl.storage.paths import named

    path(value, "pass the file to write")
    require_path(value)
    return Path(named(value))


def globs(value: Iterable[str]) -> tuple[str, ...]:
    """Return globs; one alone is text."""
    if not isinstance(value, Iterable):
        raise UsageError(f"{value!r} is neither a glob nor a list of globs")
    several = (value,) if isinstance(value, str) else tuple(value)
    for one in several:
        if not isinstance(one, str):
            raise UsageError(f"{one!r} is not a glob")
    return several


def added_steps(_: Given | None = None) -> list[str]:
    """Return the names of the steps that installed packages add to a conversion."""
    from ckptctl import installed

    return sorted(installed.entry_points(STEPS))


def steps(value: Iterable[str]) -> tuple[str, ...]:
    """Refuse steps that no installed package adds, and one given twice; see :func:`globs`."""
    several = globs(value)
    names = [one.partition("=")[0] for one in several]
    for name in names:
        among(name, "step", added_steps())
        if names.count(name) > 1:
            raise UsageError(f"step `{name}` is given twice", hint="give it once")
    return several


def readable(value: str) -> str:
    """Refuse a format that cannot be read; packages are searched for one that is not built in."""
    from ckptctl import formats

    return value if value in formats.names() else _format(value, readable_formats())


def writable(value: str) -> str:
    """Refuse a format that cannot be written; see :func:`readable`."""
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
    """Refuse anything but whole numbers above 0."""
    if type(value) is not int or value < 1:
        raise UsageError(f"{value} is not a positive number")
    return value


def number_check(
    noun: str, fits: Callable[[float], bool], why: str | None = None
) -> Callable[[float], float]:
    """Return a check that refuses anything but numbers that *fits* accepts."""

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
    """Return a check that refuses anything but whole numbers, numpy's too, from *least* on."""

    def checked(value: SupportsIndex) -> int:
        number = operator.index(value) if hasattr(value, "__index__") else least - 1
        if number < least:
            raise UsageError(f"{value!r} is not an integer >= {least}")
        return number

    return checked


def step(value: SupportsIndex) -> int:
    """Return the number of a step, which may be NumPy's or torch's, as Python's."""
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if number < 0:
        raise UsageError(f"{value!r} is not a step number")
    return number


def thread_count(value: int) -> int:
    """Refuse anything but a number of threads that a machine can start."""
    if positive(value) > MOST_THREADS:
        raise UsageError(
            f"cannot use {counted(value, 'thread')}", why=f"the maximum is {MOST_THREADS}"
        )
    return value


def axis_sizes(value: Mapping[str, int]) -> dict[str, int]:
    """Refuse sizes that are not positive."""
    if not isinstance(value, Mapping):
        raise UsageError(f"{value!r} is not a dictionary of sizes")
    for name, size in value.items():
        if type(size) is not int or size < 1:
            raise UsageError(f"{size} is not a positive number", where=f"sizes: {name}")
    return dict(value)


def parse_sizes(texts: Sequence[str]) -> dict[str, int]:
    """Return what ``NAME=VALUE`` say, each name once."""
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
    """Return a check that refuses anything but *known* dtypes, and returns torch's names."""

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
    """Return the name of a way in which weights can be quantized."""
    return among(str(value), "scheme", quantization_schemes())
