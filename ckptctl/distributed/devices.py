"""Synchronization of CUDA devices."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def synchronize_devices(tensors: Iterable[torch.Tensor]) -> set[torch.device]:
    """Synchronize the CUDA devices of *tensors*, because any stream may still write to them.

    Returns:
        The devices that were synchronized.
    """
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    for device in devices:
        torch.cuda.synchronize(device)
    return devices
