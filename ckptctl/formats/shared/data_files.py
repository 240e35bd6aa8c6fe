"""Data files that an index names: all are there, and their parts lie side by side."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

from ckptctl.errors import DamagedError, SourceNotFoundError, UnsupportedError, listed
from ckptctl.storage.files import SourceFiles

UNCHECKED = "written without checksums"


class ByteRange(NamedTuple):
    """A byte range of a file.

    Attributes:
        file: The file.
        offset: First byte.
        nbytes: Length.
        name: What lies there.
    """

    file: str
    offset: int
    nbytes: int
    name: str


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
                f"the index has a wrong place for `{name}`",
                where=where,
                why=f"it begins at byte {offset:,} of `{file}`, what is before it ends at "
                f"{ends[file]:,}",
            )
        ends[file] += nbytes
    for file, end in ends.items():
        if end != sizes[file]:
            kind = DamagedError if end > sizes[file] else UnsupportedError
            raise kind(
                f"`{file}` is not what the index says",
                where=where,
                why=f"its parts end at byte {end:,}, it has {sizes[file]:,} bytes",
                hint="it is truncated, or of another save",
            )
