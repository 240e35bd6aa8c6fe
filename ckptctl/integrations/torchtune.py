"""torchtune: a checkpointer for its recipes (``torchtune/training/checkpointing``, 0.6.1)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtune import training

from ckptctl.distributed.manager import CheckpointManager
from ckptctl.integrations.alone import own_group
from ckptctl.integrations.torchtune_state import (
    LAYOUT,
    family,
    intermediate,
    newest_state,
    save_adapter,
)
from ckptctl.integrations.whole import whole_model


class Checkpointer:
    """Loads what torchtune trains from any checkpoint, and saves as its recipes ask.

    In a recipe's configuration it stands where ``FullModelHFCheckpointer`` does::

        checkpointer:
          _component_: ckptctl.integrations.torchtune.Checkpointer
          checkpoint_dir: /models/Llama-3.2-1B
          output_dir: /runs/1
          model_type: LLAMA3_2

    The checkpoint of an epoch that is not the last is a DCP directory ``OUTPUT_DIR/step-EPOCH``,
    written in the background; the last one is ``OUTPUT_DIR/epoch_EPOCH``, in the format that others
    use. As in torchtune one rank saves, which holds everything; each loads everything.

    Args:
        checkpoint_dir: What is trained: ``hf``, ``meta``, ``dcp``, ... in any layout.
        output_dir: The folder of the run.
        model_type: Name of one of torchtune's ``ModelType``.
        final_format: Format of the last one: ``hf`` or ``meta``.
        keep_last: How many intermediate ones stay; None: all, 0: none when the last is there.
        should_load_recipe_state: Whether to go on from the newest complete one in *output_dir*.

    Raises:
        UsageError: The model type is not known here.
    """

    def __init__(
        self,
        checkpoint_dir: str,
        output_dir: str,
        model_type: str,
        final_format: str = "hf",
        keep_last: int | None = None,
        should_load_recipe_state: bool = False,
    ) -> None:
        self._checkpoint_dir = Path(checkpoint_dir)
        self._output_dir = Path(output_dir)
        self._family = family(model_type)
        self._final_format = final_format
        self._keep_last = keep_last
        self._resume = should_load_recipe_state
        self._manager: CheckpointManager | None = None

    def load_checkpoint(self) -> dict[str, Any]:
        """Return the model in torchtune's layout and, where training goes on, the recipe's state.

        Returns:
            ``MODEL_KEY``, and of an intermediate checkpoint also what else was saved.

        Raises:
            SourceNotFoundError: Training is to go on, and there is nothing that is complete.
            CkptError: It cannot be read.
        """
        self.wait()
        found = newest_state(self._output_dir) if self._resume else {}
        if training.MODEL_KEY not in found:
            found[training.MODEL_KEY] = whole_model(
                self._checkpoint_dir, LAYOUT, self._family, own_group()
            )
        return found

    def save_checkpoint(
        self,
        state_dict: Mapping[str, Any],
        epoch: int,
        intermediate_checkpoint: bool = False,
        adapter_only: bool = False,
    ) -> None:
        """Save what a recipe made of its state.

        With an adapter an intermediate checkpoint has that and not the merged model.

        Args:
            state_dict: Of torchtune's keys.
            epoch: Its number.
            intermediate_checkpoint: Whether training goes on from it: returns when it is copied.
            adapter_only: Whether the last one is the adapter alone, for PEFT; else that is
                ``adapter_epoch_EPOCH`` beside the merged model.

        Raises:
            CkptError: This save failed, or the last one did.
        """
        if intermediate_checkpoint:
            self._saver().save(epoch, intermediate(state_dict))
            return
        if training.ADAPTER_KEY in state_dict:
            name = f"epoch_{epoch}" if adapter_only else f"adapter_epoch_{epoch}"
            self.wait()
            save_adapter(state_dict, self._output_dir / name, self._family, self._checkpoint_dir)
        if not adapter_only:
            self._saver().save_final(
                {training.MODEL_KEY: state_dict[training.MODEL_KEY]},
                self._output_dir / f"epoch_{epoch}",
                assets=self._checkpoint_dir,
            )

    def wait(self) -> None:
        """Wait for the checkpoint that is being written.

        Raises:
            CkptError: It failed.
        """
        if self._manager:
            self._manager.wait()

    def _saver(self) -> CheckpointManager:
        if self._manager is None:
            self._manager = CheckpointManager(
                self._output_dir,
                keep_last=self._keep_last,
                final_format=self._final_format,
                model_type=self._family,
                process_group=own_group(),
                overwrite=True,
            )
        return self._manager
