"""Meta's own code: llama-models 0.3.0 over fairscale, one rank.

Several ranks are the matter of :mod:`tests.oracle.meta_llama`, which runs without either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.oracle.hf_models import State
from tests.oracle.models import tokens
from tests.oracle.shims import no_cuda, one_rank

REQUIRES: tuple[str, ...] = ("llama_models", "fairscale")
LAYOUT = "meta"


def params(config: Any) -> dict[str, Any]:
    """Return ``params.json`` for *config*."""
    found = {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "vocab_size": config.vocab_size,
        "norm_eps": config.rms_norm_eps,
        "rope_theta": float(config.rope_parameters["rope_theta"]),
    }
    if config.model_type == "llama":
        return found | {
            "multiple_of": config.intermediate_size,
            "ffn_dim_multiplier": config.intermediate_size / (8 * config.hidden_size / 3),
            "use_scaled_rope": config.rope_parameters["rope_type"] == "llama3",
        }
    found |= {
        "multiple_of": 8,
        "ffn_dim_multiplier": 0.47,  # makes 80, and 40 in the experts
        "ffn_exp": 1.875,
        "use_qk_norm": config.use_qk_norm,
        "attention_chunk_size": config.attention_chunk_size,
        "attn_temperature_tuning": config.attn_temperature_tuning,
        "moe_args": {
            "num_experts": config.num_local_experts,
            "top_k": config.num_experts_per_tok,
            "auto_scale_F": False,
            "interleave_moe_layer_step": config.interleave_moe_layer_step,
        },
    }
    nope = [index + 1 for index, rotated in enumerate(config.no_rope_layers) if not rotated]
    return found | ({"nope_layer_interval": nope[0]} if nope else {})


def _llama3(config: Any) -> torch.nn.Module:
    from llama_models.llama3.args import ModelArgs
    from llama_models.llama3.model import Transformer

    args = ModelArgs(**params(config), max_batch_size=2, max_seq_len=128)
    with one_rank(), no_cuda():
        return Transformer(args).eval()  # type: ignore[no-any-return]


def _llama4(config: Any) -> torch.nn.Module:
    from llama_models.llama4.args import ModelArgs
    from llama_models.llama4.model import Transformer

    args = ModelArgs(**params(config), max_batch_size=2, max_seq_len=128)
    with one_rank(), no_cuda():
        return Transformer(args).eval()  # type: ignore[no-any-return]


BUILDERS: dict[str, Callable[[Any], torch.nn.Module]] = {
    "llama2": _llama3,
    "llama3": _llama3,
    "llama4_text": _llama4,
    "llama4_text.plain": _llama4,
}


def state(model: Any) -> State:
    """Return *model*'s weights under the names that Meta's files have.

    Llama 4's modules rename on load (their ``load_hook``); this is the way back.
    """
    found = {name: value.clone() for name, value in model.state_dict().items()}
    if not hasattr(model, "args"):
        return found
    for index in range(len(model.layers)):
        _to_file_names(found, f"layers.{index}.")
    return found


def _to_file_names(state: State, prefix: str) -> None:
    attention, ffn = prefix + "attention.", prefix + "feed_forward."
    parts = [state.pop(f"{attention}{part}.weight") for part in ("wq", "wk", "wv")]
    state[attention + "wqkv.weight"] = torch.cat(parts)
    state[attention + "wqkv.layer_norm_weight"] = state.pop(prefix + "attention_norm.weight")
    norm = state.pop(prefix + "ffn_norm.weight")
    if ffn + "w1.weight" in state:
        state[ffn + "mlp.layer_norm_weight"] = norm
        gate, up = state.pop(ffn + "w1.weight"), state.pop(ffn + "w3.weight")
        state[ffn + "mlp.fc1_weight"] = torch.cat([gate, up])
        state[ffn + "mlp.fc2_weight"] = state.pop(ffn + "w2.weight")
        return
    state[ffn + "norm.weight"] = norm
    for old, new in (
        ("experts.w1", "experts.moe_w_in_eD_F"),
        ("experts.w2", "experts.moe_w_out_eF_D"),
        ("experts.w3", "experts.moe_w_swiglu_eD_F"),
        ("shared_expert.w1.weight", "w_in_shared_FD.weight"),
        ("shared_expert.w2.weight", "w_out_shared_DF.weight"),
        ("shared_expert.w3.weight", "w_swiglu_FD.weight"),
    ):
        value = state.pop(ffn + old)
        state[ffn + new] = value.flatten(0, 1) if value.ndim == 3 else value


def logits(model: Any, state: State, config: Any) -> torch.Tensor:
    """Return fp32 logits after a strict load of *state*."""
    given = {name: value.float() for name, value in state.items()}
    model.load_state_dict(given, strict=True)
    with torch.no_grad(), one_rank():
        if config.model_type == "llama":
            return torch.as_tensor(model(tokens(), 0))
        from llama_models.llama4.datatypes import TransformerInput

        return torch.as_tensor(model(TransformerInput(tokens=tokens(), tokens_position=0)).logits)
