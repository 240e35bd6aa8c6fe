"""Synchronization of CUDA devices, and allocation of host memory to which they copy."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache

import torch

_log = logging.getLogger("ckptctl")


def synchronize_devices(tensors: Iterable[torch.Tensor]) -> set[torch.device]:
    """Synchronize the CUDA devices of *tensors*, because any stream may still write to them.

    Returns:
        The devices that were synchronized.
    """
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    for device in devices:
        torch.cuda.synchronize(device)
    return devices


def allocate_host_bytes(nbytes: int, *, pinned: bool) -> torch.Tensor:
    """Allocate a byte tensor in host memory, which is pinned if *pinned* is set and possible."""
    if pinned:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            warn_slow_copies(str(error).partition("\n")[0])
    return torch.empty(nbytes, dtype=torch.uint8)


@cache
def warn_slow_copies(problem: str) -> None:
    """Warn that *problem* slows down copies from GPUs, once per process for each problem."""
    _log.warning("cannot pin host memory, so copies from GPUs are slower: %s", problem)
