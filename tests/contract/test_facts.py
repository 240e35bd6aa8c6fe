"""Facts of config.json that the tensors contradict: every command says the same of them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptctl
from ckptctl.errors import CkptError, MappingError
from ckptctl.facts.compared import list_compared_layer_facts, list_compared_sizes
from ckptctl.families import load_families
from tests.checkpoints.golden import Golden, family_of, names
from tests.checkpoints.mutations import Mutation, mutated
from tests.sweeps import one_in

FAMILIES = load_families()
GOLDEN = {name: Golden.read(name) for name in names()}
COUNTS = ("num_experts_per_tok", "n_group", "topk_group")


def facts_of(name: str) -> list[str]:
    """The facts of a golden model that are compared with its tensors, or with each other."""
    family, config = FAMILIES[family_of(name)], GOLDEN[name].config
    inner = [key for key, value in config.items() if isinstance(value, dict)]
    counts = [f"{place}{fact}" for place in ("", *(f"{key}." for key in inner)) for fact in COUNTS]
    facts = (*list_compared_sizes(family), *list_compared_layer_facts(family), *counts)
    return [fact for fact in dict.fromkeys(facts) if "tie_word" not in fact]


def mutations_of(name: str) -> list[Mutation]:
    config = GOLDEN[name].config
    return [one for fact in facts_of(name) for one in mutated(config, fact)]


@cache
def choose_mutations() -> dict[str, list[Mutation]]:
    """Choose for each model the mutations that no model before it has, and a third of the others.

    All of them are compared with transformers in the oracles.
    """
    seen: set[tuple[str, str]] = set()
    chosen: dict[str, list[Mutation]] = {}
    for number, name in enumerate(GOLDEN):
        chosen[name] = []
        for position, mutation in enumerate(mutations_of(name)):
            kind = (mutation.fact.rpartition(".")[2], mutation.kind)
            if kind not in seen or position % 3 == number % 3:
                chosen[name].append(mutation)
            seen.add(kind)
    return chosen


def judged(source: Path, target: Path) -> tuple[bool, bool, bool]:
    """Whether ``convert``, ``verify`` and ``inspect`` accept a checkpoint."""
    try:
        ckptctl.plan_conversion(source, target, to="dcp")
        converted = True
    except CkptError:
        converted = False
    found = ckptctl.inspect(source)
    verified = ckptctl.verify(source, level="fast")
    return converted, verified.exit_code == 0, found.verdict == "complete"


@pytest.mark.parametrize("name", one_in(81, GOLDEN))
def test_commands_agree_on_contradicted_facts(name: str, tmp_path: Path) -> None:
    source = GOLDEN[name].save(tmp_path / name)
    assert judged(source, tmp_path / "out") == (True, True, True)
    refused = 0
    for one in choose_mutations()[name]:
        (source / "config.json").write_text(json.dumps(one.config))
        said = judged(source, tmp_path / "out")
        assert len(set(said)) == 1, (one.fact, one.kind, said)
        refused += not said[0]
    assert refused


def change_shape(shape: list[int], kind: str) -> list[int]:
    """Return the shape that one rank has of a tensor, or one that was not gathered at all."""
    if kind == "not gathered":
        return [0]
    if kind == "transposed":
        return shape[::-1]
    return [shape[0] // 2, *shape[1:]]


@pytest.mark.parametrize("kind", ["half", "transposed", "not gathered"])
@pytest.mark.parametrize("name", one_in(81, GOLDEN))
def test_commands_agree_on_conflicting_shapes(name: str, kind: str, tmp_path: Path) -> None:
    golden = GOLDEN[name]
    keys = [key for key, (_, shape) in golden.tensors.items() if shape]
    refused = 0
    for position in range(0, len(keys), max(1, len(keys) // 6)):
        key = keys[position]
        dtype, shape = golden.tensors[key]
        changed = {**golden.tensors, key: (dtype, change_shape(shape, kind))}
        source = Golden(golden.config, changed, {}).save(tmp_path / f"{position}")
        said = judged(source, tmp_path / "out")
        assert len(set(said)) == 1, (key, shape, said)
        refused += not said[0]
    assert refused or kind != "not gathered"


CONTRADICTED = [
    ("llama2", {"vocab_size": 101}, "vocab_size"),
    ("llama2", {"hidden_size": 32}, "hidden_size"),
    ("llama2", {"intermediate_size": 100}, "intermediate_size"),
    ("llama2", {"num_attention_heads": 8}, "num_attention_heads"),
    ("llama2", {"num_key_value_heads": 2}, "num_key_value_heads"),
    ("llama2", {"head_dim": 32}, "head_dim"),
    ("deepseek_v3", {"first_k_dense_replace": 0}, "first_k_dense_replace"),
    ("deepseek_v3", {"first_k_dense_replace": 3}, "first_k_dense_replace"),
    ("deepseek_v3", {"num_experts_per_tok": 99}, "num_experts_per_tok"),
    ("deepseek_v3", {"n_group": 3}, "n_group"),
    ("deepseek_v3", {"topk_group": 9}, "topk_group"),
    ("deepseek_v3", {"n_shared_experts": 2}, "n_shared_experts"),
    ("deepseek_v3", {"qk_rope_head_dim": 10}, "qk_rope_head_dim"),
    ("qwen3_moe", {"num_experts_per_tok": 99}, "num_experts_per_tok"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step"),
    ("gpt_oss", {"num_experts_per_tok": 99}, "num_experts_per_tok"),
    ("gpt_oss", {"head_dim": None}, "head_dim"),
    ("gemma2", {"head_dim": None}, "head_dim"),
    ("gemma4_text", {"head_dim": 32}, "head_dim"),
    ("gemma3n_text", {"intermediate_size": [96] * 3}, "num_hidden_layers"),
    ("gemma3n_text", {"intermediate_size": None}, "intermediate_size"),
]


@pytest.mark.parametrize(("name", "change", "fact"), one_in(4, CONTRADICTED))
def test_contradicted_fact_is_named_by_every_command(
    name: str, change: dict[str, Any], fact: str, tmp_path: Path
) -> None:
    golden = GOLDEN[name]
    source = golden.save(tmp_path / name)
    config = {key: value for key, value in (golden.config | change).items() if value is not None}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(MappingError) as caught:
        ckptctl.plan_conversion(source, tmp_path / "out", to="dcp")
    assert fact in str(caught.value.why) and str(source / "config.json") in str(caught.value.why)
    for level in ("fast", "headers", "full"):
        options: Any = {"level": level}
        found = ckptctl.verify(source, **options)
        assert found.exit_code == 9
        findings: Any = found.to_json()["findings"]
        assert any(fact in str(one["why"]) for one in findings), findings
    inspected = ckptctl.inspect(source)
    assert not inspected.complete and any(fact in why for why in inspected.problems)


@pytest.mark.parametrize(
    ("name", "asked"), [("qwen3_moe", "llama"), ("llama2", "qwen3"), ("llama2", "gemma")]
)
def test_model_type_that_contradicts_the_configuration_is_refused(
    name: str, asked: str, tmp_path: Path
) -> None:
    source = GOLDEN[name].save(tmp_path / name)
    for run in (
        lambda: ckptctl.plan_conversion(source, tmp_path / "out", to="dcp", model_type=asked),
        lambda: ckptctl.verify(source, model_type=asked),
        lambda: ckptctl.inspect(source, model_type=asked),
    ):
        with pytest.raises(MappingError) as caught:
            run()
        assert asked in caught.value.what
        assert str(GOLDEN[name].config["model_type"]) in str(caught.value.why)
        assert "omit" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("name", "asked"),
    [("llama2", "llama3"), ("llama3", "llama"), ("mistral", "llama"), ("llama2", "mistral")],
)
def test_model_type_with_the_same_table_is_accepted(name: str, asked: str, tmp_path: Path) -> None:
    source = GOLDEN[name].save(tmp_path / name)
    assert ckptctl.plan_conversion(source, tmp_path / "out", to="dcp", model_type=asked)
    assert ckptctl.verify(source, model_type=asked).exit_code == 0
    (source / "config.json").write_text(json.dumps({"architectures": ["Other"]}))
    assert ckptctl.plan_conversion(source, tmp_path / "out", to="dcp", model_type=asked)


def test_gemma2_default_head_dim_shown_by_shapes_is_accepted(tmp_path: Path) -> None:
    """The default head dimension of Gemma 2 is 256, whatever the hidden size."""
    golden = GOLDEN["gemma2"]
    config = {key: value for key, value in golden.config.items() if key != "head_dim"}
    tensors = dict(golden.tensors)
    for key, (dtype, shape) in tensors.items():
        if ".self_attn." in key:
            heads = 4 if "q_proj" in key or "o_proj" in key else 2
            size = heads * 256
            tensors[key] = (dtype, [shape[0], size] if "o_proj" in key else [size, shape[1]])
    source = Golden(config, tensors, {}).save(tmp_path / "gemma2")
    assert judged(source, tmp_path / "out") == (True, True, True)


def test_contradicted_vocab_size_of_quantized_model_is_refused(tmp_path: Path) -> None:
    """Names of quantized tensors are in no table: those that they stand for are compared."""
    golden = GOLDEN["llama2"]
    state = {key: torch.randn(shape).bfloat16() for key, (_, shape) in golden.tensors.items()}
    plain = tmp_path / "plain"
    plain.mkdir()
    save_file(state, plain / "model.safetensors", {"format": "pt"})
    (plain / "config.json").write_text(json.dumps(golden.config | {"dtype": "bfloat16"}))
    source = tmp_path / "quantized"
    ckptctl.convert(plain, source, to="hf", quantize="mxfp4")
    assert judged(source, tmp_path / "out") == (True, True, True)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"vocab_size": 101}))
    assert judged(source, tmp_path / "out") == (False, False, False)
