"""Access trees of remote files, with one cached listing per folder."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath

from ckptctl.errors import (
    ChangedError,
    CkptError,
    SourceNotFoundError,
    StorageError,
    UnsupportedError,
    UsageError,
)
from ckptctl.remote.blocks import SHARED_BLOCKS
from ckptctl.remote.hub import HubStore
from ckptctl.remote.hub_upload import HubUpload
from ckptctl.remote.store import ITSELF, FsspecStore, Store
from ckptctl.remote.upload import ObjectUpload
from ckptctl.storage.urls import (
    MASK,
    extract_secrets,
    is_hub_bucket,
    is_hub_repository,
    mask_secrets,
    normalize_url,
)
from ckptctl.tree import FileTree, TreeEntry, Upload, UploadRequest, UrlPath
from ckptctl.units import pluralize

_tree_numbers = itertools.count()
"""Counter for tree numbers, which are part of the keys of cached blocks."""


class CachedTree:
    """Files below one URL, with cached folder listings.

    Args:
        store: Store of the URL.
        known_entries: Entries of the root by name, which exist even if the root cannot be listed.
        root_entries: Entries of the root if it has already been listed, or None.
        is_lenient: Whether to treat a root that cannot be listed as empty.

    Attributes:
        url: URL without secrets.
        failure: Last storage error of a read or listing, or None.
    """

    def __init__(
        self,
        store: Store,
        known_entries: Mapping[str, TreeEntry] | None = None,
        root_entries: Sequence[TreeEntry] = (),
        is_lenient: bool = False,
    ) -> None:
        self.url = store.url
        self._store = store
        self._known_entries = dict(known_entries or {})
        self._is_lenient = is_lenient or bool(known_entries)
        self._number = next(_tree_numbers)
        self._lock = threading.RLock()
        self._folders: dict[str, dict[str, TreeEntry]] = {}
        self.failure: StorageError | None = None
        if root_entries:
            self._folders[""] = {entry.name: entry for entry in root_entries}

    def get_members_by_name(self, folder: str) -> dict[str, TreeEntry]:
        """Return the entries of *folder* by name, or an empty dict if it does not exist."""
        with self._lock:
            entries = self._folders.get(folder)
            if entries is None:
                entries = self._folders[folder] = self._list_folder(folder)
            return entries

    def find_entry(self, name: str) -> TreeEntry | None:
        """Return the entry of the file or folder *name*, or None if it does not exist."""
        if name in self._known_entries:
            return self._known_entries[name]
        if not name:
            return (
                TreeEntry(ITSELF, True)
                if self._known_entries or self.get_members_by_name("")
                else None
            )
        parent, _, last = name.rpartition("/")
        if parent:
            folder = self.find_entry(parent)
            if folder is None or not folder.folder:
                return None
        with self._lock:
            entry = self.get_members_by_name(parent).get(last)
            if entry is not None and entry.size < 0 and not entry.folder:
                entry = self._folders[parent][last] = self._store.complete_entry(name, entry)
        return entry

    def require_file(self, name: str) -> TreeEntry:
        """Return the entry of the file *name*, or raise if it is missing or a folder."""
        entry = self.find_entry(name)
        if entry is None:
            raise SourceNotFoundError(f"`{name}` is missing", where=self.url)
        if entry.folder:
            raise UnsupportedError(f"`{name}` is not a regular file", where=self.url)
        return entry

    def read_range(self, name: str, offset: int, nbytes: int) -> bytearray:
        """Read *nbytes* of the file *name* at *offset*, or fewer at the end of the file."""
        try:
            return self.prefetch_range(name, offset, nbytes)
        except StorageError as error:
            self._record_failure(error)
            raise

    def prefetch_range(self, name: str, offset: int, nbytes: int = 1) -> bytearray:
        """Read a byte range of the file *name* without recording errors in :attr:`failure`."""
        entry = self.require_file(name)
        nbytes = min(nbytes, entry.size - offset)
        if nbytes <= 0:
            return bytearray()

        def fetch(start: int, stop: int) -> bytes | bytearray:
            data = self._store.read_range(name, entry.version, start, stop)
            if len(data) > stop - start:
                raise StorageError(
                    f"the server does not support range requests for `{name}`",
                    where=self.url,
                    why=f"requested {pluralize(stop - start, 'byte')}, received {len(data):,}",
                )
            return data

        return SHARED_BLOCKS.read_range(
            self._make_block_key(name, entry), entry.size, offset, nbytes, fetch
        )

    def mark_read_end(self, name: str, stop: int) -> None:
        """Mark the offset *stop* as the end of a sequential read of *name*, to limit read-ahead."""
        SHARED_BLOCKS.mark_read_end(self._make_block_key(name, self.require_file(name)), stop)

    def _make_block_key(self, name: str, entry: TreeEntry) -> Hashable:
        return self._number, name, entry.size, entry.version, entry.mtime_ns

    def find_parent(self) -> CachedTree | None:
        """Return the tree of the parent folder, or None if the store has no parent.

        The parent is treated as empty if it cannot be listed.
        """
        store = self._store.find_parent()
        return None if store is None else CachedTree(store, is_lenient=True)

    def forget_listings(self) -> None:
        """Drop all cached listings, so that folders are listed again."""
        with self._lock:
            self._folders.clear()
            self._store.refresh_listings()
            self._known_entries = {
                n: self._store.complete_entry(n, entry) for n, entry in self._known_entries.items()
            }

    def _record_failure(self, error: CkptError) -> None:
        if isinstance(error, StorageError) and not isinstance(error, ChangedError):
            self.failure = error

    def _list_folder(self, folder: str) -> dict[str, TreeEntry]:
        try:
            members = self._store.list_members(folder)
        except (SourceNotFoundError, StorageError) as error:
            if not self._is_lenient or folder:
                self._record_failure(error)
                raise
            members = []
        entries = {entry.name: entry for entry in members if entry.name != ITSELF}
        return entries if folder else {**entries, **self._known_entries}


class RemoteTree(FileTree):
    """File tree of all URLs that are accessed with the same secrets.

    Above a URL in use, only its parent folder is listed, to find pointer files and other saves.
    """

    def __init__(self, url: str) -> None:
        self.atomic = is_hub_repository(url)
        self._secrets = extract_secrets(url)
        self._lock = threading.Lock()
        self._trees: dict[str, CachedTree] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteTree) and self._secrets == other._secrets

    def __hash__(self) -> int:
        return hash(self._secrets)

    def add_credentials(self, url: str) -> str:
        """See :class:`FileTree`."""
        user, query = self._secrets
        url_with_user = url.replace(f"://{MASK}@", f"://{user}@", 1) if user else url
        return url_with_user + query

    def resolve_url(self, url: str) -> str:
        """See :class:`FileTree`."""
        return url if self._find_tree(url)[0] else self._register_url(url)

    def find_entry(self, url: str) -> TreeEntry | None:
        """See :class:`FileTree`."""
        tree, name = self._find_tree(url)
        return tree.find_entry(name) if tree else None

    def get_file_entry(self, url: str) -> TreeEntry:
        """See :class:`FileTree`."""
        tree, name = self._require_tree(url)
        return tree.require_file(name)

    def list_members(self, url: str) -> list[str]:
        """See :class:`FileTree`."""
        tree, name = self._find_tree(url)
        return list(tree.get_members_by_name(name)) if tree else []

    def read_range(self, url: str, offset: int, nbytes: int) -> bytearray:
        """See :class:`FileTree`."""
        tree, name = self._require_tree(url)
        return tree.read_range(name, offset, nbytes)

    def prefetch_range(self, url: str, offset: int) -> None:
        """See :class:`FileTree`."""
        tree, name = self._require_tree(url)
        tree.prefetch_range(
            name, offset if offset >= 0 else max(0, tree.require_file(name).size + offset)
        )

    def mark_range_end(self, url: str, stop: int) -> None:
        """See :class:`FileTree`."""
        tree, name = self._require_tree(url)
        tree.mark_read_end(name, stop)

    def trim_cache(self) -> None:
        """See :class:`FileTree`."""
        SHARED_BLOCKS.trim_cache()

    def refresh_entries(self, url: str) -> None:
        """See :class:`FileTree`."""
        self._require_tree(url)[0].forget_listings()

    def forget_url(self, url: str) -> None:
        """See :class:`FileTree`."""
        with self._lock:
            for known_url in list(self._trees):
                if _is_inside(known_url, url) or _is_inside(url, known_url):
                    del self._trees[known_url]

    def get_last_error(self, url: str) -> CkptError | None:
        """See :class:`FileTree`."""
        tree, _ = self._find_tree(url)
        return tree.failure if tree else None

    def begin_upload(self, url: str, request: UploadRequest) -> Upload:
        """See :class:`FileTree`."""
        secret = self.add_credentials(url)
        if self.atomic:
            return HubUpload(secret, single=request.single, overwrite=request.overwrite)
        return ObjectUpload(open_fsspec_store(secret, url), request)

    def _register_url(self, url: str) -> str:
        """List *url* and register its tree, and return the URL that the store uses for it."""
        secret = self.add_credentials(url)
        store: Store = HubStore(secret) if self.atomic else open_fsspec_store(secret, url)
        entries = store.list_members("")
        if not entries:
            raise SourceNotFoundError("nothing was found at this URL", where=store.url)
        name = store.url.rpartition("/")[2]
        if entries[0].name == ITSELF:
            folder = store.find_parent()
            if folder is None:
                raise UsageError("a file without a parent folder is not supported", where=store.url)
            tree = CachedTree(folder, {name: replace(entries[0], name=name)})
        else:
            tree = CachedTree(store, root_entries=entries)
        with self._lock:
            self._trees[tree.url] = tree
        return store.url

    def _find_tree(self, url: str) -> tuple[CachedTree | None, str]:
        """Return the registered tree that contains *url*, and the path of *url* in that tree.

        Returns None and an empty path if no tree contains *url*.
        """
        with self._lock:
            roots = [
                root for root in self._trees if _is_inside(url, root)
            ] or self._register_parent_tree(url)
            if not roots:
                return None, ""
            longest = max(roots, key=len)
            return self._trees[longest], url[len(longest) + 1 :]

    def _require_tree(self, url: str) -> tuple[CachedTree, str]:
        """Return the tree that contains *url* and the path of *url* in that tree.

        Lists *url* first if no tree contains it.
        """
        tree, name = self._find_tree(url)
        if tree is None:
            tree, name = self._find_tree(self._register_url(url))
        if tree is None:
            raise SourceNotFoundError("nothing was found at this URL", where=url)
        return tree, name

    def _register_parent_tree(self, url: str) -> list[str]:
        """Register the parent folder of a registered tree if that folder contains *url*.

        Returns a list with the URL of the parent folder, or an empty list.
        """
        for root in self._trees:
            if _is_inside(url, root.rpartition("/")[0]):
                parent = self._trees[root].find_parent()
                if parent is not None and _is_inside(url, parent.url):
                    self._trees[parent.url] = parent
                    return [parent.url]
        return []


def open_url(url: str) -> UrlPath:
    """Return the path object of *url*, without accessing the URL."""
    url = normalize_url(url)
    scheme, _, rest = mask_secrets(url).partition("://")
    return UrlPath(RemoteTree(url), f"{scheme}://{PurePosixPath(rest.lstrip('/'))}")


def open_store(path: UrlPath) -> FsspecStore:
    """Open the fsspec store at the URL *path*, using its secrets, for writing."""
    return open_fsspec_store(path.tree.add_credentials(path.url), path.url)


def open_fsspec_store(url: str, shown_url: str) -> FsspecStore:
    """Open the store at *url*, which may contain secrets, unlike *shown_url*."""
    if is_hub_bucket(url):
        from ckptctl.remote.hub_buckets import HubBucketStore

        return HubBucketStore(url, shown_url)
    return FsspecStore(url, shown_url)


def _is_inside(url: str, folder: str) -> bool:
    return url == folder or url.startswith(f"{folder}/")
