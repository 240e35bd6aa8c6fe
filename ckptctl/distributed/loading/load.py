"""Loading any checkpoint into a state dict that may be sharded over ranks: ``ckptctl.load``."""

from __future__ import annotations

from collections.abc import MutableMapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ckptctl import families
from ckptctl.distributed.group import coordinator
from ckptctl.distributed.loading.collective import CollectiveLoad
from ckptctl.distributed.loading.request import LoadCall
from ckptctl.ops.loading.options import LoadReport
from ckptctl.ops.ranks.coordinator import Alone
from ckptctl.options import keywords


@keywords(LoadCall)
def load(state_dict: MutableMapping[str, Any], path: str | Path, options: LoadCall) -> LoadReport:
    """Fill *state_dict* from a checkpoint of any format; all ranks call it.

    Tensors are filled in place, sharded ones with their part alone. Other leaves are replaced, and
    objects with ``load_state_dict`` are given theirs. Until every rank has planned all of it
    nothing changes; when a read fails later, on any rank, the tensors hold some of each.

    Args:
        state_dict: Nested dictionaries of tensors, DTensors, ShardedTensors and other leaves.
        path: The checkpoint: a directory or a file.
        options: All others.

    Returns:
        What this rank loaded.

    Raises:
        CkptError: On every rank, whichever failed.
    """
    group = coordinator(options.process_group)
    ranks = group if options.collectives else Alone()
    error: BaseException | None = None
    with ExitStack() as stack:
        try:
            stack.enter_context(families.using(options.converter))
        except BaseException as failure:  # the other ranks wait to be told
            error = failure
        return CollectiveLoad(ranks, group, options).into(state_dict, path, error)
