"""Search for tensors of a load that partly share memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterator, Sequence

import torch

from ckptctl.distributed.state import HeldShard, span

LIMIT = 10_000
"""Maximum search steps, after which two tensors are assumed to overlap."""
Term = tuple[int, int, int]
"""Bytes of one step, and minimum and maximum number of steps."""


def find_overlaps(
    places: Sequence[HeldShard], same: Sequence[int], new: Container[str] = ()
) -> dict[int, int]:
    """Map the index of each shard that overlaps another one to the index of such a shard.

    Args:
        places: Shards to fill.
        same: Index of the first shard with exactly the same memory, per shard.
        new: Names of tensors that get new memory.
    """
    spans = [
        (str(place.tensor.device), place.tensor.data_ptr(), number)
        for number, place in enumerate(places)
        if same[number] == number and place.tensor.numel() and place.name not in new
    ]
    meeting: dict[int, int] = {}
    reaching: list[tuple[str, int, int]] = []  # device, end address and index
    for device, start, number in sorted(spans):
        tensor = places[number].tensor
        reaching = [one for one in reaching if one[0] == device and one[1] > start]
        for _, _, other in reaching:
            if have_common_byte(places[other].tensor, tensor):
                meeting.setdefault(number, other)
                meeting.setdefault(other, number)
        reaching.append((device, start + span(tensor) * tensor.element_size(), number))
    return meeting


def have_common_byte(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors on one device may overlap, or True at the search limit.

    A shared byte solves ``sum(steps * count) = distance``, with each count within its bounds.
    """
    fewest: Counter[int] = Counter({1: 1 - other.element_size()})
    most: Counter[int] = Counter({1: one.element_size() - 1})
    for size, step in zip(one.shape, one.stride(), strict=True):
        most[step * one.element_size()] += size - 1
    for size, step in zip(other.shape, other.stride(), strict=True):
        fewest[step * other.element_size()] += 1 - size
    steps = sorted((step for step in {*fewest, *most} if fewest[step] < most[step]), reverse=True)
    terms = [(step, fewest[step], most[step]) for step in steps if step]
    tries = iter(range(LIMIT))
    return _solvable(other.data_ptr() - one.data_ptr(), terms, tries)


def _solvable(distance: int, terms: Sequence[Term], tries: Iterator[int]) -> bool:
    if next(tries, None) is None:
        return True
    if not terms or distance % math.gcd(*(step for step, *_ in terms)):
        return not terms and not distance
    (step, fewest, most), *rest = terms
    low = sum(size * less for size, less, _ in rest)
    high = sum(size * more for size, _, more in rest)
    first, last = -((high - distance) // step), (distance - low) // step
    counts = range(max(fewest, first), min(most, last) + 1)
    return any(_solvable(distance - count * step, rest, tries) for count in counts)
