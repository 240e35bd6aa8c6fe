"""Functions that complete and validate option values."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import SupportsIndex

from ckptctl.errors import UsageError, format_option
from ckptctl.options import ParsedValues, parse_number, require_choice
from ckptctl.tree import TreePath, UrlPath
from ckptctl.units import pluralize

MAX_THREADS = 1024
STEP_GROUP = "ckptctl.steps"
"""Entry point group in which packages register conversion steps."""
PATH_HINT = "pass a path; `.` is the working directory"
AnyPath = str | Path | UrlPath


def list_readable_formats(_: ParsedValues | None = None) -> list[str]:
    """List the formats that can be read, including those of installed packages."""
    from ckptctl import formats

    return [*formats.list_format_names(), *formats.load_plugin_formats()]


def list_writable_formats(_: ParsedValues | None = None) -> list[str]:
    """List the formats that can be written, including those of installed packages."""
    from ckptctl import formats
    from ckptctl.formats.base import WritableFormat

    added = formats.load_plugin_formats().items()
    added_names = (name for name, known_format in added if isinstance(known_format, WritableFormat))
    return [*formats.list_writable_names(), *added_names]


def list_model_types(arguments: ParsedValues) -> list[str]:
    """List all model types, including the type defined in the ``--converter`` file, if any."""
    from ckptctl import families

    with families.use_converter_file(arguments.get("converter")):
        return list(families.list_model_types())


def list_layouts(arguments: ParsedValues) -> list[str]:
    """List the layouts of the model type on the command line, or of all types if none is set."""
    from ckptctl import families

    model_type = arguments.get("model_type") or arguments.get("family")
    with families.use_converter_file(arguments.get("converter")):
        if model_type:
            return list(families.family(model_type).layouts)
        return families.list_layouts(families.load_families().values())


def list_tensor_names(arguments: ParsedValues) -> list[str]:
    """List the tensor names of the first checkpoint on the command line."""
    from ckptctl import formats

    path = arguments.get("")
    # Completion never accesses the network, and names in another layout are not in the checkpoint.
    if not path or ":/" in str(path) or arguments.get("layout"):
        return []
    format_name = arguments.get("from_format") or arguments.get("format")
    return list(formats.open_checkpoint(Path(path), format_name).tensors)


def list_floating_dtypes(_: ParsedValues | None = None) -> list[str]:
    """List the dtypes that tensors can be cast to."""
    from ckptctl.dtypes import BY_NAME

    short = (dtype.short for dtype in BY_NAME.values() if dtype.floating)
    return [f"fp{name[1:]}" if name[1:].isdigit() else name for name in short]


def list_dequantized_dtypes(_: ParsedValues | None = None) -> list[str]:
    """List the dtypes that quantized tensors can be dequantized to."""
    return ["bf16", "fp32"]


def list_quantization_schemes(_: ParsedValues | None = None) -> list[str]:
    """List the schemes that weights can be quantized with."""
    from ckptctl.numerics.quantization.recipes import get_recipes_by_name

    return list(get_recipes_by_name())


# ---------------------------------------------------------------------------------- checks


def check_path(value: str | TreePath, hint: str = PATH_HINT) -> TreePath:
    """Return *value* as a path, or raise an error with *hint* if it is empty."""
    from ckptctl.storage.urls import to_path_text  # not needed for `--help`

    if not to_path_text(value):
        raise UsageError("the path is empty", hint=hint)
    return Path(value)


def check_location(value: str | TreePath, hint: str = PATH_HINT) -> TreePath:
    """Parse the path or URL of a checkpoint, without checking if it exists."""
    from ckptctl.storage.paths import parse_path

    check_path(value, hint)
    return parse_path(value)


def check_locations(value: AnyPath | Sequence[AnyPath]) -> tuple[TreePath, ...]:
    """Parse the path or URL of one or several checkpoints, without checking if they exist."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return tuple(check_location(path) for path in value)
    return (check_location(value),)


check_new_location = partial(check_location, hint="pass the path of the output")


def check_output_file(value: str | TreePath) -> Path:
    """Return the local path of an output file, which may be given as a ``file://`` URL."""
    from ckptctl.storage.destinations import require_local_path
    from ckptctl.storage.paths import parse_path

    check_path(value, "pass the file to write")
    require_local_path(value)
    return Path(parse_path(value))


def check_globs(value: Iterable[str]) -> tuple[str, ...]:
    """Return globs as a tuple, in which a single string becomes one glob."""
    if not isinstance(value, Iterable):
        raise UsageError(f"{value!r} is neither a glob nor a list of globs")
    patterns = (value,) if isinstance(value, str) else tuple(value)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise UsageError(f"{pattern!r} is not a glob")
    return patterns


def list_added_steps(_: ParsedValues | None = None) -> list[str]:
    """List the steps that installed packages add to a conversion."""
    from ckptctl import installed

    return sorted(installed.find_entry_points(STEP_GROUP))


def check_steps(value: Iterable[str]) -> tuple[str, ...]:
    """Return the ``--step`` values, or raise if a step is unknown or is selected twice."""
    values = check_globs(value)
    names = [text.partition("=")[0] for text in values]
    added = list_added_steps()
    for name in names:
        if not added:
            raise UsageError(
                f"unknown step `{name}`",
                why="no installed package adds a step of conversions",
                hint=f"{format_option('--steps')} selects checkpoints of a run",
            )
        require_choice(name, "step", added)
        if names.count(name) > 1:
            raise UsageError(f"step `{name}` is given twice", hint="give it once")
    return values


def check_readable_format(value: str) -> str:
    """Return the name of a readable format, or raise if ckptctl cannot read it.

    Installed packages are only searched if the format is not built in.
    """
    from ckptctl import formats

    return (
        value
        if value in formats.list_format_names()
        else _check_format(value, list_readable_formats())
    )


def check_writable_format(value: str) -> str:
    """Return the name of a writable format, or raise if ckptctl cannot write it."""
    from ckptctl import formats

    if value in formats.list_writable_names():
        return value
    if isinstance(value, str) and value.lower() == "gguf":
        hint = (
            f"pass {format_option('--to hf')}, and convert the result with llama.cpp's "
            "`convert_hf_to_gguf.py`"
        )
        raise UsageError("writing GGUF is not supported", hint=hint)
    choices = list_writable_formats()
    if value in formats.list_format_names() and value not in choices:
        format_names = ", ".join(choices)
        raise UsageError(
            f"format `{value}` can only be read", why=f"writable formats: {format_names}"
        )
    return _check_format(value, choices)


def _check_format(value: str, choices: Sequence[str]) -> str:
    from ckptctl import formats

    return require_choice(value, "format", choices, formats.map_other_names(), "ckptctl formats")


def parse_weights(texts: Sequence[str]) -> tuple[float, ...]:
    """Parse comma-separated weights."""
    return tuple(parse_number(float, part) for text in texts for part in text.split(","))


def check_weights(value: Sequence[float]) -> tuple[float, ...]:
    """Return weights as a tuple, or raise unless they are non-negative numbers with a sum above 0.

    A weight of 0 would read a checkpoint for nothing, so it is an error, too.
    """
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise UsageError(f"{value!r} is not a list of numbers")
    for weight in value:
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise UsageError(f"{weight!r} is not a number")
        if not (0 < weight < math.inf):
            raise UsageError(
                f"{weight:g} is not a positive number",
                why="an average is between its inputs, so all weights are positive",
            )
    if not math.isfinite(sum(map(float, value))):
        raise UsageError("the sum of the weights is too large", hint="pass smaller weights")
    return tuple(map(float, value))


def check_positive(value: int) -> int:
    """Return *value*, or raise unless it is an integer greater than 0."""
    if type(value) is not int or value < 1:
        raise UsageError(f"{value} is not a positive number")
    return value


def build_number_check(
    noun: str, fits: Callable[[float], bool], why: str | None = None
) -> Callable[[float], float]:
    """Return a check that accepts the numbers for which *fits* returns true.

    *noun* and *why* appear in the error for other numbers.
    """

    def check_number(value: float) -> float:
        if type(value) not in (int, float) or not fits(value):
            raise UsageError(f"{value} is not {noun}", why=why)
        return value

    return check_number


check_factor = build_number_check("a positive number", lambda value: 0 < value < math.inf)
check_fraction = build_number_check(
    "a fraction", lambda value: 0 < value <= 1, why="it must be above 0 and at most 1"
)
check_tolerance = build_number_check(
    "a non-negative number", lambda value: 0 <= value <= sys.float_info.max
)


def build_minimum_check(minimum: int) -> Callable[[SupportsIndex], int]:
    """Return a check that accepts integers, including NumPy's, that are at least *minimum*."""

    def check_minimum(value: SupportsIndex) -> int:
        number = operator.index(value) if hasattr(value, "__index__") else minimum - 1
        if number < minimum:
            raise UsageError(f"{value!r} is not an integer >= {minimum}")
        return number

    return check_minimum


def check_step(value: SupportsIndex) -> int:
    """Return a step number, which may be an integer of NumPy or torch, as an int."""
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if number < 0:
        raise UsageError(f"{value!r} is not a step number")
    return number


def check_thread_count(value: int) -> int:
    """Return *value*, or raise unless it is a supported number of threads."""
    if check_positive(value) > MAX_THREADS:
        raise UsageError(
            f"cannot use {pluralize(value, 'thread')}", why=f"the maximum is {MAX_THREADS}"
        )
    return value


def check_device(value: str) -> str:
    """Return the name of a device, or raise unless it is ``cpu``, ``cuda`` or ``cuda:N``."""
    kind, colon, number = str(value).partition(":")
    if value not in ("cpu", "cuda") and (kind, colon, number.isdecimal()) != ("cuda", ":", True):
        raise UsageError(f"unknown device: `{value}`", hint="use cpu, cuda or cuda:N")
    return value


def check_axis_sizes(value: Mapping[str, int]) -> dict[str, int]:
    """Return the axis sizes as a dictionary, or raise if a size is not positive."""
    if not isinstance(value, Mapping):
        raise UsageError(f"{value!r} is not a dictionary of sizes")
    for name, size in value.items():
        if type(size) is not int or size < 1:
            raise UsageError(f"{size} is not a positive number", where=f"sizes: {name}")
    return dict(value)


def parse_sizes(texts: Sequence[str]) -> dict[str, int]:
    """Parse ``NAME=VALUE`` texts into sizes by name.

    Raise if a text is malformed, or if the same name has different values.
    """
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


def build_dtype_check(kind: str, list_choices: Callable[[], list[str]]) -> Callable[[str], str]:
    """Return a check that accepts the dtypes from *list_choices* and returns torch's name."""

    def check_dtype(value: str) -> str:
        from ckptctl import dtypes

        name = dtypes.parse_dtype(str(value))
        if name not in map(dtypes.parse_dtype, list_choices()):
            require_choice(str(value), kind, list_choices())
        return str(name)

    return check_dtype


check_floating_dtype = build_dtype_check("floating dtype", list_floating_dtypes)
check_dequantized_dtype = build_dtype_check("dtype", list_dequantized_dtypes)


def check_scheme(value: str) -> str:
    """Return the name of a quantization scheme, or raise if it is unknown."""
    return require_choice(str(value), "scheme", list_quantization_schemes())
