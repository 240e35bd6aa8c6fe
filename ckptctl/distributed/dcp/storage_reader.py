"""Storage reader for torch's ``dcp.load`` that reads only the required bytes, of any format."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor
from torch.futures import Future

from ckptctl.catalog import Box, Catalog
from ckptctl.distributed.compat import ShardedTensor
from ckptctl.distributed.dcp.metadata import CatalogMetadata, add_error_notes
from ckptctl.distributed.loading.target_memory import (
    build_memory_by_name,
    build_requested_tensors,
    execute_load_plan,
)
from ckptctl.distributed.positions import record_visited_checkpoint
from ckptctl.distributed.state import TensorShard, flatten_state
from ckptctl.distributed.values import format_skipped_values, read_values, serialize_value
from ckptctl.errors import CkptError, MappingError
from ckptctl.keywords import accept_keywords
from ckptctl.options import Option
from ckptctl.planner.boxes import check_coverage
from ckptctl.save_load.loading.checks import require_nothing_lost
from ckptctl.save_load.loading.identity import (
    Fingerprint,
    make_fingerprint,
    require_same_checkpoint,
)
from ckptctl.save_load.loading.key_comparison import with_rank_tensors
from ckptctl.save_load.loading.load_options import LoadOptions
from ckptctl.save_load.loading.reading import prepare_read
from ckptctl.save_load.loading.state_mapping import StateMapping
from ckptctl.save_load.saving.local_shards import TensorMeta
from ckptctl.storage.paths import has_known_scheme, parse_path

_log = logging.getLogger("ckptctl")


@dataclass(frozen=True, kw_only=True)
class _ReaderOptions(LoadOptions):
    state_dict: Annotated[
        Mapping[str, Any] | None,
        Option("State dict to load into. Required for planners that do not provide it."),
    ] = None


class Reader(StorageReader):
    """Reader for ``dcp.load(state, storage_reader=Reader(path))``.

    With :class:`~ckptctl.distributed.LoadPlanner`, the layout of the state is detected. Other
    planners look up the names of the state immediately, so pass *state_dict* if the checkpoint has
    other names. Without *allow_overflow*, a load with overflowing values fails after it has filled
    the tensors.

    Attributes:
        bytes_read: Bytes of tensors that this rank read in the last load, except from URLs.

    Raises:
        UsageError: An option is invalid.
    """

    @accept_keywords(_ReaderOptions)
    def __init__(self, path: str | os.PathLike[str], options: _ReaderOptions) -> None:
        """Create a reader for *path*.

        Args:
            path: Checkpoint of any format, or the URL of a DCP directory (``s3://…``).
            options: All other arguments.
        """
        super().__init__()
        self._options = options
        self.reset(path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Discard the state of the last load, and read from *checkpoint_id* if it is not None."""
        if checkpoint_id is not None:
            self.checkpoint_id = checkpoint_id
        self._rank = 0
        self._opened: Catalog | None = None
        self._metadata: CatalogMetadata | None = None
        self.bytes_read = 0

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the metadata of a checkpoint of any format.

        Errors are raised by later calls, because torch would hide the message of an error raised
        here.
        """
        try:
            self._opened = self._options.open_catalog(os.fspath(self.checkpoint_id))
            self._metadata = CatalogMetadata(self._opened, self._options)
            if self._options.state_dict is not None:
                self._metadata.adapt_to_state(flatten_state(self._options.state_dict).meta)
        except CkptError as error:
            self._metadata = CatalogMetadata(None, self._options, error)
        self._metadata.storage_meta = StorageMeta(checkpoint_id=self.checkpoint_id)
        return self._metadata

    @add_error_notes
    def set_up_storage_reader(
        self,
        metadata: Metadata,
        is_coordinator: bool,  # noqa: ARG002
        *_: Any,
        **kwargs: Any,
    ) -> None:
        """Store the metadata and the rank of this process.

        Raises:
            CkptError: The checkpoint cannot be read.
        """
        if not isinstance(metadata, CatalogMetadata):
            raise MappingError("the metadata was not read by this reader")
        metadata.require_mapping()
        self._metadata = metadata
        self._rank = kwargs.get("rank") or 0

    @add_error_notes
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Verify that the tensors of *plan* are complete, and add a fingerprint of the checkpoint.

        Raises:
            CoverageError: A tensor is incomplete.
        """
        mapping = self._get_mapping()
        for name in dict.fromkeys(item.storage_index.fqn for item in plan.items):
            for key in mapping.tensors[name].keys if name in mapping.tensors else ():
                check_coverage(mapping.catalog.tensors[key])
        assert self._opened
        return replace(plan, storage_data=make_fingerprint(self._opened))

    @add_error_notes
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Verify on the coordinator that converting the layout loses no data.

        Raises:
            MappingError: Data would be lost.
            RefusedError: The ranks see different checkpoints.
        """
        fingerprints = [
            plan.storage_data for plan in plans if isinstance(plan.storage_data, Fingerprint)
        ]
        require_same_checkpoint(fingerprints, str(self.checkpoint_id))
        mapping = self._get_mapping()
        if mapping.redundant:
            require_nothing_lost(mapping)
        return plans

    @add_error_notes
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors for the items of *plan* synchronously.

        Returns:
            A future that is already done.

        Raises:
            CkptError: A dtype would change, or a file cannot be read.
        """
        tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        values = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        contents = self._read_contents(values, strict=bool(getattr(planner, "strict", True)))
        self._fill_tensors(tensors, planner)
        for item in values:
            if item.storage_index.fqn in contents:
                planner.load_bytes(item, contents[item.storage_index.fqn])
        record_visited_checkpoint(parse_path(os.fspath(self.checkpoint_id)))
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this reader supports *checkpoint_id*."""
        return has_known_scheme(checkpoint_id)

    def _get_mapping(self) -> StateMapping:
        assert self._metadata
        return self._metadata.require_mapping()

    def _fill_tensors(self, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        targets = [(item, planner.resolve_tensor(item)) for item in items]
        shards = [_build_target_shard(item, tensor.detach()) for item, tensor in targets]
        requested_tensors = build_requested_tensors(
            _build_tensor_metas(shards, self._get_mapping()), shards
        )
        cast = self._options.cast or bool(getattr(planner, "cast", False))
        state = getattr(planner, "state_dict", {})
        regular_names = [
            n
            for n in requested_tensors
            if not isinstance(state.get(n), DTensor | ShardedTensor | None)
        ]
        mapping = with_rank_tensors(self._get_mapping(), regular_names, self._rank, state)
        plan = prepare_read(mapping, requested_tensors, cast=cast).plan_tensors(requested_tensors)
        execution = execute_load_plan(build_memory_by_name(shards), plan, self._options)
        self.bytes_read = execution.bytes_read
        self._options.require_in_range(execution.lost)
        for item, tensor in targets:
            planner.commit_tensor(item, tensor)

    def _read_contents(self, items: Sequence[ReadItem], *, strict: bool) -> dict[str, io.BytesIO]:
        """Read non-tensor values without running code, and pickle them again for the planner."""
        loaded = read_values(
            self._get_mapping(),
            [item.storage_index.fqn for item in items],
            self._rank,
            trusted=self._options.trusted,
            strict=strict,
        )
        if loaded.refused:
            _log.warning("%s", format_skipped_values(loaded.refused))
        return {name: io.BytesIO(serialize_value(value)) for name, value in loaded.values.items()}


def _build_target_shard(item: ReadItem, tensor: torch.Tensor) -> TensorShard:
    """Describe the target tensor of a read item as a shard."""
    first = item.storage_index.offset or (0,) * len(item.lengths)
    pairs = zip(first, item.storage_offsets, strict=True)
    shard = TensorShard(
        item.storage_index.fqn,
        Box(tuple(low + offset for low, offset in pairs), tuple(item.lengths)),
        tensor,
    )
    if tuple(tensor.shape) != shard.box.sizes:
        raise MappingError(
            f"the planner has shape {list(tensor.shape)} for {shard.box} of `{shard.name}`"
        )
    return shard


def _build_tensor_metas(
    shards: Sequence[TensorShard], mapping: StateMapping
) -> dict[str, TensorMeta]:
    """Describe the global tensors of *shards*."""
    tensors: dict[str, TensorMeta] = {}
    for shard in shards:
        dtype = str(shard.tensor.dtype).removeprefix("torch.")
        if (
            tensors.setdefault(
                shard.name, TensorMeta(dtype, mapping.tensors[shard.name].shape, ())
            ).dtype
            != dtype
        ):
            raise MappingError(f"the planner has parts of `{shard.name}` in several dtypes")
    return tensors
