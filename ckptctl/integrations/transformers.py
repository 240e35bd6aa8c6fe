"""transformers: a callback with which its Trainer saves through a ``CheckpointManager``."""

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
MODEL = "model."
PEFT = "base_model.model."
"""How names in a checkpoint begin, and those of a model of PEFT's."""


class CheckpointCallback(TrainerCallback):  # type: ignore[misc]
    """Saves when the manager's ``save_every`` says so, and when the Trainer has saved itself.

    As the Trainer's own checkpoints, these hold what was logged and evaluated at their step, and
    the random numbers after that. ``TrainingArguments(save_strategy="no")`` leaves saving to the
    callback. Where the manager's ``preemption`` announces the end, training stops after a save of
    that step, and no model is written as *final*. To go on::

        trainer.train(resume_from_checkpoint=callback.resume_from())

    Args:
        manager: Whose checkpoints these are; it is waited for when training ends.
        final: Where the trained model appears then, in the manager's format, with configuration
            and tokenizer; None: nowhere.
    """

    def __init__(self, manager: CheckpointManager, final: str | Path | None = None) -> None:
        self._manager = manager
        self._final = final
        self._saved: set[int] = set()
        self._due: dict[str, Any] | None = None  # random numbers of a step that will be saved
        self._preempted = False
        self._rated: dict[str, float] = {}
        self._position: tempfile.TemporaryDirectory[str] | None = None
        self._model: Any = None  # that of the Trainer, once there is one

    def on_init_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Take note of the model that is going to be trained."""
        self._model = parts.get("model")

    def resume_from(self) -> str | None:
        """Return a folder with which ``Trainer.train`` goes on from the newest complete checkpoint.

        That is a temporary folder with the position alone (the Trainer's state and random numbers;
        of an adapter of PEFT's the tensors as they are now): model, optimizer and scheduler are
        loaded when training begins. All ranks call it, when there is a Trainer.

        Returns:
            None: There is no checkpoint yet.

        Raises:
            CkptError: No checkpoint is complete, or the newest one cannot be read.
        """
        found = position()
        resumed = self._manager.load_latest(found, strict="state")
        if resumed is None:
            return None
        tensors = open_checkpoint(resumed.path).tensors
        names = [name.removeprefix(MODEL) for name in tensors if name.startswith(MODEL)]
        self._position = tempfile.TemporaryDirectory(prefix="ckptctl-")
        write_position(found, names, Path(self._position.name), self._model)
        return self._position.name

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Load model, optimizer and scheduler where training goes on."""
        if self._position is None:
            return
        held = tensors(parts)
        self._manager.load_latest(held, strict="state")
        model, optimizer = parts["model"], plain(parts["optimizer"])
        set_state_dict(
            model,
            optimizer,
            model_state_dict=held["model"],
            optim_state_dict=held["optimizer"],
        )
        parts["lr_scheduler"].load_state_dict(held["lr_scheduler"]["state"][0])
        self._saved.add(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Take note of a step that the manager names: the Trainer logs and evaluates it next.

        When the run is preempted, this step is the last one; it is not evaluated.
        """
        self._preempted = self._manager.preempted()
        if self._preempted:
            control.should_training_stop, control.should_evaluate = True, False
        if self._manager.should_save(state.global_step) or self._preempted:
            self._due, self._rated = random_numbers(), {}

    def on_log(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Take note of the random numbers after it."""
        if self._due is not None:
            self._due = random_numbers()

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Mapping[str, Any], **parts: Any
    ) -> None:
        """Rate the checkpoint of this step, if there is one or will be."""
        rated = {key: one for key, one in metrics.items() if isinstance(one, int | float)}
        if self._due is not None:
            self._due, self._rated = random_numbers(), rated
        elif state.global_step in self._saved:
            with suppress(SourceNotFoundError):  # skipped, removed, or loaded from elsewhere
                self._manager.rate(state.global_step, rated)

    def on_save(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Save where the Trainer does, unless that step was saved already."""
        self._save(state, parts, self._due or random_numbers())

    def on_step_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Save the step before, if it is due."""
        self._save(state, parts, self._due)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Save the last step of the epoch, if it is due."""
        self._save(state, parts, self._due)

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

    def _save(self, state: Any, parts: Mapping[str, Any], now: dict[str, Any] | None) -> None:
        """Save with *now* as the random numbers; None: nothing is due."""
        step, rated = state.global_step, self._rated
        self._due, self._rated = None, {}
        if now is None or step in self._saved:
            return
        self._saved.add(step)
        held = {**tensors(parts), **position(state, now)}
        self._manager.save(step, held, rated, urgent=self._preempted)


def tensors(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of model, optimizer and scheduler, as callbacks are handed them."""
    model, optimizer = get_state_dict(parts["model"], plain(parts["optimizer"]))
    # A tuple is a leaf to DCP: what is in it keeps its keys and its empty containers.
    return {
        "model": model,
        "optimizer": optimizer,
        "lr_scheduler": {"state": (parts["lr_scheduler"].state_dict(),)},
    }


def plain(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer that accelerate has wrapped."""
    found: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return found


def position(state: Any = None, numbers: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return where training is; without *state* the place for that in a state dict."""
    now = None if state is None else ({"state": _json(state), "rng": numbers},)
    return {"trainer": {"position": now}}


def write_position(
    found: Mapping[str, Any], names: Sequence[str], folder: Path, model: Any = None
) -> None:
    """Write the Trainer's own files of a checkpoint, without tensors.

    Its index says of all *names* that they are in a file that is empty: the Trainer misses none.
    PEFT understands no index: its *model* writes the adapter that it has.
    """
    (now,) = found["trainer"]["position"]
    (folder / STATE_FILE).write_text(now["state"])
    name = f"rng_state_{dist.get_rank()}.pth" if _several() else "rng_state.pth"
    torch.save(now["rng"], folder / name)
    if any(one.startswith(PEFT) for one in names):
        if hasattr(model, "peft_config"):
            model.save_pretrained(str(folder), save_embedding_layers=False)
        else:
            save_file({}, folder / "model.safetensors", metadata={"format": "pt"})
        return
    save_file({}, folder / "none.safetensors", metadata={"format": "pt"})
    index = json.dumps({"weight_map": dict.fromkeys(names, "none.safetensors")})
    (folder / "model.safetensors.index.json").write_text(index)


def _several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _json(state: Any) -> str:
    with tempfile.TemporaryDirectory(prefix="ckptctl-") as folder:
        state.save_to_json(str(Path(folder) / STATE_FILE))
        return (Path(folder) / STATE_FILE).read_text()


def random_numbers() -> dict[str, Any]:
    """Return the content of ``rng_state.pth``."""
    found: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        cuda = torch.cuda.random
        found["cuda"] = cuda.get_rng_state() if _several() else cuda.get_rng_state_all()
    return found
