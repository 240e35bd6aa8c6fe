"""Models of mlx-lm at tiny size whose family transformers lacks, under their published names.

mlx-lm's own ``sanitize`` reads the published names, so it decides which tensor is which.
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


TINY: dict[str, tuple[Callable[[], Config], Callable[[State], State]]] = {
    "bailing_moe": (ling, publish_ling),
    "bailing_moe.ling1": (ling_1, publish_ling),
    "bailing_moe.biased": (ling_biased, publish_ling),
}
"""Function that returns config.json, and function that gives mlx-lm's tensors published names."""


def build(config: Config) -> Any:
    """Return mlx-lm's model of *config*, its weights whatever they are."""
    import mlx.core as mx
    from mlx_lm import utils

    mx.disable_compile()
    mx.set_default_device(mx.cpu)
    kind, arguments = utils._get_classes(dict(config))
    model = kind(arguments.from_dict(dict(config)))
    model.eval()
    return model


def random_state(config: Config, seed: int = 0) -> State:
    """Return random tensors of mlx-lm's model of *config*, named as mlx-lm saves them."""
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


def logits(folder: Path) -> torch.Tensor:
    """Return fp32 logits of mlx-lm's model of *folder*, loaded strictly."""
    import mlx.core as mx
    from mlx_lm import utils

    from tests.oracle.peers.mlx import _torch

    mx.disable_compile()
    mx.set_default_device(mx.cpu)
    model, _ = utils.load_model(folder, strict=True)
    return _torch(model(mx.array(tokens().numpy())))
