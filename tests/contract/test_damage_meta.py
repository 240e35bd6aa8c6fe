"""Model-parallel ranks that disagree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.contract.damaged import (
    convert,
    is_complete,
)
from tests.contract.support import (
    message,
    refused,
)


def _ranks(source: Path) -> list[dict[str, torch.Tensor]]:
    return [torch.load(path, weights_only=True) for path in sorted(source.glob("*.pth"))]


def _store(source: Path, shards: list[dict[str, torch.Tensor]]) -> None:
    for path in source.glob("*.pth"):
        path.unlink()
    for rank, shard in enumerate(shards):
        torch.save(shard, source / f"consolidated.{rank:02d}.pth")


def _other_norm(shards: list[dict[str, torch.Tensor]]) -> None:
    shards[1]["norm.weight"] = shards[1]["norm.weight"] + 1


def _other_dtype(shards: list[dict[str, torch.Tensor]]) -> None:
    name = "layers.0.attention.wq.weight"
    shards[1][name] = shards[1][name].float()


def _other_shape(shards: list[dict[str, torch.Tensor]]) -> None:
    name = "layers.0.attention.wq.weight"
    shards[1][name] = shards[1][name][:-1].clone()


def _other_keys(shards: list[dict[str, torch.Tensor]]) -> None:
    del shards[1]["norm.weight"]


RANKS = {
    "norm": (_other_norm, "norm.weight"),
    "dtype": (_other_dtype, "wq"),
    "shape": (_other_shape, "wq"),
    "keys": (_other_keys, "norm.weight"),
    "last-missing": (lambda shards: shards.pop(), "missing shard"),
    "one-too-many": (lambda shards: shards.append(shards[0]), "shard"),
}


@pytest.mark.parametrize("case", RANKS)
def test_contradicting_meta_ranks_are_refused(
    tmp_path: Path, copy: Callable[[str], Path], case: str
) -> None:
    source = copy("meta")
    shards = _ranks(source)
    change, word = RANKS[case]
    change(shards)
    _store(source, shards)
    with refused(source, tmp_path / "outputs" / "out", 4, 5, 9) as caught:
        convert(source, tmp_path, "hf")
    assert word in message(caught.value)
    assert not is_complete(source)
