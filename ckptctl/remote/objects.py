"""List, upload and remove the files of one remote output, by version.

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
from ckptctl.remote.conditions import is_precondition_failure, is_unsupported_condition
from ckptctl.remote.store import FsspecStore, make_tree_entry
from ckptctl.storage.writing import BUSY_MESSAGE, LOCK_NAME, UploadedFile

PART_BYTES = 8 << 20
MAX_PARTS = 9000
"""Maximum number of parts in a multipart upload. S3 allows 10,000."""
STOP_TIMEOUT_SECONDS = 5.0
"""Number of seconds to wait for running uploads to stop when the run is abandoned."""


class OccupiedError(StorageError):
    """The file to create or remove belongs to another run."""


class OutputObjects:
    """Remote files of one output, which are all files below a URL or only the file *single*."""

    def __init__(self, store: FsspecStore, single: str | None = None) -> None:
        self._store, self._single = store, single
        self._system = store.system
        self.lock_name = f".{single}{LOCK_NAME}" if single else LOCK_NAME
        self._multipart = store.is_s3 and "s3fs" in sys.modules
        self._running_uploads: set[Future[Any]] = set()
        self._changed = threading.Condition()
        self._upload_count = 0
        self._is_stopped = False

    def list_files(self) -> dict[str, UploadedFile]:
        """Return the size and version of each existing file by name, except the lock file."""
        self._store.refresh_listings()
        with self._store.translate_errors("", "list"):
            try:
                files = self._list_objects()
            except FileNotFoundError:
                return {}
        return {name: file for name, file in files.items() if not name.startswith(self.lock_name)}

    def has_lock(self) -> bool:
        """Return whether the lock file of this output exists, even if no run holds the lock."""
        with self._store.translate_errors(self.lock_name, "access"):
            self._store.refresh_listings()
            return bool(self._system.exists(self._store.resolve_path(self.lock_name)))

    def is_unchanged(
        self, name: str, expected: UploadedFile, files: Mapping[str, UploadedFile]
    ) -> bool:
        """Return whether the file *name* has the *expected* size and version.

        The store is queried again if the listing *files* differs from *expected*.
        """
        return name in files and (
            files[name] == expected or self._read_size_and_version(name) == expected
        )

    def send_file(self, name: str, path: Path, *, create: bool) -> UploadedFile:
        """Upload the file at *path* as *name*, and return its size and version.

        Raises:
            OccupiedError: The file exists already, and *create* is true.
            StorageError: The upload failed, or uploads were cancelled.
        """
        with self._store.translate_errors(name, "write"):
            self._store.make_folder(name.rpartition("/")[0])
            try:
                self._upload_file(path, self._store.resolve_path(name), create=create)
            except Exception as error:
                if not is_precondition_failure(error):
                    raise
                # After a lost response, the client retries and finds its own upload.
                if not self._has_content_of(self._store.resolve_path(name), path):
                    raise self._occupied_error(
                        f"`{name}` exists and does not belong to this run"
                    ) from error
        return self._read_size_and_version(name)

    def remove_files(
        self,
        names: Iterable[str],
        files: Mapping[str, UploadedFile],
        require_lock: Callable[[], None],
    ) -> None:
        """Remove files one by one, ignoring files that do not exist.

        Args:
            names: Files to remove, in order.
            files: Expected size and version of each file, for stores with conditional requests.
            require_lock: Function called before each removal, which raises if this run lost the
                lock.

        Raises:
            OccupiedError: A file has been overwritten by another run.
        """
        for name in names:
            require_lock()
            with self._store.translate_errors(name, "remove"), suppress(FileNotFoundError):
                self._remove_object(name, files.get(name))

    def cancel_uploads(self) -> None:
        """Cancel running uploads and reject new ones."""
        with self._changed:
            self._is_stopped = True
            running = list(self._running_uploads)
        for future in running:
            future.cancel()
        with self._changed:
            self._changed.wait_for(lambda: not self._upload_count, STOP_TIMEOUT_SECONDS)

    def abort_multipart_uploads(self, names: Collection[str] | None = None) -> None:
        """Abort incomplete multipart uploads on S3.

        Only uploads of the files *names* are aborted, or all uploads if *names* is None.
        """
        if not self._multipart:
            return
        paths = None if names is None else {self._store.resolve_path(name) for name in names}
        bucket, prefix, _ = self._system.split_path(self._store.root)
        with suppress(Exception):
            answer = self._system.call_s3(
                "list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/".lstrip("/")
            )
            for upload in answer.get("Uploads", ()):
                if paths is None or f"{bucket}/{upload['Key']}" in paths:
                    self._system.abort_mpu(bucket, upload["Key"], upload["UploadId"])

    def _read_size_and_version(self, name: str) -> UploadedFile:
        """Query the current size and version of the file *name*, without cached listings."""
        self._store.refresh_listings()
        with self._store.translate_errors(name, "access"):
            return _make_uploaded_file(self._system.info(self._store.resolve_path(name)))

    def _list_objects(self) -> dict[str, UploadedFile]:
        if self._single:
            return {
                self._single: _make_uploaded_file(
                    self._system.info(self._store.resolve_path(self._single))
                )
            }
        root = self._store.root.strip("/")
        listed = self._system.find(self._store.root, detail=True)
        return {
            path.strip("/").removeprefix(root).strip("/"): _make_uploaded_file(info)
            for path, info in listed.items()
        }

    def _upload_file(self, path: Path, target: str, *, create: bool) -> None:
        method = getattr(type(self._system), "_put_file", type(self._system).put_file)
        parameters = inspect.signature(method).parameters
        options: dict[str, Any] = {"mode": "create"} if create and "mode" in parameters else {}
        if "overwrite" in parameters:  # adlfs, which names no mode
            options = {"overwrite": not create}
        if self._multipart:
            part_bytes = max(PART_BYTES, -(-path.stat().st_size // MAX_PARTS))
            options |= {"chunksize": part_bytes, "max_concurrency": 2}
        with self._changed:
            if self._is_stopped:
                raise StorageError("the run has ended")
            self._upload_count += 1
            wait_for_upload = self._begin_upload(str(path), target, options)
        try:
            wait_for_upload()
        finally:
            with self._changed:
                self._upload_count -= 1
                self._changed.notify_all()

    def _begin_upload(
        self, path: str, target: str, options: dict[str, Any]
    ) -> Callable[[], object]:
        """Start an upload, and return a function that waits for its end.

        Uploads can only be cancelled on asynchronous file systems. On other file systems, the
        upload starts when the returned function is called.
        """
        from fsspec.asyn import AsyncFileSystem

        if not isinstance(self._system, AsyncFileSystem):
            return lambda: self._system.put_file(path, target, **options)
        coroutine = self._system._put_file(path, target, **options)
        future = asyncio.run_coroutine_threadsafe(coroutine, self._system.loop)
        self._running_uploads.add(future)
        future.add_done_callback(self._running_uploads.discard)
        return future.result

    def _has_content_of(self, target: str, path: Path) -> bool:
        """Return whether the object *target* has the same bytes as the local file *path*."""
        size = path.stat().st_size
        self._store.refresh_listings()
        if self._system.size(target) != size:
            return False
        with path.open("rb") as file:
            return all(
                self._system.cat_file(target, start=start, end=min(start + PART_BYTES, size))
                == file.read(PART_BYTES)
                for start in range(0, size, PART_BYTES)
            )

    def _remove_object(self, name: str, expected: UploadedFile | None) -> None:
        target = self._store.resolve_path(name)
        conditional_requests = self._store.conditional_requests
        if expected is None or conditional_requests is None:
            self._system.rm_file(target)
            return
        try:
            conditional_requests.remove_object(target, expected.version)
        except Exception as error:
            if is_precondition_failure(error):
                self._store.refresh_listings()
                if not self._system.exists(target):  # the response to the first try was lost
                    return
                raise self._occupied_error(f"`{name}` was overwritten") from error
            if not is_unsupported_condition(error):
                raise
            self._system.rm_file(target)

    def _occupied_error(self, why: str) -> OccupiedError:
        return OccupiedError(BUSY_MESSAGE, where=self._store.url, why=why)


def _make_uploaded_file(info: Mapping[str, Any]) -> UploadedFile:
    entry = make_tree_entry(info, "")
    return UploadedFile(entry.size, entry.version or str(entry.mtime_ns))
