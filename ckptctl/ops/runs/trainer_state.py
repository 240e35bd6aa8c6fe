"""What the Trainer of transformers notes in ``trainer_state.json``, however long its log is.

The text is read value by value: of a log with millions of lines one line is in memory at a time,
and of a file that is cut off what stands before the cut is known.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import IO

from ckptctl.errors import CkptError
from ckptctl.file_identity import FileIdentity
from ckptctl.ops.runs.notes import Noted
from ckptctl.storage.files import source_files

NAME = "trainer_state.json"
BEST = "best_model_checkpoint"
STEP = "global_step"
LOG = "log_history"
CHUNK = 1 << 20
MAX_VALUE = 100_000_000
"""Most characters of one value: of an entry of the log, for one."""
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


class _CutError(Exception):
    """A state cannot be read to its end; carries what is known of it."""

    def __init__(self, state: Noted) -> None:
        super().__init__(state.problem)
        self.state = state


def trainer_state(folder: Path) -> Noted:
    """Read the state in *folder*, if there is one."""
    path = folder / NAME
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return Noted()
        with source_files(folder) as files:
            files.path(NAME)
        return _read(path, FileIdentity.of(status))
    except (FileNotFoundError, NotADirectoryError):
        gone = path.is_symlink()
        return Noted(there=True, problem="it is a link to nothing") if gone else Noted()
    except CkptError as error:
        return Noted(there=True, problem=error.what)
    except OSError as error:
        return Noted(there=True, problem=str(error.strerror or error))
    except _CutError as error:  # it is not remembered: another try may succeed
        return error.state


@lru_cache(maxsize=1024)
def _read(path: Path, _: FileIdentity) -> Noted:
    """Read a state; twice, where its log comes before the step that is looked for in it."""
    said: dict[str, object] = {}
    try:
        again, rated = _pass(path, said)
        if again:
            rated = _pass(path, said)[1]
        return Noted(_best(said), rated, there=bool(said))
    except OSError as error:
        problem, damaged = str(error.strerror or error), False
    except (ValueError, RecursionError) as error:
        problem, damaged = str(error)[:300], True
    raise _CutError(Noted(_best(said), problem=problem, damaged=damaged, there=True))


def _best(said: Mapping[str, object]) -> tuple[str, ...]:
    best = said.get(BEST)
    return (best,) if best and isinstance(best, str) else ()


def _pass(path: Path, said: dict[str, object]) -> tuple[bool, Mapping[str, object]]:
    """Read the whole text once, and note in *said* every key that is met.

    Returns:
        Whether the log was met while the step was not known, and what it says of that step.
    """
    log_was_first, seen = False, set()
    rated: dict[str, object] = {}
    with path.open(encoding="utf-8-sig") as file:
        text = _Text(file)
        for key in text.members():
            if key in seen:
                raise ValueError(f"the key {key[:100]!r} occurs twice")
            seen.add(key)
            if key == LOG and text.ahead() == "[":
                log_was_first = STEP not in said
                said[LOG] = None
                for entry in text.items():
                    if isinstance(entry, dict) and entry.get("step") == said.get(STEP):
                        rated |= entry
            else:
                value = text.value()
                said[key] = value if key in (BEST, STEP) else None
        text.end()
    return log_was_first, rated


class _Text:
    """A JSON text that is read from its beginning to its end."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._text = ""
        self._at = 0

    def members(self) -> Iterator[str]:
        """Yield the keys of the object that comes; whoever gets one reads its value."""
        for _ in self._between("{", "}"):
            key = self.value()
            if not isinstance(key, str):
                raise ValueError("a key is no text")
            self._one_of(":")
            yield key

    def items(self) -> Iterator[object]:
        """Yield the values of the array that comes."""
        for _ in self._between("[", "]"):
            yield self.value()

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

    def _between(self, first: str, last: str) -> Iterator[None]:
        """Yield before each of the things between two brackets, separated by commas."""
        self._one_of(first)
        more = self.ahead() != last
        while more:
            yield
            more = self.ahead() == ","
            if more:
                self._one_of(",")
        self._one_of(last)

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
