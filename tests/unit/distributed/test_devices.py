"""CUDA devices, without one."""

from __future__ import annotations

import torch

from ckptctl.distributed.devices import host_bytes, settle


def test_tensors_of_the_host_are_not_waited_for() -> None:
    assert settle([torch.ones(3), torch.empty(0)]) == set()


def test_memory_that_need_not_be_pinned() -> None:
    assert host_bytes(5, pinned=False).nbytes == 5
