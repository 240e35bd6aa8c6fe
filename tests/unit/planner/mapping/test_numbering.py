"""Cross-attention layers: inserted on the Hub, nested in torchtune, a list of their own at Meta."""

import pytest

from ckptctl.errors import MappingError
from ckptctl.families import family
from ckptctl.planner.families.templates import group_keys_by_kind
from ckptctl.planner.mapping.numbering import compute_numbering, infer_numbering

VISION = family("llama3_vision")
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
