"""Output of the command line, such as tables, JSON, messages and errors.

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
from ckptctl.cli.tables import GAP, Column, StyledText, get_style
from ckptctl.cli.typed_paths import restore_typed_paths
from ckptctl.errors import MAX_LISTED_NAMES, CkptError, StorageError, quote_names
from ckptctl.results import Result, build_schema_name
from ckptctl.units import escape_unprintable
from ckptctl.verdict import Verdict
from ckptctl.version import __version__

Mode = Literal["human", "plain", "json", "quiet"]
When = Literal["auto", "always", "never"]
Form = Literal["table", "tsv", "json"]
FORMAT_OPTION = "--format"
Style = Literal["bold", "dim", "name", "complete", "missing", "damaged"]
STYLES: Mapping[object, str] = {
    "bold": "1",
    "dim": "2",
    "name": "36",
    "complete": "32",
    "missing": "33",
    "damaged": "31",
}
"""ANSI codes by style, such as cyan for names and red for the verdict ``damaged``."""
VERDICT_STYLES: Mapping[str, Style] = {
    Verdict.COMPLETE: "complete",
    Verdict.DAMAGED: "damaged",
    Verdict.UNKNOWN: "bold",
}
T = TypeVar("T")
Row = Sequence[object]
MIN_TEXT_COLUMNS = 20
WIDE_COLUMNS = 100
ELLIPSIS = "…"
_write_errors: list[OSError] = []
"""Errors that occurred when results were written to stdout."""


@dataclass
class OutputSettings:
    """Output settings of the program.

    Attributes:
        color: Value of ``--color``.
        form: Value of ``--format``. None prints a table on a terminal and TSV otherwise.
    """

    color: When = "auto"
    form: Form | None = None


SETTINGS = OutputSettings()


class StoppedError(CkptError):
    """The user interrupted the command, for example with Ctrl-C."""

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
        table = SETTINGS.form == "table" or (SETTINGS.form is None and _is_terminal(sys.stdout))
        self.mode: Mode = "json" if machine else "quiet" if quiet else "human" if table else "plain"

    @property
    def draws_bars(self) -> bool:
        """Whether the terminal is wide enough for bars and its encoding supports them."""
        return (
            self.mode == "human"
            and _count_columns() >= WIDE_COLUMNS
            and _choose_ellipsis() == ELLIPSIS
        )

    @property
    def is_chatty(self) -> bool:
        """Whether to print statements, hints and progress in addition to the results."""
        return self.mode in ("human", "plain")

    @property
    def can_prompt(self) -> bool:
        """Whether the user can be prompted."""
        return self.mode != "json" and _is_terminal(sys.stderr) and sys.stdin.isatty()

    def print_answer(
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
            self.print_document(name, *results)
        elif self.mode == "quiet":
            for name_line in names:
                self.print_line(str(name_line))
        elif self.mode == "plain":
            self.print_table(rows, columns)
        else:
            human()

    def print_line(self, text: str = "", style: Style | None = None) -> None:
        """Print one line to stdout."""
        self.print_text(_apply_style(sys.stdout, escape_unprintable(text), style))

    def print_sentence(self, text: str, style: Style | None = None) -> None:
        """Print one line to stdout, wrapped to the width of the terminal."""
        indent = len(text) - len(text.lstrip())
        for part in _wrap_text(escape_unprintable(text), _count_columns(), " " * indent + GAP):
            self.print_text(_apply_style(sys.stdout, part, style))

    def print_headline(self, subject: object, *facts: object) -> None:
        """Print the subject and its facts on one line, wrapped between facts if necessary."""
        room, lines = _count_columns(), [[StyledText(escape_unprintable(f"{subject}   "), "bold")]]
        for fact in (
            StyledText(escape_unprintable(str(value)), get_style(value) or "bold")
            for value in facts
        ):
            used_columns = sum(len(part.text) for part in lines[-1])
            if len(lines[-1]) > 1 and used_columns + len(f" · {fact} ·") > room:
                lines.append([StyledText(GAP, "bold"), fact])
            elif fact.text:
                gap = [StyledText(" · ", "bold")][: len(lines[-1]) - 1]
                lines[-1] += [*gap, fact]
        for line in lines:
            runs = groupby(line, key=lambda part: part.style)
            self.print_text(
                "".join(_paint_text("".join(map(str, run)), style) for style, run in runs)
            )

    def print_table(self, rows: Iterable[Row], columns: Sequence[Column]) -> None:
        """Print *rows* as a table that fits the terminal, or in full as TSV."""
        if self.mode == "human":
            lines = tables.format_lines(
                columns, rows, _count_columns(), _choose_ellipsis(), _paint_text
            )
        else:
            titles = [column.title for column in columns]
            header_rows = [titles] if self.header and any(titles) else []
            lines = ["\t".join(map(_format_cell, row)) for row in (*header_rows, *rows)]
        if lines:
            self.print_text("\n".join(lines))

    def print_first_rows(
        self, items: Sequence[T], row: Callable[[T], Row], columns: Sequence[Column]
    ) -> None:
        """Print a table row for each of the first *items*, and the number of items not shown."""
        self.print_table(map(row, items[: tables.MAX_SHOWN_ROWS]), columns)
        self.print_remaining(len(items))

    def print_remaining(self, count: int) -> None:
        """Print how many of *count* rows are not shown, or nothing if all are shown."""
        if text := tables.format_remaining(count):
            self.print_line(text)

    def print_facts(self, rows: Iterable[tuple[str, str]]) -> None:
        """Print pairs of label and text in two columns, wrapped to the width of the terminal."""
        pairs = list(rows)
        start = max((len(label) for label, _ in pairs), default=0) + len(GAP)
        width = max(_count_columns(), start + MIN_TEXT_COLUMNS)
        for label, text in pairs:
            text_lines = _wrap_text(" " * start + escape_unprintable(text), width, " " * start)
            self.print_text(
                "\n".join((label.ljust(start) + text_lines[0].lstrip(), *text_lines[1:])).rstrip()
            )

    def print_document(self, name: str, *results: Result, to: TextIO | None = None) -> None:
        """Print the fields of *results* as the JSON document of the command *name*."""
        fields = {key: value for result in results for key, value in result.to_json().items()}
        head = {"schema": build_schema_name(name), "ckptctl": __version__}
        _write_line(to or sys.stdout, _dump_json(head | fields))

    def print_schema(self, json_schema: Mapping[str, object]) -> None:
        """Print a JSON Schema as JSON in every mode."""
        self.print_text(_dump_json(json_schema))

    def print_text(self, text: str) -> None:
        """Print *text* to stdout unchanged."""
        _write_line(sys.stdout, text)

    def flush_answer(self) -> None:
        """Flush stdout, so that later messages on stderr follow the results."""
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            _write_errors.append(error)

    def print_statement(self, text: str) -> None:
        """Print one line about the next step to stderr."""
        if self.is_chatty:
            for line in _wrap_for_stderr(escape_unprintable(text)):
                self.print_to_stderr(line, "dim")

    def print_note(self, text: str) -> None:
        """Print a note to stderr that needs no action."""
        if self.is_chatty:
            self._print_labeled("note", text, "name")

    def print_warning(self, text: str) -> None:
        """Print a warning to stderr and continue."""
        if self.mode != "json":
            self._print_labeled("warning", text, "bold")

    def print_hint(self, text: str) -> None:
        """Print a hint about the next step to stderr, if it is a terminal."""
        if self.is_chatty and _is_terminal(sys.stderr):
            self._print_labeled("hint", text, "name")

    def print_to_stderr(self, text: str, style: Style | None = None) -> None:
        """Print one line to stderr."""
        _write_line(sys.stderr, _apply_style(sys.stderr, escape_unprintable(text), style))

    def print_error(self, error: CkptError, trace: str | None = None) -> None:
        """Print *error* to stderr, as a JSON object or as labeled lines.

        Args:
            error: Error to print, with location, reason and hint.
            trace: Traceback, for ``--debug``.
        """
        if self.mode == "json":
            from ckptctl.documents import ErrorDocument, TracedError

            self.print_document("error", ErrorDocument(TracedError(error, trace)), to=sys.stderr)
            return
        if trace:
            _write_line(
                sys.stderr, "\n".join(escape_unprintable(line) for line in trace.splitlines())
            )
        self._print_labeled("error", error.what, "bold")
        for label, text in (("  where: ", error.where), ("  why:   ", error.why)):
            if text:
                self.print_to_stderr(label + restore_typed_paths(text))
        if error.hint:
            self._print_labeled("hint", error.hint, "name")

    def _print_labeled(self, label: str, text: str, style: Style) -> None:
        message = f"{label}: {escape_unprintable(restore_typed_paths(text))}"
        # A hint is not wrapped, so that its command can be copied.
        lines = [message] if label == "hint" else _wrap_for_stderr(message)
        lines[0] = _apply_style(sys.stderr, f"{label}:", style) + lines[0].removeprefix(f"{label}:")
        _write_line(sys.stderr, "\n".join(lines))


def is_json_requested(words: Sequence[str]) -> bool:
    """Return whether the words of an unparsed command line request JSON output."""
    options = words[: words.index("--")] if "--" in words else words
    pairs = pairwise(options)
    return (
        not {"--json", f"{FORMAT_OPTION}=json"}.isdisjoint(options)
        or (FORMAT_OPTION, "json") in pairs
    )


def should_color(stream: TextIO) -> bool:
    """Return whether to print color to *stream*.

    ``FORCE_COLOR`` only applies to stderr. Results that a program may parse are colored only with
    ``--color always``.
    """
    if SETTINGS.color != "auto":
        return SETTINGS.color == "always"
    if os.environ.get("NO_COLOR"):
        return False
    forced = (os.environ.get(name, "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE"))
    if stream is sys.stderr and any(text not in ("", "0") for text in forced):
        return True
    return _is_terminal(stream) and os.environ.get("TERM") != "dumb"


def _count_columns() -> int:
    """Return the width of stdout in columns, from the terminal, ``COLUMNS`` or a default."""
    piped = SETTINGS.form == "table" and not _is_terminal(sys.stdout)
    return shutil.get_terminal_size((WIDE_COLUMNS, 24) if piped else (80, 24)).columns


def _wrap_for_stderr(text: str) -> list[str]:
    """Split *text* into lines for stderr, wrapped if it is a terminal."""
    width = shutil.get_terminal_size().columns
    return _wrap_text(text, width, GAP) if _is_terminal(sys.stderr) else [text]


def _wrap_text(text: str, width: int, indent: str) -> list[str]:
    """Wrap *text* into lines, without breaking names and paths."""
    return textwrap.wrap(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ) or [""]


def _format_cell(cell: object) -> str:
    return _paint_text(
        escape_unprintable(str(cell)), get_style(cell) if SETTINGS.color == "always" else None
    )


def _paint_text(text: str, style: str | None) -> str:
    return _apply_style(sys.stdout, text, style)


def _choose_ellipsis() -> str:
    """Return a mark for truncated text that the encoding of stdout supports."""
    return ELLIPSIS if "utf" in (sys.stdout.encoding or "").lower() else "~"


def _dump_json(value: Mapping[str, object]) -> str:
    return json.dumps(value, indent=2, allow_nan=False)


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty()


def _apply_style(stream: TextIO, text: str, style: str | None) -> str:
    return (
        f"\x1b[{STYLES[style]}m{text}\x1b[0m" if style and text and should_color(stream) else text
    )


def _write_line(stream: TextIO, text: str) -> None:
    encoding = stream.encoding or "ascii"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.encode(encoding, "backslashreplace").decode(encoding)
    try:
        if stream is not sys.stdout or not _write_errors:
            stream.write(f"{text}\n")
    except BrokenPipeError:
        raise
    except OSError as error:
        _write_errors.append(error)


def require_output_written() -> None:
    """Flush stdout and raise if any of the output could not be written.

    This is called after the command has done its work, so that an output error does not stop it.

    Raises:
        StorageError: Some of the output was not written.
        BrokenPipeError: The reader closed the pipe.
    """
    Printer().flush_answer()
    if not _write_errors:
        return
    first = _write_errors[0]
    _write_errors.clear()
    with suppress(OSError, ValueError):  # otherwise the interpreter retries and prints an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise StorageError(
        StorageError.from_os_error(first, "write the output", "").what,
        where="standard output",
        why="the command itself has finished",
    )


def group_by_reason(keys: Mapping[str, str]) -> Iterable[tuple[str, list[str]]]:
    """Group the names in *keys* by reason, and return each reason with its names."""
    names_by_reason: dict[str, list[str]] = {}
    for key, reason in keys.items():
        names_by_reason.setdefault(reason, []).append(key)
    return names_by_reason.items()


def format_by_reason(outcome: str, keys: Mapping[str, str]) -> Iterator[str]:
    """Yield one line per reason, with *outcome* and the names that have this reason."""
    for reason, names in group_by_reason(keys):
        yield f"{outcome}, {reason}: {abbreviate_names(names)}"


def abbreviate_names(names: Sequence[str]) -> str:
    """Format *names* as a list. If there are many, give only their number and common stems."""
    if len(names) <= MAX_LISTED_NAMES:
        return quote_names(names)
    stems = list(dict.fromkeys(map(_find_stem, names)))
    if len(stems) == len(names):
        return quote_names(names)
    inner_stems = [stem for stem in stems if not any(name.startswith(stem) for name in names)]
    root_stems = [stem for stem in stems if stem not in inner_stems]
    if not inner_stems:
        return f"{len(names):,} names under {quote_names(root_stems)}"
    root = f"are under {quote_names(root_stems)} or " if root_stems else ""
    return f"{len(names):,} names that {root}contain {quote_names(inner_stems)}"


def _find_stem(name: str) -> str:
    """Return the name component that groups *name* with similar names in a message.

    This is the first component after the start that begins with ``_``, such as ``_extra_state``,
    or else the first component.
    """
    first, *later_parts = (part.partition("/")[0] for part in name.split("."))
    return next((part for part in later_parts if part.startswith("_")), first)
