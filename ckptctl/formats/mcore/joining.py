"""Join saved tensors into canonical tensors, for all naming conventions of Megatron-Core.

See :mod:`ckptctl.formats.mcore.spelling` for the names. Boxes of stacked layers are split at layer
boundaries. Boxes of gate halves and of experts are moved. No data is read. If a canonical tensor
uses only some rows of an item, these rows are recorded and located when the catalog is resolved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import NamedTuple

from ckptctl.catalog import Box, Catalog, ItemPart, TensorEntry
from ckptctl.columns import BoxColumns, ExtentColumns, Vector
from ckptctl.errors import CoverageError, UnsupportedError, quote_names
from ckptctl.formats.dcp.metadata import BoxCache
from ckptctl.formats.mcore.spelling import (
    HALF_SUFFIXES,
    TensorNameParts,
    count_experts,
    number_stacked_layers,
    parse_tensor_names,
    require_all_layers,
)
from ckptctl.formats.shared.findings import FaultCollector
from ckptctl.formats.shared.joined_tensors import ONE_SAVE_HINT

MIXED_STORAGE_REASON = "the items are stored in two different ways"
MAX_TENSORS, MAX_PARTS = 1 << 22, 1 << 24
"""Maximum number of rows in all stacked tensors, and in all chunks of one stacked tensor."""
_Shape = tuple[int, ...]


class _Piece(NamedTuple):
    """Saved tensor, or one layer of a stacked tensor, that becomes part of a canonical tensor."""

    entry: TensorEntry
    name_parts: TensorNameParts
    row: int | None

    @property
    def shape(self) -> _Shape:
        return self.entry.shape if self.row is None else self.entry.shape[1:]


class _Rows(NamedTuple):
    """Selected extents of a tensor, with their new boxes and the used part of each item.

    *indices* is None if all extents are selected, and *parts* is None if all items are used fully.
    """

    indices: Sequence[int] | None
    boxes: BoxColumns
    parts: tuple[ItemPart, ...] | None


def join_canonical(
    catalog: Catalog,
    faults: FaultCollector,
    arguments: Mapping[str, object],
    attention_kinds: Sequence[str] = (),
) -> Catalog:
    """Join the tensors of *catalog* into canonical tensors.

    *arguments* are the trainer's arguments, such as ``num_layers`` and ``num_experts``.
    *attention_kinds* are those of all layers, if their attention is stacked by kind.

    Raises:
        CoverageError: A layer, an expert or a half is missing.
        UnsupportedError: The number of layers is ambiguous, or two tensors have one canonical name.
    """
    parsed_names = parse_tensor_names(catalog.tensors)
    require_all_layers(catalog.tensors, parsed_names, arguments, faults)
    experts = count_experts(parsed_names.values(), arguments, str(faults.root))
    joiner = _CanonicalJoiner(faults, experts, catalog.lost)
    numbers = number_stacked_layers(
        catalog.tensors, parsed_names, attention_kinds, str(faults.root)
    )
    pieces = _group_pieces_by_name(catalog.tensors, parsed_names, numbers, str(faults.root))
    tensors = {name: joiner.join_tensor(name, members) for name, members in pieces.items()}
    lost = {
        name: lost_boxes
        for name, members in pieces.items()
        if (lost_boxes := joiner.list_lost_boxes(members))
    }
    return replace(catalog, tensors=tensors, lost=lost, findings=tuple(faults.findings))


def _group_pieces_by_name(
    tensors: Mapping[str, TensorEntry],
    parsed_names: Mapping[str, TensorNameParts],
    layer_numbers: Mapping[str, Sequence[int]],
    where: str,
) -> dict[str, list[_Piece]]:
    count = sum(
        tensors[name].shape[0] for name, name_parts in parsed_names.items() if name_parts.is_stacked
    )
    if count > MAX_TENSORS:
        raise UnsupportedError(
            "too many tensors in stacked layers",
            where=where,
            why=f"{count:,}, limit {MAX_TENSORS:,}",
        )
    pieces: dict[str, list[_Piece]] = {}
    for name, entry in tensors.items():
        name_parts = parsed_names[name]
        numbers = layer_numbers.get(name_parts.attention_kind)
        for row in range(entry.shape[0]) if name_parts.is_stacked else (None,):
            layer = row if row is None or numbers is None else numbers[row]
            pieces.setdefault(name_parts.format_canonical_name(layer), []).append(
                _Piece(entry, name_parts, row)
            )
    return pieces


@dataclass(slots=True)
class _CanonicalJoiner:
    """Builder of canonical tensors, which reuses equal boxes to save memory."""

    faults: FaultCollector
    experts: Mapping[tuple[str, str], int]
    lost: Mapping[str, tuple[tuple[Box, str], ...]]
    stacks: dict[tuple[int, _Shape], tuple[BoxColumns, Sequence[_Rows]]] = field(
        default_factory=dict
    )
    box_cache: BoxCache = field(default_factory=dict)
    whole_items: dict[_Shape, ItemPart] = field(default_factory=dict)

    def join_tensor(self, name: str, pieces: Sequence[_Piece]) -> TensorEntry:
        """Join *pieces* into the canonical tensor *name*."""
        first = pieces[0]
        entry, shape, name_parts = first.entry, first.shape, first.name_parts
        if name_parts.half is not None and shape:
            shape = (len(HALF_SUFFIXES) * shape[0], *shape[1:])
        if name_parts.expert is not None:
            shape = (self.experts[name_parts.tensor_kind], *shape)
        self._require_matching_parts(name, pieces)
        unread = next((p.entry.unsupported for p in pieces if p.entry.unsupported), None)
        columns = [_to_columns(piece.entry) for piece in pieces]
        usable = [column for column in columns if column is not None]
        if len(usable) < len(columns) or len({column.codec for column in usable}) > 1:
            unread = unread or MIXED_STORAGE_REASON
        if unread:
            return TensorEntry.build_unreadable(name, entry.dtype, shape, (name,), unread)
        if len(pieces) == 1 and shape == entry.shape:
            return entry if name == entry.name else replace(entry, name=name, path=(name,))
        extents = self._join_extents(pieces, usable)
        return replace(entry, name=name, shape=shape, extents=extents, path=(name,))

    def list_lost_boxes(self, pieces: Sequence[_Piece]) -> tuple[tuple[Box, str], ...]:
        """Return ``(box, file)`` for each box of a canonical tensor that is in an unusable file."""
        lost: list[tuple[Box, str]] = []
        for piece in pieces:
            piece_boxes = self.lost.get(piece.entry.name)
            if not piece_boxes:
                continue
            boxes = BoxColumns(
                [box.offsets for box, _ in piece_boxes], [box.sizes for box, _ in piece_boxes]
            )
            rows = self._move_rows(piece, self._select_rows(piece, boxes))
            files = [
                piece_boxes[index][1]
                for index in (rows.indices if rows.indices is not None else range(len(piece_boxes)))
            ]
            lost += zip(rows.boxes, files, strict=True)
        return tuple(lost)

    def _require_matching_parts(self, name: str, pieces: Sequence[_Piece]) -> None:
        """Raise if *pieces* contradict each other, and raise or add a finding if one is missing."""
        first = pieces[0]
        kind = first.entry.dtype, first.shape
        odd = next((piece for piece in pieces if (piece.entry.dtype, piece.shape) != kind), None)
        pieces_by_part = {
            (piece.name_parts.expert, piece.name_parts.half): piece for piece in pieces
        }
        experts, halves = {e for e, _ in pieces_by_part}, {h for _, h in pieces_by_part}
        mixed = any(None in kinds and len(kinds) > 1 for kinds in (experts, halves))
        if odd or mixed or len(pieces_by_part) < len(pieces):
            both = (piece.entry for piece in (first, odd or pieces[-1]))
            raise UnsupportedError(
                f"two tensors cannot be joined as `{name}`",
                where=str(self.faults.root),
                why=" and ".join(f"`{e.name}` is {e.dtype} {list(e.shape)}" for e in both),
                hint=ONE_SAVE_HINT,
            )
        count = self.experts[first.name_parts.tensor_kind] if None not in experts else 0
        required_parts = [
            (expert, half)
            for expert in (range(count) if count else (None,))
            for half in (range(len(HALF_SUFFIXES)) if None not in halves else (None,))
        ]
        missing_parts = [
            _describe_part(*part, count) for part in required_parts if part not in pieces_by_part
        ]
        if missing_parts:
            error = CoverageError(
                f"a part of `{name}` is missing",
                where=str(self.faults.root),
                why=quote_names(missing_parts, quote=""),
                hint="use another checkpoint (a rank never saved its part of this one)",
            )
            self.faults.add_or_raise(error, tensor=name)

    def _join_extents(
        self, pieces: Sequence[_Piece], columns: Sequence[ExtentColumns]
    ) -> ExtentColumns:
        selected = [
            _take_rows(
                column, self._move_rows(piece, self._select_rows(piece, column.boxes)), piece
            )
            for piece, column in zip(pieces, columns, strict=True)
        ]
        if len(selected) == 1:
            return selected[0]
        offsets = tuple(
            offset for piece_columns in selected for offset in piece_columns.boxes.offsets
        )
        sizes = tuple(size for piece_columns in selected for size in piece_columns.boxes.sizes)
        parts = [
            part
            for piece_columns in selected
            for part in (piece_columns.parts or repeat(None, len(piece_columns)))
        ]
        return ExtentColumns(
            self.box_cache.setdefault((offsets, sizes), BoxColumns(offsets, sizes)),
            [file for piece_columns in selected for file in piece_columns.files],
            [start for piece_columns in selected for start in piece_columns.starts],
            [length for piece_columns in selected for length in piece_columns.lengths],
            selected[0].codec,
            tuple(parts) if any(parts) else None,
        )

    def _select_rows(self, piece: _Piece, boxes: BoxColumns) -> _Rows:
        """Select the extents that contain *piece*, which may be one layer of a stacked tensor."""
        if piece.row is None:
            return _Rows(None, boxes, None)
        key = id(boxes), piece.entry.shape
        if key not in self.stacks:
            self.stacks[key] = boxes, _split_by_layer(piece.entry, boxes, str(self.faults.root))
        return self.stacks[key][1][piece.row]

    def _move_rows(self, piece: _Piece, rows: _Rows) -> _Rows:
        """Shift the boxes of *rows* to the offsets of *piece* in the canonical tensor."""
        name_parts, boxes, parts = piece.name_parts, rows.boxes, rows.parts
        offsets, sizes = boxes.offsets, boxes.sizes
        if name_parts.half and piece.shape:
            shift = name_parts.half * piece.shape[0]
            offsets = tuple((*(o + shift for o in vector[:1]), *vector[1:]) for vector in offsets)
        if name_parts.expert is not None:
            parts = parts or tuple(self.whole_items.setdefault(s, ItemPart(s)) for s in sizes)
            offsets = tuple((name_parts.expert, *vector) for vector in offsets)
            sizes = tuple((1, *vector) for vector in sizes)
        if offsets is boxes.offsets:
            return rows
        key = tuple(offsets), tuple(sizes)
        return _Rows(rows.indices, self.box_cache.setdefault(key, BoxColumns(*key)), parts)


def _describe_part(expert: int | None, half: int | None, count: int) -> str:
    which = [] if expert is None else [f"expert {expert} of {count:,}"]
    return " ".join([*which, *([] if half is None else [f"`_{HALF_SUFFIXES[half]}`"])])


def _to_columns(entry: TensorEntry) -> ExtentColumns | None:
    """Convert the extents of a tensor to columns, or return None if their codecs differ."""
    extents = entry.extents
    if isinstance(extents, ExtentColumns):
        return extents
    if len({extent.codec for extent in extents}) > 1:
        return None
    rows = ((e.box.offsets, e.box.sizes, e.file, e.offset, e.nbytes) for e in extents)
    columns = ExtentColumns.from_rows(rows)
    columns.codec = extents[0].codec if extents else columns.codec
    return columns


def _split_by_layer(entry: TensorEntry, boxes: BoxColumns, where: str) -> Sequence[_Rows]:
    """Split the boxes of a stacked tensor at layer boundaries, and group them by layer."""
    rank, layers = len(entry.shape), entry.shape[0]
    if sum(vector[0] for vector in boxes.sizes if vector) > MAX_PARTS:
        raise UnsupportedError(f"`{entry.name}` has too many chunks", where=where)
    indices: list[list[int]] = [[] for _ in range(layers)]
    by_layer: list[tuple[list[Vector], list[Vector], list[ItemPart]]] = [
        ([], [], []) for _ in indices
    ]
    part_cache: dict[ItemPart, ItemPart] = {}
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
            indices[layer].append(number)
            layer_rows = by_layer[layer]
            layer_rows[0].append(offsets[1:])
            layer_rows[1].append(sizes[1:])
            layer_rows[2].append(part_cache.setdefault(part, part))
    box_cache: BoxCache = {}
    return [
        _Rows(which, box_cache.setdefault(key, BoxColumns(*key)), tuple(parts))
        for which, (offsets, sizes, parts) in zip(indices, by_layer, strict=True)
        for key in [(tuple(offsets), tuple(sizes))]
    ]


def _take_rows(columns: ExtentColumns, rows: _Rows, piece: _Piece) -> ExtentColumns:
    """Return the extents of *piece*, which are the selected *rows* of *columns*."""
    indices = rows.indices if rows.indices is not None else range(len(columns))
    files = [columns.files[n] for n in indices]
    starts = [columns.starts[n] for n in indices]
    lengths = [columns.lengths[n] for n in indices]
    if columns.codec == "torch":
        return ExtentColumns(rows.boxes, files, starts, lengths, "torch", rows.parts)
    if piece.row is not None and rows.parts is not None:
        counts = [part.shape[0] for part in rows.parts]
        lengths = [length // count for length, count in zip(lengths, counts, strict=True)]
        numbers = [part.row or 0 for part in rows.parts]
        starts = [s + n * step for s, n, step in zip(starts, numbers, lengths, strict=True)]
    return ExtentColumns(rows.boxes, files, starts, lengths, columns.codec)
