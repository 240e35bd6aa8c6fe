"""Tiny models of mlx-lm and mlx-vlm whose family transformers lacks, under their published names.

The program's own ``sanitize`` reads the published names, so it decides which tensor is which.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.oracle import hf_models
from tests.oracle.hf_models import State
from tests.oracle.models import tokens

Config = Mapping[str, Any]

LING: dict[str, Any] = {
    "architectures": ["BailingMoeV2ForCausalLM"],
    "model_type": "bailing_moe",
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 40,
    "num_experts": 6,
    "num_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "score_function": "sigmoid",
    "routed_scaling_factor": 2.5,
    "moe_router_enable_expert_bias": True,
    "num_nextn_predict_layers": 0,
    "use_qk_norm": True,
    "use_bias": False,
    "use_qkv_bias": False,
    "norm_head": False,
    "partial_rotary_factor": 0.5,
    "rope_theta": 600000,
    "rope_scaling": None,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def ling() -> Config:
    """Ling 2: norms of queries and keys, a dense first layer, groups of experts."""
    return LING


def ling_1() -> Config:
    """Ling 1.5: softmax over experts, no correction bias, no norms of queries and keys."""
    without = ("n_group", "topk_group", "score_function", "moe_shared_expert_intermediate_size")
    return {name: value for name, value in LING.items() if name not in without} | {
        "architectures": ["BailingMoeForCausalLM"],
        "num_shared_experts": 2,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.0,
        "moe_router_enable_expert_bias": False,
        "use_qk_norm": False,
        "partial_rotary_factor": 1.0,
    }


def ling_biased() -> Config:
    """Ling with the biases of its configuration class, whose embeddings are tied."""
    return LING | {"use_qkv_bias": True, "tie_word_embeddings": True}


def ring_linear() -> Config:
    """Ring 2 Linear: lightning attention in two of three layers, heads of another size."""
    return LING | {
        "architectures": ["BailingMoeLinearV2ForCausalLM"],
        "model_type": "bailing_moe_linear",
        "num_hidden_layers": 4,
        "layer_group_size": 3,
        "group_norm_size": 2,
        "head_dim": 24,
        "moe_intermediate_size": 28,
        "moe_shared_expert_intermediate_size": 28,
    }


def publish_ling(state: State) -> State:
    """Rename the tensors of mlx-lm's Ling, and separate its experts."""
    found: State = {}
    for name, value in state.items():
        if ".switch_mlp." in name:
            before, after = name.split("switch_mlp")
            found |= {f"{before}experts.{n}{after}": one for n, one in enumerate(value)}
        else:
            found[name.replace("gate.gate_proj", "gate")] = value
    return found


KIMI_K3: dict[str, Any] = {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "model_type": "kimi_k3",
    "media_placeholder_token_id": 128,
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "kimi_linear",
        "vocab_size": 136,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 96,
        "linear_attn_config": {
            "num_heads": 4,
            "head_dim": 12,
            "short_conv_kernel_size": 4,
            "kda_layers": [1, 2],
            "full_attn_layers": [3],
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
        },
        "q_lora_rank": 40,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 20,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "num_experts": 6,
        "num_experts_per_token": 2,
        "num_shared_experts": 2,
        "moe_intermediate_size": 28,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 1,
        "routed_expert_hidden_size": 36,
        "latent_moe_use_norm": True,
        "attn_res_block_size": 2,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    "vision_config": {
        "vt_hidden_size": 24,
        "vt_intermediate_size": 40,
        "vt_num_hidden_layers": 2,
        "vt_num_attention_heads": 3,
        "qkv_hidden_size": 36,
        "patch_size": 4,
        "init_pos_emb_height": 6,
        "init_pos_emb_width": 6,
        "init_pos_emb_time": 4,
        "merge_kernel_size": [2, 2],
        "mm_hidden_size": 24,
        "text_hidden_size": 64,
        "attn_bias": False,
        "linear_bias": False,
        "patch_embed_proj_bias": False,
    },
}


def kimi_k3() -> Config:
    """Kimi K3: two layers of delta attention and one of latent attention, a dense first layer."""
    return KIMI_K3


def publish_kimi_k3(state: State) -> State:
    """Rename and separate the tensors of mlx-vlm's Kimi K3."""
    text = KIMI_K3["text_config"]
    found: State = {}
    for name, value in state.items():
        before, _, after = name.partition(".self_attn.")
        attention = f"{before}.self_attn."
        if name == "vision_tower.patch_embed.proj.weight":
            found[name] = value.permute(0, 3, 1, 2)
        elif after == "qkv_proj.weight":
            parts = zip("qkv", value.chunk(3), strict=True)
            found |= {f"{attention}{one}_proj.weight": part for one, part in parts}
        elif after == "qkv_conv.conv.weight":
            parts = zip("qkv", value.transpose(1, 2).chunk(3), strict=True)
            found |= {f"{attention}{one}_conv1d.weight": part for one, part in parts}
        elif after == "embed_q.weight":
            values = state[f"{attention}unembed_out.weight"]
            latent = torch.cat([value.transpose(1, 2), values], 1)
            found[f"{attention}kv_b_proj.weight"] = latent.reshape(-1, text["kv_lora_rank"])
        elif after == "unembed_out.weight":
            pass
        elif ".switch_mlp." in name:
            before, _, after = name.partition(".mlp.switch_mlp.")
            word = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}[after.partition(".")[0]]
            prefix = f"{before}.block_sparse_moe.experts"
            found |= {f"{prefix}.{n}.{word}.weight": one for n, one in enumerate(value)}
        elif name.endswith(".mlp.e_score_correction_bias"):
            found[name.replace("mlp.e_", "block_sparse_moe.gate.e_")] = value
        elif ".mlp." in name and ".layers.0." not in name and name.startswith("language"):
            found[name.replace(".mlp.", ".block_sparse_moe.")] = value
        else:
            found[name] = value
    return found


TINY: dict[str, tuple[Callable[[], Config], Callable[[State], State]]] = {
    "bailing_moe": (ling, publish_ling),
    "bailing_moe.ling1": (ling_1, publish_ling),
    "bailing_moe.biased": (ling_biased, publish_ling),
    "bailing_moe_linear": (ring_linear, publish_ling),
    "kimi_k3": (kimi_k3, publish_kimi_k3),
}
"""Function that returns config.json, and function that gives tensors their published names."""


def build(config: Config) -> Any:
    """Return mlx-lm's or mlx-vlm's model of *config*, its weights whatever they are."""
    import mlx.core as mx

    mx.disable_compile()
    mx.set_default_device(mx.cpu)
    if "vision_config" in config:
        from mlx_vlm import utils

        kind, _ = utils.get_model_and_args(config=dict(config), model_path=None)
        told = kind.ModelConfig.from_dict(dict(config))
        told = utils.update_module_configs(told, kind, dict(config), ["text", "vision"])
        model = kind.Model(told)
    else:
        from mlx_lm import utils as text_utils

        kind, arguments = text_utils._get_classes(dict(config))
        model = kind(arguments.from_dict(dict(config)))
    model.eval()
    return model


def random_state(config: Config, seed: int = 0) -> State:
    """Return random tensors of the model of *config*, named as the program saves them."""
    from tests.oracle.peers.mlx import Model

    parameters = Model(build(config), tied=bool(config["tie_word_embeddings"]))
    hf_models.randomize(parameters, seed=seed)
    return dict(parameters.state_dict())


def save(name: str, folder: Path) -> Path:
    """Write a random model called *name* in *folder* as published."""
    describe, publish = TINY[name]
    config = describe()
    folder.mkdir(parents=True)
    tensors = {key: value.contiguous() for key, value in publish(random_state(config)).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def load(folder: Path) -> Any:
    """Return mlx-lm's or mlx-vlm's model of *folder*, loaded strictly."""
    import mlx.core as mx

    mx.disable_compile()
    mx.set_default_device(mx.cpu)
    config = json.loads((folder / "config.json").read_text())
    if "vision_config" in config:
        from mlx_vlm import utils

        return utils.load_model(folder)
    from mlx_lm import utils as text_utils

    return text_utils.load_model(folder, strict=True)[0]


def logits(folder: Path) -> torch.Tensor:
    """Return fp32 logits of the model of *folder*, about pictures if it has a vision tower."""
    import mlx.core as mx

    from tests.oracle.peers.mlx import _torch

    config, model, ids = json.loads((folder / "config.json").read_text()), load(folder), tokens()
    if "vision_config" not in config:
        return _torch(model(mx.array(ids.numpy())))
    vision = config["vision_config"]
    ids[:, 2:8] = config["media_placeholder_token_id"]
    patches = mx.random.normal(
        (48, 3, vision["patch_size"], vision["patch_size"]), key=mx.random.key(11)
    )
    found = model(mx.array(ids.numpy()), patches, grid_thws=[[1, 4, 6]] * 2)
    return _torch(getattr(found, "logits", found))
