"""Remote stores: list folders, read byte ranges, write small files.

:class:`FsspecStore` uses any fsspec file system, :class:`~ckptctl.remote.hub.HubStore` the Hugging
Face Hub. Exceptions of file systems are converted to `CkptError`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import IO, Any, Protocol, cast

from ckptctl.errors import (
    ChangedError,
    CkptError,
    SourceNotFoundError,
    StorageError,
    UsageError,
)
from ckptctl.remote.conditions import (
    UNKNOWN,
    Versions,
    code_of,
    is_taken,
    knows_no_conditions,
    status_of,
    versions_of,
)
from ckptctl.remote.retries import retried
from ckptctl.storage.urls import (
    WEB_SCHEMES,
    hide_secrets,
    install_hint,
    mask_secrets,
    normalize_scheme,
    parse_scheme,
    split_query,
)
from ckptctl.storage.writing import BUSY_MESSAGE
from ckptctl.tree import TreeEntry

VERSIONS = (
    "ETag",
    "generation",
    "etag",
    "sha256",
    "md5Hash",
    "crc32c",
    "VersionId",
    "version_id",
    "Last-Modified",
)
VERSION = "?versionId="
TIMES = ("LastModified", "mtime", "updated", "last_modified", "created")
NOISY = ("fsspec", "s3fs", "gcsfs", "adlfs", "azure", "asyncio")
BUCKETS = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci"})
"""Schemes of object stores, which have no folders."""
ITSELF = ""
CREDENTIALS = "check the credentials and their permissions"
NETWORK = "check the URL, the network and the configured endpoint"
DENIED = (401, 403)
FORBIDDEN = "Forbidden: "
"""Prefix of gcsfs's OSError for status 403, which has no status attribute."""
REPLACED = ("PreconditionFailed", "412")
"""Error codes of S3 if the version of an object does not match."""


class Store(Protocol):
    """A thread-safe remote folder or file."""

    url: str
    """The URL without secrets."""

    def members(self, folder: str) -> list[TreeEntry]:
        """List the entries of *folder*, relative to the URL, or none if there is no such folder."""

    def complete(self, name: str, found: TreeEntry) -> TreeEntry:
        """Return the entry with its size, for stores whose listings have none."""
        del name
        return found

    def read(self, name: str, version: str, start: int, stop: int) -> bytes | bytearray:
        """Read a byte range of *name*, shorter at the end of the file."""

    def refresh(self) -> None:
        """Drop cached listings, if there are any."""
        return

    def above(self) -> Store | None:
        """Return the parent folder, or None at the root of the store."""


class FsspecStore:
    """A folder or file of an fsspec file system.

    Attributes:
        url: The URL without secrets.
        system: The fsspec file system.
        root: Path in the file system.
        is_s3: Whether it is an S3 file system.
        has_folders: Whether the file system has folders; object stores do not.
    """

    def __init__(self, url: str, shown: str | None = None) -> None:
        self.url = shown or mask_secrets(url)
        self._secret = url = normalize_scheme(url)
        plain, self._query = split_query(url)
        self.system, self.root = system_of(plain)
        self._web = parse_scheme(url) in WEB_SCHEMES
        self.is_s3 = not self._web and "s3" in protocols(self.system)
        self.has_folders = not protocols(self.system) & BUCKETS
        self.refresh()

    def members(self, folder: str) -> list[TreeEntry]:
        """See :class:`Store`."""
        path = self.path(folder)
        with self.errors(folder, "list"):
            try:
                if self._web and not folder:
                    # A web page may be a listing; anything else is a file.
                    is_page = str(self.system.info(path).get("mimetype", "")).startswith(
                        "text/html"
                    )
                    if not is_page:
                        return [entry_of(self.system.info(path), ITSELF)]
                listed = self.system.ls(path, detail=True)
            except (FileNotFoundError, NotADirectoryError) as error:
                raise_other(error)
                return []
        own = self.root + f"/{folder}" * bool(folder)
        return [member for entry in listed if (member := _member(entry, own)) is not None]

    def complete(self, name: str, found: TreeEntry) -> TreeEntry:
        """See :class:`Store`."""
        with self.errors(name, "access"):
            return entry_of(self.system.info(self.path(name)), found.name)

    def read(self, name: str, version: str, start: int, stop: int) -> bytes | bytearray:
        """See :class:`Store`."""
        path = self.path(name)
        with self.errors(name, "read"):
            if self.is_s3 and version:
                return retried(
                    lambda found: self._append_same(found, path, version, start, stop), self.url
                )
            if self._web:
                return retried(
                    lambda found: found.extend(self._read_web(path, start, stop)), self.url
                )
            return bytes(self.system.cat_file(path, start=start, end=stop))

    def refresh(self) -> None:
        """See :class:`Store`."""
        self.system.invalidate_cache()

    @property
    def versions(self) -> Versions | None:
        """Conditional requests of the file system, or None if it supports none."""
        return None if self._web else versions_of(self.system, protocols(self.system))

    def above(self) -> FsspecStore | None:
        """See :class:`Store`."""
        plain, query = split_query(self._secret)
        url = plain.rstrip("/").rpartition("/")[0]
        shown = self.url.rstrip("/").rpartition("/")[0]
        return None if shown.endswith("/") else FsspecStore(url + query, shown)

    def path(self, name: str) -> str:
        """Return the path of *name* in the file system. An empty name is the store's root."""
        return (f"{self.root}/{name}" if name else str(self.root)) + self._query

    @contextmanager
    def errors(self, name: str, what: str) -> Iterator[None]:
        """Convert exceptions of the file system in the block to `CkptError`, without secrets.

        Args:
            name: File that is accessed, or empty for the store's root.
            what: Verb for the error message, such as ``list``.
        """
        try:
            yield
        except CkptError:
            raise
        except Exception as error:
            failure = failure_of(error, self._secret, name, what)
            failure.where = self.url
            raise failure from error

    def size(self, name: str) -> int:
        """Return the size of a file in bytes, or -1 if it does not exist."""
        self.refresh()
        with suppress(SourceNotFoundError), self.errors(name, "access"):
            return int(self.system.size(self.path(name)))
        return -1

    def make_folder(self, name: str = "") -> None:
        """Create a folder, except in object stores, which would create a bucket."""
        if self.has_folders:
            self.system.makedirs(self.path(name), exist_ok=True)

    def is_folder(self) -> bool:
        """Return whether the root exists as a folder. Always False for object stores."""
        if not self.has_folders:
            return False
        with self.errors("", "access"):
            return bool(self.system.isdir(self.root))

    def remove_folders(self) -> None:
        """Remove the root and its subfolders if they contain no file. No-op for object stores."""
        if not self.has_folders:
            return
        with suppress(Exception):
            below = self.system.find(self.root, withdirs=True)
            for folder in sorted((*below, self.root), key=len, reverse=True):
                self.system.rmdir(folder)

    def write(self, name: str, content: bytes) -> None:
        """Write a small file with one request."""
        with self.errors(name, "write"):
            self.make_folder()
            self.system.pipe_file(self.path(name), content)

    @contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        """Yield a stream to write a new file, which is removed after an error."""
        with self.errors(name, "write"):
            self.make_folder()
            target = self._opened(name)
            try:
                yield cast(IO[bytes], target)
            except BaseException:
                self._abandon(name, target)
                raise
            try:
                self._close(target)
            except Exception as error:
                if self._is_sent(name, target):
                    return
                if is_taken(error):
                    self._discard(target)  # the existing file belongs to another run
                    raise self._occupied(name) from error
                self._abandon(name, target)
                raise

    def _close(self, target: Any) -> None:
        """Complete an upload, without a condition if this S3 server supports none."""
        try:
            target.close()
        except Exception as error:
            if not self.is_s3 or code_of(error) not in UNKNOWN:
                raise
            target.mode = "wb"
            target.commit()

    def _opened(self, name: str) -> Any:
        """Open a new file, on the condition that it does not exist if the store supports that."""
        path = self.path(name)
        try:
            return self.system.open(path, "xb")
        except Exception as error:
            if is_taken(error):
                raise self._occupied(name) from error
            if not knows_no_conditions(error):
                raise
        return self.system.open(path, "wb")

    def _is_sent(self, name: str, target: Any) -> bool:
        """Return whether S3 stored the upload of *target* although its response was lost."""
        if not self.is_s3:
            return False
        with suppress(Exception):
            self.refresh()
            there = str(self.system.info(self.path(name))["ETag"]).strip('"')
            return there == _etag(target)
        return False

    def _occupied(self, name: str) -> StorageError:
        return StorageError(
            BUSY_MESSAGE, where=self.url, why=f"`{name}` exists and does not belong to this run"
        )

    def _abandon(self, name: str, target: Any) -> None:
        """Discard an upload and remove the partial file, ignoring errors."""
        self._discard(target)
        with suppress(Exception):
            if self.has_folders:  # object stores do not show incomplete uploads
                self.system.rm_file(self.path(name))

    def _discard(self, target: Any) -> None:
        """Discard the uploaded parts of a file, ignoring errors."""
        from fsspec.spec import AbstractBufferedFile

        with suppress(Exception):
            if isinstance(target, AbstractBufferedFile):
                target.discard()
                target.closed = True  # closing it would upload what there is
            else:
                target.close()

    def _read_web(self, path: str, start: int, stop: int) -> bytes:
        """Read a byte range and, unlike ``cat_file``, detect servers that ignore the range."""
        with self.system.open(path, "rb", size=stop, cache_type="none") as file:
            file.seek(start)
            return bytes(file.read(stop - start))

    def _append_same(
        self, found: bytearray, path: str, version: str, start: int, stop: int
    ) -> None:
        """Append a byte range of one version of an S3 object, unlike ``cat_file``."""
        from fsspec.asyn import sync

        bucket, key, number = self.system.split_path(path)
        asked = {"IfMatch": version, "Range": f"bytes={start + len(found)}-{stop - 1}"}
        asked |= {"VersionId": number} if number else {}
        answer = self.system.call_s3("get_object", Bucket=bucket, Key=key, **asked)
        try:
            found += sync(self.system.loop, answer["Body"].read)
        finally:
            answer["Body"].close()


def _etag(target: Any) -> str:
    """Compute the ETag of the uploaded content, for a single or a multipart upload."""
    from hashlib import md5

    if not target.parts:
        return md5(target.buffer.getbuffer(), usedforsecurity=False).hexdigest()
    sent = b"".join(bytes.fromhex(part["ETag"].strip('"')) for part in target.parts)
    return f"{md5(sent, usedforsecurity=False).hexdigest()}-{len(target.parts)}"


def system_of(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of *url* and the path in it."""
    from fsspec.core import url_to_fs
    from fsspec.registry import get_filesystem_class

    for name in NOISY:
        # Our own errors report failures, so Python's last-resort log handler must not.
        logging.getLogger(name).addHandler(logging.NullHandler())
    scheme, shown, url = parse_scheme(url), mask_secrets(url), normalize_scheme(url)
    if "::" in url:
        raise UsageError("chained URLs are not supported", where=shown, hint="pass the inner URL")
    if scheme in ("s3", "s3a") and VERSION in url:  # s3fs would strip it from the key
        raise UsageError("a URL cannot specify an object version", where=shown)
    try:
        get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        raise UsageError(
            f"no file system is available for `{scheme}://`",
            where=shown,
            why=hide_secrets(str(error), url),
            hint=install_hint(scheme),
        ) from error
    try:
        system, root = url_to_fs(url)
    except Exception as error:
        raise failure_of(error, url, "", "reach") from error
    return system, str(root).rstrip("/")


def protocols(system: Any) -> set[str]:
    """Return the URL schemes of an fsspec file system."""
    return {system.protocol} if isinstance(system.protocol, str) else {*system.protocol}


def entry_of(info: Mapping[str, Any], name: str) -> TreeEntry:
    """Make the entry of *name* from fsspec's *info*."""
    size = info.get("size")
    version = next((str(info[key]) for key in VERSIONS if info.get(key)), "")
    return TreeEntry(
        name,
        info.get("type") == "directory",
        -1 if size is None else int(size),
        version,
        next((time for key in TIMES if (time := _nanoseconds(info.get(key)))), 0),
    )


def _member(entry: Mapping[str, Any], folder: str) -> TreeEntry | None:
    """Make an entry from a listing, or return None for the folder itself or an outside link."""
    full = str(entry["name"])
    name = full.rstrip("/").rpartition("/")[2]
    if full.strip("/") == folder.strip("/"):
        return entry_of(entry, ITSELF) if entry.get("type") == "file" and full[-1] != "/" else None
    return None if not name or name in (".", "..") or "?" in name else entry_of(entry, name)


def _nanoseconds(time: object) -> int:
    if isinstance(time, datetime):
        return int(time.timestamp() * 1e9)
    if isinstance(time, str):
        try:
            return int(datetime.fromisoformat(time).timestamp() * 1e9)
        except ValueError:
            return 0
    return int(time * 1e9) if isinstance(time, int | float) else 0


def failure_of(error: Exception, url: str, name: str, what: str) -> CkptError:
    """Convert an exception of a file system to a `CkptError` without the secrets of *url*."""
    subject = f"`{name}`" if name else "it"
    said = next(iter(str(error).strip().splitlines()), "")
    where, why = mask_secrets(url), hide_secrets(f"{type(error).__name__}: {said}", url)
    answer = getattr(error.__cause__, "response", None) or {}
    if what == "read" and answer.get("Error", {}).get("Code") in REPLACED:
        return ChangedError(where, name, "another file has replaced it")
    status = status_of(error)
    missing = isinstance(error, FileNotFoundError) or status == 404
    if missing and what == "write":
        hint = f"create the bucket first, or {NETWORK}"
        return StorageError(f"cannot write {subject}", where=where, why=why, hint=hint)
    if missing:
        return SourceNotFoundError(f"{subject} is missing" if name else "not found", where=where)
    if isinstance(error, ImportError):
        hint = install_hint(parse_scheme(url))
        return UsageError("a package is missing", where=where, why=why, hint=hint)
    denied = isinstance(error, PermissionError) or status in DENIED or said.startswith(FORBIDDEN)
    denied = denied or "credential" in f"{type(error).__name__} {said}".lower()
    hint = CREDENTIALS if denied else NETWORK
    return StorageError(f"cannot {what} {subject}", where=where, why=why, hint=hint)


def raise_other(error: OSError) -> None:
    """Raise the cause of a "not found" error if it is another failure.

    ``HTTPFileSystem`` reports every failure as "not found".
    """
    cause = error.__cause__
    if isinstance(cause, Exception) and getattr(cause, "status", None) not in (None, 404, 410):
        raise cause
    if type(cause).__module__.startswith("aiohttp.client_exceptions") and not hasattr(
        cause, "status"
    ):
        raise cause  # type: ignore[misc]
