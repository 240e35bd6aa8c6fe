"""List folders, read byte ranges and write small files in remote stores.

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
    UNSUPPORTED_CODES,
    ConditionalRequests,
    find_conditional_requests,
    get_http_status,
    get_s3_code,
    is_precondition_failure,
    is_unsupported_condition,
)
from ckptctl.remote.retries import read_with_retries
from ckptctl.storage.urls import (
    HUB_BUCKET_PREFIX,
    WEB_SCHEMES,
    build_install_hint,
    hide_secrets,
    is_hub_bucket,
    mask_secrets,
    normalize_scheme,
    parse_scheme,
    split_query,
)
from ckptctl.storage.writing import BUSY_MESSAGE
from ckptctl.tree import TreeEntry

VERSION_KEYS = (
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
VERSION_QUERY = "?versionId="
TIME_KEYS = ("LastModified", "mtime", "updated", "last_modified", "created")
NOISY_LOGGERS = ("fsspec", "s3fs", "gcsfs", "adlfs", "azure", "asyncio")
HUB_BUCKET_SCHEME = "hf-bucket"
"""Name under which fsspec knows the file system of the Hub's buckets."""
HUB_BUCKET_FILE_SYSTEM = "ckptctl.remote.hub_buckets.HubBucketFileSystem"
BUCKET_SCHEMES = frozenset(
    {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci", HUB_BUCKET_SCHEME}
)
"""URL schemes of object stores, which have no folders."""
ITSELF = ""
CREDENTIALS_HINT = "check the credentials and their permissions"
NETWORK_HINT = "check the URL, the network and the configured endpoint"
DENIED_STATUSES = (401, 403)
FORBIDDEN_PREFIX = "Forbidden: "
"""Message prefix of gcsfs's OSError for HTTP status 403, which has no status attribute."""
REPLACED_CODES = ("PreconditionFailed", "412")
"""S3 error codes for an object that does not have the requested version."""


class Store(Protocol):
    """Interface of a remote folder or file that several threads can read."""

    url: str
    """URL of the store without secrets."""

    def list_members(self, folder: str) -> list[TreeEntry]:
        """List the entries of *folder*, or return an empty list if it does not exist.

        *folder* is a path relative to the URL of the store.
        """

    def complete_entry(self, name: str, entry: TreeEntry) -> TreeEntry:
        """Return *entry* with its size, which the listings of some stores do not contain."""
        del name
        return entry

    def read_range(self, name: str, version: str, start: int, stop: int) -> bytes | bytearray:
        """Read the byte range [*start*, *stop*) of *name*, or fewer bytes at the end of the file.

        Stores that support it raise an error if the file no longer has *version*.
        """

    def refresh_listings(self) -> None:
        """Drop all cached listings of the store."""
        return

    def find_parent(self) -> Store | None:
        """Return the store of the parent folder, or None at the root of the file system."""


class FsspecStore:
    """Store for a folder or file of an fsspec file system.

    Args:
        url: URL, which may contain secrets.
        shown_url: URL for messages. Defaults to *url* without secrets.

    Attributes:
        url: The URL without secrets.
        system: The fsspec file system.
        root: Path of the URL in the file system.
        is_s3: Whether the file system is S3.
        has_folders: Whether the file system has folders, unlike object stores.
    """

    def __init__(self, url: str, shown_url: str | None = None) -> None:
        self.url = shown_url or mask_secrets(url)
        self._secret_url = url = normalize_scheme(url)
        url_without_query, self._query = split_query(url)
        self.system, self.root = open_file_system(url_without_query)
        self._is_web = parse_scheme(url) in WEB_SCHEMES
        self.is_s3 = not self._is_web and "s3" in get_protocols(self.system)
        self.has_folders = not get_protocols(self.system) & BUCKET_SCHEMES
        self.refresh_listings()

    def list_members(self, folder: str) -> list[TreeEntry]:
        """See :class:`Store`."""
        path = self.resolve_path(folder)
        with self.translate_errors(folder, "list"):
            try:
                if self._is_web and not folder:
                    # A web page may be a listing; anything else is a file.
                    is_page = str(self.system.info(path).get("mimetype", "")).startswith(
                        "text/html"
                    )
                    if not is_page:
                        return [make_tree_entry(self.system.info(path), ITSELF)]
                listed = self.system.ls(path, detail=True)
            except (FileNotFoundError, NotADirectoryError) as error:
                raise_if_other_failure(error)
                return []
        folder_path = self.root + f"/{folder}" * bool(folder)
        return [
            member for entry in listed if (member := _make_member(entry, folder_path)) is not None
        ]

    def complete_entry(self, name: str, entry: TreeEntry) -> TreeEntry:
        """See :class:`Store`."""
        with self.translate_errors(name, "access"):
            return make_tree_entry(self.system.info(self.resolve_path(name)), entry.name)

    def read_range(self, name: str, version: str, start: int, stop: int) -> bytes | bytearray:
        """See :class:`Store`."""
        path = self.resolve_path(name)
        with self.translate_errors(name, "read"):
            if self.is_s3 and version:
                return read_with_retries(
                    lambda data: self._append_versioned_range(data, path, version, start, stop),
                    self.url,
                )
            if self._is_web:
                return read_with_retries(
                    lambda data: data.extend(self._read_web_range(path, start, stop)), self.url
                )
            return bytes(self.system.cat_file(path, start=start, end=stop))

    def refresh_listings(self) -> None:
        """See :class:`Store`."""
        self.system.invalidate_cache()

    @property
    def conditional_requests(self) -> ConditionalRequests | None:
        """Conditional requests of the file system, or None if it does not support them."""
        return (
            None
            if self._is_web
            else find_conditional_requests(self.system, get_protocols(self.system))
        )

    def find_parent(self) -> FsspecStore | None:
        """See :class:`Store`."""
        url_without_query, query = split_query(self._secret_url)
        url = url_without_query.rstrip("/").rpartition("/")[0]
        shown_url = self.url.rstrip("/").rpartition("/")[0]
        return None if shown_url.endswith("/") else type(self)(url + query, shown_url)

    def resolve_path(self, name: str) -> str:
        """Return the path of *name* in the file system. The empty name is the root of the store."""
        return (f"{self.root}/{name}" if name else str(self.root)) + self._query

    @contextmanager
    def translate_errors(self, name: str, action: str) -> Iterator[None]:
        """Return a context manager that converts file system exceptions to `CkptError`.

        The converted errors do not contain secrets.

        Args:
            name: Name of the accessed file, or an empty string for the root of the store.
            action: Verb for the error message, such as ``list``.
        """
        try:
            yield
        except CkptError:
            raise
        except Exception as error:
            ckpt_error = to_ckpt_error(error, self._secret_url, name, action)
            ckpt_error.where = self.url
            raise ckpt_error from error

    def read_file_size(self, name: str) -> int:
        """Return the size of the file *name* in bytes, or -1 if it does not exist."""
        self.refresh_listings()
        with suppress(SourceNotFoundError), self.translate_errors(name, "access"):
            return int(self.system.size(self.resolve_path(name)))
        return -1

    def make_folder(self, name: str = "") -> None:
        """Create the folder *name*. No-op for object stores, which would create a bucket."""
        if self.has_folders:
            self.system.makedirs(self.resolve_path(name), exist_ok=True)

    def is_folder(self) -> bool:
        """Return whether the root exists and is a folder. Always False for object stores."""
        if not self.has_folders:
            return False
        with self.translate_errors("", "access"):
            return bool(self.system.isdir(self.root))

    def remove_folders(self) -> None:
        """Remove the root and its subfolders if they contain no files. No-op for object stores."""
        if not self.has_folders:
            return
        with suppress(Exception):
            folders = self.system.find(self.root, withdirs=True)
            for folder in sorted((*folders, self.root), key=len, reverse=True):
                self.system.rmdir(folder)

    def write_file(self, name: str, content: bytes) -> None:
        """Write *content* to the file *name* with a single request."""
        with self.translate_errors(name, "write"):
            self.make_folder()
            self.system.pipe_file(self.resolve_path(name), content)

    @contextmanager
    def create_file(self, name: str) -> Iterator[IO[bytes]]:
        """Return a context manager for writing a new file, which is removed after an error."""
        with self.translate_errors(name, "write"):
            self.make_folder()
            target = self._open_new_file(name)
            try:
                yield cast(IO[bytes], target)
            except BaseException:
                self._abandon_file(name, target)
                raise
            try:
                self._close_file(target)
            except Exception as error:
                if self._is_uploaded(name, target):
                    return
                if is_precondition_failure(error):
                    self._discard_upload(target)  # the existing file belongs to another run
                    raise self._occupied_error(name) from error
                self._abandon_file(name, target)
                raise

    def _close_file(self, target: Any) -> None:
        """Complete an upload. Retry without a condition if the S3 server does not support it."""
        try:
            target.close()
        except Exception as error:
            if not self.is_s3 or get_s3_code(error) not in UNSUPPORTED_CODES:
                raise
            target.mode = "wb"
            target.commit()

    def _open_new_file(self, name: str) -> Any:
        """Open a new file for writing, or raise if it exists and the store can detect this."""
        path = self.resolve_path(name)
        try:
            return self.system.open(path, "xb")
        except Exception as error:
            if is_precondition_failure(error):
                raise self._occupied_error(name) from error
            if not is_unsupported_condition(error):
                raise
        return self.system.open(path, "wb")

    def _is_uploaded(self, name: str, target: Any) -> bool:
        """Return whether S3 stored the uploaded file *target* although the response was lost."""
        if not self.is_s3:
            return False
        with suppress(Exception):
            self.refresh_listings()
            stored_etag = str(self.system.info(self.resolve_path(name))["ETag"]).strip('"')
            return stored_etag == _compute_etag(target)
        return False

    def _occupied_error(self, name: str) -> StorageError:
        return StorageError(
            BUSY_MESSAGE, where=self.url, why=f"`{name}` exists and does not belong to this run"
        )

    def _abandon_file(self, name: str, target: Any) -> None:
        """Discard the upload *target* and remove the partial file *name*, ignoring errors."""
        self._discard_upload(target)
        with suppress(Exception):
            if self.has_folders:  # object stores do not show incomplete uploads
                self.system.rm_file(self.resolve_path(name))

    def _discard_upload(self, target: Any) -> None:
        """Discard the parts of *target* that have been uploaded, ignoring errors."""
        from fsspec.spec import AbstractBufferedFile

        with suppress(Exception):
            if isinstance(target, AbstractBufferedFile):
                target.discard()
                target.closed = True  # closing it would upload the partial content
            else:
                target.close()

    def _read_web_range(self, path: str, start: int, stop: int) -> bytes:
        """Read a byte range over HTTP, and detect servers that ignore range requests.

        ``cat_file`` does not detect such servers.
        """
        with self.system.open(path, "rb", size=stop, cache_type="none") as file:
            file.seek(start)
            return bytes(file.read(stop - start))

    def _append_versioned_range(
        self, data: bytearray, path: str, version: str, start: int, stop: int
    ) -> None:
        """Append the bytes of [*start*, *stop*) that *data* does not contain yet.

        Unlike ``cat_file``, this raises if the S3 object no longer has *version*.
        """
        from fsspec.asyn import sync

        bucket, key, version_id = self.system.split_path(path)
        parameters = {"IfMatch": version, "Range": f"bytes={start + len(data)}-{stop - 1}"}
        parameters |= {"VersionId": version_id} if version_id else {}
        answer = self.system.call_s3("get_object", Bucket=bucket, Key=key, **parameters)
        try:
            data += sync(self.system.loop, answer["Body"].read)
        finally:
            answer["Body"].close()


def _compute_etag(target: Any) -> str:
    """Compute the ETag that S3 assigns to the content of the uploaded file *target*."""
    from hashlib import md5

    if not target.parts:
        return md5(target.buffer.getbuffer(), usedforsecurity=False).hexdigest()
    part_digests = b"".join(bytes.fromhex(part["ETag"].strip('"')) for part in target.parts)
    return f"{md5(part_digests, usedforsecurity=False).hexdigest()}-{len(target.parts)}"


def open_file_system(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of *url*, and the path of *url* in that file system."""
    from fsspec.core import url_to_fs
    from fsspec.registry import get_filesystem_class, register_implementation

    for name in NOISY_LOGGERS:
        # Our own errors report failures, so Python's last-resort log handler must not.
        logging.getLogger(name).addHandler(logging.NullHandler())
    scheme, shown_url, url = parse_scheme(url), mask_secrets(url), normalize_scheme(url)
    if "::" in url:
        raise UsageError(
            "chained URLs are not supported", where=shown_url, hint="pass the inner URL"
        )
    if scheme in ("s3", "s3a") and VERSION_QUERY in url:  # s3fs would strip it from the key
        raise UsageError("a URL cannot specify an object version", where=shown_url)
    if is_hub_bucket(url):
        register_implementation(HUB_BUCKET_SCHEME, HUB_BUCKET_FILE_SYSTEM, clobber=True)
        scheme, url = HUB_BUCKET_SCHEME, url.replace(HUB_BUCKET_PREFIX, f"{HUB_BUCKET_SCHEME}://")
    try:
        get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        raise UsageError(
            f"no file system is available for `{scheme}://`",
            where=shown_url,
            why=hide_secrets(str(error), url),
            hint=build_install_hint(scheme),
        ) from error
    try:
        system, root = url_to_fs(url)
    except Exception as error:
        raise to_ckpt_error(error, url, "", "reach") from error
    return system, str(root).rstrip("/")


def get_protocols(system: Any) -> set[str]:
    """Return the URL schemes of the fsspec file system *system*."""
    return {system.protocol} if isinstance(system.protocol, str) else {*system.protocol}


def make_tree_entry(info: Mapping[str, Any], name: str) -> TreeEntry:
    """Build the tree entry of a file or folder from its fsspec *info*.

    *name* is relative to the parent folder.
    """
    size = info.get("size")
    version = next((str(info[key]) for key in VERSION_KEYS if info.get(key)), "")
    return TreeEntry(
        name,
        info.get("type") == "directory",
        -1 if size is None else int(size),
        version,
        next((time for key in TIME_KEYS if (time := _parse_nanoseconds(info.get(key)))), 0),
    )


def _make_member(entry: Mapping[str, Any], folder: str) -> TreeEntry | None:
    """Build a tree entry from an *entry* of fsspec's listing of *folder*.

    Returns None for *folder* itself, and for web links that do not lead to a file in it.
    """
    full = str(entry["name"])
    name = full.rstrip("/").rpartition("/")[2]
    if full.strip("/") == folder.strip("/"):
        return (
            make_tree_entry(entry, ITSELF)
            if entry.get("type") == "file" and full[-1] != "/"
            else None
        )
    return None if not name or name in (".", "..") or "?" in name else make_tree_entry(entry, name)


def _parse_nanoseconds(time: object) -> int:
    if isinstance(time, datetime):
        return int(time.timestamp() * 1e9)
    if isinstance(time, str):
        try:
            return int(datetime.fromisoformat(time).timestamp() * 1e9)
        except ValueError:
            return 0
    return int(time * 1e9) if isinstance(time, int | float) else 0


def to_ckpt_error(error: Exception, url: str, name: str, action: str) -> CkptError:
    """Convert a file system exception to a `CkptError` without the secrets of *url*.

    *name* is the accessed file, and *action* is a verb for the message.
    """
    subject = f"`{name}`" if name else "it"
    message = next(iter(str(error).strip().splitlines()), "")
    where, why = mask_secrets(url), hide_secrets(f"{type(error).__name__}: {message}", url)
    answer = getattr(error.__cause__, "response", None) or {}
    if action == "read" and answer.get("Error", {}).get("Code") in REPLACED_CODES:
        return ChangedError(where, name, "another file has replaced it")
    status = get_http_status(error)
    is_missing = isinstance(error, FileNotFoundError) or status == 404
    if is_missing and action == "write":
        hint = f"create the bucket first, or {NETWORK_HINT}"
        return StorageError(f"cannot write {subject}", where=where, why=why, hint=hint)
    if is_missing:
        return SourceNotFoundError(f"{subject} is missing" if name else "not found", where=where)
    if isinstance(error, ImportError):
        hint = build_install_hint(parse_scheme(url))
        return UsageError("a package is missing", where=where, why=why, hint=hint)
    is_denied = (
        isinstance(error, PermissionError)
        or status in DENIED_STATUSES
        or message.startswith(FORBIDDEN_PREFIX)
    )
    is_denied = is_denied or "credential" in f"{type(error).__name__} {message}".lower()
    hint = CREDENTIALS_HINT if is_denied else NETWORK_HINT
    return StorageError(f"cannot {action} {subject}", where=where, why=why, hint=hint)


def raise_if_other_failure(error: OSError) -> None:
    """Raise the cause of a "not found" error unless the file is really missing.

    ``HTTPFileSystem`` reports every failure as "not found".
    """
    cause = error.__cause__
    if isinstance(cause, Exception) and getattr(cause, "status", None) not in (None, 404, 410):
        raise cause
    if type(cause).__module__.startswith("aiohttp.client_exceptions") and not hasattr(
        cause, "status"
    ):
        raise cause  # type: ignore[misc]
