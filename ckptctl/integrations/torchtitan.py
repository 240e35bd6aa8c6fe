"""torchtitan: its checkpoint manager, saving and loading with ``ckptctl``.

Only I/O is replaced: ``dcp_save``, ``dcp_load``, the choice of the newest checkpoint and the
removal of old ones (``torchtitan/components/checkpointer/dcp.py``, 0.3.0). Names (``step-N``), the
schedule and the options stay those of torchtitan.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.checkpointer import dcp
from torchtitan.components.checkpointer.base import MODEL
from torchtitan.tools.utils import GarbageCollection

from ckptctl.distributed.background.async_save import AsyncSaver
from ckptctl.distributed.group import get_rank_collectives
from ckptctl.distributed.loading.load import load
from ckptctl.distributed.run.keeper import STEP_SERIES, RunCheckpoints
from ckptctl.distributed.run.manager_options import MAX_FAILURES
from ckptctl.planner.retention import Policy
from ckptctl.ranks.coordinator import run_on_rank_zero
from ckptctl.save_load.loading.load_options import Strict
from ckptctl.storage.paths import parse_path


class CheckpointManager(dcp.CheckpointManager):  # type: ignore[misc]
    """Checkpoint manager of torchtitan with atomic saves, which then remove old checkpoints.

    ``initial_load_path`` can be a checkpoint of any format and layout, and ``initial_load_in_hf``
    needs no adapter. With ``last_save_in_hf``, the code of torchtitan writes.

    Args:
        config: Config of torchtitan.
        **parts: Arguments of torchtitan's trainer.
    """

    async_mode: dcp.AsyncMode

    @dataclass(kw_only=True, slots=True)
    class Config(dcp.CheckpointManager.Config):  # type: ignore[misc]
        """Options of torchtitan, from which this class is built."""

    def __init__(self, config: Config, **parts: Any) -> None:
        super().__init__(config, **parts)
        if not self.enable:
            return
        if self.async_mode == dcp.AsyncMode.ASYNC_WITH_PINNED_MEM:
            # In either mode, the state is copied to pinned memory before `save` returns.
            self.async_mode = dcp.AsyncMode.ASYNC
        self._saver = AsyncSaver(self.pg, max_failures=MAX_FAILURES)
        self._keeper = RunCheckpoints(
            Path(self.folder), Policy(self.keep_latest_k or None), (), sync=True
        )

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: dcp.AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future[Any] | None:
        """Save a checkpoint, with the arguments of torchtitan's method.

        Raises:
            CkptError: The save failed, and nothing was published. It is raised on every rank.
        """
        if to_hf:
            super().dcp_save(
                state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf
            )
            return None
        path, synchronous = parse_path(checkpoint_id), async_mode == dcp.AsyncMode.DISABLED
        saver, options = self._saver, {"beside": partial(self._keeper.build_sidecar_files, {})}
        future = self._keeper.save(
            state_dict, path, get_rank_collectives(), None if synchronous else saver, options
        )
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return None if synchronous else future

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Load a checkpoint of any format into *state_dict* and the model.

        Args:
            state_dict: Tensors of the model, and other state of torchtitan.
            checkpoint_id: Path of the checkpoint.
            from_hf: Whether floating-point tensors may be cast to the dtypes of the model.
            from_quantized: Whether quantized tensors are dequantized.

        Raises:
            CkptError: The checkpoint cannot be loaded. The error is raised on every rank.
        """
        dequantize = "fp32" if from_quantized else None
        # Keys that the user excludes from the load are in the checkpoint anyway.
        strict: Strict = "state" if getattr(self, "exclude_from_loading", ()) else True
        load(state_dict, checkpoint_id, cast=from_hf, dequantize=dequantize, strict=strict)
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state_dict)
        path = Path(checkpoint_id)
        if path.parent == Path(self.folder):
            step = int(path.name.removeprefix(STEP_SERIES))
            run_on_rank_zero(get_rank_collectives(), lambda: self._keeper.record_resume(path, step))

    def _find_load_step(self, folder: str = "") -> int:
        """Return the step of the newest complete checkpoint that is not abandoned.

        Raises:
            UnsupportedError: The verdict on the newest one is unknown. It is raised on every rank.
        """
        step: int = super()._find_load_step(folder)
        if folder or step < 0:
            return step
        ranks = get_rank_collectives()
        newest = ranks.broadcast(
            run_on_rank_zero(ranks, lambda: self._keeper.find_newest(STEP_SERIES))
        )
        return newest.step if newest else step

    def _purge_stale_checkpoints(self) -> None:
        """Do nothing, because old checkpoints are removed after a newer one is published."""

    def _close(self) -> None:
        if hasattr(self, "_keeper"):
            try:
                self._saver.close()
            finally:
                self._keeper.wait()
        super()._close()
