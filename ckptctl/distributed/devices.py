"""What saves and loads need of CUDA devices: that they are done, and memory that they copy to."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache

import torch

_log = logging.getLogger("ckptctl")


def settle(tensors: Iterable[torch.Tensor]) -> set[torch.device]:
    """Wait for what the CUDA devices of *tensors* were told to do: any stream may write to them."""
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    for device in devices:
        torch.cuda.synchronize(device)
    return devices


def host_bytes(nbytes: int, *, pinned: bool) -> torch.Tensor:
    """Return host memory, pinned if that is possible."""
    if pinned:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            say_once(str(error).partition("\n")[0])
    return torch.empty(nbytes, dtype=torch.uint8)


@cache
def say_once(problem: str) -> None:
    """Warn that copies are slower; a process is told of each problem once."""
    _log.warning("cannot pin host memory, so copies from GPUs are slower: %s", problem)
