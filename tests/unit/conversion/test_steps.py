"""Steps of a conversion: which options ask for them, their order, those of packages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptctl.catalog import ComputedTensor, build_computed_name
from ckptctl.conversion import steps
from ckptctl.conversion.conversion_options import ConversionOptions
from ckptctl.conversion.convert import plan_with_steps, run_conversion
from ckptctl.conversion.draft import Draft
from ckptctl.conversion.steps import BUILT_IN, Step, select_steps
from ckptctl.errors import MappingError, UsageError
from ckptctl.options import list_options


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save_file({"a": torch.ones(2), "b": torch.zeros(3)}, tmp_path / "in.safetensors")
    return tmp_path / "in.safetensors"


def names(options: ConversionOptions) -> list[str]:
    return [step.name for step in select_steps(options) if step.option]


def test_options_request_their_steps() -> None:
    assert names(ConversionOptions(to="hf")) == []
    assert names(ConversionOptions(to="hf", dequantize="bf16")) == ["dequantize"]
    assert names(ConversionOptions(to="peft", experts="apart")) == ["experts"]
    assert names(ConversionOptions(to="peft", experts="stacked")) == ["experts", "stacks"]
    both = ConversionOptions(to="hf", quantize="fp8-block", fill_from="base")
    assert names(both) == ["fill", "quantize"]


@pytest.mark.parametrize("step", BUILT_IN, ids=[step.name for step in BUILT_IN])
def test_built_in_steps_name_existing_option_and_function(step: Step) -> None:
    fields = {one.name for one in list_options(ConversionOptions)}
    assert step.option.partition("=")[0] in {"", *fields}
    places = dict(zip(step.apply.__code__.co_freevars, step.apply.__closure__ or (), strict=True))
    module, _, function = places["target"].cell_contents.partition(":")
    assert callable(getattr(import_module(f"ckptctl.{module}"), function))


def test_steps_run_by_place_and_order(source: Path, tmp_path: Path) -> None:
    seen: list[str] = []

    def step(name: str, place: steps.Place, order: int) -> Step:
        def apply(draft: Draft) -> Draft:
            known = draft.model.selection.tensors if draft.model.root == "" else {}
            seen.append(f"{name}: {len(known)} tensors, {len(draft.tensors)} laid out")
            return draft

        return Step(name, place, order, apply)

    more = [step("last", "output", 1), step("third", "model", 2), step("second", "model", 1)]
    options = ConversionOptions(to="hf")
    plan_with_steps(source, tmp_path / "out", options, *more, step("first", "source", 9))
    assert [one.partition(":")[0] for one in seen] == ["first", "second", "third", "last"]
    assert seen[-1].endswith("2 laid out") and seen[0].endswith("0 laid out")


def test_tensors_returned_by_step_are_written(source: Path, tmp_path: Path) -> None:
    def zero(draft: Draft) -> Draft:
        entry = draft.catalog.tensors["a"]
        made = ComputedTensor("constant", entry.dtype, entry.shape)
        name = build_computed_name("zeros")
        tensors = {**draft.catalog.tensors, "a": replace(entry, extents=(made.to_extent(name),))}
        draft.notes.add("a is zero now")
        catalog = replace(draft.catalog, tensors=tensors, computed={name: made})
        return draft.with_catalog(catalog)

    out = tmp_path / "out"
    plan = plan_with_steps(source, out, ConversionOptions(to="hf"), Step("zero", "model", 1, zero))
    run_conversion(plan)
    assert torch.equal(load_file(out / "model.safetensors")["a"], torch.zeros(2))
    assert plan.notes[0] == "a is zero now"


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    group = "ckptctl.steps"
    found = {
        "gone": EntryPoint("gone", "nothing.at.all:STEP", group),
        "other": EntryPoint("other", "ckptctl.conversion.steps:BUILT_IN", group),
    }
    monkeypatch.setattr("ckptctl.installed.find_entry_points", lambda _: found)
    for cached in (steps.find_step_entry_points, steps.load_added_step):
        cached.cache_clear()
    yield
    for cached in (steps.find_step_entry_points, steps.load_added_step):
        cached.cache_clear()


@pytest.mark.usefixtures("added")
@pytest.mark.parametrize(
    ("name", "why"), [("gone", "No module named 'nothing'"), ("other", "not a Step named `other`")]
)
def test_step_that_cannot_be_loaded_is_an_error(name: str, why: str) -> None:
    with pytest.raises(UsageError, match=f"cannot load step `{name}`") as caught:
        select_steps(ConversionOptions(to="hf", step=[name]))
    assert why in str(caught.value.why)
    assert caught.value.where == {"gone": "nothing.at.all", "other": steps.__name__}[name]


@pytest.mark.usefixtures("added")
def test_unknown_step_is_an_error() -> None:
    with pytest.raises(UsageError, match="unknown step `nothing`") as caught:
        ConversionOptions(to="hf", step=("nothing=3",))
    assert caught.value.why == "known: gone, other"


@pytest.mark.usefixtures("added")
def test_repeated_step_is_an_error() -> None:
    with pytest.raises(UsageError, match="step `gone` is given twice"):
        ConversionOptions(to="hf", step=("gone", "gone=1"))


def test_step_receives_its_argument(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def note(draft: Draft) -> Draft:
        said.extend(draft.argument_of(name) for name in ("mine", "other", "none"))
        return draft

    step = Step("mine", "source", 1, note)
    monkeypatch.setattr("ckptctl.installed.find_entry_points", lambda _: {"mine": 1, "other": 2})
    monkeypatch.setattr(steps, "load_added_step", lambda name: replace(step, name=name))
    options = ConversionOptions(to="hf", step=("mine=a=b", "other"))
    plan_with_steps(source, tmp_path / "out", options)
    assert said == ["a=b", "", ""] * 2


def test_step_at_output_may_not_drop_tensors(source: Path, tmp_path: Path) -> None:
    def drop(draft: Draft) -> Draft:
        return replace(draft, tensors=draft.tensors[1:])

    step = Step("drop", "output", 50, drop)
    with pytest.raises(MappingError, match="step `drop` drops 1 tensor") as caught:
        plan_with_steps(source, tmp_path / "out", ConversionOptions(to="hf"), step)
    assert caught.value.where == "`a`"
