"""Places behind URLs: what is in a folder, ranges of bytes of a file, small files written at once.

:class:`FsspecStore` asks any file system of fsspec, :class:`~ckptctl.remote.hub.HubStore`
the Hugging Face Hub. What file systems raise becomes errors of ours.
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
    WEB,
    hide,
    install_hint,
    masked,
    normal,
    scheme_of,
    without_query,
)
from ckptctl.storage.writing import BUSY
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
"""File systems without folders."""
ITSELF = ""
CREDENTIALS = "check the credentials and their permissions"
NETWORK = "check the URL, the network and the configured endpoint"
DENIED = (401, 403)
FORBIDDEN = "Forbidden: "
"""What gcsfs begins with where the status is 403, in an OSError without one."""
REPLACED = ("PreconditionFailed", "412")
"""What S3 answers when it has another version of an object."""


class Store(Protocol):
    """One place behind a URL; safe to use from many threads."""

    url: str
    """As it may be shown."""

    def members(self, folder: str) -> list[TreeEntry]:
        """Return the members of *folder*, which is relative to the URL; none: no folder."""

    def complete(self, name: str, found: TreeEntry) -> TreeEntry:
        """Return *found* with its size, where a listing does not tell; by default it does."""
        del name
        return found

    def read(self, name: str, version: str, start: int, stop: int) -> bytes | bytearray:
        """Return the bytes of *name* in a range, fewer where the file ends."""

    def refresh(self) -> None:
        """Forget all listings; by default nothing changes."""
        return

    def above(self) -> Store | None:
        """Return the folder that it lies in; None: it is all there is."""


class FsspecStore:
    """A folder or file of an fsspec file system.

    Attributes:
        url: As it may be shown.
        system: The file system.
        root: The path in it.
        is_s3: Whether that is one of S3.
        has_folders: Whether it has folders, as no object store has.
    """

    def __init__(self, url: str, shown: str | None = None) -> None:
        self.url = shown or masked(url)
        self._secret = url = normal(url)
        plain, self._query = without_query(url)
        self.system, self.root = system_of(plain)
        self._web = scheme_of(url) in WEB
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
        """The conditions on versions of objects that it knows; None: none that we know of."""
        return None if self._web else versions_of(self.system, protocols(self.system))

    def above(self) -> FsspecStore | None:
        """See :class:`Store`."""
        plain, query = without_query(self._secret)
        url = plain.rstrip("/").rpartition("/")[0]
        shown = self.url.rstrip("/").rpartition("/")[0]
        return None if shown.endswith("/") else FsspecStore(url + query, shown)

    def path(self, name: str) -> str:
        """Return the path of a file in the file system."""
        return (f"{self.root}/{name}" if name else str(self.root)) + self._query

    @contextmanager
    def errors(self, name: str, what: str) -> Iterator[None]:
        """Turn whatever the file system raises into errors of ours, without what is secret.

        Args:
            name: What is worked on; empty: the place itself.
            what: What is done with it, as in ``list``.
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
        """Return the size of a file; -1: there is none."""
        self.refresh()
        with suppress(SourceNotFoundError), self.errors(name, "access"):
            return int(self.system.size(self.path(name)))
        return -1

    def make_folder(self, name: str = "") -> None:
        """Make a folder where there are folders; an object store would make a bucket of it."""
        if self.has_folders:
            self.system.makedirs(self.path(name), exist_ok=True)

    def is_folder(self) -> bool:
        """Return whether it is there as a folder; an object store has none."""
        if not self.has_folders:
            return False
        with self.errors("", "access"):
            return bool(self.system.isdir(self.root))

    def remove_folders(self) -> None:
        """Remove it with the folders in it, where there are folders, if no file is left."""
        if not self.has_folders:
            return
        with suppress(Exception):
            below = self.system.find(self.root, withdirs=True)
            for folder in sorted((*below, self.root), key=len, reverse=True):
                self.system.rmdir(folder)

    def write(self, name: str, content: bytes) -> None:
        """Write a small file in one step."""
        with self.errors(name, "write"):
            self.make_folder()
            self.system.pipe_file(self.path(name), content)

    @contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        """Write a file that is not there, from front to back; after an error there is none."""
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
                    self._discard(target)  # and what is there is another one's
                    raise self._occupied(name) from error
                self._abandon(name, target)
                raise

    def _close(self, target: Any) -> None:
        """Complete a file; where S3 turns out to know no conditions, on none."""
        try:
            target.close()
        except Exception as error:
            if not self.is_s3 or code_of(error) not in UNKNOWN:
                raise
            target.mode = "wb"
            target.commit()

    def _opened(self, name: str) -> Any:
        """Open a file to be written, on the condition that it is not there, where that is known."""
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
        """Return whether S3 has what *target* sent: the answer that it does was lost."""
        if not self.is_s3:
            return False
        with suppress(Exception):
            self.refresh()
            there = str(self.system.info(self.path(name))["ETag"]).strip('"')
            return there == _etag(target)
        return False

    def _occupied(self, name: str) -> StorageError:
        return StorageError(
            BUSY, where=self.url, why=f"`{name}` exists and does not belong to this run"
        )

    def _abandon(self, name: str, target: Any) -> None:
        """Make sure that there is no file where one was begun, whatever else fails."""
        self._discard(target)
        with suppress(Exception):
            if self.has_folders:  # an object store shows nothing of what was not completed
                self.system.rm_file(self.path(name))

    def _discard(self, target: Any) -> None:
        """Give up what was sent of a file, whatever else fails."""
        from fsspec.spec import AbstractBufferedFile

        with suppress(Exception):
            if isinstance(target, AbstractBufferedFile):
                target.discard()
                target.closed = True  # closing it would upload what there is
            else:
                target.close()

    def _read_web(self, path: str, start: int, stop: int) -> bytes:
        """Return a range; unlike ``cat_file`` this notices servers that send everything."""
        with self.system.open(path, "rb", size=stop, cache_type="none") as file:
            file.seek(start)
            return bytes(file.read(stop - start))

    def _append_same(
        self, found: bytearray, path: str, version: str, start: int, stop: int
    ) -> None:
        """Append a range of one version of an object, which ``cat_file`` cannot ask S3 for."""
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
    """Return what S3 calls the content that was sent, as a whole or in parts."""
    from hashlib import md5

    if not target.parts:
        return md5(target.buffer.getbuffer(), usedforsecurity=False).hexdigest()
    sent = b"".join(bytes.fromhex(part["ETag"].strip('"')) for part in target.parts)
    return f"{md5(sent, usedforsecurity=False).hexdigest()}-{len(target.parts)}"


def system_of(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of *url*, and the path of it there."""
    from fsspec.core import url_to_fs
    from fsspec.registry import get_filesystem_class

    for name in NOISY:
        # What goes wrong is told by our own errors, not by a handler of last resort.
        logging.getLogger(name).addHandler(logging.NullHandler())
    scheme, shown, url = scheme_of(url), masked(url), normal(url)
    if "::" in url:
        raise UsageError("chained URLs are not supported", where=shown, hint="pass the inner URL")
    if scheme in ("s3", "s3a") and VERSION in url:  # s3fs takes what stands before it for the key
        raise UsageError("a URL cannot specify an object version", where=shown)
    try:
        get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        raise UsageError(
            f"no file system is available for `{scheme}://`",
            where=shown,
            why=hide(str(error), url),
            hint=install_hint(scheme),
        ) from error
    try:
        system, root = url_to_fs(url)
    except Exception as error:
        raise failure_of(error, url, "", "reach") from error
    return system, str(root).rstrip("/")


def protocols(system: Any) -> set[str]:
    """Return the schemes that an fsspec file system is for."""
    return {system.protocol} if isinstance(system.protocol, str) else {*system.protocol}


def entry_of(info: Mapping[str, Any], name: str) -> TreeEntry:
    """Return the entry of fsspec's *info*."""
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
    """Return the entry of a line of a listing; None: the folder's own, or a link elsewhere."""
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
    """Return the error for what went wrong at a place; what is secret in *url* is not in it."""
    subject = f"`{name}`" if name else "it"
    said = next(iter(str(error).strip().splitlines()), "")
    where, why = masked(url), hide(f"{type(error).__name__}: {said}", url)
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
        hint = install_hint(scheme_of(url))
        return UsageError("a package is missing", where=where, why=why, hint=hint)
    denied = isinstance(error, PermissionError) or status in DENIED or said.startswith(FORBIDDEN)
    denied = denied or "credential" in f"{type(error).__name__} {said}".lower()
    hint = CREDENTIALS if denied else NETWORK
    return StorageError(f"cannot {what} {subject}", where=where, why=why, hint=hint)


def raise_other(error: OSError) -> None:
    """Raise what was wrong if it was not found for another reason than that it is not there.

    ``HTTPFileSystem`` says "not found" of whatever goes wrong.
    """
    cause = error.__cause__
    if isinstance(cause, Exception) and getattr(cause, "status", None) not in (None, 404, 410):
        raise cause
    if type(cause).__module__.startswith("aiohttp.client_exceptions") and not hasattr(
        cause, "status"
    ):
        raise cause  # type: ignore[misc]
