"""torchtitan 0.3.0: its models, attention uncompiled, experts in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.oracle.hf_models import State
from tests.oracle.models import tokens
from tests.oracle.shims import full_precision, titan_eager, triton

REQUIRES: tuple[str, ...] = ("torchtitan", "spmd_types", "tyro")
LAYOUT = "torchtitan@0.3"
BACKENDS = {"attn_backend": "flex"}
MOE_BACKENDS = {**BACKENDS, "moe_comm_backend": "standard"}


def _theta(config: Any) -> float:
    return float(config.rope_parameters["rope_theta"])


def eager_model(config: Any, kind: Any, layers: Any, **more: Any) -> torch.nn.Module:
    """Return torchtitan's model of class *kind*, its attention uncompiled.

    Args:
        config: transformers', of the text model.
        kind: The class.
        layers: Configurations.
        more: Further fields of its configuration, or other ones.
    """
    from torchtitan.models.common import Embedding, Linear, RMSNorm

    dim, vocab = config.hidden_size, config.vocab_size
    fields = {
        "dim": dim,
        "vocab_size": vocab,
        "enable_weight_tying": config.tie_word_embeddings,
        "tok_embeddings": Embedding.Config(num_embeddings=vocab, embedding_dim=dim),
        "norm": RMSNorm.Config(normalized_shape=dim),
        "lm_head": Linear.Config(in_features=dim, out_features=vocab),
        "layers": layers,
    }
    built = kind.Config(**fields | more).build()
    for module in built.modules():
        if isinstance(getattr(module, "eps", None), float):
            module.eps = config.rms_norm_eps
    titan_eager()
    model: torch.nn.Module = built
    return model.eval()


def _llama3(config: Any) -> torch.nn.Module:
    with triton():
        from torchtitan.models import llama3
        from torchtitan.models.common import ComplexRoPE
    scaling: dict[str, Any] = {}
    if config.rope_parameters["rope_type"] == "llama3":
        scaling = {"scaling": "llama", "scaling_factor": config.rope_parameters["factor"]}
    layers = llama3._build_llama3_layers(
        n_layers=config.num_hidden_layers,
        dim=config.hidden_size,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        hidden_dim=config.intermediate_size,
        rope=ComplexRoPE.Config(
            dim=config.head_dim,
            max_seq_len=1024,
            theta=_theta(config),
            **scaling,
        ),
        **BACKENDS,
    )
    return eager_model(config, llama3.Llama3Model, layers)


def _qwen3(config: Any) -> torch.nn.Module:
    with triton():
        from torchtitan.models import qwen3
        from torchtitan.models.common import CosSinRoPE
    common = {
        "n_layers": config.num_hidden_layers,
        "dim": config.hidden_size,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rope": CosSinRoPE.Config(dim=config.head_dim, max_seq_len=1024, theta=_theta(config)),
    }
    if config.model_type == "qwen3":
        layers = qwen3._build_qwen3_layers(
            **common, hidden_dim=config.intermediate_size, **BACKENDS
        )
    else:
        layers = qwen3._build_qwen3_moe_layers(
            **common,
            moe_hidden_dim=config.moe_intermediate_size,
            num_experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            **MOE_BACKENDS,
        )
    return eager_model(config, qwen3.Qwen3Model, layers)


def _deepseek_v3(config: Any) -> torch.nn.Module:
    with triton():
        from torchtitan.models import deepseek_v3
        from torchtitan.models.common import ComplexRoPE
    layers = deepseek_v3._build_dsv3_layers(
        n_layers=config.num_hidden_layers,
        n_dense_layers=config.first_k_dense_replace,
        dim=config.hidden_size,
        n_heads=config.num_attention_heads,
        q_lora_rank=config.q_lora_rank or 0,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        mscale=1.0,
        dense_hidden_dim=config.intermediate_size,
        moe_hidden_dim=config.moe_intermediate_size,
        num_experts=config.n_routed_experts,
        num_shared_experts=config.n_shared_experts,
        router_top_k=config.num_experts_per_tok,
        router_score_func="sigmoid",
        router_num_expert_groups=config.n_group,
        router_num_limited_groups=config.topk_group,
        router_route_scale=config.routed_scaling_factor,
        router_route_norm=config.norm_topk_prob,
        non_blocking_capacity_factor=None,
        rope=ComplexRoPE.Config(
            dim=config.qk_rope_head_dim, max_seq_len=1024, theta=_theta(config)
        ),
        **MOE_BACKENDS,
    )
    return eager_model(config, deepseek_v3.DeepSeekV3Model, layers)


def _gpt_oss(config: Any) -> torch.nn.Module:
    with triton():
        from torchtitan.models import gpt_oss
        from torchtitan.models.common import CosSinRoPE
    scaling = config.rope_parameters
    layers = gpt_oss._build_gptoss_layers(
        dim=config.hidden_size,
        n_layers=config.num_hidden_layers,
        hidden_dim=config.intermediate_size,
        num_experts=config.num_local_experts,
        top_k=config.num_experts_per_tok,
        load_balance_coeff=1e-3,
        rope=CosSinRoPE.Config(
            dim=config.head_dim,
            max_seq_len=1024,
            theta=_theta(config),
            scaling="yarn",
            rope_factor=scaling["factor"],
            beta_fast=scaling["beta_fast"],
            beta_slow=scaling["beta_slow"],
            original_seq_len=scaling["original_max_position_embeddings"],
            truncate=scaling["truncate"],
        ),
        **MOE_BACKENDS,
    )
    # The builder above fixes the sizes of attention to those of the real models.
    for index, layer in enumerate(layers):
        layer.attention = gpt_oss._make_gptoss_attn_config(
            dim=config.hidden_size,
            layer_id=index,
            n_heads=config.num_attention_heads,
            n_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            sliding_window_size=config.sliding_window if index % 2 == 0 else None,
            rope=layer.attention.rope,
            **BACKENDS,
        )
    return eager_model(config, gpt_oss.GptOssModel, layers)


BUILDERS: dict[str, Callable[[Any], torch.nn.Module]] = {
    "llama2": _llama3,
    "llama3": _llama3,
    "llama3_2": _llama3,
    "qwen3": _qwen3,
    "qwen3.tied": _qwen3,
    "qwen3_moe": _qwen3,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v3.no_q_lora": _deepseek_v3,
    "gpt_oss": _gpt_oss,
}


def logits(model: torch.nn.Module, state: State, config: Any) -> torch.Tensor:
    """Return fp32 logits after a strict load of *state*."""
    model.load_state_dict({name: value.float() for name, value in state.items()}, strict=True)
    ids = tokens()
    positions = torch.arange(ids.shape[1]).expand(ids.shape)
    masks = model.get_attention_masks(positions)  # type: ignore[operator]
    with torch.no_grad(), full_precision():
        return torch.as_tensor(model(ids, positions, masks)).float()
