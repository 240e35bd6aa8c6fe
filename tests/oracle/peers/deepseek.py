"""DeepSeek-V3's native model, written from its paper under the names of its ``inference/model.py``.

Sources: DeepSeek-V2 (arXiv 2405.04434, section 2.1: multi-head latent attention), DeepSeek-V3
(arXiv 2412.19437, section 2.1.2: gating with a correction bias), DeepSeek-V3.2-Exp (its report,
section 2: the indexer; the note in its README that the indexer rotates halves), the key names of
``inference/convert.py``. The bias takes part in the choice of experts, never in their weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.oracle.hf_models import State
from tests.oracle.meta_llama import rms_norm, rotate
from tests.oracle.models import tokens

REQUIRES: tuple[str, ...] = ()
LAYOUT = "deepseek"


class Norm(nn.Module):
    """Root mean square norm."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Indexer(nn.Module):
    """Chooses the tokens that attention sees: those that many heads find near."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.wq_b = _linear(config.q_lora_rank, config.index_n_heads * config.index_head_dim)
        self.wk = _linear(config.hidden_size, config.index_head_dim)
        self.k_norm = nn.LayerNorm(config.index_head_dim, eps=1e-6)
        self.weights_proj = _linear(config.hidden_size, config.index_n_heads)

    def forward(self, x: torch.Tensor, q: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        """Return ``[batch, 1, tokens, tokens]``: 0 where a token is seen, else minus infinity."""
        heads = self.wq_b(q).unflatten(-1, (self.config.index_n_heads, -1))
        near = torch.einsum(
            "bqhd,bkd->bhqk",
            self._rotated(heads, turn),
            self._rotated(self.k_norm(self.wk(x))[:, :, None], turn)[:, :, 0],
        )
        scores = torch.einsum("bhqk,bqh->bqk", near.relu(), self.weights_proj(x))
        length = x.shape[1]
        later = torch.full((length, length), float("-inf")).triu(1)
        count = min(self.config.index_topk, length)
        chosen = (scores + later).topk(count, -1).indices
        hidden = torch.full_like(scores, float("-inf")).scatter(-1, chosen, 0.0)
        return hidden[:, None]

    def _rotated(self, x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        """Return *x* with the halves of its first part turned; left as pairs, for products only."""
        wide = 2 * turn.shape[-1]
        pairs = x[..., :wide].reshape(*x.shape[:-1], 2, wide // 2).transpose(-1, -2).flatten(-2)
        return torch.cat([rotate(pairs, turn), x[..., wide:]], -1)


class MLA(nn.Module):
    """Multi-head latent attention: keys and values from one narrow vector for each token."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        dim, heads = config.hidden_size, config.num_attention_heads
        self.heads, self.config = heads, config
        self.nope, self.rope, self.value = (
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
            config.v_head_dim,
        )
        width = heads * (self.nope + self.rope)
        if config.q_lora_rank:
            self.wq_a = _linear(dim, config.q_lora_rank)
            self.q_norm = Norm(config.q_lora_rank, config.rms_norm_eps)
            self.wq_b = _linear(config.q_lora_rank, width)
        else:
            self.wq = _linear(dim, width)
        self.wkv_a = _linear(dim, config.kv_lora_rank + self.rope)
        self.kv_norm = Norm(config.kv_lora_rank, config.rms_norm_eps)
        self.wkv_b = _linear(config.kv_lora_rank, heads * (self.nope + self.value))
        self.wo = _linear(heads * self.value, dim)
        if hasattr(config, "index_topk"):
            self.indexer = Indexer(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        low = self.q_norm(self.wq_a(x)) if self.config.q_lora_rank else x
        q = self.wq_b(low) if self.config.q_lora_rank else self.wq(x)
        q = q.view(batch, length, self.heads, -1)
        latent, shared = self.wkv_a(x).split([self.config.kv_lora_rank, self.rope], -1)
        kv = self.wkv_b(self.kv_norm(latent)).view(batch, length, self.heads, -1)
        turn = self._rotation(length)
        q = torch.cat([q[..., : self.nope], rotate(q[..., self.nope :], turn)], -1)
        shared = rotate(shared[:, :, None], turn).expand(-1, -1, self.heads, -1)
        k = torch.cat([kv[..., : self.nope], shared], -1)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (self.nope + self.rope) ** -0.5
        scores = scores + torch.full((length, length), float("-inf")).triu(1)
        if hasattr(self, "indexer"):
            scores = scores + self.indexer(x, low, turn)
        mixed = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), kv[..., self.nope :])
        return torch.as_tensor(self.wo(mixed.flatten(2)))

    def _rotation(self, length: int) -> torch.Tensor:
        theta = self.config.rope_parameters["rope_theta"]
        inverse = theta ** -(torch.arange(0, self.rope, 2).float() / self.rope)
        angles = torch.outer(torch.arange(length).float(), inverse)
        return torch.polar(torch.ones_like(angles), angles)


class MLP(nn.Module):
    """Gated feed-forward network."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = _linear(dim, hidden), _linear(hidden, dim), _linear(dim, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.w2(nn.functional.silu(self.w1(x)) * self.w3(x)))


class Gate(nn.Module):
    """Sigmoid scores; the best groups first, then the best experts of those."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.bias = nn.Parameter(torch.empty(config.n_routed_experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[tokens, experts]`` weights, zero where an expert is not chosen."""
        scores = (x @ self.weight.T).sigmoid()
        groups = (scores + self.bias).view(*scores.shape[:-1], self.config.n_group, -1)
        best = groups.topk(2, -1).values.sum(-1).topk(self.config.topk_group, -1).indices
        open_ = torch.zeros(groups.shape[:-1], dtype=torch.bool).scatter(-1, best, True)
        choice = groups.masked_fill(~open_[..., None], float("-inf")).flatten(-2)
        chosen = choice.topk(self.config.num_experts_per_tok, -1).indices
        weights = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        return weights / weights.sum(-1, keepdim=True) * float(self.config.routed_scaling_factor)


class MoE(nn.Module):
    """Experts behind a gate, and one that sees everything."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        dim, hidden = config.hidden_size, config.moe_intermediate_size
        self.gate = Gate(config)
        self.experts = nn.ModuleList(MLP(dim, hidden) for _ in range(config.n_routed_experts))
        self.shared_experts = MLP(dim, hidden * config.n_shared_experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = torch.stack([expert(x) for expert in self.experts], -1)
        return torch.as_tensor((outputs * self.gate(x)[..., None, :]).sum(-1)) + torch.as_tensor(
            self.shared_experts(x)
        )


class Block(nn.Module):
    """One layer."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        dense = index < config.first_k_dense_replace
        dim = config.hidden_size
        self.attn = MLA(config)
        self.ffn: nn.Module = MLP(dim, config.intermediate_size) if dense else MoE(config)
        self.attn_norm = Norm(dim, config.rms_norm_eps)
        self.ffn_norm = Norm(dim, config.rms_norm_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + torch.as_tensor(self.ffn(self.ffn_norm(x)))


class Transformer(nn.Module):
    """The model; *config* is transformers' ``DeepseekV3Config``."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.head = _linear(config.hidden_size, config.vocab_size)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return torch.as_tensor(self.head(self.norm(x)))


BUILDERS: dict[str, Callable[[Any], torch.nn.Module]] = {
    "deepseek_v3": Transformer,
    "deepseek_v3.no_q_lora": Transformer,
    "deepseek_v32": Transformer,
}


def logits(model: torch.nn.Module, state: State, config: Any) -> torch.Tensor:
    """Return fp32 logits after a strict load of *state*."""
    model.load_state_dict({name: value.float() for name, value in state.items()}, strict=True)
    with torch.no_grad():
        return torch.as_tensor(model(tokens()))
