"""The URLs that are in use, as trees of names: listings are asked for once, folder by folder."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from ckptctl.errors import (
    ChangedError,
    CkptError,
    SourceNotFoundError,
    StorageError,
    UnsupportedError,
    UsageError,
)
from ckptctl.storage.remote.blocks import SHARED
from ckptctl.storage.remote.hub import HubStore
from ckptctl.storage.remote.store import ITSELF, FsspecStore, RemoteEntry, Store
from ckptctl.storage.urls import (
    HUB,
    WEB,
    address,
    is_marked,
    marked,
    masked,
    scheme_of,
    secrets,
    tidy,
    without_query,
)
from ckptctl.units import counted

KNOWN = 64
SECRETS = 1024
"""URLs that may have secrets that are known, and all that are in use."""
_numbers = itertools.count()
"""What was read of one tree is never taken for what another one has."""


class Tree:
    """What lies behind one URL."""

    def __init__(
        self,
        store: Store,
        known: Mapping[str, RemoteEntry] | None = None,
        listed: Sequence[RemoteEntry] = (),
        lenient: bool = False,
    ) -> None:
        self.url = store.url
        self._store = store
        self._known = dict(known or {})
        self._lenient = lenient or bool(known)
        self._number = next(_numbers)
        self._lock = threading.RLock()
        self._folders: dict[str, dict[str, RemoteEntry]] = {}
        self.failure: StorageError | None = None
        if listed:
            self._folders[""] = {entry.name: entry for entry in listed}

    def members(self, folder: str) -> dict[str, RemoteEntry]:
        """Return the members of *folder* by name; none where there is no such folder."""
        with self._lock:
            entries = self._folders.get(folder)
            if entries is None:
                entries = self._folders[folder] = self._listed(folder)
            return entries

    def find(self, name: str) -> RemoteEntry | None:
        """Return the entry of *name*; None: there is nothing."""
        if name in self._known:
            return self._known[name]
        if not name:
            return RemoteEntry(ITSELF, True) if self._known or self.members("") else None
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

    def file(self, name: str) -> RemoteEntry:
        """Return the entry of the file *name*."""
        entry = self.find(name)
        if entry is None:
            raise SourceNotFoundError(f"`{name}` is missing", where=self.url)
        if entry.folder:
            raise UnsupportedError(f"`{name}` is not a regular file", where=self.url)
        return entry

    def read(self, name: str, offset: int, nbytes: int) -> bytearray:
        """Return a range of bytes of *name*; fewer where it has no more."""
        try:
            return self.prefetch(name, offset, nbytes)
        except StorageError as error:
            self._note(error)
            raise

    def prefetch(self, name: str, offset: int, nbytes: int = 1) -> bytearray:
        """Do as :meth:`read` does, on trial: a failure is not noted in :attr:`failure`."""
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
                    why=f"requested {counted(stop - start, 'byte')}, received {len(data):,}",
                )
            return data

        return SHARED.read(self._key(name, entry), entry.size, offset, nbytes, fetch)

    def end(self, name: str, stop: int) -> None:
        """Note that a range of *name* that is read ends at byte *stop*."""
        SHARED.end(self._key(name, self.file(name)), stop)

    def _key(self, name: str, entry: RemoteEntry) -> Hashable:
        return self._number, name, entry.size, entry.version, entry.mtime_ns

    def above(self) -> Tree | None:
        """Return the folder that it lies in, which need not let us look; None: there is none."""
        store = self._store.above()
        return None if store is None else Tree(store, lenient=True)

    def forget(self) -> None:
        """Ask again for what is listed, from now on."""
        with self._lock:
            self._folders.clear()
            self._store.refresh()
            self._known = {n: self._store.complete(n, entry) for n, entry in self._known.items()}

    def _note(self, error: CkptError) -> None:
        if isinstance(error, StorageError) and not isinstance(error, ChangedError):
            self.failure = error

    def _listed(self, folder: str) -> dict[str, RemoteEntry]:
        try:
            listed = self._store.members(folder)
        except (SourceNotFoundError, StorageError) as error:
            if not self._lenient or folder:
                self._note(error)
                raise
            listed = []
        entries = {entry.name: entry for entry in listed if entry.name != ITSELF}
        return entries if folder else {**entries, **self._known}


def look(url: str) -> str:
    """Look behind *url*, anew, and return the URL as it may be shown."""
    shown = tidy(url)
    if masked(shown) != shown:
        shown = remember(url)
    url = secret_of(shown)
    store: Store = HubStore(url) if scheme_of(url) == HUB else FsspecStore(url, shown)
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
    with _lock:
        _trees.pop(tree.url, None)
        _trees[tree.url] = tree
        while len(_trees) > KNOWN:
            _trees.popitem(last=False)
    return store.url


def remember(url: str) -> str:
    """Return *url* as it may be shown; :func:`look` knows what is secret in it.

    The same URL is always shown the same. No other one is that has other secrets, or none: after
    the first a number says which it is, as in ``https://***2@host/x``.
    """
    shown = masked(url := tidy(url))
    if is_marked(url) or (shown == url and scheme_of(url) not in WEB):
        return shown
    with _lock:
        number = _number(url)
        name = marked(shown, number)
        _secrets.pop(name, None)
        _secrets[name] = url, number
        if len(_secrets) > SECRETS:
            unused = (other for other in _secrets if not any(_beside(m, other) for m in _trees))
            del _secrets[next(unused, next(iter(_secrets)))]
    return name


def _number(url: str) -> int:
    """Return the number that *url* is shown with, given what is known.

    What lies beside a file is read with the secrets of that, so a number has but one of them for
    all that lies in one folder.
    """
    own, here = secrets(url), address(url)
    near = [(secrets(other), n) for other, n in _secrets.values() if _beside(address(other), here)]
    alike = ((other, n) for other, n in near if n > 1 or bool(other[0]) == bool(own[0]))
    taken = {n for other, n in alike if other != own}
    same = {n for other, n in near if other == own} - taken
    return min(same) if same else max(taken) + 1 if 1 in taken else 1


def drop(url: str) -> None:
    """Forget the listings of *url* and of all below and above it, which has changed."""
    with _lock:
        for other in [other for other in _trees if _inside(other, url) or _inside(url, other)]:
            del _trees[other]


def secret_of(url: str) -> str:
    """Return *url* with the secrets that :func:`remember` took from it."""
    url = url.rstrip("/")
    with _lock:
        name = next((shown for shown in _secrets if _inside(url, shown)), None)
        if name is None:
            return url
        plain, query = without_query(_secrets[name][0])
    return plain + url[len(name) :] + query


def tree_at(url: str) -> tuple[Tree | None, str]:
    """Return the tree that *url* lies in, and its name there; None: it lies in none.

    The folder of a URL in use counts, too: pointers and other saves may be in it.
    """
    with _lock:
        roots = [root for root in _trees if _inside(url, root)] or _above(url)
        if not roots:
            return None, ""
        longest = max(roots, key=len)
        return _trees[longest], url[len(longest) + 1 :]


def _inside(url: str, folder: str) -> bool:
    return url == folder or url.startswith(f"{folder}/")


def _beside(url: str, other: str) -> bool:
    """Return whether a URL lies in the folder of another one, or the other way round."""
    return _inside(url, _folder(other)) or _inside(other, _folder(url))


def _folder(url: str) -> str:
    """Return the folder of a URL; of one without a path itself."""
    above = url.rpartition("/")[0]
    return url if above.endswith("/") else above


def _above(url: str) -> list[str]:
    """Return the folder of a URL in use if *url* is in it; it is known from then on."""
    for root in _trees:
        if _inside(url, root.rpartition("/")[0]):
            above = _trees[root].above()
            if above is not None and _inside(url, above.url):
                _trees[above.url] = above
                return [above.url]
    return []


_secrets: dict[str, tuple[str, int]] = {}
"""URLs with their secrets and the number that they are shown with, by what is shown."""
_trees: OrderedDict[str, Tree] = OrderedDict()
_lock = threading.Lock()
