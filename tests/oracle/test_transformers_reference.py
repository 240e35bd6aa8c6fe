"""The reference of transformers against what its own ``save_pretrained`` writes, for all types.

A model of each class that generates text is built on the meta device from its default
configuration, with few layers. ``save_pretrained`` writes names and shapes to a dictionary. All of
them are complete, and without the first, the middle or the last one, that one is named.
"""

from __future__ import annotations

import json
import re
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import ckptctl
from ckptctl.errors import MissingTensorsError
from ckptctl.references import transformers_process
from ckptctl.references.transformers_process import (
    build_model,
    check_config_bounds,
    compare_with_class,
    find_class_name,
    strip_config,
)
from ckptctl.verdict import UNKNOWN_MODEL
from tests.sweeps import one_in

pytest.importorskip("transformers", reason="the oracle extra is not installed")

import transformers
from transformers import initialization, modeling_utils
from transformers.models.auto import modeling_auto
from transformers.models.gemma3n import configuration_gemma3n
from transformers.models.timm_wrapper import modeling_timm_wrapper
from transformers.utils import import_utils

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

TABLES = (
    "CAUSAL_LM",
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
)
LAYERS = 4
EXPERTS = 16
COUNT = re.compile(
    r"(layers?|blocks?)$|^n_layer|^num_hidden|depth|num_nextn|num_mtp|^num_kv_shared"
)
Shapes = dict[str, list[int]]


def list_classes() -> list[str]:
    names: dict[str, None] = {}
    for table in TABLES:
        entries = getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES")
        for classes in entries.values():
            names.update(dict.fromkeys([classes] if isinstance(classes, str) else classes))
    return sorted(names)


ROPE = {"rope_type": "default", "rope_theta": 10000.0}
ROPES = {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}}
INDEXER = {
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
    "indexer_head_dim": 256,
    "indexer_kv_heads": 1,
    "indexer_n_heads": 4,
}
CHANGES: dict[str, dict[str, Any]] = {
    "AyaVisionForConditionalGeneration": {"vision_config": {"num_attention_heads": 16}},
    "ChameleonForConditionalGeneration": {"vocabulary_map": {"<image>": 8711}},
    "CohereCompassForCausalLM": ROPES,
    "CohereCompassForConditionalGeneration": {"text_config": ROPES},
    "DbrxForCausalLM": {"attn_config": {"rope_theta": 10000.0}},
    "DeepseekOcr2ForConditionalGeneration": {
        "text_config": {"mlp_layer_types": ["dense", *["sparse"] * 11]}
    },
    "DiffusionGemmaForBlockDiffusion": {
        "text_config": {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64}
    },
    "Dots1ForCausalLM": {"n_routed_experts": 8, "n_shared_experts": 1},
    "Emu3ForConditionalGeneration": {"vocabulary_map": {"<image>": 151851}},
    "Granite4VisionForConditionalGeneration": {
        "deepstack_layer_map": [[0, 0], [1, 1]],
        "downsample_rate": "1/2",
    },
    "HunYuanDenseV1ForCausalLM": {"head_dim": 128},
    "HunYuanMoEV1ForCausalLM": {"head_dim": 128},
    "HunYuanVLForConditionalGeneration": {"text_config": {"head_dim": 128}},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * 16},
    "MinistralForCausalLM": {"head_dim": 128},
    "MoonshineStreamingForConditionalGeneration": {"num_key_value_heads": 8},
    "NemotronForCausalLM": {"num_key_value_heads": 8},
    "Qwen3OmniMoeForConditionalGeneration": {
        "talker_config": {
            "spatial_merge_size": 2,
            "text_config": {"shared_expert_intermediate_size": 64},
        }
    },
    "Qwen4ExpForCausalLM": INDEXER,
    "Qwen4ExpForConditionalGeneration": {"text_config": INDEXER},
    "ReformerModelWithLMHead": {"is_decoder": True},
}
"""Changes of default configurations from which transformers cannot build a model."""

TIMM = "requires the timm library|the package timm"
UNBUILDABLE: dict[str, str] = {
    "FastVlmForConditionalGeneration": TIMM,
    "Gemma3nForConditionalGeneration": TIMM,
    "Gemma4AssistantForCausalLM": "must be 0",
    "PerceptionLMForConditionalGeneration": TIMM,
}
"""Classes that the reference cannot compare, with a pattern of the reason."""

CLASSES = [name for name in list_classes() if name not in UNBUILDABLE]


def merge(config: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return *config* with *changes*, also in its sections."""
    merged = dict(config)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and old else value
    return merged


def count_layers(config: Mapping[str, Any]) -> int:
    keys = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
    own = next((config[key] for key in keys if isinstance(config.get(key), int)), 0)
    return own or max((count_layers(x) for x in config.values() if isinstance(x, dict)), default=0)


def shrink(value: Any, layers: int, key: str = "") -> Any:
    """Return *value* of a configuration with few layers and experts."""
    if isinstance(value, dict):
        layers = count_layers(value) or layers
        return {
            name: shrink(item, layers, name)
            for name, item in value.items()
            if not (key == "per_layer_config" and int(name) >= LAYERS)
        }
    if isinstance(value, list) and len(value) == layers:
        return value[:LAYERS]
    if isinstance(value, int) and not isinstance(value, bool):
        if COUNT.search(key):
            return min(value, LAYERS)
        if key.endswith("experts"):
            return min(value, EXPERTS)
    return value


def build(class_name: str) -> Any:
    """Build a class from its default configuration with few layers, or with all of them."""
    model_class = getattr(transformers, class_name)
    changes = CHANGES.get(class_name, {})
    try:
        default = model_class.config_class().to_json_string(use_diff=False)
        config = merge(json.loads(default), changes)
    except Exception:  # the default contradicts itself
        config = dict(changes)
    failure: Exception | None = None
    for small in (shrink(config, 0), config):
        try:
            parsed = model_class.config_class.from_dict(strip_config(small))
            with torch.device("meta"), initialization.meta_device_safe_creation_ops():
                return model_class._from_config(parsed)
        except Exception as error:
            failure = failure or error
    assert failure is not None
    raise failure


def save(
    model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: bool
) -> tuple[Any, Shapes]:
    """Return the configuration, names and shapes that ``save_pretrained`` writes."""
    shapes: Shapes = {}

    def record(state: Mapping[str, torch.Tensor], *_: object, **__: object) -> None:
        shapes.update({name: list(value.shape) for name, value in state.items()})

    monkeypatch.setattr(modeling_utils, "safe_save_file", record)
    model.save_pretrained(folder, **options)
    return json.loads((folder / "config.json").read_text()), shapes


def compare(config: Any, shapes: Mapping[str, Any]) -> dict[str, Any]:
    check_config_bounds(config, len(shapes))
    return compare_with_class(config, find_class_name(config), shapes)


@pytest.mark.parametrize("class_name", one_in(6, CLASSES))
def test_dropped_tensor_of_every_class_is_missing(
    class_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(class_name)
    config, shapes = save(model, tmp_path, monkeypatch)
    ignored = re.compile("|".join(model._keys_to_ignore_on_load_missing or ()) or r"(?!)")
    names = [name for name in shapes if not ignored.search(name)]
    require_each_missing(config, shapes, [names[0], names[len(names) // 2], names[-1]])


@pytest.mark.parametrize("class_name", UNBUILDABLE)
def test_unbuildable_class_has_its_reason(
    class_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert class_name in list_classes()
    changed: tuple[Any, ...] = (configuration_gemma3n, modeling_timm_wrapper)
    for module in changed:  # as before `shims.timm`
        monkeypatch.setattr(module, "requires_backends", import_utils.requires_backends)
    with pytest.raises(Exception, match=UNBUILDABLE[class_name]):
        compare(*save(build(class_name), tmp_path, monkeypatch))


def test_names_of_other_versions_are_missing_under_these_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Published Bloom has names without a prefix; stacked experts are what transformers 5 holds."""
    config, shapes = save(build("BloomForCausalLM"), tmp_path, monkeypatch)
    older = {name.removeprefix("transformer."): shape for name, shape in shapes.items()}
    require_each_missing(config, older, ["h.1.mlp.dense_h_to_4h.bias", "ln_f.weight"])
    model = build("PhimoeForCausalLM")
    config, held = save(model, tmp_path, monkeypatch, save_original_format=False)
    stacked = [
        name for name in held if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    ]
    assert len(stacked) == 2 * LAYERS
    require_each_missing(config, held, [stacked[0], stacked[-1], "model.norm.weight"])


def require_each_missing(config: Any, shapes: Shapes, names: list[str]) -> None:
    """Compare *shapes* with one model of the class, completely and without each of *names*."""
    built: list[Any] = []

    def build_once(*arguments: Any) -> Any:
        built.extend([] if built else [build_model(*arguments)])
        return built[0]

    with mock.patch.object(transformers_process, "build_model", build_once):
        found = compare(config, shapes)
        assert (found["missing"], found["unexpected"], found["shapes"]) == ([], [], [])
        for name in names:
            rest = {key: shape for key, shape in shapes.items() if key != name}
            assert compare(config, rest)["missing"] == [name]


def test_all_missing_parts_of_merged_tensors_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, shapes = save(build("PhimoeForCausalLM"), tmp_path, monkeypatch)
    dropped = [name for name in shapes if ".2.block_sparse_moe.experts.1" in name]
    assert len(dropped) == 3 * 7
    rest = {name: shape for name, shape in shapes.items() if name not in dropped}
    assert sorted(compare(config, rest)["missing"]) == sorted(dropped)
    unknown: dict[str, Any] = dict.fromkeys(rest)
    assert sorted(compare(config, unknown)["missing"]) == sorted(dropped)


def test_differing_shapes_and_unexpected_names_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, shapes = save(build("GPT2LMHeadModel"), tmp_path, monkeypatch)
    found = compare(config, {**shapes, "transformer.wpe.weight": [7, 768], "extra.weight": [1]})
    assert found["shapes"] == [("transformer.wpe.weight", [7, 768], [1024, 768])]
    assert (found["missing"], found["unexpected"], found["unmapped"]) == ([], ["extra.weight"], 1)
    older = {**shapes, "transformer.h.0.attn.bias": [1, 1, 1024, 1024]}
    assert compare(config, older)["missing"] == []


def save_tiny(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    config = transformers.BloomConfig(vocab_size=64, hidden_size=16, n_layer=2, n_head=2)
    transformers.BloomForCausalLM(config).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def test_verify_and_convert_use_the_class_in_a_process(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    state = save_tiny(tmp_path / "bloom")
    found = ckptctl.verify(tmp_path / "bloom")
    assert (found.complete, found.findings) == (True, ())
    assert found.reference == f"transformers {transformers.__version__} `BloomForCausalLM`"
    state.pop("transformer.h.1.mlp.dense_h_to_4h.bias")
    save_file(state, tmp_path / "bloom" / "model.safetensors")
    with pytest.raises(MissingTensorsError, match="missing a tensor") as caught:
        ckptctl.convert(tmp_path / "bloom", tmp_path / "out", to="dcp")
    assert "`transformer.h.1.mlp.dense_h_to_4h.bias`" in str(caught.value.why)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_labels": 10**9},
        {"n_layer": 10**12},
        {"auto_map": {"AutoModelForCausalLM": "evil.BloomForCausalLM"}, "hidden_size": 10**15},
    ],
)
def test_hostile_config_is_unknown_in_bounded_memory(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path / "bloom")
    file = tmp_path / "bloom" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    monkeypatch.chdir(tmp_path / "bloom")
    Path("evil.py").write_text("open('executed', 'w')")
    Path("torch.py").write_text("open('executed', 'w')")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = ckptctl.verify(".", level="fast")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (found.complete, found.reference) == (None, None)
    assert any(UNKNOWN_MODEL in note and "(" in note for note in found.notes)
    assert after.ru_maxrss < 4 << 20  # KiB
    assert after.ru_utime - before.ru_utime < 2 * transformers_process.MAX_CPU_SECONDS
    assert not Path("executed").exists()
