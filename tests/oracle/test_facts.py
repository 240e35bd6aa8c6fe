"""Facts of config.json, changed: what transformers cannot load, ``verify`` does not pass."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

import ckptctl
from tests.checkpoints.golden import names
from tests.contract.test_facts import GOLDEN, mutations_of

pytestmark = [pytest.mark.oracle, pytest.mark.slow]

UNCOMPARED = {
    "bailing_moe": "transformers does not have it",
    "deepseek_v4": "its compressed layers have sizes that follow from lists",
    "bailing_moe_linear": "transformers does not have it",
    "deepseek_v41": "transformers does not have it",
    "gemma3n": "its tower is timm's, which transformers does not use without torchvision",
    "kimi_k3": "transformers does not have it",
    "lfm2": "its feed-forward size is rounded",
}
"""Model types of which ckptctl does not compute all that transformers does."""
UNDECIDED = (
    ("layer_types", "absent"),
    ("layer_types", "rotated"),
    ("moe_intermediate_size", "absent"),
    ("moe_latent_size", "absent"),
    ("num_local_experts", "absent"),
    ("num_experts", "absent"),
    ("num_kv_shared_layers", "more"),
    ("num_kv_shared_layers", "doubled"),
    ("hidden_size_per_layer_input", "absent"),
    ("patch_temporal", "more"),
    ("deepstack_visual_indexes", "absent"),
    ("cross_attention_layers", "absent"),
    ("no_rope_layer_interval", "zero"),
)
"""What transformers refuses and ckptctl does not find: facts that switch tensors off where they are
not stated, and others that transformers compares with each other."""

INDEXED = {
    *(("indexer_n_heads", "absent"), ("indexer_head_dim", "absent")),  # it has no default
    ("num_experts_per_tok", "zero"),  # which it loads in other models
}
UNDECIDED_IN = {
    "gpt2": {("n_inner", "absent")},
    "internvl": {("text_config.model_type", "absent"), ("vision_config.norm_type", "absent")},
    "jamba": {("mamba_dt_rank", "absent")},
    "laguna": {("num_attention_heads", "zero")},  # it states the heads of each layer, too
    "mistral_large4": {  # it compares the layers with each other
        ("text_config.kv_source_layers", "rotated"),
        ("text_config.kv_source_layers", "shorter"),
    },
    "muse_spark": {("audio_config", "absent")},
    "qwen3_omni_moe": {
        # transformers gives two submodels no model type, by which defaults are known.
        *((f"code2wav_config.{name}", "absent") for name in ("hidden_size", "intermediate_size")),
        *(
            (f"code2wav_config.num_{name}", "absent")
            for name in ("attention_heads", "key_value_heads", "hidden_layers", "quantizers")
        ),
        *((f"code2wav_config.{name}", "absent") for name in ("codebook_size", "decoder_dim")),
        ("talker_config.thinker_hidden_size", "absent"),
        ("talker_config.text_config.head_dim", "absent"),
        ("talker_config.text_config.shared_expert_intermediate_size", "absent"),
        ("talker_config.code_predictor_config.num_code_groups", "absent"),
    },
    "qwen3_omni_moe.thinker": {  # which has no talker
        *((f"talker_config.{name}_config.head_dim", "more") for name in ("code_predictor", "text")),
        ("talker_config.code_predictor_config.num_hidden_layers", "absent"),
    },
    "qwen4_exp": {(f"text_config.{fact}", kind) for fact, kind in INDEXED},
    "qwen4_exp_text": INDEXED,
}
"""The same in single families."""


def test_stored_config_defaults_match_transformers() -> None:
    from tests.oracle import make_defaults

    assert make_defaults.FILE.read_text() == make_defaults.text()


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors that transformers makes of a configuration, without their data."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from tests.oracle.hf_models import build_on_meta
    from tests.oracle.make_defaults import as_python

    own = as_python(deepcopy(config))  # classes take entries out of what they are given
    made = CONFIG_MAPPING[config["model_type"]].from_dict(own)
    state = build_on_meta(made).state_dict()
    return {key: tuple(value.shape) for key, value in state.items()}


@pytest.mark.parametrize("name", names())
def test_config_that_transformers_cannot_load_fails_verify(name: str, tmp_path: Path) -> None:
    if name.partition(".")[0] in UNCOMPARED:
        pytest.skip(UNCOMPARED[name.partition(".")[0]])
    golden = GOLDEN[name]
    source = golden.save(tmp_path / name)
    base = shapes_of(golden.config)
    missed = []
    for one in mutations_of(name):
        if any(one.fact.endswith(fact) and one.kind == kind for fact, kind in UNDECIDED):
            continue
        try:
            made = shapes_of(one.config)
            loads = all(base.get(key) == shape for key, shape in made.items())
        except Exception:  # whatever transformers raises
            loads = False
        (source / "config.json").write_text(json.dumps(one.config))
        if not loads and ckptctl.verify(source, level="fast").exit_code == 0:
            missed.append((one.fact, one.kind))
    undecided = UNDECIDED_IN.get(name.partition(".")[0], set()) | UNDECIDED_IN.get(name, set())
    assert not {*missed} - undecided
