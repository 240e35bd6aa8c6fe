"""The only printer: what reaches the user's terminal, pipe or program, and how.

stdout carries the answer, stderr everything else. A terminal gets aligned columns, and colour
unless ``NO_COLOR`` or ``TERM=dumb`` forbid it; anything else gets the same facts tab-separated,
whole and plain. Names come from files that others wrote, so everything printed is escaped here.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Literal, TextIO

from ckptctl import __version__
from ckptctl.errors import CkptError, StorageError
from ckptctl.results import Result, schema_name
from ckptctl.units import visible

Mode = Literal["human", "plain", "json", "quiet"]
Style = Literal["bold", "dim", "red", "yellow", "cyan"]
Row = Sequence[object]
_SGR: Mapping[Style, str] = {"bold": "1", "dim": "2", "red": "31", "yellow": "33", "cyan": "36"}
GAP = "  "
NARROW = 20
_unwritten: list[OSError] = []
"""What kept the answer from being written."""


class Output:
    """Prints in one mode for the length of one command.

    Args:
        machine: The answer is one JSON document.
        quiet: The answer is names or paths alone, one per line; no hints and no progress.
    """

    def __init__(self, machine: bool = False, quiet: bool = False) -> None:
        self.mode: Mode = (
            "json" if machine else "quiet" if quiet else "human" if _tty(sys.stdout) else "plain"
        )

    @property
    def chatty(self) -> bool:
        """Return whether statements, hints and progress are wanted."""
        return self.mode in ("human", "plain")

    @property
    def asks(self) -> bool:
        """Return whether somebody can be asked."""
        return self.mode != "json" and _tty(sys.stderr) and sys.stdin.isatty()

    def answer(
        self,
        name: str,
        *results: Result,
        names: Iterable[object],
        rows: Iterable[Row],
        human: Callable[[], None],
    ) -> None:
        """Print the answer of the command *name* in the form that is asked for.

        Args:
            name: The command.
            results: What the JSON document holds.
            names: The lines of ``--quiet``.
            rows: What stands tab-separated in a pipe.
            human: Prints it for a terminal.
        """
        if self.mode == "json":
            self.document(name, *results)
        elif self.mode == "quiet":
            for one in names:
                self.line(str(one))
        elif self.mode == "plain":
            self.table(rows)
        else:
            human()

    def line(self, text: str = "", style: Style | None = None) -> None:
        """Print one line of the answer."""
        self.text(_styled(sys.stdout, visible(text), style))

    def table(
        self, rows: Iterable[Row], right: Iterable[int] = (), wrap: Iterable[int] = ()
    ) -> None:
        """Print *rows*: aligned on a terminal, tab-separated elsewhere, never cut.

        Args:
            rows: Cells; rows may be shorter than the longest. Leading blanks are kept.
            right: Columns that are aligned to the right.
            wrap: Columns of prose, which share what room a terminal leaves for them.
        """
        cells = [[visible(str(cell)) for cell in row] for row in rows]
        if self.mode == "human":
            lines = _aligned(_wrapped(cells, frozenset(wrap)), frozenset(right))
        else:
            lines = ["\t".join(row) for row in cells]
        if lines:
            self.text("\n".join(lines))

    def document(self, name: str, *results: Result, to: TextIO | None = None) -> None:
        """Print the answer, all fields of *results*, as the JSON document of the command *name*."""
        fields = {key: value for one in results for key, value in one.to_json().items()}
        head = {"schema": schema_name(name), "ckptctl": __version__}
        _write(to or sys.stdout, _json(head | fields))

    def schema(self, schema: Mapping[str, object]) -> None:
        """Print a JSON Schema, which is the answer in every mode."""
        self.text(_json(schema))

    def text(self, text: str) -> None:
        """Print a part of the answer as it is."""
        _write(sys.stdout, text)

    def statement(self, text: str) -> None:
        """Say on stderr what is about to happen, in one line."""
        if self.chatty:
            self.report(text, "dim")

    def note(self, text: str) -> None:
        """Say on stderr what the user should know but need not act on."""
        if self.chatty:
            self._labelled("note", text, "cyan")

    def warning(self, text: str) -> None:
        """Say on stderr what is wrong although the command goes on."""
        if self.mode != "json":
            self._labelled("warning", text, "yellow")

    def hint(self, text: str) -> None:
        """Say on stderr what to do next, if somebody reads it there."""
        if self.chatty and _tty(sys.stderr):
            self._labelled("hint", text, "cyan")

    def report(self, text: str, style: Style | None = None) -> None:
        """Print one line to stderr."""
        _write(sys.stderr, _styled(sys.stderr, visible(text), style))

    def error(self, error: CkptError, trace: str | None = None) -> None:
        """Print *error* to stderr: as a JSON object, or as what, where, why and what to do.

        Args:
            error: What to show.
            trace: A traceback, for ``--debug``.
        """
        if self.mode == "json":
            from ckptctl.documents import ErrorDocument, TracedError

            self.document("error", ErrorDocument(TracedError(error, trace)), to=sys.stderr)
            return
        if trace:
            _write(sys.stderr, "\n".join(visible(line) for line in trace.splitlines()))
        self._labelled("error", error.what, "red")
        for label, text in (("  where: ", error.where), ("  why:   ", error.why)):
            if text:
                self.report(label + text)
        if error.hint:
            self._labelled("hint", error.hint, "cyan")

    def _labelled(self, label: str, text: str, style: Style) -> None:
        _write(sys.stderr, f"{_styled(sys.stderr, f'{label}:', style)} {visible(text)}")


def _wrapped(rows: list[list[str]], wrap: frozenset[int]) -> list[list[str]]:
    """Return *rows* with the cells of *wrap* continued below, where a terminal is too narrow."""
    widths = _widths(rows)
    room = shutil.get_terminal_size().columns - len(GAP) * (len(widths) - 1)
    room -= sum(width for column, width in widths.items() if column not in wrap)
    prose = sorted((widths.get(column, 0), column) for column in wrap)
    if sum(width for width, _ in prose) <= room or room < NARROW * len(prose):
        return rows
    limits: dict[int, int] = {}
    for number, (width, column) in enumerate(prose):
        limits[column] = min(width, room // (len(prose) - number))
        room -= limits[column]
    return [line for row in rows for line in _continued(row, limits)]


def _continued(row: Sequence[str], limits: Mapping[int, int]) -> list[list[str]]:
    cells = [
        textwrap.wrap(cell, limits[column], break_on_hyphens=False) or [""]
        if column in limits
        else [cell]
        for column, cell in enumerate(row)
    ]
    return [list(line) for line in zip_longest(*cells, fillvalue="")]


def _widths(rows: Sequence[Sequence[str]]) -> dict[int, int]:
    widths: dict[int, int] = {}
    for row in rows:
        for column, cell in enumerate(row):
            widths[column] = max(widths.get(column, 0), len(cell))
    return widths


def _aligned(rows: Sequence[Sequence[str]], right: frozenset[int]) -> list[str]:
    widths = _widths(rows)
    return [
        GAP.join(
            cell.rjust(widths[column]) if column in right else cell.ljust(widths[column])
            for column, cell in enumerate(row)
        ).rstrip()
        for row in rows
    ]


def _json(value: Mapping[str, object]) -> str:
    return json.dumps(value, indent=2, allow_nan=False)


def _tty(stream: TextIO) -> bool:
    return stream.isatty()


def _styled(stream: TextIO, text: str, style: Style | None) -> str:
    plain = not style or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if plain or not style or not _tty(stream) else f"\x1b[{_SGR[style]}m{text}\x1b[0m"


def _write(stream: TextIO, text: str) -> None:
    encoding = stream.encoding or "ascii"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.encode(encoding, "backslashreplace").decode(encoding)
    try:
        if stream is not sys.stdout or not _unwritten:
            stream.write(f"{text}\n")
    except BrokenPipeError:
        raise
    except OSError as error:
        _unwritten.append(error)


def require_answer() -> None:
    """Prove that all that was printed has left this process.

    A disk that is too full for the answer keeps no command from its work: this is asked last.

    Raises:
        StorageError: It has not.
        BrokenPipeError: Nobody reads it any more.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _unwritten.append(error)
    if not _unwritten:
        return
    first = _unwritten[0]
    _unwritten.clear()
    with suppress(OSError, ValueError):  # else the interpreter tries once more, and complains
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise StorageError(
        StorageError.from_os_error(first, "write the answer", "").what,
        where="standard output",
        why="the command itself was carried out",
    )
