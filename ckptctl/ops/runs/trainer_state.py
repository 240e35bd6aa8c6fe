"""What the Trainer of transformers notes in ``trainer_state.json``, however long its log is.

The text is read value by value: of a log with millions of lines one line is in memory at a time,
and of a file that is cut off what stands before the cut is known.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import IO

from ckptctl.errors import CkptError
from ckptctl.file_identity import FileIdentity
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.json_reader import read_json
from ckptctl.storage.remote.urls import is_url

NAME = "trainer_state.json"
BEST = "best_model_checkpoint"
STEP = "global_step"
LOG = "log_history"
CHUNK = 1 << 20
MAX_VALUE = 100_000_000
"""Most characters of one value: of an entry of the log, for one."""
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class TrainerState:
    """What a state says.

    Attributes:
        there: Whether there is one that says anything, or that cannot be read.
        best: The path of the best checkpoint; empty: it names none.
        rated: What the log says of the step at which it was saved.
        problem: Why it cannot be read, or not to its end; empty: it can.
        damaged: Whether that is because of what it holds.
    """

    there: bool = False
    best: str = ""
    rated: Mapping[str, object] = field(default_factory=dict)
    problem: str = ""
    damaged: bool = False


class _CutError(Exception):
    """A state cannot be read to its end; carries what is known of it."""

    def __init__(self, state: TrainerState) -> None:
        super().__init__(state.problem)
        self.state = state


def trainer_state(folder: Path) -> TrainerState:
    """Return what the state in *folder* says; nothing where there is none."""
    if is_url(folder):
        return _remote(folder)
    path = folder / NAME
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        gone = path.is_symlink()
        return TrainerState(True, problem="it is a link to nothing") if gone else TrainerState()
    except OSError as error:
        return TrainerState(True, problem=str(error.strerror or error))
    if not stat.S_ISREG(status.st_mode):
        return TrainerState()
    try:
        with SourceFiles(folder) as files:
            files.path(NAME)
    except CkptError as error:
        return TrainerState(True, problem=error.what)
    try:
        return _read(path, FileIdentity.of(status))
    except _CutError as error:  # it is not remembered: another try may succeed
        return error.state


def _remote(folder: Path) -> TrainerState:
    try:
        with SourceFiles(folder) as files:
            found = read_json(files, NAME, constants=True) if (folder / NAME).is_file() else None
    except (CkptError, OSError) as error:
        return TrainerState(True, problem=str(error))
    if not isinstance(found, dict) or not found:
        return TrainerState()
    rated: dict[str, object] = {}
    log = found.get(LOG)
    for entry in log if isinstance(log, list) else ():
        if isinstance(entry, dict) and entry.get("step") == found.get(STEP):
            rated |= entry
    return TrainerState(True, _text(found.get(BEST)), rated)


@lru_cache(maxsize=1024)
def _read(path: Path, _: FileIdentity) -> TrainerState:
    scan = _Scan()
    try:
        scan.read(path)
        if scan.log_was_first:
            again = _Scan(scan.found)
            again.read(path)
            scan = again
    except OSError as error:
        raise _CutError(scan.cut(str(error.strerror or error), damaged=False)) from error
    except (ValueError, RecursionError) as error:
        raise _CutError(scan.cut(str(error)[:300], damaged=True)) from error
    return TrainerState(scan.anything, _text(scan.found.get(BEST)), scan.rated)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


class _Scan:
    """One way through a state.

    Args:
        known: What an earlier one found; None: this is the first.

    Attributes:
        found: The best checkpoint and the step, as far as they were met.
        rated: What the log says of that step.
        anything: Whether the state has a key at all.
        log_was_first: Whether the log was met while the step was not known.
    """

    def __init__(self, known: Mapping[str, object] | None = None) -> None:
        self.found: dict[str, object] = {}
        self.rated: dict[str, object] = {}
        self.anything = False
        self.log_was_first = False
        self._known = known

    def read(self, path: Path) -> None:
        """Read the whole text.

        Raises:
            OSError: The system refused.
            ValueError: It is not JSON, or no object.
            RecursionError: It nests too deeply.
        """
        seen: set[str] = set()
        with path.open(encoding="utf-8-sig") as file:
            text = _Text(file)
            for key in text.members():
                if key in seen:
                    raise ValueError(f"the key {key[:100]!r} occurs twice")
                seen.add(key)
                self._take(key, text)
            text.end()
        self.anything = bool(seen)

    def cut(self, problem: str, *, damaged: bool) -> TrainerState:
        """Return what is known of a state that cannot be read to its end."""
        return TrainerState(True, _text(self.found.get(BEST)), {}, problem, damaged)

    def _take(self, key: str, text: _Text) -> None:
        if key == LOG and text.ahead() == "[":
            self._log(text)
            return
        value = text.value()
        if key in (BEST, STEP):
            self.found[key] = value

    def _log(self, text: _Text) -> None:
        said = self.found if self._known is None else self._known
        self.log_was_first = self._known is None and STEP not in said
        for entry in text.items():
            if isinstance(entry, dict) and entry.get("step") == said.get(STEP):
                self.rated |= entry


class _Text:
    """A JSON text that is read from its beginning to its end.

    Args:
        file: Where it comes from.
    """

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._text = ""
        self._at = 0

    def members(self) -> Iterator[str]:
        """Yield the keys of the object that comes; whoever gets one reads its value."""
        self._one_of("{")
        more = self.ahead() != "}"
        while more:
            key = self.value()
            if not isinstance(key, str):
                raise ValueError("a key is no text")
            self._one_of(":")
            yield key
            more = self.ahead() == ","
            if more:
                self._one_of(",")
        self._one_of("}")

    def items(self) -> Iterator[object]:
        """Yield the values of the array that comes."""
        self._one_of("[")
        more = self.ahead() != "]"
        while more:
            yield self.value()
            more = self.ahead() == ","
            if more:
                self._one_of(",")
        self._one_of("]")

    def value(self) -> object:
        """Return the value that comes."""
        self.ahead()
        while True:
            try:
                found, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError:
                if not self._more():
                    raise
                continue
            if end < len(self._text) or not self._more():  # a number may go on
                self._at = end
                return found

    def ahead(self) -> str:
        """Return the letter that comes; none at the end."""
        while True:
            space = _SPACE.match(self._text, self._at)
            self._at = space.end() if space else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def end(self) -> None:
        """Prove that nothing comes any more."""
        if self.ahead():
            raise ValueError("something follows the JSON text")

    def _one_of(self, letter: str) -> None:
        if self.ahead() != letter:
            raise ValueError(f"a `{letter}` is missing: it is cut off, or no state")
        self._at += 1

    def _more(self) -> bool:
        left = self._text[self._at :]
        if len(left) > MAX_VALUE:
            raise ValueError(f"a value has more than {MAX_VALUE:,} characters")
        more = self._file.read(max(CHUNK, len(left)))
        self._text, self._at = left + more, 0
        return bool(more)
