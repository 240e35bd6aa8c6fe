"""An adapter that Megatron-Bridge saved, or is to load: its factors, and how strong it is."""

from __future__ import annotations

import itertools
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader

import ckptctl
from ckptctl.catalog import Box, Catalog, Extent, TensorEntry
from ckptctl.errors import CkptError, MissingTensorsError, RefusedError, UnsupportedError
from ckptctl.formats.mcore.factors import restore_row_order
from tests.checkpoints.adapters import save_peft
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


def test_mcore_adapter_converts_to_peft(saved: Path, tmp_path: Path) -> None:
    for name in ("adapter_config.json", "notes.txt"):
        (saved / "iter_0000100" / name).write_text("{}")
    tied = tmp_path / "assets"  # of which factors know nothing
    tied.mkdir()
    config = {"model_type": "qwen2", "tie_word_embeddings": True, **SIZES}
    config |= {"hidden_size": WIDTH, "num_hidden_layers": LAYERS}
    (tied / "config.json").write_text(json.dumps(config))
    done = ckptctl.convert(saved, tmp_path / "adapter", to="peft", assets=tied)
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
    same = ckptctl.diff(saved, tmp_path / "adapter", sizes=SIZES)  # whose name A's records say
    assert (same.compared, same.model_type) == (2 * LAYERS, "qwen2-lora") and not same.tensors


def test_shared_lora_factor_is_written_for_each_layer(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    asked: dict[str, Any] = {"to": "torch", "to_layout": "torchtune", "tied": "drop"}
    ckptctl.convert(saved, out, **asked, model_type="qwen2", sizes=SIZES)
    found = torch.load(out, weights_only=True)
    assert len({factor.data_ptr() for factor in found.values()}) == len(found) == 2 * 3 * LAYERS


def test_single_lora_factor_is_an_error(saved: Path, tmp_path: Path) -> None:
    name = f"{QKV}.linear_in.weight"
    factors = torch.load(tmp_path / "factors.pt", weights_only=True)
    save_dcp(saved / "iter_0000100", {name: factors[name]})
    with pytest.raises(MissingTensorsError, match="only one LoRA factor"):
        ckptctl.convert(saved, tmp_path / "adapter", to="peft", sizes=SIZES)
    assert not (tmp_path / "adapter").exists()


def peft_adapter(folder: Path, **ranks: int) -> Path:
    """Write an adapter of two layers' projections, of which each has its own rank."""
    factors = {}
    for (name, rank), layer in itertools.product(ranks.items(), range(LAYERS)):
        key = f"base_model.model.model.layers.{layer}.{name.replace('__', '.')}"
        factors[f"{key}.lora_A.weight"] = torch.randn(rank, WIDTH)
        rows = GROUPS * HEAD if name.endswith(("k_proj", "v_proj")) else HEADS * HEAD
        factors[f"{key}.lora_B.weight"] = torch.randn(rows, rank)
    return save_peft(folder, factors, lora_alpha=12, lora_dropout=0.1)


def test_peft_adapter_converts_to_bridge_layout_and_back(tmp_path: Path) -> None:
    attention = dict.fromkeys((f"self_attn__{name}_proj" for name in "qkv"), RANK)
    peft = peft_adapter(tmp_path / "peft", **attention)
    ckptctl.convert(peft, tmp_path / "run", to="mcore", model_type="qwen2", sizes=SIZES)
    inner = tmp_path / "run" / "release"
    found = FileSystemReader(inner).read_metadata().state_dict_metadata
    modules = [
        f"decoder.layers.{i}.self_attention.linear_qkv.adapter.adapter_{p}"
        for i in range(LAYERS)
        for p in "qkv"
    ]
    weights = [f"{m}.linear_{end}.weight" for m in modules for end in ("in", "out")]
    states = [f"{m}.linear_{end}._extra_state/shard_0_1" for m in modules for end in ("in", "out")]
    assert found.keys() == {*weights, *states}
    stated = yaml.safe_load((inner / "run_config.yaml").read_text())
    assert stated["peft"] == {
        "_target_": "megatron.bridge.peft.canonical_lora.CanonicalLoRA",
        "target_modules": [f"*decoder.layers.*.self_attention.linear_{p}" for p in "kqv"],
        "dim": RANK,
        "alpha": 12,
        "dropout": 0.1,
        "dropout_position": "pre",
    }
    assert stated["model"]["tensor_model_parallel_size"] == 1
    ckptctl.convert(tmp_path / "run", tmp_path / "back", to="peft", model_type="qwen2", sizes=SIZES)
    files = (folder / "adapter_model.safetensors" for folder in (peft, tmp_path / "back"))
    before, after = map(load_file, files)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_adapter_with_mixed_lora_ranks_is_refused(tmp_path: Path) -> None:
    peft = peft_adapter(tmp_path / "peft", self_attn__q_proj=2, self_attn__k_proj=3)
    with pytest.raises(CkptError, match="rank"):
        ckptctl.convert(peft, tmp_path / "run", to="mcore", model_type="qwen2", sizes=SIZES)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("ranks", "order"), [(2, [0, 2, 1, 3]), (4, [0, 1, 2, 3]), (None, None)])
def test_fused_lora_rows_are_reordered_by_tensor_parallel_size(
    ranks: int | None, order: list[int] | None
) -> None:
    """Bridge saves the halves of each rank's rows behind those of the others."""
    name = "decoder.layers.0.mlp.linear_fc1.adapter.adapter_up.linear_out.weight"
    extents = tuple(Extent(Box((2 * i, 0), (2, 3)), "0", 24 * i, 24) for i in range(4))
    entry = TensorEntry(name, "float32", (8, 3), extents, (name,))
    catalog = Catalog(Path("mcore"), Path("run"), "/run", {}, {name: entry})
    told = {"run_config.yaml": {"model": {"num_layers": 1, "tensor_model_parallel_size": ranks}}}
    if order is None:
        with pytest.raises(UnsupportedError, match="order"):
            restore_row_order(catalog, told)
    else:
        found = restore_row_order(catalog, told).tensors[name].extents
        assert [one.box.offsets[0] // 2 for one in found] == order


def test_single_tensor_parallel_rank_of_adapter_is_refused(saved: Path, tmp_path: Path) -> None:
    """Verl once saved a file each; one alone is all there is."""
    factors = torch.load(tmp_path / "factors.pt", weights_only=True)
    apart = {
        name.replace("layers.", f"layers.{layer}."): value[layer]
        for name, value in factors.items()
        for layer in range(LAYERS)
    }
    first, second = (tmp_path / f"mp_rank_0{n}_adapter.pt" for n in range(2))
    torch.save(apart, first)
    asked: dict[str, Any] = {
        "to": "peft",
        "sizes": SIZES,
        "model_type": "qwen2",
        "lora_alpha": 12.0,
    }
    ckptctl.convert(first, tmp_path / "alone", **asked)
    torch.save(apart, second)
    with pytest.raises(RefusedError, match="of an adapter that 2 ranks saved"):
        ckptctl.convert(first, tmp_path / "adapter", **asked)
