"""Trees of remote files: cached listings of the URLs in use, requested once per folder."""

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
from ckptctl.remote.blocks import SHARED
from ckptctl.remote.hub import HubStore
from ckptctl.remote.hub_upload import HubUpload
from ckptctl.remote.store import ITSELF, FsspecStore, Store
from ckptctl.remote.upload import ObjectUpload
from ckptctl.storage.urls import (
    HUB_SCHEME,
    MASK,
    find_secrets,
    mask_secrets,
    normalize_url,
    parse_scheme,
)
from ckptctl.tree import FileTree, TreeEntry, Upload, UploadRequest, UrlPath
from ckptctl.units import pluralize

_numbers = itertools.count()
"""Numbers that keep cached blocks of different trees apart."""


class Tree:
    """The files below one URL, with cached listings.

    Attributes:
        url: The URL without secrets.
        failure: The last storage error of a read or listing, or None.
    """

    def __init__(
        self,
        store: Store,
        known: Mapping[str, TreeEntry] | None = None,
        listed: Sequence[TreeEntry] = (),
        lenient: bool = False,
    ) -> None:
        self.url = store.url
        self._store = store
        self._known = dict(known or {})
        self._lenient = lenient or bool(known)
        self._number = next(_numbers)
        self._lock = threading.RLock()
        self._folders: dict[str, dict[str, TreeEntry]] = {}
        self.failure: StorageError | None = None
        if listed:
            self._folders[""] = {entry.name: entry for entry in listed}

    def members(self, folder: str) -> dict[str, TreeEntry]:
        """Return the entries of *folder* by name, or none if there is no such folder."""
        with self._lock:
            entries = self._folders.get(folder)
            if entries is None:
                entries = self._folders[folder] = self._listed(folder)
            return entries

    def find(self, name: str) -> TreeEntry | None:
        """Return the entry of *name*, or None if it does not exist."""
        if name in self._known:
            return self._known[name]
        if not name:
            return TreeEntry(ITSELF, True) if self._known or self.members("") else None
        parent, _, last = name.rpartition("/")
        if parent:
            above = self.find(parent)
            if above is None or not above.folder:
                return None
        with self._lock:
            entry = self.members(parent).get(last)
            if entry is not None and entry.size < 0 and not entry.folder:
                entry = self._folders[parent][last] = self._store.complete(name, entry)
        return entry

    def file(self, name: str) -> TreeEntry:
        """Return the entry of the file *name*, or raise if it is missing or a folder."""
        entry = self.find(name)
        if entry is None:
            raise SourceNotFoundError(f"`{name}` is missing", where=self.url)
        if entry.folder:
            raise UnsupportedError(f"`{name}` is not a regular file", where=self.url)
        return entry

    def read(self, name: str, offset: int, nbytes: int) -> bytearray:
        """Read a byte range of *name*, shorter at the end of the file."""
        try:
            return self.prefetch(name, offset, nbytes)
        except StorageError as error:
            self._note(error)
            raise

    def prefetch(self, name: str, offset: int, nbytes: int = 1) -> bytearray:
        """Read a byte range of *name* without recording an error in :attr:`last_failure`."""
        entry = self.file(name)
        nbytes = min(nbytes, entry.size - offset)
        if nbytes <= 0:
            return bytearray()

        def fetch(start: int, stop: int) -> bytes | bytearray:
            data = self._store.read(name, entry.version, start, stop)
            if len(data) > stop - start:
                raise StorageError(
                    f"the server does not support range requests for `{name}`",
                    where=self.url,
                    why=f"requested {pluralize(stop - start, 'byte')}, received {len(data):,}",
                )
            return data

        return SHARED.read(self._key(name, entry), entry.size, offset, nbytes, fetch)

    def end(self, name: str, stop: int) -> None:
        """Mark *stop* as the end of a sequential read of *name*."""
        SHARED.end(self._key(name, self.file(name)), stop)

    def _key(self, name: str, entry: TreeEntry) -> Hashable:
        return self._number, name, entry.size, entry.version, entry.mtime_ns

    def above(self) -> Tree | None:
        """Return the tree of the parent folder, which need not be listable, or None."""
        store = self._store.above()
        return None if store is None else Tree(store, lenient=True)

    def forget(self) -> None:
        """Drop all cached listings."""
        with self._lock:
            self._folders.clear()
            self._store.refresh()
            self._known = {n: self._store.complete(n, entry) for n, entry in self._known.items()}

    def _note(self, error: CkptError) -> None:
        if isinstance(error, StorageError) and not isinstance(error, ChangedError):
            self.failure = error

    def _listed(self, folder: str) -> dict[str, TreeEntry]:
        try:
            listed = self._store.members(folder)
        except (SourceNotFoundError, StorageError) as error:
            if not self._lenient or folder:
                self._note(error)
                raise
            listed = []
        entries = {entry.name: entry for entry in listed if entry.name != ITSELF}
        return entries if folder else {**entries, **self._known}


class RemoteTree(FileTree):
    """All URLs that are accessed with the same secrets.

    Above a URL in use, only its parent folder is listed, for pointers and other saves.
    """

    def __init__(self, url: str) -> None:
        self.atomic = parse_scheme(url) == HUB_SCHEME
        self._secrets = find_secrets(url)
        self._lock = threading.Lock()
        self._trees: dict[str, Tree] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteTree) and self._secrets == other._secrets

    def __hash__(self) -> int:
        return hash(self._secrets)

    def add_secret(self, url: str) -> str:
        """See :class:`FileTree`."""
        user, query = self._secrets
        plain = url.replace(f"://{MASK}@", f"://{user}@", 1) if user else url
        return plain + query

    def resolve_url(self, url: str) -> str:
        """See :class:`FileTree`."""
        return url if self._tree_at(url)[0] else self._looked_at(url)

    def find_entry(self, url: str) -> TreeEntry | None:
        """See :class:`FileTree`."""
        tree, name = self._tree_at(url)
        return tree.find(name) if tree else None

    def get_file_entry(self, url: str) -> TreeEntry:
        """See :class:`FileTree`."""
        tree, name = self._tree_of(url)
        return tree.file(name)

    def list_members(self, url: str) -> list[str]:
        """See :class:`FileTree`."""
        tree, name = self._tree_at(url)
        return list(tree.members(name)) if tree else []

    def read_range(self, url: str, offset: int, nbytes: int) -> bytearray:
        """See :class:`FileTree`."""
        tree, name = self._tree_of(url)
        return tree.read(name, offset, nbytes)

    def prefetch_range(self, url: str, offset: int) -> None:
        """See :class:`FileTree`."""
        tree, name = self._tree_of(url)
        tree.prefetch(name, offset if offset >= 0 else max(0, tree.file(name).size + offset))

    def mark_range_end(self, url: str, stop: int) -> None:
        """See :class:`FileTree`."""
        tree, name = self._tree_of(url)
        tree.end(name, stop)

    def trim_cache(self) -> None:
        """See :class:`FileTree`."""
        SHARED.trim()

    def refresh_entries(self, url: str) -> None:
        """See :class:`FileTree`."""
        self._tree_of(url)[0].forget()

    def forget_url(self, url: str) -> None:
        """See :class:`FileTree`."""
        with self._lock:
            for other in list(self._trees):
                if _inside(other, url) or _inside(url, other):
                    del self._trees[other]

    def last_failure(self, url: str) -> CkptError | None:
        """See :class:`FileTree`."""
        tree, _ = self._tree_at(url)
        return tree.failure if tree else None

    def begin_upload(self, url: str, request: UploadRequest) -> Upload:
        """See :class:`FileTree`."""
        secret = self.add_secret(url)
        if self.atomic:
            return HubUpload(secret, single=request.single, overwrite=request.overwrite)
        return ObjectUpload(FsspecStore(secret, url), request)

    def _looked_at(self, url: str) -> str:
        """List *url* again, and return the store's canonical form of it."""
        secret = self.add_secret(url)
        store: Store = HubStore(secret) if self.atomic else FsspecStore(secret, url)
        listed = store.members("")
        if not listed:
            raise SourceNotFoundError("nothing was found at this URL", where=store.url)
        name = store.url.rpartition("/")[2]
        if listed[0].name == ITSELF:
            folder = store.above()
            if folder is None:
                raise UsageError("a file without a parent folder is not supported", where=store.url)
            tree = Tree(folder, {name: replace(listed[0], name=name)})
        else:
            tree = Tree(store, listed=listed)
        with self._lock:
            self._trees[tree.url] = tree
        return store.url

    def _tree_at(self, url: str) -> tuple[Tree | None, str]:
        """Return the tree that contains *url*, or None, and the name in that tree."""
        with self._lock:
            roots = [root for root in self._trees if _inside(url, root)] or self._above(url)
            if not roots:
                return None, ""
            longest = max(roots, key=len)
            return self._trees[longest], url[len(longest) + 1 :]

    def _tree_of(self, url: str) -> tuple[Tree, str]:
        """Return the tree that contains *url* and the name in it, listing the URL if necessary."""
        tree, name = self._tree_at(url)
        if tree is None:
            tree, name = self._tree_at(self._looked_at(url))
        if tree is None:
            raise SourceNotFoundError("nothing was found at this URL", where=url)
        return tree, name

    def _above(self, url: str) -> list[str]:
        """Register the parent folder of a URL in use if it contains *url*, and return its URL."""
        for root in self._trees:
            if _inside(url, root.rpartition("/")[0]):
                above = self._trees[root].above()
                if above is not None and _inside(url, above.url):
                    self._trees[above.url] = above
                    return [above.url]
        return []


def open_url(url: str) -> UrlPath:
    """Return the path of a URL, without accessing it."""
    url = normalize_url(url)
    scheme, _, rest = mask_secrets(url).partition("://")
    return UrlPath(RemoteTree(url), f"{scheme}://{PurePosixPath(rest.lstrip('/'))}")


def store_at(path: UrlPath) -> FsspecStore:
    """Open the store at *path* for writing."""
    return FsspecStore(path.tree.add_secret(path.url), path.url)


def _inside(url: str, folder: str) -> bool:
    return url == folder or url.startswith(f"{folder}/")
