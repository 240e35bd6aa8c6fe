"""Layers of two kinds: inserted on the Hub, nested in torchtune, a list of their own at Meta.

Experts of two kinds, which ERNIE 4.5 VL numbers in halves.
"""

import pytest

from ckptctl.errors import MappingError
from ckptctl.families import family
from ckptctl.planner.families.templates import group_keys_by_kind
from ckptctl.planner.mapping.matching import match_keys
from ckptctl.planner.mapping.numbering import compute_numbering, infer_numbering

VISION, ERNIE = family("llama3_vision"), family("ernie4_5_vl_moe")
LISTS = {"text_config.cross_attention_layers": [1, 4]}
COUNTS = {"i": 4, "j": 2}


def test_hf_numbers_both_layer_kinds_together() -> None:
    found = compute_numbering(VISION, "hf", COUNTS, LISTS)
    assert [found.to_stored({"i": n})["i"] for n in range(4)] == [0, 2, 3, 5]
    assert [found.to_stored({"j": n})["j"] for n in range(2)] == [1, 4]


def test_torchtune_numbers_fusion_layer_as_following_layer() -> None:
    """Source: torchtune's ``llama3_vision_hf_to_tune``, and its model of these sizes."""
    found = compute_numbering(VISION, "torchtune", COUNTS, LISTS)
    assert [found.to_stored({"i": n})["i"] for n in range(4)] == [0, 1, 2, 3]
    assert [found.to_stored({"j": n})["j"] for n in range(2)] == [1, 3]


def test_meta_numbers_each_layer_kind_from_0() -> None:
    assert compute_numbering(VISION, "meta", COUNTS, {}).to_stored({"i": 3, "j": 1}) == {
        "i": 3,
        "j": 1,
    }


def test_fusion_layers_are_recovered_from_torchtune_keys() -> None:
    keys = [f"decoder.layers.{n}.fusion_layer.attn.q_proj.weight" for n in (1, 3)]
    found = infer_numbering(VISION, "torchtune", group_keys_by_kind(keys))
    assert found.to_logical({"j": 3}) == {"j": 1} and found.to_logical({"j": 2}) is None
    assert [found.to_logical({"i": n}) for n in (1, 3)] == [{"i": 1}, {"i": 3}]


@pytest.mark.parametrize("layout", ["hf", "torchtune"])
def test_missing_positions_of_inserted_layers_are_an_error(layout: str) -> None:
    with pytest.raises(MappingError, match="requires the positions of 2 inserted layers"):
        compute_numbering(VISION, layout, COUNTS, {})


def list_experts(count: int) -> list[str]:
    return [f"model.layers.1.mlp.experts.{n}.up_proj.weight" for n in range(count)]


@pytest.mark.parametrize("layout", ["hf", "hf-fresh"])
def test_second_half_of_experts_is_recovered_from_keys(layout: str) -> None:
    matched = match_keys(ERNIE, ERNIE.get_layout(layout), list_experts(6))
    assert {slot: [*keys] for slot, keys in matched.keys.items()} == {
        ("expert_w3.{i}", (1,)): [(0,), (1,), (2,)],
        ("vision_expert_w3.{i}", (1,)): [(0,), (1,), (2,)],
    }
    assert matched.keys["vision_expert_w3.{i}", (1,)][2,].endswith("experts.5.up_proj.weight")
    assert matched.count_indices() == {"i": 2, "x": 3, "y": 3}


def test_experts_in_memory_are_not_renumbered() -> None:
    keys = ["model.language_model.layers.1.mlp.vision_moe.experts.down_proj"]
    assert not infer_numbering(ERNIE, "hf-v5", group_keys_by_kind(keys)).inserted


def test_missing_expert_keeps_numbers_of_others() -> None:
    keys = [key for key in list_experts(6) if key.split(".")[5] not in ("1", "4")]
    found = match_keys(ERNIE, ERNIE.get_layout("hf"), keys).keys
    assert [*found["expert_w3.{i}", (1,)]] == [(0,), (2,)]
    assert [*found["vision_expert_w3.{i}", (1,)]] == [(0,), (2,)]


def test_missing_last_expert_leaves_the_first_half_complete() -> None:
    found = match_keys(ERNIE, ERNIE.get_layout("hf"), list_experts(5)).keys
    assert [len(keys) for keys in found.values()] == [3, 2]


def test_second_half_is_numbered_after_the_first() -> None:
    found = compute_numbering(ERNIE, "hf", {"x": 4, "y": 4}, {})
    assert [found.to_stored({"x": n})["x"] for n in range(4)] == [0, 1, 2, 3]
    assert [found.to_stored({"y": n})["y"] for n in range(4)] == [4, 5, 6, 7]


def test_unequal_halves_are_an_error() -> None:
    with pytest.raises(MappingError, match="as many of `y` as of `x`"):
        compute_numbering(ERNIE, "hf", {"x": 4, "y": 3}, {})
