"""A model that lacks a tensor: named and refused, in every direction of every family and format.

What is left out on purpose is left out, and what is made of it with it: never a part of a tensor
under the name of the whole.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import ckptctl
from ckptctl.cli.app import app
from ckptctl.errors import MappingError, MissingTensorsError
from ckptctl.planner.layouts import BASE
from ckptctl.planner.mapping.completeness import find_missing_keys
from ckptctl.planner.mapping.detect import detect_layouts
from ckptctl.planner.mapping.matching import match_keys
from ckptctl.planner.mapping.source import ModelFacts
from ckptctl.planner.mapping.tensors import MappingOptions, map_tensors
from ckptctl.runs.health import check_health
from tests.checkpoints import save_hf, save_torch, tiny_llama
from tests.checkpoints.golden import Golden
from tests.contract.support import WRITABLE, build, message, place, refused
from tests.contract.tables import (
    ALL,
    FAMILIES,
    PAIRS,
    direct,
    filled_slots,
    from_first,
    tiny,
    tiny_lists,
)
from tests.contract.test_docs import on_a_terminal
from tests.runs import START, age, tear
from tests.sweeps import one_in

STATE, CONFIG = tiny_llama("llama3")
SOME = 3
"""Each case takes one kind of key out of so many, others than the next case."""

# ------------------------------------------------------------------------------- by the tables


def mapped(name, source, target, shapes, *, matched=None, absent_tensors=(), **options):
    family = FAMILIES[name]
    lists = tiny_lists(family, family.tiny)
    facts = ModelFacts(sizes=family.tiny, layer_lists=lists, absent_tensors=absent_tensors)
    if family.fills:  # only a config says which layers need them
        facts = replace(facts, required=filled_slots(family), layer_sizes=())
    options = MappingOptions(**options)
    return map_tensors(family, source, target, shapes, facts, options, matched=matched)


def keys_of(name, layout, number):
    """One key of some kinds, the *number*-th of them; None: all."""
    family = FAMILIES[name]
    found = match_keys(family, family.get_layout(layout), tiny(family, layout))
    kinds = [group.keys for group in found.groups]
    kinds += [[key for key, drop in found.dropped.items() if drop is rule] for rule in family.drops]
    if number is None:
        return [key for keys in kinds for key in keys]
    return [keys[number % len(keys)] for keys in kinds[number % SOME :: SOME] if keys]


def twins(name, layout):
    """The keys that one of two tied tensors has: the other one is enough."""
    family = FAMILIES[name]
    leaves = family.get_layout(layout).leaves
    ties = family.ties if family.tied else ()
    return {leaves[t].key.text for tie in ties for t in (tie.tensor, tie.of) if t in leaves}


def made_of(found):
    """How often each key of the target is filled, or a part of it."""
    return Counter(view.key for one in found.tensors for view in one.targets)


def is_named(name, layout, key, error):
    """Whether an error names *key*, or what its layer would have of the other kind of layers."""
    if key in str(error.why):
        return True
    family = FAMILIES[name]
    stored = family.get_layout(layout).table
    kinds = {tensor.variant for tensor, _ in next(stored.iterate_matches(key))[0].parts}
    head = re.split(r"\.(?:self_attn|self_attention|attn|attention|ffn|mlp)\.", key)[0]
    return kinds != {None} and f"`{head}." in str(error.why)


def require_named(name, source, target, number):
    whole = tiny(FAMILIES[name], source)
    full = mapped(name, source, target, whole)
    for key in keys_of(name, source, number):
        rest = {other: shape for other, shape in whole.items() if other != key}
        try:
            found = mapped(name, source, target, rest)
        except MissingTensorsError as error:
            assert is_named(name, source, key, error), (key, error.why)
            continue
        # Nothing of it was to be written, or it is written of its twin.
        assert key in full.dropped_keys or key in twins(name, source) or alone(name, source, key), (
            key
        )
        assert source == target or made_of(found) == made_of(full), key


def alone(name, layout, key):
    """Whether *key* is that of zeros of which no other layer has any."""
    found = match_keys(
        FAMILIES[name], FAMILIES[name].get_layout(layout), tiny(FAMILIES[name], layout)
    )
    rule = found.dropped.get(key)
    return rule is not None and list(found.dropped.values()).count(rule) == 1


def require_left_out(name, source, target, number, *, alone=False):
    whole = tiny(FAMILIES[name], source)
    matched = match_keys(FAMILIES[name], FAMILIES[name].get_layout(source), whole)
    full = mapped(name, source, target, whole)
    places, needed = set(full.tensors), made_of(full)
    for key in keys_of(name, source, number):
        rest = {other: shape for other, shape in whole.items() if (other == key) == alone}
        try:
            found = mapped(name, source, target, rest, partial=True, matched=matched)
        except MappingError as error:
            assert key in message(error), (key, message(error))
            assert "cannot be written in part" in error.what or alone, (key, message(error))
            continue
        made = made_of(found)
        assert all(count == needed[made_key] for made_key, count in made.items()), key
        if key not in twins(name, source):
            assert set(found.tensors) <= places, key


def numbered(pairs: Sequence[tuple[str, ...]]) -> list[tuple[str | int, ...]]:
    """Each pair with a number that says which key of each kind is left out."""
    return [(*pair, number) for number, pair in enumerate(pairs)]


@pytest.mark.parametrize(
    ("name", "source", "target", "number"), one_in(13, direct(numbered(PAIRS)))
)
def test_missing_tensor_is_refused_by_name(name, source, target, number):
    require_named(name, source, target, number)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "source", "target"), [*filter(from_first, PAIRS)])
def test_every_missing_tensor_is_refused_by_name(name, source, target):
    require_named(name, source, target, None)


@pytest.mark.parametrize(("name", "layout"), one_in(15, ALL))
def test_missing_tensors_are_all_counted_but_listing_is_limited(name, layout):
    family, sizes = FAMILIES[name], FAMILIES[name].tiny
    table, whole = family.get_layout(layout), tiny(family, layout)
    for number in range(SOME):
        gone = keys_of(name, layout, number)
        rest = match_keys(family, table, [key for key in whole if key not in gone])
        if not rest.groups:
            continue
        few = find_missing_keys(family, table, rest, sizes, tied=family.tied)
        assert few.total == len({absent.key for absent in few.keys})
        if "i" not in sizes:
            continue
        deep = [
            find_missing_keys(family, table, rest, {**sizes, "i": n}, tied=family.tied)
            for n in MANY
        ]
        numbers = [less.total for less in deep]
        assert numbers[1] - numbers[0] == numbers[2] - numbers[1] > 9000
        assert all(len(less.keys) < 5000 for less in deep)


MANY = (10_000, 20_000, 30_000)
"""Numbers of layers of which a tiny model has the first."""


@pytest.mark.parametrize(("name", "layout"), one_in(13, ALL))
def test_missing_optional_tensor_of_present_group_is_named(name, layout):
    family = FAMILIES[name]
    table, plain = family.get_layout(layout), tiny(family, layout)
    whole = tiny(family, layout, optional=True)
    held = match_keys(family, table, whole).tensor_by_key
    optional: dict[int, list[str]] = {}
    for key in whole:
        if key not in plain:
            optional.setdefault(id(held[key]), []).append(key)
    for keys in optional.values():
        tensor = held[keys[0]]
        # Only dtypes tell which weights have scales.
        if any(part.scaled_weight for part, _ in tensor.parts):
            continue
        groups = {part.group for part, _ in tensor.parts} - {""}
        others = {id(other): other for other in held.values() if other is not tensor}
        shown = any(part.group in groups for other in others.values() for part, _ in other.parts)
        by_layer = any(part.name in family.per_layer_tensors for part, _ in tensor.parts)
        alike = {other for other in whole if held.get(other) is tensor}
        middle = keys[len(keys) // 2]
        for gone in ({keys[0]}, {middle}, {keys[-1]}, alike):
            rest = match_keys(family, table, [other for other in whole if other not in gone])
            found = find_missing_keys(family, table, rest, family.tiny, tied=family.tied)
            assert found.total == len({absent.key for absent in found.keys})
            missed = gone <= {absent.key for absent in found.keys}
            assert missed == (shown or (gone != alike and not by_layer)), gone
        names = {part.name.partition(".")[0] for part, _ in tensor.parts}
        demanded = (name for demand in family.demands for name in demand.tensors)
        known = ALONE | {part.name.partition(".")[0] for part in family.find_tensors(demanded)}
        assert shown or len(tensor.parts) > 1 or names <= known, names


ALONE = {"projection", "o_bias"}
"""The optional tensors that a whole model may lack although it has others."""
CHANGES = [pair for pair in PAIRS if pair[1] != pair[2]]


@pytest.mark.parametrize(
    ("name", "source", "target", "number"), one_in(67, direct(numbered(CHANGES)))
)
def test_excluding_tensors_writes_no_partial_tensor(name, source, target, number):
    require_left_out(name, source, target, number)


@pytest.mark.slow
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(("name", "source", "target"), [*filter(from_first, CHANGES)])
def test_excluding_any_tensor_writes_no_partial_tensor(name, source, target, alone):
    require_left_out(name, source, target, None, alone=alone)


@pytest.mark.parametrize(
    ("name", "source", "target", "number"), one_in(15, direct(numbered(CHANGES)[::SOME]))
)
def test_allow_missing_writes_no_partial_tensor(name, source, target, number):
    """What is fused with it, or stacked, goes with it, and is named with what it lacks."""
    whole = tiny(FAMILIES[name], source)
    matched = match_keys(FAMILIES[name], FAMILIES[name].get_layout(source), whole)
    needed = made_of(mapped(name, source, target, whole))
    for key in keys_of(name, source, number):
        rest = {other: shape for other, shape in whole.items() if other != key}
        found = mapped(
            name, source, target, rest, partial=True, matched=matched, may_be_missing=[key]
        )
        made = made_of(found)
        assert all(count == needed[made_key] for made_key, count in made.items()), key
        zeros = {made.key for made in found.zeros}
        read = {view.key for one in found.tensors for view in one.sources} - zeros
        assert not read & found.skipped_keys.keys(), key
        assert all(f"`{key}`" in why for why in found.skipped_keys.values()), key
        assert rest.keys() == read | found.skipped_keys.keys() | found.dropped_keys.keys(), key


FUSED = [
    (name, source, target)
    for name, source, target in CHANGES
    if any(len(stored.parts) > 1 for stored in FAMILIES[name].get_layout(target).stored)
]


@pytest.mark.parametrize(("name", "source", "target"), one_in(23, FUSED))
def test_partially_present_fused_tensor_is_never_written(name, source, target):
    for number in range(SOME):
        require_left_out(name, source, target, number, alone=True)


# ------------------------------------------------------------------------------- by the formats


def lacking_source(folder: Path, name: str, gone: str) -> Path:
    """A Llama of format *name* without a tensor; the config.json that says so is beside it."""
    state = {key: value for key, value in STATE.items() if key != gone}
    if name != "meta":
        return build(name, folder, state, CONFIG)
    source = build(name, folder, STATE, CONFIG)
    renamed = META[gone]
    for file in source.glob("*.pth"):
        held = torch.load(file, weights_only=True)
        del held[renamed]
        torch.save(held, file)
    return source


META = {
    "model.norm.weight": "norm.weight",
    "model.layers.0.self_attn.q_proj.weight": "layers.0.attention.wq.weight",
    "model.layers.1.mlp.down_proj.weight": "layers.1.feed_forward.w2.weight",
}


@pytest.mark.parametrize("gone", META)
@pytest.mark.parametrize("name", one_in(7, WRITABLE))
def test_missing_tensor_is_named_in_every_format(tmp_path: Path, name: str, gone: str) -> None:
    source = lacking_source(tmp_path, name, gone)
    missed = META[gone] if name == "meta" else gone
    found = ckptctl.inspect(source)
    assert (found.verdict, found.complete, found.scope) == ("damaged", False, "model")
    assert found.lacks == (missed,) and not found.problems
    judged = check_health(source)  # by which prune, ls and latest go
    assert (judged.verdict, judged.torn) == ("damaged", False)
    assert check_health(source, model=False).verdict == "complete"
    verified = ckptctl.verify(source)
    assert (verified.verdict, verified.exit_code) == ("damaged", 4)
    assert [(one.tensor, one.basis) for one in verified.errors] == [(missed, "model")]
    for target in WRITABLE:
        out = place(tmp_path, target)
        options: dict[str, Any] = {"assets": tmp_path / "papers"}
        write_papers(tmp_path / "papers")
        with refused(source, out, 4) as caught:
            ckptctl.convert(source, out, to=target, **options)
        assert f"`{missed}`" in message(caught.value)
        plan = ckptctl.plan_conversion(source, out, to=target, allow_missing=True, **options)
        assert plan.missing.keys() == {missed}
        assert plan.tensors == len(STATE) - 1
        plan = ckptctl.plan_conversion(source, out, to=target, exclude=[missed], **options)
        assert not plan.missing and plan.tensors == len(STATE) - 1
        with refused(source, out, 4):
            ckptctl.convert(
                source,
                out,
                to=target,
                exclude=["*tok_emb*" if name == "meta" else "*embed*"],
                **options,
            )


def test_inspect_suggests_latest_only_if_it_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_terminal(monkeypatch)
    norm = "model.norm.weight"
    for step, state in ((1, STATE), (2, {n: t for n, t in STATE.items() if n != norm})):
        age(save_hf(tmp_path / f"step-{step}", state, CONFIG), START + 60 * step)
    for code in (4, 0):
        assert CliRunner().invoke(app, ["latest", str(tmp_path)]).exit_code == code
        shown = CliRunner().invoke(app, ["inspect", str(tmp_path)]).output
        assert ("prints the newest complete checkpoint" in shown) == (code == 0)
        age(tear(tmp_path / "step-2"), START)


def write_papers(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))


@pytest.mark.parametrize("name", ["torch", "dcp"])
def test_missing_tensor_is_found_without_config(tmp_path: Path, name: str) -> None:
    """What other layers have, and what every such model has, is missed all the same."""
    for gone in META:
        state = {key: value for key, value in STATE.items() if key != gone}
        source = build(name, tmp_path / gone, state, None)
        assert ckptctl.inspect(source).lacks == (gone,)
        with refused(source, tmp_path / "out", 4) as caught:
            ckptctl.convert(source, tmp_path / "out", to="hf")
        assert gone in message(caught.value)


@pytest.mark.parametrize(
    "part", one_in(3, ["*self_attn*", "*.layers.1.self*", "*norm*", "lm_head*", "*.layers.*"])
)
def test_partial_model_is_only_structure_complete_with_note(tmp_path: Path, part: str) -> None:
    """Trained parameters alone, say: nothing shows that there should be more, and it is said."""
    kept = {key: value for key, value in STATE.items() if fnmatch(key, part)}
    source = build("torch", tmp_path, kept, None)
    for found in (ckptctl.inspect(source), ckptctl.verify(source)):
        assert (found.verdict, found.complete, found.scope) == ("complete", None, "structure")
        assert any("part of" in note for note in found.notes)
    assert not ckptctl.inspect(source).lacks
    plan = ckptctl.plan_conversion(source, tmp_path / "out", to="dcp")
    assert plan.tensors == len(kept)
    assert any("part of" in note for note in plan.notes)


def test_missing_lm_head_is_damage_only_for_causal_lm(tmp_path: Path) -> None:
    state = {key: value for key, value in STATE.items() if key != "lm_head.weight"}
    for architecture, lacks in (("LlamaModel", ()), ("LlamaForCausalLM", ("lm_head.weight",))):
        config = CONFIG | {"architectures": [architecture], "tie_word_embeddings": False}
        source = save_hf(tmp_path / architecture, state, config)
        assert ckptctl.inspect(source).lacks == lacks


def test_headless_model_to_another_layout_is_refused(tmp_path: Path) -> None:
    state = {key: value for key, value in STATE.items() if key != "lm_head.weight"}
    config = CONFIG | {"architectures": ["LlamaModel"], "tie_word_embeddings": False}
    source = save_hf(tmp_path / "in", state, config)
    for to in ("hf", "dcp", "torch"):
        assert ckptctl.plan_conversion(source, tmp_path / "out", to=to).tensors == len(state)
    targets: list[dict[str, Any]] = [{"to": "meta"}, {"to": "dcp", "to_layout": "torchtune"}]
    for options in targets:
        with refused(source, tmp_path / "out", 4) as caught:
            ckptctl.convert(source, tmp_path / "out", **options)
        assert "`lm_head.weight`" in message(caught.value)
        plan = ckptctl.plan_conversion(source, tmp_path / "out", allow_missing=True, **options)
        assert plan.missing.keys() == {"lm_head.weight"}
        ckptctl.plan_conversion(source, tmp_path / "out", exclude="lm_head.weight", **options)


def test_missing_gpt_neox_embed_out_is_found(tmp_path):
    """Nothing else tells two layouts apart: it is missed all the same."""
    shapes = tiny(FAMILIES["gpt_neox"], "hf")
    state = {key: torch.zeros(shape) for key, shape in shapes.items() if key != "embed_out.weight"}
    family = FAMILIES["gpt_neox"]
    sizes = {name: family.tiny[axis] for axis, (name, _) in family.sizes.items()}
    config = {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], **sizes}
    source = save_hf(tmp_path / "in", state, config)
    assert ckptctl.inspect(source).lacks == ("embed_out.weight",)
    with refused(source, tmp_path / "out", 4):
        ckptctl.convert(source, tmp_path / "out", to="dcp")
    labels = {"score.weight": torch.ones(1, 16)}
    config["architectures"] = ["GPTNeoXForSequenceClassification"]
    source = save_hf(tmp_path / "rated", state | labels, config)
    assert ckptctl.verify(source).verdict == "complete"
    assert ckptctl.plan_conversion(source, tmp_path / "out", to="hf").tensors == len(state) + 1


def test_invalid_vocab_size_makes_verdict_unknown(tmp_path: Path) -> None:
    source = save_hf(tmp_path / "in", STATE, CONFIG | {"vocab_size": "many"})
    found = ckptctl.inspect(source)
    assert not found.lacks and any(
        "`vocab_size` is not a valid size" in note for note in found.notes
    )
    assert (found.verdict, found.complete) == ("unknown", False)
    verified = ckptctl.verify(source)
    assert [one.severity for one in verified.findings] == ["unknown"]
    assert any("`vocab_size` is not a valid size" in note for note in verified.notes)


def test_load_into_another_layout_names_missing_tensor(tmp_path: Path) -> None:
    gone = "model.layers.0.self_attn.q_proj.weight"
    source = lacking_source(tmp_path, "hf", gone)
    whole = tiny_torchtune(tmp_path)
    state = {name: torch.zeros_like(value) for name, value in whole.items()}
    with pytest.raises(MissingTensorsError) as caught:
        ckptctl.load(state, source, model_type="llama3")
    assert gone in str(caught.value.why)
    report = ckptctl.load(state, source, model_type="llama3", strict=False)
    assert report.missing == ("layers.0.attn.q_proj.weight",)
    assert all(torch.equal(state[name], whole[name]) for name in report.loaded)


def test_diff_across_layouts_skips_missing_tensor(tmp_path: Path) -> None:
    gone = "model.layers.0.self_attn.q_proj.weight"
    source = lacking_source(tmp_path, "hf", gone)
    tiny_torchtune(tmp_path)
    found = ckptctl.diff(tmp_path / "tune.pt", source, model_type="llama3")
    assert (found.compared, found.tensors) == (len(STATE) - 1, ())
    assert found.a.only == ("layers.0.attn.q_proj.weight",) and not found.b.only


def tiny_torchtune(folder: Path) -> dict[str, torch.Tensor]:
    source = save_hf(folder / "whole", STATE, CONFIG)
    ckptctl.convert(source, folder / "tune.pt", to="torch", to_layout="torchtune")
    found: dict[str, torch.Tensor] = torch.load(folder / "tune.pt", weights_only=True)
    return found


def test_include_requires_only_selected_tensors(tmp_path: Path) -> None:
    """What was asked for is accounted for, and nothing else."""
    source = lacking_source(tmp_path, "hf", "model.norm.weight")
    plan = ckptctl.plan_conversion(source, tmp_path / "out", to="dcp", include=["model.layers.0.*"])
    assert plan.tensors == 9 and not plan.missing
    with refused(source, tmp_path / "out", 4):
        ckptctl.convert(source, tmp_path / "out", to="dcp", include=["*norm*"])


PARTS = {
    "*v_proj*": "qkv_proj",
    "*q_proj*": "qkv_proj",
    "*w3*": "gate_up_proj",
}


@pytest.mark.parametrize("option", ["include", "exclude"])
@pytest.mark.parametrize("part", PARTS)
def test_selecting_part_of_fused_tensor_is_refused(tmp_path, part, option):
    shapes = tiny(FAMILIES["phi3"], "torchtune")
    source = tmp_path / "source.pt"
    torch.save({key: torch.zeros(shape) for key, shape in shapes.items()}, source)
    out = tmp_path / "out"
    options = {"to": "hf", "model_type": "phi3", option: [part]}
    with refused(source, out, 5) as caught:
        ckptctl.convert(source, out, **options)
    assert PARTS[part] in message(caught.value)
    assert "cannot be written in part" in message(caught.value)
    together = {"qkv_proj": ["*q_proj*", "*k_proj*", "*v_proj*"], "gate_up_proj": ["*w1*", "*w3*"]}
    options[option] = together[PARTS[part]]
    ckptctl.plan_conversion(source, out, **options)


def test_millions_of_missing_layers_are_counted_not_listed(tmp_path: Path) -> None:
    source = save_hf(tmp_path / "in", STATE, CONFIG | {"num_hidden_layers": 5_000_000})
    lacks = 9 * (5_000_000 - CONFIG["num_hidden_layers"])
    with refused(source, tmp_path / "out", 4) as caught:
        ckptctl.convert(source, tmp_path / "out", to="dcp")
    assert caught.value.what == f"the model is missing {lacks:,} tensors"
    assert f"and {lacks - 5:,} more" in message(caught.value)
    listed = len(ckptctl.inspect(source).lacks)
    assert any(f"{lacks - listed:,} more" in note for note in ckptctl.inspect(source).notes)
    assert any(f"{lacks - listed:,} more" in note for note in ckptctl.verify(source).notes)


def test_more_layers_than_num_hidden_layers_is_refused(tmp_path: Path) -> None:
    source = save_hf(tmp_path / "in", STATE, CONFIG | {"num_hidden_layers": 1})
    with pytest.raises(MappingError) as caught:
        ckptctl.convert(source, tmp_path / "out", to="dcp")
    verified = ckptctl.verify(source)
    assert verified.verdict == "unknown"
    (finding,) = verified.findings
    assert "`num_hidden_layers` is 1 in config.json and 2 in" in str(finding.why)
    assert str(finding.why) in str(caught.value.why).replace(f"{source}/", "")
    assert any(str(finding.why) in why for why in ckptctl.inspect(source).problems)
    part = ckptctl.plan_conversion(source, tmp_path / "out", to="dcp", exclude="*.layers.1.*")
    assert part.tensors == len(STATE) - 9


@pytest.mark.parametrize(
    "name", one_in(7, [name for name, family in FAMILIES.items() if family.wrapper_prefix])
)
def test_headless_base_model_without_prefix_maps_to_hf(name):
    family = FAMILIES[name]
    head = {family.get_layout("hf").leaves[tie.tensor].key.text for tie in family.ties}
    shapes = {k: shape for k, shape in tiny(family, "hf").items() if k not in head}
    inner = {key.removeprefix(family.wrapper_prefix): shape for key, shape in shapes.items()}
    (found,) = detect_layouts(inner, {name: family})
    assert found.is_exact and found.layout == BASE
    back = mapped(name, BASE, "hf", inner, absent_tensors={tie.tensor for tie in family.ties})
    assert {(*view.sources, *view.targets)[0].key for view in back.tensors} == inner.keys()
    assert set(made_of(back)) == shapes.keys()
    for key in inner:
        if not alone(name, "hf", family.wrapper_prefix + key):
            rest = {other: shape for other, shape in inner.items() if other != key}
            with pytest.raises(MissingTensorsError, match="missing"):
                mapped(name, BASE, "hf", rest, absent_tensors={tie.tensor for tie in family.ties})


def test_base_model_to_another_layout_requires_lm_head(tmp_path: Path) -> None:
    state = {key.removeprefix("model."): STATE[key] for key in STATE if key != "lm_head.weight"}
    for config in (CONFIG, CONFIG | {"architectures": ["LlamaModel"]}, None):
        name = "hf" if config else "torch"
        source = build(name, tmp_path / str(config and config["architectures"]), state, config)
        assert ckptctl.inspect(source).layout == BASE and not ckptctl.inspect(source).lacks
        kept = ckptctl.plan_conversion(source, tmp_path / "out", to="hf")
        assert {tensor.name for tensor in kept.output} == state.keys()
        with refused(source, tmp_path / "out", 4) as caught:
            options: dict[str, Any] = {"to": "dcp", "to_layout": "torchtune"}
            ckptctl.convert(source, tmp_path / "out", model_type="llama3", **options)
        assert "`lm_head.weight`" in message(caught.value)


WAYS = {
    "gptq": (".qweight", ".qzeros", ".scales", ".g_idx"),
    "bitsandbytes": (".weight", ".weight.absmax", ".weight.quant_state.bitsandbytes__nf4"),
    "compressed-tensors": (".weight_packed", ".weight_scale", ".weight_shape"),
}


@pytest.mark.parametrize("way", one_in(3, WAYS))
@pytest.mark.parametrize("configured", [True, False])
def test_missing_tensors_of_quantized_model_are_found(
    tmp_path: Path, way: str, configured: bool
) -> None:
    state = dict[str, torch.Tensor]()
    for key, value in STATE.items():
        stem = key.removesuffix(".weight")
        parts = {stem + end: torch.ones(2, 2, dtype=torch.uint8) for end in WAYS[way]}
        state |= parts if "proj" in key else {key: value}
    config = CONFIG | {"quantization_config": {"quant_method": way}} if configured else None
    assert not ckptctl.inspect(save_hf(tmp_path / "whole", state, config)).lacks
    found = ckptctl.verify(tmp_path / "whole").findings  # these are no elements of that scheme
    assert not any("lacks" in one.what for one in found)
    quantized = [key for key in state if key.startswith("model.layers.1.mlp.down_proj.")]
    for gone in (["model.norm.weight"], quantized):
        rest = {key: value for key, value in state.items() if key not in gone}
        source = save_hf(tmp_path / gone[0], rest, config)
        named = "model.layers.1.mlp.down_proj.weight" if gone == quantized else gone[0]
        assert ckptctl.inspect(source).lacks == (named,)
        with refused(source, tmp_path / "out", 4) as caught:
            ckptctl.convert(source, tmp_path / "out", to="dcp")
        assert named in message(caught.value)


@pytest.mark.parametrize("name", ["hf", "torch"])
def test_first_pipeline_stage_is_refused_with_hint_that_works(tmp_path: Path, name: str) -> None:
    """What to do about it is said, and that works."""
    first = {key: value for key, value in STATE.items() if "embed" in key or ".layers.0." in key}
    last = {key: value for key, value in STATE.items() if key not in first}
    joined = tmp_path / "joined"
    joined.mkdir()
    for number, stage in enumerate((first, last), 1):
        source = build(name, tmp_path / str(number), stage, CONFIG)
        if number == 1:
            with refused(source, tmp_path / "out", 4) as caught:
                ckptctl.convert(source, tmp_path / "out", to="hf")
            assert "first pipeline stage" in str(caught.value.hint)
        ckptctl.convert(source, tmp_path / f"out{number}", to="hf", allow_missing=True)
        (file,) = (tmp_path / f"out{number}").glob("*.safetensors")
        file.rename(joined / f"model-{number:05}-of-00002.safetensors")
    assert ckptctl.plan_conversion(joined, tmp_path / "out", to="hf").tensors == len(STATE)
    some = {key: value for key, value in STATE.items() if "layers.1.input_layernorm" not in key}
    source = build(name, tmp_path, some, CONFIG)
    with refused(source, tmp_path / "out", 4) as caught:
        ckptctl.convert(source, tmp_path / "out", to="hf")
    assert "pipeline" not in str(caught.value.hint)


def fused_source(tmp_path, gone):
    """A Phi 3 of torchtune, which Hugging Face fuses, with the moments of an optimizer."""
    shapes = tiny(FAMILIES["phi3"], "torchtune")
    state = {key: torch.randn(shape) for key, shape in shapes.items()}
    kept = {key: value for key, value in state.items() if key != gone}
    moments = {key: {"exp_avg": torch.ones_like(value)} for key, value in state.items()}
    source = tmp_path / "in.pt"
    save_torch(source, {"model": kept, "optimizer": {"state": moments}})
    return source


def test_allow_missing_skips_fused_tensor_with_missing_part(tmp_path):
    gone = "layers.0.attn.v_proj.weight"
    source = fused_source(tmp_path, gone)
    options: dict[str, Any] = {"model_type": "phi3", "to_layout": "hf"}
    sizes = {axis: FAMILIES["phi3"].tiny[axis] for axis in "hk"}
    with refused(source, tmp_path / "out", 4):
        ckptctl.convert(source, tmp_path / "out", to="hf", sizes=sizes, **options)
    options |= {"sizes": sizes, "allow_missing": True}
    result = ckptctl.convert(source, tmp_path / "out", to="hf", **options)
    fused = "model.layers.0.self_attn.qkv_proj.weight"
    names = {tensor.name for tensor in result.plan.output}
    assert fused not in names and fused.replace(".0.", ".1.") in names
    parts = {f"model.layers.0.attn.{part}_proj.weight" for part in "qkv"}
    assert result.plan.missing.keys() == parts
    for name in parts - {f"model.{gone}"}:
        why = result.plan.missing[name]
        assert fused in why and f"`{gone}`" in why
    plan = ckptctl.plan_conversion(source, tmp_path / "all.pt", to="torch", only="all", **options)
    lost = {f"optimizer.state.layers.0.attn.{part}_proj.weight.exp_avg" for part in "qkv"}
    assert plan.missing.keys() == parts | lost
    with refused(source, tmp_path / "other", 5):
        left = {**options, "exclude": "*layers.1.attn.v_proj*"}
        ckptctl.convert(source, tmp_path / "other", to="hf", **left)


@pytest.mark.parametrize("layout", ["hf", "hf-v5"])
def test_missing_tid2eid_is_found_through_deepseek_v4_config(layout, tmp_path):
    source = Golden.read("deepseek_v4").save(tmp_path / "source")
    ckptctl.convert(source, tmp_path / "whole", to="hf", to_layout=layout)
    state = load_file(tmp_path / "whole/model.safetensors")
    lost = next(name for name in state if name.endswith("tid2eid"))
    del state[lost]
    save_file(state, tmp_path / "whole/model.safetensors", {"format": "pt"})
    with pytest.raises(MissingTensorsError, match="the model is missing a tensor") as raised:
        ckptctl.convert(tmp_path / "whole", tmp_path / "never", to="hf")
    assert f"`{lost}`" in str(raised.value.why)


@pytest.mark.parametrize(
    ("name", "part"),
    [("qwen3_moe", ".experts.3."), ("qwen3_omni_moe", "codec_embedding.2|lm_head.2")],
)
def test_last_entry_missing_from_every_tensor_is_named(
    name: str, part: str, tmp_path: Path
) -> None:
    """An expert that no layer has, and a codebook that neither list has, as config.json states."""
    golden = Golden.read(name)
    source = golden.save(tmp_path / "source")
    assert ckptctl.verify(source, level="fast").exit_code == 0
    state = golden.state()
    lost = [key for key in state if any(one in key for one in part.split("|"))]
    for key in lost:
        del state[key]
    save_file(state, source / "model.safetensors", {"format": "pt"})
    assert ckptctl.verify(source, level="fast").exit_code == 4
    with pytest.raises(MissingTensorsError, match=f"missing {len(lost)} tensors") as caught:
        ckptctl.plan_conversion(source, tmp_path / "out", to="dcp")
    assert any(key in str(caught.value.why) for key in lost)
