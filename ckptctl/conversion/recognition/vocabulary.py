"""Padding rows that Megatron-Core adds to a vocabulary for tensor parallelism.

``args.padded_vocab_size`` is the next multiple of ``make_vocab_size_divisible_by`` (128) times the
number of tensor-parallel ranks (``megatron/training/tokenizer``). Models with another number of
rows can load such a checkpoint, because embedding and output layer are declared with
``allow_shape_mismatch`` and missing rows become zeros. config.json states the vocabulary size.
Padding rows may become nonzero in training, because the output layer also computes logits for them.
The trainer's arguments must then state that the rows are padding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckptctl.conversion.recognition.model import VOCABULARY_AXIS
from ckptctl.errors import MappingError, format_option
from ckptctl.planner.families.declarations import VOCABULARY_PAD_MULTIPLE
from ckptctl.planner.layouts import Family
from ckptctl.planner.mapping.mapped import RedundantData, Region
from ckptctl.planner.mapping.matching import ModelTensors
from ckptctl.units import pluralize

if TYPE_CHECKING:
    from ckptctl.planner.mapping.tensors import LayoutChange

MUST_BE_ZERO = "they must be zero, which is checked before writing"


def note_unstated_padding(change: LayoutChange, stated_rows: int | None) -> None:
    """Add a note to *change* if no file states whether the vocabulary is padded."""
    rows = change.sizes.get(VOCABULARY_AXIS)
    if stated_rows is not None or not rows:
        return
    note = (
        f"no file states whether some of the {pluralize(rows, 'row')} of the vocabulary are "
        "padding; all are kept"
    )
    options = f"{format_option('--assets')} or {format_option('--vocab-size')}"
    change.notes.add(f"{note} (set the size with {options})")


def count_vocabulary_rows(tensors: ModelTensors) -> int | None:
    """Return the number of vocabulary rows.

    Return None if no tensor has a vocabulary axis, or if its size differs between tensors.
    """
    row_counts = {
        tensors.shapes[key][dim] for key, dim in tensors.find_dims(VOCABULARY_AXIS).items()
    }
    return row_counts.pop() if len(row_counts) == 1 else None


def count_rows_with_padding(tensors: ModelTensors, size: int | None) -> int | None:
    """Return the number of vocabulary rows if it exceeds *size*, or None otherwise."""
    rows = count_vocabulary_rows(tensors)
    return rows if rows is not None and size is not None and rows > size else None


def drop_padding(
    change: LayoutChange, tensors: ModelTensors, size: int, *, is_stated: bool
) -> LayoutChange:
    """Limit *change* to the first *size* rows of the vocabulary.

    If *is_stated* is false, the conversion verifies that the dropped rows are zero.
    """
    rows = change.sizes[VOCABULARY_AXIS]
    read = {source.key for item in change.tensors for source in item.sources}
    regions = []
    for key, dim in tensors.find_dims(VOCABULARY_AXIS).items():
        origin, sizes = [0] * len(tensors.shapes[key]), list(tensors.shapes[key])
        origin[dim], sizes[dim] = size, rows - size
        if key in read:
            regions.append(Region(key, tuple(origin), tuple(sizes)))
    padding = () if is_stated else (RedundantData(item, kind="padding") for item in regions)
    why = "Megatron's arguments state that they are padding" if is_stated else MUST_BE_ZERO
    dropped_rows = pluralize(rows - size, "row")
    change.notes.add(f"the last {dropped_rows} of the vocabulary are dropped ({why})")
    return replace(
        change,
        redundant=(*padding, *change.redundant),
        sizes={**change.sizes, VOCABULARY_AXIS: size},
    )


def require_separate_rows(change: LayoutChange, family: Family) -> None:
    """Raise if the vocabulary axis is fused with another axis, so that it cannot be resized."""
    layouts = (
        family.get_layout(name) for name in (change.source_layout, change.target_layout) if name
    )
    leaves = (leaf for layout in layouts for leaf in layout.leaves.values())
    fused = {
        fused_leaf.key.text
        for fused_leaf in leaves
        if fused_leaf.part is not None
        and fused_leaf.dims[fused_leaf.concat_dim] == (VOCABULARY_AXIS,)
    }
    keys = (
        *(source.key for item in change.tensors for source in item.sources),
        *(target.key for item in change.tensors for target in item.targets),
    )
    key = next((key for key in keys if key in fused), None)
    if key is not None:
        raise MappingError(
            f"axis {VOCABULARY_AXIS} cannot be resized because it is fused with another axis",
            where=f"tensor `{key}`",
        )


def compute_padded_size(tensors: ModelTensors) -> int | None:
    """Return the number of vocabulary rows after padding, or None if that number is unknown."""
    rows = count_vocabulary_rows(tensors)
    return None if rows is None else -(-rows // VOCABULARY_PAD_MULTIPLE) * VOCABULARY_PAD_MULTIPLE


def note_padding(change: LayoutChange, rows: int, *, is_asked: bool) -> None:
    """Add a note that the vocabulary is padded with zeros to *rows* rows."""
    option_hint = f"pass {format_option('--vocab-size')} for another size"
    why = "" if is_asked else f", a multiple of {VOCABULARY_PAD_MULTIPLE} ({option_hint})"
    rows_before = pluralize(change.sizes[VOCABULARY_AXIS], "row")
    change.notes.add(f"the vocabulary of {rows_before} is padded with zeros to {rows:,}{why}")
