"""Small tensors that are no part of a sharded one: ranks may hold different ones under one name.

A generator's state, a data loader's position, the statistics of a layer that ranks do not share:
nothing but their bytes tells whether ranks agree. So their bytes are compared, as those of leaves
are that are no tensors, and what differs is kept for each rank.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping
from itertools import groupby

import torch

from ckptctl.distributed.state import Held, memory
from ckptctl.ops.saving.holdings import DIGEST

MAX_BYTES = 64 << 10
DENSE = torch.contiguous_format


class SmallTensors(Mapping[str, bytes]):
    """Content of each small plain tensor as ``torch.save`` writes it, made when it is asked for.

    Args:
        tensors: What a rank holds, by name.

    Attributes:
        digests: Of each of them.
    """

    def __init__(self, tensors: Mapping[str, Held]) -> None:
        self._copies = dict(_on_host(tensors))
        self.digests = {name: _digest(copy) for name, copy in self._copies.items()}

    def __getitem__(self, name: str) -> bytes:
        buffer = io.BytesIO()
        torch.save(self._copies[name], buffer)
        return buffer.getvalue()

    def __iter__(self) -> Iterator[str]:
        return iter(self._copies)

    def __len__(self) -> int:
        return len(self._copies)


def _on_host(tensors: Mapping[str, Held]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield copies; of those on one device with one dtype after a single transfer."""
    small = [
        (name, one.pieces[0].tensor)
        for name, one in tensors.items()
        if one.plain and 0 < one.pieces[0].tensor.nbytes <= MAX_BYTES
    ]
    small.sort(key=lambda pair: (str(pair[1].device), str(pair[1].dtype)))
    for device, some in groupby(small, key=lambda pair: (pair[1].device, pair[1].dtype)):
        named = [(n, t.as_subclass(torch.Tensor).resolve_conj().resolve_neg()) for n, t in some]
        if device[0].type == "cpu":
            yield from ((name, tensor.clone(memory_format=DENSE)) for name, tensor in named)
            continue
        whole = torch.cat([tensor.reshape(-1).view(torch.uint8) for _, tensor in named]).cpu()
        parts = torch.split(whole, [tensor.nbytes for _, tensor in named])
        for (name, tensor), part in zip(named, parts, strict=True):
            yield name, part.view(tensor.dtype).reshape(tensor.shape).clone()


def _digest(tensor: torch.Tensor) -> bytes:
    return hashlib.blake2b(memory(tensor), digest_size=DIGEST).digest()
