"""Optional tensors that config.json demands, of the model or of some of its layers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ckptctl
from ckptctl.errors import MissingTensorsError
from ckptctl.families import load_families
from ckptctl.planner.config_demands import find_required_tensors
from ckptctl.planner.config_facts import has_tied_embeddings
from ckptctl.planner.families.declarations import matches_conditions
from ckptctl.planner.families.demands import CHOSEN, UNCHOSEN, Demand
from ckptctl.planner.families.validation import iterate_contradictions
from ckptctl.planner.mapping.completeness import find_missing_keys
from ckptctl.planner.mapping.matching import (
    format_key,
    iterate_spread_positions,
    list_index_values,
    match_keys,
)
from tests.checkpoints import save_hf
from tests.checkpoints.golden import Golden

SLIDING, FULL = "sliding_attention", "full_attention"
LARGE = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 4,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "attention_k_eq_v": True,
}
SMALL = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 4,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 7,
}
FAMILY = load_families()["gemma4_text"]
ALWAYS = ("self_attn.q_proj", "self_attn.q_norm", "self_attn.o_proj")
NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_feedforward_layernorm")
PLE = ("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm")
TOP = ("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm")


def keys(
    keyed: tuple[int, ...], valued: tuple[int, ...], ple: bool = False, layers: int = 4
) -> list[str]:
    """The keys of a model of which these layers have keys and values of their own."""
    found = ["model.embed_tokens.weight", "model.norm.weight"]
    found += [f"model.{name}.weight" for name in TOP if ple]
    for layer in range(layers):
        names = [*ALWAYS, *NORMS, *MLP, *(PLE if ple else ())]
        names += ["self_attn.k_proj", "self_attn.k_norm"] if layer in keyed else []
        names += ["self_attn.v_proj"] if layer in valued else []
        found += [f"model.layers.{layer}.{name}.weight" for name in names]
        found.append(f"model.layers.{layer}.layer_scalar")
    return found


def lacks(names: list[str], config: dict[str, object] | None) -> list[str]:
    layout = FAMILY.get_layout("hf")
    there = match_keys(FAMILY, layout, names)
    found = find_missing_keys(
        FAMILY,
        layout,
        there,
        {"i": 4},
        tied=True,
        required=find_required_tensors(FAMILY, config, there),
    )
    assert found.total == len(found.keys)
    return sorted(absent.key.removeprefix("model.") for absent in found.keys)


def of(*layers: str) -> list[str]:
    return [f"layers.{layer}.weight" for layer in layers]


def test_layers_may_share_kv_or_use_keys_as_values() -> None:
    assert lacks(keys((0, 1, 2, 3), (0, 2)), LARGE) == []
    assert lacks(keys((0, 1), (0, 1), ple=True), SMALL) == []
    # As on the Hub, where layers have what nothing reads.
    assert lacks(keys((0, 1, 2, 3), (0, 1, 2, 3), ple=True), SMALL) == []


def test_missing_tensors_of_single_layers_are_found() -> None:
    assert lacks(keys((0, 1, 2, 3), (0,)), LARGE) == of("2.self_attn.v_proj")
    assert lacks(keys((0, 1, 2), (0, 2)), LARGE) == of("3.self_attn.k_norm", "3.self_attn.k_proj")
    assert lacks(keys((0, 1, 2, 3), (0, 2)), {**LARGE, "attention_k_eq_v": False}) == of(
        "1.self_attn.v_proj", "3.self_attn.v_proj"
    )
    assert lacks(keys((0,), (0, 1), ple=True), SMALL) == of(
        "1.self_attn.k_norm", "1.self_attn.k_proj"
    )


def test_missing_tensors_of_model_are_found() -> None:
    gone = lacks(keys((0, 1), (0, 1)), SMALL)
    assert len(gone) == len(TOP) + 4 * len(PLE)
    assert {f"{name}.weight" for name in TOP} < set(gone)


def test_layers_are_independent_without_config() -> None:
    assert lacks(keys((0, 1), (0,)), None) == []
    # But not half of what comes together.
    some = [key for key in keys((0, 1), (0,)) if "layers.1.self_attn.k_norm" not in key]
    assert lacks(some, None) == of("1.self_attn.k_norm")


def test_missing_layer_types_demand_nothing() -> None:
    silent = {key: value for key, value in LARGE.items() if key != "layer_types"}
    assert lacks(keys((0, 1, 2, 3), (0,)), silent) == []


def test_convert_refuses_model_without_demanded_tensors(tmp_path: Path) -> None:
    state = {key: torch.zeros(4, 4)[: 1 + 3 * ("proj" in key)] for key in keys((0, 1), (0, 1))}
    state = {key: v if "proj" in key or "embed" in key else v[0] for key, v in state.items()}
    folder = save_hf(tmp_path / "model", state)
    (folder / "config.json").write_text(json.dumps(SMALL))
    with pytest.raises(MissingTensorsError, match="is missing 15 tensors"):
        ckptctl.convert(folder, tmp_path / "out", to="dcp", to_layout="hf")


def without(name: str, gone: str) -> list[str]:
    """What the golden model *name* lacks without the tensors whose keys hold *gone*."""
    golden = Golden.read(name)
    family = load_families()[name.partition(".")[0]]
    layout = family.get_layout("hf")
    there = match_keys(family, layout, [key for key in golden.tensors if gone not in key])
    tied = has_tied_embeddings(family, golden.config)
    wanted = find_required_tensors(family, golden.config, there)
    less = find_missing_keys(family, layout, there, {}, tied=tied, required=wanted)
    return sorted(absent.key for absent in less.keys)


def test_only_layers_of_matching_kind_require_tensor() -> None:
    name = "nemotron_h.latent"
    gone = [key for key in Golden.read(name).tensors if "conv1d.bias" in key]
    assert without(name, "conv1d.bias") == sorted(gone) != []
    gone = [key for key in Golden.read(name).tensors if "latent_proj" in key]
    assert without(name, "latent_proj") == sorted(gone) != []


@pytest.mark.parametrize("gone", ["vision", "audio", "timm_model", "blocks.3.", "attn.key.norm"])
def test_missing_blocks_of_listed_numbers_are_found(gone: str) -> None:
    named = [key for key in Golden.read("gemma3n").tensors if gone in key]
    assert without("gemma3n", gone) == sorted(named) != []


def test_only_layers_within_periods_require_tensor() -> None:
    """Of four layers in groups of three, the last of the group and the rest have no gate."""
    gates = [
        f"model.layers.{n}.attention.g_{one}.weight" for n in (0, 1) for one in ("norm", "proj")
    ]
    assert without("bailing_moe_linear", "attention.g_") == gates


@pytest.mark.parametrize("gone", ["vision", "audio", "output_max", "per_layer"])
def test_completely_missing_tower_is_found(gone: str) -> None:
    named = [key for key in Golden.read("gemma4").tensors if gone in key]
    assert without("gemma4", gone) == sorted(named) != []


def test_tensors_without_place_in_layout_are_noted(tmp_path: Path) -> None:
    source = Golden.read("gemma4_unified").save(tmp_path / "hf")
    towers = ["model.vision_embedder.*", "model.embed_vision.*", "model.embed_audio.*"]
    out = tmp_path / "mlx"
    ckptctl.convert(source, out, to="hf", to_layout="mlx", exclude=towers)
    plan = ckptctl.plan_conversion(out, tmp_path / "back", to="hf", to_layout="hf")
    (note,) = (note for note in plan.notes if "requires" in note)
    assert "11 tensors that layout `mlx` has no place for" in note
    text = Golden.read("gemma4_unified.text").save(tmp_path / "text")
    plan = ckptctl.plan_conversion(text, tmp_path / "out", to="hf", to_layout="mlx")
    assert not any("demands" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        ("vocab_size", 200),
        ("num_hidden_layers", 4),
        ("moe_num_experts", [5, 4]),
        ("moe_num_experts", [4, 5]),
        ("moe_intermediate_size", [29, 12]),
        ("moe_intermediate_size", [28, 13]),
        ("moe_intermediate_size", [28]),
        ("moe_num_shared_experts", 3),
        ("moe_layer_start_index", [2, 2]),
    ],
)
def test_published_config_of_ernie_vl_is_compared(tmp_path: Path, fact: str, value: object) -> None:
    """Its fields have no submodel for text, and lists for text and pictures."""
    folder = Golden.read("ernie4_5_vl_moe").save(tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    published = {
        **config.pop("text_config"),
        **config,
        "model_type": "ernie4_5_moe_vl",
        "moe_num_experts": [4, 4],
        "moe_layer_interval": 1,
        "moe_layer_start_index": [1, 1],
        "moe_layer_end_index": [4, 3],
    }
    del published["mlp_layer_types"]
    (folder / "config.json").write_text(json.dumps(published))
    assert ckptctl.verify(folder).verdict == "complete"
    (folder / "config.json").write_text(json.dumps(published | {fact: value}))
    assert ckptctl.verify(folder).verdict != "complete"


@pytest.mark.parametrize("hashed", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("listed", [False, True])
def test_router_tensor_is_required_by_its_routing_kind(hashed: int, listed: bool) -> None:
    """transformers: the first ``num_hash_layers`` choose by hash, unless a list says which do."""
    family = load_families()["deepseek_v4"]
    layout, sizes = family.get_layout("hf"), {"i": 4, "j": 1, "x": 2}
    kinds = ["hash_moe"] * hashed + ["moe"] * (4 - hashed)
    config: dict[str, object] = {"num_hash_layers": 2 if listed else hashed}
    if listed:
        config["mlp_layer_types"] = kinds
    routers = [f"layers.{i}.ffn.gate." for i in range(4)]
    slot = {"hash_moe": "tid2eid", "moe": "bias"}
    held = [router + slot[kind] for router, kind in zip(routers, kinds, strict=True)]
    held.append("mtp.0.ffn.gate.bias")
    rest = [
        format_key(layout, tensor, values, lead)
        for name, leaf in layout.leaves.items()
        for tensor in [family.tensors[name]]
        if not tensor.variant and not tensor.optional
        for values in list_index_values(tensor, sizes)
        for lead in iterate_spread_positions(leaf, sizes)
    ]
    for gone in held:
        there = match_keys(family, layout, [*rest, *(key for key in held if key != gone)])
        wanted = find_required_tensors(family, config, there)
        less = find_missing_keys(family, layout, there, sizes, tied=False, required=wanted)
        assert [one.key for one in less.keys] == [gone]


@pytest.mark.parametrize("value", [None, False, 0, "", [], True, 256, "vision", [1]])
def test_truthiness_of_value_selects(value: object) -> None:
    assert matches_conditions({"x": CHOSEN}, {"x": value}) is bool(value)
    assert matches_conditions({"x": UNCHOSEN}, {"x": value}) is not bool(value)


def test_demand_for_unknown_tensor_is_a_flaw() -> None:
    (found,) = iterate_contradictions(replace(FAMILY, demands=(Demand(("nothing",)),)))
    assert "`nothing`" in found
