"""What ranks do with Megatron-Bridge's LoRA on Megatron-Core's GPT model: load, run and save it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.models.gpt.gpt_model import GPTModel

from tests.oracle.mcore_bridge import peft_of
from tests.oracle.mcore_build import build
from tests.oracle.mcore_models import Ranks, Recipe
from tests.oracle.mcore_ranks import ITERATION, inner, keep, load, logits, sharded, weighs

METADATA = {"non_homogeneous_layers": True, "singleton_local_shards": False}


def adapted(
    rank: int, world: int, out: Path, recipe: Recipe, base: Path, cases: Mapping[str, Ranks]
) -> None:
    """Load the adapter of each of *cases* onto *base*, run it, change it, save it.

    Reads ``CASE/lora``, writes ``CASE/logits.pt``, and ``CASE/logits-changed.pt`` of what is saved
    as ``CASE/saved``.
    """
    for case, ranks in cases.items():
        folder = out / case
        if ranks.world == world:
            model = build(recipe, ranks)
            load(model, base)
            config = inner(folder / "lora") / "run_config.yaml"
            peft = peft_of(config)
            peft(model, training=False)
            _fill(model, peft, config.parent)
            keep(logits(model), folder / "logits.pt")
            _change(model)
            keep(logits(model), folder / "logits-changed.pt")
            _save(model, peft, folder / "saved", config, ranks)


def _asked(model: GPTModel, peft: Any, metadata: Mapping[str, object]) -> dict[str, Any]:
    """Return what Bridge asks for of an adapter: ``apply_peft_adapter_filter_to_state_dict``."""
    found = sharded(model, metadata)
    return {key: value for key, value in found.items() if peft.adapter_key_filter(key)}


def _fill(model: GPTModel, peft: Any, folder: Path) -> None:
    metadata = dist_checkpointing.load_content_metadata(str(folder))
    state, missing, unexpected = dist_checkpointing.load(
        {"model": _asked(model, peft, metadata)}, str(folder), strict=StrictHandling.RETURN_ALL
    )
    assert not missing and not unexpected, (missing, unexpected)
    missing, unexpected = model.load_state_dict(state["model"], strict=False)
    problems = [*unexpected, *(key for key in missing if ".adapter." in key and weighs(key))]
    assert not problems, problems


def _change(model: GPTModel) -> None:
    """Give the factors other values, the same however they are divided."""
    with torch.no_grad():
        for name, value in model.named_parameters():
            if ".adapter." in name:
                value.copy_(1.5 * value + 0.1 * torch.sin(9 * value))


def _save(model: GPTModel, peft: Any, folder: Path, config: Path, ranks: Ranks) -> None:
    """Write a run folder of the factors, as Bridge does."""
    target = folder / ITERATION
    if dist.get_rank() == 0:
        target.mkdir(parents=True)
    dist.barrier()
    content = {"model": _asked(model, peft, METADATA), "checkpoint_version": 3.0, "iteration": 10}
    dist_checkpointing.save(content, str(target), ("torch_dist", 1), content_metadata=METADATA)
    if dist.get_rank() == 0:
        stated = yaml.safe_load(config.read_text())
        stated["model"]["tensor_model_parallel_size"] = ranks.tensor
        (target / "run_config.yaml").write_text(yaml.safe_dump(stated))
        (folder / "latest_checkpointed_iteration.txt").write_text("10")
