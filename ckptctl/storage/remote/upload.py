"""Where a finished output goes when its destination is a URL: an object store, or the Hub.

There is no rename of many objects in one step. On the Hub nothing is seen until the commit, which
is one step. Elsewhere what makes the files a checkpoint, its index, is uploaded last and, where a
checkpoint is replaced, removed first: who looks for that never sees a part of one, or parts of two.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ckptctl.errors import RefusedError, UsageError
from ckptctl.storage.remote import trees
from ckptctl.storage.remote.store import system_of
from ckptctl.storage.remote.urls import HUB, masked, scheme_of

INDEXES = (".index.json", ".metadata")
"""What the files end with that make others a checkpoint."""


@dataclass(frozen=True, slots=True)
class UploadRequest:
    """What is asked of a place.

    Attributes:
        names: The files of the output, that which makes them one the last.
        single: The name of the only file; None: the output is a folder.
        overwrite: Whether a checkpoint there may be replaced.
        resume: Whether to go on with what an interrupted run uploaded, and to leave it after an
            error.
        is_checkpoint: Whether what is there may be overwritten.
    """

    names: Sequence[str]
    single: str | None = None
    overwrite: bool = False
    resume: bool = False
    is_checkpoint: Callable[[], bool] = lambda: False


class Upload(Protocol):
    """One output on its way to a folder behind a URL."""

    resumed: int
    """Bytes that were there already."""

    def put(self, name: str, path: Path) -> None:
        """Upload a complete file."""

    def require_whole(self) -> None:
        """Prove that all there is of this output is as it was uploaded."""

    def commit(self) -> None:
        """Make the files seen, all of which are uploaded."""

    def abandon(self) -> str:
        """Take back what can be, and say what is left."""

    def close(self) -> None:
        """Let go of the place: all is done."""


def begin_upload(url: str, asked: UploadRequest) -> Upload:
    """Begin an upload to *url*, where nobody else writes until it ends."""
    url = trees.secret_of(url)
    if scheme_of(url) == HUB:
        from ckptctl.storage.remote.hub_upload import HubUpload

        return HubUpload(url, single=asked.single, overwrite=asked.overwrite)
    from ckptctl.storage.remote.object_upload import ObjectUpload

    return ObjectUpload(url, asked)


def is_at_once(url: str) -> bool:
    """Return whether all files of an upload to *url* appear in one step: on the Hub they do."""
    return scheme_of(url) == HUB


def require_apart(target: str, read: Mapping[str, Collection[str]]) -> None:
    """Refuse a place that holds what is read, by whichever URL of it.

    On the Hub what is read is a commit, which stays.
    """
    if scheme_of(target) == HUB:
        return
    if ".." in target.split("/"):
        raise UsageError("a destination behind a URL has no `..`", where=masked(target))
    system, path = system_of(trees.secret_of(target))
    for root, names in read.items():
        if scheme_of(root) in ("", HUB):
            continue
        other, folder = system_of(trees.secret_of(root))
        inside = (f"{folder}/{name}/".startswith(f"{path}/") for name in names)
        if other == system and any(inside):
            what = "the source lies inside the destination"
            raise RefusedError(what, where=masked(target), why=root)
