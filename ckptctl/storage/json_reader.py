"""JSON reader that follows RFC 8259, stricter than :mod:`json`.

It rejects duplicate keys, NaN and infinities, numbers that overflow, unpaired surrogates, a byte
order mark, encodings other than UTF-8, and nesting that :mod:`json` cannot follow.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from typing import IO, NoReturn

from ckptctl.errors import DamagedError, UnsupportedError
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.stand_ins import require_content
from ckptctl.units import counted

MAX_BYTES = 100_000_000
MAX_DIGITS = 400
CHUNK = 1 << 20
MAX_VALUE = 100_000_000
"""Most characters of one value in an incrementally read text."""
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_json(
    files: SourceFiles, name: str, max_bytes: int = MAX_BYTES, *, constants: bool = False
) -> object:
    """Read the JSON value in the file *name*.

    Args:
        files: Files of the checkpoint.
        name: File to read.
        max_bytes: Largest accepted file size.
        constants: As in :func:`loads`.

    Raises:
        DamagedError: The file is truncated or was replaced by something else.
        UnsupportedError: It is not strict JSON, or larger than *max_bytes*.
        SourceNotFoundError: There is no such file.
        StorageError: The read failed.
    """
    where = str(files.root / name)
    size = files.size(name)
    _check_size(size, max_bytes, where)
    data = files.read(name, 0, size)
    try:
        return loads(data, where=where, max_bytes=max_bytes, constants=constants)
    except (DamagedError, UnsupportedError):
        require_content(files, name)
        raise


def read_json_object(
    files: SourceFiles, name: str, *, constants: bool = False
) -> dict[str, object]:
    """Read the JSON object in the file *name* (see :func:`read_json`)."""
    content = read_json(files, name, constants=constants)
    if not isinstance(content, dict):
        raise UnsupportedError(f"`{name}` is not a JSON object", where=str(files.root / name))
    return content


def loads(
    data: bytes,
    *,
    where: str,
    max_bytes: int = MAX_BYTES,
    parse_int: Callable[[str], int] | None = None,
    constants: bool = False,
) -> object:
    """Parse a JSON text.

    Args:
        data: UTF-8 text.
        where: File name for errors.
        max_bytes: Largest accepted size.
        parse_int: Converts digits to an integer; may raise ValueError.
        constants: Accept ``NaN``, ``Infinity`` and ``-Infinity``, which Python's writer produces.
    """
    _check_size(len(data), max_bytes, where)
    try:
        found: object = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=float if constants else _constant,
            parse_float=_finite,
            parse_int=parse_int or _integer,
        )
        if _SURROGATE.search(data):
            json.dumps(found, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        kind = DamagedError if _is_cut(data, error) else UnsupportedError
        what = "the JSON text is truncated" if kind is DamagedError else "malformed JSON"
        why = str(error)[:300]
        if isinstance(error, UnicodeEncodeError):
            why = "a string contains an unpaired surrogate"
        elif isinstance(error, RecursionError):
            why = "it is nested too deeply"
        raise kind(what, where=where, why=why) from error
    return found


def _is_cut(data: bytes, error: Exception) -> bool:
    """Return whether *error* only means that *data* is truncated."""
    text = data.rstrip()
    if isinstance(error, UnicodeDecodeError):
        return error.reason == "unexpected end of data"
    if not isinstance(error, json.JSONDecodeError):
        return False
    rest = error.doc[error.pos :].rstrip()
    open_ = error.msg.startswith("Unterminated string") and not text.endswith((b"}", b"]"))
    part = rest in (".", "-") or any(word.startswith(rest) for word in ("true", "false", "null"))
    return open_ or part or not rest.strip("\0")


def _check_size(size: int, limit: int, where: str) -> None:
    if size > limit:
        raise UnsupportedError(
            "the JSON text is too large",
            where=where,
            why=f"{counted(size, 'byte')}, limit {limit:,}",
        )


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"duplicate key {key[:100]!r}")
            seen.add(key)
    return found


def _constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} overflows")
    return value


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"an integer has {counted(len(text), 'digit')}")
    return int(text)


class JsonText:
    """Incremental reader for JSON texts of any length, as lenient as :mod:`json`.

    It holds one value in memory at a time, so a truncated text can be read up to the truncation.
    Malformed text raises ValueError.
    """

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._text = ""
        self._at = 0

    def members(self) -> Iterator[str]:
        """Yield the keys of the next object, whose values the caller reads."""
        for _ in self._between("{", "}"):
            key = self.value()
            if not isinstance(key, str):
                raise ValueError("a key is not a string")
            self._one_of(":")
            yield key

    def items(self) -> Iterator[object]:
        """Yield the values of the next array."""
        for _ in self._between("[", "]"):
            yield self.value()

    def value(self) -> object:
        """Read the next value."""
        self.ahead()
        while True:
            try:
                found, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError:
                if not self._more():
                    raise
                continue
            if end < len(self._text) or not self._more():  # a number may continue
                self._at = end
                return found

    def ahead(self) -> str:
        """Return the next character other than white space, or an empty string at the end."""
        while True:
            space = _SPACE.match(self._text, self._at)
            self._at = space.end() if space else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def end(self) -> None:
        """Raise unless the text ends here."""
        if self.ahead():
            raise ValueError("extra data after the JSON text")

    def _between(self, first: str, last: str) -> Iterator[None]:
        """Yield before each of the comma-separated items between two brackets."""
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
            raise ValueError(f"expected `{letter}`")
        self._at += 1

    def _more(self) -> bool:
        left = self._text[self._at :]
        if len(left) > MAX_VALUE:
            raise ValueError(f"a value has more than {MAX_VALUE:,} characters")
        more = self._file.read(max(CHUNK, len(left)))
        self._text, self._at = left + more, 0
        return bool(more)
