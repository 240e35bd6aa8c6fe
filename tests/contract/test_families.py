"""What every model family in ``converters/`` has to satisfy."""

import itertools
import math

import numpy as np
import pytest

from ckptctl.errors import MappingError
from ckptctl.families import families, names
from ckptctl.planner.axes import Sizes
from ckptctl.planner.detect import detect
from ckptctl.planner.division import divide
from ckptctl.planner.mapping import map_tensors
from ckptctl.planner.matching import key_of, leads, slots
from ckptctl.planner.numbering import planned

FAMILIES = families()
PAIRS = [
    (name, *pair)
    for name, family in FAMILIES.items()
    for pair in itertools.product(family.layouts, repeat=2)
]
ALL = [(name, layout) for name, family in FAMILIES.items() for layout in family.layouts]


def tiny_sizes(family):
    sizes = dict(family.constants) | dict(family.tiny)
    for axis, parts in family.composite.items():
        known = math.prod(sizes[p] for p in parts if p in sizes)
        for part in parts:
            sizes.setdefault(part, sizes[axis] // known)
    return sizes


def layers_of(family, sizes):
    """For each variant that every layout may have the layers that are of it."""
    found = {}
    for variants in family.variants:
        group = [variant for variant in variants if variant not in family.quantised]
        for layer in range(sizes.get("i", 0)):
            found.setdefault(group[layer % len(group)], set()).add((layer,))
    return found


def tiny(family, layout, *, optional=False, tied=None):
    """The shapes of a model of the family's tiny sizes in *layout*, by key."""
    sizes, table = tiny_sizes(family), family.layout(layout)
    tied = family.tied if tied is None else tied
    gone = {t.tensor for t in family.ties if tied and layout not in t.stored_in}
    layers = layers_of(family, sizes)
    numbering = planned(family, layout, sizes, tiny_lists(family, sizes))
    found = {}
    for stored in table.stored:
        tensor, leaf = stored.parts[0]
        if tensor.name in gone or (tensor.optional and not optional):
            continue
        parts = {other.part: other for _, other in stored.parts}.values()
        shapes = [
            [math.prod(sizes[axis] for axis in group) for group in other.dims] for other in parts
        ]
        shape = list(shapes[0])
        if shape and leaf.part is not None:
            shape[leaf.along] = sum(other[leaf.along] for other in shapes)
        for values in slots(tensor, sizes):
            kinds = {other.variant for other, _ in stored.parts}
            if None in kinds or any(values in layers.get(kind, ()) for kind in kinds):
                for lead in leads(leaf, sizes):
                    found[key_of(table, tensor, values, lead, numbering)] = tuple(shape)
    for drop in family.drops:
        if drop.layout == layout and drop.zeros:
            shape = tuple(sizes[axis] for axis in drop.zeros.split())
            beside = next(t for n, t in family.tensors.items() if n.split(".")[0] == drop.beside)
            for values in slots(beside, sizes):
                if beside.variant is None or values in layers.get(beside.variant, ()):
                    found[drop.key.format(**dict(zip(beside.indices, values, strict=True)))] = shape
    return found


def tiny_lists(family, sizes):
    """Where config.json would say that layers are inserted: at the odd numbers."""
    return {
        shift.place: [2 * n + 1 for n in range(sizes[shift.index])]
        for shift in family.shifts
        if shift.place != "after"
    }


def mapped(family, source, target, shapes):
    sizes = family.tiny
    return map_tensors(family, source, target, shapes, sizes, lists=tiny_lists(family, sizes))


@pytest.mark.parametrize("name", names())
def test_a_family_is_called_as_its_file_and_describes_itself(name):
    family = FAMILIES[name]
    assert family.name == name
    assert family.title and family.architecture and family.tiny
    assert family.refines is None or family.refines in FAMILIES
    assert len(set(family.layouts)) == len(family.layouts) > 0
    assert all(tie.tensor in family.tensors and tie.of in family.tensors for tie in family.ties)
    used = {layout for tensor in family.tensors.values() for layout in tensor.leaves}
    assert used == set(family.layouts)
    assert {d.layout for d in family.drops} <= used


def test_names_and_aliases_are_unique():
    every = [n for f in FAMILIES.values() for n in (f.name, *f.aliases)]
    assert len(set(every)) == len(every)


@pytest.mark.parametrize(("name", "layout"), ALL)
def test_no_two_tensors_share_a_key(name, layout):
    family, table = FAMILIES[name], FAMILIES[name].layout(layout)
    numbered = [shift for shift in family.shifts if shift.layout == layout]
    texts = [(s.template.text, numbered and s.parts[0][0].indices) for s in table.stored]
    texts += [(drop.key, "") for drop in family.drops if drop.layout == layout]
    assert len(set(map(str, texts))) == len(texts)
    for stored in table.stored:
        values = {index: 7 + n for n, index in enumerate(stored.template.indices)}
        assert (stored, values) in list(table.table.all(stored.template.key(values)))


@pytest.mark.parametrize(("name", "layout"), ALL)
def test_the_parts_of_a_stored_tensor_are_numbered_from_0(name, layout):
    for stored in FAMILIES[name].layout(layout).stored:
        parts = {leaf.part for _, leaf in stored.parts}
        assert parts == {None} or parts == set(range(len(parts)))
        assert len({(leaf.along, leaf.spread) for _, leaf in stored.parts}) == 1
        assert len({len(leaf.dims) for _, leaf in stored.parts}) == 1


@pytest.mark.parametrize("name", names())
def test_all_layouts_have_the_same_axes(name):
    family = FAMILIES[name]
    for tensor in family.tensors.values():
        axes = {tuple(sorted(family.expand(leaf.axes))) for leaf in tensor.leaves.values()}
        assert len(axes) <= 1, tensor.name


@pytest.mark.parametrize("name", names())
def test_variants_are_declared(name):
    family = FAMILIES[name]
    declared = {variant for group in family.variants for variant in group}
    assert {t.variant for t in family.tensors.values()} - {None} == declared


@pytest.mark.parametrize(("name", "layout"), ALL)
def test_a_split_axis_is_an_axis_of_the_tensor(name, layout):
    family = FAMILIES[name]
    for logical, leaf in family.layout(layout).leaves.items():
        axis = family.tensors[logical].split
        assert axis is None or axis in leaf.axes


@pytest.mark.parametrize(("name", "source", "target"), PAIRS)
def test_every_key_is_consumed_and_produced(name, source, target):
    family = FAMILIES[name]
    before, after = tiny(family, source), tiny(family, target)
    found = mapped(family, source, target, before)
    made = {zeros.key: zeros.shape for zeros in found.zeros if not zeros.origin}
    assert {**found.target_shapes, **made} == after
    read = {view.key for tensor in found.tensors for view in tensor.sources}
    assert read | found.dropped.keys() == before.keys()
    for tensor in found.tensors:
        for view in (*tensor.sources, *tensor.targets):
            assert sorted(itertools.chain(*view.dims)) == list(range(len(tensor.axes)))


def moved(found, values):
    """What arrays of *values* become, by numpy alone."""
    shapes = found.target_shapes
    result = {key: np.full(shape, -1) for key, shape in shapes.items()}
    for tensor in found.tensors:
        whole = np.full(tensor.axes, -1)
        for view in tensor.sources:
            part = values[view.key][box(view)]
            at(whole, view)[...] = part.reshape(at(whole, view).shape)
        for view in tensor.targets:
            result[view.key][box(view)] = at(whole, view).reshape(view.sizes)
    for zeros in found.zeros:
        if zeros.origin:
            result[zeros.key][cells(zeros.origin, zeros.shape)] = 0
    return result


def box(view):
    return cells(view.origin, view.sizes)


def at(whole, view):
    """The part of a logical tensor that *view* stores, its axes in the order stored there."""
    index = [slice(None)] * whole.ndim
    for group, position in zip(view.dims, view.lead, strict=False):
        index[group[0]] = slice(position, position + 1)
    return whole[tuple(index)].transpose([axis for group in view.dims for axis in group])


@pytest.mark.parametrize(("name", "source", "target"), PAIRS)
def test_there_and_back_is_the_identity(name, source, target):
    family = FAMILIES[name]
    shapes = tiny(family, source)
    there = mapped(family, source, target, shapes)
    values, start = {}, 0
    for key, shape in shapes.items():
        values[key] = np.arange(start, start + math.prod(shape)).reshape(shape)
        start += math.prod(shape)
    for kept, other in there.must_equal:
        values[other] = values[kept]
    found = moved(there, values)
    assert all((array >= 0).all() for array in found.values())
    back = mapped(family, target, source, {k: v.shape for k, v in found.items()})
    again = moved(back, found)
    assert again.keys() | there.dropped.keys() == values.keys()
    retiled = {tensor.sources[0].key for t in there.tilings for tensor in t.tensors}
    for key, array in again.items():
        assert key in retiled or (array == values[key]).all(), key


@pytest.mark.parametrize(("name", "layout"), ALL)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_tile_every_tensor(name, layout, ranks):
    family = FAMILIES[name]
    sizes = Sizes(tiny_sizes(family), {})
    for key, shape in tiny(family, layout, optional=True).items():
        whole = np.zeros(shape, int)
        shares = [s for s in divide(family, layout, key, shape, sizes, ranks) if s]
        for share in shares:
            held = np.zeros(share.shape, int)
            for piece in share.pieces:
                whole[cells(piece.box.offsets, piece.box.sizes)] += 1
                held[cells(piece.offsets, piece.box.sizes)] += 1
            assert (held == 1).all(), key
        found = np.unique(whole)
        assert all(0 < n <= ranks and ranks % n == 0 for n in found.tolist()), key


def cells(offsets, sizes):
    return tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))


@pytest.mark.parametrize(("name", "layout"), ALL)
def test_a_model_is_recognised_by_its_keys(name, layout):
    family = FAMILIES[name]
    found = detect(tiny(family, layout), FAMILIES)
    assert found.exact and not found.configured
    assert any(c.family == name and layout in (c.layout, *c.alike) for c in found.candidates)


@pytest.mark.parametrize(("name", "source", "target"), PAIRS)
def test_optional_tensors_are_mapped_or_refused(name, source, target):
    family = FAMILIES[name]
    before = tiny(family, source, optional=True)
    after = tiny(family, target, optional=True)
    names = set(family.layout(source).leaves) - set(family.layout(target).leaves)
    names -= {tie.tensor for tie in family.ties if family.tied}
    names -= {name for rule in family.tiles for name in (rule.grid, rule.rows)}
    sizes = tiny_sizes(family)
    shown = layers_of(family, sizes).keys() | {None}
    homeless = [n for n in names if slots(t := family.tensors[n], sizes) and t.variant in shown]
    if homeless:
        with pytest.raises(MappingError, match="no place"):
            mapped(family, source, target, before)
    else:
        found = mapped(family, source, target, before)
        assert set(found.target_shapes) <= set(after)
