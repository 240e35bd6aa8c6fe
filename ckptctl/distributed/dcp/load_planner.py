"""Load planner for torch's ``dcp.load`` that verifies that every element is read."""

from __future__ import annotations

import io
import logging
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from ckptctl.catalog import Box
from ckptctl.catalog import Path as Keys
from ckptctl.distributed import compat
from ckptctl.distributed.compat import ShardedTensor
from ckptctl.distributed.dcp.metadata import (
    CatalogMetadata,
    add_error_notes,
    build_mapping,
    to_chunk,
)
from ckptctl.distributed.leaves.records import POSITION_PARTS
from ckptctl.distributed.state import (
    FlatState,
    TensorShard,
    copy_placement,
    flatten_state,
    has_placement,
)
from ckptctl.distributed.values import (
    find_invalid_positions,
    format_skipped_values,
    replace_leaf,
    unpickle_value,
)
from ckptctl.errors import CoverageError, MappingError, UnsupportedError, quote_names
from ckptctl.planner.boxes import compute_coverage
from ckptctl.save_load.loading.checks import find_casts, require_same_shapes
from ckptctl.save_load.loading.key_comparison import (
    build_load_report,
    compare_keys,
    require_equal_keys,
)
from ckptctl.save_load.loading.load_options import LoadReport
from ckptctl.save_load.loading.state_mapping import RequestedTensor

NO_SIZE = torch.Size([0])
"""Size of non-tensor values, as in torch's planners."""
_log = logging.getLogger("ckptctl")


@dataclass
class NamedPlan(LoadPlan):
    """Load plan that also contains the keys of all tensors and values that a rank requires."""

    tensors: dict[str, Keys] = field(default_factory=dict)
    values: dict[str, Keys] = field(default_factory=dict)
    comparison: LoadReport | None = None


class LoadPlanner(DefaultLoadPlanner):
    """Planner for ``dcp.load(state, planner=LoadPlanner())``, with any storage reader.

    With :class:`~ckptctl.distributed.Reader`, the state and the checkpoint may have different
    layouts. Each rank detects the layout from its part of the state.

    Args:
        strict: Whether missing and unexpected names are errors. If False, only the report lists
            them.
        cast: Whether floating-point tensors may be loaded with another dtype.
        trusted: Whether non-tensor values may run code when they are unpickled.

    Attributes:
        report: Report of the last load, available once it is planned.
    """

    report: LoadReport

    def __init__(self, *, strict: bool = True, cast: bool = False, trusted: bool = False) -> None:
        super().__init__(allow_partial_load=not strict)
        self.strict, self.cast, self.trusted = strict, cast, trusted

    @add_error_notes
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Set the state to load and the metadata of the checkpoint.

        Raises:
            CkptError: The checkpoint cannot be read, or does not match the state.
        """
        assert metadata is not None
        _allocate_meta_tensors(state_dict)
        self.original_state_dict = state_dict
        self.state_dict, self.mappings = compat.flatten_state_dict(state_dict)
        self.metadata = self._offered = metadata
        self.is_coordinator = is_coordinator
        self._state: FlatState = flatten_state(state_dict)
        if isinstance(metadata, CatalogMetadata):
            metadata.adapt_to_state(self._state.meta)
        self._pieces: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self._positions: dict[str, object] = {}
        self._mapping = build_mapping(metadata)

    @add_error_notes
    def create_local_plan(self) -> LoadPlan:
        """Plan the reads of this rank.

        Raises:
            MappingError: A shape or a dtype differs, or names are missing.
            CoverageError: A part of a tensor is missing from the checkpoint.
        """
        paths = {name: meta.path for name, meta in self._state.meta.items()}
        values = self._state.paths
        entries = self._offered.state_dict_metadata
        requested_tensors = {
            name: RequestedTensor(meta.dtype, meta.shape, ())
            for name, meta in self._state.meta.items()
        }
        require_same_shapes(self._mapping.tensors, requested_tensors)
        self._cast = find_casts(self._mapping, requested_tensors, self.cast)
        items: list[ReadItem] = []
        for name, tensor in self._state.tensors.items():
            entry = entries.get(name)
            if isinstance(entry, TensorStorageMetadata):
                for shard in tensor.shards:
                    items += self._create_read_items(shard, entry)
            elif entry:
                raise MappingError(f"`{name}` is not a tensor in the checkpoint")
        for name in values:
            entry, index = entries.get(name), MetadataIndex(name)
            if isinstance(entry, TensorStorageMetadata):
                raise MappingError(f"`{name}` is a tensor in the checkpoint, but not in the state")
            if entry:
                items.append(
                    ReadItem(LoadItemType.BYTE_IO, index, NO_SIZE, index, NO_SIZE, NO_SIZE)
                )
        if self.strict and not (paths.keys() | values.keys()) <= entries.keys():
            comparison = compare_keys(self._mapping, paths, values)
            require_equal_keys(replace(comparison, unexpected=()), self._mapping)
        return NamedPlan(items, tensors=paths, values=values)

    @add_error_notes
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Compare the names of all ranks with the checkpoint, only on the coordinator.

        Raises:
            MappingError: The checkpoint has names that no rank requires.
        """
        plans = [plan for plan in global_plan if isinstance(plan, NamedPlan)]
        if len(plans) < len(global_plan):
            raise MappingError("all ranks must load with the same planner")
        tensors = {name: path for plan in plans for name, path in plan.tensors.items()}
        values = {name: path for plan in plans for name, path in plan.values.items()}
        comparison = compare_keys(self._mapping, tensors, values)
        if self.strict:
            require_equal_keys(replace(comparison, missing=()), self._mapping)
        return [replace(plan, tensors={}, values={}, comparison=comparison) for plan in plans]

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Build the report of the load, and return *new_plan* unchanged."""
        comparison = getattr(new_plan, "comparison", None) or LoadReport()
        entries = self._offered.state_dict_metadata
        names = (*self._state.tensors, *self._state.values)
        loaded = tuple(name for name in names if name in entries)
        self.report = build_load_report(comparison, self._mapping, loaded, self._cast)
        return new_plan

    @add_error_notes
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Unpickle a non-tensor value and replace it in the state.

        Raises:
            CkptError: The value cannot be read, or contains an object of a class that is not known
                to be harmless.
        """
        name = read_item.dest_index.fqn
        try:
            leaf = unpickle_value(value.getvalue(), name, "the checkpoint", trusted=self.trusted)
        except UnsupportedError as error:
            if self.strict:
                raise
            refused = {name: f"{error.why}"}
            _log.warning("%s", format_skipped_values(refused))
            loaded = tuple(other for other in self.report.loaded if other != name)
            left_out = {**self.report.left_out, **refused}
            self.report = replace(self.report, loaded=loaded, left_out=left_out)
            return
        if name.rpartition(".")[2] in POSITION_PARTS and not self.trusted:
            self._positions[name] = leaf
            for position_error in find_invalid_positions(
                self._positions, "the checkpoint"
            ).values():
                raise position_error
        replace_leaf(self.original_state_dict, self._state.values[name].path, leaf)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return the local shard that contains the item at *index*."""
        assert index.offset is not None
        return self._pieces[index.fqn, tuple(index.offset)]

    def _create_read_items(
        self, shard: TensorShard, entry: TensorStorageMetadata
    ) -> list[ReadItem]:
        name = shard.name
        if 0 in shard.box.sizes:
            return []
        self._pieces[name, shard.box.offsets] = shard.tensor
        items = compat.create_read_items_for_chunk_list(name, entry, [to_chunk(shard.box)])
        parts = [Box(tuple(item.dest_offsets), tuple(item.lengths)) for item in items]
        covered = compute_coverage(shard.box.sizes, parts)
        if not covered.is_exact:
            invalid = covered.holes or covered.overlaps or covered.outside
            raise CoverageError(
                f"a part of `{name}` is "
                + (
                    "missing from the checkpoint"
                    if covered.holes
                    else "in the checkpoint more than once"
                ),
                where=f"tensor `{name}`, {shard.box}",
                why=f"affected within this box: {quote_names([str(part) for part in invalid])}",
                hint="check whether a rank's file or metadata is missing",
            )
        return items


def _allocate_meta_tensors(state_dict: dict[str, Any]) -> None:
    """Allocate tensors on the meta device in place, as torch's planner does."""
    flat, paths = compat.flatten_state_dict(state_dict)
    for name, leaf in flat.items():
        # Attributes of a ShardedTensor raise if it does not have exactly one shard.
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, ShardedTensor) and leaf.is_meta:
            allocated = {name: leaf}
            compat.init_state_dict(allocated)
            if has_placement(leaf):  # lost by torch before 2.14
                copy_placement(leaf, allocated[name])
            replace_leaf(state_dict, paths[name], allocated[name])
