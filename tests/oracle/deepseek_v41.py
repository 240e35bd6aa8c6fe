"""A tiny DeepSeek-V4.1 under its published names, which mlx-vlm loads strictly.

transformers has no such model, and mlx-lm's has neither pictures nor memories of n-grams.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.oracle.hf_models import State

TEXT: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "vocab_size": 136,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 32,
    "o_lora_rank": 32,
    "o_groups": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "compress_ratios": [0, 2, 1, 1, 0, 0],
    "kv_source_layer_ids": [1, 2],
    "index_source_layer_ids": [1, 2, 3],
    "candidate_source_layer_id": 2,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 8,
    "hc_mult": 2,
    "engram_layer_ids": [1],
    "engram_num_embeddings": [96],
    "engram_vocab_size": 20,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_max_ngram_size": 3,
    "dspark_n_routed_experts": 3,
    "dspark_num_experts_per_tok": 2,
    "dspark_markov_rank": 12,
    "dspark_target_layer_ids": [1, 2, 3],
}
VISION: dict[str, Any] = {
    "model_type": "deepseek_v41_vision",
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "patch_size": 4,
    "downsample_ratio": 2,
}
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "tie_word_embeddings": False,
    "image_token_id": 130,
    "text_config": TEXT,
    "vision_config": VISION,
}


def list_layer(prefix: str, experts: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of a layer's tensors that all layers have."""
    d, m, e, heads = 64, 32, 32, 4
    for part in ("attn", "ffn"):
        yield f"{prefix}.{part}_norm.weight", (d,)
        yield f"{prefix}.hc_{part}_fn", (8, 2 * d)
        yield f"{prefix}.hc_{part}_base", (8,)
        yield f"{prefix}.hc_{part}_scale", (3,)
    yield f"{prefix}.attn.attn_sink", (heads,)
    yield f"{prefix}.attn.wq_a.weight", (32, d)
    yield f"{prefix}.attn.q_norm.weight", (32,)
    yield f"{prefix}.attn.wq_b.weight", (heads * e, 32)
    yield f"{prefix}.attn.wkv.weight", (e, d)
    yield f"{prefix}.attn.kv_norm.weight", (e,)
    yield f"{prefix}.attn.wo_a.weight", (2 * 32, heads * e // 2)
    yield f"{prefix}.attn.wo_b.weight", (d, 2 * 32)
    yield f"{prefix}.ffn.gate.weight", (experts, d)
    yield f"{prefix}.ffn.gate.bias", (experts,)
    yield f"{prefix}.ffn.gate.bias_vl", (experts,)
    for module in (*(f"experts.{n}" for n in range(experts)), "shared_experts"):
        yield f"{prefix}.ffn.{module}.w1.weight", (m, d)
        yield f"{prefix}.ffn.{module}.w3.weight", (m, d)
        yield f"{prefix}.ffn.{module}.w2.weight", (d, m)


def list_tensors() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of every tensor."""
    v, d, e, vd = 136, 64, 32, 24
    yield from (("embed.weight", (v, d)), ("norm.weight", (d,)), ("head.weight", (v, d)))
    for n in range(4):
        yield from list_layer(f"layers.{n}", 4)
    for n in (1, 2):
        yield f"layers.{n}.attn.compressor.wkv.weight", (e, d)
        yield f"layers.{n}.attn.compressor.norm.weight", (e,)
        yield f"layers.{n}.attn.indexer.wk.weight", (32, e)
        yield f"layers.{n}.attn.indexer.k_norm.weight", (32,)
    yield "layers.1.attn.compressor.wgate.weight", (e, d)
    for n in (1, 2, 3):
        yield f"layers.{n}.attn.indexer.wq_b.weight", (4 * 32, 32)
        yield f"layers.{n}.attn.indexer.weights_proj.weight", (4, d)
    yield "layers.1.engram.embed.weight", (96, 32)
    yield "layers.1.engram.wkv.weight", (3 * d, 2 * 2 * 32)
    yield from ((f"layers.1.engram.{one}_weight", (2, d)) for one in "kq")
    for n in range(2):
        yield from list_layer(f"mtp.{n}", 3)
    yield from (("mtp.0.main_proj.weight", (d, 3 * d)), ("mtp.0.main_norm.weight", (d,)))
    yield from ((f"mtp.1.markov_head.{one}.weight", (v, 12)) for one in ("embed", "head"))
    yield from (("mtp.1.confidence_head.proj.weight", (1, d + 12)), ("mtp.1.norm.weight", (d,)))
    yield from ((f"image_{one}", (d,)) for one in ("start", "end", "newline"))
    for name, rows, columns in (
        ("aligner.w1", d, 4 * vd),
        ("aligner.w2", d, d),
        ("vision.patch_embed.proj", vd, 48),
    ):
        yield from ((f"{name}.weight", (rows, columns)), (f"{name}.bias", (rows,)))
    yield "vision.norm.weight", (vd,)
    for n in range(2):
        yield from ((f"vision.blocks.{n}.{one}.weight", (vd,)) for one in ("norm1", "norm2"))
        yield f"vision.blocks.{n}.attn.wqkv.weight", (3 * vd, vd)
        yield f"vision.blocks.{n}.attn.wqkv.bias", (3 * vd,)
        yield f"vision.blocks.{n}.attn.wo.weight", (vd, vd)
        yield f"vision.blocks.{n}.attn.wo.bias", (vd,)
        yield f"vision.blocks.{n}.mlp.w1.weight", (2 * 20, vd)
        yield f"vision.blocks.{n}.mlp.w2.weight", (vd, 20)


MTP_SIZES = ("num_nextn_predict_layers", "dspark_n_routed_experts", "dspark_markov_rank")
NAMES = ("deepseek_v41", "deepseek_v41.main")
"""The model with its MTP layers, and without."""


def save(folder: Path, name: str = NAMES[0]) -> Path:
    """Write a random model called *name* in *folder*."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    state: State = {
        key: torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        for key, shape in list_tensors()
    }
    config = CONFIG
    if name == "deepseek_v41.main":
        state = {key: value for key, value in state.items() if not key.startswith("mtp.")}
        config = CONFIG | {"text_config": TEXT | dict.fromkeys(MTP_SIZES)}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder
