"""Strided tensors: each operation by an example, and all of them in random programs."""

from __future__ import annotations

import math
import random
from operator import mul

import numpy as np
import pytest

from ckptctl.catalog import TensorEntry, compute_row_major_strides
from ckptctl.errors import MappingError
from ckptctl.planner.axes import Axes
from ckptctl.planner.strided import Axis, Ints, StridedTensor, concat, merge_parts, stack
from tests.sweeps import one_in

Arrays = dict[str, np.ndarray]
"""What stored tensors hold, by name."""


def stored(arrays: Arrays, *shape: int) -> tuple[StridedTensor, np.ndarray]:
    """Store numbers that no other tensor has; return them as a tensor, and as an array."""
    name, first = f"stored{len(arrays)}", 1 + sum(one.size for one in arrays.values())
    arrays[name] = np.arange(first, first + math.prod(shape)).reshape(shape)
    return StridedTensor.from_entry(TensorEntry(name, "float32", shape, (), (name,))), arrays[name]


def elements(tensor: StridedTensor, arrays: Arrays) -> np.ndarray:
    """Return the elements of *tensor*, each of which must come from one part."""
    found = elements_of_parts(tensor, arrays)
    assert (found != -1).all() or not found.size
    return found


def elements_of_parts(tensor: StridedTensor, arrays: Arrays) -> np.ndarray:
    """Return the elements that parts of *tensor* have, and -1 for the others."""
    found = np.full(math.prod(tensor.shape), -1)
    for part in tensor.parts:
        assert all(axis.size > 1 for axis in part.axes)
        steps = [(axis.size, axis.dim, axis.step) for axis in part.axes]
        strides = [(axis.size, axis.at, axis.stride) for axis in part.axes]
        into = _positions(tensor.shape, part.origin, steps)
        source = _positions(part.entry.shape, part.stored_origin, strides)
        assert (found[into] == -1).all(), "elements of two parts"
        values = arrays.get(part.entry.name)
        if values is not None:
            assert values.shape == part.entry.shape
        found[into] = 0 if values is None else values.reshape(-1)[source]
    return found.reshape(tensor.shape)


def _positions(shape: Ints, first: Ints, axes: list[tuple[int, int, int]]) -> np.ndarray:
    """Return where elements are in the flat tensor; each has an index within each dimension.

    Args:
        shape: Shape of the tensor.
        first: Indices of the first element.
        axes: Size, dimension and step of each axis.
    """
    assert len(first) == len(shape)
    last = list(first)
    for size, dim, step in axes:
        assert step > 0
        last[dim] += (size - 1) * step
    assert all(0 <= low <= high < size for low, high, size in zip(first, last, shape, strict=True))
    weights = compute_row_major_strides(shape)
    found = np.array(sum(map(mul, first, weights)))
    for size, dim, step in axes:
        found = found[..., None] + np.arange(0, size * step * weights[dim], step * weights[dim])
    return found


# ---------------------------------------------------------------------------- by example


def test_stored_tensor_has_one_axis_per_dimension() -> None:
    tensor, _ = stored({}, 2, 1, 3)
    (part,) = tensor.parts
    assert part.axes == (Axis(2, 0, 1, 0, 1), Axis(3, 2, 1, 2, 1))
    assert (part.origin, part.stored_origin) == ((0, 0, 0), (0, 0, 0))


def test_rotary_order_stays_one_part() -> None:
    """Rows ``(h r p)`` seen as ``(h p r)``, as Meta's Llama and transformers have them."""
    arrays: Arrays = {}
    tensor, array = stored(arrays, 4 * 2 * 3, 5)
    sizes: dict[Axes, int] = {("h",): 4, ("r",): 2, ("p",): 3}
    found = tensor.regroup_axes(
        [("h", "r", "p"), ("d",)], [("h", "p", "r"), ("d",)], sizes.__getitem__
    )
    expected = array.reshape(4, 2, 3, 5).transpose(0, 2, 1, 3).reshape(24, 5)
    assert len(found.parts) == 1
    assert (elements(found, arrays) == expected).all()


def test_ranges_of_dimension_are_placed_separately() -> None:
    arrays: Arrays = {}
    (a, first), (b, second) = stored(arrays, 2, 3), stored(arrays, 2, 1)
    found = merge_parts([b.place(1, 3, 4), a.place(1, 0, 4)])
    assert (elements(found, arrays) == np.concatenate([first, second], 1)).all()
    assert a.place(1, 1, 4).narrow(1, 1, 3) == a


def test_adjacent_axes_are_split_by_their_product() -> None:
    arrays: Arrays = {}
    tensor, array = stored(arrays, 2 * 3 * 4, 5)
    asked = []

    def size(axes):
        asked.append(axes)
        return {("a",): 2, ("b", "c"): 12}[axes]

    found = tensor.regroup_axes([("a", "b", "c"), ("d",)], [("b", "c"), ("d", "a")], size)
    expected = array.reshape(2, 12, 5).transpose(1, 2, 0).reshape(12, 10)
    assert (elements(found, arrays) == expected).all()
    assert asked == [("a",), ("b", "c")]


def test_empty_dimensions_can_be_added_and_removed() -> None:
    arrays: Arrays = {}
    unknown = dict[Axes, int]().__getitem__
    tensor, array = stored(arrays, 1, 3)
    found = tensor.regroup_axes([(), ("d",)], [("d",), ()], unknown)
    assert (elements(found, arrays) == array.reshape(3, 1)).all()
    scalar = tensor.narrow(1, 2, 1).regroup_axes([(), ()], [], unknown)
    assert elements(scalar, arrays) == array[0, 2]


def test_interleaved_parts_are_axes_with_larger_step() -> None:
    """Fused keys and values that take turns every two rows, and back."""
    arrays: Arrays = {}
    (k, one), (v, other) = stored(arrays, 3 * 2, 4), stored(arrays, 3 * 2, 4)
    fused = concat([k.split(0, (3, 2)), v.split(0, (3, 2))], 1).merge(0, 2)
    expected = np.concatenate([one.reshape(3, 2, 4), other.reshape(3, 2, 4)], 1).reshape(12, 4)
    assert (elements(fused, arrays) == expected).all()
    assert [[(axis.size, axis.step) for axis in part.axes] for part in fused.parts] == [
        [(2, 1), (3, 4), (4, 1)],
        [(2, 1), (3, 4), (4, 1)],
    ]
    back = fused.split(0, (3, 4)).narrow(1, 2, 2).merge(0, 2)
    assert back == v


def test_experts_are_stacked_and_selected() -> None:
    arrays: Arrays = {}
    pairs = [stored(arrays, 2, 3) for _ in range(4)]
    stacked = stack([tensor for tensor, _ in pairs])
    assert (elements(stacked, arrays) == np.stack([array for _, array in pairs])).all()
    assert stacked.select(0, 2) == pairs[2][0]


def test_padded_vocab_ends_with_virtual_file() -> None:
    arrays: Arrays = {}
    tensor, array = stored(arrays, 5, 2)
    padded = tensor.pad(0, 8, "//zeros")
    assert (elements(padded, arrays) == np.pad(array, ((0, 3), (0, 0)))).all()
    assert padded.parts[1].entry.extents[0].file == "//zeros"
    assert padded.narrow(0, 0, 5) == tensor


def test_range_over_merged_axes_is_few_boxes() -> None:
    arrays: Arrays = {}
    tensor, array = stored(arrays, 7, 5, 3)
    merged = tensor.permute((1, 0, 2)).merge(0, 3)
    found = merged.narrow(0, 4, 90)
    assert len(found.parts) == 2 * 3 - 1
    assert (elements(found, arrays) == array.transpose(1, 0, 2).reshape(-1)[4:94]).all()


def test_cutting_split_makes_head_middle_and_tail() -> None:
    arrays: Arrays = {}
    tensor, array = stored(arrays, 100)
    found = tensor.narrow(0, 7, 90).split(0, (3, 30))
    assert len(found.parts) == 1
    found = concat([stored(arrays, 7)[0], tensor, stored(arrays, 13)[0]], 0).split(0, (12, 10))
    assert len(found.parts) == 1 + 3 + 2
    assert (elements(found, arrays).reshape(-1)[7:107] == array).all()


def test_split_into_too_many_parts_names_tensor() -> None:
    entry = TensorEntry("embed", "float32", (20_011, 20_000), (), ("embed",))
    turned = StridedTensor.from_entry(entry).permute((1, 0)).merge(0, 2)
    with pytest.raises(MappingError, match="too many places") as caught:
        turned.split(0, (20_011, 20_000))
    assert caught.value.where == "tensor `embed`"


def test_cast_changes_only_dtype_mark() -> None:
    tensor, _ = stored({}, 2, 3)
    assert (tensor.cast("bfloat16").dtype, tensor.cast("bfloat16").stored_dtype) == (
        "bfloat16",
        "float32",
    )
    assert tensor.cast("bfloat16").parts == tensor.parts


@pytest.mark.parametrize(
    "wrong",
    [
        lambda tensor: tensor.narrow(0, 1, 2),
        lambda tensor: tensor.narrow(1, -1, 2),
        lambda tensor: tensor.split(1, (2, 2)),
        lambda tensor: tensor.place(0, 1, tensor.shape[0]),
        lambda tensor: concat([tensor, tensor.select(0, 0)], 0),
        lambda tensor: concat([tensor, tensor.cast("float16")], 0),
    ],
)
def test_mismatched_shapes_are_refused(wrong) -> None:
    with pytest.raises(ValueError, match=r"of|with"):
        wrong(stored({}, 2, 3)[0])


# ---------------------------------------------------------------------------- random programs


def _factors(rng: random.Random, size: int) -> tuple[int, ...]:
    """Return numbers whose product is *size*."""
    found: list[int] = []
    while size > 1 and len(found) < 3:
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        found.append(rng.choice(divisors))
        size //= found[-1]
    return (*found, size) if found or size != 1 or rng.random() < 0.7 else ()


def _regrouped(rng: random.Random, tensor: StridedTensor, array: np.ndarray):
    names = iter("abcdefghijklmnopqrstuvwxyz")
    sizes: dict[str, int] = {}
    before = []
    for size in array.shape:
        factors = _factors(rng, size) if size else (size,)
        group = tuple(next(names) for _ in factors)
        sizes |= dict(zip(group, factors, strict=True))
        before.append(group)
    order = list(sizes)
    rng.shuffle(order)
    after: list[tuple[str, ...]] = []
    while order:
        count = min(rng.choice((0, 1, 2, 2, 3)), len(order))
        after.append(tuple(order[:count]))
        order = order[count:]
    made = tensor.regroup_axes(before, after, lambda axes: math.prod(sizes[axis] for axis in axes))
    split = array.reshape(list(sizes.values()))
    flat = [axis for group in after for axis in group]
    split = split.transpose([list(sizes).index(axis) for axis in flat])
    return made, split.reshape([math.prod(sizes[axis] for axis in group) for group in after])


def _step(rng: random.Random, arrays: Arrays, tensor: StridedTensor, array: np.ndarray):
    """Return what one operation makes of a tensor, and of the array with its elements."""
    rank, what = array.ndim, rng.randrange(9 if array.ndim < 6 else 5)
    dim = rng.randrange(rank) if rank else 0
    if what == 0 and rank:
        start = rng.randint(0, array.shape[dim])
        size = rng.randint(min(1, array.shape[dim] - start), array.shape[dim] - start)
        return tensor.narrow(dim, start, size), array.take(range(start, start + size), dim)
    if what == 1 and rank and array.shape[dim]:
        index = rng.randrange(array.shape[dim])
        return tensor.select(dim, index), array.take(index, dim)
    if what == 2 and rank and array.shape[dim]:
        sizes = _factors(rng, array.shape[dim])
        shape = (*array.shape[:dim], *sizes, *array.shape[dim + 1 :])
        return tensor.split(dim, sizes), array.reshape(shape)
    if what == 3:
        dim = rng.randint(0, rank)
        count = rng.randint(0, rank - dim)
        size = math.prod(array.shape[dim : dim + count])
        shape = (*array.shape[:dim], size, *array.shape[dim + count :])
        return tensor.merge(dim, count), array.reshape(shape)
    if what == 4:
        order = rng.sample(range(rank), rank)
        return tensor.permute(order), array.transpose(order)
    if what == 5 and rank and array.size < 400:
        beside = [*array.shape[:dim], rng.randint(0, 4), *array.shape[dim + 1 :]]
        other = _stored_in_disorder(rng, arrays, tuple(beside))
        pairs = [(tensor, array), other, (tensor, array)][: rng.randint(1, 3)]
        rng.shuffle(pairs)
        return concat([one for one, _ in pairs], dim), np.concatenate(
            [two for _, two in pairs], dim
        )
    if what == 6 and array.size < 400:
        pairs = [(tensor, array), _stored_in_disorder(rng, arrays, array.shape)]
        dim = rng.randint(0, rank)
        return stack([one for one, _ in pairs], dim), np.stack([two for _, two in pairs], dim)
    if what == 7 and rank and array.size < 400:
        more = rng.randint(0, 3)
        pads = [(0, more if n == dim else 0) for n in range(rank)]
        return tensor.pad(dim, array.shape[dim] + more, "//zeros"), np.pad(array, pads)
    return _regrouped(rng, tensor, array)


def _stored_in_disorder(rng: random.Random, arrays: Arrays, shape: tuple[int, ...]):
    """Return a stored tensor, seen with its dimensions in another order than it is stored in."""
    order = rng.sample(range(len(shape)), len(shape))
    tensor, array = stored(arrays, *(shape[dim] for dim in order))
    back = [order.index(dim) for dim in range(len(shape))]
    return tensor.permute(back), array.transpose(back)


def _check_program(seed: int) -> None:
    rng, arrays = random.Random(seed), Arrays()
    shape = tuple(rng.choice((1, 2, 3, 4, 5, 6, 12)) for _ in range(rng.randint(0, 4)))
    tensor, array = _stored_in_disorder(rng, arrays, shape)
    for _ in range(rng.randint(1, 8)):
        tensor, array = _step(rng, arrays, tensor, array)
        assert tensor.shape == array.shape
        assert (elements(tensor, arrays) == array).all(), seed
        for part in tensor.parts:
            _check_nested(part)


def _check_nested(part) -> None:
    """See that along a dimension each axis reaches further than those below it together."""
    for number in (1, 3):
        for place in {axis[number] for axis in part.axes}:
            along = sorted(
                (axis[number + 1], axis.size) for axis in part.axes if axis[number] == place
            )
            reach = 0
            for step, size in along:
                assert step > reach
                reach += (size - 1) * step


@pytest.mark.parametrize("block", one_in(3, range(4)))
def test_random_programs_agree_with_numpy(block: int) -> None:
    for seed in range(block * 500, block * 500 + 500):
        _check_program(seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(16))
def test_many_random_programs_agree_with_numpy(block: int) -> None:
    for seed in range((block + 1) * 10_000, (block + 2) * 10_000):
        _check_program(seed)
