"""A process group of torch as a :class:`~ckptctl.ops.coordinator.Coordinator`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar, cast

import torch.distributed as dist

from ckptctl.errors import StorageError
from ckptctl.ops.coordinator import Alone, Coordinator

T = TypeVar("T")


class Group:
    """The ranks of a process group.

    Args:
        group: The group; None: the default one.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)

    def all_gather(self, value: T) -> list[T]:
        """See :class:`Coordinator`."""
        found: list[T | None] = [None] * self.world
        with _reaching():
            dist.all_gather_object(found, value, group=self.group)
        return cast(list[T], found)

    def gather(self, value: T) -> list[T] | None:
        """See :class:`Coordinator`."""
        found: list[T | None] | None = [None] * self.world if self.rank == 0 else None
        with _reaching():
            dist.gather_object(value, found, group=self.group, group_dst=0)
        return cast(list[T] | None, found)

    def broadcast(self, value: T | None) -> T:
        """See :class:`Coordinator`."""
        found = [value]
        with _reaching():
            dist.broadcast_object_list(found, group=self.group, group_src=0)
        return cast(T, found[0])

    def scatter(self, values: Sequence[T] | None) -> T:
        """See :class:`Coordinator`."""
        found: list[T | None] = [None]
        given = None if values is None else list(values)
        with _reaching():
            dist.scatter_object_list(found, given, group=self.group, group_src=0)
        return cast(T, found[0])


@contextmanager
def _reaching() -> Iterator[None]:
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


def coordinator(group: dist.ProcessGroup | None = None) -> Coordinator:
    """Return the ranks of *group*; a group of one where torch.distributed is not set up."""
    if not (dist.is_available() and dist.is_initialized()):
        return Alone()
    return Group(group)
