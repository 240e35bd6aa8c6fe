"""Megatron-Core's hybrid model on the CPU: Mamba-2, attention, dense and mixture layers.

Its specification is the one for Transformer Engine, whose modules are replaced by Megatron-Core's
own, and by one of our own where a linear layer norms its input. The kernels of ``mamba_ssm`` are
replaced by what they compute.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from contextlib import nullcontext
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
from megatron.core.extensions import transformer_engine
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import moe_module_specs
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.torch_norm import WrappedTorchNorm

INFERENCE = "megatron.core.inference.contexts.attention_context.triton.tensor_ops"
"""Module of kernels in Triton that only generation calls."""


class Modules(NamedTuple):
    """Modules of Megatron-Core whose names depend on its version."""

    specs: Any
    model: Any
    block: Any


class NoTracker:
    """Megatron-Core keeps the state of the GPU's random numbers around dropout."""

    def fork(self) -> Any:
        return nullcontext()


class NormedLinear(ColumnParallelLinear):  # type: ignore[misc]
    """Linear layer that norms its input, with Transformer Engine's name for the norm."""

    def __init__(self, size: int, *args: Any, config: Any, **kwargs: Any) -> None:
        super().__init__(size, *args, config=config, **kwargs)
        self.eps = config.layernorm_epsilon
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(size))

    def forward(self, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Norm over the last dimension, then multiply."""
        weight = self.layer_norm_weight
        normed = torch.nn.functional.rms_norm(value, weight.shape, weight, self.eps)
        return super().forward(normed, *args, **kwargs)


class WholeLinear(torch.nn.Linear):
    """Linear layer that every rank has, as Transformer Engine's before and after experts."""

    def __init__(self, size: int, out: int, *, bias: bool, **_: Any) -> None:
        super().__init__(size, out, bias=bias)

    def forward(self, value: torch.Tensor) -> Any:
        """Return the product, and no bias to add later."""
        return super().forward(value), None


class GatedNorm(torch.nn.Module):
    """RMSNorm over groups of what is multiplied by a gate, as ``mamba_ssm`` has it."""

    def __init__(
        self, size: int, eps: float, group_size: int, norm_before_gate: bool, **_: Any
    ) -> None:
        super().__init__()
        assert not norm_before_gate
        self.eps, self.group_size = eps, group_size
        self.weight = torch.nn.Parameter(torch.ones(size))

    def forward(self, value: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Multiply by the gate, then norm."""
        gated = value * torch.nn.functional.silu(gate)
        groups = gated.view(*gated.shape[:-1], -1, self.group_size)
        normed = torch.nn.functional.rms_norm(groups, (self.group_size,), eps=self.eps)
        return normed.flatten(-2) * self.weight


def scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    decay: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Return what ``mamba_chunk_scan_combined`` computes, one token after the other."""
    heads = x.shape[2]
    b, c = (value.repeat_interleave(heads // value.shape[2], 2) for value in (b, c))
    step = torch.nn.functional.softplus(dt + dt_bias)
    state = torch.zeros(x.shape[0], heads, x.shape[3], b.shape[3])
    found = []
    for place in range(x.shape[1]):
        times = step[:, place, :, None, None]
        taken = x[:, place, :, :, None] * b[:, place, :, None, :]
        state = state * torch.exp(times * decay[:, None, None]) + times * taken
        found.append((state * c[:, place, :, None, :]).sum(-1) + D[:, None] * x[:, place])
    return torch.stack(found, 1)


class Parts(LocalSpecProvider):  # type: ignore[misc]
    """Parts of mixture layers under the names of Transformer Engine's."""

    def grouped_mlp_modules(self, *wanted: bool) -> Any:
        """Return experts that are computed one after the other."""
        return super().grouped_mlp_modules(*(False for _ in wanted))


@cache
def _modules() -> Modules:
    """Import Megatron-Core's modules with what stands in for kernels."""
    names = ("layernorm_gated", "ssd_combined", "selective_state_update")
    folders = ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton")
    fakes: dict[str, Any] = {name: ModuleType(name) for name in folders}
    fakes |= {f"{folders[-1]}.{name}": mock.Mock() for name in names}
    fakes[f"{folders[-1]}.layernorm_gated"].RMSNorm = GatedNorm
    fakes[f"{folders[-1]}.ssd_combined"].mamba_chunk_scan_combined = scan
    fakes[f"{folders[-1]}.ssd_combined"].mamba_split_conv1d_scan_combined = scan
    if importlib.util.find_spec("triton") is None:
        sys.modules.setdefault(INFERENCE, mock.Mock())
    mixer: Any = importlib.import_module("megatron.core.ssm.mamba_mixer")
    with mock.patch.dict(sys.modules, fakes):
        importlib.reload(mixer)
    mixer.get_cuda_rng_tracker = NoTracker
    if importlib.util.find_spec("megatron.core.models.hybrid") is None:
        folder, block = "megatron.core.models.mamba.mamba", "megatron.core.ssm.mamba_block"
    else:
        folder = "megatron.core.models.hybrid.hybrid"
        block = "megatron.core.models.hybrid.hybrid_block"
    paths = (f"{folder}_layer_specs", f"{folder}_model", block)
    return Modules(*map(importlib.import_module, paths))


@cache
def _specification() -> Any:
    """Return Megatron-Core's specification of the layers, which it has at module level."""
    specs = _modules().specs
    parts = {
        "TENorm": WrappedTorchNorm,
        "TELayerNormColumnParallelLinear": NormedLinear,
        "TEColumnParallelLinear": ColumnParallelLinear,
        "TERowParallelLinear": RowParallelLinear,
        "TEDotProductAttention": DotProductAttention,
    }
    with (
        mock.patch.multiple(transformer_engine, **parts),
        mock.patch.object(moe_module_specs, "TESpecProvider", Parts, create=True),
    ):
        importlib.reload(specs)
    return getattr(specs, "hybrid_stack_spec", None) or specs.mamba_stack_spec


def build(config: Any, pattern: str, **options: Any) -> Any:
    """Return this rank's stage of the model.

    Args:
        config: ``TransformerConfig``.
        pattern: The kind of each layer, a letter for each.
        options: Arguments of the model.
    """
    modules, spec = _modules(), _specification()
    with (
        mock.patch.object(modules.block, "TENorm", WrappedTorchNorm),
        mock.patch.multiple(moe_layer, create=True, TELinear=WholeLinear, HAVE_TE=True),
    ):
        if hasattr(modules.model, "HybridModel"):
            return modules.model.HybridModel(config, spec, hybrid_layer_pattern=pattern, **options)
        return modules.model.MambaModel(config, spec, hybrid_override_pattern=pattern, **options)
