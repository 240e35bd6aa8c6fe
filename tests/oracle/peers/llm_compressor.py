"""llm-compressor: models of transformers with a linear layer for each projection of an expert."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from tests.oracle import hf_models
from tests.oracle.hf_models import State
from tests.oracle.quantizers import load

REQUIRES: tuple[str, ...] = ()
LAYOUT = "llm-compressor"


def _build(config: Any) -> torch.nn.Module:
    model: torch.nn.Module = hf_models.random_model(config)
    load("llmcompressor.modeling.moe.linearize").linearize_moe(model)
    return model.eval()


def _llama4_text(config: Any) -> torch.nn.Module:
    """The sizes of Llama 4's experts are read from the config of the text model in another."""
    model: Any = hf_models.random_model(config)
    model.config.text_config = model.config
    load("llmcompressor.modeling.moe.linearize").linearize_moe(model)
    del model.config.text_config
    built: torch.nn.Module = model.eval()
    return built


BUILDERS: dict[str, Callable[[Any], torch.nn.Module]] = {
    **dict.fromkeys(("gpt_oss", "gemma4.text", "gemma4_text.moe", "hy_v4", "llama4"), _build),
    **dict.fromkeys(("llama4_text", "llama4_text.plain"), _llama4_text),
    **dict.fromkeys(("mistral4", "mistral4_vision", "qwen3_vl_moe"), _build),
}

HY_V4_FILES = {
    r"\.attn_hc\.": ".hc_attn_layer.hc_pre.hc_",
    r"\.ffn_hc\.": ".hc_mlp_layer.hc_pre.hc_",
    r"\.hc_head\.hc_": ".hc_head.hc_head_",
    r"\.self_attn\.gate_proj\.": ".self_attn.linear_gate.",
    r"\.self_attn\.sinks$": ".self_attn.learnable_sink_param",
}
"""Names in memory and in published files, which transformers reads but does not write."""


def state(model: Any) -> State:
    """Return the state dict with the names of files."""
    values = hf_models.in_memory(model)
    for alias in getattr(model, "_tied_weights_keys", None) or {}:
        if model.config.get_text_config().tie_word_embeddings:
            values.pop(alias, None)
    if model.config.model_type == "hy_v4":
        for old, new in HY_V4_FILES.items():
            values = {re.sub(old, new, name): value for name, value in values.items()}
        return values
    from transformers.core_model_loading import revert_weight_conversion

    reverted: State = revert_weight_conversion(model, values)
    return reverted


def logits(model: Any, state: State, config: Any) -> torch.Tensor:
    """Return fp32 logits after a strict load of *state*, whose names transformers changes."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, apply_renamings

    mapping = get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    values = {apply_renamings(name, renamings): value for name, value in state.items()}
    if config.get_text_config().tie_word_embeddings:
        tied = getattr(model, "_tied_weights_keys", None) or {}
        values = {alias: values[name] for alias, name in tied.items()} | values
    model.load_state_dict(values, strict=True)
    return hf_models.logits(model)
