"""The tensors of a checkpoint as rows: collapsed into a tree, one by one, or in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ckptctl.cli import tables
from ckptctl.cli.tables import Column, Painted
from ckptctl.cli.tree import Branch, walk
from ckptctl.errors import possible
from ckptctl.units import counted, format_bytes, format_count, natural_key

if TYPE_CHECKING:
    from ckptctl.cli.output import Output, Row
    from ckptctl.ops.inspection.result import Inspection, TensorInfo
    from ckptctl.storage.statistics import Statistics

_BARS = "▁▂▃▄▅▆▇█"
_PARTS = " ▏▎▍▌▋▊▉█"


TREE = (
    tables.name(keep=24),
    Column(),
    Column(),
    tables.number(),
    Column(drop=1),
    tables.name(keep=24, drop=2),
)
"""On a terminal."""
LEAVES = tables.titled("name", "dtype", "shape", "copies", "bytes")
"""In a pipe."""
TENSORS = (
    tables.name("name"),
    Column("dtype", drop=1),
    Column("shape", drop=3),
    tables.number("bytes", drop=2),
    tables.number("min"),
    tables.number("max"),
    tables.number("mean", drop=6),
    tables.number("std", drop=5),
    tables.number("nan"),
    tables.number("inf"),
    Column("histogram", drop=4),
)
PLAIN = 4
"""Those of them that are shown without ``--stats``."""


def collapsed(output: Output, branches: Sequence[Branch]) -> list[Row]:
    """Return the tree: nested on a terminal, elsewhere a row per leaf with its full name."""
    walked = walk(branches)
    if output.mode == "human":
        most = max((one.nbytes for one in branches), default=0) if output.draws else 0
        return [_indented(nesting, branch, most) for nesting, _, _, branch in walked]
    return [
        (
            label,
            short(branch.dtype) if branch.dtype else counted(branch.tensors * outer, "tensor"),
            str(list(branch.shape)) if branch.dtype else "",
            str(branch.copies * outer),
            str(branch.nbytes * outer),
        )
        for _, label, outer, branch in walked
        if branch.dtype or not branch.children
    ]


def _indented(nesting: int, branch: Branch, most: int) -> Row:
    """Return the cells of a branch; *most* bytes have a whole bar, 0: none has any."""
    label = "  " * nesting + branch.label
    times = f" x {branch.copies:,}" if branch.copies > 1 else ""
    bar = Painted("" if nesting or not most else share(branch.nbytes, most), "name")
    if branch.dtype is None:
        each = counted(branch.tensors // branch.copies, "tensor")
        return label, each + times, "", format_bytes(branch.nbytes), bar
    tied = f"tied to {branch.alias_of}" if branch.alias_of else ""
    shape = f"{list(branch.shape)}{times}"
    return label, shape, short(branch.dtype), format_bytes(branch.nbytes), bar, tied


def share(part: int, most: int, width: int = 16) -> str:
    """Return a bar whose length is *part* of *width* characters, which stand for *most*."""
    eighths = -(-8 * width * part // most)
    return "█" * (eighths // 8) + _PARTS[eighths % 8].strip()


def listed_tensors(
    output: Output, shown: Sequence[TensorInfo], sort: str, stats: bool
) -> list[tuple[str, ...]]:
    """Return a row per tensor."""
    ordered = sorted(shown, key=lambda t: (-t.nbytes if sort == "size" else 0, natural_key(t.name)))
    return [
        (
            tensor.name,
            short(tensor.dtype),
            str(list(tensor.shape)),
            size(output, tensor.nbytes),
            *(_numbers(tensor.statistics) if stats else ()),
        )
        for tensor in ordered
    ]


def _numbers(statistics: Statistics | None) -> tuple[str, ...]:
    if statistics is None:
        return ("-",) * (len(TENSORS) - PLAIN)
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


def size(output: Output, nbytes: int) -> str:
    """Return *nbytes* for people, or exactly."""
    return format_bytes(nbytes) if output.mode == "human" else str(nbytes)


def model(found: Inspection) -> str:
    """Return the model type, or those that are possible."""
    return found.model_type or possible(found.candidates) or "unknown model type"


def files(found: Inspection) -> str:
    """Return bytes and number of files."""
    return f"{format_bytes(found.nbytes)} in {counted(len(found.files), 'file')}"


def markdown(found: Inspection, branches: Sequence[Branch]) -> Iterator[str]:
    """Yield the lines of a list of facts and of a table of *branches*."""
    for name, value in (
        ("Format", found.format),
        ("Model type", model(found)),
        ("Parameters", f"{format_count(found.parameters)} ({found.parameters:,})"),
        (
            "Types",
            ", ".join(
                f"{short(n)} ({counted(u.tensors, 'tensor')})" for n, u in found.dtypes.items()
            ),
        ),
        ("Size", files(found)),
    ):
        yield f"- **{name}:** {_cell(value)}"
    yield ""
    yield "| tensor | shape | dtype | copies | size |"
    yield "| --- | --- | --- | ---: | ---: |"
    for _, label, outer, branch in walk(branches):
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
