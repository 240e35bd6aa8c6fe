"""The reference of transformers against what its own ``save_pretrained`` writes, for all types.

A model of each class that generates text is built on the meta device from its default
configuration, with few layers. ``save_pretrained`` writes names and shapes to a dictionary. All of
them are complete, and without the first, the middle or the last one, that one is named.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptctl.references.transformers_process import (
    check_config_bounds,
    compare_with_class,
    find_class_name,
    strip_config,
)
from tests.sweeps import one_in

pytest.importorskip("transformers", reason="the oracle extra is not installed")

import transformers
from transformers import modeling_utils
from transformers.models.auto import modeling_auto

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

TABLES = (
    "CAUSAL_LM",
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
)
LAYERS = 4
EXPERTS = 8
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


CHANGES: dict[str, dict[str, Any]] = {}
"""Changes of default configurations that no model can be built from."""

UNBUILDABLE: dict[str, str] = {}
"""Classes that the reference cannot compare, with a pattern of the reason."""

CLASSES = [name for name in list_classes() if name not in UNBUILDABLE]


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
    default = model_class.config_class().to_json_string(use_diff=False)
    config = {**json.loads(default), **CHANGES.get(class_name, {})}
    failure: Exception | None = None
    for small in (shrink(config, 0), config):
        try:
            parsed = model_class.config_class.from_dict(strip_config(small))
            with torch.device("meta"), transformers.initialization.meta_device_safe_creation_ops():
                return model_class._from_config(parsed)
        except Exception as error:
            failure = failure or error
    assert failure is not None
    raise failure


def save(model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Shapes]:
    """Return the configuration, names and shapes that ``save_pretrained`` writes."""
    shapes: Shapes = {}

    def record(state: Mapping[str, torch.Tensor], *_: object, **__: object) -> None:
        shapes.update({name: list(value.shape) for name, value in state.items()})

    monkeypatch.setattr(modeling_utils, "safe_save_file", record)
    model.save_pretrained(folder)
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
    found = compare(config, shapes)
    assert (found["missing"], found["unexpected"], found["shapes"]) == ([], [], [])
    ignored = re.compile("|".join(model._keys_to_ignore_on_load_missing or ()) or r"(?!)")
    names = [name for name in shapes if not ignored.search(name)]
    for name in (names[0], names[len(names) // 2], names[-1]):
        rest = {key: shape for key, shape in shapes.items() if key != name}
        assert compare(config, rest)["missing"] == [name]


@pytest.mark.parametrize("class_name", UNBUILDABLE)
def test_unbuildable_class_has_its_reason(
    class_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert class_name in list_classes()
    with pytest.raises(Exception, match=UNBUILDABLE[class_name]):
        compare(*save(build(class_name), tmp_path, monkeypatch))
