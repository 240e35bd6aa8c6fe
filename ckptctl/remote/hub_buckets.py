"""Read and write files in storage buckets of the Hugging Face Hub.

URLs are ``hf://buckets/ORG/NAME[/PATH]``, as for ``HfFileSystem``. A bucket is an object store: it
has no commits and no conditional requests, and files are replaced and removed by path. All requests
go through huggingface_hub. Its ``HfFileSystem`` is not used, because it answers questions about a
file from cached listings, which would make locks unsafe, and copies each file before the upload.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.spec import AbstractBufferedFile

from ckptctl.errors import ChangedError, SourceNotFoundError, UsageError
from ckptctl.remote.hub import SILENCED_PROGRESS, append_range, translate_hub_errors
from ckptctl.remote.retries import call_with_retries, read_with_retries
from ckptctl.remote.store import HUB_BUCKET_SCHEME, FsspecStore
from ckptctl.storage.urls import HUB_BUCKET_PREFIX, mask_secrets
from ckptctl.version import __version__

BUCKET_URL_HINT = f"write {HUB_BUCKET_PREFIX}ORG/NAME or {HUB_BUCKET_PREFIX}ORG/NAME/FOLDER"
MISSING_BUCKET_HINT = (
    "create it with `hf buckets create`, or log in with `hf auth login` (required for private ones)"
)


class HubBucketStore(FsspecStore):
    """Store for a folder or file in a bucket of the Hub. Listings are never cached."""

    def __init__(self, url: str, shown_url: str | None = None) -> None:
        require_bucket(url)
        super().__init__(url, shown_url)

    def find_parent(self) -> FsspecStore | None:
        """See :class:`~ckptctl.remote.store.FsspecStore`. Nothing is above a bucket."""
        is_bucket = self.url.rstrip("/")[len(HUB_BUCKET_PREFIX) :].count("/") < 2
        return None if is_bucket else super().find_parent()

    def read_range(self, name: str, version: str, start: int, stop: int) -> bytes | bytearray:
        """See :class:`~ckptctl.remote.store.Store`. Raises if the file was replaced."""
        path = self.resolve_path(name)

        def append(data: bytearray) -> None:
            xet_hash = self.system.append_range(data, path, self.url, start, stop)
            if version and xet_hash and xet_hash != version:
                raise ChangedError(self.url, name, "another file has replaced it")

        with self.translate_errors(name, "read"):
            return read_with_retries(append, self.url)

    @contextmanager
    def translate_errors(self, name: str, action: str) -> Iterator[None]:
        """See :meth:`FsspecStore.translate_errors <ckptctl.remote.store.FsspecStore>`."""
        subject = f"`{name}`" if name else "the bucket"
        with translate_hub_errors(self.url, f"{action} {subject}", MISSING_BUCKET_HINT):
            try:
                yield
            except FileNotFoundError as error:
                message = f"`{name}` is missing" if name else "not found"
                raise SourceNotFoundError(message, where=self.url) from error


class HubBucketFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """fsspec file system of all buckets, with paths ``ORG/NAME/PATH`` and without any cache."""

    protocol = HUB_BUCKET_SCHEME
    cachable = False

    def __init__(self) -> None:
        from huggingface_hub import HfApi

        super().__init__()
        self._api: Any = HfApi(library_name="ckptctl", library_version=__version__)

    def ls(self, path: str, detail: bool = True, **_: object) -> list[Any]:
        """List a folder, or the file at *path*."""
        entries: dict[str, dict[str, Any]] = {}
        prefix = f"{path}/"
        for entry in self._iterate_tree(path, recursive=False):
            head, is_nested, _tail = entry["name"].removeprefix(prefix).partition("/")
            is_folder = bool(is_nested) or entry["type"] == "directory"
            name = entry["name"] if entry["name"] == path else prefix + head
            entries[name] = _make_folder(name) if is_folder else entry
        if not entries and path.count("/") > 1:
            raise FileNotFoundError(path)
        return list(entries.values()) if detail else list(entries)

    def find(self, path: str, detail: bool = False, **_: object) -> Any:
        """List all files below *path*."""
        files = {
            entry["name"]: entry
            for entry in self._iterate_tree(path, recursive=True)
            if entry["type"] == "file"
        }
        return files if detail else list(files)

    def info(self, path: str, **_: object) -> dict[str, Any]:
        """Return size, version and time of a file, or the kind of a folder."""
        bucket, name = _split_path(path)
        if name:
            listed = self._retry(lambda: list(self._api.get_bucket_paths_info(bucket, [name])))
            for entry in listed:
                if entry.path == name and getattr(entry, "type", "file") == "file":
                    return _make_info(bucket, entry)
        self.ls(path)  # raises if it does not exist
        return _make_folder(path)

    def exists(self, path: str, **_: object) -> bool:
        """Return whether a file or folder exists. Unlike fsspec's method, raise other errors."""
        try:
            self.info(path)
        except FileNotFoundError:
            return False
        return True

    def append_range(
        self, data: bytearray, path: str, shown_url: str, start: int, stop: int
    ) -> str | None:
        """See :func:`ckptctl.remote.hub.append_range`."""
        from urllib.parse import quote

        from huggingface_hub import constants
        from huggingface_hub.errors import EntryNotFoundError

        bucket, name = _split_path(path)
        url = f"{constants.ENDPOINT}/buckets/{bucket}/resolve/{quote(name)}"
        try:
            return append_range(data, url, name, shown_url, start, stop)
        except EntryNotFoundError as error:
            raise FileNotFoundError(path) from error

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: object
    ) -> bytes:
        """Read a file, or a part of it."""
        size = int(self.info(path)["size"])
        first, last = start or 0, size if end is None else min(end, size)
        if first >= last:
            return b""
        return bytes(
            read_with_retries(lambda data: self.append_range(data, path, path, first, last), path)
        )

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: object) -> None:
        """Write a file. With the mode ``create``, raise if it exists."""
        self._add(bytes(value), path, mode)

    def put_file(self, lpath: str, rpath: str, mode: str = "overwrite", **_: object) -> None:
        """Upload a local file. With the mode ``create``, raise if *rpath* exists."""
        self._add(lpath, rpath, mode)

    def rm_file(self, path: str) -> None:
        """Remove a file."""
        from huggingface_hub.errors import BucketBatchError

        bucket, name = _split_path(path)
        try:
            self._retry(lambda: self._api.batch_bucket_files(bucket, delete=[name]))
        except BucketBatchError:
            self.info(path)  # raises if it was missing
            raise

    def _open(self, path: str, mode: str = "rb", **_: object) -> Any:
        if mode == "rb":
            raise NotImplementedError("files are read by range")
        if mode == "xb" and self.exists(path):
            raise FileExistsError(path)
        return _NewFile(self, path, mode)

    def _add(self, content: bytes | str, path: str, mode: str) -> None:
        bucket, name = _split_path(path)
        if mode == "create" and self.exists(path):
            raise FileExistsError(path)
        with SILENCED_PROGRESS:
            self._retry(lambda: self._api.batch_bucket_files(bucket, add=[(content, name)]))

    def _iterate_tree(self, path: str, *, recursive: bool) -> Iterator[dict[str, Any]]:
        bucket, name = _split_path(path)
        listed = self._retry(
            lambda: list(self._api.list_bucket_tree(bucket, name or None, recursive=recursive))
        )
        for entry in listed:
            # The Hub also lists names that only begin with the same letters.
            if not name or entry.path == name or entry.path.startswith(f"{name}/"):
                yield _make_info(bucket, entry)

    def _retry(self, request: Any) -> Any:
        return call_with_retries(request, "the Hub")


class _NewFile(AbstractBufferedFile):  # type: ignore[misc]
    """File that is written to a temporary local file, and uploaded when it is closed."""

    def _initiate_upload(self) -> None:
        self._local_file = tempfile.NamedTemporaryFile(prefix="ckptctl-")  # noqa: SIM115

    def _upload_chunk(self, final: bool = False) -> None:
        self._local_file.write(self.buffer.getbuffer())
        if final:
            with self._local_file:
                self._local_file.flush()
                self.fs.put_file(self._local_file.name, self.path)

    def discard(self) -> None:
        """Drop what was written."""
        if self.offset is not None:  # some of it is in the local file
            self._local_file.close()


def require_bucket(url: str) -> None:
    """Raise unless *url* names a bucket or a path in one."""
    organization, *names = url[len(HUB_BUCKET_PREFIX) :].strip("/").split("/")
    if not organization or not names or "@" in names[0]:
        raise UsageError(
            "this is not a bucket of the Hub", where=mask_secrets(url), hint=BUCKET_URL_HINT
        )


def _split_path(path: str) -> tuple[str, str]:
    organization, _, rest = path.strip("/").partition("/")
    name, _, inside = rest.partition("/")
    return f"{organization}/{name}", inside


def _make_folder(path: str) -> dict[str, Any]:
    return {"name": path, "size": 0, "type": "directory"}


def _make_info(bucket: str, entry: Any) -> dict[str, Any]:
    path = f"{bucket}/{entry.path}"
    if entry.type == "directory":
        return _make_folder(path)
    # A rewrite with equal content changes `mtime`, which the client sets, for certain.
    times = [time for time in (entry.mtime, entry.uploaded_at) if isinstance(time, datetime)]
    return {
        "name": path,
        "size": entry.size,
        "type": "file",
        "etag": entry.xet_hash,
        "mtime": max(times, default=None),
    }
