"""mlx-lm 0.32 on MLX's CPU backend: its models, in fp32, uncompiled.

A name of ``TINY`` in :data:`BUILDERS` is all that a further model needs: mlx-lm finds the class by
``model_type``. It is given config.json as transformers 4 spelled it, as published models have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.oracle.hf_models import State
from tests.oracle.models import tokens

REQUIRES: tuple[str, ...] = ("mlx", "mlx_lm")
LAYOUT = "mlx"
PUBLISHED: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "q_lora_rank": None,
        "head_dim": 16,
        "moe_shared_expert_intermediate_size": 40,
    },
    "kimi_linear": {
        "linear_attn_config": {
            "num_heads": 4,
            "head_dim": 12,
            "short_conv_kernel_size": 4,
            "full_attn_layers": [3],
            "kda_layers": [1, 2],
        },
        "first_k_dense_replace": 1,
        "rope_theta": 10000.0,
        "mla_use_nope": True,
    },
    "longcat_flash": {
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 1],
        "moe_layer_freq": [0, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": 16,
        "n_shared_experts": None,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "layernorm_epsilon": 1e-5,
        "rope_theta": 5000000.0,
        "swa_rope_theta": 10000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 24,
        "swa_v_head_dim": 16,
        "partial_rotary_factor": 0.334,
    },
    "step3p5": {
        "attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 2},
        "moe_layers_enum": "1,2",
        "use_head_wise_attn_gate": True,
    },
    "step3p5_vision": {"width": 16, "layers": 2, "heads": 2},
    "exaone_moe": {"is_moe_layer": [False, True, True]},
    "gpt2": {"n_ctx": 64},
    "apertus": {"mlp_bias": False, "post_norm": False, "qk_norm": True},
    "lfm2": {"block_dim": 64},
}
"""What mlx-lm asks for and published models say, although transformers reads it no more."""
EARLIER = {"linear_attention": "mamba", "full_attention": "attention"}
"""Kinds of layers as published Granites call them."""
UNSCALED = {"deepseek_v2": {"factor": 1.0}}
"""What stands for no scaling of rotary frequencies, where mlx-lm asks for one."""

WITHIN = {"minimax_m3_vl_text": "minimax_m3_vl"}
"""Model types of which mlx-lm only has the one that contains them."""

TEXT_ALONE = {"qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"}
"""How mlx-lm calls models whose vision towers it leaves out."""


class Model(torch.nn.Module):
    """The parameters of a model of mlx-lm as tensors of torch, without a head that is tied."""

    def __init__(self, model: Any, tied: bool) -> None:
        from mlx.utils import tree_flatten

        super().__init__()
        self._state = {name: _torch(value) for name, value in tree_flatten(model.parameters())}
        if tied:
            self._state.pop("lm_head.weight", None)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        """Return the parameters as mlx-lm saves them; who changes them changes the model."""
        return self._state


def spelled_as_before(config: Any) -> dict[str, Any]:
    """Return config.json of transformers' *config* as transformers 4 wrote it."""
    found: dict[str, Any] = config.to_dict()
    for other, name in config.attribute_map.items():
        found.setdefault(other, found.get(name))
    for name in config.sub_configs:
        if found.get(name):
            found[name] = spelled_as_before(getattr(config, name))
    if found.get("num_attention_heads"):
        own = found["hidden_size"] // found["num_attention_heads"]
        found["head_dim"] = found.get("head_dim") or own
    local = [kind == "sliding_attention" for kind in found.get("layer_types") or ()]
    if config.model_type == "exaone4":
        found["sliding_window_pattern"] = "".join("L" if near else "G" for near in local)
    elif any(local):
        found["sliding_window_pattern"] = local.index(False) + 1
    for other in (found.get("per_layer_config") or {}).values():  # Gemma 4
        found |= {f"global_{name}": size for name, size in other.items()}
        found["num_global_key_value_heads"] = other.get("num_key_value_heads")
    if config.model_type == "granitemoehybrid":
        found["layer_types"] = [EARLIER[kind] for kind in config.layer_types]
    found |= PUBLISHED.get(config.model_type, {})
    rope = found.get("rope_parameters") or {}
    if "sliding_attention" in rope:
        found["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    found |= {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    if config.model_type == "gpt_neox":
        found["rotary_emb_base"] = rope["rope_theta"]
        found["rotary_pct"] = rope["partial_rotary_factor"]
    if config.model_type == "step3p5":
        each = [config.rope_parameters[kind] for kind in config.layer_types]
        found["rope_theta"] = [one["rope_theta"] for one in each]
        found["partial_rotary_factors"] = [one["partial_rotary_factor"] for one in each]
    scaled = rope.get("rope_type", "default") != "default"
    return found | {"rope_scaling": dict(rope) if scaled else UNSCALED.get(config.model_type)}


def built(config: Any) -> Any:
    """Return mlx-lm's model of transformers' *config*, its weights whatever they are."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm import utils

    mx.disable_compile()
    mx.set_default_device(mx.cpu)
    wanted = spelled_as_before(config)
    wanted["model_type"] = TEXT_ALONE.get(wanted["model_type"], wanted["model_type"])
    if outer := WITHIN.get(wanted["model_type"]):
        wanted = {"model_type": outer, "text_config": wanted}
    kind, arguments = utils._get_classes(wanted)
    model = kind(arguments.from_dict(wanted))
    if config.model_type == "longcat_flash":
        for _, module in model.named_modules():
            if isinstance(module, nn.RMSNorm) and module.weight.size != config.hidden_size:
                module.eps = 1e-6
    model.eval()
    return model


def build(config: Any) -> torch.nn.Module:
    """Return the parameters of mlx-lm's model of transformers' *config*."""
    return Model(built(config), config.tie_word_embeddings)


NAMES = (
    *("llama2", "llama3", "llama3_2", "falcon3", "mistral", "mistral.7b", "ministral3"),
    *("qwen2", "qwen2.tied", "qwen2_moe.sparse", "qwen3", "qwen3.tied"),
    *("qwen3_moe", "qwen3_moe.mixed", "qwen3_next"),
    *("qwen3_5_text", "qwen3_5_moe_text"),
    *("gemma", "gemma2.global", "gemma3_text", "phi2", "phi3", "phi3.phi4_mini"),
    *("mixtral", "deepseek_v2", "deepseek_v2.lite", "glm4", "glm4_moe.ungrouped", "olmoe"),
    *("olmo2", "olmo3", "granite", "granite.tied", "smollm3", "cohere2.square"),
    *("starcoder2", "starcoder2.untied", "ernie4_5", "ernie4_5.bias", "exaone4"),
    *("hunyuan_v1_dense", "nemotron", "seed_oss", "stablelm"),
    *("minimax_m2", "mistral4", "deepseek_v32.ungrouped", "glm_moe_dsa.full", "glm4_moe_lite"),
    *("gemma4.text", "gemma4_unified.text", "gemma4_text", "gemma4_text.large", "gemma4_text.moe"),
    *("nemotron_h", "nemotron_h.latent", "granitemoehybrid", "granitemoehybrid_dense"),
    *("lfm2", "lfm2_moe", "apertus", "glm.whole", "gpt_neox.wide"),
    *("gpt2.wide", "cohere", "cohere.normed", "granitemoe", "jamba.all", "exaone_moe"),
    *("kimi_linear", "bailing_hybrid", "mimo_v2_flash", "laguna", "longcat_flash"),
    *("gpt_oss.truncated", "deepseek_v3", "deepseek_v3.no_q_lora"),
    *("minimax_m3", "step3p5"),
)
BUILDERS: dict[str, Callable[[Any], torch.nn.Module]] = dict.fromkeys(NAMES, build)


@contextmanager
def tanh_gelu(config: Any) -> Iterator[None]:
    """Let models have the tanh in their GELU for which mlx-lm takes the exact one."""
    import mlx.nn as nn

    exact = nn.gelu
    nn.gelu = nn.gelu_approx if config.model_type in ("gemma", "starcoder2") else exact
    yield
    nn.gelu = exact


def logits(model: Any, state: State, config: Any) -> torch.Tensor:
    """Return fp32 logits after a strict load of *state*.

    Raises:
        AssertionError: mlx-lm would change what it has saved itself, names or elements.
    """
    import mlx.core as mx

    weights = {name: _mlx(value) for name, value in state.items()}
    run = built(config)
    if hasattr(run, "sanitize"):
        cleaned = run.sanitize(dict(weights))
        assert cleaned.keys() == weights.keys()
        assert all(mx.array_equal(value, weights[name]) for name, value in cleaned.items())
    run.load_weights(list(weights.items()), strict=True)
    with tanh_gelu(config):
        return _torch(run(mx.array(tokens().numpy())))


def _torch(value: Any) -> torch.Tensor:
    import mlx.core as mx
    import numpy as np

    is_whole = mx.issubdtype(value.dtype, mx.integer)
    return torch.from_numpy(np.array(value if is_whole else value.astype(mx.float32)))


def _mlx(value: torch.Tensor) -> Any:
    import mlx.core as mx

    found = value.float() if value.is_floating_point() else value
    return mx.array(found.contiguous().numpy())
