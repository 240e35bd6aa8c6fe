"""Functions that parse and format sizes, counts, durations and times, and sort names naturally."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

from ckptctl.errors import UsageError

_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40, "PI": 2**50}
_PREFIXES = _DECIMAL | _BINARY
_SIZE_PATTERN = re.compile(r"\s*+(\d++(?:\.\d++)?)\s*+([KMGTP]I?)?B?\s*+", re.IGNORECASE | re.ASCII)
_DURATION_PATTERN = re.compile(r"\s*(\d{1,9}(?:\.\d+)?)\s*([smhdw])\s*", re.IGNORECASE | re.ASCII)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DIGITS = re.compile(r"([0-9]+)")
MAX_BYTES = 2**63 - 1
LATEST_SECONDS = 253_402_300_799.0
"""Last second of the year 9999 in UTC, in seconds since the Unix epoch."""

NaturalKey = tuple[tuple[int, int, str], ...]


def parse_bytes(text: str | int) -> int:
    """Parse a size, and return it in bytes.

    Args:
        text: Size with a decimal or binary unit, such as ``5GB`` (10^9 bytes each), ``4GiB`` (2^30
            bytes each), ``500M`` or ``1.5 kB``, or a number of bytes.

    Raises:
        UsageError: The text is not a size, or is zero or above 2^63 - 1.
    """
    match = _SIZE_PATTERN.fullmatch(str(text))
    value = 0
    if match and len(match[1]) <= 20:
        value = int(float(match[1]) * _PREFIXES[(match[2] or "").upper()])
        if "." not in match[1]:
            value = int(match[1]) * _PREFIXES[(match[2] or "").upper()]
    if not 0 < value <= MAX_BYTES:
        raise UsageError(
            f"`{escape_unprintable(str(text))}` is not a size; write it like `5GB` or `4GiB`"
        )
    return value


def parse_file_size(value: str | int) -> int:
    """Parse a maximum file size, and return it in bytes.

    A small number without a unit is an error, because the user probably meant GB.
    """
    if isinstance(value, str) and value.strip().isdecimal() and 0 < int(value) < 1 << 20:
        digits = value.strip()
        raise UsageError(
            f"files of {pluralize(int(digits), 'byte')} are too small",
            hint=f"did you mean `{digits}GB`? use `{digits}B` for bytes",
        )
    return parse_bytes(value)


def parse_seconds(text: str) -> float:
    """Parse a duration, and return it in seconds.

    Args:
        text: Number with a unit, such as ``90s``, ``30m``, ``12h``, ``7d`` or ``2w``.

    Raises:
        UsageError: The text is not a duration, or has an ``M``, which may mean months.
    """
    match = _DURATION_PATTERN.fullmatch(text)
    if match is None:
        raise UsageError(
            f"`{escape_unprintable(text)}` is not a duration; write it like `12h` or `7d`"
        )
    if match[2] == "M":
        minutes, months = f"`{match[1]}m` for minutes", f"`{float(match[1]) * 30:.15g}d` for months"
        raise UsageError(f"`{escape_unprintable(text)}` is ambiguous; write {minutes}, {months}")
    return float(match[1]) * _SECONDS[match[2].lower()]


def format_rfc3339(seconds: float) -> str:
    """Format a time as RFC 3339 in UTC, limited to the last second of the year 9999.

    *seconds* is the time since the Unix epoch.
    """
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(min(seconds, LATEST_SECONDS)))


def format_bytes(nbytes: int) -> str:
    """Format a size in binary units, such as ``512 B`` or ``15.0 GiB``."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1023.95 or unit == "TiB":
            break
        value /= 1024
    return f"{nbytes:,} B" if unit == "B" else f"{value:,.1f} {unit}"


def format_count(count: int) -> str:
    """Format *count* with three digits and a decimal prefix, such as ``8.03 B`` for 8.03e9."""
    value = float(count)
    for unit in ("", "K", "M", "B", "T"):
        if value < 999.5 or unit == "T":
            break
        value /= 1000
    if not unit:
        return str(count)
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{digits}f} {unit}"


def pluralize(count: int, singular: str, plural: str = "") -> str:
    """Format *count*, followed by *singular* or *plural*, whichever fits the number.

    Args:
        count: Number to format.
        singular: Words after the number 1, such as ``tensor`` or ``tensor is missing``.
        plural: Words after other numbers. If empty, *singular* with an appended *s* is used.
    """
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"


def format_seconds(seconds: float) -> str:
    """Format a duration in seconds, such as ``0.12 s``, ``3 min 05 s`` or ``1 h 02 min``."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def to_natural_key(name: str) -> NaturalKey:
    """Return a sort key under which ``layers.2`` comes before ``layers.10``."""
    return tuple(
        (0, len(digits), digits) if part.isdecimal() and part.isascii() else (1, 0, part)
        for part in _DIGITS.split(name)
        if part
        for digits in (part.lstrip("0"),)
    )


def sort_naturally(names: Iterable[str]) -> list[str]:
    """Sort *names* so that embedded numbers are in numeric order."""
    return sorted(names, key=lambda name: (to_natural_key(name), name))


def escape_unprintable(text: str) -> str:
    r"""Escape all characters of *text* that are not printable.

    Control characters, terminal escapes, line breaks, bidirectional overrides, zero-width
    characters and lone surrogates become ``\x1b``, ``\u202e`` and the like.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )
