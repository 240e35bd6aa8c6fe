"""Stored tensors of a target as elements of the source's, against numpy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from ckptctl.catalog import TensorEntry
from ckptctl.errors import MappingError
from ckptctl.families import family
from ckptctl.planner.layouts import Family, Layout
from ckptctl.planner.mapping.logical import build_placeholder
from ckptctl.planner.mapping.mapped import (
    ComposedTensor,
    MappedTensor,
    SourceTensor,
    TargetTensor,
    compose_tensors,
    require_filled_targets,
)
from ckptctl.planner.mapping.matching import match_keys
from ckptctl.planner.mapping.source import ModelFacts
from ckptctl.planner.mapping.tensors import MappingOptions, map_tensors
from tests.contract import tables
from tests.sweeps import one_in
from tests.unit.planner.test_strided import Arrays


def entry(name: str, shape: tuple[int, ...], dtype: str = "float32") -> TensorEntry:
    return TensorEntry(name, dtype, shape, (), (name,))


def moved_by_the_tables(
    known: Family, source: str, target: str, values: Arrays, resize: Mapping[str, int]
) -> Arrays:
    """Return what arrays become as the tables say it, by numpy."""
    sizes = tables.tiny_sizes(known)
    logical = {}
    layout = known.get_layout(source)
    for (name, indices), keys in match_keys(known, layout, values).keys.items():
        leaf = layout.leaves[name]
        atoms = [known.expand_axes((axis,)) for axis in leaf.spread_axes]
        atoms += [known.expand_axes(group) for group in leaf.dims]
        entries = [part_of(values[keys[lead]], known, layout, name, sizes) for lead in sorted(keys)]
        flat = [axis for group in atoms for axis in group]
        array = np.stack(entries).reshape([sizes[axis] for axis in flat]) - leaf.offset
        for dim, axis in enumerate(flat):
            if axis in resize:
                array = resized(array, dim, resize[axis])
        logical[name, indices] = flat, array
    known = replace(known, tiny={**known.tiny, **resize})
    layout, sizes = known.get_layout(target), tables.tiny_sizes(known)
    shapes = tables.tiny(known, target)
    made = {key: np.full(shape, -1) for key, shape in shapes.items()}
    filled = set()
    same = {tie.tensor: tie.of for tie in known.ties}
    for (name, indices), keys in match_keys(known, layout, shapes).keys.items():
        leaf = layout.leaves[name]
        before, array = logical.get((name, indices)) or logical[same[name], indices]
        after = [
            axis for group in (leaf.spread_axes, *leaf.dims) for axis in known.expand_axes(group)
        ]
        array = array.transpose([before.index(axis) for axis in after]) + leaf.offset
        for lead, entry in zip(sorted(keys), array.reshape(len(keys), -1), strict=True):
            part = part_of(made[keys[lead]], known, layout, name, sizes)
            part[...] = entry.reshape(part.shape)
            filled.add(keys[lead])
    return {key: made[key] for key in filled}


def part_of(
    stored: np.ndarray, known: Family, layout: Layout, name: str, sizes: Mapping[str, int]
) -> np.ndarray:
    """Return the part of a stored array that is a logical tensor: the same memory."""
    leaf, others = layout.leaves[name], layout.stored_by_name[name].leaves
    if leaf.part is None and not leaf.interleave_axis:
        return stored
    groups = [known.expand_axes(other.dims[leaf.concat_dim]) for other in others]
    rows = [
        math.prod(sizes[axis] for axis in group[bool(leaf.interleave_axis) :]) for group in groups
    ]
    if leaf.interleave_axis:
        stored = stored.reshape(-1, sum(rows), *stored.shape[1:])
    first = sum(rows[: leaf.part or 0])
    place = slice(first, first + rows[leaf.part or 0])
    return stored[(slice(None),) * (leaf.concat_dim + bool(leaf.interleave_axis)) + (place,)]


@pytest.mark.parametrize(
    "name", one_in(3, ["gpt_oss", "qwen3_moe", "llama4", "deepseek_v3", "qwen3_next"])
)
def test_mapped_tensors_match_numpy_in_every_layout(name):
    known = family(name)
    for source, target in itertools.permutations(known.layouts, 2):
        shapes = tables.tiny(known, source)
        try:
            found = tables.mapped(known, source, target, shapes)
        except MappingError:
            continue
        values = tables.numbered(shapes)
        expected = moved_by_the_tables(known, source, target, values, {})
        require_same(tables.moved(found, values), expected)


RESIZED = (
    *((name, "v") for name in ("llama3", "deepseek_v3", "qwen2_moe", "t5_encoder", "gemma3")),
    *(("phi3", "f"), ("t5_encoder", "e"), ("gpt_oss", "f")),
)


@pytest.mark.parametrize(
    ("more", "name", "axis"), one_in(7, [(more, *one) for more in (7, -1) for one in RESIZED])
)
def test_resized_axis_is_cut_or_zero_padded(more, name, axis):
    known = family(name)
    resize = {axis: known.tiny[axis] + more}
    lists = tables.tiny_lists(known, known.tiny)
    for source, target in itertools.product(known.layouts, known.layouts):
        shapes = tables.tiny(known, source)
        try:
            found = map_tensors(
                known,
                source,
                target,
                shapes,
                ModelFacts(sizes=known.tiny, layer_lists=lists),
                MappingOptions(resize=resize),
            )
        except MappingError:
            continue
        values = tables.numbered(shapes)
        values |= {other: values[kept] for other, kept in tables.copies(found).items()}
        kept = values if source == target else {}
        expected = kept | moved_by_the_tables(known, source, target, values, resize)
        require_same(tables.moved(found, values), expected)


def test_unused_axis_cannot_be_resized() -> None:
    known = family("llama3")
    with pytest.raises(MappingError, match="no tensor has"):
        map_tensors(
            known, "hf", "hf", tables.tiny(known, "hf"), options=MappingOptions(resize={"x": 3})
        )


def require_same(made: Arrays, expected: Arrays) -> None:
    """Require that arrays are as *expected*, and that all others are zeros."""
    assert expected.keys() <= made.keys()
    for key, array in made.items():
        np.testing.assert_array_equal(array, expected.get(key, np.zeros_like(array)), key)


def resized(array: np.ndarray, dim: int, size: int) -> np.ndarray:
    """Return an array with a dimension cut, or filled up with zeros."""
    more = [(0, max(0, size - n) if at == dim else 0) for at, n in enumerate(array.shape)]
    return np.pad(array, more).take(range(size), dim)


def test_only_complete_tensor_in_order_is_renamed() -> None:
    same = ComposedTensor.from_unchanged("a", "b", (2, 3))
    assert same.is_rename
    assert not replace(same, sources=(same.sources[0]._replace(offset=1),)).is_rename
    for tensor in (same.tensor.permute((1, 0)), same.tensor.narrow(0, 0, 1)):
        assert not replace(same, tensor=tensor).is_rename
    assert ComposedTensor.from_unchanged("a", "b", (0, 3)).is_rename


def test_empty_tensor_has_no_parts() -> None:
    found = ComposedTensor.from_unchanged("a", "b", (0, 3)).bind_entries({"a": entry("a", (0, 3))})
    assert (found.shape, found.dtype, found.parts) == ((0, 3), "float32", ())


def fused(*names: str) -> list[MappedTensor]:
    """Return tensors of two elements, in order in ``ab``, which has four."""
    sizes = (2,)
    return [
        MappedTensor(
            (SourceTensor(name, sizes, name),),
            (TargetTensor("ab", build_placeholder(0, sizes).place(0, at, 4)),),
        )
        for name, at in (("a", 0), ("b", 2))
        if name in names
    ]


def test_composed_tensors_have_source_and_target_names() -> None:
    same = MappedTensor.from_unchanged("c", "c", (3,))
    found = compose_tensors([*fused("a", "b"), same], "model.", "state.")
    assert list(found) == ["state.ab", "state.c"]
    assert [list(one.keys) for one in found.values()] == [["model.a", "model.b"], ["model.c"]]
    assert list(found["state.ab"].logical) == ["a", "b"]
    entries = {f"model.{key}": entry(f"model.{key}", (2,)) for key in "ab"}
    elements = found["state.ab"].bind_entries(entries)
    assert [(part.entry.name, part.origin) for part in elements.parts] == [
        ("model.a", (0,)),
        ("model.b", (2,)),
    ]


def test_parts_of_different_dtypes_are_refused() -> None:
    entries = {"a": entry("a", (2,)), "b": entry("b", (2,), "bfloat16")}
    with pytest.raises(MappingError, match="float32 and bfloat16") as caught:
        compose_tensors(fused("a", "b"))["ab"].bind_entries(entries)
    assert caught.value.where == "tensor `b`"


def test_tensor_with_missing_part_is_refused() -> None:
    require_filled_targets(fused("a", "b"))
    for part in "ab":
        with pytest.raises(MappingError, match="only partly filled") as caught:
            require_filled_targets(fused(part))
        assert caught.value.where == "tensor `ab`"


def test_equal_shapes_with_other_heads_have_another_order():
    """What one model becomes is kept for others of its sizes, and only for those."""
    known, found = family("llama3"), []
    shapes = tables.tiny(known, "hf")
    for heads in ({"h": 8, "k": 4, "e": 4}, {"h": 4, "k": 2, "e": 8}):
        change = map_tensors(known, "hf", "meta", shapes, ModelFacts(sizes={**known.tiny, **heads}))
        moved = tables.moved(change, tables.numbered(shapes))
        found.append(moved["layers.0.attention.wk.weight"])
    assert (np.sort(found[0], None) == np.sort(found[1], None)).all()
    assert (found[0] != found[1]).any()
