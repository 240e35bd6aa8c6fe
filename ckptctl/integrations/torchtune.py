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
from ckptctl.distributed.run.keeper import SERIES, Start
from ckptctl.distributed.run.manager import CheckpointManager
from ckptctl.distributed.saving.converted import save_converted
from ckptctl.errors import SourceNotFoundError, UsageError
from ckptctl.integrations.whole import all_ranks, own_group, whole, whole_model, with_numbers
from ckptctl.planner.mapping.adapters import SUFFIX
from ckptctl.units import counted

LAYOUT = "torchtune"
RECIPE = "recipe"
TENSORS = (training.MODEL_KEY, training.ADAPTER_KEY, training.OPT_KEY)


class Checkpointer(DistributedCheckpointer):  # type: ignore[misc]
    """Loads torchtune's models from any checkpoint, and saves as its recipes ask.

    In a recipe's configuration it stands where ``FullModelHFCheckpointer`` does::

        checkpointer:
          _component_: ckptctl.integrations.torchtune.Checkpointer
          checkpoint_dir: /models/Llama-3.2-1B
          output_dir: /runs/1
          model_type: LLAMA3_2

    The checkpoint of an epoch that is not the last is a DCP directory ``OUTPUT_DIR/step-EPOCH``,
    written in the background; the last one is ``OUTPUT_DIR/epoch_EPOCH``, in the format that others
    use. A recipe that looks whether its checkpointer is a ``DistributedCheckpointer``, as
    ``full_finetune_distributed`` does, hands every rank its shards, and all ranks save theirs.
    Others gather everything on one rank, which saves it. Each rank loads everything.

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
        self._begun: Start | None = None

    def load_checkpoint(self) -> dict[str, Any]:
        """Return the model in torchtune's layout and, where training goes on, the recipe's state.

        Returns:
            ``MODEL_KEY``, and of an intermediate checkpoint also what else was saved.

        Raises:
            SourceNotFoundError: Training is to go on, and there is nothing that is complete.
            CkptError: It cannot be read.
        """
        self.wait()
        found: dict[str, Any] = {}
        if self._resume:
            keeper = self._opened(own_group()).keeper
            self._begun = newest = keeper.newest(SERIES)
            if newest is None:
                raise SourceNotFoundError(
                    "there is no checkpoint to resume from", where=str(keeper.root)
                )
            state: dict[str, Any] = with_numbers(whole(newest.path))
            found = {**state.pop(RECIPE)[0], **state}
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
        """Save the state of a recipe; all ranks call it where they have shards, else one.

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
        model = state_dict.get(training.MODEL_KEY, {})
        sharded = any(isinstance(one, DTensor) for one in model.values())
        saver = self._saver(sharded=sharded)
        if intermediate_checkpoint:
            state = {**state_dict}
            if sharded:  # where they are gathered, the recipe names them
                state[training.OPT_KEY] = named(state_dict[training.OPT_KEY], [*model])
            saver.save(epoch, intermediate(state))
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
        """Wait for the checkpoint that is being written.

        Raises:
            CkptError: It failed.
        """
        if self._manager:
            self._manager.wait()

    def _saver(self, *, sharded: bool) -> CheckpointManager:
        """Return what saves, for all ranks or for this one alone; it goes on from what was read."""
        if self._manager is None:
            self._manager = self._opened(all_ranks() if sharded else own_group())
            if self._begun and (not dist.is_initialized() or dist.get_rank() == 0):
                self._manager.keeper.resume_from(self._begun.entry, self._begun.step)
        return self._manager

    def _opened(self, group: dist.ProcessGroup | None) -> CheckpointManager:
        return CheckpointManager(
            self._output_dir,
            keep_last=self._keep_last,
            final_format=self._final_format,
            model_type=self._family,
            process_group=group,
            overwrite=True,
        )


def family(model_type: str) -> str:
    """Return the family of a model type of torchtune."""
    if model_type not in ModelType.__members__:
        raise UsageError(
            f"unknown torchtune model type {model_type!r}",
            hint=f"use one of {', '.join(ModelType.__members__)}",
        )
    return families.family(str(ModelType[model_type].value)).name


def intermediate(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an intermediate checkpoint: tensors under torchtune's keys, the rest as one leaf."""
    left_out = {training.MODEL_KEY} if training.ADAPTER_KEY in state else set()
    kept = {key: state[key] for key in TENSORS if key in state and key not in left_out}
    rest = {key: one for key, one in state.items() if key not in TENSORS}
    # A tuple is a leaf to DCP: what is in it keeps its keys and its empty containers.
    return {**kept, RECIPE: (rest,)}


def named(optimizer: Mapping[str, Any], parameters: Sequence[str]) -> Mapping[str, Any]:
    """Return the state of an optimizer of all parameters with their names instead of numbers.

    Args:
        optimizer: As ``Optimizer.state_dict`` makes it, or with names already; or, where each step
            is part of the backward pass, one for each parameter.
        parameters: Names of the model's parameters, in their order.

    Raises:
        UsageError: Numbers do not tell which parameters are meant.
    """
    if "param_groups" not in optimizer:
        return {name: named(one, [name]) for name, one in optimizer.items()}
    groups = optimizer["param_groups"]
    numbers = [number for group in groups for number in group["params"]]
    if all(isinstance(one, str) for one in numbers):
        return optimizer
    if sorted(numbers) != [*range(len(parameters))]:
        raise UsageError(
            "the parameters of the optimizer do not match the model",
            where=training.OPT_KEY,
            why=f"the optimizer has {counted(len(numbers), 'parameter')}, but the model has "
            f"{len(parameters):,}",
        )
    return {
        "state": {parameters[number]: one for number, one in optimizer["state"].items()},
        "param_groups": [
            {**group, "params": [parameters[number] for number in group["params"]]}
            for group in groups
        ],
    }


def save_adapter(state: Mapping[str, Any], out: Path, model_type: str, assets: Path) -> None:
    """Save the adapter in *state* as PEFT has it."""
    alpha = state.get(training.ADAPTER_CONFIG, {}).get("lora_alpha")
    how = ConversionOptions(
        to="peft", model_type=model_type + SUFFIX, lora_alpha=alpha, assets=assets
    )
    save_converted(dict(state[training.ADAPTER_KEY]), out, how, own_group())
