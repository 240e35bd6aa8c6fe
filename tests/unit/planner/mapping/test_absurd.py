"""Numbers that no model has: refused at once, and nothing is ever counted up to them."""

from __future__ import annotations

import pytest

from ckptctl.errors import MappingError, MissingTensorsError
from ckptctl.families import family, load_families
from ckptctl.planner.config_facts import read_sizes
from ckptctl.planner.mapping.detect import detect_layouts
from ckptctl.planner.mapping.source import ModelFacts
from ckptctl.planner.mapping.tensors import MappingOptions, map_tensors
from tests import effort
from tests.checkpoints.golden import Golden

EXPERT = "model.layers.{}.block_sparse_moe.experts.{}.w1.weight"
STACKED = "model.layers.{}.mlp.experts.gate_up_proj"


def shapes(name="mixtral"):
    return {key: tuple(shape) for key, (_, shape) in Golden.read(name).tensors.items()}


@pytest.fixture(autouse=True)
def little_work():
    with effort.counted() as counted:
        yield
    assert counted.lines < 200_000


@pytest.mark.parametrize("number", ["100000", "88888888888", "9" * 18, "9" * 30])
def test_six_digit_index_is_an_unknown_key(number):
    found = shapes() | {EXPERT.format(0, number): (96, 64)}
    for chosen in (found, {EXPERT.format(0, number): (96, 64)}):
        with pytest.raises(MappingError, match="1 tensor is unknown") as caught:
            map_tensors(
                family("mixtral"),
                "hf",
                "mistral",
                chosen,
                options=MappingOptions(partial=len(chosen) == 1),
            )
        assert f"(near: `{EXPERT.format(0, number)}`)" not in caught.value.why


def test_absurd_layer_and_expert_numbers_are_missing_tensors():
    """Layers times experts that are missing would be ten thousand millions of keys."""
    found = shapes() | {EXPERT.format(99999, 0): (96, 64), EXPERT.format(0, 99999): (96, 64)}
    (candidate,) = detect_layouts(found, load_families(), {"model_type": "mixtral"})
    assert candidate.missing
    with pytest.raises(MissingTensorsError, match="missing"):
        map_tensors(family("mixtral"), "hf", "hf-v5", found)


def test_absurd_expert_count_maps_only_given_keys():
    part = {EXPERT.format(0, n): (96, 64) for n in (0, 99999)}
    found = map_tensors(
        family("mixtral"),
        "hf",
        "mistral",
        part,
        ModelFacts(sizes={"x": 1 << 40}),
        MappingOptions(partial=True),
    )
    assert [item.targets[0].key for item in found.tensors] == [
        f"layers.0.feed_forward.experts.{n}.w1.weight" for n in (0, 99999)
    ]


def test_absurd_empty_expert_stack_is_refused():
    part = {STACKED.format(0): (10**12, 192, 0)}
    with pytest.raises(MappingError, match="one tensor would become 1,000,000,000,000"):
        map_tensors(family("mixtral"), "hf-v5", "hf", part, options=MappingOptions(partial=True))


def test_size_conflict_names_number_of_keys_as_source():
    part = {key: shape for key, shape in shapes().items() if ".experts.3." not in key}
    with pytest.raises(MappingError, match="conflicts") as caught:
        map_tensors(
            family("mixtral"),
            "hf",
            "hf-v5",
            part,
            ModelFacts(sizes={"h": 4}),
            MappingOptions(partial=True),
        )
    assert "x = 3 (from the number of keys)" in caught.value.why


def test_unstated_kv_heads_are_found_in_shapes():
    """Without a configuration nobody says that there are as many key heads as query heads."""
    stated = read_sizes(family("mixtral"), overrides={"h": 4}, include_defaults=False)
    found = map_tensors(family("mixtral"), "hf", "mistral", shapes(), ModelFacts(sizes=stated))
    assert found.sizes["k"] == 2
