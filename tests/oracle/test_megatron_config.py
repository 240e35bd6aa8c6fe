"""config.json made of Megatron's configuration is the one that transformers' classes state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml

from ckptctl import families
from ckptctl.facts.contradictions import find_contradicting_facts, read_config_statements
from ckptctl.facts.megatron import (
    iterate_default_statements,
    megatron_to_config,
    read_megatron_statements,
)
from ckptctl.facts.megatron_files import build_megatron_arguments, build_run_config
from ckptctl.storage.yaml_text import dump_yaml, parse_yaml
from tests.unit.facts.test_megatron import NAMES, config

pytestmark = pytest.mark.oracle

IGNORED = {
    *("architectures", "dtype", "transformers_version", "initializer_range", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "attention_dropout"),
    *("router_aux_loss_coef", "output_router_logits", "router_jitter_noise"),
}
"""Keys that change no logits."""
SAID_ELSEWHERE = {
    *("head_dim", "partial_rotary_factor", "scoring_func", "topk_method"),
    "num_nextn_predict_layers",
}
"""Keys that the class has no attribute for, or computes; other programs read them."""

ONLY_PUBLISHED: Mapping[str, set[str]] = {
    "glm_moe_dsa": {"indexer_rope_interleave"},
    "minimax_m2": {"qk_norm_type", "use_qk_norm", "use_routing_bias"},
    "qwen3_5_moe_text": {"norm_topk_prob"},
}
"""Keys of published files, in which they always have the value that is written."""


def leaves(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        elif str(key) not in IGNORED:
            yield prefix + str(key), value


def stated(content: dict[str, Any]) -> dict[str, Any]:
    """Return all that transformers understands of a config.json, by name."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[content["model_type"]]
    made = kind(**{key: value for key, value in content.items() if key != "model_type"})
    return dict(leaves(made.to_dict()))


@pytest.mark.parametrize("kind", ["arguments", "run_config"])
@pytest.mark.parametrize("name", NAMES)
def test_config_from_megatron_matches_transformers(name: str, kind: str) -> None:
    family, content = families.family(name), config(name)
    if kind == "arguments":
        told: Mapping[str, object] = build_megatron_arguments(family, content)
    elif family.megatron is None or not family.megatron.provider:
        pytest.skip("Bridge has no provider for it")
    else:
        text = dump_yaml(build_run_config(family, content, dtype="bfloat16")).decode()
        told = parse_yaml(text, "run_config.yaml")
        assert told == yaml.safe_load(text)
    mine, theirs = stated(megatron_to_config(family, told, {})), stated(content)
    different = {key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key)}
    assert {key for key in different if theirs.get(key) is not None} <= SAID_ELSEWHERE
    rarely = {"n_group", "topk_group", "clip_qkv"} | ONLY_PUBLISHED.get(name, set())
    assert different <= SAID_ELSEWHERE | rarely


@pytest.mark.parametrize("name", NAMES)
def test_transformers_config_does_not_contradict_megatron_arguments(name: str) -> None:
    from transformers import CONFIG_MAPPING

    family, content = families.family(name), config(name)
    kind = CONFIG_MAPPING[content["model_type"]]
    whole = kind(**{key: value for key, value in content.items() if key != "model_type"}).to_dict()
    told = build_megatron_arguments(family, whole)
    said = [
        *read_config_statements(family, whole, "config.json"),
        *iterate_default_statements(family, whole, "config.json"),
    ]
    assert not find_contradicting_facts(
        [*said, *read_megatron_statements(family, told, "common.pt")]
    )
