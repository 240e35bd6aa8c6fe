"""What adapter_config.json means, and what is refused by name."""

from __future__ import annotations

import math
import re

import pytest

from ckptctl.adapters.adapter_files import build_adapter_config
from ckptctl.adapters.peft import (
    build_layer_targets,
    match_pattern,
    parse_adapter_settings,
    require_simple_patterns,
)
from ckptctl.conversion.conversion_options import MergeOptions
from ckptctl.errors import CkptError, RefusedError, UnsupportedError, UsageError
from tests import effort

Q = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none"}


def test_lora_scale_is_alpha_over_rank():
    assert parse_adapter_settings(CONFIG).compute_scale(Q, 4) == 2.0
    assert parse_adapter_settings({**CONFIG, "use_rslora": True}).compute_scale(
        Q, 4
    ) == 8 / math.sqrt(4)
    assert parse_adapter_settings(None, alpha=6).compute_scale(Q, 4) == 1.5
    assert (
        parse_adapter_settings(None, scaling=2.0).compute_scale(
            "layers.0.attention.wq.lora_A.weight", 4
        )
        == 2.0
    )


@pytest.mark.parametrize(
    ("patterns", "scale"),
    [
        ({"q_proj": 2}, 4.0),
        ({"proj": 2}, 2.0),
        ({"self_attn.q_proj": 2}, 4.0),
        ({"layers.0.self_attn.q_proj": 2}, 2.0),
        ({r".*\.1\..*q_proj": 2}, 4.0),
        ({"^model.layers.1.self_attn.q_proj": 2}, 4.0),
        ({"^layers.1.self_attn.q_proj": 2}, 2.0),
        ({"v_proj": 8, "q_proj": 2, "self_attn.q_proj": 8}, 4.0),
    ],
)
def test_first_matching_pattern_sets_rank_and_alpha(patterns, scale):
    """As ``peft.utils.other.get_pattern_key`` looks them up."""
    rank = 8 // scale
    assert (
        parse_adapter_settings({**CONFIG, "rank_pattern": patterns}).compute_scale(Q, rank) == scale
    )
    alphas = {key: 4 * value for key, value in patterns.items()}
    expected = 8 / 4 if scale == 2.0 else 2 * 4 / 4
    assert (
        parse_adapter_settings({**CONFIG, "alpha_pattern": alphas}).compute_scale(Q, 4) == expected
    )


def test_rank_that_contradicts_shapes_is_an_error():
    with pytest.raises(UnsupportedError, match="rank is 8"):
        parse_adapter_settings(CONFIG).compute_scale(Q, 8)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"bias": "lora_only"}, "biases"),
        ({"lora_bias": True}, "biases of B"),
        ({"use_qalora": True}, "QALoRA"),
        ({"kasa_config": {"beta": 1e-4}}, "KaSA"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "parameter targets"),
        ({"trainable_token_indices": [1]}, "trainable tokens"),
        ({"layer_replication": [[0, 2]]}, "replicated"),
        ({"alora_invocation_tokens": [1]}, "activated"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base"),
        ({"init_lora_weights": "olora"}, "changes the base"),
        ({"rank_pattern": {"(a+)+": 4}}, "too complex"),
    ],
)
def test_unsupported_adapter_settings_are_refused(config, says):
    with pytest.raises(RefusedError, match=says):
        parse_adapter_settings({**CONFIG, **config})


@pytest.mark.parametrize(
    "config",
    [
        {"r": "8"},
        {"r": 4.5},
        {"lora_alpha": -1},
        {"rank_pattern": [1]},
        {"rank_pattern": {"q_proj": 4.5}},
        {"rank_pattern": {"q_proj": None}},
        {"alpha_pattern": {"(": 1}},
        {"use_rslora": 1},
        {"use_rslora": "true"},
        {"use_dora": "false"},
    ],
)
def test_malformed_adapter_settings_are_errors(config):
    with pytest.raises(UnsupportedError):
        parse_adapter_settings({**CONFIG, **config})


def test_contradictory_scale_options_are_usage_errors():
    with pytest.raises(UsageError, match="contradicts"):
        parse_adapter_settings(CONFIG, alpha=16)
    with pytest.raises(UsageError, match="both"):
        MergeOptions(lora_alpha=16, scaling=2)
    with pytest.raises(UsageError, match="scale"):
        parse_adapter_settings(None).compute_scale(Q, 4)


def modules(*names, layers=range(3)):
    return [f"model.layers.{i}.{name}" for i in layers for name in names]


def test_target_modules_are_shortened_if_equivalent():
    every = [*modules("self_attn.q_proj", "mlp.up_proj"), "lm_head"]
    assert build_layer_targets(every, 3) == ["lm_head", "q_proj", "up_proj"]
    some = modules("self_attn.q_proj", layers=[1])
    assert build_layer_targets(some, 3) == some == build_layer_targets(some, None)
    mixed = modules("mlp.gate_proj", "mlp.experts.0.gate_proj")
    assert build_layer_targets(mixed, 3) == sorted(mixed)


def test_adapter_config_records_rank_alpha_and_target_modules():
    made = build_adapter_config(
        dict.fromkeys(modules("q_proj"), 4), parse_adapter_settings(None, 8), None, True, 3
    )
    assert (made["r"], made["lora_alpha"], made["use_dora"]) == (4, 8, True)
    assert made["target_modules"] == ["q_proj"]
    with pytest.raises(CkptError, match="alpha"):
        build_adapter_config({"m": 4}, parse_adapter_settings(None, None, 2.0), None, False, None)


MODULE = "model.layers.11.self_attn.q_proj"


@pytest.mark.parametrize(
    "text",
    [
        "(a+)+",
        "(a?){9}",
        ".?" * 60 + "X",
        "(.|.)" * 28 + "X",
        ".*" * 6 + "X",
        "(?:.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?)X",
        "(?x:#[\n.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?#]\n)X",
        "(?#[).?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?(?#])X",
        r"\[.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?]X",
    ],
)
def test_exponential_patterns_are_refused(text):
    with pytest.raises(RefusedError, match="too complex"):
        require_simple_patterns({text: 1}, "here")


def test_many_expensive_patterns_together_are_refused():
    patterns = {f".*.*.*{number}": 1 for number in range(9)}
    with pytest.raises(RefusedError):
        require_simple_patterns(patterns, "here")


@pytest.mark.parametrize(
    "text", ["(", "a)(b", "(?i)q_proj", "a{4294967296}", "(" * 5000 + ")" * 5000]
)
def test_invalid_regex_is_an_error_with_short_message(text):
    with pytest.raises(UnsupportedError, match="not a valid regex") as caught:
        require_simple_patterns({text: 1}, "here")
    assert len(caught.value.what) < 100


@pytest.mark.parametrize(
    "text",
    [
        "q_proj",
        r"model\.layers\.11\.self_attn\.q_proj",
        r".*\.layers\.(?:1[0-9]|2[0-9])\..*(?:q|k|v)_proj",
        r"layers\.\d+\.self_attn\.[kq]_proj",
        "^model.layers.11.self_attn.q_proj",
        r"(?!.*vision).*q_proj",
        "|".join(["q_proj", *(f"name{number}" for number in range(500))]),
    ],
)
def test_common_patterns_match_as_with_re(text):
    require_simple_patterns({text: 1}, "here")
    expected = 3 if re.match(rf"(.*\.)?({text})$", MODULE) else None
    assert expected == 3
    assert match_pattern({"nothing": 1, text: 3}, MODULE, None) == expected


def test_pattern_per_module_matches_with_bounded_work():
    patterns = {rf"model\.layers\.{n}\.mlp\.up_proj": n for n in range(700)}
    require_simple_patterns(patterns, "here")
    with effort.counted() as counted:
        for number in range(0, 700, 7):
            assert match_pattern(patterns, f"model.layers.{number}.mlp.up_proj", None) == number
    assert counted.lines < 200_000


@pytest.mark.parametrize(
    ("alpha", "factor"), [(1e308, "2.5e+307"), (1.4e39, "3.5e+38"), (1e-300, "2.5e-301")]
)
def test_scale_outside_float32_range_is_an_error(alpha, factor):
    known = parse_adapter_settings({"peft_type": "LORA", "r": 4, "lora_alpha": alpha})
    with pytest.raises(UnsupportedError, match="lora_alpha") as caught:
        known.compute_scale("layers.0.q_proj.lora_A.weight", 4)
    assert factor in str(caught.value.why)
    with pytest.raises(UnsupportedError, match="scaling"):
        parse_adapter_settings({"peft_type": "LORA"}, scaling=alpha).compute_scale(
            "layers.0.q_proj.lora_A.weight", 4
        )


def test_largest_float32_scale_is_accepted():
    assert (
        parse_adapter_settings({"r": 1, "lora_alpha": 3.4e38}).compute_scale(
            "layers.0.q_proj.lora_A.weight", 1
        )
        == 3.4e38
    )
