"""What contract tests ask of the tables of a family: tiny models, and what becomes of arrays."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from ckptctl.catalog import TensorEntry
from ckptctl.families import load_families
from ckptctl.planner.layouts import Family
from ckptctl.planner.mapping.mapped import MappedTensor, compose_tensors
from ckptctl.planner.mapping.matching import (
    Slot,
    format_key,
    iterate_spread_positions,
    list_index_values,
)
from ckptctl.planner.mapping.numbering import compute_numbering
from ckptctl.planner.mapping.source import ModelFacts
from ckptctl.planner.mapping.tensors import LayoutChange, map_tensors
from tests.unit.planner.test_strided import elements_of_parts

FAMILIES = load_families()
PAIRS = [
    (name, *pair)
    for name, family in FAMILIES.items()
    for pair in itertools.product(family.layouts, repeat=2)
]


def from_first(pair: tuple[Any, ...], known: Mapping[str, Family] = FAMILIES) -> bool:
    """Return whether one of the two layouts is the family's first one."""
    return known[pair[0]].layouts[0] in pair[1:3]


def direct(pairs: Sequence[tuple[Any, ...]], known: Mapping[str, Family] = FAMILIES) -> list[Any]:
    """Return *pairs*, those slow in which neither layout is the family's first one."""
    return [
        pytest.param(*pair, marks=() if from_first(pair, known) else pytest.mark.slow)
        for pair in pairs
    ]


ALL = [(name, layout) for name, family in FAMILIES.items() for layout in family.layouts]


def tiny_sizes(family: Family) -> dict[str, int]:
    sizes = dict(family.constants) | dict(family.tiny)
    for axis, parts in family.composite.items():
        known = math.prod(sizes[p] for p in parts if p in sizes)
        for part in parts:
            sizes.setdefault(part, sizes[axis] // known)
    return sizes


def layers_of(family: Family, sizes: dict[str, int]) -> dict[str, set[tuple[int, ...]]]:
    """For each variant that every layout may have the layers that are of it."""
    found: dict[str, set[tuple[int, ...]]] = {}
    for variants in family.variants:
        group = [variant for variant in variants if variant not in family.quantized]
        for layer in range(sizes.get("i", 0)):
            found.setdefault(group[layer % len(group)], set()).add((layer,))
    return found


def tiny(
    family: Family, layout: str, *, optional: bool = False, tied: bool | None = None
) -> dict[str, tuple[int, ...]]:
    """The shapes of a model of the family's tiny sizes in *layout*, by key."""
    sizes, table = tiny_sizes(family), family.get_layout(layout)
    tied = family.tied if tied is None else tied
    gone = {t.tensor for t in family.ties if tied and layout not in t.stored_in}
    needed = {fill.tensor for fill in family.fills}
    layers = layers_of(family, sizes)
    numbering = compute_numbering(family, layout, sizes, tiny_lists(family, sizes))
    found: dict[str, tuple[int, ...]] = {}
    for stored in table.stored:
        tensor, leaf = stored.parts[0]
        is_needed = optional or not tensor.optional or tensor.name.partition(".")[0] in needed
        if tensor.name in gone or not is_needed:
            continue
        parts = {other.part: other for _, other in stored.parts}.values()
        shapes = [
            [math.prod(sizes[axis] for axis in group) for group in other.dims] for other in parts
        ]
        shape = list(shapes[0])
        if shape and leaf.part is not None:
            shape[leaf.concat_dim] = sum(other[leaf.concat_dim] for other in shapes)
        for values in list_index_values(tensor, sizes):
            kinds = {other.variant for other, _ in stored.parts}
            if None in kinds or any(values in layers.get(kind or "", ()) for kind in kinds):
                for lead in iterate_spread_positions(leaf, sizes):
                    found[format_key(table, tensor, values, lead, numbering)] = tuple(shape)
    for drop in family.drops:
        if drop.layout == layout and drop.zeros:
            zeros = tuple(sizes[axis] for axis in drop.zeros.split())
            beside = next(t for n, t in family.tensors.items() if n.split(".")[0] == drop.next_to)
            for values in list_index_values(beside, sizes):
                if beside.variant is None or values in layers.get(beside.variant, ()):
                    found[drop.key.format(**dict(zip(beside.indices, values, strict=True)))] = zeros
    return found


def tiny_lists(family: Family, sizes: Mapping[str, int]) -> dict[str, list[int]]:
    """Where config.json would say that layers are inserted, at odd numbers, and their words."""
    inserted = {
        shift.list_field: [2 * n + 1 for n in range(sizes[shift.index])]
        for shift in family.shifts
        if shift.list_field
    }
    words = {
        word.name: [n % len(word.kinds) for n in range(sizes[word.index])]
        for word in family.layer_words
    }
    return inserted | words


def filled_slots(family: Family) -> list[Slot]:
    """The tensors that some layout fills, in all layers: a config may say that each uses them."""
    names = {fill.tensor for fill in family.fills}
    return [
        (name, values)
        for name, tensor in family.tensors.items()
        if name.partition(".")[0] in names
        for values in list_index_values(tensor, tiny_sizes(family))
    ]


def mapped(family, source, target, shapes):
    sizes = family.tiny
    return map_tensors(
        family,
        source,
        target,
        shapes,
        ModelFacts(sizes=sizes, layer_lists=tiny_lists(family, sizes)),
    )


def numbered(shapes):
    """Arrays whose elements are all different."""
    values, start = {}, 0
    for key, shape in shapes.items():
        values[key] = np.arange(start, start + math.prod(shape)).reshape(shape)
        start += math.prod(shape)
    return values


def moved(found, values):
    """What arrays of *values* become, by numpy."""
    values = values | {zeros.key: np.zeros(zeros.shape, int) for zeros in found.zeros}
    places = numbered({key: array.shape for key, array in values.items()})
    flat = np.concatenate([array.ravel() for array in values.values()])
    entries = {key: TensorEntry(key, "", array.shape, (), ()) for key, array in values.items()}
    result = {}
    for key, composed in compose_tensors(found.tensors).items():
        place = elements_of_parts(composed.bind_entries(entries), places)
        result[key] = np.where(place < 0, -1, flat[place] + composed.sources[0].offset)
    return result


def copies(change: LayoutChange) -> dict[str, str]:
    """Return the keys of tensors that are dropped as copies, each with the one that is kept."""
    pairs = ((one.part, one.same_as) for one in change.redundant if one.kind == "tensor")
    return {part.key: same_as.key for part, same_as in pairs if same_as}


def stored_shapes(tensors: Iterable[MappedTensor]) -> dict[str, tuple[int, ...]]:
    """Shape of each stored tensor of the target."""
    return {key: composed.shape for key, composed in compose_tensors(tensors).items()}


def cells(offsets, sizes):
    return tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
