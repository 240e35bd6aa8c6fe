"""What ``ckptctl map`` says of a key, held against what a conversion does with the tensors."""

import itertools
import re

import numpy as np
import pytest

from ckptctl.planner.families.templates import Template
from ckptctl.planner.mapping.preview import KeyRouter
from tests.contract.tables import (
    FAMILIES,
    PAIRS,
    copies,
    direct,
    mapped,
    moved,
    numbered,
    tiny,
    tiny_lists,
    tiny_sizes,
)
from tests.sweeps import one_in


def evaluated(amount, sizes):
    return eval(amount.text, {"__builtins__": {}}, sizes)


def part(array, ranges, sizes):
    """The part of *array* that *ranges* mean, by their formulas alone."""
    box = []
    for one, length in zip(ranges, array.shape, strict=True):
        if one.label not in ("", ":"):
            return None
        stop = length if one.label else evaluated(one.stop, sizes)
        box.append(slice(evaluated(one.start, sizes), stop))
    return array[(*box, ...)]


def filled(key, axes, sizes):
    """Yield *key* with every combination of the axes that are left in it, and their values.

    An axis may have an offset, as in ``{y+4}``.
    """
    offsets = {axis: int(plus) for axis, plus in re.findall(r"\{([a-z]+)\+(\d+)\}", key)}
    for spelled in Template.parse(re.sub(r"\+\d+\}", "}", key)).word_variants:
        left = [axis for axis in axes if f"{{{axis}}}" in spelled.text]
        for values in itertools.product(*(range(sizes[axis]) for axis in left)):
            named = dict(zip(left, values, strict=True))
            numbers = {axis: n + offsets.get(axis, 0) for axis, n in named.items()}
            yield spelled.text.format(**numbers), dict(spelled.fixed) | named


@pytest.mark.parametrize(
    ("name", "source", "target"), one_in(11, direct([p for p in PAIRS if p[1] != p[2]]))
)
def test_map_routes_match_converted_tensors(name, source, target):
    family = FAMILIES[name]
    sizes, lists = tiny_sizes(family), tiny_lists(family, family.tiny)
    shapes = tiny(family, source)
    plan = mapped(family, source, target, shapes)
    values = numbered(shapes)
    for other, kept in copies(plan).items():
        values[other] = values[kept]
    result = moved(plan, values)
    reached = set()
    layouts = family.get_layout(source), family.get_layout(target)
    router = KeyRouter(family, *layouts, family.tiny, family.tied, lists)
    for key in shapes:
        found = router.find_route(key)
        assert bool(found.dropped) == (key in plan.dropped_keys)
        expected = {
            view.key
            for tensor in plan.tensors
            for view in tensor.targets
            if key in {other.key for other in tensor.sources}
        }
        said = {
            (arrival, filled_key, tuple(named.items()))
            for arrival in map(Hashed, found.arrivals)
            for filled_key, named in filled(arrival.it.key, arrival.it.each, sizes)
            if not arrival.it.variant or filled_key in expected
        }
        assert {one[1] for one in said} == expected
        assert {one[1] for one in said} <= result.keys()
        for arrival, filled_key, named in said:
            reached.add(filled_key)
            check(arrival.it, result[filled_key], values, {**sizes, **dict(named)})
    zeros = {made.key for made in plan.zeros}
    parts = ((target.key, one.sources) for one in plan.tensors for target in one.targets)
    assert reached == {key for key, sources in parts if any(s.key not in zeros for s in sources)}


class Hashed:
    def __init__(self, it):
        self.it = it


def check(arrival, array, values, sizes):
    """The pieces of a target tensor hold the same elements as its parts, and tile it."""
    assert [evaluated(size, sizes) for size in arrival.shape] == list(array.shape)
    covered = np.zeros(array.shape, dtype=int)
    assert any(piece.asked for piece in arrival.pieces)
    for piece in arrival.pieces:
        for key, named in filled(piece.key, sizes, sizes):
            read = part(values[key], piece.read, {**sizes, **named})
            write = part(array, piece.write, {**sizes, **named})
            if read is None or write is None:
                return
            read = read + piece.plus
            assert sorted(read.ravel()) == sorted(write.ravel()), (key, arrival.key)
            same = read.size == write.size and (read.ravel() == write.ravel()).all()
            assert same or piece.reordered, (key, arrival.key)
            part(covered, piece.write, {**sizes, **named})[...] += 1
    assert (covered >= 1).all(), arrival.key
