"""Where a save of all ranks goes: a directory that appears at once, or a folder behind a URL."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import torch

from ckptctl.distributed.rank_output import SaveOptions, add_file, fill
from ckptctl.distributed.streams import stream
from ckptctl.errors import RefusedError
from ckptctl.formats.dcp.metadata import METADATA
from ckptctl.ops.overwrite import replaceable
from ckptctl.planner.plan import Plan
from ckptctl.storage import remote, remote_mounts
from ckptctl.storage.publish import Staging, destination, staging, staging_directory
from ckptctl.storage.urls import HUB, is_url, scheme_of


class Place(Protocol):
    """A place for one checkpoint."""

    target: Path

    def make_room(self, stack: ExitStack) -> None:
        """Prepare the place, on rank 0; *stack* clears away what is not published."""

    def fill(self, plan: Plan, pieces: Sequence[torch.Tensor]) -> None:
        """Write the files of one rank."""

    def size(self, name: str) -> int:
        """Return the size of a file as rank 0 sees it; -1: it does not."""

    def publish(self, metadata: Sequence[bytes]) -> None:
        """Add the metadata, on rank 0: from then on there is a checkpoint."""


def place_at(path: Path, options: SaveOptions) -> Place:
    """Return the place at *path*, which may be a URL."""
    return Url(path, options) if is_url(path) else Folder(path, options)


class Folder:
    """A directory on a file system that all ranks see."""

    _stage: Staging

    def __init__(self, path: Path, options: SaveOptions) -> None:
        self.target = destination(path.expanduser().absolute())
        self._options = options

    def make_room(self, stack: ExitStack) -> None:
        """See :class:`Place`."""
        room = staging(self.target, overwrite=self._options.overwrite, is_checkpoint=replaceable)
        self._stage = stack.enter_context(room)

    def fill(self, plan: Plan, pieces: Sequence[torch.Tensor]) -> None:
        """See :class:`Place`."""
        fill(plan, pieces, self._data, self._options)

    def size(self, name: str) -> int:
        """See :class:`Place`."""
        path = self._data / name
        return path.stat().st_size if path.is_file() else -1

    def publish(self, metadata: Sequence[bytes]) -> None:
        """See :class:`Place`."""
        add_file(self._data / METADATA, metadata, sync=self._options.sync)
        self._stage.publish()

    @property
    def _data(self) -> Path:
        return staging_directory(self.target) / "data"


class Url:
    """A folder behind a URL: ranks upload their files as streams, the metadata is uploaded last."""

    def __init__(self, path: Path, options: SaveOptions) -> None:
        self.target = path
        self._options = options
        self._url = remote_mounts.secret_of(str(path))

    def make_room(self, stack: ExitStack) -> None:
        """See :class:`Place`."""
        del stack
        hub = scheme_of(self._url) == HUB
        if hub or remote.exists(self._url, METADATA):
            raise RefusedError(
                "training cannot save to the Hub" if hub else "the destination exists",
                where=str(self.target),
                hint="save to a disk or an object store, and `ckptctl convert` to hf://"
                if hub
                else "objects cannot be replaced in one step: save under a name of its own",
            )

    def fill(self, plan: Plan, pieces: Sequence[torch.Tensor]) -> None:
        """See :class:`Place`."""
        stream(plan, pieces, self._url, checksum=self._options.checksum)

    def size(self, name: str) -> int:
        """See :class:`Place`."""
        return remote.size(self._url, name)

    def publish(self, metadata: Sequence[bytes]) -> None:
        """See :class:`Place`."""
        remote.write(self._url, METADATA, b"".join(metadata))
