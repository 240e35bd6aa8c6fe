"""ai2's first trainer of OLMo, 0.6.0, whose ``model.pt`` the releases of OLMo 2 hold."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from tests.oracle.hf_models import State
from tests.oracle.models import tokens
from tests.oracle.shims import stubbed

REQUIRES: tuple[str, ...] = ("olmo", "olmo_data")
LAYOUT = "olmo"
STORES = (
    "boto3",
    "botocore",
    "botocore.config",
    "botocore.exceptions",
    "cached_path",
    "cached_path.schemes",
    "google.api_core",
    "google.api_core.exceptions",
    "google.api_core.retry",
    "google.auth",
    "google.cloud",
    "google.cloud.storage",
    "importlib_resources.abc",
)


def _build(config: Any) -> torch.nn.Module:
    with stubbed("google", "importlib_resources", *STORES):
        schemes: Any = sys.modules["cached_path.schemes"]
        if not isinstance(schemes.SchemeClient, type):
            schemes.SchemeClient = type("SchemeClient", (), {"recoverable_errors": ()})
        from olmo.config import ModelConfig
        from olmo.model import OLMo
    settings = ModelConfig(
        d_model=config.hidden_size,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        n_layers=config.num_hidden_layers,
        mlp_hidden_size=2 * config.intermediate_size,
        activation_type="swiglu",
        rope=True,
        rope_theta=int(config.rope_parameters["rope_theta"]),
        flash_attention=False,
        attention_dropout=0.0,
        residual_dropout=0.0,
        embedding_dropout=0.0,
        layer_norm_type="rms",
        layer_norm_with_affine=True,
        layer_norm_eps=config.rms_norm_eps,
        attention_layer_norm=True,
        attention_layer_norm_with_affine=True,
        include_bias=False,
        bias_for_layer_norm=False,
        norm_after=True,
        max_sequence_length=256,
        vocab_size=config.vocab_size,
        embedding_size=config.vocab_size,
        weight_tying=config.tie_word_embeddings,
        init_device="cpu",
    )
    model: torch.nn.Module = OLMo(settings)
    return model.eval()


BUILDERS: dict[str, Callable[[Any], torch.nn.Module]] = {"olmo2": _build}


def logits(model: torch.nn.Module, state: State, config: Any) -> torch.Tensor:
    """Return fp32 logits after a strict load of *state*."""
    model.load_state_dict({name: value.float() for name, value in state.items()}, strict=True)
    with torch.no_grad():
        return torch.as_tensor(model(tokens()).logits).float()
