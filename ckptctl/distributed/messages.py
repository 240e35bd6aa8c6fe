"""Bytes of any length between ranks; short ones in a single collective.

torch's object collectives first exchange lengths, which doubles what small ones cost. Here the
first exchange holds the length and as much as fits behind it; only longer messages take a second
one. All ranks learn the longest length, so they agree whether there is one. NumPy, which torch's
need, is not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

HEAD = 8
SHORT = 1024
"""Bytes of the first exchange, per rank."""
_renamed = hasattr(dist, "all_gather_single")
_all_gather = dist.all_gather_single if _renamed else dist.all_gather_into_tensor
"""torch 2.13 warns of the older name."""


def gather_bytes(
    own: bytes, group: dist.ProcessGroup | None, *, everywhere: bool = True
) -> list[bytes]:
    """Return the messages of all ranks, in their order.

    Args:
        own: This rank's.
        group: The ranks.
        everywhere: Whether all of them need the answer; else rank 0 does.

    Returns:
        The messages; where the answer is not needed, it may be empty.
    """
    world = dist.get_world_size(group)
    found, tensor = _room(world * SHORT)
    _all_gather(tensor, _padded(_first(own, len(own)), SHORT), group=group)
    heads = [bytes(found[at : at + SHORT]) for at in range(0, len(found), SHORT)]
    lengths = [_length(head) for head in heads]
    longest = max(lengths)
    if longest <= SHORT - HEAD:
        return _cut(heads, lengths, HEAD)
    return _cut(_gather_long(_padded(own, longest), world, group, everywhere), lengths, 0)


def scatter_bytes(messages: Sequence[bytes] | None, group: dist.ProcessGroup | None) -> bytes:
    """Return this rank's one of the messages that rank 0 has.

    Args:
        messages: One for each rank; None on the other ranks.
        group: The ranks.
    """
    longest = max(map(len, messages)) if messages else 0
    firsts = None if messages is None else [_first(one, longest) for one in messages]
    head = _scatter(firsts, SHORT, group)
    longest = _length(head)
    if longest <= SHORT - HEAD:
        return head[HEAD:]
    return _scatter(messages, longest, group)


def broadcast_bytes(message: bytes | None, group: dist.ProcessGroup | None) -> bytes:
    """Return the message that rank 0 has, on all ranks.

    Args:
        message: None on the other ranks.
        group: The ranks.
    """
    head = _broadcast(_first(message, len(message)) if message is not None else b"", SHORT, group)
    longest = _length(head)
    if longest <= SHORT - HEAD:
        return head[HEAD : HEAD + longest]
    return _broadcast(message or b"", longest, group)


def _first(message: bytes, length: int) -> bytes:
    return length.to_bytes(HEAD, "little") + message[: SHORT - HEAD]


def _length(head: bytes) -> int:
    return int.from_bytes(head[:HEAD], "little")


def _room(nbytes: int) -> tuple[bytearray, torch.Tensor]:
    """Return zeroed memory, as bytes and as a tensor."""
    memory = bytearray(nbytes)
    return memory, torch.frombuffer(memory, dtype=torch.uint8)


def _padded(message: bytes, nbytes: int) -> torch.Tensor:
    memory, tensor = _room(nbytes)
    memory[: len(message)] = message
    return tensor


def _cut(messages: Sequence[bytes], lengths: Sequence[int], start: int) -> list[bytes]:
    return [one[start : start + n] for one, n in zip(messages, lengths, strict=False)]


def _gather_long(
    own: torch.Tensor, world: int, group: dist.ProcessGroup | None, everywhere: bool
) -> list[bytes]:
    mine = everywhere or dist.get_rank(group) == 0
    parts = [_room(own.numel()) for _ in range(world if mine else 0)]
    tensors = [tensor for _, tensor in parts]
    if everywhere:
        dist.all_gather(tensors, own, group=group)
    else:
        dist.gather(own, tensors if mine else None, group=group, group_dst=0)
    return [bytes(memory) for memory, _ in parts]


def _scatter(
    messages: Sequence[bytes] | None, nbytes: int, group: dist.ProcessGroup | None
) -> bytes:
    """Return this rank's message, with what pads it behind it: a pickle ends by itself."""
    own, tensor = _room(nbytes)
    given = None if messages is None else [_padded(one, nbytes) for one in messages]
    dist.scatter(tensor, given, group=group, group_src=0)
    return bytes(own)


def _broadcast(message: bytes, nbytes: int, group: dist.ProcessGroup | None) -> bytes:
    """Return what rank 0 sends."""
    memory, tensor = _room(nbytes)
    memory[: len(message)] = message
    dist.broadcast(tensor, group=group, group_src=0)
    return bytes(memory)
