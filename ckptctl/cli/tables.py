"""The tensors of a checkpoint as rows: collapsed into a tree, one by one, or in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ckptctl.errors import possible
from ckptctl.units import format_bytes, format_count, natural_key

if TYPE_CHECKING:
    from ckptctl.cli.output import Output
    from ckptctl.ops.inspection.result import Inspection, TensorInfo
    from ckptctl.ops.inspection.tree import Branch, Order
    from ckptctl.storage.statistics import Statistics

_STATISTICS = ("min", "max", "mean", "std", "nan", "inf", "histogram")
_BARS = "▁▂▃▄▅▆▇█"


def collapsed(
    output: Output, shown: Sequence[TensorInfo], depth: int | None, sort: Order
) -> list[tuple[str, ...]]:
    """Return the tree: nested on a terminal, elsewhere a row per leaf with its full name."""
    from ckptctl.ops.inspection import tree

    branches = tree.walk(tree.build(shown, sort, depth))
    if output.mode == "human":
        return [_indented(nesting, branch) for nesting, _, _, branch in branches]
    return [
        (
            label,
            short(branch.dtype) if branch.dtype else counted(branch.tensors * outer, "tensor"),
            str(list(branch.shape)) if branch.dtype else "",
            str(branch.copies * outer),
            str(branch.nbytes * outer),
        )
        for _, label, outer, branch in branches
        if branch.dtype or not branch.children
    ]


def _indented(nesting: int, branch: Branch) -> tuple[str, ...]:
    label = "  " * nesting + branch.label
    if branch.dtype is None:
        each = branch.tensors // branch.copies
        times = f" x {branch.copies:,}" if branch.copies > 1 else ""
        return label, counted(each, "tensor") + times, "", format_bytes(branch.nbytes)
    times = f" x {branch.copies:,}" if branch.copies > 1 else ""
    tied = (f"tied to {branch.alias_of}",) if branch.alias_of else ()
    shape = f"{list(branch.shape)}{times}"
    return label, shape, short(branch.dtype), format_bytes(branch.nbytes), *tied


def listed_tensors(
    output: Output, shown: Sequence[TensorInfo], sort: str, stats: bool
) -> list[tuple[str, ...]]:
    """Return a row per tensor; on a terminal with a header."""
    ordered = sorted(shown, key=lambda t: (-t.nbytes if sort == "size" else 0, natural_key(t.name)))
    header = ("name", "dtype", "shape", "bytes", *(_STATISTICS if stats else ()))
    rows = [
        (
            tensor.name,
            short(tensor.dtype),
            str(list(tensor.shape)),
            size(output, tensor.nbytes),
            *(_numbers(tensor.statistics) if stats else ()),
        )
        for tensor in ordered
    ]
    return [header, *rows] if output.mode == "human" else rows


def right_columns(output: Output, stats: bool) -> list[int]:
    """Return the columns of :func:`listed_tensors` that hold numbers."""
    return [3, *(range(4, 10) if stats else ())] if output.mode == "human" else []


def _numbers(statistics: Statistics | None) -> tuple[str, ...]:
    if statistics is None:
        return ("-",) * len(_STATISTICS)
    values = (statistics.minimum, statistics.maximum, statistics.mean, statistics.std)
    return (
        *("-" if value is None else f"{value:.4g}" for value in values),
        str(statistics.nan),
        str(statistics.inf),
        bars(statistics.histogram),
    )


def bars(histogram: Sequence[int]) -> str:
    """Return *histogram* as one character per bin; an empty bin is a dot."""
    top = max(histogram, default=0)
    scale = len(_BARS) - 1
    return "".join(_BARS[round(scale * count / top)] if count else "." for count in histogram)


def short(dtype: str) -> str:
    """Return what tables call *dtype*."""
    from ckptctl.dtypes import BY_NAME

    return BY_NAME[dtype].short if dtype in BY_NAME else dtype


def counted(count: int, noun: str) -> str:
    """Return *count* things called *noun*."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def size(output: Output, nbytes: int) -> str:
    """Return *nbytes* for people, or exactly."""
    return format_bytes(nbytes) if output.mode == "human" else str(nbytes)


def model(found: Inspection) -> str:
    """Return the model type, or those that are possible."""
    return found.model_type or possible(found.candidates) or "unknown model type"


def files(found: Inspection) -> str:
    """Return bytes and number of files."""
    count = len(found.files)
    return f"{format_bytes(found.nbytes)} in {count:,} file" + ("" if count == 1 else "s")


def markdown(
    found: Inspection, shown: Sequence[TensorInfo], depth: int | None, sort: Order
) -> Iterator[str]:
    """Yield the lines of a list of facts and of a table of *shown*."""
    from ckptctl.ops.inspection import tree

    for name, value in (
        ("Format", found.format),
        ("Model type", model(found)),
        ("Parameters", f"{format_count(found.parameters)} ({found.parameters:,})"),
        (
            "Types",
            ", ".join(f"{short(n)} ({u.tensors:,} tensors)" for n, u in found.dtypes.items()),
        ),
        ("Size", files(found)),
    ):
        yield f"- **{name}:** {_cell(value)}"
    yield ""
    yield "| tensor | shape | dtype | copies | size |"
    yield "| --- | --- | --- | ---: | ---: |"
    for _, label, outer, branch in tree.walk(tree.build(shown, sort, depth)):
        if branch.dtype or not branch.children:
            shape = str(list(branch.shape)) if branch.dtype else counted(branch.tensors, "tensor")
            dtype = short(branch.dtype) if branch.dtype else ""
            cells = (_code(label), shape, dtype, f"{branch.copies * outer:,}")
            size = format_bytes(branch.nbytes * outer)
            yield f"| {' | '.join(cells)} | {size} |"


def _cell(text: str) -> str:
    return "".join(f"\\{c}" if c in "\\`*_{}[]<>|#" else c for c in text)


def _code(name: str) -> str:
    # Inside a table a bar ends the cell even in code, and a backtick ends the code.
    return f"`{name}`" if not {"`", "|"} & set(name) else _cell(name)
