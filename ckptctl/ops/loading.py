"""Loading parts of a checkpoint of any format into memory: what is read, and where it goes.

The tensors that are wanted have names, dtypes, shapes and boxes in this process's memory. They get
their elements by the same transfers as in a conversion, renamed and reordered where the checkpoint
has another layout. No torch here: memory has names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ckptctl import dtypes, formats
from ckptctl.catalog import Box, Catalog, TensorEntry, is_computed, memory_name
from ckptctl.errors import MappingError, listed
from ckptctl.formats.base import Output, Place
from ckptctl.ops.transfers import transfers
from ckptctl.planner.boxes import check_coverage
from ckptctl.planner.mapped import MappedTensor
from ckptctl.planner.plan import Plan, Record
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
class LoadPlan:
    """What will be read.

    Attributes:
        plan: For the executor.
        missing: Names that are wanted and that the checkpoint does not have.
        unexpected: Names that it has and that nobody wants.
        cast: Names whose elements change their dtype.
    """

    plan: Plan
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    cast: tuple[str, ...]


def plan_load(
    catalog: Catalog, wanted: Mapping[str, Wanted], mapped: Sequence[MappedTensor] | None = None
) -> LoadPlan:
    """Plan the reading of *wanted*.

    Args:
        catalog: The checkpoint.
        wanted: What is to be filled, by the name that the target has.
        mapped: What becomes what, where names or axes change; None: every tensor keeps its name.

    Raises:
        MappingError: A shape is another one.
        CoverageError: A tensor of the checkpoint is not whole.
    """
    if mapped is None:
        mapped = [MappedTensor.same(n, n, t.shape) for n, t in catalog.tensors.items()]
    offered = {view.key for one in mapped for view in one.targets}
    chosen = [one for one in mapped if any(view.key in wanted for view in one.targets)]
    _require_shapes(chosen, wanted)
    read = {view.key for one in chosen for view in one.sources}
    entries = _located(catalog, read)
    output = _output(wanted)
    kinds = {name: one.dtype for name, one in wanted.items()}
    copies = tuple(transfers(chosen, entries, output, kinds))
    cast = sorted({copy.name for copy in copies if copy.source_dtype != copy.target_dtype})
    names = sorted({o.file for copy in copies for o in copy.source.operands})
    with SourceFiles(catalog.root) as files:
        sources = {name: files.identity(name) for name in names if not is_computed(name)}
    plan = Plan(
        source_root=catalog.root,
        sources=sources,
        target="",
        single_file=False,
        files=(),
        records=output.records,
        transfers=tuple(copy for copy in copies if copy.target.operands),
        raw_copies=(),
        digest="",
        computed=catalog.computed,
    )
    missing = tuple(name for name in wanted if name not in offered)
    unexpected = tuple(sorted(offered - wanted.keys()))
    return LoadPlan(plan, missing, unexpected, tuple(cast))


def _located(catalog: Catalog, names: set[str]) -> Mapping[str, TensorEntry]:
    found = {name: entry for name, entry in catalog.tensors.items() if name in names}
    for entry in found.values():
        check_coverage(entry)
    return formats.resolve(replace(catalog, tensors=found, blobs={})).tensors


def _require_shapes(mapped: Sequence[MappedTensor], wanted: Mapping[str, Wanted]) -> None:
    from ckptctl.planner.mapped import stored_shapes

    shapes = stored_shapes(mapped)
    wrong = [n for n, one in wanted.items() if n in shapes and shapes[n] != one.shape]
    if wrong:
        name = wrong[0]
        raise MappingError(
            f"{len(wrong)} tensors have another shape in the checkpoint"
            if wrong[1:]
            else f"`{name}` has another shape in the checkpoint",
            where=listed(wrong),
            why=f"`{name}` is {list(shapes[name])} there, {list(wanted[name].shape)} are wanted",
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
