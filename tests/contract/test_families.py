"""What every model family in ``converters/`` has to satisfy."""

import itertools
import math

import pytest

from ckptctl.errors import MappingError
from ckptctl.families import families, names
from ckptctl.planner.axes import dim_sizes
from ckptctl.planner.detect import detect
from ckptctl.planner.mapping import map_tensors
from ckptctl.planner.matching import key_of, slots
from ckptctl.planner.parallel import split

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


def tiny(family, layout, *, optional=False, tied=None):
    """The shapes of a model of the family's tiny sizes in *layout*, by key."""
    sizes, table = tiny_sizes(family), family.layout(layout)
    tied = family.tied if tied is None else tied
    gone = {t.tensor for t in family.ties if tied and layout not in t.stored_in}
    return {
        key_of(table, tensor, values): dim_sizes(table.leaves[tensor.name].dims, sizes)
        for tensor in family.tensors.values()
        if tensor.name in table.leaves and tensor.name not in gone
        if optional or not tensor.optional
        for values in slots(tensor, sizes)
    }


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
    texts = [leaf.key.text for leaf in table.leaves.values()]
    texts += [drop.key for drop in family.drops if drop.layout == layout]
    assert len(set(texts)) == len(texts)
    for logical, leaf in table.leaves.items():
        values = {index: 7 + n for n, index in enumerate(leaf.key.indices)}
        meaning, found = table.table.find(leaf.key.key(values))
        assert (meaning.name, found) == (logical, values)


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
    mapped = map_tensors(family, source, target, before, family.tiny)
    assert dict(mapped.target_shapes) == after
    read = {view.key for tensor in mapped.tensors for view in tensor.sources}
    assert read | mapped.dropped.keys() == before.keys()
    for tensor in mapped.tensors:
        for view in (*tensor.sources, *tensor.targets):
            assert sorted(itertools.chain(*view.dims)) == list(range(len(tensor.axes)))


@pytest.mark.parametrize(("name", "source", "target"), PAIRS)
def test_there_and_back_is_the_identity(name, source, target):
    family = FAMILIES[name]
    there = map_tensors(family, source, target, tiny(family, source), family.tiny)
    back = map_tensors(family, target, source, there.target_shapes, family.tiny)
    ours = {t.logical: (t.sources[0], t.targets[0], t.axes) for t in there.tensors}
    for tensor in back.tensors:
        if tensor.logical not in ours:
            continue
        source_view, target_view, axes = ours[tensor.logical]
        theirs = tensor.targets[0]
        assert [[tensor.axes[a] for a in group] for group in theirs.dims] == [
            [axes[a] for a in group] for group in source_view.dims
        ]
        first = [a for group in target_view.dims for a in group]
        second = [a for group in theirs.dims for a in group]
        assert [first[a] for a in second] == list(range(len(axes)))


@pytest.mark.parametrize(("name", "layout"), ALL)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_tile_every_tensor(name, layout, ranks):
    family = FAMILIES[name]
    for key, shape in tiny(family, layout, optional=True).items():
        parts = split(family, layout, key, shape, family.tiny, ranks)
        assert len(parts.boxes) == ranks
        for copy in range(parts.repeats):
            mine = parts.boxes[copy :: parts.repeats]
            assert sum(box.numel for box in mine) == math.prod(shape)
            assert len(set(mine)) == len(mine)


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
    homeless = set(family.layout(source).leaves) - set(family.layout(target).leaves)
    if homeless:
        with pytest.raises(MappingError, match="no place"):
            map_tensors(family, source, target, before, family.tiny)
    else:
        mapped = map_tensors(family, source, target, before, family.tiny)
        assert set(mapped.target_shapes) <= set(after)
