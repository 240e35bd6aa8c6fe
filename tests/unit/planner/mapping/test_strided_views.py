"""Mapped tensors as strided tensors, against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from ckptctl.catalog import TensorEntry
from ckptctl.errors import MappingError
from ckptctl.planner.mapping.mapped import MappedTensor, View
from ckptctl.planner.mapping.strided_views import as_strided, by_target
from tests.unit.planner.test_strided import Arrays, elements


def entry(arrays: Arrays, name: str, *shape: int, dtype: str = "float32") -> TensorEntry:
    arrays[name] = 1000 * len(arrays) + np.arange(np.prod(shape)).reshape(shape)
    return TensorEntry(name, dtype, shape, (), (name,))


def whole(key: str, *sizes: int, dims=None, **more) -> View:
    dims = dims or tuple((dim,) for dim in range(len(sizes)))
    return View(key, dims, more.pop("origin", (0,) * len(sizes)), sizes, **more)


def test_a_rotary_order_is_one_part() -> None:
    arrays: Arrays = {}
    q = entry(arrays, "wq", 24, 5)
    source = whole("wq", 24, 5, dims=((0, 1, 2), (3,)))
    target = whole("q", 24, 5, dims=((0, 2, 1), (3,)))
    found = as_strided([MappedTensor("q", (4, 2, 3, 5), (source,), (target,))], "q", {"wq": q})
    expected = arrays["wq"].reshape(4, 2, 3, 5).transpose(0, 2, 1, 3).reshape(24, 5)
    assert len(found.parts) == 1
    assert (elements(found, arrays) == expected).all()


def test_parts_that_take_turns_are_fused_and_taken_apart() -> None:
    """``#0/k`` and ``#1/k``: three groups, each with two rows of the one and one of the other."""
    arrays: Arrays = {}
    entries = {"q": entry(arrays, "q", 6, 4), "k": entry(arrays, "k", 3, 4)}
    dims = ((0,), (1,), (2,))
    fused = [
        MappedTensor(
            name,
            (3, rows, 4),
            (whole(name, 3 * rows, 4, dims=((0, 1), (2,))),),
            (whole("qk", 3, rows, 4, dims=dims, origin=(0, first, 0), step=3),),
        )
        for name, rows, first in (("q", 2, 0), ("k", 1, 2))
    ]
    found = as_strided(fused, "qk", entries)
    pair = arrays["q"].reshape(3, 2, 4), arrays["k"].reshape(3, 1, 4)
    expected = arrays["qk"] = np.concatenate(pair, 1).reshape(9, 4)
    assert (elements(found, arrays) == expected).all()
    back = MappedTensor("k", (3, 1, 4), fused[1].targets, fused[1].sources)
    both = {"qk": TensorEntry("qk", "float32", (9, 4), (), ("qk",))}
    assert (elements(as_strided([back], "k", both), arrays) == arrays["k"]).all()


def test_experts_in_tensors_of_their_own_are_stacked() -> None:
    arrays: Arrays = {}
    entries = {f"e{n}": entry(arrays, f"e{n}", 2, 3) for n in range(4)}
    dims = ((0,), (1,), (2,))
    sources = tuple(View(f"e{n}", dims, (0, 0), (2, 3), lead=(n,)) for n in range(4))
    target = whole("experts", 4, 3, 2, dims=((0,), (2,), (1,)))
    mapped = MappedTensor("up", (4, 2, 3), sources, (target,))
    found = as_strided([mapped], "experts", entries)
    expected = np.stack([arrays[name] for name in entries]).transpose(0, 2, 1)
    assert (elements(found, arrays) == expected).all()
    apart = MappedTensor("up", (4, 2, 3), (target,), sources)
    arrays["experts"] = expected
    stack = {"experts": TensorEntry("experts", "float32", (4, 3, 2), (), ("experts",))}
    found = as_strided([apart], "e2", stack)
    assert (elements(found, arrays) == arrays["e2"]).all()


def test_an_empty_tensor_has_no_parts() -> None:
    empty = entry({}, "a", 0, 3)
    found = as_strided([MappedTensor.same("a", "b", (0, 3))], "b", {"a": empty})
    assert (found.shape, found.dtype, found.parts) == ((0, 3), "float32", ())


def test_parts_of_different_dtypes_are_refused() -> None:
    arrays: Arrays = {}
    entries = {"a": entry(arrays, "a", 2), "b": entry(arrays, "b", 2, dtype="bfloat16")}
    mapped = [
        MappedTensor(name, (2,), (whole(name, 2),), (whole("ab", 2, origin=(first,)),))
        for name, first in (("a", 0), ("b", 2))
    ]
    with pytest.raises(MappingError, match="float32 and bfloat16") as caught:
        as_strided(by_target(mapped)["ab"], "ab", entries)
    assert caught.value.where == "tensor `b`"
