"""OLMo-core 3.0: ai2's trainer of OLMo 2 and 3, on torch's own attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.oracle.hf_models import State
from tests.oracle.models import tokens
from tests.oracle.shims import stubbed

REQUIRES: tuple[str, ...] = ("olmo_core", "dataclass_extensions")
LAYOUT = "olmo-core"
ABSENT = (
    "bettermap",
    "cached_path",
    "cached_path.schemes",
    "importlib_resources",
    "importlib_resources.abc",
    "pandas",
)


def _build(config: Any) -> torch.nn.Module:
    with stubbed(*ABSENT):
        from olmo_core.nn.attention import SlidingWindowAttentionConfig
        from olmo_core.nn.attention.backend import AttentionBackendName
        from olmo_core.nn.feed_forward import FeedForwardConfig
        from olmo_core.nn.transformer import TransformerBlockType, TransformerConfig
    rope = config.rope_parameters
    windows = None
    if config.model_type == "olmo3":
        local = [kind == "sliding_attention" for kind in config.layer_types]
        windows = SlidingWindowAttentionConfig(
            pattern=[config.sliding_window if near else -1 for near in local],
            force_full_attention_on_first_layer=False,
            force_full_attention_on_last_layer=False,
        )
        rope = rope.get("full_attention", rope)
    built = TransformerConfig.llama_like(
        d_model=config.hidden_size,
        vocab_size=config.vocab_size,
        n_layers=config.num_hidden_layers,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        qk_norm=True,
        layer_norm_eps=config.rms_norm_eps,
        rope_theta=int(rope["rope_theta"]),
        sliding_window=windows,
        attn_backend=AttentionBackendName.torch,
        block_name=TransformerBlockType.reordered_norm,
        feed_forward=FeedForwardConfig(hidden_size=config.intermediate_size, bias=False),
    )
    model: torch.nn.Module = built.build(init_device="cpu")
    return model.eval()


BUILDERS: dict[str, Callable[[Any], torch.nn.Module]] = {"olmo2": _build, "olmo3": _build}


def logits(model: torch.nn.Module, state: State, config: Any) -> torch.Tensor:
    """Return fp32 logits after a strict load of *state*."""
    model.load_state_dict({name: value.float() for name, value in state.items()}, strict=True)
    with torch.no_grad():
        return torch.as_tensor(model(tokens())).float()
