"""Map names that Megatron-based programs use to Megatron-Core's field names.

Sources: Megatron-Core's ``transformer_config.py`` (0.16), Megatron-LM's
``megatron/training/arguments.py`` and ``load_args_from_checkpoint``, the providers of
Megatron-Bridge 0.3, NeMo 2's ``collections/llm/gpt/model``.
"""

from __future__ import annotations

from collections.abc import Mapping

FIELD_BY_ARGUMENT: Mapping[str, str] = {
    "num_experts": "num_moe_experts",
    "norm_epsilon": "layernorm_epsilon",
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
    "use_rope_scaling": "rope_scaling",
}
"""Megatron-LM arguments that have another name in ``TransformerConfig``, by argument."""

NEGATED_ARGUMENTS: Mapping[str, str] = {
    "untie_embeddings_and_output_weights": "share_embeddings_and_output_weights",
    "disable_bias_linear": "add_bias_linear",
}
"""Megatron-LM arguments that are the negation of a field, by argument."""

ACTIVATION_ARGUMENTS: Mapping[str, tuple[str, bool]] = {
    "swiglu": ("silu", True),
    "quick_geglu": ("quick_gelu", True),
    "squared_relu": ("squared_relu", False),
}
"""Activation function, and whether it is gated, that each boolean argument selects."""

FUNCTION_PATHS: Mapping[str, str] = {
    "silu": "torch.nn.functional.silu",
    "gelu": "torch.nn.functional.gelu",
    "quick_gelu": "megatron.core.fusions.fused_bias_geglu.quick_gelu",
    "fast_gelu": "megatron.core.activations.fast_gelu",
    "squared_relu": "megatron.core.activations.squared_relu",
}
"""Import paths of the supported values of ``activation_func``, by activation name."""

FUNCTION_ALIASES: Mapping[str, str] = {"openai_gelu": "fast_gelu", "swish": "silu"}

LINEAR_ATTENTION_FIELDS = frozenset(
    {
        *("linear_attention_freq", "linear_conv_kernel_dim"),
        *("linear_key_head_dim", "linear_value_head_dim"),
        *("linear_num_key_heads", "linear_num_value_heads"),
    }
)
"""Fields that have no effect without ``experimental_attention_variant``."""
GATED_DELTA_NET = "gated_delta_net"

LENGTH_FIELDS = ("max_position_embeddings", "seq_length")
"""Fields with the maximum sequence length, the preferred one first."""
