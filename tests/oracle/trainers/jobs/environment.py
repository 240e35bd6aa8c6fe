"""What launchers tell trainers; the process group exists already."""

from __future__ import annotations

import importlib
import os


def announce(rank: int, world: int) -> None:
    """Set what ``torchrun`` sets on one node; the address is never used."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "DS_ACCELERATOR": "cpu",
    }


def without_compiling() -> None:
    """Keep DeepSpeed from compiling collectives of its own, which takes a minute; gloo's do.

    The module is called like torch, which ``deepspeed.comm.torch`` is after its import.
    """
    vars(importlib.import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None
