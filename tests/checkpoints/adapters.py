"""Random adapters of tiny models, written without ckptctl."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

PROJECTIONS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def random_adapter(
    state: Mapping[str, torch.Tensor],
    modules: Sequence[str] = PROJECTIONS,
    *,
    rank: int = 4,
    dora: bool = False,
    dtype: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """Return an adapter of the layers of *state* that are called so, under PEFT's names."""
    generator = torch.Generator().manual_seed(5)
    found: dict[str, torch.Tensor] = {}
    for name, weight in state.items():
        if not name.removesuffix(".weight").endswith(tuple(modules)):
            continue
        key = "base_model.model." + name.removesuffix(".weight")
        rows, columns = weight.shape
        found[f"{key}.lora_A.weight"] = torch.randn(rank, columns, generator=generator)
        found[f"{key}.lora_B.weight"] = torch.randn(rows, rank, generator=generator)
        if dora:
            found[f"{key}.lora_magnitude_vector"] = torch.rand(rows, generator=generator) + 0.5
    return {name: value.to(dtype) for name, value in found.items()}


def save_peft(folder: Path, adapter: Mapping[str, torch.Tensor], **config: Any) -> Path:
    """Write *adapter* as PEFT does and return *folder*."""
    folder.mkdir(parents=True)
    held = {name: value.contiguous() for name, value in adapter.items()}
    save_file(held, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    rank = next((value.shape[0] for name, value in adapter.items() if "_A" in name), 1)
    dora = any("magnitude" in name for name in adapter)
    whole = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "bias": "none", "use_dora": dora}
    (folder / "adapter_config.json").write_text(json.dumps({**whole, **config}))
    return folder


def merged_by_hand(
    state: Mapping[str, torch.Tensor], adapter: Mapping[str, torch.Tensor], scale: float
) -> dict[str, torch.Tensor]:
    """Return *state* with *adapter* merged in, in float64 and rounded once."""
    found = dict(state)
    for name, a in adapter.items():
        if not name.endswith(".lora_A.weight"):
            continue
        module = name.removesuffix(".lora_A.weight")
        key = module.removeprefix("base_model.model.") + ".weight"
        b = adapter[f"{module}.lora_B.weight"]
        whole = state[key].double() + scale * (b.double() @ a.double())
        length = adapter.get(f"{module}.lora_magnitude_vector")
        if length is not None:
            whole *= (length.double() / whole.norm(dim=1))[:, None]
        found[key] = whole.to(state[key].dtype)
    return found
