"""A state as others use it: saved by all ranks, and converted by rank 0."""

from __future__ import annotations

import logging
from pathlib import Path

import torch.distributed as dist

from ckptctl.distributed.group import coordinator
from ckptctl.distributed.saving.save import save
from ckptctl.distributed.state import StateDict
from ckptctl.errors import CkptError
from ckptctl.ops.conversion.convert import plan_conversion, run_conversion
from ckptctl.ops.conversion.options import ConversionOptions
from ckptctl.ops.ranks.coordinator import on_first
from ckptctl.storage import trash
from ckptctl.storage.destinations import check_target, destination
from ckptctl.storage.paths import home_expanded

_log = logging.getLogger("ckptctl")


def save_converted(
    state: StateDict,
    out: str | Path,
    options: ConversionOptions,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Save *state* as *options* say; all ranks call it, and it returns when it is published."""
    ranks = coordinator(group)
    target = destination(home_expanded(Path(out)).absolute())
    stage = target.parent / f".{target.name}.ckptctl-final"
    alone = options.only == "model" and "model" in state
    kept: StateDict = {"model": state["model"]} if alone else state

    def make_room() -> None:
        if not options.overwrite:
            check_target(target, overwrite=False, is_checkpoint=lambda _: False)
        trash.remove(stage)

    def convert() -> None:
        run_conversion(plan_conversion(stage, target, options))

    on_first(ranks, make_room)
    try:
        save(kept, stage, process_group=group)
        on_first(ranks, convert)
    finally:
        if ranks.rank == 0:
            try:
                trash.remove(stage)
            except CkptError as error:
                _log.warning("%s could not be removed: %s", stage, error)
    return target
