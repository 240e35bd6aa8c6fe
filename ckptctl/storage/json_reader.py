"""JSON reader that follows RFC 8259, stricter than :mod:`json`.

The reader rejects duplicate keys, NaN and infinities, numbers that overflow, unpaired surrogates,
a byte order mark, encodings other than UTF-8, and nesting too deep for :mod:`json`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from typing import IO, NoReturn

from ckptctl.errors import DamagedError, UnsupportedError
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.stand_ins import raise_if_placeholder
from ckptctl.units import pluralize

MAX_BYTES = 100_000_000
MAX_DIGITS = 400
CHUNK_CHARACTERS = 1 << 20
MAX_VALUE_CHARACTERS = 100_000_000
"""Maximum number of characters of one value in a text that is read incrementally."""
_DECODER = json.JSONDecoder()
_WHITE_SPACE = re.compile(r"[ \t\r\n]*")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_json(
    files: SourceFiles, name: str, max_bytes: int = MAX_BYTES, *, allow_nan: bool = False
) -> object:
    """Read the JSON value in the file *name*.

    Args:
        files: Files of the checkpoint.
        name: File to read.
        max_bytes: Largest accepted file size in bytes.
        allow_nan: Whether to accept ``NaN``, ``Infinity`` and ``-Infinity``.

    Raises:
        DamagedError: The file is truncated or was replaced by something else.
        UnsupportedError: The content is not strict JSON, or is larger than *max_bytes*.
        SourceNotFoundError: The file does not exist.
        StorageError: The read failed.
    """
    where = str(files.root / name)
    size = files.size(name)
    _check_size(size, max_bytes, where)
    data = files.read(name, 0, size)
    try:
        return parse_json(data, where=where, max_bytes=max_bytes, allow_nan=allow_nan)
    except (DamagedError, UnsupportedError):
        raise_if_placeholder(files, name)
        raise


def read_json_object(files: SourceFiles, name: str) -> dict[str, object]:
    """Read the JSON object in the file *name*, in which ``NaN`` is allowed."""
    content = read_json(files, name, allow_nan=True)
    if not isinstance(content, dict):
        raise UnsupportedError(f"`{name}` is not a JSON object", where=str(files.root / name))
    return content


def parse_json(
    data: bytes,
    *,
    where: str,
    max_bytes: int = MAX_BYTES,
    parse_int: Callable[[str], int] | None = None,
    allow_nan: bool = False,
) -> object:
    """Parse a JSON text.

    Args:
        data: UTF-8 text.
        where: File name to show in errors.
        max_bytes: Largest accepted size in bytes.
        parse_int: Converts the text of an integer, or raises ValueError. None to use ``int``.
        allow_nan: Whether to accept ``NaN``, ``Infinity`` and ``-Infinity``, which :mod:`json`
            writes.
    """
    _check_size(len(data), max_bytes, where)
    try:
        value: object = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_require_unique_keys,
            parse_constant=float if allow_nan else _reject_constant,
            parse_float=_parse_finite,
            parse_int=parse_int or _parse_integer,
        )
        if _SURROGATE.search(data):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        error_type = DamagedError if _is_truncated(data, error) else UnsupportedError
        message = "the JSON text is truncated" if error_type is DamagedError else "malformed JSON"
        why = str(error)[:300]
        if isinstance(error, UnicodeEncodeError):
            why = "a string contains an unpaired surrogate"
        elif isinstance(error, RecursionError):
            why = "it is nested too deeply"
        raise error_type(message, where=where, why=why) from error
    return value


def _is_truncated(data: bytes, error: Exception) -> bool:
    """Return whether *error* only occurred because *data* is truncated JSON."""
    text = data.rstrip()
    if isinstance(error, UnicodeDecodeError):
        return error.reason == "unexpected end of data"
    if not isinstance(error, json.JSONDecodeError):
        return False
    remainder = error.doc[error.pos :].rstrip()
    is_open_string = error.msg.startswith("Unterminated string") and not text.endswith((b"}", b"]"))
    is_partial_word = remainder in (".", "-") or any(
        word.startswith(remainder) for word in ("true", "false", "null")
    )
    return is_open_string or is_partial_word or not remainder.strip("\0")


def _check_size(size: int, limit: int, where: str) -> None:
    if size > limit:
        raise UnsupportedError(
            "the JSON text is too large",
            where=where,
            why=f"{pluralize(size, 'byte')}, limit {limit:,}",
        )


def _require_unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"duplicate key {key[:100]!r}")
            seen.add(key)
    return members


def _reject_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _parse_finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} overflows")
    return value


def _parse_integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"an integer has {pluralize(len(text), 'digit')}")
    return int(text)


class JsonTextReader:
    """Incremental reader of JSON texts of any length, which accepts the same syntax as :mod:`json`.

    Only one value is in memory at a time. A truncated text can be read up to the truncation.
    Malformed text raises ValueError.
    """

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._text = ""
        self._position = 0

    def iterate_keys(self) -> Iterator[str]:
        """Yield the keys of the next object. The caller must read the value after each key."""
        for _ in self._iterate_separated("{", "}"):
            key = self.read_value()
            if not isinstance(key, str):
                raise ValueError("a key is not a string")
            self._expect_character(":")
            yield key

    def iterate_items(self) -> Iterator[object]:
        """Yield the values of the next array."""
        for _ in self._iterate_separated("[", "]"):
            yield self.read_value()

    def read_value(self) -> object:
        """Read the next JSON value and return it as a Python object."""
        self.peek_character()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._position)
            except json.JSONDecodeError:
                if not self._read_more():
                    raise
                continue
            if end < len(self._text) or not self._read_more():  # a number may continue
                self._position = end
                return value

    def peek_character(self) -> str:
        """Return the next character other than white space without reading it, or "" at the end."""
        while True:
            space = _WHITE_SPACE.match(self._text, self._position)
            self._position = space.end() if space else self._position
            if self._position < len(self._text):
                return self._text[self._position]
            if not self._read_more():
                return ""

    def require_end(self) -> None:
        """Raise if any text other than white space remains."""
        if self.peek_character():
            raise ValueError("extra data after the JSON text")

    def _iterate_separated(self, opening: str, closing: str) -> Iterator[None]:
        """Yield before each comma-separated item between the brackets *opening* and *closing*.

        The caller must read the item before the next iteration.
        """
        self._expect_character(opening)
        has_more = self.peek_character() != closing
        while has_more:
            yield
            has_more = self.peek_character() == ","
            if has_more:
                self._expect_character(",")
        self._expect_character(closing)

    def _expect_character(self, letter: str) -> None:
        if self.peek_character() != letter:
            raise ValueError(f"expected `{letter}`")
        self._position += 1

    def _read_more(self) -> bool:
        remaining = self._text[self._position :]
        if len(remaining) > MAX_VALUE_CHARACTERS:
            raise ValueError(f"a value has more than {MAX_VALUE_CHARACTERS:,} characters")
        chunk = self._file.read(max(CHUNK_CHARACTERS, len(remaining)))
        self._text, self._position = remaining + chunk, 0
        return bool(chunk)
