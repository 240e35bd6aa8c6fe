"""Bytes of any length between ranks; short ones in a single collective.

torch's object collectives first exchange lengths, which doubles what small ones cost. Here the
first exchange holds the length and as much as fits behind it; only longer messages take a second
one. All ranks learn the longest length, so they agree whether there is one.
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
    found = torch.zeros(world * SHORT, dtype=torch.uint8)
    _all_gather(found, _padded(_first(own, len(own)), SHORT), group=group)
    heads = [bytes(row) for row in found.view(world, SHORT).numpy()]
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


def _first(message: bytes, length: int) -> bytes:
    return length.to_bytes(HEAD, "little") + message[: SHORT - HEAD]


def _length(head: bytes) -> int:
    return int.from_bytes(head[:HEAD], "little")


def _padded(message: bytes, nbytes: int) -> torch.Tensor:
    tensor = torch.zeros(nbytes, dtype=torch.uint8)
    if message:
        tensor[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    return tensor


def _cut(messages: Sequence[bytes], lengths: Sequence[int], start: int) -> list[bytes]:
    return [one[start : start + n] for one, n in zip(messages, lengths, strict=False)]


def _gather_long(
    own: torch.Tensor, world: int, group: dist.ProcessGroup | None, everywhere: bool
) -> list[bytes]:
    mine = everywhere or dist.get_rank(group) == 0
    parts = [torch.zeros_like(own) for _ in range(world)] if mine else None
    if everywhere:
        assert parts is not None
        dist.all_gather(parts, own, group=group)
    else:
        dist.gather(own, parts, group=group, group_dst=0)
    return [bytes(part.numpy()) for part in parts or ()]


def _scatter(
    messages: Sequence[bytes] | None, nbytes: int, group: dist.ProcessGroup | None
) -> bytes:
    """Return this rank's message, with what pads it behind it: a pickle ends by itself."""
    own = torch.zeros(nbytes, dtype=torch.uint8)
    given = None if messages is None else [_padded(one, nbytes) for one in messages]
    dist.scatter(own, given, group=group, group_src=0)
    return bytes(own.numpy())
