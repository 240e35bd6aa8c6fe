"""What Megatron-Core is told so that its GPT model is transformers' of a configuration.

A recipe holds fields of ``TransformerConfig`` and arguments of ``GPTModel`` and imports neither, so
that the test process can make it and ranks can run it (:mod:`tests.oracle.mcore_ranks`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.oracle.tiny import TINY, family_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

VOCABULARY = 131
DIVISIBLE = 8
"""The vocabulary is padded to a multiple of this, times the ranks of tensor parallelism."""

PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")
SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 60,
    "intermediate_size": 46,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
}
"""No size is a multiple of another's; two ranks divide the heads, two stages the layers."""

EXPERTS: Mapping[str, Any] = {"moe_intermediate_size": 22}
LATENT: Mapping[str, Any] = {**EXPERTS, "num_key_value_heads": 6, "num_attention_heads": 6}
GROUPS: Mapping[str, Any] = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}
"""Megatron-Core weighs a group by as many of its experts as the token gets from it on average."""

HEAD: Mapping[str, Any] = {"head_dim": 14}
KINDS = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
"""Letters of Megatron-Core for the layers of hybrid models."""

QUICK_SCALE: Mapping[str, Any] = {"original_max_position_embeddings": 5}
"""Queries that grow within the few tokens of a proof, of parameters of RoPE."""

CHANGES: Mapping[str, Mapping[str, Any]] = {
    "llama2": {"num_key_value_heads": 6},
    "mistral": HEAD,
    "ministral3": {**HEAD, "rope_parameters": QUICK_SCALE},
    "mistral4": {**LATENT, "head_dim": 24, "n_routed_experts": 6, "rope_parameters": QUICK_SCALE},
    "falcon3": HEAD,
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 26},
    "qwen3": HEAD,
    "qwen3_moe": {**HEAD, **EXPERTS},
    "qwen3_next": {
        **EXPERTS,
        "head_dim": 24,
        "shared_expert_intermediate_size": 26,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 14,
        "linear_num_value_heads": 8,
        "linear_value_head_dim": 18,
    },
    "qwen3_5_text": {
        "head_dim": 24,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 14,
        "linear_num_value_heads": 8,
        "linear_value_head_dim": 18,
    },
    "qwen3_5_moe_text": {
        **EXPERTS,
        "num_experts": 6,
        "head_dim": 24,
        "shared_expert_intermediate_size": 26,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 14,
        "linear_num_value_heads": 8,
        "linear_value_head_dim": 18,
    },
    "glm": {"head_dim": 12},
    "glm4_moe": {"head_dim": 12, **EXPERTS},
    "gpt_oss": HEAD,
    "olmoe": {"num_key_value_heads": 6},
    "nemotron": HEAD,
    "nemotron_h": {
        **HEAD,
        **EXPERTS,
        "num_hidden_layers": None,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    },
    "deepseek_v2": {**LATENT, **GROUPS, "num_experts_per_tok": 2},
    "deepseek_v3": {**LATENT, **GROUPS, "num_experts_per_tok": 4},
    "deepseek_v32": {**LATENT, **GROUPS, "num_experts_per_tok": 4},
    # transformers norms latents with this epsilon, whatever the configuration says
    "glm_moe_dsa": {**LATENT, "n_routed_experts": 6, "rms_norm_eps": 1e-6},
}
MODELS = (
    "llama2",
    "llama3",
    "llama3_2",
    "mistral",
    "ministral3",
    "ministral3.unscaled",
    "mistral4",
    "qwen2",
    "qwen3",
    "qwen3.tied",
    "falcon3",
    "starcoder2",
    "starcoder2.untied",
    "phi3",
    "glm",
    "nemotron",
    "nemotron_h",
    "nemotron_h.latent",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "olmoe",
    "glm4_moe",
    "deepseek_v2",
    "deepseek_v2.lite",
    "deepseek_v3",
    "gpt_oss",
)
"""Keys of ``TINY`` that Megatron-Core can run without Transformer Engine."""

NEWER = ("deepseek_v32", "glm_moe_dsa", "glm_moe_dsa.full")
"""More of them, which need Megatron-Core 0.19: before, sparse attention had other tensors."""


class Ranks(NamedTuple):
    """How ranks divide a model; the ranks of data parallelism share the experts.

    Attributes:
        tensor: Tensor-parallel ranks.
        pipeline: Pipeline stages.
        expert: Expert-parallel ranks.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.expert

    def __str__(self) -> str:
        return f"tp{self.tensor}-pp{self.pipeline}-ep{self.expert}"


class Recipe(NamedTuple):
    """A model of Megatron-Core, in plain values.

    Attributes:
        options: Fields of ``TransformerConfig``; functions by their names.
        model: Arguments of ``GPTModel``, without vocabulary and parallelism.
        extra: Attributes that the configuration has beside its fields.
        latent: Whether attention is multi-latent.
        whole_norms: Whether queries and keys are normed over all heads, as OLMoE's are.
        local: Whether names are those of the local specification, not of Transformer Engine's.
        pattern: The kind of each layer of a hybrid model, in its letters, or empty.
    """

    options: Mapping[str, Any]
    model: Mapping[str, Any]
    extra: Mapping[str, Any]
    latent: bool
    whole_norms: bool
    local: bool
    pattern: str = ""

    @property
    def tied(self) -> bool:
        return bool(self.model["share_embeddings_and_output_weights"])

    @property
    def experts(self) -> bool:
        return "num_moe_experts" in self.options

    @property
    def named_twice(self) -> bool:
        """Return whether there is a local specification that names norms otherwise."""
        only_one = self.pattern or "experimental_attention_variant" in self.options
        return self.experts and not only_one


def tiny(name: str, **sizes: int) -> PretrainedConfig:
    """Return transformers' configuration of *name* with sizes that do not divide each other.

    *sizes* replace some of these.
    """
    config = TINY[name]()
    given = config.to_dict()
    changes = dict(SIZES) | dict(CHANGES.get(family_of(name), {}))
    if "rope_parameters" in changes:
        changes["rope_parameters"] = given["rope_parameters"] | changes["rope_parameters"]
    if "head_dim" not in changes and given.get("head_dim"):
        changes["head_dim"] = given.get("qk_rope_head_dim") or 10
    if given.get("mlp_only_layers"):
        changes["mlp_only_layers"] = []  # which ckptctl cannot compare with `moe_layer_freq`
    if given.get("layer_types"):
        changes["layer_types"] = (given["layer_types"] * 4)[:4]
    if given.get("indexer_types"):
        changes["indexer_types"] = (given["indexer_types"] * 4)[:4]
    if isinstance(given.get("moe_layer_types"), list) or isinstance(
        given.get("mlp_layer_types"), list
    ):
        given.pop("mlp_layer_types", None)
        given.pop("moe_layer_types", None)
    return type(config)(**given | changes | sizes)


def padded(vocabulary: int, tensor: int) -> int:
    """Return the rows of an embedding that *tensor* ranks share."""
    unit = DIVISIBLE * tensor
    return -(-vocabulary // unit) * unit


def recipe(name: str, **sizes: int) -> Recipe:
    """Return what Megatron-Core needs for the model of :func:`tiny`."""
    config = tiny(name, **sizes)
    options = _common(config)
    special = SPECIAL.get(family_of(name))
    extra: dict[str, Any] = {}
    model = _positions(config)
    if special:
        special(config, options, model, extra)
    latent = hasattr(config, "kv_lora_rank")
    pattern = "".join(KINDS[kind] for kind in getattr(config, "layers_block_type", ()))
    return Recipe(options, model, extra, latent, family_of(name) == "olmoe", False, pattern)


def _common(config: PretrainedConfig) -> dict[str, Any]:
    heads = config.num_attention_heads
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": getattr(config, "intermediate_size", None)
        or config.moe_intermediate_size,
        "num_attention_heads": heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": getattr(config, "rms_norm_eps", 1e-5),
        "activation_func": "silu",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _positions(config: PretrainedConfig) -> dict[str, Any]:
    rope = getattr(config, "rope_parameters", None)
    if rope is None:
        return {"share_embeddings_and_output_weights": config.tie_word_embeddings}
    found = {
        "position_embedding_type": "rope",
        "rotary_base": rope["rope_theta"],
        "rotary_percent": rope.get("partial_rotary_factor", 1.0),
        "share_embeddings_and_output_weights": config.tie_word_embeddings,
    }
    if rope["rope_type"] == "llama3":
        found |= {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}
    return found


Fields = dict[str, Any]


def _routed(config: PretrainedConfig, options: Fields, *_: Fields) -> None:
    count = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    options |= {
        "num_moe_experts": count or config.n_routed_experts,
        "moe_ffn_hidden_size": getattr(config, "moe_intermediate_size", config.intermediate_size),
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_pre_softmax": not getattr(config, "norm_topk_prob", True),
        "moe_router_load_balancing_type": "none",
    }
    dense = getattr(config, "mlp_only_layers", None) or range(
        getattr(config, "first_k_dense_replace", 0)
    )
    if dense:
        options["moe_layer_freq"] = [int(i not in dense) for i in range(config.num_hidden_layers)]
    shared = getattr(config, "n_shared_experts", 0)
    if shared:
        options["moe_shared_expert_intermediate_size"] = shared * config.moe_intermediate_size


def _qk_norms(config: PretrainedConfig, options: Fields, *rest: Fields) -> None:
    options["qk_layernorm"] = True
    if hasattr(config, "num_experts"):
        _routed(config, options, *rest)


def _qwen2(config: PretrainedConfig, options: Fields, *_: Fields) -> None:
    options["add_qkv_bias"] = True


def _qwen2_moe(config: PretrainedConfig, options: Fields, *rest: Fields) -> None:
    _routed(config, options, *rest)
    options |= {
        "add_qkv_bias": True,
        "moe_shared_expert_intermediate_size": config.shared_expert_intermediate_size,
        "moe_shared_expert_gate": True,
    }


def _qwen3_next(config: PretrainedConfig, options: Fields, *rest: Fields) -> None:
    _qk_norms(config, options, *rest)
    if "num_moe_experts" in options:
        options |= {
            "moe_shared_expert_intermediate_size": config.shared_expert_intermediate_size,
            "moe_shared_expert_gate": True,
        }
    options |= {
        "layernorm_zero_centered_gamma": True,
        "attention_output_gate": True,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": 4,
    }
    names = (name for name in config.to_dict() if name.startswith("linear_"))
    options |= {name: getattr(config, name) for name in names}


def _glm(config: PretrainedConfig, options: Fields, *_: Fields) -> None:
    options |= {"rotary_interleaved": True, "add_qkv_bias": config.attention_bias}


def _starcoder2(config: PretrainedConfig, options: Fields, *_: Fields) -> None:
    options |= {
        "normalization": "LayerNorm",
        "layernorm_epsilon": config.norm_epsilon,
        "activation_func": "gelu",
        "gated_linear_unit": False,
        "add_bias_linear": True,
    }


def _nemotron(config: PretrainedConfig, options: Fields, model: Fields, extra: Fields) -> None:
    options |= {
        "normalization": "LayerNorm",
        "layernorm_zero_centered_gamma": True,
        "layernorm_epsilon": config.norm_eps,
        "activation_func": "squared_relu",
        "gated_linear_unit": False,
    }
    model["rotary_percent"] = config.rope_parameters.get(
        "partial_rotary_factor", getattr(config, "partial_rotary_factor", 1.0)
    )


def _sigmoid(config: PretrainedConfig, options: Fields, *rest: Fields) -> None:
    _routed(config, options, *rest)
    options |= {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_pre_softmax": True,
        "moe_router_num_groups": config.n_group,
        "moe_router_group_topk": config.topk_group,
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
    }


def _glm4_moe(config: PretrainedConfig, options: Fields, *rest: Fields) -> None:
    _sigmoid(config, options, *rest)
    options |= {"qk_layernorm": True, "add_qkv_bias": True}


def _latent(config: PretrainedConfig, options: Fields) -> None:
    options |= {
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "kv_channels": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "num_query_groups": config.num_attention_heads,
        "qk_layernorm": True,
        "rope_type": "rope",
        "rotary_base": config.rope_parameters["rope_theta"],
        "rotary_scaling_factor": 1.0,
    }


def _deepseek_v2(config: PretrainedConfig, options: Fields, *rest: Fields) -> None:
    _routed(config, options, *rest)
    _latent(config, options)
    options |= {
        "moe_router_pre_softmax": True,
        "moe_router_num_groups": config.n_group,
        "moe_router_group_topk": config.topk_group,
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
    }


def _deepseek_v3(config: PretrainedConfig, options: Fields, *rest: Fields) -> None:
    _sigmoid(config, options, *rest)
    _latent(config, options)


def _sparse(config: PretrainedConfig, options: Fields, *rest: Fields) -> None:
    _deepseek_v3(config, options, *rest)
    kinds = getattr(config, "indexer_types", None) or []
    options |= {
        "experimental_attention_variant": "dsa",
        "transformer_impl": "local",
        "dsa_indexer_n_heads": config.index_n_heads,
        "dsa_indexer_head_dim": config.index_head_dim,
        "dsa_indexer_topk": config.index_topk,
        "dsa_indexer_rope_interleaved": family_of(config.model_type) == "glm_moe_dsa",
        "dsa_indexer_rotate_activation": False,  # an orthogonal matrix, in bfloat16 only
        "dsa_indexer_k_norm_epsilon": 1e-6,
    }
    if "shared" in kinds:
        assert kinds == ["full", "full", "shared", "full"]
        options |= {"dsa_indexer_topk_freq": 2, "dsa_indexer_skip_topk_offset": 2}


def _yarn(rope: Mapping[str, Any]) -> Fields:
    names = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
    found = {f"yarn_{name}": rope[name] for name in names}
    found["yarn_rotary_scaling_factor"] = found.pop("yarn_factor")
    return found | {
        "yarn_mscale": rope.get("mscale"),
        "yarn_mscale_all_dim": rope.get("mscale_all_dim"),
        "yarn_correction_range_round_to_int": rope.get("truncate", True),
    }


def _scaled_queries(config: PretrainedConfig) -> Fields:
    rope = config.rope_parameters
    return {
        "llama_4_scaling_beta": rope["llama_4_scaling_beta"],
        "llama_4_scaling_length": rope["original_max_position_embeddings"],
    }


def _ministral3(config: PretrainedConfig, options: Fields, model: Fields, extra: Fields) -> None:
    extra |= _scaled_queries(config)
    if config.rope_parameters["rope_type"] == "yarn":
        model["position_embedding_type"] = "yarn"
        extra |= _yarn(config.rope_parameters)


def _mistral4(config: PretrainedConfig, options: Fields, model: Fields, extra: Fields) -> None:
    _routed(config, options)
    _latent(config, options)
    rope = config.rope_parameters
    names = ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale")
    options |= {
        "rope_type": "yarn",
        "rotary_scaling_factor": rope["factor"],
        **{name: rope[name] for name in (*names, "mscale_all_dim")},
    }
    extra |= _scaled_queries(config)


def _nemotron_h(config: PretrainedConfig, options: Fields, *rest: Fields) -> None:
    _sigmoid(config, options, *rest)
    options |= {
        "layernorm_epsilon": config.layer_norm_epsilon,
        "activation_func": "squared_relu",
        "gated_linear_unit": False,
        "is_hybrid_model": True,
        "mamba_num_heads": config.mamba_num_heads,
        "mamba_head_dim": config.mamba_head_dim,
        "mamba_num_groups": config.n_groups,
        "mamba_state_dim": config.ssm_state_size,
        "use_mamba_mem_eff_path": False,
        "moe_shared_expert_intermediate_size": config.moe_shared_expert_intermediate_size,
        "moe_latent_size": config.moe_latent_size,
    }


def _gpt_oss(config: PretrainedConfig, options: Fields, model: Fields, extra: Fields) -> None:
    _routed(config, options)
    rope = config.rope_parameters
    options |= {
        "expert_tensor_parallel_size": 1,
        "add_bias_linear": True,
        "activation_func": "quick_gelu",
        "activation_func_clamp_value": 7.0,
        "glu_linear_offset": 1.0,
        "softmax_type": "learnable",
        "window_size": (config.sliding_window - 1, 0),
        "window_attn_skip_freq": 2,
        "moe_router_pre_softmax": False,
    }
    model["position_embedding_type"] = "yarn"
    extra |= _yarn(rope)


SPECIAL: Mapping[str, Callable[[PretrainedConfig, Fields, Fields, Fields], None]] = {
    "ministral3": _ministral3,
    "mistral4": _mistral4,
    "qwen2": _qwen2,
    "qwen3": _qk_norms,
    "glm": _glm,
    "starcoder2": _starcoder2,
    "nemotron": _nemotron,
    "nemotron_h": _nemotron_h,
    "mixtral": _routed,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qk_norms,
    "qwen3_next": _qwen3_next,
    "qwen3_5_text": _qwen3_next,
    "qwen3_5_moe_text": _qwen3_next,
    "olmoe": _qk_norms,
    "glm4_moe": _glm4_moe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v32": _sparse,
    "glm_moe_dsa": _sparse,
    "gpt_oss": _gpt_oss,
}
