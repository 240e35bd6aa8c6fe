"""Convert tensors of other naming conventions to :mod:`ckptctl.formats.mcore.spelling`'s.

Boxes of stacked layers are split at layer boundaries; boxes of gate halves and of experts are
moved. No data is read. The part of each item is recorded with its place, and located when it is
resolved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import NamedTuple

from ckptctl.catalog import Box, Catalog, ItemPart, TensorEntry
from ckptctl.columns import BoxColumns, ExtentColumns, Vector
from ckptctl.errors import CoverageError, UnsupportedError, quote_names
from ckptctl.formats.dcp.metadata import Boxes
from ckptctl.formats.mcore.spelling import (
    HALVES,
    Spelling,
    expert_counts,
    require_layers,
    spellings,
)
from ckptctl.formats.shared.findings import Faults
from ckptctl.formats.shared.joined_tensors import ONE_SAVE

IN_TWO_WAYS = "the items are stored in two different ways"
MAX_TENSORS, MAX_PARTS = 1 << 22, 1 << 24
"""Limits for the rows of all stacks, and for the rows of one stack's chunks."""
_Shape = tuple[int, ...]


class _Piece(NamedTuple):
    """A tensor as it was saved, or one row of it, that is part of a canonical tensor."""

    entry: TensorEntry
    spelling: Spelling
    row: int | None

    @property
    def shape(self) -> _Shape:
        return self.entry.shape if self.row is None else self.entry.shape[1:]


class _Rows(NamedTuple):
    """Selection of extents by index, with their boxes and the part of each item."""

    at: Sequence[int] | None
    boxes: BoxColumns
    parts: tuple[ItemPart, ...] | None


def canonical(catalog: Catalog, faults: Faults, arguments: Mapping[str, object]) -> Catalog:
    """Join the tensors of *catalog* into canonical ones, using the trainer's *arguments*.

    Raises:
        CoverageError: A layer, an expert or a half is missing.
        UnsupportedError: The number of layers is ambiguous, or two tensors have one canonical name.
    """
    found = spellings(catalog.tensors)
    require_layers(catalog.tensors, found, arguments, faults)
    experts = expert_counts(found.values(), arguments, str(faults.root))
    joiner = _Joiner(faults, experts, catalog.lost)
    pieces = _pieces(catalog.tensors, found, str(faults.root))
    tensors = {name: joiner.joined(name, held) for name, held in pieces.items()}
    lost = {name: gone for name, held in pieces.items() if (gone := joiner.lost_of(held))}
    return replace(catalog, tensors=tensors, lost=lost, findings=tuple(faults.findings))


def _pieces(
    tensors: Mapping[str, TensorEntry], found: Mapping[str, Spelling], where: str
) -> dict[str, list[_Piece]]:
    count = sum(tensors[name].shape[0] for name, one in found.items() if one.stacked)
    if count > MAX_TENSORS:
        raise UnsupportedError(
            "too many tensors in stacked layers",
            where=where,
            why=f"{count:,}, limit {MAX_TENSORS:,}",
        )
    pieces: dict[str, list[_Piece]] = {}
    for name, entry in tensors.items():
        one = found[name]
        for row in range(entry.shape[0]) if one.stacked else (None,):
            pieces.setdefault(one.name(row), []).append(_Piece(entry, one, row))
    return pieces


@dataclass(slots=True)
class _Joiner:
    """Builder of canonical tensors that share equal boxes."""

    faults: Faults
    experts: Mapping[tuple[str, str], int]
    lost: Mapping[str, tuple[tuple[Box, str], ...]]
    stacks: dict[tuple[int, _Shape], tuple[BoxColumns, Sequence[_Rows]]] = field(
        default_factory=dict
    )
    known: Boxes = field(default_factory=dict)
    wholes: dict[_Shape, ItemPart] = field(default_factory=dict)

    def joined(self, name: str, pieces: Sequence[_Piece]) -> TensorEntry:
        """Return the canonical tensor called *name*."""
        first = pieces[0]
        entry, shape, spelling = first.entry, first.shape, first.spelling
        if spelling.half is not None and shape:
            shape = (len(HALVES) * shape[0], *shape[1:])
        if spelling.expert is not None:
            shape = (self.experts[spelling.family], *shape)
        self._require_parts(name, pieces)
        unread = next((p.entry.unsupported for p in pieces if p.entry.unsupported), None)
        columns = [_columns(piece.entry) for piece in pieces]
        usable = [column for column in columns if column is not None]
        if len(usable) < len(columns) or len({column.codec for column in usable}) > 1:
            unread = unread or IN_TWO_WAYS
        if unread:
            return TensorEntry.build_unreadable(name, entry.dtype, shape, (name,), unread)
        if len(pieces) == 1 and shape == entry.shape:
            return entry if name == entry.name else replace(entry, name=name, path=(name,))
        extents = self._extents(pieces, usable)
        return replace(entry, name=name, shape=shape, extents=extents, path=(name,))

    def lost_of(self, pieces: Sequence[_Piece]) -> tuple[tuple[Box, str], ...]:
        """Return the lost boxes of a canonical tensor, with their files."""
        found: list[tuple[Box, str]] = []
        for piece in pieces:
            gone = self.lost.get(piece.entry.name)
            if not gone:
                continue
            boxes = BoxColumns([box.offsets for box, _ in gone], [box.sizes for box, _ in gone])
            rows = self._moved(piece, self._rows(piece, boxes))
            files = [gone[at][1] for at in (rows.at if rows.at is not None else range(len(gone)))]
            found += zip(rows.boxes, files, strict=True)
        return tuple(found)

    def _require_parts(self, name: str, pieces: Sequence[_Piece]) -> None:
        """Raise if parts do not fit together, and raise or add a finding if some are missing."""
        first = pieces[0]
        kind = first.entry.dtype, first.shape
        other = next((piece for piece in pieces if (piece.entry.dtype, piece.shape) != kind), None)
        held = {(piece.spelling.expert, piece.spelling.half): piece for piece in pieces}
        experts, halves = {e for e, _ in held}, {h for _, h in held}
        mixed = any(None in kinds and len(kinds) > 1 for kinds in (experts, halves))
        if other or mixed or len(held) < len(pieces):
            both = (piece.entry for piece in (first, other or pieces[-1]))
            raise UnsupportedError(
                f"two tensors cannot be joined as `{name}`",
                where=str(self.faults.root),
                why=" and ".join(f"`{e.name}` is {e.dtype} {list(e.shape)}" for e in both),
                hint=ONE_SAVE,
            )
        count = self.experts[first.spelling.family] if None not in experts else 0
        wanted = [
            (expert, half)
            for expert in (range(count) if count else (None,))
            for half in (range(len(HALVES)) if None not in halves else (None,))
        ]
        absent = [_called(*part, count) for part in wanted if part not in held]
        if absent:
            error = CoverageError(
                f"a part of `{name}` is missing",
                where=str(self.faults.root),
                why=quote_names(absent, quote=""),
                hint="use another checkpoint (a rank never saved its part of this one)",
            )
            self.faults.unreadable(error, tensor=name)

    def _extents(self, pieces: Sequence[_Piece], columns: Sequence[ExtentColumns]) -> ExtentColumns:
        found = [
            _taken(column, self._moved(piece, self._rows(piece, column.boxes)), piece)
            for piece, column in zip(pieces, columns, strict=True)
        ]
        if len(found) == 1:
            return found[0]
        offsets = tuple(offset for one in found for offset in one.boxes.offsets)
        sizes = tuple(size for one in found for size in one.boxes.sizes)
        parts = [part for one in found for part in (one.parts or repeat(None, len(one)))]
        return ExtentColumns(
            self.known.setdefault((offsets, sizes), BoxColumns(offsets, sizes)),
            [file for one in found for file in one.files],
            [start for one in found for start in one.starts],
            [length for one in found for length in one.lengths],
            found[0].codec,
            tuple(parts) if any(parts) else None,
        )

    def _rows(self, piece: _Piece, boxes: BoxColumns) -> _Rows:
        """Return the boxes of *piece* in the saved tensor or layer."""
        if piece.row is None:
            return _Rows(None, boxes, None)
        key = id(boxes), piece.entry.shape
        if key not in self.stacks:
            self.stacks[key] = boxes, _cut(piece.entry, boxes, str(self.faults.root))
        return self.stacks[key][1][piece.row]

    def _moved(self, piece: _Piece, rows: _Rows) -> _Rows:
        """Move *rows* to their place in the canonical tensor."""
        one, boxes, parts = piece.spelling, rows.boxes, rows.parts
        offsets, sizes = boxes.offsets, boxes.sizes
        if one.half and piece.shape:
            by = one.half * piece.shape[0]
            offsets = tuple((*(o + by for o in vector[:1]), *vector[1:]) for vector in offsets)
        if one.expert is not None:
            parts = parts or tuple(self.wholes.setdefault(s, ItemPart(s)) for s in sizes)
            offsets = tuple((one.expert, *vector) for vector in offsets)
            sizes = tuple((1, *vector) for vector in sizes)
        if offsets is boxes.offsets:
            return rows
        key = tuple(offsets), tuple(sizes)
        return _Rows(rows.at, self.known.setdefault(key, BoxColumns(*key)), parts)


def _called(expert: int | None, half: int | None, count: int) -> str:
    which = [] if expert is None else [f"expert {expert} of {count:,}"]
    return " ".join([*which, *([] if half is None else [f"`_{HALVES[half]}`"])])


def _columns(entry: TensorEntry) -> ExtentColumns | None:
    """Return the extents of a tensor as columns, or None if their codecs differ."""
    extents = entry.extents
    if isinstance(extents, ExtentColumns):
        return extents
    if len({one.codec for one in extents}) > 1:
        return None
    rows = ((e.box.offsets, e.box.sizes, e.file, e.offset, e.nbytes) for e in extents)
    columns = ExtentColumns.from_rows(rows)
    columns.codec = extents[0].codec if extents else columns.codec
    return columns


def _cut(entry: TensorEntry, boxes: BoxColumns, where: str) -> Sequence[_Rows]:
    """Split the boxes of stacked layers by layer."""
    rank, layers = len(entry.shape), entry.shape[0]
    if sum(vector[0] for vector in boxes.sizes if vector) > MAX_PARTS:
        raise UnsupportedError(f"`{entry.name}` has too many chunks", where=where)
    at: list[list[int]] = [[] for _ in range(layers)]
    found: list[tuple[list[Vector], list[Vector], list[ItemPart]]] = [([], [], []) for _ in at]
    known: dict[ItemPart, ItemPart] = {}
    for number, (offsets, sizes) in enumerate(zip(boxes.offsets, boxes.sizes, strict=True)):
        if len(offsets) != rank or len(sizes) != rank or not 0 <= offsets[0] <= layers - sizes[0]:
            raise UnsupportedError(
                f"the chunks of `{entry.name}` exceed its shape",
                where=where,
                why=f"{Box(offsets, sizes)} is outside of shape {list(entry.shape)}",
            )
        for row in range(sizes[0]):
            part = ItemPart(sizes, row)
            layer = offsets[0] + row
            at[layer].append(number)
            held = found[layer]
            held[0].append(offsets[1:])
            held[1].append(sizes[1:])
            held[2].append(known.setdefault(part, part))
    alike: Boxes = {}
    return [
        _Rows(which, alike.setdefault(key, BoxColumns(*key)), tuple(parts))
        for which, (offsets, sizes, parts) in zip(at, found, strict=True)
        for key in [(tuple(offsets), tuple(sizes))]
    ]


def _taken(columns: ExtentColumns, rows: _Rows, piece: _Piece) -> ExtentColumns:
    """Select *rows* of *columns*."""
    at = rows.at if rows.at is not None else range(len(columns))
    files = [columns.files[n] for n in at]
    starts = [columns.starts[n] for n in at]
    lengths = [columns.lengths[n] for n in at]
    if columns.codec == "torch":
        return ExtentColumns(rows.boxes, files, starts, lengths, "torch", rows.parts)
    if piece.row is not None and rows.parts is not None:
        counts = [part.shape[0] for part in rows.parts]
        lengths = [length // count for length, count in zip(lengths, counts, strict=True)]
        numbers = [part.row or 0 for part in rows.parts]
        starts = [s + n * step for s, n, step in zip(starts, numbers, lengths, strict=True)]
    return ExtentColumns(rows.boxes, files, starts, lengths, columns.codec)
