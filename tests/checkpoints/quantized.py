"""Weights that are hard to quantize, and a model of them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from tests.checkpoints.golden import Golden, State

SCHEMES = (
    *("fp8-block", "fp8-channel", "int4", "int8", "int8-channel"),
    *("mxfp4", "mxfp8", "nvfp4"),
)
WIDE = ("int4", "int8")
"""Their groups have 128 columns, so that they cannot quantize the ragged model of :func:`llama`."""
PLAIN = ("lm_head.weight", "model.embed_tokens.weight")


DIGESTS: dict[str, str] = json.loads(
    (Path(__file__).parents[1] / "data" / "quantized.json").read_text()
)
"""Of what the references make of :func:`llama`; ``tests/oracle/test_quantizing.py`` holds it."""


def hard(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return a matrix with rows of nothing, of both zeros, of subnormals and of large numbers."""
    content = bytearray(hashlib.shake_256(b"%d" % seed).digest(2 * rows * (columns + 1)))
    numbers = torch.frombuffer(content, dtype=torch.int16).view(rows, columns + 1)
    powers, found = numbers[:, 0] % 24, numbers[:, 1:].float()
    found = found / 8192 * 2.0 ** (powers[:, None].float() - 18)
    found[0] = 0
    found[1, : columns // 2] = 0
    found[2] *= 1e-12
    found[3, : columns // 3] = -0.0
    found[4] *= 1e-30
    found[5] *= 30
    found[7, ::3] = 0
    return found.to(dtype)


def llama(ragged: bool, dtype: torch.dtype) -> tuple[State, dict[str, Any]]:
    """Return the tensors of a Llama of two layers, one matrix of which is zero, and its config."""
    d, f, k = (160, 352, 32) if ragged else (256, 384, 128)
    shapes = {
        "self_attn.q_proj": (d, d),
        "self_attn.k_proj": (k, d),
        "self_attn.v_proj": (k, d),
        "self_attn.o_proj": (d, d),
        "mlp.gate_proj": (f, d),
        "mlp.up_proj": (f, d),
        "mlp.down_proj": (d, f),
    }
    state: State = {}
    for layer in range(2):
        for seed, (name, shape) in enumerate(shapes.items()):
            key = f"model.layers.{layer}.{name}.weight"
            state[key] = hard(*shape, dtype, 10 * layer + seed)
        for name in ("input_layernorm", "post_attention_layernorm"):
            state[f"model.layers.{layer}.{name}.weight"] = torch.ones(d, dtype=dtype)
    state["model.layers.1.mlp.gate_proj.weight"].zero_()
    state |= {name: hard(97, d, dtype, 99) for name in PLAIN}
    state["model.norm.weight"] = torch.ones(d, dtype=dtype)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": d,
        "intermediate_size": f,
        "num_hidden_layers": 2,
        "num_attention_heads": d // 32,
        "num_key_value_heads": k // 32,
        "head_dim": 32,
        "vocab_size": 97,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    return state, config


def numbers(golden: Golden) -> State:
    """Return tensors with the names and shapes of *golden*, and numbers in them."""
    random = torch.Generator().manual_seed(len(golden.tensors))
    return {
        key: torch.randn(shape, generator=random).to(getattr(torch, dtype))
        for key, (dtype, shape) in golden.tensors.items()
    }
