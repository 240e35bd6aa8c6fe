"""Search for tensors to load whose memory partly overlaps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterator, Sequence

import torch

from ckptctl.distributed.state import TensorShard, count_spanned_elements

MAX_SEARCH_STEPS = 10_000
"""Maximum number of search steps, after which two tensors are assumed to overlap."""
Term = tuple[int, int, int]
"""Size of one step in bytes, and the minimum and the maximum number of such steps."""


def find_overlaps(
    shards: Sequence[TensorShard], first_indices: Sequence[int], replaced_names: Container[str] = ()
) -> dict[int, int]:
    """Map the index of each overlapping shard to the index of a shard that it overlaps.

    Args:
        shards: Shards to fill.
        first_indices: Index of the first shard with exactly the same memory, per shard.
        replaced_names: Names of tensors that new ones replace.
    """
    spans = [
        (str(shard.tensor.device), shard.tensor.data_ptr(), number)
        for number, shard in enumerate(shards)
        if first_indices[number] == number
        and shard.tensor.numel()
        and shard.name not in replaced_names
    ]
    overlaps: dict[int, int] = {}
    reaching: list[tuple[str, int, int]] = []  # device, end address, index
    for device, start, number in sorted(spans):
        tensor = shards[number].tensor
        reaching = [
            candidate for candidate in reaching if candidate[0] == device and candidate[1] > start
        ]
        for _, _, other_index in reaching:
            if may_overlap(shards[other_index].tensor, tensor):
                overlaps.setdefault(number, other_index)
                overlaps.setdefault(other_index, number)
        reaching.append(
            (device, start + count_spanned_elements(tensor) * tensor.element_size(), number)
        )
    return overlaps


def may_overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors on the same device may share bytes.

    If the search exceeds :data:`MAX_SEARCH_STEPS`, the result is True.

    The tensors share a byte if ``sum(step * count) = distance`` has a solution with each count
    within its bounds.
    """
    fewest: Counter[int] = Counter({1: 1 - second.element_size()})
    most: Counter[int] = Counter({1: first.element_size() - 1})
    for size, step in zip(first.shape, first.stride(), strict=True):
        most[step * first.element_size()] += size - 1
    for size, step in zip(second.shape, second.stride(), strict=True):
        fewest[step * second.element_size()] += 1 - size
    steps = sorted((step for step in {*fewest, *most} if fewest[step] < most[step]), reverse=True)
    terms = [(step, fewest[step], most[step]) for step in steps if step]
    tries = iter(range(MAX_SEARCH_STEPS))
    return _has_solution(second.data_ptr() - first.data_ptr(), terms, tries)


def _has_solution(distance: int, terms: Sequence[Term], tries: Iterator[int]) -> bool:
    if next(tries, None) is None:
        return True
    if not terms or distance % math.gcd(*(step for step, *_ in terms)):
        return not terms and not distance
    (step, minimum, maximum), *rest = terms
    low = sum(size * less for size, less, _ in rest)
    high = sum(size * more for size, _, more in rest)
    first, last = -((high - distance) // step), (distance - low) // step
    counts = range(max(minimum, first), min(maximum, last) + 1)
    return any(_has_solution(distance - count * step, rest, tries) for count in counts)
