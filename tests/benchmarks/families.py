"""Shapes of families whose tensors are stacked, fused or transposed between layouts.

Each kind is what stands on disk: ``mixtral-hf`` has one tensor per expert, ``mixtral-v5`` stacks
them as transformers 5 does in memory; ``phi3-hf`` fuses queries, keys and values and both halves of
the feed-forward, ``phi3-tune`` does not; the experts of ``gptoss-hf`` are ``[in, out]``, where
OpenAI's are ``[out, in]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

Shapes = dict[str, tuple[int, ...]]
D, HEADS, KV, HEAD, VOCAB = 2048, 32, 8, 64, 32000
EXPERTS, FFN, PHI_FFN, OSS_FFN = 16, 1024, 8192, 2048
WIDE, NARROW = 512_000_000, 8


def shapes_for(kind: str, nbytes: int) -> Shapes:
    """Return the bf16 model of about *nbytes* bytes; a narrow one of few."""
    narrow = 1 if nbytes >= WIDE else NARROW
    for layers in count(1):
        found = {
            name: tuple(size // narrow if size > HEAD else size for size in shape)
            for name, shape in KINDS[kind](layers).items()
        }
        if 2 * sum(map(math.prod, found.values())) >= nbytes:
            return found
    raise AssertionError


def config_for(kind: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the parts of ``config.json`` that a conversion looks at; of the ``-hf`` kinds."""
    if not kind.endswith("-hf"):
        return {}
    layers = 1 + max(int(key.split(".")[2]) for key in shapes if key.startswith("model.layers."))
    model_type = {"mixtral": "mixtral", "phi3": "phi3", "gptoss": "gpt_oss"}[kind.split("-")[0]]
    vocab, width = shapes["model.embed_tokens.weight"]
    down = next(shape for key, shape in shapes.items() if "down_proj" in key or ".w2." in key)
    experts = {} if model_type == "phi3" else {"num_local_experts": EXPERTS}
    return {
        "model_type": model_type,
        "hidden_size": width,
        "intermediate_size": down[-2] if model_type == "gpt_oss" else down[-1],
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": HEAD * width // D,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        **experts,
    }


def _model(layers: int, layer: Callable[[str], Shapes]) -> Shapes:
    found: Shapes = {"model.embed_tokens.weight": (VOCAB, D)}
    for index in range(layers):
        prefix = f"model.layers.{index}."
        found |= layer(prefix)
        found[f"{prefix}input_layernorm.weight"] = (D,)
        found[f"{prefix}post_attention_layernorm.weight"] = (D,)
    return found | {"model.norm.weight": (D,), "lm_head.weight": (VOCAB, D)}


def _attention(prefix: str) -> Shapes:
    return {
        f"{prefix}self_attn.q_proj.weight": (HEADS * HEAD, D),
        f"{prefix}self_attn.k_proj.weight": (KV * HEAD, D),
        f"{prefix}self_attn.v_proj.weight": (KV * HEAD, D),
        f"{prefix}self_attn.o_proj.weight": (D, HEADS * HEAD),
    }


def _mixtral_hf(prefix: str) -> Shapes:
    experts = {
        f"{prefix}block_sparse_moe.experts.{x}.{name}.weight": shape
        for x in range(EXPERTS)
        for name, shape in (("w1", (FFN, D)), ("w2", (D, FFN)), ("w3", (FFN, D)))
    }
    return _attention(prefix) | {f"{prefix}block_sparse_moe.gate.weight": (EXPERTS, D)} | experts


def _mixtral_v5(prefix: str) -> Shapes:
    return _attention(prefix) | {
        f"{prefix}mlp.gate.weight": (EXPERTS, D),
        f"{prefix}mlp.experts.gate_up_proj": (EXPERTS, 2 * FFN, D),
        f"{prefix}mlp.experts.down_proj": (EXPERTS, D, FFN),
    }


def _phi3_hf(prefix: str) -> Shapes:
    return {
        f"{prefix}self_attn.qkv_proj.weight": ((HEADS + 2 * KV) * HEAD, D),
        f"{prefix}self_attn.o_proj.weight": (D, HEADS * HEAD),
        f"{prefix}mlp.gate_up_proj.weight": (2 * PHI_FFN, D),
        f"{prefix}mlp.down_proj.weight": (D, PHI_FFN),
    }


def _gptoss_hf(prefix: str) -> Shapes:
    biases = {
        f"{prefix}self_attn.{name}_proj.bias": (size,)
        for name, size in (("q", HEADS * HEAD), ("k", KV * HEAD), ("v", KV * HEAD), ("o", D))
    }
    return {
        **_attention(prefix),
        **biases,
        f"{prefix}self_attn.sinks": (HEADS,),
        f"{prefix}mlp.router.weight": (EXPERTS, D),
        f"{prefix}mlp.router.bias": (EXPERTS,),
        f"{prefix}mlp.experts.gate_up_proj": (EXPERTS, D, 2 * OSS_FFN),
        f"{prefix}mlp.experts.gate_up_proj_bias": (EXPERTS, 2 * OSS_FFN),
        f"{prefix}mlp.experts.down_proj": (EXPERTS, OSS_FFN, D),
        f"{prefix}mlp.experts.down_proj_bias": (EXPERTS, D),
    }


def _phi3_tune(layers: int) -> Shapes:
    found: Shapes = {"tok_embeddings.weight": (VOCAB, D)}
    for index in range(layers):
        prefix = f"layers.{index}."
        attention = {"q": HEADS * HEAD, "k": KV * HEAD, "v": KV * HEAD}
        found |= {f"{prefix}attn.{n}_proj.weight": (rows, D) for n, rows in attention.items()}
        found |= {
            f"{prefix}attn.output_proj.weight": (D, HEADS * HEAD),
            f"{prefix}mlp.w1.weight": (PHI_FFN, D),
            f"{prefix}mlp.w2.weight": (D, PHI_FFN),
            f"{prefix}mlp.w3.weight": (PHI_FFN, D),
            f"{prefix}sa_norm.scale": (D,),
            f"{prefix}mlp_norm.scale": (D,),
        }
    return found | {"norm.scale": (D,), "output.weight": (VOCAB, D)}


KINDS: dict[str, Callable[[int], Shapes]] = {
    "mixtral-hf": lambda layers: _model(layers, _mixtral_hf),
    "mixtral-v5": lambda layers: _model(layers, _mixtral_v5),
    "phi3-hf": lambda layers: _model(layers, _phi3_hf),
    "phi3-tune": _phi3_tune,
    "gptoss-hf": lambda layers: _model(layers, _gptoss_hf),
}
