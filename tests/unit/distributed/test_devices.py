"""CUDA devices, without one."""

from __future__ import annotations

import torch

from ckptctl.distributed.devices import synchronize_devices
from ckptctl.storage.compute_device import allocate_host_bytes


def test_host_tensors_are_not_synchronized() -> None:
    assert synchronize_devices([torch.ones(3), torch.empty(0)]) == set()


def test_unpinned_host_bytes_have_requested_size() -> None:
    assert allocate_host_bytes(5, pinned=False).nbytes == 5
