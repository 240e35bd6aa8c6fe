"""Megatron-Bridge 0.6 loads run_config.yaml, and makes the same fields of config.json."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

import pytest
import yaml
from packaging.version import Version

from ckptctl import families
from ckptctl.facts.megatron import config_to_megatron_fields
from ckptctl.facts.megatron_files import build_run_config
from ckptctl.storage.yaml_text import dump_yaml
from tests.gloo import ENVIRONMENT, REPOSITORY
from tests.unit.facts.test_megatron import NAMES, VISUAL, config, visual_config

pytestmark = pytest.mark.oracle

BRIDGES: Mapping[str, str] = {
    "deepseek_v3": "deepseek.deepseek_v3_bridge:DeepSeekV3Bridge",
    "gpt_oss": "gpt_oss.gpt_oss_bridge:GPTOSSBridge",
    "kimi_k25": "kimi_vl.kimi_k25_vl_bridge:KimiK25VLBridge",
    "llama3_2": "llama.llama_bridge:LlamaBridge",
    "minimax_m2": "minimax_m2.minimax_m2_bridge:MiniMaxM2Bridge",
    "ministral3_vision": "ministral3.ministral3_bridge:Ministral3Bridge",
    "nemotron_h": "nemotronh.nemotron_h_bridge:NemotronHBridge",
    "qwen3": "qwen.qwen3_bridge:Qwen3Bridge",
    "qwen3_moe": "qwen.qwen3_moe_bridge:Qwen3MoEBridge",
    "qwen3_next": "qwen.qwen3_next_bridge:Qwen3NextBridge",
    "qwen3_vl": "qwen_vl.qwen3_vl_bridge:Qwen3VLBridge",
    "qwen3_vl_moe": "qwen_vl.qwen3_vl_bridge:Qwen3VLMoEBridge",
}
"""Bridge's class that makes a configuration of config.json, for some of the families."""

NO_FIELDS = {
    *("activation_func", "attn_logit_softcapping", "final_logit_softcapping"),
    "max_position_embeddings",
}
"""Fields that ``run_config.yaml`` states otherwise, or not at all."""
RUNS = {
    *("params_dtype", "bf16", "expert_tensor_parallel_size", "moe_token_dispatcher_type"),
    *("should_pad_vocab", "attention_dropout", "hidden_dropout", "seq_length"),
}
"""Fields of how a model is run."""
LATENT = {"moe_router_pre_softmax": (False, True), "rope_type": ("rope", "yarn")}
"""Sigmoids do not depend on each other; YaRN by a factor of 1 is none."""
OTHERWISE: Mapping[str, Mapping[str, tuple[object, object]]] = {
    "deepseek_v3": LATENT,
    "kimi_k25": LATENT,
    # A constant there, as published.
    "gpt_oss": {"yarn_rotary_scaling_factor": (40.0, 32.0)},
    # Constants there, as published; transformers rounds the range unless the file states otherwise.
    "ministral3_vision": {
        "yarn_rotary_scaling_factor": (40.0, 16.0),
        "yarn_original_max_position_embeddings": (4096, 16384),
        "yarn_correction_range_round_to_int": (True, False),
    },
    # The size of dense layers, of which there are none, is left out there.
    "minimax_m2": {"moe_ffn_hidden_size": (112, None)},
    # transformers 5 keeps the rotated part elsewhere than Bridge looks for it.
    "qwen3_next": {"linear_attention_freq": (4, [1, 1, 1, 0]), "rotary_percent": (0.25, 1.0)},
}
"""Fields that differ, as ckptctl writes them and as Bridge makes them."""


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def providers() -> list[str]:
    styles = {name: families.family(name).megatron for name in (*NAMES, *VISUAL)}
    return [name for name, style in styles.items() if style and style.provider]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what Bridge makes of each family's run_config.yaml and config.json."""
    try:
        version = Version(metadata.version("megatron-bridge"))
    except metadata.PackageNotFoundError:
        pytest.skip("megatron-bridge is not installed")
    if version < Version("0.6"):
        pytest.skip(f"megatron-bridge {version} is installed, 0.6 is needed")
    folder = tmp_path_factory.mktemp("bridge")
    cases = {}
    for name in dict.fromkeys((*providers(), *BRIDGES)):
        described = visual_config(name) if name in VISUAL else config(name)
        family = families.family(name)
        if name in providers():
            text = dump_yaml(build_run_config(family, described, dtype="bfloat16"))
            model = yaml.safe_load(text)["model"]
        else:
            fields = config_to_megatron_fields(family, described)
            model = {key: value for key, value in fields.items() if key not in NO_FIELDS}
        cases[name] = {"model": model, "config": described, "bridge": BRIDGES.get(name, "")}
    (folder / "cases.json").write_text(json.dumps(cases))
    files = [str(folder / name) for name in ("cases.json", "results.json")]
    command = [sys.executable, "-m", "tests.oracle.mcore_bridge_configs", *files]
    paths = [str(REPOSITORY), *(path for path in sys.path if path)]
    environment = {**ENVIRONMENT, "PYTHONPATH": ":".join(paths)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return results


@pytest.mark.parametrize("name", providers())
def test_bridge_loads_every_field_of_run_config(made: dict[str, Any], name: str) -> None:
    style = families.family(name).megatron
    assert style is not None
    assert made[name].get("error") is None
    assert made[name]["class"] == style.provider.rpartition(".")[2]


@pytest.mark.parametrize("name", BRIDGES)
def test_bridge_makes_same_fields_of_config(made: dict[str, Any], name: str) -> None:
    loaded, own = (dict(flat(made[name][key])) for key in ("loaded", "own"))
    different = {key: (loaded[key], own.get(key)) for key in loaded if loaded[key] != own.get(key)}
    assert {key: pair for key, pair in different.items() if key not in RUNS} == OTHERWISE.get(
        name, {}
    )
    if name in providers():
        assert made[name]["class"] == made[name]["own_class"]
