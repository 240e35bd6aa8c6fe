"""Megatron's words for the facts of a model: read, compared, and written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ckptctl import families
from ckptctl.errors import MappingError
from ckptctl.facts.contradictions import find_contradicting_facts, read_config_statements
from ckptctl.facts.megatron import (
    config_to_megatron_fields,
    extract_megatron_fields,
    iterate_default_statements,
    megatron_to_config,
    read_megatron_statements,
)
from ckptctl.facts.megatron_files import build_megatron_arguments, build_run_config
from ckptctl.facts.recorded import find_possible_families
from ckptctl.planner.families.facts import Fact
from tests.sweeps import one_in

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 48}
ROUTED = {
    **EXPERTS,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
GROUPS = {"n_group": 4, "topk_group": 2}
"""Three experts of two groups: Megatron-Core and transformers weigh a group by its best one."""
LATENT = {
    **ROUTED,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
INDEXER = {"index_n_heads": 6, "index_head_dim": 10, "index_topk": 9}
DELTA = {
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 20,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}

BEYOND: dict[str, dict[str, Any]] = {
    "llama2": {"rope_theta": 10000.0},
    "llama3": {"rope_theta": 500000.0},
    "llama3_2": {"rope_theta": 5e5, "rope_scaling": LLAMA3, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 512},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2": {"tie_word_embeddings": True},
    "qwen2_moe": {
        **EXPERTS,
        "num_experts": 8,
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": 40,
    },
    "qwen3": {},
    "qwen3_moe": {**EXPERTS, "num_experts": 8, "norm_topk_prob": True},
    "qwen3_next": {
        **EXPERTS,
        "num_experts": 8,
        "norm_topk_prob": True,
        "shared_expert_intermediate_size": 40,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "num_nextn_predict_layers": 1,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 20,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    "deepseek_v2": {
        **LATENT,
        **GROUPS,
        "topk_method": "group_limited_greedy",
        "norm_topk_prob": False,
        "rope_scaling": YARN,
    },
    "deepseek_v3": {**LATENT, **GROUPS, "num_nextn_predict_layers": 1},
    "deepseek_v32": {**LATENT, **GROUPS, **INDEXER, "num_nextn_predict_layers": 1},
    "glm_moe_dsa": {
        **LATENT,
        **INDEXER,
        "num_nextn_predict_layers": 1,
        "indexer_types": ["full", "full", "shared", "full"],
    },
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 3, "rotary_dim": 12},
    "qwen3_5_text": {**DELTA, "mtp_num_hidden_layers": 1},
    "qwen3_5_moe_text": {
        **EXPERTS,
        **DELTA,
        "num_experts": 8,
        "shared_expert_intermediate_size": 40,
        "mtp_num_hidden_layers": 1,
    },
    "glm4": {"attention_bias": True, "partial_rotary_factor": 0.5},
    "glm4_moe": {
        **ROUTED,
        "use_qk_norm": True,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {
        "query_pre_attn_scalar": 144,
        "sliding_window": 512,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "query_pre_attn_scalar": 168,
        "sliding_window": 512,
        "tie_word_embeddings": True,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "nemotron_h": {
        **EXPERTS,
        "layer_norm_epsilon": 1e-5,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 20,
        "n_groups": 2,
        "ssm_state_size": 10,
        "n_routed_experts": 8,
        "moe_shared_expert_intermediate_size": 40,
        "moe_latent_size": 14,
        "routed_scaling_factor": 2.5,
        "n_group": 4,
        "topk_group": 2,
        "num_nextn_predict_layers": 1,
        "mtp_layers_block_type": ["full_attention", "moe"],
    },
    "nemotron": {"norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": False},
    "phi3": {"sliding_window": 2047, "partial_rotary_factor": 0.75},
    "gpt_oss": {
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "sliding_window": 128,
        "rope_scaling": {n: v for n, v in YARN.items() if "mscale" not in n} | {"truncate": False},
    },
}
VISION = {"hidden_size": 40, "intermediate_size": 88, "num_heads": 5, "depth": 3}
VISUAL: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"image_token_id": 90},
    "qwen3_vl_moe": {"image_token_id": 90},
    "kimi_k25": {},
    "ministral3_vision": {"model_type": "mistral3", "image_token_index": 11},
}
"""Models with a vision tower: what config.json states next to their text model."""
TEXTS: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"rope_scaling": {"rope_type": "default", "mrope_section": [6, 4, 2]}},
    "qwen3_vl_moe": {
        **EXPERTS,
        "num_experts": 8,
        "rope_scaling": {"rope_type": "default", "mrope_section": [6, 4, 2]},
    },
    "kimi_k25": {**LATENT, **GROUPS, "num_nextn_predict_layers": 1},
    "ministral3_vision": {
        "model_type": "ministral3",
        "rope_scaling": YARN | {"mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
    },
}
TYPES = {"llama2": "llama", "llama3": "llama", "llama3_2": "llama"}
LACKING = {
    "deepseek_v2": ("head_dim",),
    "deepseek_v3": ("head_dim",),
    "deepseek_v32": ("head_dim",),
    "glm_moe_dsa": ("head_dim",),
    "qwen3_5_moe_text": ("intermediate_size",),
    "nemotron": ("rms_norm_eps",),
    "nemotron_h": ("rms_norm_eps", "rope_theta"),
}
NAMES = sorted(BEYOND)
SAME_PROVIDER = {
    name: ["qwen3_5_moe_text", "qwen3_next"] for name in ("qwen3_5_moe_text", "qwen3_next")
}
"""Model types that Bridge builds alike, so that only their config.json tells them apart."""
RECORDS = ("arguments", "run_config")


def config(name: str) -> dict[str, Any]:
    told = {"model_type": TYPES.get(name, name), **SIZES, **BEYOND[name]}
    return {key: value for key, value in told.items() if key not in LACKING.get(name, ())}


def visual_config(name: str) -> dict[str, Any]:
    """Return a config.json of a model with a vision tower, which has sizes of the same names."""
    text = {**SIZES, **TEXTS[name]}
    if name == "kimi_k25":
        del text["head_dim"]
    tower = {"vision_config": dict(VISION), "tie_word_embeddings": name == "qwen3_vl"}
    return {"model_type": name, "text_config": text, **tower, **VISUAL[name]}


def record(name: str, kind: str, told: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return what Megatron-LM or Bridge records of the model of that name."""
    family, told = families.family(name), told or config(name)
    if kind == "arguments" and family.megatron and not family.megatron.has_arguments:
        pytest.skip("Megatron-LM cannot build it")
    if kind == "arguments":
        return build_megatron_arguments(family, told)
    if family.megatron is None or not family.megatron.provider:
        pytest.skip("Bridge has no provider for it")
    return build_run_config(family, told)


def statements(name: str, told: dict[str, Any], described: dict[str, Any]) -> list[str]:
    family = families.family(name)
    said = [
        *read_config_statements(family, described, "config.json"),
        *read_megatron_statements(family, told, "common.pt"),
    ]
    said += iterate_default_statements(family, described, "config.json")
    return [str(one) for one in find_contradicting_facts(said)]


@pytest.mark.parametrize("kind", RECORDS)
@pytest.mark.parametrize("name", NAMES)
def test_written_record_reads_back_as_same_config(name: str, kind: str) -> None:
    told = record(name, kind)
    assert statements(name, told, config(name)) == []
    made = megatron_to_config(families.family(name), told, {})
    described = config(name)
    assert {key: made.get(key) for key in described} == described
    assert made["pad_token_id"] is None


@pytest.mark.parametrize("name", one_in(5, NAMES))
def test_every_fact_is_compared_with_config(name: str) -> None:
    family = families.family(name)
    assert family.megatron is not None
    told = record(name, "arguments")
    changed = {"number": 7.5, "factor": 7.5, "flag": None, "not": None, "root": 0.5}
    value: Any
    for word in family.megatron.facts:
        if (
            family.megatron.fields.get("multi_latent_attention")
            and word.config == "num_key_value_heads"
        ):
            continue  # Latent attention has none of its own.
        value = changed.get(word.kind, 7)
        fields = extract_megatron_fields(told)
        if word.kind in ("flag", "not"):
            value = not fields[word.megatron]
        elif word.config == "moe_intermediate_size":
            value = 24
        elif word.kind == "dense":
            value = [0, 0, 1, 1]
        elif word.kind == "window":
            value = (7, 0)
        elif word.kind.endswith("letters"):
            value = "MM*-"
        elif word.config == "head_dim" and name == "minimax_m2":
            value = 48  # of which a whole number is rotated
        elif word.kind == "method":
            value = 1
        elif word.kind == "shared":
            value = 3 * 48
        elif name == "gemma3_text" and word.config == "rope_theta":
            value = [10000.0, 7.5]
        if word.config == "num_hidden_layers" and isinstance(fields.get("moe_layer_freq"), list):
            fields["moe_layer_freq"] = [0, *[1] * 6]
        found = statements(name, {**fields, word.megatron: value}, config(name))
        assert any(f"`{word.config}`" in one and "common.pt" in one for one in found), word


def test_contradiction_names_both_sources_and_keys() -> None:
    told = record("llama3", "arguments") | {"num_layers": 30}
    assert statements("llama3", told, config("llama3")) == [
        "`num_hidden_layers` is 4 in config.json and 30 in common.pt as `num_layers`"
    ]


@pytest.mark.parametrize("name", NAMES)
def test_provider_determines_model_type(name: str) -> None:
    known = {name: one for name, one in families.load_families().items() if one.megatron}
    expected = SAME_PROVIDER.get(name, [name])
    assert find_possible_families(known, record(name, "run_config")) == expected


def test_removed_provider_of_qwen3_next_determines_model_type() -> None:
    """Megatron-Bridge up to 0.3 has a class for Qwen 3 Next, and one for gpt-oss."""
    known = {name: one for name, one in families.load_families().items() if one.megatron}
    for name, provider in (("qwen3_next", "Qwen3NextModelProvider"), ("gpt_oss", "GPTOSSProvider")):
        told = record(name, "run_config")
        model = told["model"] | {"_target_": f"megatron.bridge.models.{provider}"}
        assert find_possible_families(known, told | {"model": model}) == [name]


def test_arguments_match_all_equivalent_model_types() -> None:
    known = {name: one for name, one in families.load_families().items() if one.megatron}
    assert find_possible_families(known, record("llama3", "arguments")) == [
        "llama3",
        "mistral",
        "phi3",
    ]
    assert find_possible_families(known, record("deepseek_v3", "arguments")) == [
        "deepseek_v3",
        "kimi_k25",  # with a tower
    ]


def test_null_scale_counts_as_missing() -> None:
    known = {name: families.family(name) for name in ("gemma", "gemma3_text")}
    told = record("gemma", "arguments") | {"softmax_scale": None}
    assert find_possible_families(known, told) == list(known)
    with pytest.raises(MappingError, match=r"requires .*`query_pre_attn_scalar`"):
        megatron_to_config(known["gemma3_text"], told | {"rotary_base": [1e4, 1e6]}, {})


def test_inexpressible_model_type_does_not_exclude_others() -> None:
    family = families.family("gemma")
    assert family.megatron is not None
    style = replace(family.megatron, facts=(Fact("head_dim", kind="flag", megatron="kv_channels"),))
    known = {"odd": replace(family, megatron=style), "gemma": family}
    assert find_possible_families(known, record("gemma", "arguments")) == ["gemma"]


@pytest.mark.parametrize("value", [True, "32", 1 << 60, -3, 0, 1.5, float("nan")])
def test_invalid_size_is_refused(value: object) -> None:
    told = record("llama3", "arguments") | {"num_layers": value}
    with pytest.raises(MappingError, match="`num_layers` is not a valid size"):
        megatron_to_config(families.family("llama3"), told, {})


@pytest.mark.parametrize("value", [True, "x", float("nan"), float("inf"), -1e-5, 0])
def test_invalid_number_is_refused(value: object) -> None:
    told = record("llama3", "arguments") | {"norm_epsilon": value}
    with pytest.raises(MappingError, match="`layernorm_epsilon` is not a positive number"):
        megatron_to_config(families.family("llama3"), told, {})


@pytest.mark.parametrize("word", ["rotary_base", "norm_epsilon", "num_layers", "num_query_groups"])
def test_missing_logit_relevant_argument_is_refused(word: str) -> None:
    told = record("llama3", "arguments")
    del told[word]
    with pytest.raises(MappingError, match=r"config\.json requires") as raised:
        megatron_to_config(families.family("llama3"), told, {})
    assert "--assets" in str(raised.value.hint)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("num_experts", 8),
        ("multi_latent_attention", True),
        ("normalization", "LayerNorm"),
        ("swiglu", False),
        ("qk_layernorm", True),
        ("add_qkv_bias", True),
        ("apply_layernorm_1p", True),
        ("rotary_percent", 0.5),
        ("rotary_interleaved", True),
        ("softmax_type", "learnable"),
        ("position_embedding_type", "learned_absolute"),
        ("window_size", (128, 0)),
    ],
)
def test_argument_of_another_architecture_is_refused(word: str, value: object) -> None:
    told = record("llama3", "arguments") | {word: value}
    assert statements("llama3", told, config("llama3"))
    with pytest.raises(MappingError) as raised:
        megatron_to_config(families.family("llama3"), told, {})
    assert "in every model of `llama3`" in str(raised.value.why)


@pytest.mark.parametrize("kind", RECORDS)
@pytest.mark.parametrize("name", VISUAL)
def test_text_model_next_to_a_tower_is_written_and_compared(name: str, kind: str) -> None:
    described, known = visual_config(name), families.load_families()
    told = record(name, kind, described)
    fields = extract_megatron_fields(told)
    assert (fields["hidden_size"], fields["ffn_hidden_size"], fields["num_layers"]) == (64, 112, 4)
    assert fields["share_embeddings_and_output_weights"] is (name == "qwen3_vl")
    assert statements(name, told, described) == []
    found = statements(name, {**fields, "hidden_size": 40, "rotary_base": 7.5}, described)
    assert {one.partition(" is")[0] for one in found} == {
        "`text_config.hidden_size`",
        "`text_config.rope_theta`",
    }
    if kind == "run_config":
        styled = {name: one for name, one in known.items() if one.megatron}
        assert find_possible_families(styled, told) == [name]


@pytest.mark.parametrize(
    ("name", "sizes", "expected"),
    [
        ("deepseek_v3", {"j": 2}, 2),
        ("deepseek_v3", {}, None),
        ("qwen3_5_text", {"j": 2}, 2),
        ("nemotron_h", {}, 1),  # its tensors have no index
        ("kimi_k25", {"j": 2}, None),  # the layers of its tower
    ],
)
def test_tensors_determine_number_of_mtp_layers(
    name: str, sizes: dict[str, int], expected: int | None
) -> None:
    described = visual_config(name) if name in VISUAL else config(name)
    made = build_megatron_arguments(families.family(name), described, sizes)
    assert made["mtp_num_layers"] == expected


def test_arguments_of_gemma3_have_sizes_of_its_text_model() -> None:
    text = {key: value for key, value in config("gemma3_text").items() if key != "model_type"}
    tower = {"hidden_size": 40, "intermediate_size": 88, "num_hidden_layers": 3}
    described = {"model_type": "gemma3", "text_config": text, "vision_config": tower}
    made = build_megatron_arguments(families.family("gemma3"), described)
    assert (made["hidden_size"], made["ffn_hidden_size"], made["num_layers"]) == (64, 112, 4)


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_vl_moe"])
def test_tied_embeddings_and_sections_next_to_a_tower_are_compared(name: str) -> None:
    described = visual_config(name)
    fields = extract_megatron_fields(record(name, "run_config", described))
    tied = not fields["share_embeddings_and_output_weights"]
    found = statements(name, {**fields, "share_embeddings_and_output_weights": tied}, described)
    assert len(found) == 1 and found[0].startswith("`tie_word_embeddings` is")
    found = statements(name, {**fields, "mrope_section": [4, 4, 4]}, described)
    assert len(found) == 1 and "mrope_section" in found[0]
    with pytest.raises(MappingError, match="must be three sizes"):
        statements(name, {**fields, "mrope_section": [4, -4]}, described)


def test_run_config_contains_configurations_of_tower_and_text() -> None:
    described = visual_config("qwen3_vl")
    model: Any = record("qwen3_vl", "run_config", described)["model"]
    assert model["vision_config"] == {
        "_target_": "transformers.models.qwen3_vl.configuration_qwen3_vl.Qwen3VLVisionConfig",
        **VISION,
    }
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 4, 2]}
    assert model["hf_text_config"]["rope_parameters"] == rope
    assert not {"rope_theta", "rope_scaling"} & model["hf_text_config"].keys()
    del described["vision_config"]
    with pytest.raises(MappingError, match="requires `vision_config`"):
        record("qwen3_vl", "run_config", described)


@pytest.mark.parametrize("place", ["_target_", "_call_", "_args_"])
def test_object_in_configuration_of_a_tower_is_refused(place: str) -> None:
    """Bridge imports and calls what its YAML names."""
    described = visual_config("qwen3_vl")
    described["vision_config"]["inner"] = [{"deep": {place: "os.system"}}]
    with pytest.raises(MappingError, match="cannot express `vision_config`"):
        record("qwen3_vl", "run_config", described)


def test_family_that_only_bridge_builds_has_no_arguments() -> None:
    family, described = families.family("ministral3_vision"), visual_config("ministral3_vision")
    with pytest.raises(MappingError, match="Megatron-LM has no arguments for `ministral3_vision`"):
        build_megatron_arguments(family, described)
    model: Any = build_run_config(family, described)["model"]
    assert model["hf_config"]["text_config"] == described["text_config"]
    assert (model["yarn_rotary_scaling_factor"], model["image_token_id"]) == (40.0, 11)
    tied: Any = build_run_config(family, described | {"tie_word_embeddings": True})["model"]
    assert tied["share_embeddings_and_output_weights"]


def windowed() -> list[str]:
    known = families.load_families().items()
    return [
        name
        for name, family in known
        if family.megatron and any(word.kind == "window" for word in family.megatron.facts)
    ]


def test_windowed_families_are_all_listed() -> None:
    known = ["gemma2", "gpt_oss", "mistral", "mixtral", "phi3", "starcoder2"]
    assert windowed() == known


@pytest.mark.parametrize("kind", RECORDS)
@pytest.mark.parametrize("name", [name for name in windowed() if name in NAMES])
def test_window_size_excludes_current_token(name: str, kind: str) -> None:
    """Megatron-Core attends to ``left + 1`` keys, transformers to ``sliding_window``."""
    described = config(name) | {"sliding_window": 8}
    told = record(name, kind, described)
    assert extract_megatron_fields(told)["window_size"] == [7, 0]
    assert statements(name, told, described) == []
    assert megatron_to_config(families.family(name), told, {})["sliding_window"] == 8


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_list_of_linear_layers_is_an_interval(name: str) -> None:
    """Megatron-Bridge 0.6 states a list, earlier versions the interval."""
    told = record(name, "arguments")
    assert statements(name, told | {"linear_attention_freq": [1, 1, 1, 0]}, config(name)) == []
    other = statements(name, told | {"linear_attention_freq": [1, 0, 1, 0]}, config(name))
    assert any("`full_attention_interval` is 4" in one and " 2 in" in one for one in other)
    for wrong in ([1, 1, 1, 1], [0, 1, 1, 0], [1, 1, 0, 1, 0]):
        with pytest.raises(MappingError, match="at a fixed interval"):
            statements(name, told | {"linear_attention_freq": wrong}, config(name))


@pytest.mark.parametrize(
    "told",
    [
        {"layers_block_type": ["mamba", "moe", "attention", "mlp"]},
        {"layers_block_type": None, "hybrid_override_pattern": "ME*-"},
    ],
)
def test_older_words_for_hybrid_layers_are_the_same_pattern(told: dict[str, Any]) -> None:
    described = config("nemotron_h") | told
    made = record("nemotron_h", "arguments", described)
    assert (made["hybrid_layer_pattern"], made["num_layers"]) == ("ME*-", 4)
    assert statements("nemotron_h", made, described) == []
    mtp = described | {"mtp_layers_block_type": None, "mtp_hybrid_override_pattern": "*M"}
    made = record("nemotron_h", "arguments", mtp)
    assert made["mtp_hybrid_override_pattern"] == "*M"
    assert statements("nemotron_h", made, mtp) == []


@pytest.mark.parametrize("field", ["hybrid_layer_pattern", "hybrid_override_pattern"])
def test_hybrid_pattern_is_read_without_stages_and_mtp_layers(field: str) -> None:
    told = record("nemotron_h", "arguments")
    told = {key: value for key, value in told.items() if key != "hybrid_layer_pattern"}
    told |= {"hybrid_override_pattern": None, field: "ME|*-/*E"}
    assert statements("nemotron_h", told, config("nemotron_h")) == []
    with pytest.raises(MappingError, match="has unknown layer types"):
        statements("nemotron_h", told | {field: "MEG-"}, config("nemotron_h"))


def test_hybrid_model_without_experts_has_none_in_arguments() -> None:
    """transformers states sizes of experts in all cases."""
    types = ["linear_attention", "mlp", "full_attention", "mlp"]
    described = config("nemotron_h") | {"layers_block_type": types}
    made = record("nemotron_h", "arguments", described)
    assert made["num_experts"] is None
    assert not [name for name in made if name.startswith("moe_")]
    assert statements("nemotron_h", made, described) == []
    known = {name: one for name, one in families.load_families().items() if one.megatron}
    assert find_possible_families(known, made) == ["nemotron_h"]


def test_size_that_config_sets_to_null_is_null_in_arguments() -> None:
    """Without a latent, the dimension of its tensors is the hidden size."""
    family, described = families.family("nemotron_h"), config("nemotron_h")
    for told in (described | {"moe_latent_size": None}, {**described}):
        made = build_megatron_arguments(family, told, {"l": 64})
        assert made["moe_latent_size"] == (None if told["moe_latent_size"] is None else 64)
        read = megatron_to_config(family, made, {"l": 64})
        assert read["moe_latent_size"] == made["moe_latent_size"]


@pytest.mark.parametrize("kind", RECORDS)
def test_record_of_hybrid_model_without_experts_reads_back(kind: str) -> None:
    types = ["linear_attention", "mlp", "full_attention", "mlp"]
    told = config("nemotron_h") | {"layers_block_type": types, "num_nextn_predict_layers": 0}
    read = megatron_to_config(families.family("nemotron_h"), record("nemotron_h", kind, told), {})
    assert read["layers_block_type"] == types


@pytest.mark.parametrize(
    "told", [{"use_bias": True}, {"conv_kernel": 3}, {"layers_block_type": ["moe", "x"]}]
)
def test_hybrid_model_that_megatron_cannot_build_is_refused(told: dict[str, Any]) -> None:
    with pytest.raises(MappingError, match="cannot express"):
        record("nemotron_h", "arguments", config("nemotron_h") | told)


def test_part_of_a_dimension_cannot_be_rotated() -> None:
    told = record("minimax_m2", "arguments") | {"rotary_percent": 0.51}
    with pytest.raises(MappingError, match="does not rotate a whole number of dimensions"):
        statements("minimax_m2", told, config("minimax_m2"))


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"indexer_types": ["full", "full", "shared", "full"]}, (2, 2)),
        ({"indexer_types": ["full", "shared", "full", "shared"]}, (2, 0)),
        ({"indexer_types": ["full"] * 4}, (1, 0)),
        ({"index_topk_freq": 2}, (2, 2)),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 1}, (3, 0)),
        ({"index_topk_freq": 1}, (1, 0)),
        ({"index_topk_pattern": "FFSS"}, (3, 2)),
        ({}, (1, 0)),
    ],
)
def test_layers_without_indexer_are_two_numbers(
    told: dict[str, Any], expected: tuple[int, int]
) -> None:
    family, described = families.family("glm_moe_dsa"), config("glm_moe_dsa")
    del described["indexer_types"]
    made = build_megatron_arguments(family, described | told)
    found = made["dsa_indexer_topk_freq"], made["dsa_indexer_skip_topk_offset"]
    assert found == expected
    types = megatron_to_config(family, made, {})["indexer_types"]
    assert types == told.get("indexer_types", types)
    other = {"indexer_types": ["full", "shared", "shared", "shared"]}
    assert statements("glm_moe_dsa", made, described | other)


@pytest.mark.parametrize("types", [["full", "shared", "shared", "shared", "full", "full"], [], "x"])
def test_irregular_layers_without_indexer_are_refused(types: Any) -> None:
    described = config("glm_moe_dsa") | {"indexer_types": types}
    with pytest.raises(MappingError, match="cannot express `indexer_types`"):
        build_megatron_arguments(families.family("glm_moe_dsa"), described)


def test_window_of_one_key_is_written_as_zero() -> None:
    told = record("gpt_oss", "arguments", config("gpt_oss") | {"sliding_window": 1})
    assert told["window_size"] == [0, 0]
    assert megatron_to_config(families.family("gpt_oss"), told, {})["sliding_window"] == 1


def test_off_by_one_window_is_reported_with_both_values() -> None:
    """As Megatron-Bridge before 0.4 writes it."""
    told = record("gpt_oss", "arguments") | {"window_size": (128, 0)}
    assert statements("gpt_oss", told, config("gpt_oss")) == [
        "`sliding_window` is 128 in config.json and 129 in common.pt as `window_size` (128, 0)"
    ]


@pytest.mark.parametrize("value", [None, (-1, 0), [-1, -1]])
def test_unbounded_window_is_read_as_none(value: object) -> None:
    told = record("mistral", "arguments") | {"window_size": value}
    assert megatron_to_config(families.family("mistral"), told, {})["sliding_window"] is None


@pytest.mark.parametrize("value", [8, (7, 3), (7,), (-2, 0), (True, 0), ("7", 0), "7,0"])
def test_non_causal_window_is_refused(value: object) -> None:
    told = record("mistral", "arguments") | {"window_size": value}
    with pytest.raises(MappingError, match="`window_size` is not a causal window"):
        megatron_to_config(families.family("mistral"), told, {})


def test_gemma3_window_is_single_number_of_keys() -> None:
    """Megatron-Bridge makes the pair of it, in each layer with a window."""
    told = record("gemma3_text", "run_config")
    assert extract_megatron_fields(told)["window_size"] == 512
    assert megatron_to_config(families.family("gemma3_text"), told, {})["sliding_window"] == 512


def test_object_values_are_ignored() -> None:
    told = record("llama3", "arguments") | {"params_dtype": object(), "hidden_size": object()}
    assert "hidden_size" not in extract_megatron_fields(told)


def test_disabled_query_groups_mean_one_per_head() -> None:
    told = record("llama3", "arguments") | {"group_query_attention": False, "num_query_groups": 1}
    assert extract_megatron_fields(told)["num_query_groups"] == 4


def test_vocab_size_is_unpadded() -> None:
    told = build_megatron_arguments(families.family("llama3"), config("llama3"), padded_rows=128)
    assert told["padded_vocab_size"] == 128
    assert megatron_to_config(families.family("llama3"), told, {"v": 128})["vocab_size"] == 96


def test_tensor_sizes_override_arguments() -> None:
    told = record("llama3", "arguments")
    made = megatron_to_config(families.family("llama3"), told, {"f": 200}, tied=True)
    assert (made["intermediate_size"], made["tie_word_embeddings"]) == (200, True)


def test_nemo_model_states_rope_scaling() -> None:
    fields = config_to_megatron_fields(families.family("llama3"), config("llama3"))
    del fields["rope_scaling"]
    nemo = {
        "_target_": "nemo.collections.llm.gpt.model.llama.LlamaModel",
        "config": {
            "_target_": "nemo.collections.llm.gpt.model.llama.Llama31Config8B",
            **fields,
            "scale_factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "old_context_len": 8192,
        },
    }
    made = megatron_to_config(families.family("llama3"), nemo, {})
    assert made["rope_scaling"] == LLAMA3 | {"factor": 8.0}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("llama3", {"hidden_act": "gelu"}),
        ("llama3", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
        ("llama3", {"rope_scaling": LLAMA3 | {"high_freq_factor": 3.0}}),
        ("qwen3", {"layer_types": ["sliding_attention"] * 4}),
        ("qwen3_moe", {"mlp_only_layers": [1]}),
        ("deepseek_v2", {"topk_method": "group_limited_greedy", **GROUPS, "topk_group": 1}),
        ("deepseek_v2", {"topk_method": "greedy"}),
        ("deepseek_v3", {"norm_topk_prob": False}),
    ],
)
def test_config_that_megatron_cannot_express_is_refused(name: str, told: dict[str, Any]) -> None:
    with pytest.raises(MappingError, match="cannot express"):
        config_to_megatron_fields(families.family(name), config(name) | told)


@pytest.mark.parametrize(("size", "padded", "least"), [(96, 128, 64), (151669, 151680, 16)])
def test_bridge_pads_vocab_to_existing_rows(size: int, padded: int, least: int) -> None:
    stated = config("llama3") | {"vocab_size": size}
    model: Any = build_run_config(families.family("llama3"), stated, padded_rows=padded)["model"]
    assert model["should_pad_vocab"] is True
    assert (model["vocab_size"], model["make_vocab_size_divisible_by"]) == (size, least)
