"""The rows that Megatron-Core adds to a vocabulary so that tensor-parallel ranks can divide it.

``args.padded_vocab_size`` is the next multiple of ``make_vocab_size_divisible_by`` (128) times the
number of these ranks (``megatron/training/tokenizer``). A model with another number of rows loads
such a checkpoint, too: its embedding and output layer are declared with ``allow_shape_mismatch``,
and rows that are not there become zeros. The real number is that of config.json. Rows that no token
means are trained all the same, as those of outputs that never come, so that they need not be zeros:
then the trainer's own arguments have to say that they are padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckptctl.catalog import Catalog
from ckptctl.errors import spell_option
from ckptctl.ops.recognition.agreement import AXIS
from ckptctl.planner.configs.megatron import merged
from ckptctl.planner.layouts import Family, Layout
from ckptctl.planner.mapping.mapped import Region
from ckptctl.planner.mapping.resizing import Padding, resized
from ckptctl.planner.mapping.tensors import Change
from ckptctl.units import counted

MULTIPLE = 128
"""What Megatron-LM and Megatron-Bridge pad a vocabulary to where nobody says otherwise."""
READ = "they must be zero, which is checked before writing"


def with_unstated_padding(change: Change, sizes: Mapping[str, int]) -> Change:
    """Return *change* of a padded layout, with a note if *sizes* do not state the padding."""
    rows = change.sizes.get(AXIS)
    if AXIS in sizes or not rows:
        return change
    note = (
        f"no file states whether some of the {counted(rows, 'row')} of the vocabulary are "
        "padding; all are kept"
    )
    options = f"{spell_option('--assets')} or {spell_option('--vocab-size')}"
    change.notes.add(f"{note} (set the size with {options})")
    return change


def without_padding(change: Change, family: Family, size: int, catalog: Catalog) -> Change:
    """Return *change* with a vocabulary of *size* rows; the others have to be padding."""
    rows = change.sizes[AXIS]
    source = family.layout(change.source_layout or "")
    target = family.layout(change.target_layout or "")
    tensors, _ = resized(change.tensors, source, target, AXIS, size)
    stated = is_stated(catalog, rows, size)
    proofs = () if stated else (Padding((), (), (), _cut(change, source, size), rows, size),)
    why = "Megatron's arguments state that they are padding" if stated else READ
    left = counted(rows - size, "row")
    change.notes.add(f"the last {left} of the vocabulary are dropped ({why})")
    return replace(
        change,
        tensors=tuple(tensors),
        tilings=(*change.tilings, *proofs),
        sizes={**change.sizes, AXIS: size},
    )


def _cut(change: Change, layout: Layout, size: int) -> tuple[Region, ...]:
    """Return the parts of the source's tensors that lie behind *size* rows."""
    found: dict[str, Region] = {}
    for key, shape in (source for one in change.tensors for source in one.sources):
        dim = layout.own_dimension(key, AXIS)
        if dim is not None:
            origin, sizes = [0] * len(shape), list(shape)
            origin[dim], sizes[dim] = size, sizes[dim] - size
            found[key] = Region(key, tuple(origin), tuple(sizes))
    return tuple(found.values())


def with_padding(change: Change, family: Family, rows: int | None = None) -> Change:
    """Return *change* with a vocabulary of *rows*; None: the next multiple of :data:`MULTIPLE`."""
    size = change.sizes.get(AXIS, 0)
    padded = rows or -(-size // MULTIPLE) * MULTIPLE
    source = family.layout(change.source_layout or "")
    target = family.layout(change.target_layout or "")
    if padded == size or (rows is None and not _holds_rows(change, target)):
        return change
    tensors, zeros = resized(change.tensors, source, target, AXIS, padded)
    other = f"pass {spell_option('--vocab-size')} for another size"
    why = "" if rows else f", a multiple of {MULTIPLE} ({other})"
    rows_before = counted(size, "row")
    change.notes.add(f"the vocabulary of {rows_before} is padded with zeros to {padded:,}{why}")
    return replace(change, tensors=tuple(tensors), zeros=(*change.zeros, *zeros))


def _holds_rows(change: Change, layout: Layout) -> bool:
    """Return whether some tensor has the rows of a vocabulary; of an adapter most often none."""
    keys = (one.targets[0].key for one in change.tensors)
    return any(layout.own_dimension(key, AXIS) is not None for key in keys)


def is_stated(catalog: Catalog, rows: int, size: int) -> bool:
    """Return whether the trainer's records say that of *rows* only *size* are no padding."""
    told = merged(catalog.records.values())
    step = _count(told, "make_vocab_size_divisible_by", MULTIPLE)
    unit = step * _count(told, "tensor_model_parallel_size", 1)
    padded = told.get("padded_vocab_size")
    if padded is None and told.get("should_pad_vocab") is True and told.get("vocab_size") == size:
        padded = -(-size // unit) * unit
    return padded == rows and rows - size < unit


def _count(told: Mapping[str, object], name: str, default: int) -> int:
    found = told.get(name)
    return found if type(found) is int and 0 < found <= 1 << 20 else default
