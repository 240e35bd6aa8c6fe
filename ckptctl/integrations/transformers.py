"""transformers: a callback that saves the Trainer's state with a ``CheckpointManager``."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import TrainerCallback

from ckptctl.distributed.run.manager import CheckpointManager
from ckptctl.errors import SourceNotFoundError
from ckptctl.formats import open_checkpoint

STATE_FILE = "trainer_state.json"
MODEL_PREFIX = "model."
PEFT_PREFIX = "base_model.model."
"""Prefix of the tensor names of a PEFT model.

In a checkpoint, the names of all tensors of the model also have the prefix ``MODEL_PREFIX``.
"""


class CheckpointCallback(TrainerCallback):  # type: ignore[misc]
    """Callback that saves when the manager's rules require it, and when the Trainer saves.

    Like the Trainer's own checkpoints, these contain the logs and evaluations of their step, and
    the RNG states after it. Use ``TrainingArguments(save_strategy="no")`` to leave saving to the
    callback. After a ``preemption`` notice, training stops with a save of the current step, and
    *final* is not written. To resume::

        trainer.train(resume_from_checkpoint=callback.resume_from())

    Args:
        manager: Manager that saves. The callback waits for it when training ends.
        final: Destination of the trained model in the manager's format, with config and tokenizer,
            or None to skip it.
    """

    def __init__(self, manager: CheckpointManager, final: str | Path | None = None) -> None:
        self._manager = manager
        self._final = final
        self._saved: set[int] = set()
        self._due: dict[str, Any] | None = None  # RNG states of a step that will be saved
        self._preempted = False
        self._metrics: dict[str, float] = {}
        self._position: tempfile.TemporaryDirectory[str] | None = None
        self._model: Any = None  # the Trainer's model, once it exists

    def on_init_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Store a reference to the model of the Trainer."""
        self._model = parts.get("model")

    def resume_from(self) -> str | None:
        """Return a folder from which ``Trainer.train`` resumes at the newest complete checkpoint.

        The temporary folder contains only the Trainer's state and RNG states (and with PEFT, the
        current adapter). Model, optimizer and scheduler are loaded when training begins. All ranks
        call this method after the Trainer is created.

        Returns:
            The folder, or None without a checkpoint.

        Raises:
            CkptError: No checkpoint is complete, or the newest one cannot be read.
        """
        state = build_trainer_state()
        resumed = self._manager.load_latest(state, strict="state")
        if resumed is None:
            return None
        tensors = open_checkpoint(resumed.path).tensors
        names = [
            name.removeprefix(MODEL_PREFIX) for name in tensors if name.startswith(MODEL_PREFIX)
        ]
        self._position = tempfile.TemporaryDirectory(prefix="ckptctl-")
        write_resume_files(state, names, Path(self._position.name), self._model)
        return self._position.name

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Load model, optimizer and scheduler if training resumes."""
        if self._position is None:
            return
        model_state = collect_model_state(parts)
        self._manager.load_latest(model_state, strict="state")
        model, optimizer = parts["model"], unwrap_optimizer(parts["optimizer"])
        set_state_dict(
            model,
            optimizer,
            model_state_dict=model_state["model"],
            optim_state_dict=model_state["optimizer"],
        )
        parts["lr_scheduler"].load_state_dict(model_state["lr_scheduler"]["state"][0])
        self._saved.add(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Mark the step as due if the manager requires it, before it is logged and evaluated.

        If the run is preempted, this step is the last one, and is not evaluated.
        """
        self._preempted = self._manager.preempted()
        if self._preempted:
            control.should_training_stop, control.should_evaluate = True, False
        if self._manager.should_save(state.global_step) or self._preempted:
            self._due, self._metrics = get_rng_states(), {}

    def on_log(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Update the RNG states of a due step after logging."""
        if self._due is not None:
            self._due = get_rng_states()

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Mapping[str, Any], **parts: Any
    ) -> None:
        """Add metrics to the checkpoint of this step, if one is saved or due."""
        numeric_metrics = {
            key: value for key, value in metrics.items() if isinstance(value, int | float)
        }
        if self._due is not None:
            self._due, self._metrics = get_rng_states(), numeric_metrics
        elif state.global_step in self._saved:
            with suppress(SourceNotFoundError):  # skipped, removed, or loaded from elsewhere
                self._manager.rate(state.global_step, numeric_metrics)

    def on_save(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Save when the Trainer does, unless the step is already saved."""
        self._save_step(state, parts, self._due or get_rng_states())

    def on_step_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Save the previous step if it is due."""
        self._save_step(state, parts, self._due)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Save the last step of the epoch if it is due."""
        self._save_step(state, parts, self._due)

    def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Wait for the last save, and write the final model."""
        if self._position is not None:
            self._position.cleanup()
            self._position = None
        self._manager.wait()
        if self._final is None or self._preempted:
            return
        model, tokenizer = parts["model"], parts.get("processing_class")
        with tempfile.TemporaryDirectory(prefix="ckptctl-") as assets:
            model.config.save_pretrained(assets)
            if tokenizer is not None:
                tokenizer.save_pretrained(assets)
            self._manager.save_final({"model": model.state_dict()}, self._final, assets=assets)

    def _save_step(
        self, state: Any, parts: Mapping[str, Any], rng_states: dict[str, Any] | None
    ) -> None:
        """Save the current step with the RNG states, or do nothing if they are None."""
        step, step_metrics = state.global_step, self._metrics
        self._due, self._metrics = None, {}
        if rng_states is None or step in self._saved:
            return
        self._saved.add(step)
        full_state = {**collect_model_state(parts), **build_trainer_state(state, rng_states)}
        self._manager.save(step, full_state, step_metrics, urgent=self._preempted)


def collect_model_state(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Collect the state of model, optimizer and scheduler from a callback's arguments."""
    model, optimizer = get_state_dict(parts["model"], unwrap_optimizer(parts["optimizer"]))
    # DCP does not flatten tuples, so their contents keep keys and empty containers.
    return {
        "model": model,
        "optimizer": optimizer,
        "lr_scheduler": {"state": (parts["lr_scheduler"].state_dict(),)},
    }


def unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the torch optimizer, unwrapped if accelerate has wrapped it."""
    unwrapped: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return unwrapped


def build_trainer_state(
    state: Any = None, rng_states: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Build the entry for the Trainer's state and RNG states, or an empty one to load into."""
    entry = None if state is None else ({"state": _to_json(state), "rng": rng_states},)
    return {"trainer": {"position": entry}}


def write_resume_files(
    state: Mapping[str, Any], tensor_names: Sequence[str], folder: Path, model: Any = None
) -> None:
    """Write the Trainer's own files of a checkpoint, without tensors.

    The index maps all *tensor_names* to an empty file, so that the Trainer reports no missing
    tensors. PEFT does not support an index, so a PEFT *model* writes its current adapter.
    """
    (entry,) = state["trainer"]["position"]
    (folder / STATE_FILE).write_text(entry["state"])
    name = f"rng_state_{dist.get_rank()}.pth" if _is_distributed() else "rng_state.pth"
    torch.save(entry["rng"], folder / name)
    if any(name_prefix.startswith(PEFT_PREFIX) for name_prefix in tensor_names):
        if hasattr(model, "peft_config"):
            model.save_pretrained(str(folder), save_embedding_layers=False)
        else:
            save_file({}, folder / "model.safetensors", metadata={"format": "pt"})
        return
    save_file({}, folder / "none.safetensors", metadata={"format": "pt"})
    index = json.dumps({"weight_map": dict.fromkeys(tensor_names, "none.safetensors")})
    (folder / "model.safetensors.index.json").write_text(index)


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _to_json(state: Any) -> str:
    with tempfile.TemporaryDirectory(prefix="ckptctl-") as folder:
        state.save_to_json(str(Path(folder) / STATE_FILE))
        return (Path(folder) / STATE_FILE).read_text()


def get_rng_states() -> dict[str, Any]:
    """Return the current RNG states, in the format of the Trainer's ``rng_state.pth``."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        cuda = torch.cuda.random
        states["cuda"] = cuda.get_rng_state() if _is_distributed() else cuda.get_rng_state_all()
    return states
