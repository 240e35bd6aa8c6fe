"""JSON as RFC 8259 has it, stricter than :mod:`json` where that module is lenient.

Refused: duplicate keys, NaN and infinities, numbers that overflow, lone surrogates, a byte order
mark, anything but UTF-8, and nesting that :mod:`json` cannot follow.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import NoReturn

from ckptctl.errors import DamagedError, UnsupportedError
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.stand_ins import require_content

MAX_BYTES = 100_000_000
MAX_DIGITS = 400
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_json(
    files: SourceFiles, name: str, max_bytes: int = MAX_BYTES, *, constants: bool = False
) -> object:
    """Return the value in the file *name*.

    Args:
        files: Files of the checkpoint.
        name: The one to read.
        max_bytes: Refuse longer ones.
        constants: As in :func:`loads`.

    Raises:
        DamagedError: It is cut off, or something else was put in its place.
        UnsupportedError: It is not strict JSON in another way, or larger than *max_bytes*.
        SourceNotFoundError: There is no such file.
        StorageError: The operating system failed the read.
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


def loads(
    data: bytes,
    *,
    where: str,
    max_bytes: int = MAX_BYTES,
    parse_int: Callable[[str], int] | None = None,
    constants: bool = False,
) -> object:
    """Return the value of a JSON text.

    Args:
        data: The text in UTF-8.
        where: The file, for errors.
        max_bytes: Refuse longer texts.
        parse_int: What makes an integer of its digits; it may raise ValueError.
        constants: Accept ``NaN``, ``Infinity`` and ``-Infinity``, which Python's own writer makes.
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
        what = "the JSON text is cut off" if kind is DamagedError else "malformed JSON"
        raise kind(what, where=where, why=_reason(error)) from error
    return found


def _is_cut(data: bytes, error: Exception) -> bool:
    """Return whether *data* ends before its value does: nothing is wrong with what is there."""
    text = data.rstrip()
    if isinstance(error, UnicodeDecodeError):
        return error.reason == "unexpected end of data"
    if not isinstance(error, json.JSONDecodeError):
        return False
    rest = error.doc[error.pos :].rstrip()
    open_ = error.msg.startswith("Unterminated string") and not text.endswith((b"}", b"]"))
    part = rest in (".", "-") or any(word.startswith(rest) for word in ("true", "false", "null"))
    return open_ or part or not rest.strip("\0")


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeEncodeError):
        return "a string holds half of a surrogate pair"
    if isinstance(error, RecursionError):
        return "it nests too deeply"
    return str(error)[:300]


def _check_size(size: int, limit: int, where: str) -> None:
    if size > limit:
        raise UnsupportedError(
            "the JSON text is too large", where=where, why=f"{size:,} bytes, limit {limit:,}"
        )


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key[:100]!r} occurs twice")
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
        raise ValueError(f"an integer has {len(text):,} digits")
    return int(text)
