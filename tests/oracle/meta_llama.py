"""Meta's Llama, written from its definition, run shard by shard as its ranks would.

Sources: llama-models ``models/llama3/model.py`` (``RMSNorm``, ``apply_scaling``,
``precompute_freqs_cis``, ``apply_rotary_emb``, ``repeat_kv``, ``Attention``, ``FeedForward``) and
fairscale's column, row and vocabulary parallel layers. No tensor of two ranks is ever joined
except where the ranks communicate: after the embedding, ``wo``, ``w2`` and ``output``.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch

Shard = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Params:
    """``params.json``; the names are Meta's.

    Attributes:
        rope_factor: Meta's code has 8 for every model; Llama 3.2 was trained with 32.
    """

    dim: int
    n_layers: int
    n_heads: int
    multiple_of: int
    norm_eps: float
    vocab_size: int
    n_kv_heads: int | None = None
    ffn_dim_multiplier: float | None = None
    rope_theta: float = 10000.0
    use_scaled_rope: bool = False
    rope_factor: float = 8.0

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def kv_heads(self) -> int:
        return self.n_kv_heads or self.n_heads

    @property
    def ffn(self) -> int:
        hidden = int(2 * (4 * self.dim) / 3)
        if self.ffn_dim_multiplier is not None:
            hidden = int(self.ffn_dim_multiplier * hidden)
        return self.multiple_of * ((hidden + self.multiple_of - 1) // self.multiple_of)


class MetaLlama:
    """The model of one Meta folder.

    Args:
        folder: Holds ``params.json`` and ``consolidated.NN.pth``.
        rope_factor: Scaling factor where ``params.json`` says ``use_scaled_rope``.

    Raises:
        ValueError: Shapes do not fit ``params.json``.
    """

    def __init__(self, folder: Path, rope_factor: float = 8.0) -> None:
        values = json.loads((folder / "params.json").read_text())
        self.params = Params(**values, rope_factor=rope_factor)
        files = sorted(folder.glob("consolidated.*.pth"))
        self.shards: list[Shard] = [
            {
                name: value.float()
                for name, value in torch.load(file, weights_only=True).items()
                if not name.endswith("rope.freqs")
            }
            for file in files
        ]
        self._check()

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return ``[batch, length, vocab]`` in fp32 for ``[batch, length]`` token ids."""
        hidden = self._embed(tokens)
        rotation = frequencies(self.params, tokens.shape[1])
        for index in range(self.params.n_layers):
            hidden = hidden + self._attention(index, hidden, rotation)
            hidden = hidden + self._feed_forward(index, hidden)
        hidden = rms_norm(hidden, self.shards[0]["norm.weight"], self.params.norm_eps)
        return torch.cat([hidden @ shard["output.weight"].T for shard in self.shards], -1)

    def _check(self) -> None:
        ranks, params = len(self.shards), self.params
        wanted = {
            "attention.wq": (params.n_heads * params.head_dim // ranks, params.dim),
            "attention.wk": (params.kv_heads * params.head_dim // ranks, params.dim),
            "attention.wv": (params.kv_heads * params.head_dim // ranks, params.dim),
            "attention.wo": (params.dim, params.n_heads * params.head_dim // ranks),
            "feed_forward.w1": (params.ffn // ranks, params.dim),
            "feed_forward.w3": (params.ffn // ranks, params.dim),
            "feed_forward.w2": (params.dim, params.ffn // ranks),
            "attention_norm": (params.dim,),
            "ffn_norm": (params.dim,),
        }
        names = {"tok_embeddings.weight", "norm.weight", "output.weight"}
        for index in range(params.n_layers):
            for part, shape in wanted.items():
                name = f"layers.{index}.{part}.weight"
                names.add(name)
                for shard in self.shards:
                    if tuple(shard[name].shape) != shape:
                        raise ValueError(f"{name} is {tuple(shard[name].shape)}, not {shape}")
        for rank, shard in enumerate(self.shards):
            if shard.keys() != names:
                raise ValueError(f"rank {rank}: {sorted(shard.keys() ^ names)}")

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        tables = [shard["tok_embeddings.weight"] for shard in self.shards]
        if tables[0].shape[1] < self.params.dim:  # ParallelEmbedding of Llama 2
            return torch.cat([table[tokens] for table in tables], -1)
        return torch.cat(tables, 0)[tokens]  # VocabParallelEmbedding

    def _attention(self, index: int, hidden: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        prefix, params = f"layers.{index}.", self.params
        heads = params.n_heads // len(self.shards)
        kv_heads = params.kv_heads // len(self.shards)
        batch, length, _ = hidden.shape
        total = torch.zeros_like(hidden)
        for shard in self.shards:
            x = rms_norm(hidden, shard[prefix + "attention_norm.weight"], params.norm_eps)
            q, k, v = (
                (x @ shard[f"{prefix}attention.{part}.weight"].T).view(
                    batch, length, count, params.head_dim
                )
                for part, count in (("wq", heads), ("wk", kv_heads), ("wv", kv_heads))
            )
            q, k = rotate(q, rotation), rotate(k, rotation)
            k, v = (t.repeat_interleave(heads // kv_heads, dim=2) for t in (k, v))
            total = total + attend(q, k, v) @ shard[prefix + "attention.wo.weight"].T
        return total

    def _feed_forward(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        prefix = f"layers.{index}."
        total = torch.zeros_like(hidden)
        for shard in self.shards:
            x = rms_norm(hidden, shard[prefix + "ffn_norm.weight"], self.params.norm_eps)
            gate, up, down = (
                shard[f"{prefix}feed_forward.{part}.weight"] for part in ("w1", "w3", "w2")
            )
            total = total + (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
        return total


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return *x* divided by its root mean square along the last axis, times *weight*."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def frequencies(params: Params, length: int) -> torch.Tensor:
    """Return ``exp(i * position * frequency)`` as complex ``[length, head_dim / 2]``."""
    exponents = torch.arange(0, params.head_dim, 2)[: params.head_dim // 2].float()
    inverse = 1.0 / (params.rope_theta ** (exponents / params.head_dim))
    if params.use_scaled_rope:
        inverse = apply_scaling(inverse, params.rope_factor)
    angles = torch.outer(torch.arange(length).float(), inverse)
    return torch.polar(torch.ones_like(angles), angles)


def apply_scaling(
    inverse: torch.Tensor,
    factor: float,
    low: float = 1.0,
    high: float = 4.0,
    old_context: int = 8192,
) -> torch.Tensor:
    """Return the frequencies stretched as Llama 3.1 does (llama-models ``apply_scaling``)."""
    scaled = []
    for frequency in inverse:
        wavelength = 2 * math.pi / frequency
        if wavelength < old_context / high:
            scaled.append(frequency)
        elif wavelength > old_context / low:
            scaled.append(frequency / factor)
        else:
            smooth = (old_context / wavelength - low) / (high - low)
            scaled.append((1 - smooth) * frequency / factor + smooth * frequency)
    return torch.stack(scaled)


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Return *x* ``[batch, length, heads, head_dim]`` with neighboring pairs rotated."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotation[None, :, None, :]).flatten(3)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return causal attention, heads side by side, as ``[batch, length, heads * head_dim]``."""
    batch, length, heads, head_dim = q.shape
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = q @ k.transpose(2, 3) / math.sqrt(head_dim)
    scores = scores + torch.full((length, length), float("-inf")).triu(1)
    mixed = torch.softmax(scores, dim=-1) @ v
    return mixed.transpose(1, 2).reshape(batch, length, heads * head_dim)
