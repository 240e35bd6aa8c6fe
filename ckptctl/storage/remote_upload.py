"""Where a finished output goes when its destination is a URL: an object store, or the Hub.

There is no rename of many objects in one step. On the Hub nothing is seen until the commit, which
is one step. Elsewhere what makes the files a checkpoint, its index, is uploaded last: who looks for
that never sees a part of one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from ckptctl.errors import RefusedError, SourceNotFoundError, StorageError
from ckptctl.storage import remote_mounts
from ckptctl.storage.remote_store import FsspecStore, make_folder, store_errors
from ckptctl.storage.urls import HUB, masked, scheme_of

PART = 8 << 20
PARTS = 9000
"""S3 takes 10,000 parts of an object at most."""


class Destination(Protocol):
    """A folder behind a URL that an output is written to."""

    def put(self, name: str, path: Path) -> None:
        """Upload a complete file."""

    def commit(self, names: Sequence[str]) -> None:
        """Make the files seen, all of which are uploaded."""

    def abandon(self) -> str:
        """Take back what can be, and say what is left."""


def open_destination(url: str, *, single: str | None, overwrite: bool) -> Destination:
    """Return the place that *url* names, which nothing may be in yet.

    Args:
        url: A folder; of a single file the folder that it is going to be in.
        single: The name of the only file.
        overwrite: Whether files of a checkpoint there may be replaced.

    Raises:
        RefusedError: There is something.
        UsageError: No file system for it is known or installed.
        StorageError: The place cannot be reached, or does not let us look.
    """
    url = remote_mounts.secret_of(url)
    if scheme_of(url) == HUB:
        from ckptctl.storage.remote_hub_upload import HubDestination

        return HubDestination(url, single=single, overwrite=overwrite)
    return FsspecDestination(url, single=single, overwrite=overwrite)


class FsspecDestination:
    """A folder of an fsspec file system; see :func:`open_destination`."""

    def __init__(self, url: str, *, single: str | None, overwrite: bool) -> None:
        self._url = url
        self._store = FsspecStore(url)
        self._single = single
        self._began: list[str] = []
        self._sizes: dict[str, int] = {}
        with suppress(SourceNotFoundError):
            there = [one.name for one in self._store.members("")]
            if single in there or (there and single is None):
                raise RefusedError(
                    "the destination exists",
                    where=masked(url) if single is None else f"{masked(url)}/{single}",
                    hint="objects cannot be replaced in one step: choose another one, or remove it"
                    if overwrite
                    else "choose another one",
                )

    def put(self, name: str, path: Path) -> None:
        """See :class:`Destination`."""
        system, place = self._store.system, f"{self._store.root}/{name}"
        with store_errors(self._url, name, "write"):
            self._began.append(place)
            make_folder(system, place.rpartition("/")[0])
            system.put_file(str(path), place, **self._options(path))
        self._sizes[name] = path.stat().st_size

    def commit(self, names: Sequence[str]) -> None:
        """Make sure that all files are there: the last ones made them a checkpoint."""
        self._store.refresh()
        mount = remote_mounts.Mount(self._store)
        others = mount.members("").keys() - {name.partition("/")[0] for name in names}
        if others and not self._single:
            raise StorageError(
                "another run writes to the same place",
                where=masked(self._url),
                why=f"`{min(others)}` is there, and is not of this run",
            )
        for name in names:
            found = mount.find(name)
            if found is None or found.size != self._sizes[name]:
                raise StorageError(
                    f"`{name}` was not uploaded whole",
                    where=masked(self._url),
                    why=f"it has {found.size if found else 0:,} of {self._sizes[name]:,} bytes",
                )

    def abandon(self) -> str:
        """See :class:`Destination`."""
        left = []
        for place in self._began:
            try:
                self._store.system.rm_file(place)
            except FileNotFoundError:
                continue
            except Exception:
                left.append(place)
        return f"{len(left)} files are left there" if left else "what was uploaded was removed"

    def _options(self, path: Path) -> dict[str, int]:
        """Return what bounds the memory of an upload, where the file system takes it."""
        if "s3fs" not in sys.modules or scheme_of(self._url) not in ("s3", "s3a"):
            return {}
        size = max(PART, -(-path.stat().st_size // PARTS))
        return {"chunksize": size, "max_concurrency": 2}
