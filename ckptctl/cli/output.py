"""All output of the command line: tables, JSON, messages and errors.

Results go to stdout, everything else to stderr. A terminal gets columns that fit, and color unless
``NO_COLOR`` or ``TERM=dumb`` is set. A pipe or file gets the same facts tab-separated, in full and
without color. ``--format`` overrides this choice. Names come from untrusted files, so everything
printed is escaped here.

Green, yellow and red show verdicts and nothing else: see :data:`STYLES`.
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
from ckptctl.errors import MAX_LISTED_NAMES, CkptError, StorageError, quote_names
from ckptctl.results import Result, schema_name
from ckptctl.units import escape_unprintable
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
"""ANSI codes: cyan for names; green, yellow and red for complete, missing and damaged."""
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
"""Errors from writing the results to stdout."""


@dataclass
class OutputSettings:
    """Output settings of the whole program.

    Attributes:
        color: Value of ``--color``.
        form: Value of ``--format``. None prints a table on a terminal and TSV otherwise.
    """

    color: When = "auto"
    form: Form | None = None


WANTED = OutputSettings()


class StoppedError(CkptError):
    """The user interrupted the command."""

    exit_code = 130
    code = "interrupted"


class Printer:
    """Printer for the output of one command, in one mode.

    Args:
        machine: Print the results as one JSON document.
        quiet: Print only names or paths, one per line, without hints or progress.
        header: Print a header line in TSV output.
    """

    def __init__(self, machine: bool = False, quiet: bool = False, header: bool = True) -> None:
        self.header = header
        table = WANTED.form == "table" or (WANTED.form is None and _tty(sys.stdout))
        self.mode: Mode = "json" if machine else "quiet" if quiet else "human" if table else "plain"

    @property
    def draws(self) -> bool:
        """Whether the terminal is wide enough for bars and its encoding supports them."""
        return self.mode == "human" and _columns() >= WIDE and _mark() == MARK

    @property
    def chatty(self) -> bool:
        """Whether to print statements, hints and progress."""
        return self.mode in ("human", "plain")

    @property
    def asks(self) -> bool:
        """Whether the user can be prompted."""
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
        """Print the results of the command *name* in the current mode.

        Args:
            name: Name of the command.
            results: Results whose fields form the JSON document.
            names: Lines of ``--quiet`` output.
            rows: Rows of TSV output.
            human: Function that prints the results for a terminal.
            columns: Columns of *rows*, if they form a table.
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
        """Print one line to stdout."""
        self.text(_styled(sys.stdout, escape_unprintable(text), style))

    def sentence(self, text: str, style: Style | None = None) -> None:
        """Print one line to stdout, wrapped to the width of the terminal."""
        indent = len(text) - len(text.lstrip())
        for part in _wrapped(escape_unprintable(text), _columns(), " " * indent + GAP):
            self.text(_styled(sys.stdout, part, style))

    def headline(self, subject: object, *facts: object) -> None:
        """Print the subject and its facts on one line, wrapped between facts if necessary."""
        room, lines = _columns(), [[Painted(escape_unprintable(f"{subject}   "), "bold")]]
        for fact in (
            Painted(escape_unprintable(str(one)), style_of(one) or "bold") for one in facts
        ):
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
        """Print *rows* as a table that fits the terminal, or in full as TSV."""
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
        """Print a *row* for each of the first *items*, and the number of remaining ones."""
        self.table(map(row, items[: tables.SHOWN]), columns)
        self.more(len(items))

    def more(self, count: int) -> None:
        """Print the number of rows out of *count* that are not shown, if any."""
        if text := tables.more(count):
            self.line(text)

    def facts(self, rows: Iterable[tuple[str, str]]) -> None:
        """Print labeled texts in two columns, wrapped to the width of the terminal."""
        known = list(rows)
        start = max((len(label) for label, _ in known), default=0) + len(GAP)
        width = max(_columns(), start + NARROW)
        for label, text in known:
            said = _wrapped(" " * start + escape_unprintable(text), width, " " * start)
            self.text("\n".join((label.ljust(start) + said[0].lstrip(), *said[1:])).rstrip())

    def document(self, name: str, *results: Result, to: TextIO | None = None) -> None:
        """Print the fields of *results* as the JSON document of the command *name*."""
        fields = {key: value for one in results for key, value in one.to_json().items()}
        head = {"schema": schema_name(name), "ckptctl": __version__}
        _write(to or sys.stdout, _json(head | fields))

    def schema(self, schema: Mapping[str, object]) -> None:
        """Print a JSON Schema as JSON in every mode."""
        self.text(_json(schema))

    def text(self, text: str) -> None:
        """Print *text* to stdout unchanged."""
        _write(sys.stdout, text)

    def flush(self) -> None:
        """Flush stdout, so that later messages on stderr follow the results."""
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            _unwritten.append(error)

    def statement(self, text: str) -> None:
        """Print one line about the next step to stderr."""
        if self.chatty:
            for line in _said(escape_unprintable(text)):
                self.report(line, "dim")

    def note(self, text: str) -> None:
        """Print a note to stderr that needs no action."""
        if self.chatty:
            self._labeled("note", text, "name")

    def warning(self, text: str) -> None:
        """Print a warning to stderr and continue."""
        if self.mode != "json":
            self._labeled("warning", text, "bold")

    def hint(self, text: str) -> None:
        """Print a hint about the next step to stderr, if it is a terminal."""
        if self.chatty and _tty(sys.stderr):
            self._labeled("hint", text, "name")

    def report(self, text: str, style: Style | None = None) -> None:
        """Print one line to stderr."""
        _write(sys.stderr, _styled(sys.stderr, escape_unprintable(text), style))

    def error(self, error: CkptError, trace: str | None = None) -> None:
        """Print *error* to stderr, as a JSON object or as labeled lines.

        Args:
            error: Error to print, with location, reason and hint.
            trace: Traceback, for ``--debug``.
        """
        if self.mode == "json":
            from ckptctl.documents import ErrorDocument, TracedError

            self.document("error", ErrorDocument(TracedError(error, trace)), to=sys.stderr)
            return
        if trace:
            _write(sys.stderr, "\n".join(escape_unprintable(line) for line in trace.splitlines()))
        self._labeled("error", error.what, "bold")
        for label, text in (("  where: ", error.where), ("  why:   ", error.why)):
            if text:
                self.report(label + as_typed(text))
        if error.hint:
            self._labeled("hint", error.hint, "name")

    def _labeled(self, label: str, text: str, style: Style) -> None:
        said = f"{label}: {escape_unprintable(as_typed(text))}"
        # A hint is not wrapped, so that its command can be copied.
        lines = [said] if label == "hint" else _said(said)
        lines[0] = _styled(sys.stderr, f"{label}:", style) + lines[0].removeprefix(f"{label}:")
        _write(sys.stderr, "\n".join(lines))


def wants_json(words: Sequence[str]) -> bool:
    """Return whether a command line that is not parsed yet requests JSON."""
    options = words[: words.index("--")] if "--" in words else words
    pairs = pairwise(options)
    return not {"--json", f"{FORMAT}=json"}.isdisjoint(options) or (FORMAT, "json") in pairs


def colored(stream: TextIO) -> bool:
    """Return whether to print color to *stream*.

    ``FORCE_COLOR`` only applies to stderr. Results that a program may parse are colored only with
    ``--color always``.
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
    """Return the width of stdout in columns, from the terminal, ``COLUMNS`` or a default."""
    piped = WANTED.form == "table" and not _tty(sys.stdout)
    return shutil.get_terminal_size((WIDE, 24) if piped else (80, 24)).columns


def _said(text: str) -> list[str]:
    """Split *text* into lines for stderr, wrapped if it is a terminal."""
    width = shutil.get_terminal_size().columns
    return _wrapped(text, width, GAP) if _tty(sys.stderr) else [text]


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    """Wrap *text* into lines, without breaking names and paths."""
    return textwrap.wrap(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ) or [""]


def _plain(cell: object) -> str:
    return _painted(
        escape_unprintable(str(cell)), style_of(cell) if WANTED.color == "always" else None
    )


def _painted(text: str, style: str | None) -> str:
    return _styled(sys.stdout, text, style)


def _mark() -> str:
    """Return the mark for truncated text that stdout can encode."""
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
    """Flush stdout and raise if any of the output could not be written.

    Checked last, so that a full disk does not keep the command from doing its work.

    Raises:
        StorageError: Some of the output was not written.
        BrokenPipeError: The reader closed the pipe.
    """
    Printer().flush()
    if not _unwritten:
        return
    first = _unwritten[0]
    _unwritten.clear()
    with suppress(OSError, ValueError):  # otherwise the interpreter retries and prints an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise StorageError(
        StorageError.from_os_error(first, "write the output", "").what,
        where="standard output",
        why="the command itself has finished",
    )


def by_reason(keys: Mapping[str, str]) -> Iterable[tuple[str, list[str]]]:
    """Group names by the reason that *keys* maps them to."""
    by_reason: dict[str, list[str]] = {}
    for key, reason in keys.items():
        by_reason.setdefault(reason, []).append(key)
    return by_reason.items()


def told(what: str, keys: Mapping[str, str]) -> Iterator[str]:
    """Yield one line per reason, with the outcome and the names it applies to."""
    for reason, names in by_reason(keys):
        yield f"{what}, {reason}: {in_short(names)}"


def in_short(names: Sequence[str]) -> str:
    """Return the names, or if there are many, their count and common stems."""
    if len(names) <= MAX_LISTED_NAMES:
        return quote_names(names)
    heads = list(dict.fromkeys(map(_head, names)))
    if len(heads) == len(names):
        return quote_names(names)
    inner = [head for head in heads if not any(name.startswith(head) for name in names)]
    roots = [head for head in heads if head not in inner]
    if not inner:
        return f"{len(names):,} names under {quote_names(roots)}"
    root = f"are under {quote_names(roots)} or " if roots else ""
    return f"{len(names):,} names that {root}contain {quote_names(inner)}"


def _head(name: str) -> str:
    """Return the stem that groups *name* with similar names.

    This is a part that begins with ``_``, such as a module's ``_extra_state``, or the first part.
    """
    first, *others = (part.partition("/")[0] for part in name.split("."))
    return next((part for part in others if part.startswith("_")), first)
