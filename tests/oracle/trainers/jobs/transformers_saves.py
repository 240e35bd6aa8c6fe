"""Train a tiny Llama with the Trainer of transformers: DDP, and DeepSpeed where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from tests.oracle.trainers.jobs.environment import announce, without_compiling
from tests.oracle.trainers.outcome import CHECKPOINT, keep

CONFIG = LlamaConfig(
    vocab_size=37,
    hidden_size=12,
    intermediate_size=17,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=16,
)


def save_ddp(rank: int, world: int, folder: str) -> None:
    announce(rank, world)
    case = _case(Path(folder) / str(world) / "ddp")
    trainer = _trained(case)
    if rank == 0:
        keep(case, "live", trainer.accelerator.unwrap_model(trainer.model).state_dict())


def save_deepspeed(rank: int, world: int, folder: str) -> None:
    """Save what the Trainer wraps around DeepSpeed's folder, at stages 2 and 3."""
    announce(rank, world)
    import deepspeed

    without_compiling()
    for stage in (2, 3):
        case = _case(Path(folder) / str(world) / f"z{stage}")
        trainer = _trained(case, deepspeed=_config(stage))
        engine = trainer.model_wrapped
        live = {}
        for name, one in engine.module.named_parameters():
            live[name] = deepspeed.utils.safe_get_full_fp32_param(one)
        if rank == 0:
            keep(case, "live", live)
        dist.barrier()


def _case(case: Path) -> Path:
    case.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    return case


def _trained(case: Path, **more: Any) -> Trainer:
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    rows = torch.randint(37, (16, 8), generator=torch.Generator().manual_seed(1))
    arguments = TrainingArguments(
        output_dir=str(case / CHECKPOINT),
        per_device_train_batch_size=2,
        max_steps=2,
        save_steps=1,
        learning_rate=1e-2,
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        **more,
    )
    data: Any = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    return trainer


def _config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": False},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
    }
