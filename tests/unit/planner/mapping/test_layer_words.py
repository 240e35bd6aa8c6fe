"""Words of keys that depend on the kind of the layer, and tensors that a layer does not use."""

import pytest

from ckptctl.errors import MappingError, MissingTensorsError
from ckptctl.families import family
from ckptctl.planner.config_demands import find_required_tensors
from ckptctl.planner.config_facts import read_layer_lists, read_layer_sizes
from ckptctl.planner.mapping.matching import match_keys
from ckptctl.planner.mapping.source import ModelFacts
from ckptctl.planner.mapping.tensors import LayoutChange, map_tensors
from tests.contract.tables import moved, numbered

GEMMA = family("gemma4_text")
SLIDING, FULL = "sliding_attention", "full_attention"
CONFIG: dict[str, object] = {
    "model_type": "gemma4_text",
    "hidden_size": 3,
    "intermediate_size": 7,
    "vocab_size": 11,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "head_dim": 5,
    "global_head_dim": 6,
    "num_hidden_layers": 3,
    "layer_types": [SLIDING, FULL, SLIDING],
    "num_kv_shared_layers": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
}


def hf_shapes() -> dict[str, tuple[int, ...]]:
    """A model whose layer 1 repeats keys as values, and whose layer 2 has the keys of layer 0."""
    found = {"model.embed_tokens.weight": (11, 3), "model.norm.weight": (3,)}
    for layer, (heads, size) in enumerate([(2, 5), (1, 6), (2, 5)]):
        own = {
            "self_attn.q_proj.weight": (4 * size, 3),
            "self_attn.o_proj.weight": (3, 4 * size),
            "self_attn.q_norm.weight": (size,),
            "mlp.gate_proj.weight": (7, 3),
            "mlp.up_proj.weight": (7, 3),
            "mlp.down_proj.weight": (3, 7),
            "input_layernorm.weight": (3,),
            "post_attention_layernorm.weight": (3,),
            "pre_feedforward_layernorm.weight": (3,),
            "post_feedforward_layernorm.weight": (3,),
            "layer_scalar": (1,),
        }
        if layer < 2:
            own |= {
                "self_attn.k_proj.weight": (heads * size, 3),
                "self_attn.k_norm.weight": (size,),
            }
        if layer == 0:
            own["self_attn.v_proj.weight"] = (heads * size, 3)
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    return found


def change(
    source: str,
    target: str,
    shapes: dict[str, tuple[int, ...]],
    config: dict[str, object] = CONFIG,
) -> LayoutChange:
    """Map a model as the command does, which reads all from config.json."""
    matched = match_keys(GEMMA, GEMMA.get_layout(source), shapes)
    return map_tensors(
        GEMMA,
        source,
        target,
        shapes,
        ModelFacts(
            sizes={"v": 11, "d": 3, "h": 4, "i": 3},
            layer_lists=read_layer_lists(GEMMA, config),
            required=find_required_tensors(GEMMA, config, matched),
            layer_sizes=[read_layer_sizes(GEMMA, config, layer, 3) for layer in range(3)],
        ),
        matched=matched,
    )


def mcore_shapes() -> dict[str, tuple[int, ...]]:
    return {
        target.key: target.tensor.shape
        for tensor in change("hf", "mcore", hf_shapes()).tensors
        for target in tensor.targets
    }


def test_kind_of_layer_determines_names_and_sizes() -> None:
    found = {key: shape for key, shape in mcore_shapes().items() if "linear_qkv" in key}
    prefix = "decoder.layers."
    assert found == {
        f"{prefix}0.self_attention_sliding.linear_qkv.weight": (40, 3),
        f"{prefix}1.self_attention_global.linear_qkv.weight": (36, 3),
        f"{prefix}2.self_attention_sliding.linear_qkv.weight": (40, 3),
    }


def test_unused_parts_are_copies_or_zeros():
    shapes = hf_shapes()
    values = {key: array + 1 for key, array in numbered(shapes).items()}
    found = moved(change("hf", "mcore", shapes), values)
    heads = found["decoder.layers.1.self_attention_global.linear_qkv.weight"].reshape(6, 6, 3)
    keys = values["model.layers.1.self_attn.k_proj.weight"]
    assert (heads[4] == keys).all() and (heads[5] == keys).all()
    groups = found["decoder.layers.2.self_attention_sliding.linear_qkv.weight"]
    assert not groups.reshape(2, 4, 5, 3)[:, 2:].any()
    assert groups.reshape(2, 4, 5, 3)[:, :2].all()


def test_unused_parts_are_not_read_and_noted() -> None:
    found = change("mcore", "hf", mcore_shapes())
    keys = {target.key for tensor in found.tensors for target in tensor.targets}
    assert keys == hf_shapes().keys()
    notes = " ".join(found.notes.get_texts())
    assert "`v` of layers 1, 2" in notes and "`k` of layer 2 is" in notes
    assert "decoder.layers.2.self_attention_sliding.k_layernorm.weight" in found.dropped_keys


@pytest.mark.parametrize("kinds", [None, [SLIDING, FULL]])
def test_parts_are_read_if_config_does_not_list_all_layers(kinds: list[str] | None) -> None:
    config = {name: value for name, value in CONFIG.items() if name != "layer_types"}
    config |= {"layer_types": kinds} if kinds else {}
    found = change("mcore", "hf", mcore_shapes(), config)
    keys = {target.key for tensor in found.tensors for target in tensor.targets}
    assert {f"model.layers.{n}.self_attn.v_proj.weight" for n in range(3)} <= keys


@pytest.mark.parametrize("kinds", [None, [SLIDING, FULL]])
def test_names_without_kinds_of_layers_are_an_error(kinds: list[str] | None) -> None:
    config = {name: value for name, value in CONFIG.items() if name != "layer_types"}
    config |= {"layer_types": kinds} if kinds else {}
    with pytest.raises(MappingError, match="requires the kind of every layer"):
        change("hf", "mcore", hf_shapes(), config)


def test_unknown_kind_of_layer_is_an_error() -> None:
    with pytest.raises(MappingError, match="not a list of known layer types"):
        read_layer_lists(GEMMA, {"layer_types": [SLIDING, "chunked_attention"]})


def test_names_that_contradict_config_are_an_error() -> None:
    config = {**CONFIG, "layer_types": [FULL, FULL, SLIDING], "num_kv_shared_layers": 0}
    with pytest.raises(MappingError, match="disagree on the kind of a layer"):
        change("mcore", "hf", mcore_shapes(), {**config, "attention_k_eq_v": False})


def test_layer_with_names_of_two_kinds_is_an_error() -> None:
    shapes = mcore_shapes()
    old = "decoder.layers.1.self_attention_global.q_layernorm.weight"
    shapes[old.replace("global", "sliding")] = shapes.pop(old)
    with pytest.raises(MappingError, match="a layer has tensors of two kinds"):
        change("mcore", "hf", shapes)


def test_missing_key_of_used_projection_is_an_error() -> None:
    shapes = hf_shapes()
    del shapes["model.layers.0.self_attn.v_proj.weight"]
    with pytest.raises(MissingTensorsError, match="missing a tensor"):
        change("hf", "mcore", shapes)


def test_shape_that_contradicts_sizes_of_layer_is_an_error() -> None:
    shapes = hf_shapes() | {"model.layers.1.self_attn.k_proj.weight": (12, 3)}
    with pytest.raises(MappingError, match="a shape conflicts"):
        change("hf", "mcore", shapes)
