"""``ckptctl.async_save``: saving while training goes on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Unpack

import torch.distributed as dist

from ckptctl.distributed.background.future import SaveFuture
from ckptctl.distributed.background.saver import AsyncSaver, Mode, WhenBusy
from ckptctl.distributed.background.staged_write import SaveKeywords
from ckptctl.distributed.background.thread import Callback
from ckptctl.distributed.state import StateDict

__all__ = ["AsyncSaver", "SaveFuture", "async_save"]


def async_save(
    state_dict: StateDict,
    path: str | Path,
    *,
    process_group: dist.ProcessGroup | None = None,
    mode: Mode = "thread",
    when_busy: WhenBusy = "wait",
    on_staged: Callback | None = None,
    on_published: Callback | None = None,
    collectives: bool = True,
    **options: Unpack[SaveKeywords],
) -> SaveFuture:
    """Save *state_dict* as :func:`ckptctl.save` does, while training goes on.

    When this returns, tensors have been copied to host memory and other leaves pickled: all of it
    may be changed. Planning, writing and publishing happen in the background. The directory has its
    name when it is complete, or never.

    All ranks call it, in the same order with the same arguments. The first call of a process group
    is collective in itself: it makes groups of gloo. See :class:`AsyncSaver`, one of which each
    process group gets here, for what happens at the end of the interpreter.

    Args:
        state_dict: See :func:`ckptctl.save`.
        path: Where the checkpoint will appear.
        process_group: The ranks; None: the default group, or this process alone.
        mode: ``"thread"`` or ``"process"``: what writes; see :class:`AsyncSaver`.
        when_busy: While the last save of the same process group is going on, on any rank:
            ``"wait"`` for it, or ``"skip"``: leave this one out on all ranks.
        on_staged: Called with the path, in the background, when the state has been copied. What it
            raises is logged and kept in the future; the save goes on.
        on_published: The same for when the checkpoint has its name; before the future is done.
        collectives: See :func:`ckptctl.save`; without, failures and ``"skip"`` are each rank's own.
        **options: ``overwrite``, ``files``, ``jobs``, ``memory``, ``sync``, ``checksum``,
            ``trusted`` of :func:`ckptctl.save`.

    Returns:
        The outcome: a ``concurrent.futures.Future`` with more in it.

    Raises:
        CkptError: The last save failed, or this one cannot begin; on every rank. A failure is
            raised once, whether or not the future was asked.
    """
    return _saver(process_group).save(
        state_dict,
        path,
        mode=mode,
        when_busy=when_busy,
        on_staged=on_staged,
        on_published=on_published,
        collectives=collectives,
        **options,
    )


_savers: dict[tuple[int, dist.ProcessGroup | None], AsyncSaver] = {}


def _saver(group: dist.ProcessGroup | None) -> AsyncSaver:
    """Return the saver of a group; those of groups that are no more let their memory go."""
    ready = dist.is_available() and dist.is_initialized()
    group = group or (dist.group.WORLD if ready else None)
    key = (os.getpid(), group)
    if key not in _savers:
        for other in [one for one in _savers if one[0] == key[0] and not _exists(one[1])]:
            _savers.pop(other).close()
        _savers[key] = AsyncSaver(group)
    return _savers[key]


def _exists(group: dist.ProcessGroup | None) -> bool:
    try:
        return group is None or bool(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):
        return False
