"""Storage writer for torch's ``dcp.save`` that publishes DCP directories atomically."""

from __future__ import annotations

import dataclasses
import io
import os
import uuid
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ckptctl import dtypes
from ckptctl.distributed.compat import StorageInfo
from ckptctl.distributed.dcp.metadata import add_error_notes, encode_metadata
from ckptctl.distributed.dcp.save_planner import SavePlanner as OwnPlanner
from ckptctl.distributed.dcp.save_planner import SharePlan
from ckptctl.distributed.devices import synchronize_devices
from ckptctl.distributed.positions import record_visited_checkpoint
from ckptctl.distributed.saving.destination import (
    RankFolderTarget,
    SaveTarget,
    build_target,
    require_visible_rank_files,
)
from ckptctl.distributed.saving.local_state import LocalState, get_save_strides
from ckptctl.distributed.saving.save_options import WriterOptions
from ckptctl.errors import MappingError, RefusedError, StorageError, quote_names
from ckptctl.keywords import accept_keywords
from ckptctl.save_load.saving.global_plan import RankShare
from ckptctl.save_load.saving.local_shards import LocalChunk, LocalShards, TensorMeta
from ckptctl.save_load.saving.save_files import lay_out_rank_files
from ckptctl.storage.paths import has_known_scheme, parse_path

METADATA_VERSION = "1.0.0"
_OPEN_WRITERS: weakref.WeakValueDictionary[str, Writer] = weakref.WeakValueDictionary()
"""Writers of this process that have prepared but not yet published a checkpoint, by path."""


class Writer(StorageWriter):
    """Writer for ``dcp.save(state, storage_writer=Writer(path))``, with any save planner.

    Ranks write to a staging directory. The coordinator publishes it by a rename in :meth:`finish`,
    after it has checked that every item of the plan was written. For a URL (``s3://…``,
    ``memory://…``), the coordinator locks the destination, files are uploaded as streams, and the
    metadata is uploaded last.
    """

    @accept_keywords(WriterOptions)
    def __init__(self, path: str | os.PathLike[str], options: WriterOptions) -> None:
        """Create a writer for *path*.

        Args:
            path: Destination, on a file system that all ranks share, or a URL.
            options: All other arguments.
        """
        super().__init__()
        self._options = options
        self._stack: ExitStack | None = None
        self._place: SaveTarget | None = None
        self.reset(path)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without open resources, so that another process can save."""
        return self.__dict__ | {"_stack": None, "_place": None}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Abort an unfinished save, and set the destination to *checkpoint_id* if given."""
        self._close_open_stack()
        self._rank, self._is_rank_local = 0, False
        self._save_id = str(uuid.uuid4())
        if checkpoint_id is not None:
            self.checkpoint_id = checkpoint_id

    @add_error_notes
    def set_up_storage_writer(
        self,
        is_coordinator: bool,  # noqa: ARG002
        *_: Any,
        **kwargs: Any,
    ) -> None:
        """Store the rank of this process, and create the target of the save.

        Raises:
            RefusedError: The path cannot hold a checkpoint, or is a URL and collectives are
                disabled.
        """
        self._close_open_stack()
        self._rank = kwargs.get("rank") or 0
        self._is_rank_local = not kwargs.get("use_collectives", True)
        path = parse_path(self.checkpoint_id)
        self._place = (
            RankFolderTarget(path, self._rank, self._options)
            if self._is_rank_local
            else build_target(path, self._options)
        )

    @add_error_notes
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Add the destination of this rank to its plan."""
        return dataclasses.replace(plan, storage_data=self._target_path)

    @add_error_notes
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Prepare the destination on the coordinator, or on every rank if collectives are disabled.

        Raises:
            RefusedError: The destination exists, or ranks have different ones.
            StorageError: A directory cannot be created.
        """
        other_targets = [
            str(plan.storage_data) for plan in plans if plan.storage_data != self._target_path
        ]
        # Plans that the planner replaced have no storage data.
        other_targets = [place for place in other_targets if place != "None"]
        if other_targets:
            raise RefusedError(
                "the ranks have different destinations",
                where=self._target_path,
                why=f"another rank has {other_targets[0]}",
                hint="pass the same absolute path on every rank",
            )
        self._prepare_target()
        return plans

    @add_error_notes
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files synchronously.

        Returns:
            A future that is already done.

        Raises:
            CkptError: The planner's data does not match its plan, or a file cannot be written.
        """
        with self._close_on_error():
            # A subclass of the planner may resolve its items to other data.
            if type(planner) is OwnPlanner and isinstance(plan, SharePlan) and plan.share:
                state, share = planner.local_state, plan.share
            else:
                state, share = _build_local_state(plan.items, planner)
            count = self._options.choose_file_count
            output = lay_out_rank_files(
                self._rank, state.shards, share, state.strides, state.values, count
            )
            self._save_target.write_files(output.plan, state.pieces)
            places, values = output.tensors.items.iterate_positions(), output.items
            results = [
                WriteResult(item.index, nbytes, StorageInfo(file, offset, nbytes))
                for item in plan.items
                for file, offset, nbytes in [values.get(item.index.fqn) or next(places)]
            ]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    @add_error_notes
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata and publish the checkpoint. Only the coordinator calls this method.

        Raises:
            StorageError: An item of the plan is missing, and nothing is published.
        """
        with self._close_on_error():
            stored = {
                result.index: result.storage_data
                for rank_results in results
                for result in rank_results
            }
            _require_all_written(metadata, stored, self._target_path)
            metadata.version, metadata.storage_data = METADATA_VERSION, stored
            metadata.storage_meta = self.storage_meta()
            # Without collectives, a writer does not know the number of ranks.
            content = encode_metadata(metadata, 0 if self._is_rank_local else len(results))
            first = self._rank if self._is_rank_local else 0
            sizes = {
                rank: _compute_file_sizes(rank_results)
                for rank, rank_results in enumerate(results, first)
            }
            require_visible_rank_files(self._save_target, sizes)
            if self._stack is None:
                raise RefusedError("another save replaced this one", where=self._target_path)
            self._save_target.publish(content)
            record_visited_checkpoint(parse_path(self._target_path))
            self._close_open_stack()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this writer supports *checkpoint_id*."""
        return has_known_scheme(checkpoint_id)

    def storage_meta(self) -> StorageMeta:
        """Return the save ID and the destination."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save_id)

    @property
    def _save_target(self) -> SaveTarget:
        assert self._place, "torch sets up a writer first"
        return self._place

    @property
    def _target_path(self) -> str:
        return str(self._save_target.target)

    def _prepare_target(self) -> None:
        # After a failure on another rank, torch does not call this writer again to clean up.
        earlier = None if self._is_rank_local else _OPEN_WRITERS.get(self._target_path)
        if earlier:
            earlier._close_open_stack()
        with ExitStack() as stack:
            self._save_target.prepare_target(stack)
            self._stack = stack.pop_all()
        if not self._is_rank_local:
            _OPEN_WRITERS[self._target_path] = self
        weakref.finalize(self, _close_stack, self._stack)

    @contextmanager
    def _close_on_error(self) -> Iterator[None]:
        """If the block fails, remove the staging directory and restore signal handlers."""
        try:
            yield
        except BaseException:
            self._close_open_stack()
            raise

    def _close_open_stack(self) -> None:
        if self._stack:
            _close_stack(self._stack)
        self._stack = None


def _close_stack(stack: ExitStack) -> None:
    with suppress(ValueError):  # only the main thread can restore signal handlers
        stack.close()


def _compute_file_sizes(results: Iterable[WriteResult]) -> dict[str, int]:
    """Compute the size in bytes of each file of one rank, by name.

    A file ends where its last item ends.
    """
    sizes: dict[str, int] = {}
    for info in (result.storage_data for result in results):
        sizes[info.relative_path] = max(info.offset + info.length, sizes.get(info.relative_path, 0))
    return sizes


def _require_all_written(metadata: Metadata, stored: Collection[MetadataIndex], where: str) -> None:
    planned = (
        index
        for name, entry in metadata.state_dict_metadata.items()
        for index in (
            [MetadataIndex(name)]
            if isinstance(entry, BytesStorageMetadata)
            else [MetadataIndex(name, chunk.offsets) for chunk in entry.chunks]
        )
    )
    missing_names = [str(index.fqn) for index in planned if index not in stored]
    if missing_names:
        raise StorageError(
            f"{len(missing_names):,} of the plan's items were not written",
            where=where,
            why=quote_names(missing_names),
        )


def _build_local_state(
    items: Sequence[WriteItem], planner: SavePlanner
) -> tuple[LocalState, RankShare]:
    """Convert the write items of any planner to a state, and assign all of it to this rank."""
    tensors: dict[str, TensorMeta] = {}
    chunks: list[LocalChunk] = []
    pieces: list[torch.Tensor] = []
    values: dict[str, bytes] = {}
    for item in items:
        name, data = item.index.fqn, item.tensor_data
        if item.type == WriteItemType.BYTE_IO:
            values[name] = _resolve_bytes(item, planner)
            continue
        assert data
        dtype = str(data.properties.dtype).removeprefix("torch.")
        if dtype not in dtypes.BY_NAME:
            raise RefusedError(f"`{name}` has dtype {dtype}, which no supported format can store")
        meta = TensorMeta(dtype, tuple(data.size), (name,), bool(data.properties.requires_grad))
        if tensors.setdefault(name, meta) != meta:
            raise MappingError(f"two boxes of `{name}` are planned as parts of different tensors")
        chunks.append(LocalChunk(name, tuple(data.chunk.offsets), tuple(data.chunk.sizes)))
        pieces.append(_resolve_tensor(item, planner))
    synchronize_devices(pieces)
    steps = [get_save_strides(piece) for piece in pieces]
    share = RankShare(range(len(pieces)), {name: name for name in values})
    return LocalState(LocalShards(tensors, chunks), pieces, steps, values), share


def _resolve_tensor(item: WriteItem, planner: SavePlanner) -> torch.Tensor:
    resolved = planner.resolve_data(item)
    data = item.tensor_data
    if not isinstance(resolved, torch.Tensor) or data is None:
        raise MappingError(f"`{item.index.fqn}` is planned as a tensor, but is not one")
    piece = resolved.detach()
    if piece.layout is not torch.strided or piece.is_quantized or piece.is_meta:
        raise RefusedError(f"`{item.index.fqn}` is not a dense tensor", why=f"it is {piece.layout}")
    planned = (data.properties.dtype, tuple(data.chunk.sizes))
    if (piece.dtype, tuple(piece.shape)) != planned:
        raise MappingError(
            f"`{item.index.fqn}` does not match the plan",
            where=f"tensor `{item.index.fqn}`",
            why=f"it is {piece.dtype} {list(piece.shape)}, but the plan expects "
            f"{planned[0]} {list(planned[1])}",
            hint="create the plan from this state",
        )
    return piece.resolve_conj().resolve_neg()


def _resolve_bytes(item: WriteItem, planner: SavePlanner) -> bytes:
    resolved = planner.resolve_data(item)
    if not isinstance(resolved, io.BytesIO):
        raise MappingError(f"`{item.index.fqn}` is planned as bytes, but has none")
    return resolved.getvalue()
