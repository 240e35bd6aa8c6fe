"""Process groups of torch as a :class:`~ckptctl.ops.ranks.coordinator.Coordinator`.

torch's object collectives first exchange lengths, which doubles what small messages cost. Between
hosts the first exchange holds the length and as much as fits behind it; only longer messages take a
second one. All ranks learn the longest length, so they agree whether there is one. NumPy, which
torch's need, is not.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pickle import dumps, loads
from typing import Annotated, TypeVar, cast

import torch
import torch.distributed as dist

from ckptctl.distributed import compat
from ckptctl.errors import StorageError, UsageError
from ckptctl.ops.ranks.coordinator import Alone, Coordinator
from ckptctl.options import Option
from ckptctl.storage.threads import default_threads

T = TypeVar("T")
HEAD = 8
SHORT = 1024
"""Bytes of the first exchange, per rank."""
_renamed = hasattr(dist, "all_gather_single")
_all_gather = dist.all_gather_single if _renamed else dist.all_gather_into_tensor
"""torch 2.13 warns of the older name."""
ProcessGroup = Annotated[
    dist.ProcessGroup | None, Option("The ranks; None: the default group, or this process alone.")
]
MEETING = timedelta(minutes=5)
COPYING = timedelta(days=2)


class TorchGroup:
    """The ranks of a process group.

    They send each other pickles, and trust each other, as in torch's own collectives of objects.
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


class UnreachableError(StorageError):
    """A rank is gone, or the group's time ran out: no rank can be asked any more."""


@contextmanager
def reaching() -> Iterator[None]:
    """Say in our words that a rank is gone, or that the group's time ran out."""
    try:
        yield
    except RuntimeError as error:
        raise UnreachableError(
            "the other ranks cannot be reached",
            where=f"rank {dist.get_rank()}",
            why=str(error).strip().splitlines()[0] if str(error).strip() else None,
            hint="one of them has ended or hangs: its own output says why",
        ) from error


def world() -> int:
    """Return the number of ranks of this job."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def threads(jobs: int | None) -> int:
    """Return how many threads each rank of a host takes: *jobs*, or its part of the cores."""
    return jobs or default_threads(world())


def coordinator(group: dist.ProcessGroup | None = None) -> Coordinator:
    """Return the ranks of *group*; a group of one where torch.distributed is not set up."""
    if not (dist.is_available() and dist.is_initialized()):
        return Alone()
    return TorchGroup(group)


def highest(ranks: Coordinator, numbers: Sequence[int]) -> list[int]:
    """Return the highest of each of some numbers of all ranks, which are in a group of gloo."""
    if not isinstance(ranks, TorchGroup):
        return list(numbers)
    # Not `all_gather` of objects: those are sent twice, and by every rank to every other.
    found = torch.tensor(numbers, dtype=torch.int64)
    with reaching():
        dist.all_reduce(found, dist.ReduceOp.MAX, group=ranks.group)
    return [int(number) for number in found.tolist()]


def gloo_group(parent: dist.ProcessGroup | None, timeout: timedelta | None = None) -> Coordinator:
    """Return the ranks of *parent* in a new group of gloo; all of them call it.

    They wait for each other as long as in *parent*, if *timeout* does not say otherwise.
    """
    ranks = coordinator(parent)
    if not isinstance(ranks, TorchGroup):
        return ranks
    known = parent or dist.group.WORLD
    assert known
    whole = known is dist.group.WORLD
    members = None if whole else dist.get_process_group_ranks(known)
    if members is not None:
        _count_alike(ranks)
    return TorchGroup(
        dist.new_group(
            members,
            timeout=timeout or compat.timeout(known),
            backend="gloo",
            use_local_synchronization=members is not None,
        )
    )


def _count_alike(ranks: Coordinator) -> None:
    """Make groups until all *ranks* are in as many: a group's name depends on that number.

    torch names a group that only its members make after its ranks and how many groups a process is
    in (``_hash_ranks_to_str``); members with different numbers wait for each other for ever.
    """
    most = max(ranks.all_gather(compat.groups()))
    while compat.groups() < most:
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


def launched() -> TorchGroup:
    """Return all processes that the environment names, over gloo.

    They may wait for each other as long as one of them copies; that a process has ended is noticed
    at once, because its connections are closed.
    """
    try:
        store, rank, ranks = next(dist.rendezvous("env://", timeout=MEETING))  # type: ignore[attr-defined]
        # Names of our own: the store may be that of a training, of which this process is no rank.
        own = dist.PrefixStore("ckptctl", store)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=own, rank=rank, world_size=ranks, timeout=MEETING)
        # Threads of a group that is still there when the interpreter ends abort the process.
        atexit.register(dist.destroy_process_group)
        return TorchGroup(dist.new_group(backend="gloo", timeout=COPYING))
    except (RuntimeError, ValueError) as error:
        raise StorageError(
            "the other ranks do not answer",
            why=str(error).strip().partition("\n")[0],
            hint="MASTER_ADDR and MASTER_PORT have to lead all ranks to rank 0; --alone is for one "
            "process",
        ) from error


def gather_bytes(
    own: bytes, group: dist.ProcessGroup | None, *, everywhere: bool = True
) -> list[bytes]:
    """Return the messages of all ranks, in their order; on rank 0 alone if not *everywhere*."""
    world = dist.get_world_size(group)
    found, tensor = _room(world * SHORT)
    _all_gather(tensor, _room(SHORT, _first(own, len(own)))[1], group=group)
    heads = [bytes(found[at : at + SHORT]) for at in range(0, len(found), SHORT)]
    lengths = [_length(head) for head in heads]
    longest = max(lengths)
    if longest <= SHORT - HEAD:
        return _cut(heads, lengths, HEAD)
    return _cut(_gather_long(own, longest, group, everywhere), lengths, 0)


def scatter_bytes(messages: Sequence[bytes] | None, group: dist.ProcessGroup | None) -> bytes:
    """Return this rank's one of the messages that rank 0 has."""
    longest = max(map(len, messages)) if messages else 0
    firsts = None if messages is None else [_first(one, longest) for one in messages]
    head = _scatter(firsts, SHORT, group)
    longest = _length(head)
    if longest <= SHORT - HEAD:
        return head[HEAD:]
    return _scatter(messages, longest, group)


def broadcast_bytes(message: bytes | None, group: dist.ProcessGroup | None) -> bytes:
    """Return the message that rank 0 has, on all ranks."""
    head = _broadcast(_first(message, len(message)) if message is not None else b"", SHORT, group)
    longest = _length(head)
    if longest <= SHORT - HEAD:
        return head[HEAD : HEAD + longest]
    return _broadcast(message or b"", longest, group)


def _first(message: bytes, length: int) -> bytes:
    return length.to_bytes(HEAD, "little") + message[: SHORT - HEAD]


def _length(head: bytes) -> int:
    return int.from_bytes(head[:HEAD], "little")


def _room(nbytes: int, content: bytes = b"") -> tuple[bytearray, torch.Tensor]:
    """Return memory that begins with *content* and is zero behind it; and a tensor of it."""
    memory = bytearray(nbytes)
    memory[: len(content)] = content
    return memory, torch.frombuffer(memory, dtype=torch.uint8)


def _cut(messages: Sequence[bytes], lengths: Sequence[int], start: int) -> list[bytes]:
    return [one[start : start + n] for one, n in zip(messages, lengths, strict=False)]


def _gather_long(
    own: bytes, nbytes: int, group: dist.ProcessGroup | None, everywhere: bool
) -> list[bytes]:
    mine = everywhere or dist.get_rank(group) == 0
    parts = [_room(nbytes) for _ in range(dist.get_world_size(group) if mine else 0)]
    tensors, (_, sent) = [tensor for _, tensor in parts], _room(nbytes, own)
    if everywhere:
        dist.all_gather(tensors, sent, group=group)
    else:
        dist.gather(sent, tensors if mine else None, group=group, group_dst=0)
    return [bytes(memory) for memory, _ in parts]


def _scatter(
    messages: Sequence[bytes] | None, nbytes: int, group: dist.ProcessGroup | None
) -> bytes:
    """Return this rank's message, padded: a pickle ends by itself."""
    own, tensor = _room(nbytes)
    given = None if messages is None else [_room(nbytes, message)[1] for message in messages]
    dist.scatter(tensor, given, group=group, group_src=0)
    return bytes(own)


def _broadcast(message: bytes, nbytes: int, group: dist.ProcessGroup | None) -> bytes:
    """Return rank 0's message."""
    memory, tensor = _room(nbytes, message)
    dist.broadcast(tensor, group=group, group_src=0)
    return bytes(memory)
