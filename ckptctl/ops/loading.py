"""Loading parts of a checkpoint of any format into memory: what is read, and where it goes.

The tensors that are wanted have names, dtypes, shapes and boxes in this process's memory. They get
their elements by the same transfers as in a conversion, renamed and reordered where the checkpoint
has another layout. No torch here: memory has names.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ckptctl import dtypes, formats
from ckptctl.catalog import (
    Box,
    Catalog,
    Extent,
    TensorEntry,
    is_computed,
    made_of,
    memory_name,
    reached,
)
from ckptctl.errors import MappingError, listed
from ckptctl.formats.base import Output, Place
from ckptctl.ops.quantised import quantised
from ckptctl.ops.state_mapping import StateMapping
from ckptctl.ops.transfers import transfers
from ckptctl.planner.boxes import check_coverage, intersect
from ckptctl.planner.mapped import MappedTensor, stored_shapes
from ckptctl.planner.plan import Plan, Record, Transfer
from ckptctl.storage.files import SourceFiles


class Target(NamedTuple):
    """A box of a tensor in memory.

    Attributes:
        box: The part of the global tensor.
        memory: What the plan calls its memory.
        steps: Elements between neighbours along each dimension.
    """

    box: Box
    memory: str
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor that is to be filled.

    Attributes:
        dtype: torch's name.
        shape: Global shape.
        targets: The boxes that this process holds.
    """

    dtype: str
    shape: tuple[int, ...]
    targets: tuple[Target, ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """What can be read: shapes, dtypes and coverage are proven, nothing is located yet.

    Attributes:
        mapping: What becomes what.
        tensors: Those of it that are wanted.
        cast: Names of wanted tensors whose dtype changes, and from what to what.
    """

    mapping: StateMapping
    tensors: tuple[MappedTensor, ...]
    cast: Mapping[str, tuple[str, str]]

    def plan(self, wanted: Mapping[str, Wanted]) -> Plan:
        """Plan the reading of *wanted*, in the order in which it lies in the files.

        Args:
            wanted: Boxes of the tensors that this reading is about; not all of them need be there.

        Raises:
            DamagedError: What lies in a file is not what the index says.
        """
        catalog = self.mapping.catalog
        known = {view.key for one in self.tensors for view in one.targets}
        held = {name: one for name, one in wanted.items() if one.targets and name in known}
        chosen = [one for one in self.tensors if any(view.key in held for view in one.targets)]
        output = _output(held)
        kinds = {name: one.dtype for name, one in held.items()}
        entries = _located(self.mapping, chosen, held)
        found = transfers(chosen, entries, output, kinds)
        copies = sorted((copy for copy in found if copy.target.operands), key=_position)
        read = dict.fromkeys(o.file for copy in copies for o in copy.source.operands)
        computed = reached(catalog.computed, read)
        files = {file for root, file in made_of(computed) if root == catalog.root}
        files |= {file for file in read if not is_computed(file)}
        with SourceFiles(catalog.root) as opened:
            sources = {file: opened.identity(file) for file in sorted(files)}
        return Plan(
            source_root=catalog.root,
            sources=sources,
            target="",
            single_file=False,
            files=(),
            records=output.records,
            transfers=tuple(copies),
            raw_copies=(),
            digest="",
            computed=computed,
        )


def prepare(
    mapping: StateMapping, wanted: Mapping[str, Wanted], *, cast: bool, whole: bool = True
) -> Reading:
    """Prove that what *mapping* has of *wanted* can be read as it is wanted.

    Args:
        mapping: What becomes what.
        wanted: What this process wants; names that the mapping does not have are left alone.
        cast: Whether floating elements may change their dtype.
        whole: Whether the checkpoint has to be whole; else the boxes that are wanted have to be.

    Raises:
        MappingError: A shape or a dtype is another one.
        CoverageError: A tensor of the checkpoint is not whole.
    """
    chosen = [one for one in mapping.tensors if any(view.key in wanted for view in one.targets)]
    _require_shapes(chosen, wanted)
    _require_filled(mapping.tensors, wanted)
    entries = mapping.catalog.tensors
    for one in chosen:
        for view in one.sources:
            if whole:
                check_coverage(entries[view.key])
            else:
                _require_boxes(entries[view.key], wanted[one.targets[0].key].targets)
    return Reading(mapping, tuple(chosen), _casts(mapping, chosen, wanted, cast))


def _require_filled(mapped: Sequence[MappedTensor], wanted: Mapping[str, Wanted]) -> None:
    """Prove that what becomes of the checkpoint's tensors fills those that are wanted."""
    held = dict.fromkeys(wanted, 0)
    for one in mapped:
        for view in one.targets:
            if view.key in held:
                held[view.key] += math.prod(view.sizes)
    offered = {view.key for one in mapped for view in one.targets}
    torn = [n for n, one in wanted.items() if n in offered and held[n] != math.prod(one.shape)]
    if torn:
        raise MappingError(
            f"{len(torn):,} tensors could only be filled in part",
            where=listed(torn),
            why="the tensors of the checkpoint that make up the rest of them are not there",
        )


def _require_boxes(entry: TensorEntry, targets: Iterable[Target]) -> None:
    """Prove that the extents of *entry* tile each of the boxes."""
    for target in targets:
        inside: list[Extent] = []
        for extent in entry.extents:
            part = extent.box if extent.box == target.box else intersect(extent.box, target.box)
            if part is not None:
                pairs = zip(part.offsets, target.box.offsets, strict=True)
                moved = Box(tuple(a - b for a, b in pairs), part.sizes)
                inside.append(replace(extent, box=moved))
        check_coverage(replace(entry, shape=target.box.sizes, extents=tuple(inside)))


def _require_shapes(mapped: Sequence[MappedTensor], wanted: Mapping[str, Wanted]) -> None:
    shapes = stored_shapes(mapped)
    wrong = [n for n, one in wanted.items() if n in shapes and shapes[n] != one.shape]
    if wrong:
        name = wrong[0]
        raise MappingError(
            f"{len(wrong):,} tensors have another shape in the checkpoint"
            if wrong[1:]
            else f"`{name}` has another shape in the checkpoint",
            where=listed(wrong),
            why=f"`{name}` is {list(shapes[name])} there, {list(wanted[name].shape)} is wanted",
        )


def _casts(
    mapping: StateMapping,
    mapped: Sequence[MappedTensor],
    wanted: Mapping[str, Wanted],
    allowed: bool,
) -> dict[str, tuple[str, str]]:
    """Return which dtypes change; refuse to change any that must not."""
    entries = mapping.catalog.tensors
    found: dict[str, tuple[str, str]] = {}
    read: dict[str, str] = {}
    for one in mapped:
        held = list(dict.fromkeys(entries[view.key].dtype for view in one.sources))
        asked = {wanted[view.key].dtype for view in one.targets if view.key in wanted}
        _require_alike(one, held, asked)
        if asked != set(held):
            names = [view.key for view in one.targets if view.key in wanted]
            found |= dict.fromkeys(names, (held[0], next(iter(asked))))
            read |= {view.key: names[0] for view in one.sources}
    if found:
        _require_castable(found, allowed)
        _require_plain(mapping.catalog, read)
    return found


def _require_alike(mapped: MappedTensor, held: Sequence[str], asked: Collection[str]) -> None:
    """Refuse to cut or join tensors of several dtypes."""
    if len(held) > 1 or len(asked) > 1:
        raise MappingError(
            "tensors that belong together have several dtypes",
            where=listed([view.key for view in (*mapped.sources, *mapped.targets)]),
            why=f"{' and '.join(held)} in the checkpoint, {' and '.join(asked)} in the state",
        )


def _require_castable(found: Mapping[str, tuple[str, str]], allowed: bool) -> None:
    wrong = [
        name
        for name, kinds in found.items()
        if not (allowed and all(dtypes.BY_NAME[kind].floating for kind in kinds))
    ]
    if wrong:
        name = wrong[0]
        before, after = found[name]
        raise MappingError(
            f"{len(wrong):,} tensors have another dtype in the checkpoint"
            if wrong[1:]
            else f"`{name}` has another dtype in the checkpoint",
            where=listed(wrong),
            why=f"`{name}` is {before} there, {after} is wanted",
            hint=None if allowed else "`cast=True` casts floating tensors",
        )


def _require_plain(catalog: Catalog, read: Mapping[str, str]) -> None:
    """Refuse to cast quantised elements without regard to their scales."""
    found = [name for name in quantised(catalog) if name in read]
    if found:
        raise MappingError(
            f"{len(found):,} tensors are quantised in the checkpoint",
            where=listed([read[name] for name in found]),
            why="a cast would turn their elements into numbers that they are not",
            hint='`dequantize="bf16"` reads the plain tensors that they stand for',
        )


def _located(
    mapping: StateMapping, mapped: Sequence[MappedTensor], wanted: Mapping[str, Wanted]
) -> Mapping[str, TensorEntry]:
    """Return the entries that are read, with those of their extents that may be needed."""
    entries = mapping.catalog.tensors
    found: dict[str, TensorEntry] = {}
    for one in mapped:
        for view in one.sources:
            entry = entries[view.key]
            if one.renames and len(entry.extents) > 1:
                boxes = [target.box for target in wanted[one.targets[0].key].targets]
                entry = replace(entry, extents=_meeting(entry, boxes))
            found.setdefault(view.key, entry)
            if len(entry.extents) > len(found[view.key].extents):
                found[view.key] = entry
    return formats.resolve(replace(mapping.catalog, tensors=found, blobs={}, replicas={})).tensors


def _meeting(entry: TensorEntry, boxes: Sequence[Box]) -> tuple[Extent, ...]:
    return tuple(
        extent
        for extent in entry.extents
        if any(extent.box == box or intersect(extent.box, box) for box in boxes)
    )


def _output(wanted: Mapping[str, Wanted]) -> Output:
    """Memory as the files of an output: one record for each box."""
    records: list[Record] = []
    boxes: dict[str, tuple[Place, ...]] = {}
    for name, one in wanted.items():
        places: list[Place] = []
        for target in one.targets:
            nbytes = math.prod(target.box.sizes) * dtypes.itemsize(one.dtype)
            places.append(Place(target.box, len(records), strides=target.steps))
            records.append(Record(name, memory_name(target.memory), 0, nbytes))
        boxes[name] = tuple(places)
    return Output((), tuple(records), boxes)


def _position(copy: Transfer) -> tuple[str, int]:
    """Return where a copy begins to read."""
    return min(((o.file, o.offset) for o in copy.source.operands), default=("", 0))
