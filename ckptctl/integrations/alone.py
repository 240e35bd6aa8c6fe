"""The group of one rank, for trainers that let one rank alone save or load everything."""

from __future__ import annotations

import torch.distributed as dist

_own: dict[dist.ProcessGroup, dist.ProcessGroup] = {}


def own_group() -> dist.ProcessGroup | None:
    """Return a group with this rank alone, made without the others; None: there are no others."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    default = dist.group.WORLD
    assert default
    if default not in _own:
        _own.clear()
        rank = dist.get_rank()
        _own[default] = dist.new_group([rank], backend="gloo", use_local_synchronization=True)
    return _own[default]
