"""Training with the Trainer of transformers; imported where it is."""

from __future__ import annotations

import itertools
import json
import logging
import re
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from ckptctl.distributed.run.manager import CheckpointManager
from ckptctl.integrations.transformers import CheckpointCallback
from tests.checkpoints.readers import differences, load_any_reference
from tests.oracle.trainers.jobs.environment import announce

CONFIG = LlamaConfig(
    vocab_size=37,
    hidden_size=12,
    intermediate_size=17,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=16,
    attention_dropout=0.3,
)

ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": ["q_proj", "down_proj"]},
    "dora": {"target_modules": ["v_proj"], "use_dora": True, "modules_to_save": ["norm"]},
}
HISTORY = "history.json"
SPEED = re.compile(r"runtime|per_second")


def trained(
    root: Path,
    steps: int,
    final: Path | None = None,
    *,
    resume: bool = False,
    manager_options: dict[str, Any] | None = None,
    stop: int | None = None,
    adapter: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Train up to *steps* of six, saving each, and return weights and optimizer."""
    torch.manual_seed(1 if resume else 0)
    rows = torch.randint(37, (12, 8), generator=torch.Generator().manual_seed(1))
    arguments = TrainingArguments(
        output_dir=str(root / "trainer"),
        per_device_train_batch_size=2,
        max_steps=6,
        learning_rate=1e-2,
        seed=7,
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        disable_tqdm=True,
        **{"save_strategy": "no", "logging_strategy": "no", **options},
    )
    data: Any = [{"input_ids": row, "labels": row} for row in rows]
    rules = {"keep_last": 2, "save_every": 1, "sync": False, **(manager_options or {})}
    with CheckpointManager(root, **rules) as manager:
        callback = CheckpointCallback(manager, final)
        trainer = Trainer(
            model=made(adapter),
            args=arguments,
            train_dataset=data,
            eval_dataset=data[:2],
            callbacks=[callback, Stop(stop or steps)],
        )
        trainer.train(resume_from_checkpoint=callback.resume_from() if resume else None)
    assert trainer.state.global_step == steps
    assert trainer.optimizer
    state = trainer.optimizer.state_dict()["state"]
    moments = {f"{index}.{key}": one for index, held in state.items() for key, one in held.items()}
    model = trainer.accelerator.unwrap_model(trainer.model)
    (root / "trainer").mkdir(exist_ok=True)
    said = trainer.state.log_history[:-1]  # the last is about training as a whole
    history = [{key: one[key] for key in one if not SPEED.search(key)} for one in said]
    (root / "trainer" / HISTORY).write_text(json.dumps(history, sort_keys=True))
    return {name: one.clone() for name, one in {**model.state_dict(), **moments}.items()}


def made(adapter: dict[str, Any] | None) -> Any:
    """Return the model, or an adapter of one that is the same each time."""
    if adapter is None:
        return LlamaForCausalLM(CONFIG)
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng():
        torch.manual_seed(3)
        base = LlamaForCausalLM(CONFIG)
    return get_peft_model(base, LoraConfig(r=2, lora_dropout=0.1, **adapter))


class Stop(TrainerCallback):  # type: ignore[misc]
    """Ends training early, as if it were killed at leisure."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        control.should_training_stop |= state.global_step >= self.step


def resume(rank: int, world: int, folder: str) -> None:
    """In the middle of an epoch and at the end of one, with dropout and a schedule."""
    announce(rank, world)
    root = Path(folder) / str(world)
    whole = trained(root / "whole", 6, root / "final")
    for steps in (2, 3):
        trained(root / f"half-{steps}", steps)
        again = trained(root / f"half-{steps}", 6, resume=True)
        assert not differences(again, whole), (steps, differences(again, whole))
    dist.barrier()
    names = sorted(item.name for item in (root / "whole").iterdir())
    assert names == ["ckptctl.final.json", "step-5", "step-6", "trainer"]
    model = {name: one for name, one in whole.items() if name.startswith(("model", "lm_head"))}
    assert not differences(load_any_reference(root / "final"), model)
    loaded = LlamaForCausalLM.from_pretrained(root / "final").state_dict()
    assert not differences(dict(loaded), model)


def rated(rank: int, world: int, folder: str) -> None:
    """What the Trainer saves and evaluates is saved here, too, once, with its metrics."""
    announce(rank, world)
    root = Path(folder) / str(world)
    trained(root, 3, save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=3)
    text = (root / "step-3" / "ckptctl.run.json").read_text()
    assert "eval_loss" in text


def evaluated(rank: int, world: int, folder: str) -> None:
    """Evaluations consume random numbers: a step is saved as it is after them, with its log."""
    announce(rank, world)
    root = Path(folder) / str(world)
    handler = Kept()
    logging.getLogger("transformers.trainer").addHandler(handler)
    often: dict[str, Any] = {"logging_strategy": "steps", "logging_steps": 1}
    often |= {"eval_strategy": "steps", "eval_steps": 1}
    whole = trained(root / "whole", 6, **often)
    for steps in (2, 3):
        trained(root / f"half-{steps}", steps, **often)
        again = trained(root / f"half-{steps}", 6, resume=True, **often)
        assert not differences(again, whole), (steps, differences(again, whole))
        histories = [
            (root / name / "trainer" / HISTORY).read_text() for name in ("whole", f"half-{steps}")
        ]
        assert histories[0] == histories[1], steps
    record = json.loads((root / "whole" / "step-6" / "ckptctl.run.json").read_text())
    assert "eval_loss" in record["metrics"]
    assert "missing keys" not in handler.text


def adapters(rank: int, world: int, folder: str) -> None:
    """Of an adapter neither the Trainer nor PEFT misses a key, and training goes on alike."""
    announce(rank, world)
    handler = Kept()
    logging.getLogger("transformers.trainer").addHandler(handler)
    for name, adapter in ADAPTERS.items():
        root = Path(folder) / str(world) / name
        whole = trained(root / "whole", 6, adapter=adapter)
        trained(root / "half", 3, adapter=adapter)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            again = trained(root / "half", 6, resume=True, adapter=adapter)
        assert not differences(again, whole), (name, differences(again, whole))
        assert not [one for one in map(str, said) if "missing" in one], name
    assert "missing keys" not in handler.text


def preempted(rank: int, world: int, folder: str) -> None:
    """The step at which the end is announced is the last one, and saved; then it goes on."""
    announce(rank, world)
    root = Path(folder) / str(world)
    whole = trained(root / "whole", 6)
    asked = itertools.count(1)
    told = {"preemption": [lambda: next(asked) >= 2], "save_every": 100}
    trained(root / "half", 2, root / "final", manager_options=told, stop=6)
    assert (root / "half" / "step-2").is_dir() and not (root / "final").exists()
    again = trained(root / "half", 6, root / "final", resume=True)
    assert not differences(again, whole) and (root / "final").is_dir()


class Kept(logging.Handler):
    """What is logged."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage()
