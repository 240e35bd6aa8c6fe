"""A storage writer for torch's own functions: DCP directories that appear when they are whole."""

from __future__ import annotations

import dataclasses
import os
import uuid
import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ckptctl.distributed.compat import StorageInfo
from ckptctl.distributed.dcp.noted import noted
from ckptctl.distributed.dcp.write_items import resolve
from ckptctl.distributed.dcp.written_metadata import encoded
from ckptctl.distributed.saving.options import SaveOptions
from ckptctl.distributed.saving.place import Place, place_at
from ckptctl.distributed.saving.rank_local import RankFolder
from ckptctl.errors import RefusedError, StorageError, listed
from ckptctl.planner.copying.tile import MIB
from ckptctl.storage.paths import is_known, named

VERSION = "1.0.0"
_OPEN: weakref.WeakValueDictionary[str, Writer] = weakref.WeakValueDictionary()
"""The writers of this process that have made room and not yet published, by destination."""


class Writer(StorageWriter):
    """For ``dcp.save(state, storage_writer=Writer(path))``, with any save planner.

    Ranks write into a staging directory; the coordinator renames it in :meth:`finish`, after it has
    found every item of the plan in it. Below a URL (``s3://…``, ``memory://…``) there is no such
    rename: the coordinator locks the place, files are streams, and the metadata, without which
    there is no checkpoint, comes last.

    Args:
        path: Where the checkpoint will appear; on a file system that all ranks see, or a URL.
        overwrite: See :class:`~ckptctl.distributed.saving.options.SaveOptions`, as all that follow.
        files: How many per rank.
        jobs: Threads per rank.
        memory: Bytes of buffers per rank.
        sync: Whether it has to be on disk before it gets its name.
        checksum: Whether records carry CRC-32.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        files: int = 1,
        jobs: int = 0,
        memory: int = 64 * MIB,
        sync: bool = True,
        checksum: bool = True,
    ) -> None:
        super().__init__()
        self._options = SaveOptions(overwrite, files, jobs, memory, sync, checksum)
        self._stack: ExitStack | None = None
        self._place: Place | None = None
        self.reset(path)

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs to save with it."""
        return self.__dict__ | {"_stack": None, "_place": None}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forget the last save; from now on write to *checkpoint_id*, where one is given."""
        self._close()
        self._rank, self._apart = 0, False
        self._save_id = str(uuid.uuid4())
        if checkpoint_id is not None:
            self.checkpoint_id = checkpoint_id

    @noted
    def set_up_storage_writer(
        self,
        is_coordinator: bool,  # noqa: ARG002
        *_: Any,
        **kwargs: Any,
    ) -> None:
        """Take note of who this rank is; see ``torch.distributed.checkpoint.StorageWriter``.

        Raises:
            RefusedError: The path is no place for a checkpoint, or for one without collectives.
        """
        self._close()
        self._rank = kwargs.get("rank") or 0
        self._apart = not kwargs.get("use_collectives", True)
        path = named(self.checkpoint_id)
        self._place = (
            RankFolder(path, self._rank, self._options)
            if self._apart
            else place_at(path, self._options)
        )

    @noted
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Say where this rank is about to write."""
        return dataclasses.replace(plan, storage_data=self._target)

    @noted
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make room for all ranks; on the coordinator only, or on each for itself.

        Raises:
            RefusedError: Something is there, or ranks mean different places.
            StorageError: A directory cannot be made.
        """
        strange = [str(plan.storage_data) for plan in plans if plan.storage_data != self._target]
        # Plans that the planner made anew carry no mark of the writer.
        strange = [place for place in strange if place != "None"]
        if strange:
            raise RefusedError(
                "the ranks were told different destinations",
                where=self._target,
                why=f"another one: {strange[0]}",
                hint="pass the same absolute path on every rank",
            )
        self._make_room()
        return plans

    @noted
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what this rank has to; when this returns, it is written.

        Raises:
            CkptError: What the planner gives is not what it planned, or a file cannot be written.
        """
        found = resolve(plan, planner, self._rank, self._options.files)
        self._place_set.fill(found.files.plan, found.pieces)
        future: Future[list[WriteResult]] = Future()
        future.set_result(found.results())
        return future

    @noted
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata and publish; on the coordinator only.

        Args:
            metadata: Of the planner; it is told where all items lie.
            results: What the ranks have written.

        Raises:
            StorageError: An item of the plan is not there; nothing is published.
        """
        stored = {one.index: one.storage_data for own in results for one in own}
        _require_all(metadata, stored, self._target)
        metadata.version, metadata.storage_data = VERSION, stored
        metadata.storage_meta = self.storage_meta()
        # Without collectives nobody tells a writer how many ranks its group has.
        content = encoded(metadata, 0 if self._apart else len(results))
        self._require_files(stored.values())
        if self._stack is None:
            raise RefusedError("another save took the place of this one", where=self._target)
        self._place_set.publish(content)
        self._close()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this writer can write to *checkpoint_id*."""
        return is_known(checkpoint_id)

    def storage_meta(self) -> StorageMeta:
        """Return what planners and metadata are told of this save."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save_id)

    @property
    def _place_set(self) -> Place:
        assert self._place, "torch sets a writer up before anything else"
        return self._place

    @property
    def _target(self) -> str:
        return str(self._place_set.target)

    def _make_room(self) -> None:
        # A save that fails on another rank does not come back here; its place is still taken.
        earlier = None if self._apart else _OPEN.get(self._target)
        if earlier:
            earlier._close()
        with ExitStack() as stack:
            self._place_set.make_room(stack)
            self._stack = stack.pop_all()
        if not self._apart:
            _OPEN[self._target] = self
        weakref.finalize(self, _close, self._stack)

    def _require_files(self, places: Iterable[StorageInfo]) -> None:
        """Make sure that the coordinator sees what the others wrote."""
        ends: dict[str, int] = {}
        for place in places:
            end = place.offset + place.length
            ends[place.relative_path] = max(end, ends.get(place.relative_path, 0))
        for name, end in ends.items():
            size = self._place_set.size(name)
            if size < end:
                raise StorageError(
                    "what a rank wrote is not there",
                    where=f"{self._target}, {name}",
                    why=f"{end:,} bytes are needed, {max(size, 0):,} are there",
                    hint="save to a file system that all ranks share",
                )

    def _close(self) -> None:
        if self._stack:
            _close(self._stack)
        self._stack = None


def _close(stack: ExitStack) -> None:
    with suppress(ValueError):  # signal handlers are given back by the main thread alone
        stack.close()


def _require_all(metadata: Metadata, stored: Collection[MetadataIndex], where: str) -> None:
    lacking = [str(index.fqn) for index in _planned(metadata) if index not in stored]
    if lacking:
        raise StorageError(
            f"{len(lacking):,} of the plan's items were not written",
            where=where,
            why=listed(lacking),
        )


def _planned(metadata: Metadata) -> Iterator[MetadataIndex]:
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            yield MetadataIndex(name)
        else:
            for chunk in entry.chunks:
                yield MetadataIndex(name, chunk.offsets)
