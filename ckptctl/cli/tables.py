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
MAX_SHOWN_ROWS = 10
"""Maximum number of rows of a long list that a terminal shows."""
SPARSE_RATIO = 4
"""Inverse of the fraction of nonempty cells up to which a column counts as mostly empty."""
NAME_COLUMNS = 36
"""Minimum number of characters that keep tensor names distinguishable."""


class Column(NamedTuple):
    """One column of a table.

    Attributes:
        title: Title in the header line.
        right: Whether cells are aligned to the right.
        drop: Position in the order in which columns are dropped. 0 means that it is never dropped.
        keep: Minimum number of characters of truncated cells. 0 means that cells are not truncated.
        prose: Whether cells are truncated at the end instead of in the middle.
    """

    title: str = ""
    right: bool = False
    drop: int = 0
    keep: int = 0
    prose: bool = False


def number_column(title: str = "", drop: int = 0) -> Column:
    """Return a column of numbers, aligned to the right."""
    return Column(title, right=True, drop=drop)


def name_column(title: str = "", keep: int = NAME_COLUMNS, drop: int = 0) -> Column:
    """Return a column of names or paths, truncated in the middle."""
    return Column(title, drop=drop, keep=keep)


def prose_column(title: str = "", keep: int = 24, drop: int = 0) -> Column:
    """Return a column of sentences or lists, truncated at the end."""
    return Column(title, drop=drop, keep=keep, prose=True)


def format_remaining(count: int) -> str:
    """Format the number of rows that a list omits, or return an empty string if there are none."""
    remaining = count - MAX_SHOWN_ROWS
    return f"  and {remaining:,} more (`--json` lists all)" if remaining > 0 else ""


def titled_columns(*titles: str) -> tuple[Column, ...]:
    """Return columns with *titles* that are never truncated."""
    return tuple(map(Column, titles))


class StyledText(NamedTuple):
    """Text in one of the styles of :mod:`ckptctl.cli.output`."""

    text: str
    style: str

    def __str__(self) -> str:
        return self.text


def get_style(cell: object) -> str | None:
    """Return the name of a cell's style, or None if the cell has no style."""
    return cell.style if isinstance(cell, StyledText) else None


def format_lines(
    columns: Sequence[Column],
    rows: Iterable[Sequence[object]],
    room: int,
    mark: str,
    paint: Callable[[str, str | None], str],
) -> list[str]:
    """Format *rows* as lines with aligned columns that fit into the width *room*.

    Args:
        columns: All columns. Empty ones are not shown.
        rows: Cells. A row may be shorter than *columns*. Leading blanks are kept.
        room: Width of the terminal.
        mark: Replacement for truncated text.
        paint: Function that applies a style to text.
    """
    cell_rows = list(rows)
    texts = [[escape_unprintable(str(cell)) for cell in row] for row in cell_rows]
    numbers = range(len(columns))
    widths = [max((len(row[n]) for row in texts if n < len(row)), default=0) for n in numbers]
    shown_columns = [n for n in numbers if widths[n]]
    filled_counts = {n: sum(1 for row in texts if n < len(row) and row[n]) for n in shown_columns}
    sparse = {n for n in shown_columns if filled_counts[n] * SPARSE_RATIO <= len(texts)}
    if any(columns[n].title for n in shown_columns):
        cell_rows.insert(0, [StyledText(column.title, "dim") for column in columns])
        texts.insert(0, [column.title for column in columns])
        widths = [max(widths[n], len(columns[n].title)) for n in numbers]
    shown_columns = _choose_columns(columns, widths, shown_columns, sparse, room)
    limits = _compute_widths(columns, widths, shown_columns, room)
    aligned = []
    for row, cells in zip(cell_rows, texts, strict=True):
        line = ""
        for n in (n for n in shown_columns if n < len(row)):
            text = truncate_text(cells[n], limits[n], mark, columns[n].prose)
            pad = " " * (limits[n] - len(text))
            cell = paint(text, get_style(row[n]))
            line += GAP * (n != shown_columns[0]) + (pad + cell if columns[n].right else cell + pad)
        aligned.append(line.rstrip())
    return aligned


def truncate_text(text: str, width: int, mark: str, prose: bool = False) -> str:
    """Truncate *text* to *width* in the middle, or at the end for *prose*."""
    if len(text) <= width:
        return text
    available = max(width - len(mark), 0)
    if prose:
        return text[:available].rstrip() + mark
    # The end of a name is more specific than its beginning.
    head = available * 2 // 5
    return text[:head] + mark + text[len(text) - (available - head) :]


def _choose_columns(
    columns: Sequence[Column],
    widths: Sequence[int],
    candidates: Sequence[int],
    sparse: Collection[int],
    room: int,
) -> list[int]:
    """Choose the *candidates* columns that fit into *room*, dropping *sparse* ones first."""
    chosen = list(candidates)
    droppable = (n for n in candidates if columns[n].drop)
    for n in sorted(droppable, key=lambda n: (n not in sparse, columns[n].drop)):
        needs = sum(min(widths[m], columns[m].keep or widths[m]) for m in chosen)
        if needs + len(GAP) * (len(chosen) - 1) > room:
            chosen.remove(n)
    return chosen


def _compute_widths(
    columns: Sequence[Column], widths: Sequence[int], shown_columns: Sequence[int], room: int
) -> dict[int, int]:
    """Compute column widths, with the remaining room shared by columns that may be truncated."""
    limits = {n: widths[n] for n in shown_columns}
    elastic = sorted((widths[n], n) for n in shown_columns if columns[n].keep)
    remaining = room - len(GAP) * (len(shown_columns) - 1)
    remaining -= sum(widths[n] for n in shown_columns if not columns[n].keep)
    for number, (width, n) in enumerate(elastic):
        limits[n] = min(width, max(remaining // (len(elastic) - number), 1))
        remaining -= limits[n]
    return limits
