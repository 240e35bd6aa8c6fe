"""Which weights are quantized, by their names in all families, and what fuses with what."""

from __future__ import annotations

import re

import pytest

from ckptctl import families
from ckptctl.numerics.quantization.linear_weights import (
    Role,
    TensorRoles,
    find_fused_groups,
    map_fused_groups,
)
from ckptctl.numerics.quantization.recipes import get_recipes_by_name
from tests.checkpoints.quantized import SCHEMES

TOWERS = {
    *("visual", "vision_tower", "vision_model", "audio_tower", "vision_encoder"),
    *("embed_vision", "embed_audio", "mm_projector", "multi_modal_projector", "vision_adapter"),
}
NEVER = {
    *("gate", "router", "shared_expert_gate", "embed_tokens", "embed", "lm_head", "output", "head"),
    *("conv1d", "eh_proj", "norm", "input_layernorm", "weights_proj", "in_proj_a", "in_proj_b"),
}
ALWAYS = {"q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "q_b_proj", "kv_b_proj"}
APART = {"compressor", "mtp", "mtp_block"}
STACKED = ("experts", "transposed", "stacked")


def roles_of(name: str, layout: str) -> dict[str, Role]:
    """Return what every matrix is, by its name with numbers filled in."""
    family = families.family(name)
    found = TensorRoles(family, family.get_layout(layout))
    keys: dict[str, Role] = {}
    for stored in family.get_layout(layout).stored:
        tensor, leaf = stored.parts[0]
        shape = [family.constants.get(group[0], 64) if group else 64 for group in leaf.dims]
        if len(shape) > 1 and not tensor.scaled_weight:
            key = re.sub(r"\{\w+\}", "3", stored.template.text)
            keys[key] = found.get_role(key, shape)
    return keys


@pytest.mark.parametrize("name", families.list_model_types())
def test_roles_follow_key_names_in_every_family(name: str) -> None:
    family = families.family(name)
    for layout in {"hf", "hf-v5"} & set(family.layouts):
        roles = roles_of(name, layout)
        for key, role in roles.items():
            parts = set(key.split("."))
            # Inkling stacks its shared experts, which no program reads quantized.
            is_shared_stack = name == "inkling" and "shared_experts" in parts
            # No program reads the speech models of Qwen 3 Omni quantized.
            is_speech = name == "qwen3_omni_moe" and parts & {"talker", "code2wav"}
            # Step stacks the experts of a layer in weights of linear layers.
            is_stack = name.startswith("step3p") and "moe" in parts
            if parts & (TOWERS | NEVER) or is_shared_stack or is_speech:
                assert role == "other", key
            elif parts & ALWAYS and not parts & APART:
                is_linear = key.endswith(".weight") and not is_stack
                assert role in (("linear",) if is_linear else STACKED), key


def test_linear_roles_of_deepseek_v3_and_qwen3_next() -> None:
    roles = roles_of("deepseek_v3", "hf")
    layer = "model.layers.3."
    assert roles[layer + "self_attn.kv_a_proj_with_mqa.weight"] == "linear"
    assert roles[layer + "mlp.experts.3.gate_proj.weight"] == "linear"
    assert roles[layer + "mlp.gate.weight"] == roles[layer + "eh_proj.weight"] == "other"
    next_ = roles_of("qwen3_next", "hf")
    assert next_[layer + "linear_attn.in_proj_qkvz.weight"] == "linear"
    assert next_[layer + "linear_attn.in_proj_ba.weight"] == "other"
    assert next_[layer + "mlp.shared_expert_gate.weight"] == "other"


@pytest.mark.parametrize(
    ("name", "layout", "role"),
    [
        ("qwen3_moe", "hf-v5", "experts"),
        ("gemma4", "hf", "experts"),
        ("qwen3_vl_moe", "hf-v5", "experts"),
        ("granitemoehybrid", "hf-v5", "experts"),
        ("qwen3_vl_moe", "hf", "transposed"),
        ("granitemoehybrid", "hf", "stacked"),
        ("llama4", "hf", "transposed"),
        ("gpt_oss", "hf", "stacked"),
        ("lfm2_moe", "hf-v5", "stacked"),
        ("nemotron_h", "hf-v5", "stacked"),
    ],
)
def test_stacks_are_recognized_by_axes(name: str, layout: str, role: Role) -> None:
    found = {one for one in roles_of(name, layout).values() if one in STACKED}
    assert found == {role}


def test_fused_groups_match_serving_programs() -> None:
    names = [f"l.0.self_attn.{name}_proj.weight" for name in "qkvo"]
    names += ["l.0.mlp.experts.1.w1.weight", "l.0.mlp.experts.1.w3.weight"]
    names += ["l.1.self_attn.q_proj.weight", "l.1.self_attn.kv_a_proj_with_mqa.weight"]
    assert list(find_fused_groups(names)) == [tuple(names[:3]), tuple(names[4:6])]
    found = map_fused_groups(names)
    assert found[names[1]] == tuple(names[:3]) and found[names[3]] == (names[3],)


def test_schemes_define_part_shapes_and_names() -> None:
    assert tuple(get_recipes_by_name()) == SCHEMES
    shape = (130, 256)
    shapes = {
        name: [one.compute_stored_shape(shape) for one in recipe.parts]
        for name, recipe in get_recipes_by_name().items()
    }
    assert shapes == {
        "fp8-block": [(130, 256), (2, 2)],
        "fp8-channel": [(130, 256), (130, 1)],
        "int4": [(130, 32), (130, 2), (2,)],
        "int8": [(130, 64), (130, 2), (2,)],
        "int8-channel": [(130, 256), (130, 1)],
        "mxfp4": [(130, 128), (130, 8)],
        "mxfp8": [(130, 256), (130, 8)],
        "nvfp4": [(130, 128), (130, 16), (1,)],
    }
    stacks = {
        name: recipe.stack_multiples
        for name, recipe in get_recipes_by_name().items()
        if recipe.stack_multiples
    }
    assert stacks == {"fp8-block": (128, 128)}
    weight, scales = get_recipes_by_name()["fp8-block"].parts
    assert scales.compute_stored_shape((3, 256, 384)) == (3, 2, 3)
    assert (weight.build_stored_name("a.b"), scales.build_stored_name("a.b")) == (
        "a.b",
        "a.b_scale_inv",
    )
    assert scales.build_stored_name("a.b.weight") == "a.b.weight_scale_inv"
