"""torchtitan 0.2.2, beside 0.3.0: in the folder ``torchtitan_0_2`` of any path of ``sys.path``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.oracle.hf_models import State
from tests.oracle.models import tokens
from tests.oracle.shims import another_torchtitan, integer_histograms, triton

REQUIRES: tuple[str, ...] = ("torchtitan_0_2",)
LAYOUT = "torchtitan@0.2"


def _folder() -> Path:
    found = [Path(entry) / "torchtitan_0_2" for entry in sys.path]
    return next(folder for folder in found if (folder / "torchtitan").is_dir())


def _sizes(config: Any) -> dict[str, Any]:
    return {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "vocab_size": config.vocab_size,
        "norm_eps": config.rms_norm_eps,
        "rope_theta": float(config.rope_parameters["rope_theta"]),
        "max_seq_len": 1024,
    }


def _llama3(config: Any) -> torch.nn.Module:
    scaling = config.rope_parameters
    with another_torchtitan(_folder()), triton():
        from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs
        from torchtitan.models.llama3.model.model import Transformer
    factors = {"scaling_factor": scaling.get("factor", 1.0)}
    args = TransformerModelArgs(
        **_sizes(config),
        n_kv_heads=config.num_key_value_heads,
        multiple_of=config.intermediate_size,
        ffn_dim_multiplier=config.intermediate_size / (8 * config.hidden_size / 3),
        rope_scaling_args=RoPEScalingArgs(**factors),
    )
    model: Any = Transformer(args)
    if config.tie_word_embeddings:  # this version cannot; 0.3 can
        model.output.weight = model.tok_embeddings.weight
    return model.eval()  # type: ignore[no-any-return]


def _llama4(config: Any) -> torch.nn.Module:
    with another_torchtitan(_folder()), triton():
        from torchtitan.models.llama4.model.args import TransformerModelArgs
        from torchtitan.models.llama4.model.model import Transformer
        from torchtitan.models.moe import MoEArgs
    args = TransformerModelArgs(
        **_sizes(config),
        n_kv_heads=config.num_key_value_heads,
        multiple_of=8,
        ffn_dim_multiplier=0.47,  # makes 80, and 40 in the experts
        interleave_moe_layer_step=config.interleave_moe_layer_step,
        moe_args=MoEArgs(num_experts=config.num_local_experts, use_grouped_mm=False),
    )
    return Transformer(args).eval()  # type: ignore[no-any-return]


def _qwen3(config: Any) -> torch.nn.Module:
    with another_torchtitan(_folder()), triton():
        from torchtitan.models.moe import MoEArgs
        from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
        from torchtitan.models.qwen3.model.model import Qwen3Model
    experts: dict[str, Any] = {}
    if config.model_type == "qwen3_moe":
        experts = {
            "moe_enabled": True,
            "moe_inter_dim": config.moe_intermediate_size,
            "moe_args": MoEArgs(
                num_experts=config.num_experts,
                num_shared_experts=0,
                top_k=config.num_experts_per_tok,
                score_func="softmax",
                route_norm=True,
                score_before_experts=False,
                use_grouped_mm=False,
            ),
        }
    args = Qwen3ModelArgs(
        **_sizes(config),
        n_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        hidden_dim=config.intermediate_size,
        enable_weight_tying=config.tie_word_embeddings,
        **experts,
    )
    return Qwen3Model(args).eval()  # type: ignore[no-any-return]


def _deepseek_v3(config: Any) -> torch.nn.Module:
    with another_torchtitan(_folder()), triton():
        from torchtitan.models.deepseek_v3.model.args import DeepSeekV3ModelArgs
        from torchtitan.models.deepseek_v3.model.model import DeepSeekV3Model
        from torchtitan.models.moe import MoEArgs
    args = DeepSeekV3ModelArgs(
        **_sizes(config),
        inter_dim=config.intermediate_size,
        moe_inter_dim=config.moe_intermediate_size,
        n_dense_layers=config.first_k_dense_replace,
        q_lora_rank=config.q_lora_rank or 0,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        rope_factor=1.0,
        moe_args=MoEArgs(
            num_experts=config.n_routed_experts,
            num_shared_experts=config.n_shared_experts,
            top_k=config.num_experts_per_tok,
            num_expert_groups=config.n_group,
            num_limited_groups=config.topk_group,
            score_func="sigmoid",
            route_norm=config.norm_topk_prob,
            route_scale=config.routed_scaling_factor,
            score_before_experts=False,
            use_grouped_mm=False,
        ),
    )
    args.moe_impl = "standard"  # set by update_from_config() otherwise
    return DeepSeekV3Model(args).eval()  # type: ignore[no-any-return]


def _gpt_oss(config: Any) -> torch.nn.Module:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    with another_torchtitan(_folder()), triton():
        from torchtitan.models import attention
        from torchtitan.models.gpt_oss.model.args import GptOssModelArgs
        from torchtitan.models.gpt_oss.model.model import GptOssModel
        from torchtitan.models.moe import MoEArgs
    attention.FlexAttentionWrapper._compiled_flex_attn = flex_attention
    attention._compiled_create_block_mask = create_block_mask
    scaling = config.rope_parameters
    args = GptOssModelArgs(
        **_sizes(config),
        n_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        moe_inter_dim=config.intermediate_size,
        sliding_window_size=config.sliding_window,
        original_seq_len=scaling["original_max_position_embeddings"],
        rope_factor=scaling["factor"],
        ntk_alpha=scaling["beta_slow"],
        ntk_beta=scaling["beta_fast"],
        moe_args=MoEArgs(
            num_experts=config.num_local_experts,
            num_shared_experts=0,
            top_k=config.num_experts_per_tok,
            score_func="softmax",
            route_norm=True,
            gate_bias=True,
            score_before_experts=False,
            use_grouped_mm=False,
        ),
    )
    return GptOssModel(args).float().eval()  # type: ignore[no-any-return]


BUILDERS: dict[str, Callable[[Any], torch.nn.Module]] = {
    "llama2": _llama3,
    "llama3": _llama3,
    "llama3_2": _llama3,
    "llama4_text.plain": _llama4,
    "qwen3": _qwen3,
    "qwen3.tied": _qwen3,
    "qwen3_moe": _qwen3,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v3.no_q_lora": _deepseek_v3,
    "gpt_oss": _gpt_oss,
}


def logits(model: Any, state: State, config: Any) -> torch.Tensor:
    """Return fp32 logits after a strict load of *state*."""
    model.load_state_dict({name: value.float() for name, value in state.items()}, strict=True)
    masks = None
    if config.model_type == "gpt_oss":
        masks = model.get_attention_masks(tokens(), tokenizer=None)
    with torch.no_grad(), integer_histograms():
        return torch.as_tensor(model(tokens(), attention_masks=masks)).float()
