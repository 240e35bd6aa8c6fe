"""A process group of torch as a :class:`~ckptctl.ops.ranks.coordinator.Coordinator`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pickle import dumps, loads
from typing import TypeVar, cast

import torch.distributed as dist

from ckptctl.distributed.messages import broadcast_bytes, gather_bytes, scatter_bytes
from ckptctl.errors import StorageError, UsageError
from ckptctl.ops.ranks.coordinator import Alone, Coordinator
from ckptctl.storage.threads import default_threads

T = TypeVar("T")


class Group:
    """The ranks of a process group.

    They send each other pickles, and trust each other, as in torch's own collectives of objects.

    Args:
        group: The group; None: the default one.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            where = f"rank {dist.get_rank()}"
            raise UsageError("this rank is not in the process group", where=where)
        self.world = dist.get_world_size(group)
        self._on_host = "cpu" in str(dist.get_backend_config(group))

    def all_gather(self, value: T) -> list[T]:
        """See :class:`Coordinator`."""
        packed = dumps(value)
        with reaching():
            if self._on_host:
                parts = gather_bytes(packed, self.group)
            else:
                parts = [b""] * self.world
                dist.all_gather_object(parts, packed, group=self.group)
        return [loads(one) for one in parts]

    def gather(self, value: T) -> list[T] | None:
        """See :class:`Coordinator`."""
        packed = dumps(value)
        with reaching():
            if self._on_host:
                parts = gather_bytes(packed, self.group, everywhere=False)
            else:
                parts = [b""] * self.world
                found = parts if self.rank == 0 else None
                dist.gather_object(packed, found, group=self.group, group_dst=0)
        return [loads(one) for one in parts] if self.rank == 0 else None

    def broadcast(self, value: T | None) -> T:
        """See :class:`Coordinator`."""
        packed = dumps(value) if self.rank == 0 else None
        with reaching():
            if self._on_host:
                given = broadcast_bytes(packed, self.group)
            else:
                found = [packed]
                dist.broadcast_object_list(found, group=self.group, group_src=0)
                given = found[0] or b""
        return cast(T, loads(given))

    def scatter(self, values: Sequence[T] | None) -> T:
        """See :class:`Coordinator`."""
        packed = None if values is None else [dumps(value) for value in values]
        with reaching():
            if self._on_host:
                own = scatter_bytes(packed, self.group)
            else:
                found = [b""]
                dist.scatter_object_list(found, packed, group=self.group, group_src=0)
                (own,) = found
        return cast(T, loads(own))


@contextmanager
def reaching() -> Iterator[None]:
    """Say in our words that a rank is gone, or that the group's time ran out."""
    try:
        yield
    except RuntimeError as error:
        raise StorageError(
            "the other ranks cannot be reached",
            where=f"rank {dist.get_rank()}",
            why=str(error).strip().splitlines()[0] if str(error).strip() else None,
            hint="one of them has ended or hangs: its own output says why",
        ) from error


def threads(jobs: int) -> int:
    """Return how many threads each rank of a host takes: *jobs*, or its part of the cores."""
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    return jobs or default_threads(ranks)


def coordinator(group: dist.ProcessGroup | None = None) -> Coordinator:
    """Return the ranks of *group*; a group of one where torch.distributed is not set up."""
    if not (dist.is_available() and dist.is_initialized()):
        return Alone()
    return Group(group)
