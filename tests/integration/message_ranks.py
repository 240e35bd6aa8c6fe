"""What the ranks of ``test_messages`` do."""

from __future__ import annotations

from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ckptctl.distributed.group import (
    FIRST_EXCHANGE_BYTES,
    HEAD_BYTES,
    HostGroup,
    TorchGroup,
    create_gloo_group,
    gather_bytes,
    scatter_bytes,
)
from ckptctl.errors import StorageError

EDGE = FIRST_EXCHANGE_BYTES - HEAD_BYTES
SIZES = (1, 2, EDGE - 1, EDGE, EDGE + 1, 100_000)


def exchanged(rank: int, world: int) -> None:
    """Send messages of all lengths, each rank another one, in every way; without NumPy."""
    with patch.object(torch.Tensor, "numpy", side_effect=RuntimeError("Numpy is not available")):
        _exchanged(TorchGroup(), rank, world)
        own = create_gloo_group(None)
        assert isinstance(own, HostGroup) and not isinstance(own, TorchGroup)
        _exchanged(own, rank, world)


def _exchanged(ranks: HostGroup, rank: int, world: int) -> None:
    group = ranks.collectives
    for size in SIZES:
        whole = [bytes([one + 1]) * (size - one % 2) for one in range(world)]
        assert gather_bytes(whole[rank], group) == whole
        answer = gather_bytes(whole[rank], group, everywhere=False)
        assert rank or answer == whole
        found = scatter_bytes(whole if rank == 0 else None, group)
        assert found.startswith(whole[rank])
        assert not any(found[len(whole[rank]) :])
    for turn, _ in enumerate(SIZES):
        sent = [bytes([one + 1]) * SIZES[(turn + one) % len(SIZES)] for one in range(world)]
        assert ranks.all_gather(sent[rank]) == sent
        assert ranks.gather(sent[rank]) == (sent if rank == 0 else None)
        assert ranks.scatter(sent if rank == 0 else None) == sent[rank]
        assert ranks.broadcast(sent[0] if rank == 0 else None) == sent[0]


def as_torch_does(rank: int, world: int) -> None:
    """Compare with torch's own object collectives, in a group of some of the ranks, too."""
    value = {"rank": rank, "x": [None, 1.5, "é" * 700 * rank]}
    for members in (list(range(world)), list(range(1, world))):
        group = dist.new_group(members)
        if rank not in members:
            continue
        expected: list[object] = [None] * len(members)
        dist.all_gather_object(expected, value, group=group)
        ranks = TorchGroup(group)
        for ranks._on_host in (True, False):
            assert ranks.all_gather(value) == expected
            assert ranks.gather(value) == (expected if ranks.rank == 0 else None)
            assert ranks.scatter(expected if ranks.rank == 0 else None) == value
            assert ranks.broadcast(value if ranks.rank == 0 else None) == expected[0]


def unpicklable(rank: int, world: int) -> None:
    """What cannot be packed is not told as ranks that are gone; they go on together."""
    ranks = TorchGroup()
    for value, error in ((_deep(), RecursionError), (_Odd(), NotImplementedError)):
        with pytest.raises(error):
            ranks.all_gather(value)
        with pytest.raises(error):
            ranks.gather(value)
        if rank:
            continue
        with pytest.raises(error):
            ranks.broadcast(value)
        with pytest.raises(error):
            ranks.scatter([value] * world)
    assert ranks.all_gather(rank) == list(range(world))


def not_formed(rank: int, world: int) -> None:
    """Rank 1 does not come: the others say so when the time of their group is over."""
    parent = dist.new_group(timeout=timedelta(seconds=2), backend="gloo")
    if rank == 1:
        TorchGroup(parent).broadcast(None)  # hears the name, and hangs
        return
    with pytest.raises(
        StorageError, match=r"`ckptctl/.*` of ranks 0, 1(, 2)? did not form"
    ) as error:
        create_gloo_group(parent)
    assert error.value.where == f"rank {rank}"
    assert error.value.why == "rank 1 did not join within 0:00:02"


class _Odd:
    def __reduce__(self) -> tuple[object, ...]:
        raise NotImplementedError


def _deep() -> list[object]:
    found: list[object] = []
    for _ in range(100_000):
        found = [found]
    return found
