"""The only printer: what reaches the user's terminal, pipe or program, and how.

stdout carries the answer, stderr everything else. A terminal gets columns that fit, and color
unless ``NO_COLOR`` or ``TERM=dumb`` forbid it; anything else gets the same facts tab-separated,
in full and without color. ``--format`` chooses one of them for any stream. Names come from files
that others wrote, so everything printed is escaped here.

Three colors say how whole a thing is, and nothing else: see :data:`STYLES`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Literal, TextIO, TypeVar

from ckptctl.cli import tables
from ckptctl.cli.tables import GAP, Column, Painted, style_of
from ckptctl.cli.typed_paths import as_typed
from ckptctl.errors import SHOWN, CkptError, StorageError, listed
from ckptctl.results import Result, schema_name
from ckptctl.units import visible
from ckptctl.verdict import Verdict
from ckptctl.version import __version__

Mode = Literal["human", "plain", "json", "quiet"]
When = Literal["auto", "always", "never"]
Form = Literal["table", "tsv", "json"]
FORMAT = "--format"
Style = Literal["bold", "dim", "name", "complete", "missing", "damaged"]
STYLES: Mapping[object, str] = {
    "bold": "1",
    "dim": "2",
    "name": "36",
    "complete": "32",
    "missing": "33",
    "damaged": "31",
}
"""Cyan for names; green, yellow and red for what is complete, missing and damaged."""
VERDICTS: Mapping[str, Style] = {
    Verdict.COMPLETE: "complete",
    Verdict.DAMAGED: "damaged",
    Verdict.UNKNOWN: "bold",
}
T = TypeVar("T")
Row = Sequence[object]
NARROW = 20
WIDE = 100
MARK = "…"
_unwritten: list[OSError] = []
"""What kept the answer from being written."""


@dataclass
class OutputSettings:
    """The way in which the user wants output, for the whole program.

    Attributes:
        color: What ``--color`` says.
        form: What ``--format`` says; None: a table on a terminal, else tab-separated rows.
    """

    color: When = "auto"
    form: Form | None = None


WANTED = OutputSettings()


class StoppedError(CkptError):
    """The user stopped the run."""

    exit_code = 130
    code = "interrupted"


class Printer:
    """Prints in one mode for the length of one command.

    Args:
        machine: The answer is one JSON document.
        quiet: The answer is names or paths alone, one per line; no hints and no progress.
        header: Whether tables have titles in a pipe.
    """

    def __init__(self, machine: bool = False, quiet: bool = False, header: bool = True) -> None:
        self.header = header
        table = WANTED.form == "table" or (WANTED.form is None and _tty(sys.stdout))
        self.mode: Mode = "json" if machine else "quiet" if quiet else "human" if table else "plain"

    @property
    def draws(self) -> bool:
        """Return whether a terminal has the room and the characters for bars beside a table."""
        return self.mode == "human" and _columns() >= WIDE and _mark() == MARK

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
        columns: Sequence[Column] = (),
    ) -> None:
        """Print the answer of the command *name* in the form that is asked for.

        Args:
            name: The command.
            results: What the JSON document holds.
            names: The lines of ``--quiet``.
            rows: What stands tab-separated in a pipe.
            human: Prints it for a terminal.
            columns: What *rows* consist of, where they are a table.
        """
        if self.mode == "json":
            self.document(name, *results)
        elif self.mode == "quiet":
            for one in names:
                self.line(str(one))
        elif self.mode == "plain":
            self.table(rows, columns)
        else:
            human()

    def line(self, text: str = "", style: Style | None = None) -> None:
        """Print one line of the answer."""
        self.text(_styled(sys.stdout, visible(text), style))

    def sentence(self, text: str, style: Style | None = None) -> None:
        """Print a line of the answer for people, which goes on below where a terminal ends."""
        indent = len(text) - len(text.lstrip())
        for part in _wrapped(visible(text), _columns(), " " * indent + GAP):
            self.text(_styled(sys.stdout, part, style))

    def headline(self, subject: object, *facts: object) -> None:
        """Print what the answer is about, and the facts in a row, as many as a line can hold."""
        room, lines = _columns(), [[Painted(visible(f"{subject}   "), "bold")]]
        for fact in (Painted(visible(str(one)), style_of(one) or "bold") for one in facts):
            used = sum(len(part.text) for part in lines[-1])
            if len(lines[-1]) > 1 and used + len(f" · {fact} ·") > room:
                lines.append([Painted(GAP, "bold"), fact])
            elif fact.text:
                gap = [Painted(" · ", "bold")][: len(lines[-1]) - 1]
                lines[-1] += [*gap, fact]
        for line in lines:
            runs = groupby(line, key=lambda part: part.style)
            self.text("".join(_painted("".join(map(str, run)), style) for style, run in runs))

    def table(self, rows: Iterable[Row], columns: Sequence[Column]) -> None:
        """Print *rows*: as a table that fits on a terminal, tab-separated and whole elsewhere."""
        if self.mode == "human":
            lines = tables.lines(columns, rows, _columns(), _mark(), _painted)
        else:
            titles = [column.title for column in columns]
            above = [titles] if self.header and any(titles) else []
            lines = ["\t".join(map(_plain, row)) for row in (*above, *rows)]
        if lines:
            self.text("\n".join(lines))

    def first_rows(
        self, items: Sequence[T], row: Callable[[T], Row], columns: Sequence[Column]
    ) -> None:
        """Print the *row* of each of the first *items*, and how many more there are."""
        self.table(map(row, items[: tables.SHOWN]), columns)
        self.more(len(items))

    def more(self, count: int) -> None:
        """Print how many of *count* rows are not shown, if any."""
        if text := tables.more(count):
            self.line(text)

    def facts(self, rows: Iterable[tuple[str, str]]) -> None:
        """Print labels, and what is to be said of each; below where a terminal ends it goes on."""
        known = list(rows)
        start = max((len(label) for label, _ in known), default=0) + len(GAP)
        width = max(_columns(), start + NARROW)
        for label, text in known:
            said = _wrapped(" " * start + visible(text), width, " " * start)
            self.text("\n".join((label.ljust(start) + said[0].lstrip(), *said[1:])).rstrip())

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

    def flush(self) -> None:
        """Write the answer as far as it is known: what follows on stderr comes after it."""
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            _unwritten.append(error)

    def statement(self, text: str) -> None:
        """Say on stderr what is about to happen, in one line."""
        if self.chatty:
            for line in _said(visible(text)):
                self.report(line, "dim")

    def note(self, text: str) -> None:
        """Say on stderr what the user should know but need not act on."""
        if self.chatty:
            self._labeled("note", text, "name")

    def warning(self, text: str) -> None:
        """Say on stderr what is wrong although the command goes on."""
        if self.mode != "json":
            self._labeled("warning", text, "bold")

    def hint(self, text: str) -> None:
        """Say on stderr what to do next, if somebody reads it there."""
        if self.chatty and _tty(sys.stderr):
            self._labeled("hint", text, "name")

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
        self._labeled("error", error.what, "bold")
        for label, text in (("  where: ", error.where), ("  why:   ", error.why)):
            if text:
                self.report(label + as_typed(text))
        if error.hint:
            self._labeled("hint", error.hint, "name")

    def _labeled(self, label: str, text: str, style: Style) -> None:
        said = f"{label}: {visible(as_typed(text))}"
        # A hint stays one line: its command is there to be copied.
        lines = [said] if label == "hint" else _said(said)
        lines[0] = _styled(sys.stderr, f"{label}:", style) + lines[0].removeprefix(f"{label}:")
        _write(sys.stderr, "\n".join(lines))


def wants_json(words: Sequence[str]) -> bool:
    """Return whether a command line asks for JSON, before it is parsed."""
    options = words[: words.index("--")] if "--" in words else words
    pairs = pairwise(options)
    return not {"--json", f"{FORMAT}=json"}.isdisjoint(options) or (FORMAT, "json") in pairs


def colored(stream: TextIO) -> bool:
    """Whether *stream* gets color.

    ``FORCE_COLOR`` is about what is said to people: what a program may read stays plain, unless
    ``--color always`` asks for it.
    """
    if WANTED.color != "auto":
        return WANTED.color == "always"
    if os.environ.get("NO_COLOR"):
        return False
    forced = (os.environ.get(name, "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE"))
    if stream is sys.stderr and any(text not in ("", "0") for text in forced):
        return True
    return _tty(stream) and os.environ.get("TERM") != "dumb"


def _columns() -> int:
    """Return the width of the answer: of the terminal, ``COLUMNS``, or else one for a pipe."""
    piped = WANTED.form == "table" and not _tty(sys.stdout)
    return shutil.get_terminal_size((WIDE, 24) if piped else (80, 24)).columns


def _said(text: str) -> list[str]:
    """Return *text* as lines of stderr: on a terminal it goes on below where that ends."""
    width = shutil.get_terminal_size().columns
    return _wrapped(text, width, GAP) if _tty(sys.stderr) else [text]


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    """Return *text* as lines; names and paths stay whole."""
    return textwrap.wrap(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ) or [""]


def _plain(cell: object) -> str:
    return _painted(visible(str(cell)), style_of(cell) if WANTED.color == "always" else None)


def _painted(text: str, style: str | None) -> str:
    return _styled(sys.stdout, text, style)


def _mark() -> str:
    """What stands for what a table has no room for."""
    return MARK if "utf" in (sys.stdout.encoding or "").lower() else "~"


def _json(value: Mapping[str, object]) -> str:
    return json.dumps(value, indent=2, allow_nan=False)


def _tty(stream: TextIO) -> bool:
    return stream.isatty()


def _styled(stream: TextIO, text: str, style: str | None) -> str:
    return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if style and text and colored(stream) else text


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
    Printer().flush()
    if not _unwritten:
        return
    first = _unwritten[0]
    _unwritten.clear()
    with suppress(OSError, ValueError):  # else the interpreter tries once more, and complains
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise StorageError(
        StorageError.from_os_error(first, "write the output", "").what,
        where="standard output",
        why="the command itself has finished",
    )


def by_reason(keys: Mapping[str, str]) -> Iterable[tuple[str, list[str]]]:
    """Return every reason with the names that it is given for."""
    by_reason: dict[str, list[str]] = {}
    for key, reason in keys.items():
        by_reason.setdefault(reason, []).append(key)
    return by_reason.items()


def told(what: str, keys: Mapping[str, str]) -> Iterator[str]:
    """Yield for every reason a line that says *what* became of which names."""
    for reason, names in by_reason(keys):
        yield f"{what}, {reason}: {in_short(names)}"


def in_short(names: Sequence[str]) -> str:
    """Return the names, or where there are many what they begin with."""
    if len(names) <= SHOWN:
        return listed(names)
    heads = list(dict.fromkeys(map(_head, names)))
    if len(heads) == len(names):
        return listed(names)
    inner = [head for head in heads if not any(name.startswith(head) for name in names)]
    roots = [head for head in heads if head not in inner]
    if not inner:
        return f"{len(names):,} names under {listed(roots)}"
    root = f"are under {listed(roots)} or " if roots else ""
    return f"{len(names):,} names that {root}contain {listed(inner)}"


def _head(name: str) -> str:
    """Return what stands for *name* and its like: what is no parameter of any module, or its root.

    Names of the former begin with ``_``: each module has its own ``_extra_state``.
    """
    first, *others = (part.partition("/")[0] for part in name.split("."))
    return next((part for part in others if part.startswith("_")), first)
