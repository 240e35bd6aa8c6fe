"""The memory of tensors as the executor reads it: where it lies, or copied from a device in parts.

No more of a device's memory is copied at a time than the executor's threads are about to write, so
saving never doubles the state in host memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from ckptctl.catalog import memory_key
from ckptctl.distributed.state import memory
from ckptctl.planner.plan import Plan


class DeviceMemory:
    """The bytes from the first to the last element of a tensor on a device; read by slices.

    Args:
        tensor: On any device; one that is not dense there takes as many copies as it has runs.
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
    if tensor.numel():
        cast(Any, view.obj).tensor = tensor
    return view


def host_views(plan: Plan, pieces: Sequence[torch.Tensor]) -> Mapping[str, memoryview]:
    """Return what the names in a plan of :mod:`ckptctl.ops.saving.files` stand for.

    Args:
        plan: The plan.
        pieces: Memory of each chunk; it has to outlive what is returned.
    """
    names = {one.file for copy in plan.transfers for one in copy.source.operands}
    return {name: _view(pieces[int(memory_key(name))]) for name in names}


def _view(tensor: torch.Tensor) -> memoryview:
    on_host = tensor.device.type == "cpu"
    return memory(tensor) if on_host else cast(memoryview, DeviceMemory(tensor))
