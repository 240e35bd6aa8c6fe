"""Every fact that a configuration states, contradicted in turn: refused, or of no consequence."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

import ckptctl
from ckptctl.conversion.recognition.model import ModelDescription
from ckptctl.errors import CkptError, MappingError, MissingTensorsError
from ckptctl.facts.agreement import ContradictionError, compare_statements
from ckptctl.facts.fact_names import IGNORED_KEYS, LOGIT_NEUTRAL_KEYS
from ckptctl.facts.params import FFN_FORMULA_KEYS, compute_params_ffn_size, config_to_params
from ckptctl.families import load_families
from ckptctl.planner.families.declarations import split_aliases
from tests.checkpoints.golden import Golden, family_of, names
from tests.sweeps import one_in

FAMILIES = load_families()
GOLDEN = {name: Golden.read(name) for name in names()}
OWN, OTHER = "own/config.json", "assets/config.json"
SKIPPED = {key for keys in IGNORED_KEYS.values() for key in keys}
BEYOND = {
    "image_seq_length": "the processor's",
    "tie_word_embeddings": "the tensors show it",
    "text_config.tie_word_embeddings": "the tensors show it",
    "vision_config.head_dim": "the tensors show it",
    "vision_config.rope_parameters.rope_type": "Pixtral's tower has no other",
}
"""What config.json says of these models that params.json has no word for."""

UNSEEN = {
    "h": "of heads and their dimension only one is stated: no shape shows the other",
    "vh": "the same of a vision tower",
    "f": "no layer of this model is dense",
    "pv": "no layer of this model has an embedding of its own",
    "j": "none of its layers predict further tokens: transformers leaves them out",
}
UNSEEN_IN = {
    "qwen3_omni_moe.thinker": ("talker_config", "code2wav_config"),  # it does not speak
}
"""Submodels that config.json describes and a model does not have."""
Place = tuple[str, ...]


def leaves(values: Mapping[str, Any], path: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Every value that is stated, and where."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, key))
        elif value is not None:
            yield (*path, key), value


def other(value: Any) -> Any:
    """Another value of the same kind, of sizes one that the sizes around it admit."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value * 2 if value else value + 1
    if isinstance(value, str):
        return f"{value}_x"
    return [*value, "x"]


def changed(values: Mapping[str, Any], path: Place, value: Any) -> dict[str, Any]:
    copy = deepcopy(dict(values))
    inner: Any = copy
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return copy


def without(values: Mapping[str, Any], path: Place) -> dict[str, Any]:
    copy = changed(values, path, None)
    inner: Any = copy
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return copy


def configs(own: Any, assets: Any) -> list[ModelDescription]:
    return [
        ModelDescription("config.json", OWN, own),
        ModelDescription("config.json", OTHER, assets, assets=True),
    ]


def contradicts_itself(family: Any, config: Any) -> bool:
    """Whether it states one fact in two ways, such as the number of layers and their kinds."""
    try:
        compare_statements(family, [ModelDescription("config.json", OWN, config)])
    except ContradictionError:
        return True
    return False


def irrelevant(path: Place) -> bool:
    """Whether a fact says nothing of what tensors compute, by the documented lists."""
    return any(key in SKIPPED or key.startswith("_") for key in path)


def unused(config: Mapping[str, Any], path: Place) -> bool:
    """Whether a window is stated and switched off."""
    windows = ("sliding_window", "max_window_layers")
    inner: Any = config
    for key in path[:-1]:
        inner = inner[key]
    return path[-1] in windows and inner.get("use_sliding_window") is False


@pytest.mark.parametrize("name", one_in(27, GOLDEN))
def test_contradicting_configs_are_refused_or_noted(name: str) -> None:
    family, config = FAMILIES[family_of(name)], GOLDEN[name].config
    assert compare_statements(family, configs(config, config)) == compare_statements(
        None, configs(config, config)
    )
    assert not compare_statements(family, configs(config, config)).get_texts()
    for path, value in leaves(config):
        less = changed(config, path, other(value))
        files = configs(config, less)
        if contradicts_itself(family, less):
            continue
        if irrelevant(path) or unused(config, path):
            assert not compare_statements(family, files).get_texts(), path
            continue
        try:
            notes = compare_statements(family, files).get_texts()
        except MappingError as error:
            said = error.why or ""
            assert OWN in said and OTHER in said, (path, error.to_json())
            decided = compare_statements(family, files, trust_assets=True).get_reasons("decided")
            assert decided and all(OTHER in text for text in decided.values())
        else:
            assert any(path[-1] in note for note in notes), path
            assert path[-1] in LOGIT_NEUTRAL_KEYS, path


def test_number_spelled_as_string_equals_number() -> None:
    """As YAML reads ``1e-05``."""
    config = {"rms_norm_eps": 1e-05, "hidden_act": "nan"}
    text = {"rms_norm_eps": "1e-05", "hidden_act": "nan"}
    compare_statements(None, configs(config, text))
    compare_statements(None, configs(text, config))
    with pytest.raises(MappingError):
        compare_statements(None, configs(config, {"rms_norm_eps": "1e-06"}))


@pytest.mark.parametrize("name", one_in(11, GOLDEN))
def test_fact_missing_from_assets_is_refused_or_noted(name: str) -> None:
    """Left out by the assets: refused where the default is known to differ, else noted."""
    family, config = FAMILIES[family_of(name)], GOLDEN[name].config
    for path, value in leaves(config):
        if (
            irrelevant(path)
            or path[-1] in LOGIT_NEUTRAL_KEYS
            or value in ([], "")
            or unused(config, path)
        ):
            continue
        less = without(config, path)
        try:
            found = compare_statements(family, configs(config, less))
        except CkptError as error:
            assert error.exit_code in (2, 5)
            continue
        defaults = compare_statements(family, configs(less, config))
        assert found.get_texts() or not defaults.get_texts(), path


def params_of(name: str) -> dict[str, Any] | None:
    """What params.json says of a golden model; None: it cannot, or is not made of config.json."""
    family = FAMILIES[family_of(name)]
    try:
        made = config_to_params(family, GOLDEN[name].config, {})
    except MappingError:
        return None
    return made if family.params_signs else None


@pytest.mark.parametrize("name", one_in(4, [name for name in GOLDEN if params_of(name)]))
def test_params_json_contradicting_config_json_is_refused(name: str) -> None:
    """What params.json has no word for is always the same there, or of no consequence."""
    family, config = FAMILIES[family_of(name)], GOLDEN[name].config
    params = params_of(name) or {}
    shape = compute_params_ffn_size(params, params["dim"])

    def files(params: Any, config: Any) -> list[ModelDescription]:
        own = ModelDescription("params.json", "own/params.json", params)
        return [own, ModelDescription("config.json", OTHER, config, assets=True)]

    compare_statements(family, files(params, config), model_type=name)
    for path, value in leaves(config):
        try:
            compare_statements(
                family, files(params, changed(config, path, other(value))), model_type=name
            )
        except MappingError as error:
            said = error.why or ""
            assert ("own/params.json" in said and OTHER in said) or "divisible" in error.what, path
        else:
            skipped = irrelevant(path) or path[-1] in LOGIT_NEUTRAL_KEYS or unused(config, path)
            assert skipped or ".".join(path) in BEYOND, path
    silent = {*family.params.silent, "max_seq_len"}
    for path, value in leaves(params):
        less = changed(params, path, other(value))
        same_formula = (
            path[-1] in FFN_FORMULA_KEYS and compute_params_ffn_size(less, params["dim"]) == shape
        )
        if path[-1] in silent or same_formula:
            continue
        with pytest.raises(MappingError) as caught:
            compare_statements(family, files(less, config), model_type=name)
        said = caught.value.why or ""
        assert "own/params.json" in said or "divisible" in caught.value.what, path


@pytest.mark.parametrize("name", one_in(27, GOLDEN))
def test_size_contradicting_tensor_shapes_is_refused(name: str, tmp_path: Path) -> None:
    """A size that shapes show is compared; heads show where the size of one is stated."""
    golden, family = GOLDEN[name], FAMILIES[family_of(name)]
    source = golden.save(tmp_path / "own")
    config = golden.config
    assert ckptctl.plan_conversion(source, tmp_path / "out", to="dcp")
    for axis, stated in family.sizes.items():
        path = tuple(split_aliases(stated[0])[0].split("."))
        value = dict(leaves(config)).get(path)
        if value is None:
            continue
        (source / "config.json").write_text(json.dumps(changed(config, path, value * 2)))
        try:
            ckptctl.plan_conversion(source, tmp_path / "out", to="dcp")
        except (MappingError, MissingTensorsError) as error:
            said = " ".join(filter(None, (error.what, error.where, error.why)))
            assert "tensor" in said or "configuration" in said, said
        else:
            assert axis in UNSEEN or path[0] in UNSEEN_IN.get(name, ()), (axis, path)
