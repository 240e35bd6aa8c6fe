"""Change of layout: tensors that are renamed, reordered, dropped or kept."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ckptctl import families, formats
from ckptctl.catalog import Catalog, Computed, Input, TensorEntry, computed_name
from ckptctl.conversion.recognition.model import AXIS, PADDED_LAYOUTS, Model, require_one
from ckptctl.conversion.recognition.vocabulary import (
    note_padding,
    note_unstated_padding,
    padded_size,
    require_own_rows,
    rows_with_padding,
    without_padding,
)
from ckptctl.conversion.sources import located
from ckptctl.errors import MappingError, UsageError, listed, spell_option
from ckptctl.notes import Notes
from ckptctl.planner.config_demands import find_required_tensors
from ckptctl.planner.config_facts import list_absent_heads
from ckptctl.planner.layouts import Family, is_base
from ckptctl.planner.mapping.mapped import ComposedTensor, MappedTensor, ZeroTensor, compose_tensors
from ckptctl.planner.mapping.matching import ModelTensors
from ckptctl.planner.mapping.source import SurplusError
from ckptctl.planner.mapping.tensors import LayoutChange, map_tensors
from ckptctl.tree import TreePath
from ckptctl.units import counted

LARGEST = 1 << 32
"""Maximum number of rows of a padded vocabulary."""


SUMMED = ("float64", "float32", "float16", "bfloat16")
"""Dtypes of tensors to which a number can be added."""


@dataclass(frozen=True, slots=True)
class LayoutRequest:
    """Request for a change of layout.

    Attributes:
        target_layout: Layout requested by the user or the target format, or None to keep that of
            the source.
        described: Whether the target has a description of the model (``params.json``), which
            requires a known family even if no name changes.
        vocab: Size that the vocabulary is padded or truncated to, or None to keep its size.
        pads: Whether to pad the vocabulary to the size that the target's programs expect.
        whole: Names of all tensors of the model, if only a part of them is mapped.
        missing: Names of tensors that may be missing.
    """

    target_layout: str | None
    described: bool = False
    untie: bool = False
    partial: bool = False
    vocab: int | None = None
    pads: bool = False
    whole: Collection[str] | None = None
    missing: Collection[str] = ()
    trust_assets: bool = False


def requested_layout(
    known: Model, tensors: Mapping[str, TensorEntry], asked: LayoutRequest
) -> tuple[Family | None, str | None, bool]:
    """Determine the family that a change needs, the layout to write, and if names are kept.

    The family is None if *tensors* are copied because no table describes them.
    """
    target = asked.target_layout or known.layout
    usual = formats.get(known.catalog.format).layout or "hf"
    unknown = not known.candidates and target in (None, usual)
    needs_family = asked.untie or known.request.sizes or asked.vocab
    same = unknown or target is None or target == known.layout or target in known.alike
    if not same or (asked.described and known.candidates):
        family = chosen_family(known, target)
    elif known.model_type and (known.exact or (known.layout and needs_family)):
        family = families.family(known.model_type)
    else:
        _require_no_family(known, tensors, asked)
        return None, target, same
    if not same and target:
        families.require_layout(family, target)
    return family, target, same


def compared_tensors(
    known: Model, family: Family, tensors: Mapping[str, TensorEntry], asked: LayoutRequest
) -> ModelTensors | None:
    """Match *tensors* to the layout of the source, or return None if that is unknown."""
    if not known.layout:
        return None
    layout, names = family.get_layout(known.layout), tensors if asked.whole is None else asked.whole
    shapes = {name: entry.shape for name, entry in tensors.items()}
    return ModelTensors(layout, known.match(family, layout, names), shapes)


def change_layout(
    known: Model, tensors: Mapping[str, TensorEntry], asked: LayoutRequest
) -> LayoutChange:
    """Map *tensors* of a model to the requested layout, which may be their own."""
    family, target, same = requested_layout(known, tensors, asked)
    if family is None:
        return _unchanged(known, tensors, target)
    source = known.layout or ""
    there = compared_tensors(known, family, tensors, asked)
    matched = there.matched if there else None
    sizes = known.sizes(family, implied=known.configured)
    stated, pads = sizes.get(AXIS), asked.pads and not same
    rows = rows_with_padding(there, stated) if there and source in PADDED_LAYOUTS else None
    size = _requested_rows(asked)
    if size is None and not same and there:
        size = stated if rows is not None else padded_size(there) if pads else None
    try:
        change = map_tensors(
            family,
            source,
            source if same else target or source,
            {name: entry.shape for name, entry in tensors.items()},
            sizes if rows is None else {**sizes, AXIS: rows},
            tied=known.is_tied(family),
            untie=asked.untie,
            partial=asked.partial,
            lists=known.lists(family),
            matched=matched,
            absent_tensors=list_absent_heads(family, known.config, is_base=is_base(known.layout)),
            required=find_required_tensors(family, known.config, matched),
            may_be_missing=asked.missing,
            resize={} if size is None else {AXIS: size},
        )
    except SurplusError as error:
        error.where = str(known.catalog.path)
        if known.described:
            places = listed([one.place for one in known.described])
            error.why = f"the configuration was read from {places}"
        raise
    if size is not None:
        require_own_rows(change, family)
    rows_before = change.sizes.get(AXIS, 0)
    if pads and size is not None and size > rows_before > 0:
        note_padding(change, size, is_asked=asked.vocab is not None)
    elif asked.vocab is not None:
        change = _with_vocabulary(change, asked.vocab)
    elif rows is not None and size is not None and there:
        change = without_padding(change, there, size, stated=known.states_padding(rows, size))
    elif source in PADDED_LAYOUTS and not pads and not same:
        note_unstated_padding(change, stated)
    return _in_source_order(change, tensors) if same else change


def _requested_rows(asked: LayoutRequest) -> int | None:
    """Return the requested number of vocabulary rows, or None to keep it."""
    size = asked.vocab
    if size is not None and not 0 < size <= LARGEST:
        raise UsageError(
            f"{spell_option('--vocab-size')} must be between 1 and {LARGEST:,}",
            why=f"it is {size:,}",
        )
    return size


def _in_source_order(change: LayoutChange, tensors: Iterable[str]) -> LayoutChange:
    positions = {name: position for position, name in enumerate(tensors)}
    ordered = sorted(change.tensors, key=lambda item: positions[item.sources[0].key])
    return replace(change, tensors=tuple(ordered))


def _require_no_family(
    known: Model, tensors: Mapping[str, TensorEntry], asked: LayoutRequest
) -> None:
    """Raise if an option is given that requires a known family."""
    where = known.catalog.path
    if known.request.sizes:
        option = spell_option(f"--set {next(iter(known.request.sizes))}")
        raise UsageError(
            f"{option} requires a known model type",
            where=where,
            why="keys and axes are unchanged, so sizes are not needed",
        )
    if asked.vocab is not None:
        raise UsageError(f"{spell_option('--vocab-size')} requires a known model type", where=where)
    if asked.untie and not any(entry.alias_of for entry in tensors.values()):
        raise UsageError(
            f"{spell_option('--untie')} requires a known model type, or tensors that share memory",
            where=where,
        )


def _with_vocabulary(change: LayoutChange, size: int) -> LayoutChange:
    if (cut := change.sizes[AXIS] - size) > 0:
        dropped_rows = f"the last {counted(cut, 'row')} of the vocabulary"
        change.notes.add(f"{spell_option(f'--vocab-size {size}')} drops {dropped_rows}")
    return replace(change, sizes={**change.sizes, AXIS: size}, vocab=size)


def chosen_family(known: Model, target: str | None) -> Family:
    """Return the family for a change of names. Equivalent families count as one."""
    if known.model_type is None and known.layout and target and _interchangeable(known, target):
        return families.family(known.candidates[0])
    require_one(known)
    return families.family(known.model_type or known.candidates[0])


def _interchangeable(known: Model, target: str) -> bool:
    found = [families.family(name) for name in known.candidates]
    first, *others = found
    return bool(others) and all(
        name in other.layouts
        and other.get_layout(name).has_same_tensors(first.get_layout(name))
        and other.tied == first.tied
        for other in others
        for name in (known.layout or "", target)
        if name in first.layouts
    )


def _unchanged(
    known: Model, tensors: Mapping[str, TensorEntry], target: str | None
) -> LayoutChange:
    if target is not None and known.layout is None and target != "hf":
        raise MappingError(
            f"layout `{target}` requires a known model type",
            why=f"no known model type has keys such as {listed(list(tensors), 2)}",
            hint="use format hf, dcp or torch to copy keys unchanged",
        )
    notes = Notes()
    model_type = known.request.model_type
    if model_type and not known.candidates:
        notes.add(f"keys are copied unchanged: no layout of `{model_type}` has them")
    elif strange := known.strays(tensors):
        unknown = f"keys unknown to {known.named}: {listed(strange)}"
        notes.add(f"keys are copied unchanged; {unknown}")
    mapped = tuple(
        MappedTensor.from_unchanged(name, name, entry.shape) for name, entry in tensors.items()
    )
    return LayoutChange(None, known.layout, known.layout, mapped, notes=notes)


def apply_change(
    catalog: Catalog, change: LayoutChange, root: str, prefix: str = ""
) -> tuple[Catalog, dict[str, ComposedTensor]]:
    """Name the tensors of a mapped model, and add its virtual tensors to *catalog*.

    Returns:
        *catalog* with the virtual tensors, and the tensors of the target, below *prefix*, as
        elements of the model's tensors, below *root*.
    """
    tensors = compose_tensors(change.tensors, root, prefix)
    catalog = with_zeros(catalog, change.zeros, root)
    return with_sums(catalog, tensors.values()), tensors


def with_zeros(catalog: Catalog, zeros: Sequence[ZeroTensor], root: str) -> Catalog:
    """Add tensors of zeros to *catalog*, as virtual files.

    Args:
        catalog: The source.
        zeros: Tensors of zeros.
        root: Prefix in *catalog* of the tensors whose dtype they have.
    """
    if not zeros:
        return catalog
    entries, computed = dict(catalog.tensors), dict(catalog.computed)
    for item in zeros:
        like = entries[root + item.like] if item.like else None
        made = Computed("constant", like.dtype if like else item.dtype, item.shape)
        entry = made.entry(item.key, like.path if like else (item.key,), item.key)
        entries[item.key] = replace(entry, requires_grad=like is not None and like.requires_grad)
        computed[item.key] = made
    return replace(catalog, tensors=entries, computed=computed)


def with_sums(catalog: Catalog, tensors: Iterable[ComposedTensor]) -> Catalog:
    """Replace tensors of *catalog* to which a number is added by virtual files.

    Sums have the dtype of the tensors, and are cast afterwards if requested.
    """
    plus = {source.key: source.offset for one in tensors for source in one.sources if source.offset}
    if not plus:
        return catalog
    entries, computed = dict(catalog.tensors), dict(catalog.computed)
    for key, entry in located(catalog, plus).tensors.items():
        file = computed_name(f"{key}{plus[key]:+}")
        computed[file] = made = _sum(catalog.root, entry, plus[key])
        entries[key] = replace(entry, extents=(made.extent(file),), alias_of=None)
    return replace(catalog, tensors=entries, computed=computed)


def _sum(root: TreePath, entry: TensorEntry, plus: int) -> Computed:
    if entry.dtype not in SUMMED:
        raise MappingError(
            f"cannot {'add' if plus > 0 else 'subtract'} {abs(plus)} "
            f"{'to' if plus > 0 else 'from'} {entry.dtype}",
            where=f"tensor `{entry.name}`",
            hint=f"pass {spell_option('--dequantize bf16')} if the tensor is quantized",
        )
    return Computed("added", entry.dtype, entry.shape, (Input(root, entry),), plus)
