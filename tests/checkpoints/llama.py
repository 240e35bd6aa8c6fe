"""Tiny Llama state dicts under Hugging Face names, with their ``config.json``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

Kind = Literal["llama2", "llama3", "llama3_2"]
StateDict = dict[str, torch.Tensor]
Config = dict[str, Any]


@dataclass(frozen=True)
class LlamaSpec:
    """Sizes of a Llama model; the attribute names are those of ``config.json``, shortened.

    Attributes:
        rope_factor: Scaling factor of the llama3 RoPE rule; None: no scaling.
        tied: Whether ``lm_head.weight`` is ``model.embed_tokens.weight``.
    """

    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    layers: int = 2
    vocab: int = 128
    ffn: int = 224
    theta: float = 500000.0
    rope_factor: float | None = 8.0
    tied: bool = False
    eps: float = 1e-5
    positions: int = 131072

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return every Hugging Face key and its shape, in the order of the modules."""
        width, kv = self.hidden, self.kv_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (self.heads * self.head_dim, width),
            "self_attn.k_proj": (kv, width),
            "self_attn.v_proj": (kv, width),
            "self_attn.o_proj": (width, self.heads * self.head_dim),
            "mlp.gate_proj": (self.ffn, width),
            "mlp.up_proj": (self.ffn, width),
            "mlp.down_proj": (width, self.ffn),
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
        }
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, width)}
        for index in range(self.layers):
            for name, shape in layer.items():
                shapes[f"model.layers.{index}.{name}.weight"] = shape
        shapes["model.norm.weight"] = (width,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab, width)
        return shapes


SPECS: dict[Kind, LlamaSpec] = {
    "llama2": LlamaSpec(kv_heads=4, ffn=192, theta=10000.0, rope_factor=None, positions=4096),
    "llama3": LlamaSpec(),
    "llama3_2": LlamaSpec(rope_factor=32.0, tied=True),
}


def tiny_llama(
    kind: Kind = "llama3",
    dtype: str = "bfloat16",
    seed: int = 0,
    spelling: Literal["v4", "v5"] = "v4",
    **sizes: Any,
) -> tuple[StateDict, Config]:
    """Return random weights, norms included, and the configuration that belongs to them.

    Args:
        kind: Which defaults: Llama 2 (no GQA, theta 1e4), 3.1 (GQA, scaled RoPE), 3.2 (tied).
        dtype: torch's name of the dtype.
        seed: Same seed, same bytes.
        spelling: Which transformers major version's ``config.json``.
        **sizes: Fields of :class:`LlamaSpec` to change.

    Returns:
        The state dict under Hugging Face names (``lm_head.weight`` absent when tied), and the
        configuration.
    """
    spec = replace(SPECS[kind], **sizes)
    torch_dtype = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: _random(shape, generator).to(torch_dtype) for name, shape in spec.shapes().items()
    }
    return weights, hf_config(spec, dtype, spelling)


def _random(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(shape, generator=generator, dtype=torch.float32)
    # Norms around 1 but clearly different from each other, so that swapped norms show.
    return 1 + 0.3 * values if len(shape) == 1 else values * (1.5 / shape[-1] ** 0.5)


def hf_config(spec: LlamaSpec, dtype: str, spelling: Literal["v4", "v5"] = "v4") -> Config:
    """Return what transformers 4 or 5 writes to ``config.json`` for *spec*."""
    rope = None
    if spec.rope_factor is not None:
        rope = {
            "rope_type": "llama3",
            "factor": spec.rope_factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    config: Config = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.hidden,
        "initializer_range": 0.02,
        "intermediate_size": spec.ffn,
        "max_position_embeddings": spec.positions,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": spec.heads,
        "num_hidden_layers": spec.layers,
        "num_key_value_heads": spec.kv_heads,
        "pretraining_tp": 1,
        "rms_norm_eps": spec.eps,
        "tie_word_embeddings": spec.tied,
        "use_cache": True,
        "vocab_size": spec.vocab,
    }
    if spelling == "v5":
        rope5 = {**(rope or {"rope_type": "default"}), "rope_theta": spec.theta}
        return config | {"dtype": dtype, "rope_parameters": rope5, "transformers_version": "5.23.0"}
    return config | {
        "torch_dtype": dtype,
        "rope_theta": spec.theta,
        "rope_scaling": rope,
        "transformers_version": "4.47.1",
    }
