"""config.json as mlx-lm reads and writes it."""

import pytest

from ckptctl.facts.mlx_config import adapt_model_type, add_legacy_keys
from ckptctl.families import family, load_families
from ckptctl.planner.mapping.detect import list_families_matching_configs

OWN = {"model_type": "qwen3_5_text", "hidden_size": 64, "architectures": ["Qwen3_5ForCausalLM"]}
AS_MLX = OWN | {"model_type": "qwen3_5"}
NESTED = {
    "model_type": "qwen3_5",
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "tie_word_embeddings": True,
    "text_config": {"model_type": "qwen3_5_text", "hidden_size": 64},
}
SEEING = NESTED | {"vision_config": {"depth": 2}}


def test_qwen3_5_text_config_roundtrips_through_mlx():
    text = family("qwen3_5_text")
    assert adapt_model_type(OWN, text, "mlx") == AS_MLX
    assert adapt_model_type(AS_MLX, text, "mlx") == AS_MLX
    assert adapt_model_type(AS_MLX, text, "hf") == OWN
    assert adapt_model_type(OWN, text, "hf") == OWN
    assert adapt_model_type(NESTED, text, "hf") == OWN | {"tie_word_embeddings": True}
    assert adapt_model_type(NESTED, text, "mlx") == NESTED


def test_other_configs_are_unchanged():
    for name, layout in (("qwen3_5", "hf"), ("qwen3_5_text", "hf"), ("llama3", "mlx")):
        assert adapt_model_type(SEEING, family(name), layout) == SEEING
    assert adapt_model_type(OWN, None, "mlx") == OWN
    assert adapt_model_type({"model_type": "llama"}, family("qwen3_5_text"), "mlx") == {
        "model_type": "llama"
    }


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (OWN, "qwen3_5_text"),
        (AS_MLX, "qwen3_5_text"),
        (NESTED, "qwen3_5_text"),
        (SEEING, "qwen3_5"),
    ],
)
def test_vision_config_determines_model_type(config, name):
    assert list_families_matching_configs(load_families(), config) == [name]


SCALED = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5}


def test_rope_parameters_are_also_written_in_old_spelling():
    config = {"rope_parameters": SCALED, "num_hidden_layers": 2}
    assert add_legacy_keys(config, None) == config | {
        "rope_theta": 5e5,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
    }


def test_gpt_neox_gets_its_own_old_rope_keys():
    config = {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}
    found = add_legacy_keys(config, family("gpt_neox"))
    assert (found["rotary_emb_base"], found["rotary_pct"]) == (1e4, 0.25)
    assert "rotary_pct" not in add_legacy_keys(config, family("llama3"))


def test_multimodal_configs_get_old_spelling():
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}
    text = {"model_type": "qwen2_5_vl_text", "hidden_size": 8, "rope_parameters": rope}
    config = {
        "model_type": "qwen2_5_vl",
        "text_config": text,
        "vision_config": {"model_type": "qwen2_5_vl_vision", "depth": 2},
    }
    found = add_legacy_keys(config, family("qwen2_5_vl"))
    scaling = {"type": "default", "mrope_section": [2, 1, 1]}
    assert (found["hidden_size"], found["rope_scaling"]) == (8, scaling)
    assert found["text_config"] == text | {"rope_theta": 1e6, "rope_scaling": scaling}
    assert found["vision_config"] == {"model_type": "qwen2_5_vl", "depth": 2}
    assert found["model_type"] == "qwen2_5_vl"
    other = add_legacy_keys(config | {"model_type": "qwen3_vl"}, family("qwen3_vl"))
    assert "hidden_size" not in other
    assert other["vision_config"]["model_type"] == "qwen2_5_vl_vision"


def test_unscaled_rope_has_no_rope_scaling():
    config = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    assert add_legacy_keys(config, None)["rope_scaling"] is None


def test_new_rope_types_get_no_old_spelling():
    rope = {"full_attention": {"rope_type": "proportional", "rope_theta": 1e6}}
    config = {"rope_parameters": rope | {"sliding_attention": {"rope_theta": 1e4}}}
    assert "rope_scaling" not in add_legacy_keys(config, None)


def test_rope_of_each_layer_type_gets_old_key():
    config = {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    }
    found = add_legacy_keys(config, None)
    assert (found["rope_theta"], found["rope_local_base_freq"]) == (1e6, 1e4)


def test_existing_old_keys_are_kept():
    config = {"rope_theta": 1e4, "rope_scaling": None}
    assert add_legacy_keys(config, family("llama3")) == config
    both = {"rope_theta": 1.0, "rope_parameters": SCALED}
    assert add_legacy_keys(both, None)["rope_theta"] == 1.0


def test_sliding_window_pattern_is_written_if_layers_are_regular():
    local, whole = "sliding_attention", "full_attention"
    found = add_legacy_keys({"layer_types": [local, local, whole, local]}, None)
    assert found["sliding_window_pattern"] == 3
    for kinds in ([whole], [local, whole, whole], [local, "linear_attention"], "no list"):
        assert "sliding_window_pattern" not in add_legacy_keys({"layer_types": kinds}, None)


def test_sizes_are_written_under_their_first_name():
    found = add_legacy_keys({"num_local_experts": 4}, family("qwen3_moe"))
    assert found["num_experts"] == 4


def test_global_attention_heads_get_old_keys():
    own = {"head_dim": 512, "num_key_value_heads": 1}
    config = {"head_dim": 256, "per_layer_config": {"5": own, "11": own}}
    more = {"global_head_dim": 512, "num_global_key_value_heads": 1}
    assert add_legacy_keys(config, None) == config | more
    odd = {"per_layer_config": {"5": own, "11": {"head_dim": 128}}}
    assert add_legacy_keys(odd, None) == odd
    outer = add_legacy_keys({"text_config": config}, None)
    assert outer == {"text_config": config | more}
