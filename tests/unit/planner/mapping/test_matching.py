"""Keys are understood by kind, as each alone would be."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

from ckptctl.errors import MissingTensorsError
from ckptctl.families import load_families
from ckptctl.planner.families.templates import Template, group_keys_by_kind, split_numbers
from ckptctl.planner.layouts import Drop
from ckptctl.planner.mapping.completeness import ExpectedTensors
from ckptctl.planner.mapping.detect import detect_layouts
from ckptctl.planner.mapping.matching import match_keys
from ckptctl.planner.mapping.numbering import infer_numbering
from ckptctl.planner.mapping.source import ModelFacts
from ckptctl.planner.mapping.tensors import map_tensors
from tests.contract.tables import ALL, FAMILIES, stored_shapes, tiny
from tests.sweeps import one_in

LAYER = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "input_layernorm",
    "post_attention_layernorm",
)


def llama(layers: int) -> dict[str, tuple[int, ...]]:
    inner = [f"model.layers.{i}.{name}.weight" for i in range(layers) for name in LAYER]
    return dict.fromkeys(["model.embed_tokens.weight", *inner, "model.norm.weight"], (8, 8))


def changed(keys: list[str], choice: random.Random) -> list[str]:
    """Return *keys* in another order; some are gone, some have other numbers or parts."""
    found = []
    for key in choice.sample(keys, len(keys)):
        parts = key.split(".")
        place = choice.randrange(len(parts))
        number = choice.choice(["0", "1", "3", "01", "#", "99999", "100000", "x", "³"])
        parts[place] = number if choice.random() < 0.1 else parts[place]
        found += [".".join(parts)] if choice.random() < 0.95 else []
    return list(dict.fromkeys(found))


@pytest.mark.parametrize(("name", "layout"), one_in(4, ALL))
def test_keys_match_independently_of_each_other(name, layout):
    family, choice = FAMILIES[name], random.Random(name + layout)
    own = list(tiny(family, layout, optional=True))
    table = family.get_layout(layout).table
    for keys in [own, *(changed(own, choice) for _ in range(8))]:
        numbering = infer_numbering(family, layout, group_keys_by_kind(keys))
        stored, dropped, unmatched, held = {}, {}, [], {}
        for key in keys:
            for meaning, numbers in table.iterate_matches(key):
                values = numbering.to_logical(numbers)
                if values is None:
                    continue
                if isinstance(meaning, Drop):
                    dropped[key] = meaning
                else:
                    stored[key] = meaning
                    for tensor, leaf in meaning.parts:
                        slot = tensor.name, tuple(values[index] for index in tensor.indices)
                        lead = tuple(values[axis] for axis in leaf.spread_axes)
                        held.setdefault(slot, {})[lead] = key
                break
            else:
                unmatched.append(key)
        found = match_keys(family, family.get_layout(layout), keys)
        assert list(found.tensor_by_key.items()) == list(stored.items())
        assert list(found.dropped.items()) == list(dropped.items())
        assert found.unmatched == unmatched
        assert found.keys == {s: k for s, k in held.items() if s not in found.excluded}
        some = set(keys[::2])
        assert found.select_keys(some).keys == {
            slot: left
            for slot, leads in found.keys.items()
            if (left := {lead: key for lead, key in leads.items() if key in some})
        }


@pytest.mark.parametrize(("name", "layout"), one_in(3, ALL))
def test_absent_keys_are_exactly_removed_ones(name, layout):
    family, choice = FAMILIES[name], random.Random(layout + name)
    own = list(tiny(family, layout, tied=False))
    whole = match_keys(family, family.get_layout(layout), own)
    counts = whole.count_indices()
    assert not [
        *ExpectedTensors(family, family.get_layout(layout), whole, counts).iterate_missing()
    ]
    for gone in choice.sample(list(whole.tensor_by_key), min(4, len(own))):
        rest = match_keys(family, family.get_layout(layout), [key for key in own if key != gone])
        expected = ExpectedTensors(family, family.get_layout(layout), rest, counts)
        lacks = [one.key for one in expected.iterate_missing()]
        parts = whole.tensor_by_key[gone].parts
        plain = all(not tensor.optional and tensor.variant is None for tensor, _ in parts)
        if plain and rest.numbering == whole.numbering:
            assert lacks == [gone]


def test_mtp_experts_are_mapped_separately_from_dense_layer_0() -> None:
    """Both have the number 0, and one name for the norm of either kind."""
    deepseek = FAMILIES["deepseek_v3"]
    model = tiny(deepseek, "hf")
    last = {key: shape for key, shape in model.items() if ".layers.1." in key}
    own = {"enorm": (16,), "hnorm": (16,), "shared_head.norm": (16,), "eh_proj": (16, 32)}
    further = {key.replace(".layers.1.", ".layers.2."): shape for key, shape in last.items()}
    further |= {f"model.layers.2.{name}.weight": shape for name, shape in own.items()}
    there = map_tensors(deepseek, "hf", "mcore", model | further, ModelFacts(sizes=deepseek.tiny))
    made = stored_shapes(there.tensors)
    fused = "mlp.linear_fc1.layer_norm_weight"
    assert [key for key in made if key.endswith(fused)] == [f"decoder.layers.0.{fused}"]
    assert [key for key in made if key.endswith("pre_mlp_layernorm.weight")] == [
        "decoder.layers.1.pre_mlp_layernorm.weight",
        "mtp.layers.0.transformer_layer.pre_mlp_layernorm.weight",
    ]


def test_layer_without_mlp_is_missing_kind_of_most_layers() -> None:
    """Its norm alone may be of either kind."""
    qwen = replace(FAMILIES["qwen3_moe"], tiny={**FAMILIES["qwen3_moe"].tiny, "i": 3})
    model = tiny(qwen, "hf")
    torn = {key: shape for key, shape in model.items() if ".layers.1.mlp." not in key}
    with pytest.raises(MissingTensorsError, match="is missing 3 tensors") as caught:
        map_tensors(qwen, "hf", "mcore", torn, ModelFacts(sizes=qwen.tiny))
    assert caught.value.where == "tensor `model.layers.1.mlp.gate_proj.weight`"


def test_detection_work_depends_on_kinds_not_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deeper model costs no more reading of templates, and each key is taken apart once."""
    known = load_families()
    taken, read = list[str](), list[object]()
    original = Template.to_index_values

    def counted(key: str) -> tuple[str, tuple[int, ...]]:
        taken.append(key)
        return split_numbers(key)

    def reading(self: Template, numbers: tuple[int, ...]) -> Mapping[str, int] | None:
        read.append(numbers)
        return original(self, numbers)

    monkeypatch.setattr("ckptctl.planner.families.templates.split_numbers", counted)
    monkeypatch.setattr(Template, "to_index_values", reading)
    shapes = llama(200)
    found = detect_layouts(shapes, known)
    assert found and all(c.is_exact for c in found)
    assert taken == list(shapes) and not read
    del shapes["model.layers.7.mlp.up_proj.weight"]
    found = detect_layouts(shapes, known)
    assert {c.missing for c in found} == {("model.layers.7.mlp.up_proj.weight",)}
    assert not read
