"""CUDA devices, without one."""

from __future__ import annotations

import torch

from ckptctl.distributed.devices import allocate_host_bytes, synchronize_devices


def test_tensors_of_the_host_are_not_waited_for() -> None:
    assert synchronize_devices([torch.ones(3), torch.empty(0)]) == set()


def test_memory_that_need_not_be_pinned() -> None:
    assert allocate_host_bytes(5, pinned=False).nbytes == 5
