"""What launchers tell trainers; the process group exists already."""

from __future__ import annotations

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
