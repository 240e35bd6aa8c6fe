"""Views of one memory that have a byte in common, against what filling one of them shows."""

from __future__ import annotations

import random

import torch

from ckptctl.distributed.loading.overlaps import find_overlaps, may_overlap
from ckptctl.distributed.state import flatten_state


def a_view(memory: torch.Tensor, rng: random.Random) -> torch.Tensor:
    while True:
        dims = rng.randint(0, 3)
        sizes = [rng.randint(1, 4) for _ in range(dims)]
        steps = [rng.randint(0, 12) for _ in range(dims)]
        first = rng.randrange(len(memory))
        if first + sum((n - 1) * step for n, step in zip(sizes, steps, strict=True)) < len(memory):
            return memory.as_strided(sizes, steps, first)


def test_views_overlap_if_filling_one_changes_other() -> None:
    rng = random.Random(7)
    seen = set()
    for _ in range(400):
        memory = torch.zeros(rng.choice([20, 40, 60]))
        one, other = sorted((a_view(memory, rng) for _ in range(2)), key=torch.Tensor.data_ptr)
        one.fill_(1)
        assert may_overlap(one, other) == bool(other.any()), (one.stride(), other.stride())
        seen.add(bool(other.any()))
    assert seen == {True, False}


def test_interleaved_columns_do_not_overlap() -> None:
    memory = torch.zeros(4096, 64)
    state = {"left": memory[:, :32], "right": memory[:, 32:], "other": torch.zeros(3)}
    places = flatten_state(state).shards
    assert find_overlaps(places, [0, 1, 2]) == {}
    places = flatten_state({**state, "rows": memory[7:9]}).shards
    assert find_overlaps(places, [0, 1, 2, 3]) == {0: 3, 1: 3, 3: 0}


def test_overlap_is_detected_within_element_of_another_dtype() -> None:
    memory = torch.zeros(8)
    assert may_overlap(memory, memory.view(torch.uint8)[31:])
    assert not may_overlap(memory[:7], memory.view(torch.uint8)[28:])
