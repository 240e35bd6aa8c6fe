"""Turn mapped tensors, source extents and laid-out boxes into the executor's transfers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import repeat
from operator import mul, sub
from typing import NamedTuple

from ckptctl import dtypes
from ckptctl.catalog import (
    Box,
    Computed,
    Extent,
    TensorEntry,
    made_of,
    reached,
    row_major,
)
from ckptctl.columns import NO_CRC, ExtentColumns
from ckptctl.file_identity import FileIdentity
from ckptctl.formats.base import Output, Place
from ckptctl.planner.boxes import intersect
from ckptctl.planner.copying.runs import product_boxes
from ckptctl.planner.mapping.mapped import MappedTensor, View
from ckptctl.planner.plan import Operand, RawCopy, Record, Side, Transfer
from ckptctl.storage.files import source_files


def transfers(
    tensors: Sequence[MappedTensor],
    entries: Mapping[str, TensorEntry],
    output: Output,
    target_dtypes: Mapping[str, str],
) -> Iterator[Transfer]:
    """Yield the transfers of each mapped tensor: one, or one for each copy that ranks repeat."""
    for mapped in tensors:
        for copy in _copies(mapped, output):
            for part, boxes in _tiled(mapped, copy):
                yield _transfer(part, boxes, entries, output, target_dtypes)


Boxes = list[tuple[View, Place]]


def _copies(mapped: MappedTensor, output: Output) -> list[Boxes]:
    """Group the boxes of a tensor so that each group tiles it once.

    Ranks repeat whole boxes: replicated tensors, and heads where there are fewer than ranks.
    """
    copies: list[Boxes] = []
    seen: Counter[tuple[View, Box]] = Counter()
    for view in mapped.targets:
        places = output.boxes.get(view.key, ())
        if len(mapped.targets) == len(places) == 1 and _fills(view, places[0].box):
            return [[(view, places[0])]]
        for place in places:
            if not _fills(view, place.box) and not _shown(view, place.box):
                continue
            nth = seen[view, place.box]
            seen[view, place.box] += 1
            if nth == len(copies):
                copies.append([])
            copies[nth].append((view, place))
    return copies


def _tiled(mapped: MappedTensor, boxes: Boxes) -> Iterator[tuple[MappedTensor, Boxes]]:
    """Yield what *boxes* are all of: the tensor, or each box by itself.

    Of a tensor that keeps its name ranks may repeat some parts only: keys and values, not queries.
    """
    first, place = boxes[0]
    alone = len(boxes) == 1 and mapped.targets == (first,)
    if alone and _fills(first, place.box):
        yield mapped, boxes
        return
    found = [(view, place, part) for view, place in boxes for part in _shown(view, place.box)]
    filled = sum(part.numel for _, _, part in found)
    if filled == sum(math.prod(view.sizes) for view in mapped.targets) or not mapped.renames:
        yield mapped, boxes
        return
    source = mapped.sources[0]
    for view, place, part in found:
        held = replace(view, origin=part.offsets, sizes=part.sizes)
        read = replace(source, origin=part.offsets, sizes=part.sizes)
        yield (
            replace(mapped, axes=part.sizes, sources=(read,), targets=(held,)),
            [(held, place)],
        )


def _fills(view: View, box: Box) -> bool:
    """Return whether *view* is of all of *box* and of nothing else."""
    return not view.step and box == Box(view.origin, view.sizes)


def _shown(view: View, box: Box) -> list[Box]:
    """Return the parts of the stored *box* that *view* shows, in its dimensions."""
    region = Box(view.origin, view.sizes)
    parts = (_common(region, seen.box) for seen in _seen(view, box, (0,) * len(box.sizes)))
    return [part for part in parts if part]


def _transfer(
    mapped: MappedTensor,
    boxes: Boxes,
    entries: Mapping[str, TensorEntry],
    output: Output,
    target_dtypes: Mapping[str, str],
) -> Transfer:
    source_dtype = entries[mapped.sources[0].key].dtype
    target = boxes[0][0]
    target_dtype = target_dtypes[target.key]
    sources = (
        operand
        for view in mapped.sources
        for operand in _source(view, entries[view.key], dtypes.itemsize(source_dtype))
    )
    written = (
        operand
        for view, place in boxes
        for operand in _target(
            view, place, output.records[place.record], dtypes.itemsize(target_dtype)
        )
    )
    return Transfer(
        name=target.key,
        source_name=mapped.sources[0].key,
        axes=mapped.axes,
        source=Side(mapped.sources[0].dims, tuple(sources)),
        target=Side(target.dims, tuple(written)),
        source_dtype=source_dtype,
        target_dtype=target_dtype,
    )


def _source(view: View, entry: TensorEntry, itemsize: int) -> Iterable[Operand]:
    whole = Box.whole(entry.shape)
    if isinstance(entry.extents, ExtentColumns) and whole.numel and _fills(view, whole):
        return _all_of(entry.extents, view.lead, itemsize)
    return _some_of(entry.extents, view, itemsize)


def _all_of(extents: ExtentColumns, lead: tuple[int, ...], itemsize: int) -> Iterator[Operand]:
    """Yield what :func:`_some_of` does where a view shows all there is, and shares the columns."""
    ones, zeros = (1,) * len(lead), (0,) * len(lead)
    crcs = extents.crcs or repeat(NO_CRC)
    for row, crc in zip(extents.rows(), crcs, strict=False):
        offsets, sizes, file, start, nbytes = row
        if 0 not in sizes:
            steps = zeros + _steps(sizes, None, itemsize)
            crc32 = None if crc == NO_CRC else crc
            yield Operand(file, start, lead + offsets, ones + sizes, steps, nbytes, crc32)


def _some_of(extents: Iterable[Extent], view: View, itemsize: int) -> Iterator[Operand]:
    region = Box(view.origin, view.sizes)
    for extent in extents:
        steps = _steps(extent.box.sizes, extent.strides, itemsize)
        held = _Held(extent.file, extent.offset, extent.nbytes, extent.crc32, -1)
        yield from _operands(view, region, extent.box, steps, held)


def _target(view: View, place: Place, record: Record, itemsize: int) -> Iterator[Operand]:
    steps = _steps(place.box.sizes, place.strides, itemsize)
    begin = record.offset + place.start * itemsize
    nbytes = _reach(place.box.sizes, steps) + itemsize if place.box.numel else 0
    held = _Held(record.file, begin, nbytes, None, place.record)
    yield from _operands(view, Box(view.origin, view.sizes), place.box, steps, held)


@lru_cache(maxsize=4096)
def _steps(
    sizes: tuple[int, ...], strides: tuple[int, ...] | None, itemsize: int
) -> tuple[int, ...]:
    """Return the bytes between neighbors; *strides* None: row-major."""
    return tuple(stride * itemsize for stride in strides or row_major(sizes))


@lru_cache(maxsize=4096)
def _reach(sizes: tuple[int, ...], steps: tuple[int, ...]) -> int:
    """Return the bytes from the first element of a box to the last one."""
    return sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))


class _Seen(NamedTuple):
    """A stored box, or a part of one, in the dimensions of a view.

    Attributes:
        steps: Bytes between neighbors along each dimension.
        inside: Bytes of the stored box before its first element.
    """

    box: Box
    steps: tuple[int, ...]
    inside: int


def _seen(view: View, box: Box, steps: tuple[int, ...]) -> Iterable[_Seen]:
    """Return *box* as *view* sees it: of an interleaved tensor rows of single indices apart."""
    return _interleaved(view, box, steps) if view.step else (_Seen(box, steps, 0),)


def _interleaved(view: View, box: Box, steps: tuple[int, ...]) -> Iterator[_Seen]:
    first, *others = zip(box.offsets, box.sizes, strict=True)
    row, rest = steps[0], (tuple(begin for begin, _ in others), tuple(size for _, size in others))
    for lo, counts in product_boxes(first[0], sum(first), (0, view.step)):
        part = Box((*lo, *rest[0]), (*counts, *rest[1]))
        inside = (lo[0] * view.step + lo[1] - first[0]) * row
        yield _Seen(part, (view.step * row, *steps), inside)


class _Held(NamedTuple):
    """The bytes of a stored box: see :class:`~ckptctl.planner.plan.Operand`."""

    file: str
    offset: int
    nbytes: int
    crc32: int | None
    record: int


def _operands(
    view: View, region: Box, box: Box, steps: tuple[int, ...], held: _Held
) -> Iterator[Operand]:
    """Yield the parts of *box* in the *region* of the view; all of it in most layouts."""
    lead = len(view.lead)
    for seen in _seen(view, box, steps):
        part = _common(region, seen.box)
        if part is None:
            continue
        whole = part is box or part == box
        one = held.nbytes - _reach(box.sizes, steps)
        begin = map(sub, part.offsets, seen.box.offsets)
        yield Operand(
            file=held.file,
            offset=held.offset + seen.inside + sum(map(mul, begin, seen.steps)),
            start=(*view.lead, *map(sub, part.offsets, view.origin)),
            sizes=((1,) * lead) + part.sizes,
            strides=((0,) * lead) + seen.steps,
            nbytes=held.nbytes if whole else _reach(part.sizes, seen.steps) + one,
            crc32=held.crc32 if whole else None,
            record=held.record,
        )


def _common(region: Box, box: Box) -> Box | None:
    """Like ``intersect``, but an empty box inside the region stays."""
    found = intersect(region, box)
    return box if found is None and not box.numel and region.numel == 0 else found


def sources_of(
    root: str,
    transfers: Sequence[Transfer],
    virtual: Mapping[str, Computed],
    raw: Sequence[RawCopy] = (),
) -> tuple[dict[str, Computed], dict[str, FileIdentity]]:
    """Return the virtual files that are read, and the identities of the real ones below *root*."""
    read = dict.fromkeys(o.file for transfer in transfers for o in transfer.source.operands)
    computed = reached(virtual, read)
    names = {name: None for name in read if name not in computed}
    names |= dict.fromkeys(sorted(file for place, file in made_of(computed) if place == root))
    names |= dict.fromkeys(item.source for item in raw)
    return computed, identities(root, names)


def identities(root: str, names: Iterable[str]) -> dict[str, FileIdentity]:
    """Return what must stay the same of each of the files called *names* while it is read."""
    with source_files(root) as files:
        return {name: files.identity(name) for name in names}
