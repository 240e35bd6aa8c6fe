"""Where a finished output goes when its destination is a URL: an object store, or the Hub.

There is no rename of many objects in one step. On the Hub nothing is seen until the commit, which
is one step. Elsewhere what makes the files a checkpoint, its index, is uploaded last and, where a
checkpoint is replaced, removed first: who looks for that never sees a part of one, or parts of two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ckptctl.storage.remote import mounts
from ckptctl.storage.remote.urls import HUB, scheme_of

INDEXES = (".index.json", ".metadata")
"""What the files end with that make others a checkpoint."""


@dataclass(frozen=True, slots=True)
class Asked:
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


class Destination(Protocol):
    """A folder behind a URL that an output is written to."""

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


def open_destination(url: str, asked: Asked) -> Destination:
    """Return the place that *url* names.

    Args:
        url: A folder; of a single file the folder that it is going to be in.
        asked: What is asked of it.

    Raises:
        RefusedError: There is something, or another run writes to it.
        UsageError: No file system for it is known or installed.
        StorageError: The place cannot be reached, or does not let us look.
    """
    url = mounts.secret_of(url)
    if scheme_of(url) == HUB:
        from ckptctl.storage.remote.hub_upload import HubDestination

        return HubDestination(url, single=asked.single, overwrite=asked.overwrite)
    from ckptctl.storage.remote.object_upload import ObjectDestination

    return ObjectDestination(url, asked)
