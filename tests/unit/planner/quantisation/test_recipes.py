"""Which weights are quantised, by their names in all families, and what fuses with what."""

from __future__ import annotations

import re

import pytest

from ckptctl import families
from ckptctl.planner.quantisation.linear_weights import Role, Roles, fused, together
from ckptctl.planner.quantisation.recipes import recipes
from tests.checkpoints.quantised import SCHEMES

TOWERS = {
    *("visual", "vision_tower", "vision_model", "audio_tower", "vision_encoder"),
    *("embed_vision", "embed_audio", "mm_projector", "multi_modal_projector", "vision_adapter"),
}
NEVER = {
    *("gate", "router", "shared_expert_gate", "embed_tokens", "embed", "lm_head", "output", "head"),
    *("conv1d", "eh_proj", "norm", "input_layernorm", "weights_proj", "in_proj_a", "in_proj_b"),
}
ALWAYS = {"q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "q_b_proj", "kv_b_proj"}
APART = {"compressor", "mtp"}


def roles_of(name: str, layout: str) -> dict[str, Role]:
    """Return what every matrix is, by its name with numbers filled in."""
    family = families.family(name)
    found = Roles(family, family.layout(layout))
    keys: dict[str, Role] = {}
    for stored in family.layout(layout).stored:
        tensor, leaf = stored.parts[0]
        shape = [family.constants.get(group[0], 64) if group else 64 for group in leaf.dims]
        if len(shape) > 1 and not tensor.scales:
            key = re.sub(r"\{\w+\}", "3", stored.template.text)
            keys[key] = found.of(key, shape)
    return keys


@pytest.mark.parametrize("name", families.names())
def test_by_name(name: str) -> None:
    family = families.family(name)
    for layout in {"hf", "hf-v5"} & set(family.layouts):
        roles = roles_of(name, layout)
        for key, role in roles.items():
            parts = set(key.split("."))
            if parts & (TOWERS | NEVER):
                assert role == "other", key
            elif parts & ALWAYS and not parts & APART:
                assert role == ("linear" if key.endswith(".weight") else "stacked"), key


def test_a_layer_of_each_kind() -> None:
    roles = roles_of("deepseek_v3", "hf")
    layer = "model.layers.3."
    assert roles[layer + "self_attn.kv_a_proj_with_mqa.weight"] == "linear"
    assert roles[layer + "mlp.experts.3.gate_proj.weight"] == "linear"
    assert roles[layer + "mlp.gate.weight"] == roles[layer + "eh_proj.weight"] == "other"
    next_ = roles_of("qwen3_next", "hf")
    assert next_[layer + "linear_attn.in_proj_qkvz.weight"] == "linear"
    assert next_[layer + "linear_attn.in_proj_ba.weight"] == "other"
    assert next_[layer + "mlp.shared_expert_gate.weight"] == "other"


def test_what_programs_make_one_of() -> None:
    names = [f"l.0.self_attn.{name}_proj.weight" for name in "qkvo"]
    names += ["l.0.mlp.experts.1.w1.weight", "l.0.mlp.experts.1.w3.weight"]
    names += ["l.1.self_attn.q_proj.weight", "l.1.self_attn.kv_a_proj_with_mqa.weight"]
    assert list(fused(names)) == [tuple(names[:3]), tuple(names[4:6])]
    found = together(names)
    assert found[names[1]] == tuple(names[:3]) and found[names[3]] == (names[3],)


def test_the_schemes() -> None:
    assert tuple(recipes()) == SCHEMES
    shapes = {
        name: [part.shape(130, 256) for part in recipe.parts] for name, recipe in recipes().items()
    }
    assert shapes == {
        "fp8-block": [(130, 256), (2, 2)],
        "fp8-channel": [(130, 256), (130, 1)],
        "mxfp4": [(130, 128), (130, 8)],
        "mxfp8": [(130, 256), (130, 8)],
        "nvfp4": [(130, 128), (130, 16), (1,)],
    }
