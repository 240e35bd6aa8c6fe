"""Tables that fit the terminal.

Columns are aligned, and no line is longer than the terminal is wide. If there is not enough room,
columns are dropped: mostly empty ones first, then the least important. Then names are truncated in
the middle and sentences at the end. Nothing else is truncated, and no cell is wrapped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from ckptctl.units import escape_unprintable

GAP = "  "
SHOWN = 10
"""Most rows of a long list that a terminal shows."""
SPARSE = 4
"""A column is mostly empty if at most one in this many cells has content."""
NAMES = 36
"""Fewest characters that keep tensor names distinguishable."""


class Column(NamedTuple):
    """One column of a table.

    Attributes:
        title: Title in the header line.
        right: Whether cells are aligned to the right.
        drop: Rank in the order in which columns are dropped. 0 means never.
        keep: Fewest characters that truncated cells keep. 0 means that cells are not truncated.
        prose: Whether cells are truncated at the end instead of in the middle.
    """

    title: str = ""
    right: bool = False
    drop: int = 0
    keep: int = 0
    prose: bool = False


def number(title: str = "", drop: int = 0) -> Column:
    """Return a column of numbers, aligned to the right."""
    return Column(title, right=True, drop=drop)


def name(title: str = "", keep: int = NAMES, drop: int = 0) -> Column:
    """Return a column of names or paths, truncated in the middle."""
    return Column(title, drop=drop, keep=keep)


def prose(title: str = "", keep: int = 24, drop: int = 0) -> Column:
    """Return a column of sentences or lists, truncated at the end."""
    return Column(title, drop=drop, keep=keep, prose=True)


def more(count: int, shown: int = SHOWN) -> str:
    """Format the number of rows that a list omits, or return an empty string if there are none."""
    return f"  and {count - shown:,} more (`--json` lists all)" if count > shown else ""


def titled(*titles: str) -> tuple[Column, ...]:
    """Return columns that are never truncated."""
    return tuple(map(Column, titles))


class Painted(NamedTuple):
    """Text in one of the styles of :mod:`ckptctl.cli.output`."""

    text: str
    style: str

    def __str__(self) -> str:
        return self.text


def style_of(cell: object) -> str | None:
    """Return the style of a cell, or None if it has none."""
    return cell.style if isinstance(cell, Painted) else None


def lines(
    columns: Sequence[Column],
    rows: Iterable[Sequence[object]],
    room: int,
    mark: str,
    paint: Callable[[str, str | None], str],
) -> list[str]:
    """Format *rows* as aligned lines that fit the terminal.

    Args:
        columns: All columns. Empty ones are not shown.
        rows: Cells. A row may be shorter than *columns*. Leading blanks are kept.
        room: Width of the terminal.
        mark: Replacement for truncated text.
        paint: Function that applies a style to text.
    """
    known = list(rows)
    texts = [[escape_unprintable(str(cell)) for cell in row] for row in known]
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
    """Truncate *text* to *width* in the middle, or at the end for *prose*."""
    if len(text) <= width:
        return text
    left = max(width - len(mark), 0)
    if prose:
        return text[:left].rstrip() + mark
    # The end of a name is more specific than its beginning.
    head = left * 2 // 5
    return text[:head] + mark + text[len(text) - (left - head) :]


def _fitting(
    columns: Sequence[Column],
    widths: Sequence[int],
    used: Sequence[int],
    sparse: Collection[int],
    room: int,
) -> list[int]:
    """Choose the *used* columns that fit into *room*, dropping *sparse* ones first."""
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
    """Compute column widths, with the remaining room shared by columns that may be truncated."""
    limits = {n: widths[n] for n in shown}
    elastic = sorted((widths[n], n) for n in shown if columns[n].keep)
    left = room - len(GAP) * (len(shown) - 1)
    left -= sum(widths[n] for n in shown if not columns[n].keep)
    for number, (width, n) in enumerate(elastic):
        limits[n] = min(width, max(left // (len(elastic) - number), 1))
        left -= limits[n]
    return limits
