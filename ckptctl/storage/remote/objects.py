"""The files of one output behind a URL: which are there, in which version, sent and removed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ckptctl.errors import StorageError
from ckptctl.storage.remote.lock_object import is_taken, knows_no_conditions
from ckptctl.storage.remote.sending import PART, Sending
from ckptctl.storage.remote.store import (
    make_folder,
    protocols,
    store_errors,
    stored,
    system_of,
)
from ckptctl.storage.remote.urls import masked
from ckptctl.storage.remote.writing import BUSY, NAME


class OccupiedError(StorageError):
    """There is a file of somebody else's where one was to be created, or removed."""


class Found(NamedTuple):
    """A file that is there.

    Attributes:
        size: Bytes.
        version: What the store calls its content; else when it was written.
    """

    size: int
    version: str


class Objects:
    """The files below a URL, or the one of them that is meant.

    Args:
        url: The folder, with whatever secrets it has.
        single: The name of the only file; None: all in the folder.

    Attributes:
        url: The same.
        system: The fsspec file system.
        root: The path of the folder there.
        lock: The name of the lock of what is meant.
    """

    def __init__(self, url: str, single: str | None) -> None:
        self.url, self._single = url, single
        self.system, self.root = system_of(url)
        self.lock = f".{single}{NAME}" if single else NAME
        self._sending = Sending(self.system)

    def look(self) -> dict[str, Found]:
        """Return what is there, the lock apart, by name."""
        self.system.invalidate_cache()
        with store_errors(self.url, "", "list"):
            try:
                listed = self._listed()
            except FileNotFoundError:
                return {}
        return {name: one for name, one in listed.items() if not name.startswith(self.lock)}

    def has_lock(self) -> bool:
        """Return whether somebody has, or had, the lock."""
        with store_errors(self.url, self.lock, "look at"):
            self.system.invalidate_cache()
            return bool(self.system.exists(self.place(self.lock)))

    def is_same(self, name: str, expected: Found, found: Mapping[str, Found]) -> bool:
        """Return whether *found*, which :meth:`look` returned, has *name* as it is expected."""
        return name in found and (found[name] == expected or self.ask(name) == expected)

    def ask(self, name: str) -> Found:
        """Return what is known of one file; another version than :meth:`look` says is possible.

        Raises:
            SourceNotFoundError: It is not there.
        """
        self.system.invalidate_cache()
        with store_errors(self.url, name, "look at"):
            return _found(self.system.info(self.place(name)))

    def send(self, name: str, path: Path, *, create: bool) -> Found:
        """Upload the file at *path*, and return what is there then.

        Args:
            name: Its name there.
            path: Where it is now.
            create: Whether nothing may be there.

        Raises:
            OccupiedError: There is something.
            StorageError: It cannot be written.
        """
        place = self.place(name)
        with store_errors(self.url, name, "write"):
            make_folder(self.system, place.rpartition("/")[0])
            try:
                self._sending.send(path, place, create=create)
            except Exception as error:
                if not is_taken(error):
                    raise
                # Of an answer that is lost the client asks again, and finds what it sent itself.
                if not self._holds(place, path):
                    why = f"`{name}` is there, and is not of this run"
                    raise OccupiedError(BUSY, where=masked(self.url), why=why) from error
        return self.ask(name)

    def remove(
        self, names: Iterable[str], found: Mapping[str, Found], still: Callable[[], None]
    ) -> None:
        """Remove files, one after the other; those that are not there count as removed.

        Args:
            names: What they are called.
            found: What they were when that was decided; S3 removes no others.
            still: Called before each; raises if nothing may be removed any more.

        Raises:
            OccupiedError: One is another one by now.
        """
        for name in names:
            still()
            with store_errors(self.url, name, "remove"), suppress(FileNotFoundError):
                self._remove(name, found.get(name))

    def stop(self) -> None:
        """Cut off what is being sent; nothing is sent from then on."""
        self._sending.stop()

    def drop_parts(self, names: Collection[str]) -> None:
        """Have the store forget parts of files that never became one."""
        self._sending.drop_parts(self.root, {self.place(name) for name in names})

    def place(self, name: str) -> str:
        """Return the path of a file in the file system."""
        return f"{self.root}/{name}"

    def _remove(self, name: str, found: Found | None) -> None:
        place = self.place(name)
        if found is None or "s3" not in protocols(self.system):
            self.system.rm_file(place)
            return
        bucket, key, _ = self.system.split_path(place)
        try:
            self.system.call_s3("delete_object", Bucket=bucket, Key=key, IfMatch=found.version)
        except Exception as error:
            if is_taken(error):
                why = f"`{name}` was written again"
                raise OccupiedError(BUSY, where=masked(self.url), why=why) from error
            if not knows_no_conditions(error):
                raise
            self.system.rm_file(place)

    def _listed(self) -> dict[str, Found]:
        if self._single:
            return {self._single: _found(self.system.info(self.place(self._single)))}
        root = self.root.strip("/")
        listed = self.system.find(self.root, detail=True)
        return {
            path.strip("/").removeprefix(root).strip("/"): _found(info)
            for path, info in listed.items()
        }

    def _holds(self, place: str, path: Path) -> bool:
        """Return whether what is at *place* has the content of the file at *path*."""
        size = path.stat().st_size
        self.system.invalidate_cache()
        if self.system.size(place) != size:
            return False
        with path.open("rb") as file:
            return all(
                self.system.cat_file(place, start=start, end=min(start + PART, size))
                == file.read(PART)
                for start in range(0, size, PART)
            )


def _found(info: Mapping[str, Any]) -> Found:
    one = stored(info, "")
    return Found(one.size, one.version or str(one.mtime_ns))
