"""A process group of torch as a :class:`~ckptctl.ops.coordinator.Coordinator`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, cast

import torch.distributed as dist

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
        dist.all_gather_object(found, value, group=self.group)
        return cast(list[T], found)

    def gather(self, value: T) -> list[T] | None:
        """See :class:`Coordinator`."""
        found: list[T | None] | None = [None] * self.world if self.rank == 0 else None
        dist.gather_object(value, found, group=self.group, group_dst=0)
        return cast(list[T] | None, found)

    def broadcast(self, value: T | None) -> T:
        """See :class:`Coordinator`."""
        found = [value]
        dist.broadcast_object_list(found, group=self.group, group_src=0)
        return cast(T, found[0])

    def scatter(self, values: Sequence[T] | None) -> T:
        """See :class:`Coordinator`."""
        found: list[T | None] = [None]
        given = None if values is None else list(values)
        dist.scatter_object_list(found, given, group=self.group, group_src=0)
        return cast(T, found[0])


def coordinator(group: dist.ProcessGroup | None = None) -> Coordinator:
    """Return the ranks of *group*; a group of one where torch.distributed is not set up."""
    if not (dist.is_available() and dist.is_initialized()):
        return Alone()
    return Group(group)
