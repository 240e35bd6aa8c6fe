"""An adapter that Megatron-Bridge saved: its factors, and how strong it is."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckptctl
from ckptctl.errors import UnsupportedError
from tests.checkpoints.dcp import save_dcp

RANK, WIDTH, HEADS, GROUPS, HEAD, LAYERS = 3, 12, 4, 2, 5, 2
SIZES = {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": HEAD}
QKV = "decoder.layers.self_attention.linear_qkv.adapter"
RUN_CONFIG = """
model:
  _target_: megatron.bridge.models.qwen.qwen_provider.Qwen2ModelProvider
  activation_func:
    _call_: false
    _target_: torch.nn.functional.silu
  add_bias_linear: false
  add_qkv_bias: true
  gated_linear_unit: true
  normalization: RMSNorm
  position_embedding_type: rope
peft:
  _target_: megatron.bridge.peft.lora.LoRA
  dim: 3
  alpha: 12
  dropout: 0.1
"""


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Return a run whose layers are stacked."""
    folder = tmp_path / "run" / "iter_0000100"
    folder.mkdir(parents=True)
    rows = (HEADS + 2 * GROUPS) * HEAD
    factors = {
        f"{QKV}.linear_in.weight": torch.randn(LAYERS, RANK, WIDTH),
        f"{QKV}.linear_out.weight": torch.randn(LAYERS, rows, RANK),
    }
    save_dcp(folder, factors)
    torch.save({"args": Namespace(num_layers=LAYERS), "iteration": 100}, folder / "common.pt")
    mark = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    mark |= {"common_backend": "torch", "common_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(mark))
    (folder / "run_config.yaml").write_text(RUN_CONFIG)
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("100")
    torch.save(factors, tmp_path / "factors.pt")
    return folder.parent


def test_it_becomes_pefts(saved: Path, tmp_path: Path) -> None:
    for name in ("adapter_config.json", "notes.txt"):
        (saved / "iter_0000100" / name).write_text("{}")
    done = ckptctl.convert(saved, tmp_path / "adapter", to="peft", sizes=SIZES)
    assert set(done.plan.not_carried) == {"notes.txt"}
    assert not any("adapter_config.json" in note for note in done.plan.notes)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (3, 12, 0.1)
    found = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    factors = torch.load(tmp_path / "factors.pt", weights_only=True)
    a, b = factors[f"{QKV}.linear_in.weight"][1], factors[f"{QKV}.linear_out.weight"][1]
    grouped = (b @ a).view(GROUPS, -1, WIDTH)
    queries = HEADS // GROUPS * HEAD
    for name, begin, end in (
        ("q_proj", 0, queries),
        ("k_proj", queries, queries + HEAD),
        ("v_proj", queries + HEAD, queries + 2 * HEAD),
    ):
        layer = f"base_model.model.model.layers.1.self_attn.{name}"
        product = found[f"{layer}.lora_B.weight"] @ found[f"{layer}.lora_A.weight"]
        assert torch.allclose(product, grouped[:, begin:end].reshape(-1, WIDTH))


def test_one_factor_is_no_adapter(saved: Path, tmp_path: Path) -> None:
    name = f"{QKV}.linear_in.weight"
    factors = torch.load(tmp_path / "factors.pt", weights_only=True)
    save_dcp(saved / "iter_0000100", {name: factors[name]})
    with pytest.raises(UnsupportedError, match="only one factor is there"):
        ckptctl.convert(saved, tmp_path / "adapter", to="peft", sizes=SIZES)
    assert not (tmp_path / "adapter").exists()
