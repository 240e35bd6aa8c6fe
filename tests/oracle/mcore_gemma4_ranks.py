"""Megatron-Bridge's own dense Gemma 4 on CPU ranks, as its provider builds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import yaml
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from safetensors.torch import load_file
from transformers import Gemma4Config

from tests.oracle import mcore_ranks as common
from tests.oracle.mcore_bridge import stand_in_for_engine
from tests.oracle.mcore_build import without_cuda
from tests.oracle.mcore_models import Ranks

MODELS = "megatron.bridge.models."


def prove(
    rank: int,
    world: int,
    out: Path,
    config: Mapping[str, Any],
    how: Sequence[Ranks],
    folder: Path,
) -> None:
    """Load *folder* on every division of *world* ranks, run it, change it, save it.

    Writes ``logits-RANKS.pt``, ``logits-changed-RANKS.pt`` of what is saved as
    ``saved-SPELLING-RANKS/``; on one rank also ``listed.pt``, ``fused.pt``, ``norms.pt`` and
    ``wrong.pt``.

    Args:
        rank: This rank.
        world: World size.
        out: A folder with ``hf/``.
        config: config.json, as published.
        how: Divisions; those of another world size are left out.
        folder: Of Megatron-Core.
    """
    stand_in_for_engine()
    for ranks in how:
        if ranks.world != world:
            continue
        model = built(config, ranks)
        common.load(model, folder)
        common.keep(common.logits(model), out / f"logits-{ranks}.pt")
        if world == 1:
            torch.save(common.listed(model, "separate"), out / "listed.pt")
            torch.save(_fused(model, config, out / "hf"), out / "fused.pt")
            norms = [one.k_layernorm.weight.detach().clone() for one in _attention(model)]
            torch.save(norms, out / "norms.pt")
            torch.save(_wrong(model), out / "wrong.pt")
        common.change(model)
        common.keep(common.logits(model), out / f"logits-changed-{ranks}.pt")
        for spelling in ("stacked", "separate"):
            _save(model, out / f"saved-{spelling}-{ranks}", spelling)


def built(config: Mapping[str, Any], ranks: Ranks) -> Any:
    """Return this rank's part of the model that Bridge makes of *config*."""
    without_cuda()
    bridge = _bridge(config)
    provider = bridge.provider_bridge(SimpleNamespace(config=bridge.hf_config))
    options = {
        "params_dtype": torch.float32,
        "autocast_dtype": torch.float32,
        "bf16": False,
        "use_cpu_initialization": True,
        "tensor_model_parallel_size": ranks.tensor,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
    }
    for name, value in options.items():
        setattr(provider, name, value)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks.tensor)
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    model = provider.provide(pre_process=True, post_process=True).eval()
    getattr(model, "language_model", model).output_layer.gather_output = True
    return model


def load_seeing(rank: int, world: int, out: Path, config: Mapping[str, Any], folder: Path) -> None:
    """Load *folder* into the model with towers, and save it: ``saved/``.

    Writes ``listed.pt``, ``state.pt`` of the towers and ``logits.pt`` of text.
    """
    stand_in_for_engine()
    model = built(config, Ranks())
    common.load(model, folder)
    torch.save(common.listed(model, "separate"), out / "listed.pt")
    towers = {k: v for k, v in model.state_dict().items() if not k.startswith("language_model.")}
    torch.save({k: v.clone() for k, v in towers.items() if v is not None}, out / "state.pt")
    torch.save(common.logits(model.language_model), out / "logits.pt")
    _save(model, out / "saved", "separate")


def _bridge(config: Mapping[str, Any]) -> Any:
    if "text_config" not in config:
        made = import_module(f"{MODELS}gemma.gemma4_bridge").Gemma4Bridge()
        made.hf_config = SimpleNamespace(**config)
        return made
    made = import_module(f"{MODELS}gemma_vl.gemma4_vl_bridge").Gemma4VLBridge()
    described = Gemma4Config(**{k: v for k, v in config.items() if k != "text_config"})
    made.hf_config = SimpleNamespace(
        text_config=SimpleNamespace(**config["text_config"]),
        vision_config=described.vision_config,
        audio_config=described.audio_config,
    )
    return made


def _attention(model: Any) -> list[Any]:
    return [layer.self_attention for layer in model.decoder.layers]


def _fused(
    model: Any, config: Mapping[str, Any], folder: Path
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each layer's fused projection, and what Bridge makes of the files in *folder*."""
    merge = import_module(f"{MODELS}conversion.param_mapping").merge_qkv_weights
    bridge, state = _bridge(config), load_file(folder / "model.safetensors")
    pairs = []
    for number, attention in enumerate(_attention(model)):
        prefix = f"model.layers.{number}.self_attn."
        names = {part: f"{prefix}{part}_proj.weight" for part in "qkv"}
        if names["v"] in state:
            parts = {part: state[name] for part, name in names.items()}
        else:
            parts = bridge.maybe_modify_loaded_hf_weight(names, state)
        pairs.append((attention.linear_qkv.weight.detach(), merge(attention.config, **parts)))
    return pairs


def _wrong(model: Any) -> dict[str, torch.Tensor | None]:
    """Return the logits after changes of the weights that change the model."""
    found = {}
    for number, attention in enumerate(_attention(model)):
        weight = attention.linear_qkv.weight
        right = weight.detach().clone()
        groups = attention.config.num_query_groups
        size = attention.config.kv_channels
        with torch.no_grad():
            parts = right.view(groups, -1, size, right.shape[-1])
            heads = parts[:, :-2].flip(1)
            weight.copy_(torch.cat((heads, parts[:, -2:]), dim=1).view_as(right))
            found[f"heads-{number}"] = common.logits(model)
            weight.copy_(torch.cat((parts[:, :-2], parts[:, -2:].roll(1, 2)), 1).view_as(right))
            found[f"keys-{number}"] = common.logits(model)
            weight.copy_(right)
    return found


def _save(model: Any, folder: Path, spelling: str) -> None:
    """Write a run folder with one iteration, as Bridge does: no arguments of Megatron-LM."""
    target, metadata = folder / common.ITERATION, dict(common.SPELLINGS[spelling])
    if dist.get_rank() == 0:
        target.mkdir(parents=True)
    dist.barrier()
    state = common.sharded(model, metadata)
    content = {"checkpoint_version": 3.0, "iteration": 10, "model": state}
    dist_checkpointing.save(content, str(target), ("torch_dist", 1), content_metadata=metadata)
    if dist.get_rank() == 0:
        (folder / "latest_checkpointed_iteration.txt").write_text("10")
        _describe(model, target / "run_config.yaml")


def _describe(model: Any, file: Path) -> None:
    """Write the fields of the configuration that Bridge's ``run_config.yaml`` has."""
    names = ("num_layers", "window_size", "window_attn_skip_freq")
    fields = {name: getattr(model.config, name) for name in names}
    fields["window_size"] = list(fields["window_size"])
    target = "megatron.bridge.models.gemma.gemma4_provider.Gemma4DenseProvider"
    file.write_text(yaml.safe_dump({"model": {"_target_": target, **fields}}))
