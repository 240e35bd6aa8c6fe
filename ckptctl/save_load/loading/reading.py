"""Planning of reads from a checkpoint of any format into the memory of tensors.

Requested tensors have names, dtypes, shapes and boxes in this process's memory. They are filled by
the same transfers as in a conversion, which rename and reorder data if the layout of the checkpoint
differs. This module does not use torch, because plans refer to memory by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ckptctl import dtypes
from ckptctl.catalog import (
    Box,
    Catalog,
    Extent,
    TensorEntry,
    build_memory_name,
    compute_row_major_strides,
)
from ckptctl.columns import get_byte_ranges
from ckptctl.conversion.checked_ranges import find_checked_transfers
from ckptctl.conversion.sources import locate_bytes
from ckptctl.conversion.transfers import identify_read_files, plan_transfers, read_identities
from ckptctl.formats.base import OutputLayout, TensorPlace
from ckptctl.planner.boxes import check_coverage, intersect_boxes
from ckptctl.planner.mapping.mapped import ComposedTensor
from ckptctl.planner.plan import Plan, Record, Transfer
from ckptctl.save_load.loading.checks import (
    find_casts,
    require_boxes_covered,
    require_complete_tensors,
    require_same_shapes,
)
from ckptctl.save_load.loading.state_mapping import MemoryBox, RequestedTensor, StateMapping
from ckptctl.storage.execution.execution_options import Execution, ExecutionOptions
from ckptctl.storage.execution.executor import execute_plan


class RequestedBox(NamedTuple):
    """Box of a tensor to read in row-major order, and the dtype and shape of that tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box


@dataclass(frozen=True, slots=True)
class PreparedRead:
    """Mapping whose shapes, dtypes and coverage are checked, and from which reads are planned."""

    mapping: StateMapping
    cast: Mapping[str, tuple[str, str]]

    def plan_tensors(self, requested: Mapping[str, RequestedTensor]) -> Plan:
        """Plan the reads of *requested* in the order in which files store the data."""
        return self.plan_located_tensors(requested, self.locate_tensors(requested))

    def locate_tensors(self, requested: Mapping[str, RequestedTensor]) -> Mapping[str, TensorEntry]:
        """Find the file positions of the checkpoint tensors that *requested* needs.

        Returns:
            Tensors of the checkpoint with located extents, by key.
        """
        return _locate_entries(self.mapping, self._choose_tensors(requested), requested)

    def plan_located_tensors(
        self, requested: Mapping[str, RequestedTensor], entries: Mapping[str, TensorEntry]
    ) -> Plan:
        """Plan the reads of *requested* from checkpoint tensors with known file positions."""
        catalog = self.mapping.catalog
        chosen = self._choose_tensors(requested)
        chosen_tensors = {name: requested[name] for name in chosen}
        dtypes_by_name = {name: tensor.dtype for name, tensor in chosen_tensors.items()}
        plan = _make_plan(catalog, entries, chosen, _make_output(chosen_tensors), dtypes_by_name)
        return replace(plan, transfers=tuple(sorted(plan.transfers, key=_find_first_position)))

    def plan_file(self, target: Path, output: OutputLayout, kinds: Mapping[str, str]) -> Plan:
        """Plan to read all tensors into a single file, with dtypes by tensor name in *kinds*."""
        catalog = self.mapping.catalog
        plan = _make_plan(catalog, catalog.tensors, self.mapping.tensors, output, kinds)
        return replace(plan, target=target, single_file=True)

    def _choose_tensors(
        self, requested: Mapping[str, RequestedTensor]
    ) -> dict[str, ComposedTensor]:
        """Select the requested tensors that the checkpoint contains and that have target memory."""
        composed = self.mapping.tensors
        return {
            name: composed[name]
            for name, tensor in requested.items()
            if tensor.targets and name in composed
        }

    def with_catalog(self, catalog: Catalog) -> PreparedRead:
        """Return a copy that reads from *catalog*, a checkpoint with the same index."""
        old_catalog = self.mapping.catalog
        moved = replace(
            old_catalog,
            root=catalog.root,
            path=catalog.path,
            files=catalog.files,
            notes=catalog.notes,
            save_id=catalog.save_id,
            world=catalog.world,
            opened=catalog.opened,
        )
        return replace(self, mapping=replace(self.mapping, catalog=moved))

    def plan_boxes(self, boxes: Sequence[RequestedBox]) -> Plan:
        """Plan to read every box into a separate buffer, which :func:`fill_buffers` fills."""
        targets: dict[str, list[MemoryBox]] = {}
        for number, box in enumerate(boxes):
            target = MemoryBox(box.box, str(number), compute_row_major_strides(box.box.sizes))
            targets.setdefault(box.name, []).append(target)
        kinds = {box.name: (box.dtype, box.shape) for box in boxes}
        return self.plan_tensors(
            {
                n: RequestedTensor(*kinds[n], tuple(memory_boxes))
                for n, memory_boxes in targets.items()
            }
        )


def fill_buffers(plan: Plan, buffers: Iterable[bytearray], jobs: int | None = None) -> Execution:
    """Execute *plan* from :meth:`PreparedRead.plan_boxes`, filling one of *buffers* per box."""
    memory = {build_memory_name(str(n)): memoryview(buffer) for n, buffer in enumerate(buffers)}
    options = ExecutionOptions(jobs=jobs or 0, checksum=False, sync=False)
    return execute_plan(plan, Path(plan.source_root), options, lambda _: None, memory=memory)


def has_same_index(catalog: Catalog, other_catalog: Catalog) -> bool:
    """Return whether two checkpoints have the same tensors, values and metadata.

    The result is False if either checkpoint has virtual files, which are computed from real files.
    """
    if catalog.computed or other_catalog.computed:
        return False
    relocated = replace(
        other_catalog,
        root=catalog.root,
        path=catalog.path,
        files=catalog.files,
        notes=catalog.notes,
        assets=catalog.assets,
        save_id=catalog.save_id,
        world=catalog.world,
    )
    return catalog == relocated


def has_same_locations(
    entries: Mapping[str, TensorEntry], other_entries: Mapping[str, TensorEntry], checksum: bool
) -> bool:
    """Return whether tensors of two checkpoints have the same positions in the same files."""
    if checksum:
        return entries == other_entries
    return entries.keys() == other_entries.keys() and all(
        list(map(_drop_checksum, entry.extents))
        == list(map(_drop_checksum, other_entries[name].extents))
        for name, entry in entries.items()
    )


def _drop_checksum(extent: Extent) -> Extent:
    return extent if extent.crc32 is None else replace(extent, crc32=0)


def relocate_plan(plan: Plan, catalog: Catalog) -> Plan:
    """Return a copy of *plan* that reads from another checkpoint with the same file layout."""
    sources = read_identities(catalog.root, plan.sources)
    return replace(plan, source_root=catalog.root, sources=sources, opened=catalog.opened)


def prepare_read(
    mapping: StateMapping,
    requested: Mapping[str, RequestedTensor],
    *,
    cast: bool,
    covers_tensors: bool = True,
) -> PreparedRead:
    """Check that the tensors in *requested* can be read with their shapes and dtypes.

    Args:
        mapping: Mapping from the checkpoint to the state.
        requested: Tensors of the state to fill.
        cast: Whether dtypes may change.
        covers_tensors: Whether to check the coverage of entire tensors instead of the target boxes.
    """
    chosen = {name: mapping.tensors[name] for name in requested if name in mapping.tensors}
    require_same_shapes(chosen, requested)
    require_complete_tensors(chosen)
    entries = mapping.catalog.tensors
    for name, composed in chosen.items():
        for key in composed.keys:
            if covers_tensors:
                check_coverage(entries[key])
            else:
                require_boxes_covered(entries[key], requested[name].targets)
    return PreparedRead(mapping, find_casts(mapping, requested, cast))


def _locate_entries(
    mapping: StateMapping,
    tensors: Mapping[str, ComposedTensor],
    requested: Mapping[str, RequestedTensor],
) -> Mapping[str, TensorEntry]:
    """Locate the checkpoint tensors to read, with only the extents that overlap requested boxes."""
    entries = mapping.catalog.tensors
    located: dict[str, TensorEntry] = {}
    for name, composed in tensors.items():
        for key in composed.keys:
            entry = entries[key]
            if len(entry.extents) > 1 and composed.is_rename:
                boxes = [target.box for target in requested[name].targets]
                overlapping = (
                    e
                    for e in entry.extents
                    if any(e.box == box or intersect_boxes(e.box, box) is not None for box in boxes)
                )
                entry = replace(entry, extents=tuple(overlapping))
            earlier = located.get(key, entry)
            if earlier.extents != entry.extents:  # source of two tensors of the state
                both = {*earlier.extents, *entry.extents}
                extents = tuple(extent for extent in entries[key].extents if extent in both)
                entry = replace(entry, extents=extents)
            located[key] = entry
    return locate_bytes(mapping.catalog, located).tensors


def _make_plan(
    catalog: Catalog,
    entries: Mapping[str, TensorEntry],
    tensors: Mapping[str, ComposedTensor],
    output: OutputLayout,
    kinds: Mapping[str, str],
) -> Plan:
    located = replace(catalog, tensors=entries)
    copies, virtual = plan_transfers(located, tensors, output, kinds)
    computed, sources = identify_read_files(catalog.root, copies, virtual)
    return Plan(
        source_root=catalog.root,
        sources=sources,
        target=Path(),
        single_file=False,
        files=output.files,
        records=output.records,
        transfers=copies,
        raw_copies=(),
        digest="",
        computed=computed,
        checked=find_checked_transfers(copies, partly=True),
        opened=catalog.opened,
    )


def _make_output(requested: Mapping[str, RequestedTensor]) -> OutputLayout:
    """Describe the target memory as output files, with one record for each requested box."""
    records: list[Record] = []
    boxes: dict[str, tuple[TensorPlace, ...]] = {}
    for name, tensor in requested.items():
        places: list[TensorPlace] = []
        for target in tensor.targets:
            nbytes = math.prod(target.box.sizes) * dtypes.get_itemsize(tensor.dtype)
            places.append(TensorPlace(target.box, len(records), strides=target.steps))
            records.append(Record(name, build_memory_name(target.memory), 0, nbytes))
        boxes[name] = tuple(places)
    return OutputLayout((), tuple(records), boxes)


def _find_first_position(copy: Transfer) -> tuple[str, int]:
    """Return the file and the byte offset at which a transfer begins to read."""
    ranges = (
        byte_range
        for entry in copy.iterate_stored_tensors()
        for byte_range in get_byte_ranges(entry.extents)
    )
    return min((place[:2] for place in ranges), default=("", 0))
