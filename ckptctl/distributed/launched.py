"""The processes that torchrun, or srun, started, as one group."""

from __future__ import annotations

import atexit
from datetime import timedelta

import torch.distributed as dist

from ckptctl.distributed.group import Group
from ckptctl.errors import StorageError

MEETING = timedelta(minutes=5)
COPYING = timedelta(days=2)


def launched() -> Group:
    """Return all processes that the environment names, over gloo.

    They may wait for each other as long as one of them copies; that a process has ended is noticed
    at once, because its connections are closed.

    Raises:
        StorageError: They do not find each other.
    """
    try:
        dist.init_process_group("gloo", timeout=MEETING)
        # Threads of a group that is still there when the interpreter ends abort the process.
        atexit.register(dist.destroy_process_group)
        return Group(dist.new_group(backend="gloo", timeout=COPYING))
    except (RuntimeError, ValueError) as error:
        raise StorageError(
            "the other ranks do not answer",
            why=str(error).strip().partition("\n")[0],
            hint="MASTER_ADDR and MASTER_PORT have to lead all ranks to rank 0; a process that is "
            "to be alone needs an environment without WORLD_SIZE",
        ) from error
