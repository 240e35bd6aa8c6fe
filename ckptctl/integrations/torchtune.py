"""torchtune: a checkpointer for its recipes (``torchtune/training/checkpointing``, 0.6.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtune import training
from torchtune.training.checkpointing import DistributedCheckpointer, ModelType

from ckptctl import families
from ckptctl.conversion.conversion_options import ConversionOptions
from ckptctl.distributed.run.keeper import STEP_SERIES, ResumePoint
from ckptctl.distributed.run.manager import CheckpointManager
from ckptctl.distributed.saving.converted import save_converted
from ckptctl.errors import SourceNotFoundError, UsageError
from ckptctl.integrations.whole import (
    create_all_ranks_group,
    create_single_rank_group,
    load_full_model,
    load_full_state_dict,
    restore_optimizer_param_keys,
)
from ckptctl.planner.mapping.adapters import ADAPTER_SUFFIX
from ckptctl.units import pluralize

LAYOUT = "torchtune"
RECIPE = "recipe"
TENSORS = (training.MODEL_KEY, training.ADAPTER_KEY, training.OPT_KEY)


class Checkpointer(DistributedCheckpointer):  # type: ignore[misc]
    """Checkpointer for torchtune's recipes, which loads models from any checkpoint.

    In a recipe's config, it replaces ``FullModelHFCheckpointer``::

        checkpointer:
          _component_: ckptctl.integrations.torchtune.Checkpointer
          checkpoint_dir: /models/Llama-3.2-1B
          output_dir: /runs/1
          model_type: LLAMA3_2

    Intermediate checkpoints are DCP directories ``OUTPUT_DIR/step-EPOCH``, written in the
    background. The last one is ``OUTPUT_DIR/epoch_EPOCH`` in an exchange format. Recipes that check
    for a ``DistributedCheckpointer``, such as ``full_finetune_distributed``, pass each rank its
    shards, and all ranks save. Other recipes gather everything on one rank, which saves it. Each
    rank loads everything.

    Args:
        checkpoint_dir: Checkpoint to train, of format ``hf``, ``meta``, ``dcp``, ... in any layout.
        output_dir: Folder of the run.
        model_type: Name of a member of torchtune's ``ModelType``.
        final_format: Format of the last checkpoint: ``hf`` or ``meta``.
        keep_last: Number of intermediate checkpoints to keep. None keeps all, and 0 keeps none
            after the last checkpoint is published.
        should_load_recipe_state: Whether to resume from the newest complete checkpoint in
            *output_dir*.

    Raises:
        UsageError: The model type is unknown.
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
        self._family = get_model_family(model_type)
        self._final_format = final_format
        self._keep_last = keep_last
        self._resume = should_load_recipe_state
        self._manager: CheckpointManager | None = None
        self._start: ResumePoint | None = None

    def load_checkpoint(self) -> dict[str, Any]:
        """Load the model in torchtune's layout and, to resume, the recipe's state.

        Returns:
            State with ``MODEL_KEY``, and from an intermediate checkpoint all other saved keys.

        Raises:
            SourceNotFoundError: Training should resume, but no complete checkpoint exists.
            CkptError: The checkpoint cannot be read.
        """
        self.wait()
        loaded: dict[str, Any] = {}
        if self._resume:
            keeper = self._open_manager(create_single_rank_group()).checkpoints
            self._start = newest = keeper.find_newest(STEP_SERIES)
            if newest is None:
                raise SourceNotFoundError(
                    "there is no checkpoint to resume from", where=str(keeper.root)
                )
            state: dict[str, Any] = restore_optimizer_param_keys(load_full_state_dict(newest.path))
            loaded = {**state.pop(RECIPE)[0], **state}
        if training.MODEL_KEY not in loaded:
            loaded[training.MODEL_KEY] = load_full_model(
                self._checkpoint_dir, LAYOUT, self._family, create_single_rank_group()
            )
        return loaded

    def save_checkpoint(
        self,
        state_dict: Mapping[str, Any],
        epoch: int,
        intermediate_checkpoint: bool = False,
        adapter_only: bool = False,
    ) -> None:
        """Save the state of a recipe. All ranks with shards call it, or the one with everything.

        With an adapter, an intermediate checkpoint contains it instead of the merged model.

        Args:
            state_dict: State with torchtune's keys.
            epoch: Number of the epoch.
            intermediate_checkpoint: Whether training can resume from it. The call returns when the
                state is copied.
            adapter_only: Whether to save only the adapter, for PEFT, as the last checkpoint. If
                False, it is ``adapter_epoch_EPOCH`` next to the merged model.

        Raises:
            CkptError: This save or the last one failed.
        """
        model = state_dict.get(training.MODEL_KEY, {})
        sharded = any(isinstance(tensor, DTensor) for tensor in model.values())
        saver = self._get_manager(sharded=sharded)
        if intermediate_checkpoint:
            state = {**state_dict}
            if sharded:  # gathered states already have parameter names
                state[training.OPT_KEY] = replace_param_numbers_by_names(
                    state_dict[training.OPT_KEY], [*model]
                )
            saver.save(epoch, build_intermediate_state(state))
            return
        if training.ADAPTER_KEY in state_dict:
            name = f"epoch_{epoch}" if adapter_only else f"adapter_epoch_{epoch}"
            self.wait()
            save_adapter(state_dict, self._output_dir / name, self._family, self._checkpoint_dir)
        if not adapter_only:
            saver.save_final(
                {training.MODEL_KEY: state_dict[training.MODEL_KEY]},
                self._output_dir / f"epoch_{epoch}",
                assets=self._checkpoint_dir,
            )

    def wait(self) -> None:
        """Wait for the running save.

        Raises:
            CkptError: The save failed.
        """
        if self._manager:
            self._manager.wait()

    def _get_manager(self, *, sharded: bool) -> CheckpointManager:
        """Return the manager, which the first call creates and resumes from the loaded checkpoint.

        If *sharded* is set, all ranks use it, otherwise only this rank does.
        """
        if self._manager is None:
            self._manager = self._open_manager(
                create_all_ranks_group() if sharded else create_single_rank_group()
            )
            if self._start and (not dist.is_initialized() or dist.get_rank() == 0):
                self._manager.checkpoints.record_resume(self._start.entry, self._start.step)
        return self._manager

    def _open_manager(self, group: dist.ProcessGroup | None) -> CheckpointManager:
        return CheckpointManager(
            self._output_dir,
            keep_last=self._keep_last,
            final_format=self._final_format,
            model_type=self._family,
            process_group=group,
            overwrite=True,
        )


def get_model_family(model_type: str) -> str:
    """Return the model family of a torchtune model type.

    Raises:
        UsageError: The model type is unknown.
    """
    if model_type not in ModelType.__members__:
        raise UsageError(
            f"unknown torchtune model type {model_type!r}",
            hint=f"use one of {', '.join(ModelType.__members__)}",
        )
    return families.family(str(ModelType[model_type].value)).name


def build_intermediate_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Build the state of an intermediate checkpoint.

    All entries of the recipe's state except tensors are stored as a single value.
    """
    skipped = {training.MODEL_KEY} if training.ADAPTER_KEY in state else set()
    tensors = {key: state[key] for key in TENSORS if key in state and key not in skipped}
    rest = {key: value for key, value in state.items() if key not in TENSORS}
    # DCP does not flatten tuples, so their contents keep keys and empty containers.
    return {**tensors, RECIPE: (rest,)}


def replace_param_numbers_by_names(
    optimizer: Mapping[str, Any], parameters: Sequence[str]
) -> Mapping[str, Any]:
    """Return an optimizer state with parameter names instead of numbers.

    Args:
        optimizer: Result of ``Optimizer.state_dict``, possibly with names already, or one per
            parameter if optimizer steps are fused into the backward pass.
        parameters: Names of the model's parameters, in order.

    Raises:
        UsageError: The numbers do not match the parameters.
    """
    if "param_groups" not in optimizer:
        return {
            name: replace_param_numbers_by_names(entry, [name]) for name, entry in optimizer.items()
        }
    groups = optimizer["param_groups"]
    numbers = [number for group in groups for number in group["params"]]
    if all(isinstance(entry, str) for entry in numbers):
        return optimizer
    if sorted(numbers) != [*range(len(parameters))]:
        raise UsageError(
            "the parameters of the optimizer do not match the model",
            where=training.OPT_KEY,
            why=f"the optimizer has {pluralize(len(numbers), 'parameter')}, but the model has "
            f"{len(parameters):,}",
        )
    return {
        "state": {parameters[number]: entry for number, entry in optimizer["state"].items()},
        "param_groups": [
            {**group, "params": [parameters[number] for number in group["params"]]}
            for group in groups
        ],
    }


def save_adapter(state: Mapping[str, Any], out: Path, model_type: str, assets: Path) -> None:
    """Save the adapter in *state* to *out* in PEFT's format, with the config files in *assets*."""
    alpha = state.get(training.ADAPTER_CONFIG, {}).get("lora_alpha")
    options = ConversionOptions(
        to="peft", model_type=model_type + ADAPTER_SUFFIX, lora_alpha=alpha, assets=assets
    )
    save_converted(dict(state[training.ADAPTER_KEY]), out, options, create_single_rank_group())
