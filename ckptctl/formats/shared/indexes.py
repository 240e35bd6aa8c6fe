"""Read index files of other programs, and check them against the data files that they list."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

from ckptctl.errors import DamagedError, SourceNotFoundError, UnsupportedError, quote_names
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.pickles.torch_tensors import MAX_INT, MAX_RANK
from ckptctl.storage.schema import MismatchError
from ckptctl.units import pluralize

Integers = tuple[int, ...]


class ByteRange(NamedTuple):
    """Byte range of a tensor in a file, according to an index."""

    file: str
    offset: int
    nbytes: int
    name: str


def read_metadata_file(files: SourceFiles, name: str, limit: int) -> bytes:
    """Read the metadata file *name*, or raise UnsupportedError if it exceeds *limit* bytes."""
    size = files.size(name)
    if size > limit:
        raise UnsupportedError(
            "the metadata is too large",
            where=str(files.root / name),
            why=f"{pluralize(size, 'byte')}, limit {limit:,}",
        )
    return files.read(name, 0, size)


def read_file_sizes(
    files: SourceFiles, names: Collection[str], noun: str, where: str, hint: str
) -> dict[str, int]:
    """Map the sorted file names *names* to sizes in bytes, or raise if a file is missing.

    *noun*, *where* and *hint* are used in the error.
    """
    sizes: dict[str, int] = {}
    for name in sorted(names):
        with suppress(SourceNotFoundError):
            sizes[name] = files.size(name)
    missing = sorted(name for name in names if name not in sizes)
    if missing:
        count = f"{len(missing):,} of {len(names):,}"
        raise DamagedError(
            f"{count} {noun} are missing", where=where, why=quote_names(missing), hint=hint
        )
    return sizes


def require_tiled_files(ranges: Iterable[ByteRange], sizes: Mapping[str, int], where: str) -> None:
    """Raise if *ranges* do not tile their files, whose *sizes* are in bytes, without gaps."""
    ends = dict.fromkeys(sizes, 0)
    names_by_range = {
        (byte_range.file, byte_range.offset, byte_range.nbytes): byte_range.name
        for byte_range in ranges
    }
    for (file, offset, nbytes), name in sorted(names_by_range.items()):
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
                f"{pluralize(sizes[file], 'byte')}",
                hint="restore the file (it is truncated or belongs to another save)",
            )


def parse_integers(value: object) -> Integers:
    """Convert a list or tuple of non-negative integers, such as a shape, to a tuple.

    Raises MismatchError for other values and for more than ``MAX_RANK`` integers. This is faster
    than :func:`ckptctl.storage.schema.read_as`.
    """
    if not isinstance(value, tuple | list) or len(value) > MAX_RANK:
        raise MismatchError(f"a list of at most {MAX_RANK} integers", value)
    for item in value:
        if type(item) is not int or not 0 <= item < MAX_INT:
            raise MismatchError("a non-negative integer", item)
    return tuple(value)
