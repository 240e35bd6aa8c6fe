"""A model of any family, nested in what trainers put around it, is found and stated, or named."""

import itertools
from pathlib import Path

import pytest
import torch

import ckptctl
from ckptctl.catalog import Box, Catalog, Extent, TensorEntry
from ckptctl.conversion.recognition.model import ModelRequest, recognize_model
from ckptctl.conversion.recognition.roots import strip_wrappers
from ckptctl.errors import MappingError, UsageError
from tests.checkpoints import save_torch, tiny_llama
from tests.contract.tables import ALL, FAMILIES, tiny
from tests.sweeps import one_in

WRAPPERS = (
    ((), "model.module."),
    (("state_dict",), "_orig_mod."),
    (("state_dict",), "net."),
    (("model",), "_orig_mod.module."),
    (("state", "model"), "module."),
    (("state_dict",), "model."),
    (("app", "model"), ""),
    (("dcp", "model"), ""),
    ((), "policy."),
    (("checkpoint",), "actor.module."),
)
"""Keys of the dictionaries around a model, and what stands before each of its names in them."""


def nested(shapes, head=(), prefix="", format="torch"):
    """A checkpoint of tensors of *shapes*, beside an optimizer's."""
    tensors = {}
    for key, shape in {**shapes, None: (2, 2)}.items():
        path = ("optimizer", "exp_avg") if key is None else (*head, prefix + key)
        name = ".".join(path)
        extent = Extent(Box.whole(shape), "data", 0, 0)
        tensors[name] = TensorEntry(name, "float32", shape, (extent,), path)
    return Catalog(Path("/"), Path("/a.pt"), format, {"data": 0}, tensors)


def found(catalog, **named):
    known = recognize_model(catalog, request=ModelRequest(**named))
    return known.root, known.candidates, known.layout, known.exact


@pytest.mark.parametrize(("name", "layout"), one_in(5, ALL))
def test_nested_model_is_recognized_like_top_level_model(name, layout):
    shapes = tiny(FAMILIES[name], layout)
    top, *rest = found(nested(shapes), model_type=name)
    start = ALL.index((name, layout)) % len(WRAPPERS)
    for head, prefix in itertools.islice(itertools.cycle(WRAPPERS), start, start + 3):
        root = "".join(f"{key}." for key in head) + prefix
        assert found(nested(shapes, head, prefix), model_type=name) == (root + top, *rest)


@pytest.mark.parametrize(("head", "prefix"), one_in(4, WRAPPERS))
def test_nested_llama_is_recognized_without_model_type(head, prefix):
    for layout in ("hf", "meta", "torchtune"):
        shapes = tiny(FAMILIES["llama3"], layout)
        top, *rest = found(nested(shapes))
        root = "".join(f"{key}." for key in head) + prefix
        assert found(nested(shapes, head, prefix)) == (root + top, *rest)


@pytest.mark.parametrize("word", ["_orig_mod", "_checkpoint_wrapped_module"])
def test_layer_wrapper_prefixes_are_removed_from_names(word):
    shapes = tiny(FAMILIES["qwen3"], "hf")
    named = {key.replace(".mlp.", f".{word}.mlp."): shape for key, shape in shapes.items()}
    catalog = strip_wrappers(nested(named, ("state_dict",), "_orig_mod."))
    assert catalog.tensors.keys() == nested(shapes, ("state_dict",), "_orig_mod.").tensors.keys()
    assert any(word in note for note in catalog.notes)


def test_names_colliding_without_wrapper_prefix_stay_unchanged():
    catalog = nested({"layers.0.w": (1,), "layers.0._orig_mod.w": (1,)})
    assert strip_wrappers(catalog) is catalog


def saved(tmp_path, content):
    path = tmp_path / "in.pt"
    save_torch(path, content)
    return path


def prefixed(prefix, state):
    return {prefix + name: tensor for name, tensor in state.items()}


@pytest.mark.parametrize(("head", "prefix"), one_in(5, WRAPPERS))
@pytest.mark.parametrize("only", ["model", "all"])
def test_nested_model_is_written_unwrapped_or_unchanged(tmp_path, head, prefix, only):
    state, _ = tiny_llama("llama3")
    content = prefixed(prefix, state)
    for key in reversed(head):
        content = {key: content}
    content["optimizer"] = {"step": torch.ones(1)}
    result = ckptctl.convert(saved(tmp_path, content), tmp_path / "out.pt", to="torch", only=only)
    written = torch.load(tmp_path / "out.pt", weights_only=True)
    expected = state if only == "model" else content
    torch.testing.assert_close(written, expected, rtol=0, atol=0)
    assert f"model under `{'.'.join((*head, prefix)).strip('.')}`" in result.plan.statement


def test_partial_root_is_refused_with_full_root_hint(tmp_path):
    state, _ = tiny_llama("llama3")
    source = saved(tmp_path, {"state_dict": prefixed("net.", state), "step": torch.ones(1)})
    for root in ("net", "net.layers.0", "model.norm"):
        with pytest.raises(UsageError) as caught:
            ckptctl.plan_conversion(source, tmp_path / "out", to="hf", root=root)
        hint = {"net": "state_dict.net", "model.norm": "state_dict.net.model.norm"}.get(root)
        assert hint is None or f"`root={hint!r}`" in caught.value.hint


def test_student_and_teacher_require_explicit_root(tmp_path):
    state, _ = tiny_llama("llama3")
    source = saved(tmp_path, {**prefixed("student.", state), **prefixed("teacher.", state)})
    with pytest.raises(MappingError, match="contains 2 models") as caught:
        ckptctl.plan_conversion(source, tmp_path / "out", to="hf")
    assert "`student`" in caught.value.why and "`teacher`" in caught.value.why
    assert "root='student'" in caught.value.hint
    one = ckptctl.plan_conversion(source, tmp_path / "out", to="hf", root="teacher")
    assert {tensor.name for tensor in one.output} == state.keys()
    both = ckptctl.plan_conversion(source, tmp_path / "out", to="hf", root=".")
    assert len(both.output) == 2 * len(state)
    everything = ckptctl.plan_conversion(source, tmp_path / "out", to="dcp", only="all")
    assert len(everything.output) == 2 * len(state)
    shown = ckptctl.inspect(source)
    assert shown.model_type is None
    assert any("`student`" in note and "`teacher`" in note for note in shown.notes)


@pytest.mark.parametrize("named", [None, "llama3"])
def test_unrecognized_nested_model_is_warned_with_root_hint(tmp_path, named):
    state, _ = tiny_llama("llama3")
    source = saved(tmp_path, {**prefixed("student.", state), "loss.weight": torch.ones(2)})
    plan = ckptctl.plan_conversion(source, tmp_path / "out", to="hf", model_type=named)
    assert len(plan.warnings) == 1 and "`root='student'`" in plan.warnings[0]
    with pytest.raises(MappingError) as caught:
        ckptctl.plan_conversion(source, tmp_path / "out", to="meta", model_type=named)
    assert "root='student'" in caught.value.hint
