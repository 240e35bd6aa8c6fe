"""Padding rows that Megatron-Core adds to a vocabulary for tensor parallelism.

``args.padded_vocab_size`` is the next multiple of ``make_vocab_size_divisible_by`` (128) times the
number of these ranks (``megatron/training/tokenizer``). Models with another number of rows can load
such a checkpoint, because embedding and output layer are declared with ``allow_shape_mismatch`` and
missing rows become zeros. The vocabulary size is that of config.json. Rows without a token are also
trained, as outputs that never occur, and may be nonzero. Then the trainer's arguments must state
that they are padding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckptctl.conversion.recognition.model import AXIS
from ckptctl.errors import MappingError, spell_option
from ckptctl.planner.families.declarations import VOCABULARY_PAD_MULTIPLE
from ckptctl.planner.layouts import Family
from ckptctl.planner.mapping.mapped import RedundantData, Region
from ckptctl.planner.mapping.matching import ModelTensors
from ckptctl.units import counted

if TYPE_CHECKING:
    from ckptctl.planner.mapping.tensors import LayoutChange

READ = "they must be zero, which is checked before writing"


def note_unstated_padding(change: LayoutChange, stated: int | None) -> None:
    """Add a note if no file states whether the vocabulary is padded."""
    rows = change.sizes.get(AXIS)
    if stated is not None or not rows:
        return
    note = (
        f"no file states whether some of the {counted(rows, 'row')} of the vocabulary are "
        "padding; all are kept"
    )
    options = f"{spell_option('--assets')} or {spell_option('--vocab-size')}"
    change.notes.add(f"{note} (set the size with {options})")


def vocabulary_rows(tensors: ModelTensors) -> int | None:
    """Return the number of vocabulary rows, or None if tensors differ or have none."""
    found = {tensors.shapes[key][dim] for key, dim in tensors.find_dims(AXIS).items()}
    return found.pop() if len(found) == 1 else None


def rows_with_padding(tensors: ModelTensors, size: int | None) -> int | None:
    """Return the number of rows if it exceeds *size*, or None if there is no padding."""
    rows = vocabulary_rows(tensors)
    return rows if rows is not None and size is not None and rows > size else None


def without_padding(
    change: LayoutChange, tensors: ModelTensors, size: int, *, stated: bool
) -> LayoutChange:
    """Limit *change* to a vocabulary of *size* rows. The other rows must be padding."""
    rows = change.sizes[AXIS]
    read = {source.key for one in change.tensors for source in one.sources}
    regions = []
    for key, dim in tensors.find_dims(AXIS).items():
        origin, sizes = [0] * len(tensors.shapes[key]), list(tensors.shapes[key])
        origin[dim], sizes[dim] = size, rows - size
        if key in read:
            regions.append(Region(key, tuple(origin), tuple(sizes)))
    padding = () if stated else (RedundantData(one, kind="padding") for one in regions)
    why = "Megatron's arguments state that they are padding" if stated else READ
    left = counted(rows - size, "row")
    change.notes.add(f"the last {left} of the vocabulary are dropped ({why})")
    return replace(
        change,
        redundant=(*padding, *change.redundant),
        sizes={**change.sizes, AXIS: size},
    )


def require_own_rows(change: LayoutChange, family: Family) -> None:
    """Raise if a tensor fuses the vocabulary with other rows, so it cannot be resized."""
    layouts = (
        family.get_layout(name) for name in (change.source_layout, change.target_layout) if name
    )
    leaves = (leaf for layout in layouts for leaf in layout.leaves.values())
    fused = {
        one.key.text
        for one in leaves
        if one.part is not None and one.dims[one.concat_dim] == (AXIS,)
    }
    keys = (
        *(source.key for item in change.tensors for source in item.sources),
        *(target.key for item in change.tensors for target in item.targets),
    )
    key = next((key for key in keys if key in fused), None)
    if key is not None:
        raise MappingError(
            f"axis {AXIS} cannot be resized because it is fused with another axis",
            where=f"tensor `{key}`",
        )


def padded_size(tensors: ModelTensors) -> int | None:
    """Return the number of vocabulary rows after padding, or None if there is no vocabulary."""
    rows = vocabulary_rows(tensors)
    return None if rows is None else -(-rows // VOCABULARY_PAD_MULTIPLE) * VOCABULARY_PAD_MULTIPLE


def note_padding(change: LayoutChange, rows: int, *, is_asked: bool) -> None:
    """Add a note that the vocabulary is padded with zeros."""
    other = f"pass {spell_option('--vocab-size')} for another size"
    why = "" if is_asked else f", a multiple of {VOCABULARY_PAD_MULTIPLE} ({other})"
    rows_before = counted(change.sizes[AXIS], "row")
    change.notes.add(f"the vocabulary of {rows_before} is padded with zeros to {rows:,}{why}")
