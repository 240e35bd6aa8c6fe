"""Tables that fit: which columns there is room for, and how much of each cell.

A terminal gets aligned columns, and no line that is longer than it is wide. Where there is not
enough room, columns go: those that are mostly empty first, then those that matter least. Then names
lose their middle, and sentences their end. Nothing else is cut, and no cell is continued below.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from ckptctl.units import visible

GAP = "  "
SHOWN = 10
"""Rows of a long list that a terminal shows."""
SPARSE = 4
"""A column is mostly empty if no more than one cell in so many has content."""
NAMES = 36
"""Room for the names of tensors; below it they no longer say which is which."""


class Column(NamedTuple):
    """One column of a table.

    Attributes:
        title: What stands above it.
        right: Whether it is aligned to the right.
        drop: The when-th to go where there is not enough room; 0: it stays.
        keep: Room for which others go, where its cells may be shortened; 0: they may not.
        prose: Whether they are shortened at their end, not in their middle.
    """

    title: str = ""
    right: bool = False
    drop: int = 0
    keep: int = 0
    prose: bool = False


def number(title: str = "", drop: int = 0) -> Column:
    """A column of numbers."""
    return Column(title, right=True, drop=drop)


def name(title: str = "", keep: int = NAMES, drop: int = 0) -> Column:
    """A column of names or paths."""
    return Column(title, drop=drop, keep=keep)


def prose(title: str = "", keep: int = 24, drop: int = 0) -> Column:
    """A column of sentences or lists."""
    return Column(title, drop=drop, keep=keep, prose=True)


def more(count: int, shown: int = SHOWN) -> str:
    """Return the line below a list of which *shown* of *count* rows are printed; none: empty."""
    return f"  and {count - shown:,} more (`--json` lists all)" if count > shown else ""


def titled(*titles: str) -> tuple[Column, ...]:
    """Columns that are printed whole."""
    return tuple(map(Column, titles))


class Painted(NamedTuple):
    """Text in one of the styles of :mod:`ckptctl.cli.output`."""

    text: str
    style: str

    def __str__(self) -> str:
        return self.text


def style_of(cell: object) -> str | None:
    """The style of a cell that has one."""
    return cell.style if isinstance(cell, Painted) else None


def lines(
    columns: Sequence[Column],
    rows: Iterable[Sequence[object]],
    room: int,
    mark: str,
    paint: Callable[[str, str | None], str],
) -> list[str]:
    """Align *rows* in a terminal.

    Args:
        columns: All columns; those without a cell are not shown.
        rows: Cells; a row may be shorter than *columns*. Leading blanks are kept.
        room: Width of the terminal.
        mark: Stands for what is cut out.
        paint: Gives text a style.
    """
    known = list(rows)
    texts = [[visible(str(cell)) for cell in row] for row in known]
    numbers = range(len(columns))
    widths = [max((len(row[n]) for row in texts if n < len(row)), default=0) for n in numbers]
    shown = [n for n in numbers if widths[n]]
    filled = {n: sum(1 for row in texts if n < len(row) and row[n]) for n in shown}
    sparse = {n for n in shown if filled[n] * SPARSE <= len(texts)}
    if any(columns[n].title for n in shown):
        known.insert(0, [Painted(column.title, "dim") for column in columns])
        texts.insert(0, [column.title for column in columns])
        widths = [max(widths[n], len(columns[n].title)) for n in numbers]
    shown = _fitting(columns, widths, shown, sparse, room)
    limits = _limits(columns, widths, shown, room)
    aligned = []
    for row, cells in zip(known, texts, strict=True):
        line = ""
        for n in (n for n in shown if n < len(row)):
            text = shortened(cells[n], limits[n], mark, columns[n].prose)
            pad = " " * (limits[n] - len(text))
            cell = paint(text, style_of(row[n]))
            line += GAP * (n != shown[0]) + (pad + cell if columns[n].right else cell + pad)
        aligned.append(line.rstrip())
    return aligned


def shortened(text: str, width: int, mark: str, prose: bool = False) -> str:
    """As much of *text* as *width* has room for: both ends, or for *prose* the beginning."""
    if len(text) <= width:
        return text
    left = max(width - len(mark), 0)
    if prose:
        return text[:left].rstrip() + mark
    # The end of a name says more than its beginning.
    head = left * 2 // 5
    return text[:head] + mark + text[len(text) - (left - head) :]


def _fitting(
    columns: Sequence[Column],
    widths: Sequence[int],
    used: Sequence[int],
    sparse: Collection[int],
    room: int,
) -> list[int]:
    """Those of the columns that are *used* for which there is room; *sparse* ones go first."""
    shown = list(used)
    droppable = (n for n in used if columns[n].drop)
    for n in sorted(droppable, key=lambda n: (n not in sparse, columns[n].drop)):
        needs = sum(min(widths[m], columns[m].keep or widths[m]) for m in shown)
        if needs + len(GAP) * (len(shown) - 1) > room:
            shown.remove(n)
    return shown


def _limits(
    columns: Sequence[Column], widths: Sequence[int], shown: Sequence[int], room: int
) -> dict[int, int]:
    """How wide each shown column is; those that may be shortened share what is left."""
    limits = {n: widths[n] for n in shown}
    elastic = sorted((widths[n], n) for n in shown if columns[n].keep)
    left = room - len(GAP) * (len(shown) - 1)
    left -= sum(widths[n] for n in shown if not columns[n].keep)
    for number, (width, n) in enumerate(elastic):
        limits[n] = min(width, max(left // (len(elastic) - number), 1))
        left -= limits[n]
    return limits
