"""Files on their way to an fsspec file system: created, bounded in memory, and cut off at need."""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckptctl.errors import StorageError
from ckptctl.storage.remote.store import protocols

PART = 8 << 20
PARTS = 9000
"""S3 takes 10,000 parts of an object at most."""
PATIENCE = 5.0
"""Seconds that files on their way may take to end when all is given up."""


class Sending:
    """Uploads to one file system, from many threads.

    Args:
        system: The fsspec file system.
    """

    def __init__(self, system: Any) -> None:
        self._system = system
        self._on_the_way: set[Future[Any]] = set()
        self._changed = threading.Condition()
        self._count = 0
        self._over = False
        self._s3 = "s3fs" in sys.modules and "s3" in protocols(system)
        self._known = _parameters(system)

    def send(self, path: Path, place: str, *, create: bool) -> None:
        """Upload the file at *path*.

        Args:
            path: Where it is now.
            place: Its path there.
            create: Whether nothing may be there, as far as the file system can tell.

        Raises:
            FileExistsError: There is something.
            StorageError: All is given up.
        """
        options: dict[str, Any] = {"mode": "create"} if create and "mode" in self._known else {}
        if not create and "overwrite" in self._known:  # adlfs
            options["overwrite"] = True
        if self._s3:
            part = max(PART, -(-path.stat().st_size // PARTS))
            options |= {"chunksize": part, "max_concurrency": 2}
        with self._changed:
            if self._over:
                raise StorageError("the run is over")
            self._count += 1
            task = self._begin(str(path), place, options)
        try:
            task()
        finally:
            with self._changed:
                self._count -= 1
                self._changed.notify_all()

    def stop(self) -> None:
        """Cut off what is on its way, and let nothing begin any more."""
        with self._changed:
            self._over = True
            running = list(self._on_the_way)
        for one in running:
            one.cancel()
        with self._changed:
            self._changed.wait_for(lambda: not self._count, PATIENCE)

    def drop_parts(self, root: str, places: Collection[str]) -> None:
        """Have S3 forget the parts of files that were never completed, where it lets us.

        Args:
            root: The folder that all of them are in.
            places: Their paths.
        """
        if not self._s3:
            return
        bucket, prefix, _ = self._system.split_path(root)
        with suppress(Exception):
            found = self._system.call_s3(
                "list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/".lstrip("/")
            )
            for one in found.get("Uploads", ()):
                if f"{bucket}/{one['Key']}" in places:
                    self._system.abort_mpu(bucket, one["Key"], one["UploadId"])

    def _begin(self, path: str, place: str, options: dict[str, Any]) -> Callable[[], object]:
        """Return what waits for the upload, which can be cancelled where it is a coroutine."""
        from fsspec.asyn import AsyncFileSystem

        if not isinstance(self._system, AsyncFileSystem):
            return lambda: self._system.put_file(path, place, **options)
        coroutine = self._system._put_file(path, place, **options)
        future = asyncio.run_coroutine_threadsafe(coroutine, self._system.loop)
        self._on_the_way.add(future)
        future.add_done_callback(self._on_the_way.discard)
        return future.result


def _parameters(system: Any) -> frozenset[str]:
    """Return what its uploads may be told by name."""
    method = getattr(type(system), "_put_file", type(system).put_file)
    return frozenset(inspect.signature(method).parameters)
