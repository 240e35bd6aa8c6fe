"""The plan of a load: parts of a checkpoint of any format, read into memory.

Requested tensors have names, dtypes, shapes and boxes in this process's memory. They are filled by
the same transfers as in a conversion, renamed and reordered if the layout of the checkpoint
differs. torch is not used here: plans refer to memory by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ckptctl import dtypes
from ckptctl.catalog import Box, Catalog, Extent, TensorEntry, memory_name, row_major
from ckptctl.columns import ranges_of
from ckptctl.conversion.checked_ranges import find_checked_transfers
from ckptctl.conversion.sources import locate_bytes
from ckptctl.conversion.transfers import find_sources, plan_transfers, read_identities
from ckptctl.formats.base import OutputLayout, TensorPlace
from ckptctl.planner.boxes import check_coverage, intersect_boxes
from ckptctl.planner.mapping.mapped import ComposedTensor
from ckptctl.planner.plan import Plan, Record, Transfer
from ckptctl.save_load.loading.checks import casts, require_boxes, require_filled, require_shapes
from ckptctl.save_load.loading.state_mapping import StateMapping, Target, Wanted
from ckptctl.storage.execution.execution_options import Execution, ExecutionOptions
from ckptctl.storage.execution.executor import execute_plan


class WantedBox(NamedTuple):
    """A box to read in row-major order, with the dtype and shape of its tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box


@dataclass(frozen=True, slots=True)
class Reading:
    """Tensors whose shapes, dtypes and coverage are checked, but whose data is not located yet."""

    mapping: StateMapping
    cast: Mapping[str, tuple[str, str]]

    def plan(self, wanted: Mapping[str, Wanted]) -> Plan:
        """Plan the reads of *wanted*, in the order of the data in the files."""
        return self.plan_of(wanted, self.locate(wanted))

    def locate(self, wanted: Mapping[str, Wanted]) -> Mapping[str, TensorEntry]:
        """Return the tensors of the checkpoint to read, with the required extents located."""
        return _located(self.mapping, self._chosen(wanted), wanted)

    def plan_of(self, wanted: Mapping[str, Wanted], entries: Mapping[str, TensorEntry]) -> Plan:
        """Plan the reads of *wanted* from located *entries*."""
        catalog = self.mapping.catalog
        chosen = self._chosen(wanted)
        held = {name: wanted[name] for name in chosen}
        kinds = {name: one.dtype for name, one in held.items()}
        plan = _plan(catalog, entries, chosen, _output(held), kinds)
        return replace(plan, transfers=tuple(sorted(plan.transfers, key=_position)))

    def plan_file(self, target: Path, output: OutputLayout, kinds: Mapping[str, str]) -> Plan:
        """Plan the reads into a single file whose tensors have the dtypes *kinds*."""
        catalog = self.mapping.catalog
        plan = _plan(catalog, catalog.tensors, self.mapping.tensors, output, kinds)
        return replace(plan, target=target, single_file=True)

    def _chosen(self, wanted: Mapping[str, Wanted]) -> dict[str, ComposedTensor]:
        """Return the requested tensors that the checkpoint has and that have memory."""
        known = self.mapping.tensors
        return {name: known[name] for name, one in wanted.items() if one.targets and name in known}

    def elsewhere(self, catalog: Catalog) -> Reading:
        """Return a copy for another checkpoint with the same index."""
        own = self.mapping.catalog
        moved = replace(
            own,
            root=catalog.root,
            path=catalog.path,
            files=catalog.files,
            notes=catalog.notes,
            save_id=catalog.save_id,
            world=catalog.world,
            opened=catalog.opened,
        )
        return replace(self, mapping=replace(self.mapping, catalog=moved))

    def plan_boxes(self, boxes: Sequence[WantedBox]) -> Plan:
        """Plan the reads of *boxes* into one buffer each, as :func:`fill` takes them."""
        targets: dict[str, list[Target]] = {}
        for number, one in enumerate(boxes):
            target = Target(one.box, str(number), row_major(one.box.sizes))
            targets.setdefault(one.name, []).append(target)
        kinds = {one.name: (one.dtype, one.shape) for one in boxes}
        return self.plan({n: Wanted(*kinds[n], tuple(some)) for n, some in targets.items()})


def fill(plan: Plan, buffers: Iterable[bytearray], jobs: int | None = None) -> Execution:
    """Execute *plan*, which refers to *buffers* by their numbers."""
    memory = {memory_name(str(n)): memoryview(buffer) for n, buffer in enumerate(buffers)}
    how = ExecutionOptions(jobs=jobs or 0, checksum=False, sync=False)
    return execute_plan(plan, Path(plan.source_root), how, lambda _: None, memory=memory)


def same_index(one: Catalog, other: Catalog) -> bool:
    """Return whether two checkpoints have the same tensors, values and metadata.

    Always False if a checkpoint has virtual files, which are computed from real ones.
    """
    if one.computed or other.computed:
        return False
    there = replace(
        other,
        root=one.root,
        path=one.path,
        files=one.files,
        notes=one.notes,
        assets=one.assets,
        save_id=one.save_id,
        world=one.world,
    )
    return one == there


def same_places(
    some: Mapping[str, TensorEntry], others: Mapping[str, TensorEntry], checksum: bool
) -> bool:
    """Return whether located tensors have the same positions in the same files."""
    if checksum:
        return some == others
    return some.keys() == others.keys() and all(
        list(map(_place, entry.extents)) == list(map(_place, others[name].extents))
        for name, entry in some.items()
    )


def _place(extent: Extent) -> Extent:
    return extent if extent.crc32 is None else replace(extent, crc32=0)


def plan_elsewhere(plan: Plan, catalog: Catalog) -> Plan:
    """Return *plan* for another checkpoint whose files have the same layout."""
    sources = read_identities(catalog.root, plan.sources)
    return replace(plan, source_root=catalog.root, sources=sources, opened=catalog.opened)


def prepare(
    mapping: StateMapping, wanted: Mapping[str, Wanted], *, cast: bool, whole: bool = True
) -> Reading:
    """Check that the tensors in *wanted* can be read with their shapes and dtypes.

    Args:
        mapping: Mapping from the checkpoint to the state.
        wanted: Tensors of the state to fill.
        cast: Whether dtypes may change.
        whole: Whether to check the coverage of entire tensors instead of the target boxes.
    """
    chosen = {name: mapping.tensors[name] for name in wanted if name in mapping.tensors}
    require_shapes(chosen, wanted)
    require_filled(chosen)
    entries = mapping.catalog.tensors
    for name, composed in chosen.items():
        for key in composed.keys:
            if whole:
                check_coverage(entries[key])
            else:
                require_boxes(entries[key], wanted[name].targets)
    return Reading(mapping, casts(mapping, wanted, cast))


def _located(
    mapping: StateMapping, tensors: Mapping[str, ComposedTensor], wanted: Mapping[str, Wanted]
) -> Mapping[str, TensorEntry]:
    """Return the entries to read, with only the extents that overlap requested boxes."""
    entries = mapping.catalog.tensors
    found: dict[str, TensorEntry] = {}
    for name, composed in tensors.items():
        for key in composed.keys:
            entry = entries[key]
            if len(entry.extents) > 1 and composed.is_rename:
                boxes = [target.box for target in wanted[name].targets]
                meeting = (
                    e
                    for e in entry.extents
                    if any(e.box == box or intersect_boxes(e.box, box) is not None for box in boxes)
                )
                entry = replace(entry, extents=tuple(meeting))
            known = found.get(key, entry)
            if known.extents != entry.extents:  # the source of two tensors of the state
                both = {*known.extents, *entry.extents}
                kept = tuple(one for one in entries[key].extents if one in both)
                entry = replace(entry, extents=kept)
            found[key] = entry
    return locate_bytes(mapping.catalog, found).tensors


def _plan(
    catalog: Catalog,
    entries: Mapping[str, TensorEntry],
    tensors: Mapping[str, ComposedTensor],
    output: OutputLayout,
    kinds: Mapping[str, str],
) -> Plan:
    located = replace(catalog, tensors=entries)
    copies, virtual = plan_transfers(located, tensors, output, kinds)
    computed, sources = find_sources(catalog.root, copies, virtual)
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


def _output(wanted: Mapping[str, Wanted]) -> OutputLayout:
    """Describe memory as the files of an output, with one record for each box."""
    records: list[Record] = []
    boxes: dict[str, tuple[TensorPlace, ...]] = {}
    for name, one in wanted.items():
        places: list[TensorPlace] = []
        for target in one.targets:
            nbytes = math.prod(target.box.sizes) * dtypes.itemsize(one.dtype)
            places.append(TensorPlace(target.box, len(records), strides=target.steps))
            records.append(Record(name, memory_name(target.memory), 0, nbytes))
        boxes[name] = tuple(places)
    return OutputLayout((), tuple(records), boxes)


def _position(copy: Transfer) -> tuple[str, int]:
    """Return the file and offset where a transfer begins to read."""
    ranges = (one for entry in copy.iterate_stored_tensors() for one in ranges_of(entry.extents))
    return min((place[:2] for place in ranges), default=("", 0))
