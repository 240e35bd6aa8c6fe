"""Load DCP directories with stock ``dcp.load`` on several ranks and compare every local shard."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.checkpoints.dcp import distribute
from tests.checkpoints.readers import differences
from tests.gloo import run_on_ranks

WORLDS = (1, 2, 3, 4)
POISON = 0xA5


def check_on_ranks(
    cases: Sequence[tuple[Path, Mapping[str, Any]]], worlds: Sequence[int] = WORLDS
) -> None:
    """Load every case on every world size in every sharding.

    Three ranks make the shards uneven; four are also a 2 x 2 mesh. Targets are poisoned before
    the load, because ``dcp.load`` does not notice what a checkpoint does not cover.

    Args:
        cases: DCP directories, and the full tensors and other leaves expected in each, by name.
        worlds: World sizes.

    Raises:
        RankFailure: A rank did not get what was expected; names the directory, the sharding and
            the tensors.
    """
    with tempfile.TemporaryDirectory() as scratch:
        saved = []
        for index, (folder, expected) in enumerate(cases):
            path = Path(scratch) / f"{index}.pt"
            torch.save(dict(expected), path)
            saved.append((str(folder), str(path)))
        run_on_ranks(_check_rank, worlds, saved)


SHARDINGS: dict[int, list[tuple[tuple[int, ...], str]]] = {
    1: [((1,), "S0")],
    2: [((2,), "S0"), ((2,), "S1")],
    3: [((3,), "S0"), ((3,), "S1")],
    4: [((4,), "R"), ((2, 2), "S0,S1"), ((2, 2), "S1,S0")],
}
"""For each world size the device meshes and placements to load into."""


def _check_rank(rank: int, world: int, cases: list[tuple[str, str]]) -> None:
    for folder, path in cases:
        expected = torch.load(path, weights_only=False)
        if world < 3:
            _compare(folder, "plain tensors", expected, expected)
        for mesh, words in SHARDINGS[world]:
            placed = distribute(expected, mesh, words)
            _compare(folder, f"{words} on {mesh}", placed, placed)


def _compare(folder: str, how: str, targets: Mapping[str, Any], truth: Mapping[str, Any]) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load

    state = {name: _poisoned(value) for name, value in targets.items()}
    load(state, checkpoint_id=folder)
    problems = differences(_locals(state), _locals(truth))
    if problems:
        raise AssertionError(f"{folder}, {how}: " + "; ".join(problems[:10]))


def _poisoned(value: Any) -> Any:
    from torch.distributed.tensor import DTensor

    if not isinstance(value, torch.Tensor):
        return "not loaded"
    local = value.to_local() if isinstance(value, DTensor) else value
    poison = torch.full((local.nbytes,), POISON, dtype=torch.uint8)
    fresh = poison.view(local.dtype).reshape(local.shape)
    if not isinstance(value, DTensor):
        return fresh
    return DTensor.from_local(
        fresh,
        value.device_mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )


def _locals(state: Mapping[str, Any]) -> dict[str, Any]:
    from torch.distributed.tensor import DTensor

    return {
        name: value.to_local() if isinstance(value, DTensor) else value
        for name, value in state.items()
    }
