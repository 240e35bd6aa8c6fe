"""Adapters from torch process groups to :class:`~ckptctl.ranks.coordinator.RankCollectives`.

torch's object collectives exchange lengths first, which doubles the cost of small messages. Here
the first exchange contains the length and the first bytes of the message, and only longer messages
need a second exchange. Every rank learns the greatest length, so all ranks agree on whether to do
the second exchange. Unlike torch's object collectives, the collectives here do not require NumPy.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pickle import dumps, loads
from secrets import token_hex
from typing import Annotated, Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist

from ckptctl.distributed import compat
from ckptctl.errors import StorageError, UsageError
from ckptctl.options import Option
from ckptctl.ranks.coordinator import RankCollectives, SingleProcess, format_ranks
from ckptctl.storage.threads import get_default_thread_count

T = TypeVar("T")
HEAD_BYTES = 8
FIRST_EXCHANGE_BYTES = 1024
"""Number of bytes that every rank sends in the first exchange."""
ProcessGroup = Annotated[
    dist.ProcessGroup | None,
    Option(
        "Process group of the ranks. None uses the default group, or only this "
        "process if there is none."
    ),
]
RENDEZVOUS_TIMEOUT = timedelta(minutes=5)
COPY_TIMEOUT = timedelta(days=2)


class Collectives(Protocol):
    """Collectives over tensors in host memory, with rank 0 as the root."""

    rank: int
    world: int

    def all_gather(self, parts: list[torch.Tensor], tensor: torch.Tensor) -> None:
        """Fill *parts* with the tensors of all ranks."""

    def gather(self, parts: list[torch.Tensor] | None, tensor: torch.Tensor) -> None:
        """Fill *parts* with the tensors of all ranks on rank 0. Other ranks pass None."""

    def scatter(self, tensor: torch.Tensor, parts: list[torch.Tensor] | None) -> None:
        """Fill *tensor* with this rank's element of *parts*. Ranks other than 0 pass None."""

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Fill *tensor* with the tensor of rank 0."""

    def all_reduce_max(self, tensor: torch.Tensor) -> None:
        """Replace each element by its maximum over all ranks."""


class GroupCollectives:
    """Collectives that call the public functions of ``torch.distributed`` for a process group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)

    def all_gather(self, parts: list[torch.Tensor], tensor: torch.Tensor) -> None:
        """See :class:`Collectives`."""
        dist.all_gather(parts, tensor, group=self.group)

    def gather(self, parts: list[torch.Tensor] | None, tensor: torch.Tensor) -> None:
        """See :class:`Collectives`."""
        dist.gather(tensor, parts, group=self.group, group_dst=0)

    def scatter(self, tensor: torch.Tensor, parts: list[torch.Tensor] | None) -> None:
        """See :class:`Collectives`."""
        dist.scatter(tensor, parts, group=self.group, group_src=0)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """See :class:`Collectives`."""
        dist.broadcast(tensor, group=self.group, group_src=0)

    def all_reduce_max(self, tensor: torch.Tensor) -> None:
        """See :class:`Collectives`."""
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)


class GlooCollectives:
    """Collectives of a ``ProcessGroupGloo`` that is not registered with torch."""

    def __init__(self, gloo: Any) -> None:
        self.rank = gloo.rank()
        self.world = gloo.size()
        self._owned = [gloo]
        # Threads of a group that still exists when the interpreter exits abort the process.
        weakref.finalize(self, self._owned.clear)

    @property
    def gloo(self) -> Any:
        """The ``ProcessGroupGloo``, typed as Any because its methods have no type stubs."""
        return self._owned[0]

    def all_gather(self, parts: list[torch.Tensor], tensor: torch.Tensor) -> None:
        """See :class:`Collectives`."""
        self.gloo.allgather([parts], [tensor]).wait()

    def gather(self, parts: list[torch.Tensor] | None, tensor: torch.Tensor) -> None:
        """See :class:`Collectives`."""
        self.gloo.gather(parts or [], tensor, 0).wait()

    def scatter(self, tensor: torch.Tensor, parts: list[torch.Tensor] | None) -> None:
        """See :class:`Collectives`."""
        self.gloo.scatter(tensor, parts or [], 0).wait()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """See :class:`Collectives`."""
        self.gloo.broadcast(tensor, 0).wait()

    def all_reduce_max(self, tensor: torch.Tensor) -> None:
        """See :class:`Collectives`."""
        self.gloo.allreduce(tensor, dist.ReduceOp.MAX).wait()


class HostGroup:
    """Ranks that exchange pickled messages in host memory.

    As with torch's object collectives, ranks must trust each other.
    """

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives
        self.rank = collectives.rank
        self.world = collectives.world

    def all_gather(self, value: T) -> list[T]:
        """See :class:`Coordinator`."""
        packed = dumps(value)
        with translate_group_errors():
            parts = self._all_gather_packed(packed)
        return [loads(part) for part in parts]

    def gather(self, value: T) -> list[T] | None:
        """See :class:`Coordinator`."""
        packed = dumps(value)
        with translate_group_errors():
            parts = self._gather_packed(packed)
        return [loads(part) for part in parts] if self.rank == 0 else None

    def broadcast(self, value: T | None) -> T:
        """See :class:`Coordinator`."""
        packed = dumps(value) if self.rank == 0 else None
        with translate_group_errors():
            content = self._broadcast_packed(packed)
        return cast(T, loads(content))

    def scatter(self, values: Sequence[T] | None) -> T:
        """See :class:`Coordinator`."""
        packed = None if values is None else [dumps(value) for value in values]
        with translate_group_errors():
            content = self._scatter_packed(packed)
        return cast(T, loads(content))

    def _all_gather_packed(self, packed: bytes) -> list[bytes]:
        return gather_bytes(packed, self.collectives)

    def _gather_packed(self, packed: bytes) -> list[bytes]:
        return gather_bytes(packed, self.collectives, everywhere=False)

    def _broadcast_packed(self, packed: bytes | None) -> bytes:
        return broadcast_bytes(packed, self.collectives)

    def _scatter_packed(self, packed: list[bytes] | None) -> bytes:
        return scatter_bytes(packed, self.collectives)


class TorchGroup(HostGroup):
    """Ranks of a torch process group.

    Messages are exchanged in device memory if the group has no backend for CPU tensors.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        if dist.get_rank(group) < 0:
            where = f"rank {dist.get_rank()}"
            raise UsageError("this rank is not in the process group", where=where)
        super().__init__(GroupCollectives(group))
        self._on_host = "cpu" in str(dist.get_backend_config(group))

    def _all_gather_packed(self, packed: bytes) -> list[bytes]:
        if self._on_host:
            return super()._all_gather_packed(packed)
        parts = [b""] * self.world
        dist.all_gather_object(parts, packed, group=self.group)
        return parts

    def _gather_packed(self, packed: bytes) -> list[bytes]:
        if self._on_host:
            return super()._gather_packed(packed)
        parts = [b""] * self.world
        gathered = parts if self.rank == 0 else None
        dist.gather_object(packed, gathered, group=self.group, group_dst=0)
        return parts

    def _broadcast_packed(self, packed: bytes | None) -> bytes:
        if self._on_host:
            return super()._broadcast_packed(packed)
        objects = [packed]
        dist.broadcast_object_list(objects, group=self.group, group_src=0)
        return objects[0] or b""

    def _scatter_packed(self, packed: list[bytes] | None) -> bytes:
        if self._on_host:
            return super()._scatter_packed(packed)
        objects = [b""]
        dist.scatter_object_list(objects, packed, group=self.group, group_src=0)
        return objects[0]


class UnreachableError(StorageError):
    """Failure or timeout of the process group, after which no collective can run."""


@contextmanager
def translate_group_errors() -> Iterator[None]:
    """Raise `UnreachableError` for process-group failures and timeouts in the block."""
    try:
        yield
    except RuntimeError as error:
        raise UnreachableError(
            "the other ranks cannot be reached",
            where=f"rank {dist.get_rank()}",
            why=str(error).strip().splitlines()[0] if str(error).strip() else None,
            hint="check the output of the other ranks: one of them has exited or hangs",
        ) from error


def get_world_size() -> int:
    """Return the size of the default process group, or 1 if it is not initialized."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def choose_thread_count(jobs: int | None) -> int:
    """Return *jobs*, or this rank's share of the host's CPU cores if *jobs* is 0 or None."""
    return jobs or get_default_thread_count(get_world_size())


def get_rank_collectives(group: dist.ProcessGroup | None = None) -> RankCollectives:
    """Return the collectives of *group*, or of the default group if *group* is None.

    If torch.distributed is not initialized, the collectives of a single process are returned.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return SingleProcess()
    return TorchGroup(group)


def all_reduce_max(ranks: RankCollectives, numbers: Sequence[int]) -> list[int]:
    """Return the element-wise maximum of *numbers* over all ranks of a gloo group."""
    if not isinstance(ranks, HostGroup):
        return list(numbers)
    # Cheaper than an all-gather of objects, which sends twice and from every rank to every other.
    tensor = torch.tensor(numbers, dtype=torch.int64)
    with translate_group_errors():
        ranks.collectives.all_reduce_max(tensor)
    return [int(number) for number in tensor.tolist()]


def create_gloo_group(
    parent: dist.ProcessGroup | None, timeout: timedelta | None = None
) -> RankCollectives:
    """Create a separate gloo group with the ranks of *parent*, which must all call this function.

    If *timeout* is None, the new group uses the timeout of *parent*.

    ``new_group`` would name the group after a counter of this process, whose value can differ
    between ranks that are in different numbers of groups, so they would wait under different names.
    Here rank 0 draws a random name and sends it to the others.

    Raises:
        StorageError: The group did not form in time.
    """
    ranks = get_rank_collectives(parent)
    if not isinstance(ranks, TorchGroup):
        return ranks
    parent_group = parent or dist.group.WORLD
    assert parent_group
    join_timeout = compat.get_cpu_timeout(parent_group) or dist.default_pg_timeout
    name = ranks.broadcast(f"ckptctl/{token_hex(8)}")
    store = dist.PrefixStore(name, compat.default_store())  # type: ignore[attr-defined]
    members = dist.get_process_group_ranks(parent_group)
    missing = members
    try:
        store.set(f"rank {ranks.rank}", "here")
        store.wait([f"rank {other}" for other in range(ranks.world)], join_timeout)
        missing = []
        gloo = dist.ProcessGroupGloo(store, ranks.rank, ranks.world, timeout or join_timeout)
    except RuntimeError as error:
        if missing:
            arrived = [store.check([f"rank {other}"]) for other in range(ranks.world)]
            missing = [
                rank for rank, has_joined in zip(members, arrived, strict=True) if not has_joined
            ]
        why = str(error).strip().partition("\n")[0]
        if missing:
            why = f"{format_ranks(missing)} did not join within {join_timeout}"
        raise StorageError(
            f"the process group `{name}` of {format_ranks(members)} did not form",
            where=f"rank {dist.get_rank()}",
            why=why,
            hint="check the output of the other ranks: one of them has exited or hangs",
        ) from error
    return HostGroup(GlooCollectives(gloo))


def init_group_from_env() -> TorchGroup:
    """Initialize a gloo group of all processes that torchrun's environment variables describe.

    The timeout is long, because ranks wait while another one copies. A process that exits is
    detected immediately, because its connections are closed.

    Raises:
        StorageError: The other ranks do not respond.
    """
    try:
        store, rank, ranks = next(dist.rendezvous("env://", timeout=RENDEZVOUS_TIMEOUT))  # type: ignore[attr-defined]
        # A separate prefix, because the store may belong to a training job without this process.
        prefixed_store = dist.PrefixStore("ckptctl", store)  # type: ignore[attr-defined]
        dist.init_process_group(
            "gloo", store=prefixed_store, rank=rank, world_size=ranks, timeout=RENDEZVOUS_TIMEOUT
        )
        # Threads of a group that still exists when the interpreter exits abort the process.
        atexit.register(dist.destroy_process_group)
        return TorchGroup(dist.new_group(backend="gloo", timeout=COPY_TIMEOUT))
    except (RuntimeError, ValueError) as error:
        raise StorageError(
            "the other ranks do not respond",
            why=str(error).strip().partition("\n")[0],
            hint="set MASTER_ADDR and MASTER_PORT to the address of rank 0, or pass "
            "`--single-process`",
        ) from error


def gather_bytes(message: bytes, group: Collectives, *, everywhere: bool = True) -> list[bytes]:
    """Gather the messages of all ranks in rank order, on all ranks or only on rank 0."""
    received, tensor = _allocate_bytes(group.world * FIRST_EXCHANGE_BYTES)
    group.all_gather(
        list(tensor.view(group.world, FIRST_EXCHANGE_BYTES).unbind()),
        _allocate_bytes(FIRST_EXCHANGE_BYTES, _build_head(message, len(message)))[1],
    )
    heads = [
        bytes(received[start : start + FIRST_EXCHANGE_BYTES])
        for start in range(0, len(received), FIRST_EXCHANGE_BYTES)
    ]
    lengths = [_parse_length(head) for head in heads]
    longest = max(lengths)
    if longest <= FIRST_EXCHANGE_BYTES - HEAD_BYTES:
        return _slice_messages(heads, lengths, HEAD_BYTES)
    is_receiver = everywhere or group.rank == 0
    parts = [_allocate_bytes(longest) for _ in range(group.world if is_receiver else 0)]
    tensors, (_, sent) = [tensor for _, tensor in parts], _allocate_bytes(longest, message)
    if everywhere:
        group.all_gather(tensors, sent)
    else:
        group.gather(tensors if is_receiver else None, sent)
    return _slice_messages([bytes(memory) for memory, _ in parts], lengths, 0)


def scatter_bytes(messages: Sequence[bytes] | None, group: Collectives) -> bytes:
    """Return this rank's element of *messages*, followed by padding.

    Only rank 0 passes *messages*. Other ranks pass None.
    """
    longest = max(map(len, messages)) if messages else 0
    heads = None if messages is None else [_build_head(message, longest) for message in messages]
    head = _scatter_padded(heads, FIRST_EXCHANGE_BYTES, group)
    longest = _parse_length(head)
    if longest <= FIRST_EXCHANGE_BYTES - HEAD_BYTES:
        return head[HEAD_BYTES:]
    return _scatter_padded(messages, longest, group)


def broadcast_bytes(message: bytes | None, group: Collectives) -> bytes:
    """Return the message of rank 0 on all ranks. Other ranks pass None."""
    head = _broadcast_padded(
        _build_head(message, len(message)) if message is not None else b"",
        FIRST_EXCHANGE_BYTES,
        group,
    )
    longest = _parse_length(head)
    if longest <= FIRST_EXCHANGE_BYTES - HEAD_BYTES:
        return head[HEAD_BYTES : HEAD_BYTES + longest]
    return _broadcast_padded(message or b"", longest, group)


def _build_head(message: bytes, length: int) -> bytes:
    return length.to_bytes(HEAD_BYTES, "little") + message[: FIRST_EXCHANGE_BYTES - HEAD_BYTES]


def _parse_length(head: bytes) -> int:
    return int.from_bytes(head[:HEAD_BYTES], "little")


def _allocate_bytes(nbytes: int, content: bytes = b"") -> tuple[bytearray, torch.Tensor]:
    """Allocate *nbytes* zeroed bytes that start with *content*, and a tensor that shares them."""
    memory = bytearray(nbytes)
    memory[: len(content)] = content
    return memory, torch.frombuffer(memory, dtype=torch.uint8)


def _slice_messages(messages: Sequence[bytes], lengths: Sequence[int], start: int) -> list[bytes]:
    return [
        message[start : start + length] for message, length in zip(messages, lengths, strict=False)
    ]


def _scatter_padded(messages: Sequence[bytes] | None, nbytes: int, group: Collectives) -> bytes:
    """Return this rank's message, padded to *nbytes*. Unpickling ignores the padding."""
    memory, tensor = _allocate_bytes(nbytes)
    padded = (
        None if messages is None else [_allocate_bytes(nbytes, message)[1] for message in messages]
    )
    group.scatter(tensor, padded)
    return bytes(memory)


def _broadcast_padded(message: bytes, nbytes: int, group: Collectives) -> bytes:
    """Return the message of rank 0, padded to *nbytes*."""
    memory, tensor = _allocate_bytes(nbytes, message)
    group.broadcast(tensor)
    return bytes(memory)
