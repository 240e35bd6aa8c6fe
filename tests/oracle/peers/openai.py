"""OpenAI's ``gpt_oss.torch``, the reference of gpt-oss, run in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.oracle.hf_models import State
from tests.oracle.models import tokens

REQUIRES: tuple[str, ...] = ("gpt_oss",)
LAYOUT = "openai"


def settings(config: Any) -> dict[str, Any]:
    """Return OpenAI's ``config.json`` for *config*."""
    scaling = config.rope_parameters
    return {
        "num_hidden_layers": config.num_hidden_layers,
        "num_experts": config.num_local_experts,
        "experts_per_token": config.num_experts_per_tok,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "swiglu_limit": 7.0,
        "head_dim": config.head_dim,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "sliding_window": config.sliding_window,
        "initial_context_length": scaling["original_max_position_embeddings"],
        "rope_theta": scaling["rope_theta"],
        "rope_scaling_factor": scaling["factor"],
        "rope_ntk_alpha": scaling["beta_slow"],
        "rope_ntk_beta": scaling["beta_fast"],
    }


def _build(config: Any) -> torch.nn.Module:
    from gpt_oss.torch.model import ModelConfig, Transformer

    model: Any = Transformer(ModelConfig(**settings(config)), device=torch.device("cpu"))
    return model.float().eval()  # type: ignore[no-any-return]


BUILDERS: dict[str, Callable[[Any], torch.nn.Module]] = {"gpt_oss": _build}


def logits(model: torch.nn.Module, state: State, config: Any) -> torch.Tensor:
    """Return fp32 logits after a strict load of *state*, one sequence at a time."""
    model.load_state_dict({name: value.float() for name, value in state.items()}, strict=True)
    with torch.no_grad():
        return torch.stack([model(ids) for ids in tokens()]).float()
