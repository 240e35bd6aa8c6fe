"""Read the file listing of a commit on the Hugging Face Hub, and byte ranges of its files.

URLs are ``hf://[datasets/|spaces/]ORG/NAME[@REVISION][/PATH]``, as for ``HfFileSystem``. All
requests go through huggingface_hub, so that its environment variables for token, endpoint, proxy
and offline mode apply. Files of the same commit in the cache of huggingface_hub are read from the
cache. All reads use the same commit, so a push during a run has no effect.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from ckptctl.errors import CkptError, SourceNotFoundError, StorageError, UsageError
from ckptctl.remote.retries import call_with_retries, read_with_retries
from ckptctl.remote.store import ITSELF, Store
from ckptctl.storage.paths import resolve_links
from ckptctl.storage.urls import mask_secrets, normalize_scheme
from ckptctl.tree import TreeEntry

REPOSITORY_KINDS = {"models": "model", "datasets": "dataset", "spaces": "space"}
_SLASHED_REVISION = r"refs/(?:pr/\d+|convert/[^/]+)"
"""Regular expression for revisions whose slashes are not escaped in a URL."""
_URL = re.compile(
    r"hf://(?:(?P<kind>models|datasets|spaces)/)?(?P<repository>[^/@]+/[^/@]+)"
    rf"(?:@(?P<revision>{_SLASHED_REVISION}|[^/]+))?(?:/(?P<path>.*))?"
)
PRECONDITION_FAILED_STATUS = 412
URL_FORM_HINT = "write hf://ORG/NAME, hf://ORG/NAME@REVISION or hf://ORG/NAME/FOLDER"
LOGIN_HINT = (
    "log in with `hf auth login`, or set HF_TOKEN (required for private and gated repositories)"
)


@dataclass(frozen=True, slots=True)
class HubUrl:
    """Parsed ``hf://`` URL.

    Attributes:
        kind: ``model``, ``dataset`` or ``space``.
        repository: ``ORG/NAME``.
        revision: Branch, tag or commit, or None for the default branch.
        path: File or folder in the repository, or an empty string for the complete repository.
    """

    kind: str
    repository: str
    revision: str | None
    path: str = ""

    def __str__(self) -> str:
        prefix = "" if self.kind == "model" else f"{self.kind}s/"
        has_slashes = re.fullmatch(_SLASHED_REVISION, self.revision or "")
        revision = self.revision and quote(self.revision, safe="/" if has_slashes else "")
        parts = f"hf://{prefix}{self.repository}" + (f"@{revision}" if revision else "")
        return f"{parts}/{self.path}" if self.path else parts


def parse_hub_url(url: str) -> HubUrl:
    """Parse an ``hf://`` URL.

    Raises:
        UsageError: The URL does not name a repository.
    """
    match = _URL.fullmatch(normalize_scheme(url).rstrip("/"))
    problem = "this is not a Hub repository"
    if match is None:
        raise UsageError(problem, where=mask_secrets(url), hint=URL_FORM_HINT)
    from huggingface_hub import utils as hub  # lazy names, which type checkers cannot see
    from huggingface_hub.errors import HFValidationError

    client: Any = hub
    try:
        client.validate_repo_id(match["repository"])
    except HFValidationError as error:
        raise UsageError(
            problem, where=mask_secrets(url), why=str(error), hint=URL_FORM_HINT
        ) from None
    revision = match["revision"] and unquote(match["revision"])
    kind = REPOSITORY_KINDS[match["kind"] or "models"]
    return HubUrl(kind, match["repository"], revision, (match["path"] or "").strip("/"))


class HubStore(Store):
    """Folder of a Hub repository, at the commit to which its revision refers when it is opened."""

    def __init__(self, url: str | HubUrl) -> None:
        self._hub_url = parse_hub_url(url) if isinstance(url, str) else url
        self.url = str(self._hub_url)
        self._commit, self._files, self._snapshot_folder = fetch_repository_listing(
            self._hub_url, self.url
        )
        self._cached_paths: dict[str, Path | None] = {}

    def list_members(self, folder: str) -> list[TreeEntry]:
        """See :class:`~ckptctl.remote.store.Store`."""
        path = self._join_path(folder)
        if path in self._files:
            return [replace(self._files[path], name=ITSELF)]
        entries: dict[str, TreeEntry] = {}
        prefix = f"{path}/" if path else ""
        for name, entry in self._files.items():
            if name.startswith(prefix):
                head, is_folder, _ = name[len(prefix) :].partition("/")
                entries[head] = TreeEntry(head, True) if is_folder else replace(entry, name=head)
        return list(entries.values())

    def read_range(self, name: str, version: str, start: int, stop: int) -> bytes | bytearray:
        """See :class:`~ckptctl.remote.store.Store`."""
        del version
        path = self._join_path(name)
        cached = self._find_cached_path(path)
        if cached is not None:
            with cached.open("rb") as file:
                file.seek(start)
                return file.read(stop - start)
        with translate_hub_errors(self.url, f"read `{name}`"):
            return read_with_retries(
                lambda data: append_range(data, self._build_url(path), name, self.url, start, stop),
                self.url,
            )

    def find_parent(self) -> HubStore | None:
        """Return the parent folder without a request, or None at the root of the repository."""
        if not self._hub_url.path:
            return None
        folder = copy(self)
        folder._hub_url = replace(self._hub_url, path=self._hub_url.path.rpartition("/")[0])
        folder.url = str(folder._hub_url)
        return folder

    def _join_path(self, name: str) -> str:
        return "/".join(filter(None, (self._hub_url.path, name)))

    def _build_url(self, path: str) -> str:
        from huggingface_hub import constants, hf_hub_url

        return hf_hub_url(
            self._hub_url.repository,
            path,
            repo_type=self._hub_url.kind,
            revision=self._commit,
            endpoint=constants.ENDPOINT,
        )

    def _find_cached_path(self, name: str) -> Path | None:
        """Return the path of the file *name* in huggingface_hub's cache, or None if not cached."""
        if self._snapshot_folder is not None:
            return self._snapshot_folder / name
        if name not in self._cached_paths:
            from huggingface_hub import try_to_load_from_cache

            cached = try_to_load_from_cache(
                self._hub_url.repository, name, revision=self._commit, repo_type=self._hub_url.kind
            )
            path = Path(cached) if isinstance(cached, str) else None
            is_complete = path is not None and path.stat().st_size == self._files[name].size
            self._cached_paths[name] = path if is_complete else None
        return self._cached_paths[name]


def fetch_repository_listing(
    hub_url: HubUrl, url: str
) -> tuple[str, dict[str, TreeEntry], Path | None]:
    """Return a repository's commit hash, its files by name, and its cached snapshot folder.

    The snapshot folder is None unless the files are listed from the cache because of offline mode.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    with translate_hub_errors(url, "list the repository"):
        try:
            info: Any = call_with_retries(
                lambda: HfApi().repo_info(
                    hub_url.repository,
                    revision=hub_url.revision,
                    repo_type=hub_url.kind,
                    files_metadata=True,
                ),
                url,
            )
        except OfflineModeIsEnabled:
            return _list_cached_snapshot(hub_url)
        time = int(info.last_modified.timestamp() * 1e9) if info.last_modified else 0
        files: dict[str, TreeEntry] = {}
        for file in info.siblings or ():
            name = file.rfilename
            if _is_safe_name(name):
                digest = file.lfs["sha256"] if file.lfs else file.blob_id
                size = int(file.size or 0)
                files[name] = TreeEntry(name, False, size, str(digest), time, digest)
        return str(info.sha), files, None


def _list_cached_snapshot(hub_url: HubUrl) -> tuple[str, dict[str, TreeEntry], Path | None]:
    from huggingface_hub import snapshot_download

    folder = Path(
        snapshot_download(
            hub_url.repository,
            revision=hub_url.revision,
            repo_type=hub_url.kind,
            local_files_only=True,
        )
    )
    names = (item for item in sorted(folder.rglob("*")) if item.is_file())
    files = {}
    for item in names:
        name, status = str(item.relative_to(folder)), item.stat()
        files[name] = TreeEntry(
            name, False, status.st_size, resolve_links(item).name, status.st_mtime_ns
        )
    return folder.name, files, folder


def _is_safe_name(name: str) -> bool:
    """Return whether *name* refers to a file inside the repository, as all git paths do."""
    return not {"", ".", ".."} & set(name.split("/"))


def append_range(
    data: bytearray, url: str, name: str, shown_url: str, start: int, stop: int
) -> str | None:
    """Append the bytes of the range [*start*, *stop*) that *data* does not contain yet.

    Args:
        data: Bytes received so far.
        url: HTTP URL of the file.
        name: Name of the file, for errors.
        shown_url: URL of the repository or bucket, for errors.
        start: Offset of the first byte of the range.
        stop: Offset after the last byte.

    Returns:
        The Xet hash of the file if the Hub states it, or None.

    Raises:
        ConnectionError: The response was truncated. The received bytes are appended.
        StorageError: The server ignores ranges and would send the entire file.
    """
    from huggingface_hub import utils as hub  # lazy names, which type checkers cannot see

    client: Any = hub
    headers = {
        **client.build_hf_headers(library_name="ckptctl"),
        "Range": f"bytes={start + len(data)}-{stop - 1}",
        "Accept-Encoding": "identity",
    }
    # The client itself retries only status 429.
    retry_options = {"retry_on_exceptions": (), "retry_on_status_codes": 429}
    with client.http_stream_backoff("GET", url, headers=headers, **retry_options) as response:
        client.hf_raise_for_status(response)
        content_range = response.headers.get("Content-Range", "").removeprefix("bytes ")
        first_byte = content_range.partition("-")[0] if response.status_code == 206 else "0"
        if first_byte != str(start + len(data)):
            raise StorageError(
                f"the server does not support range requests for `{name}`", where=shown_url
            )
        failure = _append_body(data, response, stop - start)
        answers = (*response.history, response)  # the Hub redirects to storage of its own
    if failure:
        raise ConnectionError(f"{type(failure).__name__}: {failure}") from failure
    return next((h for answer in answers if (h := answer.headers.get("X-Xet-Hash"))), None)


def _append_body(data: bytearray, response: Any, end: int) -> Exception | None:
    """Append the response body to *data* until it has *end* bytes.

    Returns the error that truncated the body, or None. The error is not raised, because the
    client's context manager would restart the request.
    """
    try:
        for part in response.iter_bytes(1 << 20):
            data += part[: end - len(data)]
            if len(data) == end:
                break
    except Exception as error:
        return error
    return None


@contextmanager
def translate_hub_errors(url: str, action: str, missing_hint: str = LOGIN_HINT) -> Iterator[None]:
    """Return a context manager that converts exceptions of huggingface_hub to `CkptError`.

    *action* is a verb phrase for the message, and *missing_hint* is the hint if the
    repository does not exist.
    """
    try:
        yield
    except CkptError:
        raise
    except Exception as error:
        raise _to_ckpt_error(error, url, action, missing_hint) from error


def _to_ckpt_error(
    error: Exception, url: str, action: str, missing_hint: str = LOGIN_HINT
) -> CkptError:
    from huggingface_hub import errors as hub

    why = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    if isinstance(error, hub.GatedRepoError):
        hint = "request access on the Hub page, then log in with `hf auth login` or set HF_TOKEN"
        return StorageError("the repository is gated", where=url, why=why, hint=hint)
    if isinstance(error, hub.RevisionNotFoundError):
        hint = "write a `/` in a branch name as %2F"
        return SourceNotFoundError(
            "unknown revision of the repository", where=url, why=why, hint=hint
        )
    if isinstance(error, hub.RepositoryNotFoundError):
        return SourceNotFoundError("no such repository", where=url, why=why, hint=missing_hint)
    if isinstance(error, getattr(hub, "BucketNotFoundError", ())):  # since huggingface_hub 1.5
        return SourceNotFoundError("no such bucket", where=url, why=why, hint=missing_hint)
    if isinstance(error, hub.EntryNotFoundError):
        if isinstance(error, hub.LocalEntryNotFoundError):
            hint = "unset HF_HUB_OFFLINE, or run `hf download` first"
            return SourceNotFoundError("not in the cache", where=url, why=why, hint=hint)
        return SourceNotFoundError(f"cannot {action}: no such file", where=url, why=why)
    if isinstance(error, hub.OfflineModeIsEnabled):
        hint = "unset HF_HUB_OFFLINE"
        return StorageError(f"cannot {action}: offline mode is on", where=url, why=why, hint=hint)
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == PRECONDITION_FAILED_STATUS:
        hint = "check the new commit in the repository, then run the command again"
        return StorageError("the repository changed in the meantime", where=url, why=why, hint=hint)
    hint = (
        LOGIN_HINT
        if status in (401, 403)
        else "check the network, HF_ENDPOINT and the proxy settings"
    )
    return StorageError(f"cannot {action}", where=url, why=why, hint=hint)


class SilencedProgress:
    """Context manager that hides huggingface_hub's progress bars, since ckptctl shows its own.

    The bars are off while any thread is in the context.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._was_enabled = False

    def __enter__(self) -> None:
        bars = _import_hub_utils()
        with self._lock:
            if not self._depth:
                self._was_enabled = not bars.are_progress_bars_disabled()
                bars.disable_progress_bars()
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._depth -= 1
            if not self._depth and self._was_enabled:
                _import_hub_utils().enable_progress_bars()


def _import_hub_utils() -> Any:
    from huggingface_hub import utils

    return utils  # lazy names, which type checkers cannot see


SILENCED_PROGRESS = SilencedProgress()
"""The only instance, because the setting belongs to the process."""
