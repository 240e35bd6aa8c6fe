"""Factors of experts, apart and stacked, against peft 0.21 on transformers 5.24.

PEFT stacks the factors of single experts itself when it loads them (its
``transformers_weight_conversion``): what ckptctl stacks has to compute the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptctl
from tests.oracle.models import distance, tokens

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]
EXPERTS, WIDTH, INNER, RANK = 4, 64, 40, 3
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "num_experts_per_tok": 2,
}
KINDS: dict[str, tuple[str, dict[str, Any], str, tuple[str, ...]]] = {
    "mixtral": (
        "MixtralConfig",
        {"num_local_experts": EXPERTS},
        "block_sparse_moe.experts.{}.{}",
        ("w1", "w3", "w2"),
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_experts": EXPERTS, "moe_intermediate_size": INNER, "head_dim": 16},
        "mlp.experts.{}.{}",
        ("gate_proj", "up_proj", "down_proj"),
    ),
}
BOTH = ["experts.gate_up_proj", "experts.down_proj"]


def base_model(kind: str, folder: Path) -> Any:
    import transformers

    name, sizes, _, _ = KINDS[kind]
    config = getattr(transformers, name)(**SIZES, **sizes, pad_token_id=0)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for value in model.parameters():
        value.data = 0.1 * torch.randn_like(value)
    model.eval().save_pretrained(folder)
    return model


def logits(folder: Path, adapter: Path) -> torch.Tensor:
    """Return what a model computes with an adapter that PEFT loads."""
    import transformers
    from peft import PeftModel

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    adapted = PeftModel.from_pretrained(model, str(adapter)).eval()
    with torch.no_grad():
        found: torch.Tensor = adapted(tokens()).logits
    return found


def of_single_experts(kind: str, folder: Path) -> Path:
    """Write a random adapter as transformers 4 and vLLM know it: of each expert, and of q."""
    _, _, module, names = KINDS[kind]
    adapter: dict[str, torch.Tensor] = {}
    for layer in range(2):
        prefix = f"base_model.model.model.layers.{layer}."
        for expert in range(EXPERTS):
            for name in names:
                sides = (INNER, WIDTH) if name in ("w2", "down_proj") else (WIDTH, INNER)
                key = prefix + module.format(expert, name)
                adapter[f"{key}.lora_A.weight"] = 0.3 * torch.randn(RANK, sides[0])
                adapter[f"{key}.lora_B.weight"] = 0.3 * torch.randn(sides[1], RANK)
        adapter[f"{prefix}self_attn.q_proj.lora_A.weight"] = torch.randn(RANK, WIDTH)
        adapter[f"{prefix}self_attn.q_proj.lora_B.weight"] = torch.randn(WIDTH, RANK)
    folder.mkdir()
    save_file(adapter, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 5,
        "target_modules": ["q_proj", *names],
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_stacking_expert_adapters_keeps_logits_in_peft(tmp_path: Path, kind: str) -> None:
    base_model(kind, tmp_path / "base")
    apart = of_single_experts(kind, tmp_path / "apart")
    options: Any = {"to": "peft", "assets": tmp_path / "base", "experts": "stacked"}
    ckptctl.convert(apart, tmp_path / "stacked", **options)
    want = logits(tmp_path / "base", apart)
    assert distance(logits(tmp_path / "base", tmp_path / "stacked"), want) <= 2e-6
    file = tmp_path / "stacked/adapter_model.safetensors"
    wrong = {n: v.flip(0) if ".base_layer.lora_A" in n else v for n, v in load_file(file).items()}
    save_file(wrong, file)
    assert distance(logits(tmp_path / "base", tmp_path / "stacked"), want) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_unstacking_and_restacking_expert_adapters_keeps_logits(tmp_path: Path, kind: str) -> None:
    """PEFT trains the stack; each expert's own factors are what it loads of older models."""
    from peft import LoraConfig, get_peft_model

    model = base_model(kind, tmp_path / "base")
    config = LoraConfig(
        r=RANK,
        lora_alpha=5,
        target_modules=["q_proj"],
        target_parameters=BOTH,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(model, config).eval()
    adapted.save_pretrained(str(tmp_path / "adapter"))
    with torch.no_grad():
        want = adapted(tokens()).logits
    options: Any = {"to": "peft", "assets": tmp_path / "base"}
    ckptctl.convert(tmp_path / "adapter", tmp_path / "apart", experts="apart", **options)
    names = load_file(tmp_path / "apart/adapter_model.safetensors")
    assert sum(".experts." in name for name in names) == 2 * EXPERTS * 3 * 2
    assert distance(logits(tmp_path / "base", tmp_path / "apart"), want) <= 2e-6
    ckptctl.convert(tmp_path / "apart", tmp_path / "again", experts="stacked", **options)
    assert distance(logits(tmp_path / "base", tmp_path / "again"), want) <= 2e-6


@pytest.mark.parametrize("kind", KINDS)
def test_merging_expert_adapters_keeps_logits(tmp_path: Path, kind: str) -> None:
    import transformers

    base_model(kind, tmp_path / "base")
    apart = of_single_experts(kind, tmp_path / "apart")
    options: Any = {"to": "peft", "assets": tmp_path / "base", "experts": "stacked"}
    ckptctl.convert(apart, tmp_path / "stacked", **options)
    want = logits(tmp_path / "base", apart)
    ckptctl.merge(tmp_path / "base", apart, tmp_path / "one")
    v5: Any = {"to": "torch", "to_layout": "hf-v5"}
    ckptctl.convert(tmp_path / "base", tmp_path / "v5.pt", **v5)
    ckptctl.merge(
        tmp_path / "v5.pt", tmp_path / "stacked", tmp_path / "two", to="hf", to_layout="hf",
        assets=tmp_path / "base",
    )  # fmt: skip
    for merged in ("one", "two"):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / merged, attn_implementation="eager"
        )
        with torch.no_grad():
            assert distance(model(tokens()).logits, want) <= 2e-6


@pytest.mark.parametrize("experts", ["apart", "stacked"])
def test_grouped_automodel_adapter_keeps_its_logits_in_peft(tmp_path: Path, experts: str) -> None:
    """What ``GroupedExpertsLoRA`` adds to its ``[E, in, out]`` weights is what PEFT computes."""
    model = base_model("qwen3_moe", tmp_path / "base")
    grouped: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for layer in range(2):
            shapes = {"gate_and_up": (WIDTH, 2 * INNER), "down": (INNER, WIDTH)}
            stacks = model.model.layers[layer].mlp.experts
            for name, (into, out) in shapes.items():
                a, b = 0.3 * torch.randn(EXPERTS, into, RANK), 0.3 * torch.randn(EXPERTS, RANK, out)
                base = f"base_model.model.model.layers.{layer}.mlp.experts.lora_{name}"
                grouped |= {f"{base}_A": a, f"{base}_B": b}
                stack = stacks.gate_up_proj if name == "gate_and_up" else stacks.down_proj
                stack += 5 / RANK * (a @ b).transpose(1, 2)
        want = model(tokens()).logits
    (tmp_path / "grouped").mkdir()
    save_file(grouped, tmp_path / "grouped" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 5, "task_type": "CAUSAL_LM"}
    config |= {"target_modules": ["gate_proj", "up_proj", "down_proj"]}
    (tmp_path / "grouped" / "adapter_config.json").write_text(json.dumps(config))
    options: Any = {"to": "peft", "assets": tmp_path / "base"}
    options |= {"experts": "stacked"} if experts == "stacked" else {}
    ckptctl.convert(tmp_path / "grouped", tmp_path / "out", **options)
    assert distance(logits(tmp_path / "base", tmp_path / "out"), want) <= 2e-6
