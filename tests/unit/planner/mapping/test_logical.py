"""Stored tensors of a target as elements of the source's, against numpy."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from ckptctl.catalog import TensorEntry
from ckptctl.errors import MappingError
from ckptctl.families import family
from ckptctl.planner.mapping.logical import stand_in
from ckptctl.planner.mapping.mapped import MappedTensor, TargetView, View, require_covered
from ckptctl.planner.mapping.strided_views import as_strided, by_target
from ckptctl.planner.mapping.tensors import Change
from tests.contract import tables
from tests.unit.planner.test_strided import Arrays, elements


def entry(name: str, shape: tuple[int, ...], dtype: str = "float32") -> TensorEntry:
    return TensorEntry(name, dtype, shape, (), (name,))


def written(found: Change, values: Arrays) -> Arrays:
    entries = {key: entry(key, array.shape) for key, array in values.items()}
    return {
        key: elements(as_strided(parts, key, entries), values)
        for key, parts in by_target(found.tensors).items()
    }


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe", "llama4", "deepseek_v3", "qwen3_next"])
def test_tensors_of_another_layout_have_the_elements_that_numpy_moves(name):
    known = family(name)
    for source, target in itertools.permutations(known.layouts, 2):
        shapes = tables.tiny(known, source)
        try:
            found = tables.mapped(known, source, target, shapes)
        except MappingError:
            continue
        values = tables.numbered(shapes)
        expected = tables.moved(found, values)
        plus = {view.key: one.plus for one in found.tensors for view in one.targets}
        made = written(found, values)
        assert made.keys() == expected.keys()
        for key, array in made.items():
            np.testing.assert_array_equal(array + plus[key], expected[key], f"{source} {key}")


def test_only_a_whole_tensor_in_its_order_is_renamed() -> None:
    same = MappedTensor.same("a", "b", (2, 3))
    assert same.renames
    assert not replace(same, plus=1).renames
    (view,) = same.targets
    for tensor in (view.tensor.permute((1, 0)), view.tensor.narrow(0, 0, 1)):
        assert not replace(same, targets=(replace(view, tensor=tensor),)).renames
    assert MappedTensor.same("a", "b", (0, 3)).renames


def test_an_empty_tensor_has_no_parts() -> None:
    same = MappedTensor.same("a", "b", (0, 3))
    found = as_strided([same], "b", {"a": entry("a", (0, 3))})
    assert (found.shape, found.dtype, found.parts) == ((0, 3), "float32", ())


def fused(*names: str) -> list[MappedTensor]:
    """Return tensors of two elements, in order in ``ab``, which has four."""
    dims, sizes = ((0,),), (2,)
    return [
        MappedTensor(
            name,
            sizes,
            (View(name, dims, (0,), sizes),),
            (TargetView("ab", dims, (at,), sizes, tensor=stand_in(0, sizes).place(0, at, 4)),),
        )
        for name, at in (("a", 0), ("b", 2))
        if name in names
    ]


def test_parts_of_different_dtypes_are_refused() -> None:
    entries = {"a": entry("a", (2,)), "b": entry("b", (2,), "bfloat16")}
    with pytest.raises(MappingError, match="float32 and bfloat16") as caught:
        as_strided(by_target(fused("a", "b"))["ab"], "ab", entries)
    assert caught.value.where == "tensor `b`"


def test_a_tensor_without_one_of_its_parts_is_refused() -> None:
    require_covered(fused("a", "b"))
    for part in "ab":
        with pytest.raises(MappingError, match="only partly filled") as caught:
            require_covered(fused(part))
        assert caught.value.where == "tensor `ab`"
