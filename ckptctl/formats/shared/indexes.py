"""Indexes of foreign formats: their fields, and the data files that they name."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NamedTuple

from ckptctl.errors import DamagedError, SourceNotFoundError, UnsupportedError, listed
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.pickles.inert import Inert
from ckptctl.storage.pickles.torch_tensors import MAX_INT, MAX_RANK
from ckptctl.units import counted

Integers = tuple[int, ...]


class ByteRange(NamedTuple):
    """A byte range of a file."""

    file: str
    offset: int
    nbytes: int
    name: str


def read_whole(files: SourceFiles, name: str, limit: int) -> bytes:
    """Return the content of a file of metadata."""
    size = files.size(name)
    if size > limit:
        raise UnsupportedError(
            "the metadata is too large",
            where=str(files.root / name),
            why=f"{counted(size, 'byte')}, limit {limit:,}",
        )
    return files.read(name, 0, size)


def sizes_of(
    files: SourceFiles, names: Collection[str], what: str, where: str, hint: str
) -> dict[str, int]:
    """Return the sizes in bytes of files that have to be there, by name, in order."""
    sizes: dict[str, int] = {}
    for name in sorted(names):
        with suppress(SourceNotFoundError):
            sizes[name] = files.size(name)
    missing = sorted(name for name in names if name not in sizes)
    if missing:
        count = f"{len(missing):,} of {len(names):,}"
        raise DamagedError(
            f"{count} {what} are missing", where=where, why=listed(missing), hint=hint
        )
    return sizes


def require_tiled(ranges: Iterable[ByteRange], sizes: Mapping[str, int], where: str) -> None:
    """Check that *ranges* lie in their files one after the other, from first byte to last."""
    ends = dict.fromkeys(sizes, 0)
    named = {(one.file, one.offset, one.nbytes): one.name for one in ranges}
    for (file, offset, nbytes), name in sorted(named.items()):
        if offset != ends[file]:
            raise UnsupportedError(
                f"the index contains a wrong position for `{name}`",
                where=where,
                why=f"it starts at byte {offset:,} of `{file}`, but the previous part ends at "
                f"{ends[file]:,}",
            )
        ends[file] += nbytes
    for file, end in ends.items():
        if end != sizes[file]:
            kind = DamagedError if end > sizes[file] else UnsupportedError
            raise kind(
                f"`{file}` does not match the index",
                where=where,
                why=f"its parts end at byte {end:,}, but the file has "
                f"{counted(sizes[file], 'byte')}",
                hint="restore the file (it is truncated or belongs to another save)",
            )


def attributes(record: object) -> Mapping[str, object]:
    """Return the attributes of an inert record, from its dict or its slots."""
    state = record.state if isinstance(record, Inert) else record
    if isinstance(state, tuple) and len(state) == 2:
        state = {**(state[0] or {}), **(state[1] or {})}
    if not isinstance(state, dict):
        raise TypeError(f"a {type(record).__name__} has no attributes")
    return state


def mapping(value: object) -> dict[object, object]:
    """Return a dictionary."""
    if not isinstance(value, dict):
        raise TypeError(f"expected a dict, found {type(value).__name__}")
    return value


def integers(value: object) -> Integers:
    """Return a short sequence of numbers from 0 on."""
    if not isinstance(value, tuple | list) or len(value) > MAX_RANK:
        raise TypeError("a size is not a short sequence")
    if any(type(item) is not int or not 0 <= item < MAX_INT for item in value):
        raise TypeError("a size contains other values than non-negative integers")
    return tuple(value)


@contextmanager
def malformed(what: str, where: str, hint: str | None = None) -> Iterator[None]:
    """Turn what goes wrong while fields are taken out of foreign data into one error."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise UnsupportedError(what, where=where, why=why, hint=hint) from error
