"""Private names of torch in one place, reviewed for every new release.

Sources: ``torch/distributed/checkpoint/_nested_dict.py``, ``planner_helpers.py``,
``filesystem.py``, ``torch/distributed/_shard/sharded_tensor/api.py``,
``torch/distributed/tensor/placement_types.py``, ``torch/distributed/distributed_c10d.py``; torch
2.6 to :data:`NEWEST_TESTED`.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from secrets import randbits

import torch
import torch.distributed as dist

from ckptctl.errors import CkptError

NEWEST_TESTED = (2, 14)
"""Newest torch release (major, minor) that is tested. ``noxfile.py`` sets it too."""
PRIVATE = {
    "ShardedTensor": ("torch.distributed._shard.sharded_tensor.api", "ShardedTensor"),
    "StorageInfo": ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    "StridedShard": ("torch.distributed.tensor.placement_types", "_StridedShard"),
    "create_read_items_for_chunk_list": (
        "torch.distributed.checkpoint.planner_helpers",
        "create_read_items_for_chunk_list",
    ),
    "default_store": ("torch.distributed.distributed_c10d", "_get_default_store"),
    "flatten_state_dict": ("torch.distributed.checkpoint._nested_dict", "flatten_state_dict"),
    "group_registry": ("torch.distributed.distributed_c10d", "_world"),
    "init_state_dict": ("torch.distributed.checkpoint.planner_helpers", "_init_state_dict"),
    "unflatten_state_dict": ("torch.distributed.checkpoint._nested_dict", "unflatten_state_dict"),
}
"""torch module and attribute of each private name, keyed by its name in this module."""


def find_missing_names() -> Iterator[str]:
    """Yield the private names that the installed torch does not have."""
    for module, name in PRIVATE.values():
        try:
            exists = hasattr(importlib.import_module(module), name)
        except ImportError:
            exists = False
        if not exists:
            yield f"{module}.{name}"


try:
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
    from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
    from torch.distributed.checkpoint.planner_helpers import (
        _init_state_dict as init_state_dict,
    )
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
    from torch.distributed.distributed_c10d import _get_default_store as default_store
    from torch.distributed.distributed_c10d import _world as group_registry
    from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
except ImportError as error:
    raise CkptError(
        f"torch {torch.__version__} is not supported for saving and loading in training",
        why=f"it does not provide {', '.join(find_missing_names())}",
        hint="install a tested release of torch, 2.6 or newer",
    ) from error


def is_untested(version: str) -> bool:
    """Return whether *version* of torch is newer than the newest tested one."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) > NEWEST_TESTED


def warn_if_untested(version: str) -> None:
    """Warn if *version* of torch is newer than the newest tested one."""
    if is_untested(version):
        warnings.warn(
            f"torch {version} is newer than {'.'.join(map(str, NEWEST_TESTED))}, the newest "
            "release tested for saving and loading in training",
            stacklevel=2,
        )


warn_if_untested(torch.__version__)


@contextmanager
def keep_group_counter() -> Iterator[None]:
    """Let this rank create a process group without the other ranks, inside the block.

    Ranks name a new group after the number of earlier groups. Since torch 2.14, groups with
    ``use_local_synchronization=True`` are counted too, so a group of one rank would change the
    names of its later groups, and the other ranks would wait for it under other names. Inside the
    block, the number is random, because the name of the new group must not be used again.
    """
    count = group_registry.group_count
    group_registry.group_count = randbits(48)
    try:
        yield
    finally:
        group_registry.group_count = count


def locate_storage(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the storage identity and the storage offset (in elements) of *tensor*."""
    return int(tensor.untyped_storage()._cdata), int(tensor.storage_offset())


def get_cpu_timeout(group: dist.ProcessGroup) -> timedelta | None:
    """Return the timeout of the CPU backend of *group*, or None if it has no such backend."""
    host = torch.device("cpu")
    if host not in group._device_types:
        return None
    options = getattr(group._get_backend(host), "options", None)
    limit = getattr(options, "_timeout", None)
    return limit if isinstance(limit, timedelta) else None


__all__ = [  # private names of torch that other modules import from here
    "NEWEST_TESTED",
    "PRIVATE",
    "ShardedTensor",
    "StorageInfo",
    "StridedShard",
    "create_read_items_for_chunk_list",
    "default_store",
    "flatten_state_dict",
    "group_registry",
    "init_state_dict",
    "unflatten_state_dict",
]
