"""``convert --experts``: factors of each expert, and of stacks; with PEFT's in tests/oracle."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptctl
from ckptctl.errors import MappingError, RefusedError, UnsupportedError, UsageError
from tests.checkpoints.golden import Golden

GOLDEN = Golden.read("qwen3_moe")
RANK, EXPERTS, INNER, WIDTH, LAYERS = 3, 4, 48, 64, 2
ADAPTER = "adapter_model.safetensors"
MODULE = "base_model.model.model.layers.0.mlp.experts"
State = dict[str, torch.Tensor]


def of_single_experts(up: int = RANK) -> State:
    """Return random factors of every expert, *up* being the rank of those of `up_proj`."""
    torch.manual_seed(0)
    adapter: State = {}
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            for name in ("gate_proj", "up_proj", "down_proj"):
                rank = up if name == "up_proj" else RANK
                into, out = (INNER, WIDTH) if name == "down_proj" else (WIDTH, INNER)
                key = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{name}"
                adapter[f"{key}.lora_A.weight"] = torch.randn(rank, into)
                adapter[f"{key}.lora_B.weight"] = torch.randn(out, rank)
    return adapter


def save(adapter: State, folder: Path, **config: Any) -> Path:
    folder.mkdir()
    save_file({name: value.contiguous() for name, value in adapter.items()}, folder / ADAPTER)
    stated = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "target_modules": ["gate_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(stated | config))
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    state = {name: torch.randn(shape) for name, (_, shape) in GOLDEN.tensors.items()}
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(GOLDEN.config))
    return folder


def convert(source: Path, target: Path, base: Path, experts: str) -> State:
    options: Any = {"to": "peft", "assets": base, "experts": experts, "verify": True}
    summary = ckptctl.convert(source, target, **options).plan.summary
    found = load_file(target / ADAPTER)
    assert (summary.dropped, summary.left_out) == (0, 0)
    assert summary.written.tensors == len(found)
    assert summary.fused if experts == "stacked" else summary.divided
    return found


def config_of(folder: Path) -> Any:
    return json.loads((folder / "adapter_config.json").read_text())


def merged(base: Path, adapter: Path, out: Path, layout: str) -> State:
    options: Any = {"to": "torch", "to_layout": layout}
    ckptctl.merge(base, adapter, out, **options)
    found: State = torch.load(out, weights_only=True)
    return found


def test_stacked_adapter_factors_match_per_expert_factors(tmp_path: Path, base: Path) -> None:
    apart = of_single_experts()
    stacked = convert(save(apart, tmp_path / "apart"), tmp_path / "stacked", base, "stacked")
    assert len(stacked) == 2 * LAYERS * 2
    a = stacked[f"{MODULE}.base_layer.lora_A.weight"].view(EXPERTS, -1, WIDTH)
    b = stacked[f"{MODULE}.base_layer.lora_B.weight"].view(2 * INNER, -1, EXPERTS)
    for expert in range(EXPERTS):
        gate, up = (f"{MODULE}.{expert}.{name}" for name in ("gate_proj", "up_proj"))
        want = [apart[f"{m}.lora_B.weight"] @ apart[f"{m}.lora_A.weight"] for m in (gate, up)]
        torch.testing.assert_close(b[..., expert] @ a[expert], torch.cat(want))
    config = config_of(tmp_path / "stacked")
    assert config["target_modules"] == []
    assert len(config["target_parameters"]) == 2 * LAYERS
    assert set(config["rank_pattern"].values()) == {2 * RANK}
    assert set(config["alpha_pattern"].values()) == {12}


def test_stacked_and_per_expert_adapters_merge_equally(tmp_path: Path, base: Path) -> None:
    apart = save(of_single_experts(), tmp_path / "apart")
    convert(apart, tmp_path / "stacked", base, "stacked")
    v5: Any = {"to": "torch", "to_layout": "hf-v5"}
    ckptctl.convert(base, tmp_path / "v5.pt", **v5)
    one = merged(base, apart, tmp_path / "one.pt", "hf-v5")
    options: Any = {"to": "torch", "assets": base}
    ckptctl.merge(tmp_path / "v5.pt", tmp_path / "stacked", tmp_path / "two.pt", **options)
    two = torch.load(tmp_path / "two.pt", weights_only=True)
    before = torch.load(tmp_path / "v5.pt", weights_only=True)
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=1e-5, rtol=1e-5)
        assert (name.rpartition(".")[0].endswith("experts")) != value.equal(before[name])


def test_expert_adapter_roundtrip_preserves_deltas(tmp_path: Path, base: Path) -> None:
    """Gate and up share A afterwards; what they do is the same."""
    apart = of_single_experts()
    convert(save(apart, tmp_path / "apart"), tmp_path / "stacked", base, "stacked")
    back = convert(tmp_path / "stacked", tmp_path / "back", base, "apart")
    assert back.keys() == apart.keys()
    for name, a in back.items():
        if "lora_A" in name:
            other = name.replace("lora_A", "lora_B")
            torch.testing.assert_close(back[other] @ a, apart[other] @ apart[name])
    expression = config_of(tmp_path / "back")["target_modules"]
    assert "experts" in expression


def test_stacked_adapter_rank_is_sum_of_gate_and_up(tmp_path: Path, base: Path) -> None:
    apart = of_single_experts(up=5)
    pattern = {"rank_pattern": {"up_proj": 5}, "alpha_pattern": {"up_proj": 10}}
    source = save(apart, tmp_path / "apart", **pattern)
    stacked = convert(source, tmp_path / "stacked", base, "stacked")
    assert stacked[f"{MODULE}.base_layer.lora_A.weight"].shape == (EXPERTS * 8, WIDTH)


def test_unstacked_adapter_config_states_actual_ranks(tmp_path: Path, base: Path) -> None:
    pattern = {"rank_pattern": {"up_proj": 2}, "alpha_pattern": {"up_proj": 4}}
    source = save(of_single_experts(up=2), tmp_path / "source", **pattern)
    convert(source, tmp_path / "stacked", base, "stacked")
    convert(tmp_path / "stacked", tmp_path / "apart", base, "apart")
    config = config_of(tmp_path / "apart")
    held = load_file(tmp_path / "apart" / ADAPTER)
    for name, factor in held.items():
        module = name.removeprefix("base_model.model.").rpartition(".lora_")[0]
        found = [
            r for k, r in config["rank_pattern"].items() if re.fullmatch(rf"(.*\.)?({k})", module)
        ]
        assert (found or [config["r"]])[0] == min(factor.shape), name
    plain = merged(base, source, tmp_path / "plain.pt", "hf")
    again = merged(base, tmp_path / "apart", tmp_path / "again.pt", "hf")
    torch.testing.assert_close(again, plain, atol=1e-5, rtol=1e-5)


def test_non_expert_modules_are_unchanged(tmp_path: Path, base: Path) -> None:
    q = "base_model.model.model.layers.0.self_attn.q_proj"
    factors = {f"{q}.lora_A.weight": torch.ones(RANK, WIDTH)}
    factors |= {f"{q}.lora_B.weight": torch.ones(GOLDEN.tensors[f"{q[17:]}.weight"][1][0], RANK)}
    source = save(of_single_experts() | factors, tmp_path / "apart")
    stacked = convert(source, tmp_path / "stacked", base, "stacked")
    assert all(stacked[name].equal(value) for name, value in factors.items())
    assert config_of(tmp_path / "stacked")["target_modules"] == ["q_proj"]


def test_expert_without_factors_is_unsupported(tmp_path: Path, base: Path) -> None:
    apart = {n: v for n, v in of_single_experts().items() if "0.mlp.experts.2.up_proj" not in n}
    with pytest.raises(UnsupportedError, match="1 expert has no factors"):
        convert(save(apart, tmp_path / "apart"), tmp_path / "out", base, "stacked")


def test_experts_with_different_scales_are_refused(tmp_path: Path, base: Path) -> None:
    source = save(of_single_experts(), tmp_path / "apart", alpha_pattern={"up_proj": 1})
    with pytest.raises(RefusedError, match="different scales"):
        convert(source, tmp_path / "out", base, "stacked")


def test_converting_adapter_to_same_expert_layout_is_refused(tmp_path: Path, base: Path) -> None:
    source = save(of_single_experts(), tmp_path / "apart")
    with pytest.raises(RefusedError, match="no stacked experts"):
        convert(source, tmp_path / "out", base, "apart")
    convert(source, tmp_path / "stacked", base, "stacked")
    with pytest.raises(RefusedError, match="no per-expert factors"):
        convert(tmp_path / "stacked", tmp_path / "out", base, "stacked")


def test_experts_option_without_model_config_is_an_error(tmp_path: Path) -> None:
    source = save(of_single_experts(), tmp_path / "apart")
    with pytest.raises(MappingError, match="the configuration of its model"):
        ckptctl.convert(source, tmp_path / "out", to="peft", experts="stacked")
    with pytest.raises(UsageError, match="experts"):
        ckptctl.convert(source, tmp_path / "out", to="torch", experts="stacked")


def test_experts_of_two_kinds_stay_stacked_and_merge(tmp_path: Path) -> None:
    """ERNIE 4.5 VL's files number experts of pictures after those of text."""
    base = Golden.read("ernie4_5_vl_moe").save(tmp_path / "base")
    module = "base_model.model.model.language_model.layers.1.mlp.text_moe.experts"
    factors = {
        f"{module}.lora_A.weight": torch.randn(4 * RANK, 28),
        f"{module}.lora_B.weight": torch.randn(64, 4 * RANK),
    }
    parameters = ["text_moe.experts.down_proj"]
    adapter = save(factors, tmp_path / "adapter", target_parameters=parameters)
    with pytest.raises(UnsupportedError, match="adapters of single experts") as caught:
        convert(adapter, tmp_path / "apart", base, "apart")
    assert "experts of pictures after those of text" in str(caught.value.why)
    assert not (tmp_path / "apart").exists()
    done = ckptctl.merge(base, adapter, tmp_path / "merged")
    assert done.plan.model_type == "ernie4_5_vl_moe"
