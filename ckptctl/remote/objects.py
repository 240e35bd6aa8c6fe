"""The files of one remote output: list, upload and remove them by version.

Uploads from many threads use bounded memory and are cancelled when the run is abandoned.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckptctl.errors import StorageError
from ckptctl.remote.conditions import is_taken, knows_no_conditions
from ckptctl.remote.store import FsspecStore, entry_of
from ckptctl.storage.writing import BUSY_MESSAGE, LOCK_NAME, UploadedFile

PART = 8 << 20
PARTS = 9000
"""Most parts of a multipart upload; S3 allows 10,000."""
PATIENCE = 5.0
"""Seconds to wait for running uploads when the run is abandoned."""


class OccupiedError(StorageError):
    """A file to create or remove belongs to another run."""


class Objects:
    """The files below a URL, or a single one of them."""

    def __init__(self, store: FsspecStore, single: str | None = None) -> None:
        self._store, self._single = store, single
        self._system = store.system
        self.lock = f".{single}{LOCK_NAME}" if single else LOCK_NAME
        self._multipart = store.is_s3 and "s3fs" in sys.modules
        self._on_the_way: set[Future[Any]] = set()
        self._changed = threading.Condition()
        self._sending = 0
        self._over = False

    def look(self) -> dict[str, UploadedFile]:
        """Map the names of all existing files, except the lock, to their sizes and versions."""
        self._store.refresh()
        with self._store.errors("", "list"):
            try:
                listed = self._listed()
            except FileNotFoundError:
                return {}
        return {name: file for name, file in listed.items() if not name.startswith(self.lock)}

    def has_lock(self) -> bool:
        """Return whether a lock file exists, with or without a holder."""
        with self._store.errors(self.lock, "access"):
            self._store.refresh()
            return bool(self._system.exists(self._store.path(self.lock)))

    def is_same(self, name: str, expected: UploadedFile, found: Mapping[str, UploadedFile]) -> bool:
        """Return whether *name* is as expected in *found*, or else by a new request."""
        return name in found and (found[name] == expected or self._ask(name) == expected)

    def send(self, name: str, path: Path, *, create: bool) -> UploadedFile:
        """Upload the file at *path*, and return its size and version.

        Raises:
            OccupiedError: The file exists already.
            StorageError: The upload failed or was cancelled.
        """
        with self._store.errors(name, "write"):
            self._store.make_folder(name.rpartition("/")[0])
            try:
                self._send(path, self._store.path(name), create=create)
            except Exception as error:
                if not is_taken(error):
                    raise
                # After a lost response, the client retries and finds its own upload.
                if not self._holds(self._store.path(name), path):
                    raise self._occupied(
                        f"`{name}` exists and does not belong to this run"
                    ) from error
        return self._ask(name)

    def remove(
        self, names: Iterable[str], found: Mapping[str, UploadedFile], still: Callable[[], None]
    ) -> None:
        """Remove files one by one, skipping missing ones.

        Raises:
            OccupiedError: A file has been overwritten by another run.
        """
        for name in names:
            still()
            with self._store.errors(name, "remove"), suppress(FileNotFoundError):
                self._remove(name, found.get(name))

    def stop(self) -> None:
        """Cancel running uploads and reject new ones."""
        with self._changed:
            self._over = True
            running = list(self._on_the_way)
        for future in running:
            future.cancel()
        with self._changed:
            self._changed.wait_for(lambda: not self._sending, PATIENCE)

    def drop_parts(self, names: Collection[str] | None = None) -> None:
        """Abort incomplete multipart uploads on S3, of *names* or, if None, of all files."""
        if not self._multipart:
            return
        places = None if names is None else {self._store.path(name) for name in names}
        bucket, prefix, _ = self._system.split_path(self._store.root)
        with suppress(Exception):
            answer = self._system.call_s3(
                "list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/".lstrip("/")
            )
            for upload in answer.get("Uploads", ()):
                if places is None or f"{bucket}/{upload['Key']}" in places:
                    self._system.abort_mpu(bucket, upload["Key"], upload["UploadId"])

    def _ask(self, name: str) -> UploadedFile:
        """Return the current size and version of one file, which may differ from a listing."""
        self._store.refresh()
        with self._store.errors(name, "access"):
            return _found(self._system.info(self._store.path(name)))

    def _listed(self) -> dict[str, UploadedFile]:
        if self._single:
            return {self._single: _found(self._system.info(self._store.path(self._single)))}
        root = self._store.root.strip("/")
        listed = self._system.find(self._store.root, detail=True)
        return {
            path.strip("/").removeprefix(root).strip("/"): _found(info)
            for path, info in listed.items()
        }

    def _send(self, path: Path, place: str, *, create: bool) -> None:
        method = getattr(type(self._system), "_put_file", type(self._system).put_file)
        known = inspect.signature(method).parameters
        options: dict[str, Any] = {"mode": "create"} if create and "mode" in known else {}
        if "overwrite" in known:  # adlfs, which names no mode
            options = {"overwrite": not create}
        if self._multipart:
            part = max(PART, -(-path.stat().st_size // PARTS))
            options |= {"chunksize": part, "max_concurrency": 2}
        with self._changed:
            if self._over:
                raise StorageError("the run has ended")
            self._sending += 1
            task = self._begin(str(path), place, options)
        try:
            task()
        finally:
            with self._changed:
                self._sending -= 1
                self._changed.notify_all()

    def _begin(self, path: str, place: str, options: dict[str, Any]) -> Callable[[], object]:
        """Start an upload, cancellable if asynchronous, and return a function that waits for it."""
        from fsspec.asyn import AsyncFileSystem

        if not isinstance(self._system, AsyncFileSystem):
            return lambda: self._system.put_file(path, place, **options)
        coroutine = self._system._put_file(path, place, **options)
        future = asyncio.run_coroutine_threadsafe(coroutine, self._system.loop)
        self._on_the_way.add(future)
        future.add_done_callback(self._on_the_way.discard)
        return future.result

    def _holds(self, place: str, path: Path) -> bool:
        """Return whether the object at *place* has the same content as the file at *path*."""
        size = path.stat().st_size
        self._store.refresh()
        if self._system.size(place) != size:
            return False
        with path.open("rb") as file:
            return all(
                self._system.cat_file(place, start=start, end=min(start + PART, size))
                == file.read(PART)
                for start in range(0, size, PART)
            )

    def _remove(self, name: str, found: UploadedFile | None) -> None:
        place = self._store.path(name)
        versions = self._store.versions
        if found is None or versions is None:
            self._system.rm_file(place)
            return
        try:
            versions.remove(place, found.version)
        except Exception as error:
            if is_taken(error):
                self._store.refresh()
                if not self._system.exists(place):  # the response to the first try was lost
                    return
                raise self._occupied(f"`{name}` was overwritten") from error
            if not knows_no_conditions(error):
                raise
            self._system.rm_file(place)

    def _occupied(self, why: str) -> OccupiedError:
        return OccupiedError(BUSY_MESSAGE, where=self._store.url, why=why)


def _found(info: Mapping[str, Any]) -> UploadedFile:
    entry = entry_of(info, "")
    return UploadedFile(entry.size, entry.version or str(entry.mtime_ns))
