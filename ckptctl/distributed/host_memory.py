"""The memory of tensors as the executor reads it: where it lies, or copied from a device in parts.

No more of a device's memory is copied at a time than the executor's threads are about to write, so
saving never doubles the state in host memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch

from ckptctl.catalog import memory_name
from ckptctl.distributed.state import memory


class DeviceMemory:
    """The bytes from the first to the last element of a tensor on a device; read by slices.

    Args:
        tensor: Dense and in row-major order there; otherwise it is made so, on the device, for as
            long as it is being read.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        flat = tensor.as_strided((span if tensor.numel() else 0,), (1,))
        self._bytes = flat.view(torch.uint8)

    def __getitem__(self, part: slice) -> memoryview:
        """Return a part, copied to host memory."""
        return owned(self._bytes[part].to("cpu"))


def owned(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a host tensor that lives as long as the view does."""
    view = memory(tensor)
    if view.obj is not None and tensor.numel():
        view.obj._tensor = tensor
    return view


def host_views(pieces: Sequence[torch.Tensor], chunks: frozenset[int]) -> Mapping[str, memoryview]:
    """Return what the names in a plan of :mod:`ckptctl.ops.saving` stand for.

    Args:
        pieces: The boxes in this rank's memory; they have to outlive what is returned.
        chunks: Indices of those that are read.
    """
    found: dict[str, memoryview] = {}
    for index in chunks:
        tensor = pieces[index]
        on_host = tensor.device.type == "cpu"
        view = memory(tensor) if on_host else cast(memoryview, DeviceMemory(tensor))
        found[memory_name(str(index))] = view
    return found
