"""What a place behind a URL answers: what is in a folder, and ranges of bytes of a file.

:class:`FsspecStore` asks any file system of fsspec, :class:`~ckptctl.storage.remote.hub.HubStore`
the Hugging Face Hub.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from ckptctl.errors import CkptError, UsageError
from ckptctl.storage.remote.errors import failure, raise_other
from ckptctl.storage.remote.retries import retried
from ckptctl.storage.remote.urls import (
    WEB,
    hide,
    install_hint,
    masked,
    normal,
    scheme_of,
    without_query,
)

VERSIONS = (
    "ETag",
    "etag",
    "sha256",
    "md5Hash",
    "crc32c",
    "generation",
    "VersionId",
    "version_id",
    "Last-Modified",
)
VERSION = "?versionId="
TIMES = ("LastModified", "mtime", "updated", "last_modified", "created")
NOISY = ("fsspec", "s3fs", "gcsfs", "adlfs", "asyncio")
BUCKETS = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci"})
"""File systems without folders."""
ITSELF = ""


@dataclass(frozen=True, slots=True)
class Stored:
    """A file or folder behind a URL.

    Attributes:
        name: Its name in its folder; :data:`ITSELF` where what was to be listed is a file.
        folder: Whether it is a folder.
        size: Bytes; -1: only the file itself tells.
        version: What changes when its content does, as far as the place tells.
        mtime_ns: When it was written, in nanoseconds since the epoch; 0: unknown.
        digest: SHA-256 of its content, or git's SHA-1 of a blob, where the place tells.
    """

    name: str
    folder: bool
    size: int = 0
    version: str = ""
    mtime_ns: int = 0
    digest: str | None = None

    @property
    def number(self) -> int:
        """Return the version as a number, to stand where a local file has its inode."""
        digest = hashlib.sha256(self.version.encode()).digest()
        return int.from_bytes(digest[:7], "big") if self.version else 0


class Store(Protocol):
    """One place behind a URL; safe to use from many threads."""

    url: str
    """As it may be shown."""

    def members(self, folder: str) -> list[Stored]:
        """Return what is directly in *folder*, which is relative to the URL; nothing: no folder."""

    def complete(self, name: str, found: Stored) -> Stored:
        """Return *found* with its size, where a listing does not tell."""

    def read(self, name: str, version: str, start: int, stop: int) -> bytes | bytearray:
        """Return the bytes of *name* in a range, fewer where the file ends."""

    def refresh(self) -> None:
        """Forget what was listed."""

    def above(self) -> Store | None:
        """Return the folder that it lies in; None: it is all there is."""


class FsspecStore:
    """A folder or file of an fsspec file system.

    Args:
        url: With whatever secrets it has.
        shown: The same, as it may be shown; None: without them.

    Attributes:
        url: As it may be shown.
        system: The file system.
        root: The path in it.
    """

    def __init__(self, url: str, shown: str | None = None) -> None:
        self.url = shown or masked(url)
        self._secret = url = normal(url)
        plain, self._query = without_query(url)
        self.system, self.root = system_of(plain)
        self._web = scheme_of(url) in WEB
        self._refuses = not self._web and "s3" in protocols(self.system)
        self.refresh()

    def members(self, folder: str) -> list[Stored]:
        """See :class:`Store`."""
        path = self._path(folder)
        with store_errors(self._secret, folder, "list", self.url):
            try:
                if self._web and not folder and not self._is_listing(path):
                    return [stored(self.system.info(path), ITSELF)]
                found = self.system.ls(path, detail=True)
            except (FileNotFoundError, NotADirectoryError) as error:
                raise_other(error)
                return []
        own = self.root + f"/{folder}" * bool(folder)
        return [one for entry in found if (one := _member(entry, own)) is not None]

    def complete(self, name: str, found: Stored) -> Stored:
        """See :class:`Store`."""
        with store_errors(self._secret, name, "look at", self.url):
            return stored(self.system.info(self._path(name)), found.name)

    def read(self, name: str, version: str, start: int, stop: int) -> bytes | bytearray:
        """See :class:`Store`."""
        with store_errors(self._secret, name, "read", self.url):
            if self._refuses and version:
                return retried(
                    lambda found: self._append_same(found, name, version, start, stop), self.url
                )
            if self._web:
                place = self._path(name)
                return retried(
                    lambda found: found.extend(self._read_web(place, start, stop)), self.url
                )
            return bytes(self.system.cat_file(self._path(name), start=start, end=stop))

    def refresh(self) -> None:
        """See :class:`Store`."""
        self.system.invalidate_cache()

    def above(self) -> FsspecStore | None:
        """See :class:`Store`."""
        plain, query = without_query(self._secret)
        url = plain.rstrip("/").rpartition("/")[0]
        shown = self.url.rstrip("/").rpartition("/")[0]
        return None if shown.endswith("/") else FsspecStore(url + query, shown)

    def _path(self, name: str) -> str:
        return (f"{self.root}/{name}" if name else str(self.root)) + self._query

    def _read_web(self, path: str, start: int, stop: int) -> bytes:
        """Return a range; unlike ``cat_file`` this notices servers that send everything."""
        with self.system.open(path, "rb", size=stop, cache_type="none") as file:
            file.seek(start)
            return bytes(file.read(stop - start))

    def _append_same(
        self, found: bytearray, name: str, version: str, start: int, stop: int
    ) -> None:
        """Append a range of one version of an object, which ``cat_file`` cannot ask S3 for."""
        from fsspec.asyn import sync

        bucket, key, number = self.system.split_path(self._path(name))
        asked = {"IfMatch": version, "Range": f"bytes={start + len(found)}-{stop - 1}"}
        asked |= {"VersionId": number} if number else {}
        answer = self.system.call_s3("get_object", Bucket=bucket, Key=key, **asked)
        try:
            found += sync(self.system.loop, answer["Body"].read)
        finally:
            answer["Body"].close()

    def _is_listing(self, path: str) -> bool:
        """Return whether a web address shows a page, which may be a listing, or is a file."""
        return str(self.system.info(path).get("mimetype", "")).startswith("text/html")


def system_of(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of *url*, and the path of it there.

    Raises:
        UsageError: There is none, or its package is not installed.
    """
    from fsspec.core import url_to_fs

    for name in NOISY:
        # What goes wrong is told by our own errors, not by a handler of last resort.
        logging.getLogger(name).addHandler(logging.NullHandler())
    scheme, shown, url = scheme_of(url), masked(url), normal(url)
    if "::" in url:
        raise UsageError("chained URLs are not read", where=shown, hint="name the place itself")
    if scheme in ("s3", "s3a") and VERSION in url:  # s3fs takes what stands before it for the key
        raise UsageError("a URL names no version of an object", where=shown)
    try:
        system, root = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UsageError(
            f"there is no file system for `{scheme}://`",
            where=shown,
            why=hide(str(error), url),
            hint=install_hint(scheme),
        ) from error
    except Exception as error:
        raise failure(error, url, "", "reach") from error
    return system, str(root).rstrip("/")


def make_folder(system: Any, path: str) -> None:
    """Make a folder where there are folders; an object store would make a bucket of its first part.

    Args:
        system: The fsspec file system.
        path: The folder in it.
    """
    if not protocols(system) & BUCKETS:
        system.makedirs(path, exist_ok=True)


def protocols(system: Any) -> set[str]:
    """Return the schemes that an fsspec file system is for."""
    return {system.protocol} if isinstance(system.protocol, str) else {*system.protocol}


def stored(info: Mapping[str, Any], name: str) -> Stored:
    """Return what fsspec's *info* says."""
    size = info.get("size")
    version = next((str(info[key]) for key in VERSIONS if info.get(key)), "")
    return Stored(
        name,
        info.get("type") == "directory",
        -1 if size is None else int(size),
        version,
        next((time for key in TIMES if (time := _nanoseconds(info.get(key)))), 0),
    )


@contextmanager
def store_errors(url: str, name: str, what: str, shown: str | None = None) -> Iterator[None]:
    """Turn whatever file systems raise into errors of ours.

    Args:
        url: The place; what is secret in it is in no error.
        name: What is worked on there; empty: the place itself.
        what: What is done with it, as in ``list``.
        shown: The place, as it is shown; None: without what is secret.

    Raises:
        SourceNotFoundError: It is not there.
        UsageError: A package is missing.
        StorageError: It failed otherwise.
    """
    try:
        yield
    except CkptError:
        raise
    except Exception as error:
        found = failure(error, url, name, what)
        found.where = shown or found.where
        raise found from error


def _member(entry: Mapping[str, Any], folder: str) -> Stored | None:
    """Return what an entry of a listing says; None: it is the folder's own, or a link elsewhere."""
    full = str(entry["name"])
    name = full.rstrip("/").rpartition("/")[2]
    if full.strip("/") == folder.strip("/"):
        return stored(entry, ITSELF) if entry.get("type") == "file" and full[-1] != "/" else None
    return None if not name or name in (".", "..") or "?" in name else stored(entry, name)


def _nanoseconds(time: object) -> int:
    if isinstance(time, datetime):
        return int(time.timestamp() * 1e9)
    if isinstance(time, str):
        try:
            return int(datetime.fromisoformat(time).timestamp() * 1e9)
        except ValueError:
            return 0
    return int(time * 1e9) if isinstance(time, int | float) else 0
