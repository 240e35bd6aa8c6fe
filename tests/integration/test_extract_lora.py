"""``extract-lora``: the change between two models, as an adapter that ``merge`` takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptctl
from ckptctl.errors import MappingError, RefusedError, UsageError
from tests.checkpoints.golden import Golden
from tests.sweeps import one_in

State = dict[str, torch.Tensor]
LLAMA = Golden.read("llama3")
PREFIX = "base_model.model."


def state_of(golden: Golden, seed: int = 0) -> State:
    """Return random tensors of a tiny model."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: shape for name, (_, shape) in golden.tensors.items()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def save(state: State, folder: Path, config: Any = LLAMA.config) -> Path:
    folder.mkdir()
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def is_linear(name: str) -> bool:
    return "proj" in name or "lm_head" in name


def changed(state: State, change: Callable[[torch.Tensor], torch.Tensor]) -> State:
    return {n: change(value) if is_linear(n) else value for n, value in state.items()}


def low_rank(value: torch.Tensor, rank: int = 3) -> torch.Tensor:
    rows, columns = value.shape
    return value + 0.1 * torch.randn(rows, rank) @ torch.randn(rank, columns)


def noisy(value: torch.Tensor) -> torch.Tensor:
    return value + 0.1 * torch.randn_like(value)


def read(folder: Path) -> State:
    return load_file(folder / "adapter_model.safetensors")


@pytest.fixture
def base(tmp_path: Path) -> tuple[State, Path]:
    torch.manual_seed(0)
    state = state_of(LLAMA)
    return state, save(state, tmp_path / "base")


def test_extracted_adapter_is_best_approximation_of_its_rank(
    tmp_path: Path, base: tuple[State, Path]
) -> None:
    before, path = base
    after = changed(before, noisy)
    tuned = save(after, tmp_path / "tuned")
    found = ckptctl.extract_lora(path, tuned, tmp_path / "adapter", rank=5)
    ckptctl.merge(path, tmp_path / "adapter", tmp_path / "merged")
    merged = load_file(tmp_path / "merged/model.safetensors")
    errors = {layer.name: layer.error for layer in found.layers}
    assert errors.keys() == {name for name in before if is_linear(name)}
    for name, error in errors.items():
        delta = (after[name] - before[name]).double()
        u, s, vh = torch.linalg.svd(delta, full_matrices=False)
        best = before[name].double() + u[:, :5] * s[:5] @ vh[:5]
        torch.testing.assert_close(merged[name].double(), best, atol=1e-5, rtol=1e-5)
        lost = (s[5:].square().sum() / s.square().sum()).sqrt().item()
        assert error == pytest.approx(lost, rel=1e-4)
        assert 0.5 < error < 1
    assert found.worst == max(errors.values())
    assert found.unchanged == len(before) - len(errors)


def test_low_rank_change_is_recovered(tmp_path: Path, base: tuple[State, Path]) -> None:
    before, path = base
    after = changed(before, low_rank)
    tuned = save(after, tmp_path / "tuned")
    found = ckptctl.extract_lora(path, tuned, tmp_path / "adapter", rank=3)
    assert found.worst < 1e-5
    ckptctl.merge(path, tmp_path / "adapter", tmp_path / "merged")
    merged = load_file(tmp_path / "merged/model.safetensors")
    for name, value in after.items():
        torch.testing.assert_close(merged[name], value, atol=2e-6, rtol=2e-6)


def test_energy_selects_smallest_sufficient_rank(tmp_path: Path, base: tuple[State, Path]) -> None:
    """Each layer has the least rank that keeps enough; PEFT finds them as patterns."""
    before, path = base
    ranks = {name: 1 + number % 3 for number, name in enumerate(filter(is_linear, before))}
    after = {n: low_rank(v, ranks[n]) if n in ranks else v for n, v in before.items()}
    tuned = save(after, tmp_path / "tuned")
    found = ckptctl.extract_lora(path, tuned, tmp_path / "adapter", energy=0.9999)
    assert all(layer.rank <= ranks[layer.name] for layer in found.layers)
    assert all(layer.error**2 <= 0.0001 for layer in found.layers)
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert config["rank_pattern"] == config["alpha_pattern"]
    assert {config["r"], *config["rank_pattern"].values()} == {x.rank for x in found.layers}
    half = ckptctl.extract_lora(path, tuned, tmp_path / "half", energy=0.5)
    for layer in half.layers:
        delta = after[layer.name] - before[layer.name]
        squares = torch.linalg.svdvals(delta.double()).square()
        kept = squares.cumsum(0) / squares.sum()
        assert kept[layer.rank - 1] >= 0.5 - 1e-6
        assert layer.rank == 1 or kept[layer.rank - 2] < 0.5 + 1e-6
    ckptctl.merge(path, tmp_path / "adapter", tmp_path / "merged")


def test_formats_and_layouts_give_same_adapter(tmp_path: Path, base: tuple[State, Path]) -> None:
    before, path = base
    tuned = save(changed(before, low_rank), tmp_path / "tuned")
    ckptctl.convert(path, tmp_path / "meta", to="meta", mp=2)
    ckptctl.convert(tuned, tmp_path / "titan", to="dcp", to_layout="torchtitan@0.3")
    one = ckptctl.extract_lora(path, tuned, tmp_path / "one", rank=3)
    other = ckptctl.extract_lora(tmp_path / "meta", tmp_path / "titan", tmp_path / "two", rank=3)
    assert {x.name for x in one.layers} == {x.name for x in other.layers}
    first, second = read(tmp_path / "one"), read(tmp_path / "two")
    assert all(first[name].equal(value) for name, value in second.items())


def test_unchanged_layers_have_no_factors(tmp_path: Path, base: tuple[State, Path]) -> None:
    before, path = base
    after = {n: low_rank(v) if "layers.0.self_attn.q" in n else v for n, v in before.items()}
    tuned = save(after, tmp_path / "tuned")
    ckptctl.extract_lora(path, tuned, tmp_path / "adapter", rank=3)
    assert len(read(tmp_path / "adapter")) == 2
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert config["target_modules"] == ["model.layers.0.self_attn.q_proj"]


@pytest.fixture
def normed(tmp_path: Path, base: tuple[State, Path]) -> Path:
    """Return a model whose norms and embedding were trained, too."""
    after = changed(base[0], low_rank)
    after["model.norm.weight"] = after["model.norm.weight"] + 1
    after["model.embed_tokens.weight"] = after["model.embed_tokens.weight"] * 2
    return save(after, tmp_path / "normed")


def test_changed_non_linear_tensors_are_refused(
    tmp_path: Path, base: tuple[State, Path], normed: Path
) -> None:
    with pytest.raises(RefusedError, match="not a linear layer") as caught:
        ckptctl.extract_lora(base[1], normed, tmp_path / "adapter", rank=3)
    assert "model.embed_tokens.weight" in caught.value.what
    assert not (tmp_path / "adapter").exists()
    assert not list(tmp_path.glob(".*staging"))


def test_changed_non_linear_tensors_can_be_skipped(
    tmp_path: Path, base: tuple[State, Path], normed: Path
) -> None:
    options: Any = {"rank": 3, "others": "leave-out"}
    found = ckptctl.extract_lora(base[1], normed, tmp_path / "adapter", **options)
    assert found.left_out.keys() == {"model.embed_tokens.weight", "model.norm.weight"}
    assert all(".lora_" in name for name in read(tmp_path / "adapter"))


def test_changed_non_linear_tensors_can_be_saved(
    tmp_path: Path, base: tuple[State, Path], normed: Path
) -> None:
    options: Any = {"rank": 3, "others": "save"}
    found = ckptctl.extract_lora(base[1], normed, tmp_path / "adapter", **options)
    assert set(found.saved) == {"model.embed_tokens.weight", "model.norm.weight"}
    ckptctl.merge(base[1], tmp_path / "adapter", tmp_path / "merged")
    merged = load_file(tmp_path / "merged/model.safetensors")
    after = load_file(normed / "model.safetensors")
    assert all(merged[name].equal(after[name]) for name in found.saved)


def test_include_and_exclude_select_layers(tmp_path: Path, base: tuple[State, Path]) -> None:
    tuned = save(changed(base[0], low_rank), tmp_path / "tuned")
    options: Any = {"rank": 2, "include": ["*.self_attn.*"], "exclude": ["*o_proj*"]}
    found = ckptctl.extract_lora(base[1], tuned, tmp_path / "adapter", **options)
    assert all("self_attn" in x.name and "o_proj" not in x.name for x in found.layers)
    assert len(found.left_out) == len(list(filter(is_linear, base[0]))) - len(found.layers)


def test_factor_dtype_is_reflected_in_reported_errors(
    tmp_path: Path, base: tuple[State, Path]
) -> None:
    """Errors are those of the factors as they are written."""
    tuned = save(changed(base[0], low_rank), tmp_path / "tuned")
    found = ckptctl.extract_lora(base[1], tuned, tmp_path / "adapter", rank=3, dtype="bf16")
    assert {v.dtype for v in read(tmp_path / "adapter").values()} == {torch.bfloat16}
    assert 1e-4 < found.worst < 1e-2


def test_fp8_factors_are_rounded_from_exact_ones(tmp_path: Path, base: tuple[State, Path]) -> None:
    tuned = save(changed(base[0], low_rank), tmp_path / "tuned")
    ckptctl.extract_lora(base[1], tuned, tmp_path / "exact", rank=3)
    ckptctl.extract_lora(base[1], tuned, tmp_path / "adapter", rank=3, dtype="fp8")
    exact = read(tmp_path / "exact")
    for name, factor in read(tmp_path / "adapter").items():
        assert torch.equal(factor.float(), exact[name].to(torch.float8_e4m3fn).float()), name


def test_identical_models_are_refused(tmp_path: Path, base: tuple[State, Path]) -> None:
    other = save(base[0], tmp_path / "other")
    with pytest.raises(RefusedError, match="no difference"):
        ckptctl.extract_lora(base[1], other, tmp_path / "adapter", rank=3)


def test_models_with_different_shapes_are_an_error(
    tmp_path: Path, base: tuple[State, Path]
) -> None:
    state = base[0] | {n: base[0][n].repeat(2, 1) for n in base[0] if "embed" in n or "head" in n}
    other = save(state, tmp_path / "other", LLAMA.config | {"vocab_size": 256})
    with pytest.raises(MappingError, match="not of the same model") as caught:
        ckptctl.extract_lora(base[1], other, tmp_path / "adapter", rank=3)
    assert "has shape [128, 64] in the base and [256, 64] in" in str(caught.value.why)


def test_nan_elements_are_refused(tmp_path: Path, base: tuple[State, Path]) -> None:
    after = changed(base[0], low_rank)
    after["lm_head.weight"][3, 5] = torch.nan
    tuned = save(after, tmp_path / "tuned")
    with pytest.raises(RefusedError, match="infinite or NaN") as caught:
        ckptctl.extract_lora(base[1], tuned, tmp_path / "adapter", rank=3)
    assert "lm_head.weight" in str(caught.value.where)


def test_rank_or_energy_is_required_and_validated(tmp_path: Path, base: tuple[State, Path]) -> None:
    for options in ({}, {"rank": 3, "energy": 0.9}, {"energy": 1.5}, {"rank": 0}):
        with pytest.raises(UsageError):
            ckptctl.extract_lora(base[1], base[1], tmp_path / "adapter", **options)


def test_stacked_experts_get_factors_per_expert(tmp_path: Path) -> None:
    golden = Golden.read("qwen3_moe")
    torch.manual_seed(0)
    before = state_of(golden)
    after = {n: low_rank(v) if ".experts." in n else v for n, v in before.items()}
    base = save(before, tmp_path / "base", golden.config)
    tuned = save(after, tmp_path / "tuned", golden.config)
    found = ckptctl.extract_lora(base, tuned, tmp_path / "adapter", rank=3)
    stacks = {layer.name.rpartition(".")[2]: layer.rank for layer in found.layers}
    assert stacks == {"gate_up_proj": 6, "down_proj": 3} and len(found.layers) == 4
    assert found.worst < 1e-5
    ckptctl.merge(base, tmp_path / "adapter", tmp_path / "merged")
    merged = load_file(tmp_path / "merged/model.safetensors")
    for name, value in after.items():
        torch.testing.assert_close(merged[name], value, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_5_text"])
def test_changed_norms_are_saved_and_merged(name: str, tmp_path: Path) -> None:
    golden = Golden.read(name)
    before = state_of(golden)
    chosen = [n for n in before if "layernorm" in n or n == "lm_head.weight"]
    after = {n: low_rank(value) if n == "lm_head.weight" else value for n, value in before.items()}
    after |= {n: noisy(before[n]) for n in chosen if "layernorm" in n}
    path = save(before, tmp_path / "base", golden.config)
    tuned = save(after, tmp_path / "tuned", golden.config)
    found = ckptctl.extract_lora(path, tuned, tmp_path / "adapter", rank=2, others="save")
    assert {*found.saved} == {n for n in chosen if "layernorm" in n}
    ckptctl.merge(path, tmp_path / "adapter", tmp_path / "merged")
    merged = load_file(tmp_path / "merged/model.safetensors")
    assert all(merged[n].equal(after[n]) for n in before if n != "lm_head.weight")


def test_adapter_without_linear_layers_is_refused(tmp_path: Path, base: tuple[State, Path]) -> None:
    before, path = base
    tuned = save(before | {"model.norm.weight": torch.ones(64)}, tmp_path / "tuned")
    with pytest.raises(RefusedError, match="no linear layer differs") as raised:
        ckptctl.extract_lora(path, tuned, tmp_path / "adapter", rank=2, others="save")
    assert "1 are not linear layers" in str(raised.value.why)


@pytest.mark.parametrize(
    ("name", "tensor", "why"),
    [
        ("qwen3.tied", "model.embed_tokens.weight", "other tensors are tied to it"),
        ("qwen2", "model.layers.0.self_attn.q_proj.bias", "PEFT can only save whole modules"),
    ],
)
def test_tensors_peft_cannot_save_are_refused(
    name: str, tensor: str, why: str, tmp_path: Path
) -> None:
    golden = Golden.read(name)
    ckptctl.convert(golden.save(tmp_path / "made"), tmp_path / "base", to="hf", to_layout="hf")
    before = load_file(tmp_path / "base/model.safetensors")
    before = {n: v if v.dtype == torch.int64 else torch.randn(v.shape) for n, v in before.items()}
    after = before | {tensor: noisy(before[tensor])}
    path = save(before, tmp_path / "plain", golden.config)
    tuned = save(after, tmp_path / "tuned", golden.config)
    with pytest.raises(RefusedError, match=why):
        ckptctl.extract_lora(path, tuned, tmp_path / "adapter", rank=2, others="save")
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize(
    ("name", "layout"),
    one_in(
        3, [("qwen3_5_moe_text", "hf-fresh"), ("qwen3_5_moe_text", "hf"), ("qwen3_vl_moe", "hf-v5")]
    ),
)
def test_stacked_experts_are_saved_completely_and_merged(
    name: str, layout: str, tmp_path: Path
) -> None:
    """PEFT saves all of a module or nothing: of the experts one tensor differs, both are there."""
    torch.manual_seed(1)
    golden = Golden.read(name)
    made = golden.save(tmp_path / "made")
    ckptctl.convert(made, tmp_path / "stacked", to="hf", to_layout="hf", assets=made)
    before = load_file(tmp_path / "stacked/model.safetensors")
    before = {n: torch.randn_like(v) for n, v in before.items()}
    experts = [n for n in before if n.endswith("experts.down_proj")]
    after = {n: low_rank(v) if n.endswith("q_proj.weight") else v for n, v in before.items()}
    after |= {n: noisy(before[n]) for n in experts}
    one, other = (
        save(state, tmp_path / folder, golden.config)
        for state, folder in ((before, "before"), (after, "after"))
    )
    ckptctl.convert(one, tmp_path / "base", to="hf", to_layout=layout)
    found = ckptctl.extract_lora(
        tmp_path / "base", other, tmp_path / "adapter", rank=3, others="save"
    )
    mates = {n.replace("down_proj", "gate_up_proj") for n in experts}
    assert {*found.saved} == {*experts, *mates}
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert config["modules_to_save"] == [n.rpartition(".")[0] for n in experts]
    ckptctl.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged", to_layout="hf")
    merged = load_file(tmp_path / "merged/model.safetensors")
    for key, value in after.items():
        torch.testing.assert_close(merged[key], value, atol=2e-6, rtol=2e-6)


def test_module_with_own_parameter_is_saved_completely(tmp_path: Path) -> None:
    """What lies in it has no factors then; what is not chosen stays as the base has it."""
    golden = Golden.read("qwen3_next")
    before = state_of(golden)
    changed = ("A_log", "in_proj_qkvz.weight", "linear_attn.out_proj.weight", "mlp.gate.weight")
    after = {
        n: noisy(v) if n.endswith((*changed, "q_proj.weight")) else v for n, v in before.items()
    }
    path = save(before, tmp_path / "base", golden.config)
    tuned = save(after, tmp_path / "tuned", golden.config)
    options: Any = {"rank": 64, "others": "save", "exclude": ["*.linear_attn.out_proj.weight"]}
    found = ckptctl.extract_lora(path, tuned, tmp_path / "adapter", **options)
    assert all("q_proj" in layer.name for layer in found.layers)
    inside = {n for n in before if ".linear_attn." in n or n.endswith("mlp.gate.weight")}
    assert {*found.saved} == inside
    assert found.left_out and all("out_proj" in name for name in found.left_out)
    ckptctl.merge(path, tmp_path / "adapter", tmp_path / "merged")
    merged = load_file(tmp_path / "merged/model.safetensors")
    for key in before:
        want = before[key] if key in found.left_out else after[key]
        torch.testing.assert_close(merged[key], want, atol=1e-4, rtol=1e-4)
