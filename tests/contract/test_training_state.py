"""Training checkpoints: which part is the model, and how the rest follows it."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import _version
from torch.distributed.checkpoint.state_dict_loader import load as stock_load
from torch.distributed.checkpoint.state_dict_saver import save as stock_save

import ckptctl
from ckptctl.errors import MappingError, RefusedError
from ckptctl.formats import open_checkpoint
from tests.checkpoints import (
    differences,
    load_any_reference,
    rename,
    save_hf,
    save_torch,
    save_training_dcp,
    tiny_llama,
    to_interleaved,
    to_meta_names,
    training_state,
)
from tests.checkpoints.golden import Golden
from tests.checkpoints.readers import flatten
from tests.checkpoints.training import Style
from tests.contract.support import WRITABLE, message, place, read, refused
from tests.sweeps import one_in

STATE, CONFIG = tiny_llama("llama3", layers=1)
STYLES: tuple[Style, ...] = ("torchtitan", "prefixed")
OUTSIDE = {
    "torchtitan": ("optimizer.", "lr_scheduler.", "dataloader.", "train_state."),
    "prefixed": ("optim.", "step", "rng"),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("training")
    save_hf(folder / "assets", STATE, CONFIG)
    found = {style: save_training_dcp(folder / style, STATE, style) for style in STYLES}
    for style in STYLES:
        save_torch(folder / f"{style}.pt", training_state(STATE, style))
    return found | {f"{style}.pt": folder / f"{style}.pt" for style in STYLES}


def style_of(name: str) -> Style:
    return "prefixed" if name.startswith("prefixed") else "torchtitan"


CASES = (*STYLES, *(f"{style}.pt" for style in STYLES))


@pytest.mark.parametrize("target", one_in(4, WRITABLE))
@pytest.mark.parametrize("name", CASES)
def test_model_is_extracted_from_training_checkpoint(
    tmp_path: Path, sources: dict[str, Path], name: str, target: str
) -> None:
    out = place(tmp_path, target)
    assets = sources[name].parent / "assets"
    done = ckptctl.convert(
        sources[name], out, to=target, assets=None if target == "torch" else assets
    )
    assert not differences(read(out, CONFIG), STATE)
    assert done.plan.recognition.root == ("model." if style_of(name) == "prefixed" else "")
    left = done.plan.left_out
    everything = flatten(training_state(STATE, style_of(name)))
    assert {key for key in everything if key.startswith(OUTSIDE[style_of(name)])} <= set(left)
    assert not [key for key in left if key.removeprefix("model.") in STATE]


@pytest.mark.parametrize("target", ["dcp", "torch"])
@pytest.mark.parametrize("name", one_in(3, CASES))
def test_only_all_keeps_training_state(
    tmp_path: Path, sources: dict[str, Path], name: str, target: str
) -> None:
    out = place(tmp_path, target)
    done = ckptctl.convert(sources[name], out, to=target, only="all")
    assert not differences(load_any_reference(out), load_any_reference(sources[name]))
    assert not done.plan.left_out
    if target == "torch":
        nested = torch.load(out, weights_only=True)
        state = training_state(STATE, style_of(name))
        assert nested.keys() == state.keys()


@pytest.mark.parametrize("name", one_in(3, CASES))
@pytest.mark.parametrize("target", ["dcp", "torch"])
def test_optimizer_moments_follow_renamed_parameters(
    tmp_path: Path, sources: dict[str, Path], name: str, target: str
) -> None:
    out = place(tmp_path, target)
    ckptctl.convert(
        sources[name],
        out,
        to=target,
        only="all",
        to_layout="torchtitan@0.3",
        assets=sources[name].parent / "assets",
    )
    found = load_any_reference(out)
    state = training_state(STATE, style_of(name))
    prefix = "model." if style_of(name) == "prefixed" else ""
    expected = rename(to_meta_names(STATE, CONFIG), "meta", "torchtitan@0.3")
    assert not differences({key: found[prefix + key] for key in expected}, expected)
    moment = moments(state)
    new = dict(zip(STATE, rename(STATE, "hf", "torchtitan@0.3"), strict=True))
    assert len(moment) == 2 * len(STATE)
    head = "optim.state." if prefix else "optimizer.state."
    for (old, part), value in moment.items():
        heads = {"q_proj.weight": 4, "k_proj.weight": 2}.get(".".join(old.split(".")[-2:]))
        turned = to_interleaved(value, heads) if heads else value
        assert torch.equal(found[f"{head}{new[old]}.{part}"], turned), old
    assert not [key for key in found if "q_proj" in key]
    everything = flatten(state)
    assert len(found) == len(everything)
    assert "q_proj" not in repr([value for value in found.values() if isinstance(value, list)])
    if not prefix:
        for old, key in new.items():
            rate = found[f"optimizer.param_groups.{key}.lr"]
            assert rate == everything[f"optimizer.param_groups.{old}.lr"]


def moments(state: dict[str, Any]) -> dict[tuple[str, str], torch.Tensor]:
    flat = flatten(state)
    found = {}
    for key, value in flat.items():
        name, _, part = key.partition(".state.")[2].rpartition(".")
        if part in ("exp_avg", "exp_avg_sq"):
            found[name, part] = value
    return found


def test_numbered_optimizer_state_is_refused_for_layout_change(
    tmp_path: Path, sources: dict[str, Path]
) -> None:
    """``optimizer.state_dict()`` numbers its parameters."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    state = {"model": dict(STATE), "optimizer": optimizer.state_dict(), "step": 3}
    source = save_torch(tmp_path / "source.pt", state)
    ckptctl.convert(source, tmp_path / "same.pt", to="torch", only="all")
    assert not differences(load_any_reference(tmp_path / "same.pt"), load_any_reference(source))
    assets = sources["prefixed"].parent / "assets"
    options: dict[str, Any] = {"to_layout": "torchtune", "assets": assets, "only": "all"}
    with refused(source, tmp_path / "out", 6) as caught:
        ckptctl.convert(source, tmp_path / "out", to="dcp", **options)
    assert "optimizer.state.0.exp_avg" in message(caught.value)


def test_layout_change_without_head_count_is_refused(
    tmp_path: Path, sources: dict[str, Path]
) -> None:
    with refused(sources["torchtitan"], tmp_path / "out", 5) as caught:
        ckptctl.convert(
            sources["torchtitan"], tmp_path / "out", to="dcp", to_layout="torchtune", only="all"
        )
    assert "config.json" in message(caught.value) or "model" in message(caught.value)


@pytest.mark.parametrize("target", ["hf", "meta"])
def test_only_all_to_hf_or_meta_is_refused(
    tmp_path: Path, sources: dict[str, Path], target: str
) -> None:
    with refused(sources["prefixed"], tmp_path / "out", 2):
        ckptctl.convert(sources["prefixed"], tmp_path / "out", to=target, only="all")


def test_root_selects_model_or_ema(tmp_path: Path) -> None:
    ema = {name: value + 1 for name, value in STATE.items()}
    source = save_torch(
        tmp_path / "s.pt", {"model": dict(STATE), "ema": {"shadow": ema}, "step": 1}
    )
    ckptctl.convert(source, tmp_path / "model", to="hf")
    assert not differences(load_any_reference(tmp_path / "model"), STATE)
    ckptctl.convert(source, tmp_path / "ema", to="hf", root="ema.shadow")
    assert not differences(load_any_reference(tmp_path / "ema"), ema)
    with refused(source, tmp_path / "out", 2) as caught:
        ckptctl.convert(source, tmp_path / "out", to="hf", root="modle")
    assert "root='model'" in message(caught.value)


def test_convert_notes_skipped_training_state(tmp_path: Path, sources: dict[str, Path]) -> None:
    from typer.testing import CliRunner

    from ckptctl.cli.app import app

    arguments = ["convert", str(sources["prefixed"]), str(tmp_path / "out"), "--to", "hf"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "model under `model`" in result.stderr
    kept = "pass `--to dcp --only all`, or consolidate's `--optimizer`, to keep it"
    said = f"note: skipped, not part of the model ({kept}): 50 names under `optim`, `rng`, `step`"
    assert said in result.stderr


@pytest.mark.parametrize("key", ["model", "state_dict", "model_state_dict", "module"])
def test_torch_file_with_model_under_known_key_converts(tmp_path: Path, key: str) -> None:
    source = save_torch(tmp_path / "source.pt", STATE, key=key)
    done = ckptctl.convert(source, tmp_path / "out", to="hf")
    assert not differences(load_any_reference(tmp_path / "out"), STATE)
    assert done.plan.recognition.root == f"{key}."
    assert "epoch" in done.plan.left_out


def test_compile_and_ddp_prefixes_are_removed(tmp_path: Path) -> None:
    """``torch.compile`` and DDP put their own prefix before every name."""
    for prefix in ("_orig_mod.", "module."):
        wrapped = {prefix + name: value for name, value in STATE.items()}
        source = save_torch(tmp_path / f"{prefix}pt", wrapped)
        ckptctl.convert(source, tmp_path / f"out{prefix}", to="hf")
        assert not differences(load_any_reference(tmp_path / f"out{prefix}"), STATE)


def test_integer_keys_become_strings_with_note(tmp_path):
    torch.save({"model": {"w": torch.ones(1)}, "optimizer": {0: torch.ones(1)}}, tmp_path / "in.pt")
    result = ckptctl.convert(tmp_path / "in.pt", tmp_path / "out", to="dcp", only="all")
    assert any("integer keys" in note for note in result.plan.notes)


def test_optimizer_only_checkpoint_converts_only_with_all(tmp_path: Path, data: Path) -> None:
    source = data / "wrappers/accelerate_dcp/ckpt/optimizer_0"
    done = ckptctl.convert(source, tmp_path / "all.pt", to="torch", only="all")
    assert done.plan.tensors == len(open_checkpoint(source).tensors)
    with pytest.raises(MappingError, match="no tensors to convert") as caught:
        ckptctl.convert(source, tmp_path / "model", to="hf")
    assert caught.value.hint and "only='all'" in caught.value.hint


def test_zero_padded_moments_load_as_converted(tmp_path: Path) -> None:
    """Embeddings of tiles are rows for each aspect ratio in one layout and a grid in another."""
    golden = Golden.read("llama3_vision")
    model = golden.state()
    folder = golden.save(tmp_path / "model")
    steps = {
        name: {"exp_avg": torch.full(value.shape, number + 1, dtype=value.dtype)}
        for number, (name, value) in enumerate(model.items())
    }
    source = save_torch(folder / "in.pt", {"model": model, "optimizer": {"state": steps}})
    converted = folder / "meta.pt"
    ckptctl.convert(source, converted, to="torch", to_layout="meta", only="all")
    expected = torch.load(converted)
    moments = expected["optimizer"]["state"]
    tiles = [name for name in moments if name.endswith("tile_pos_embed.embedding")]
    assert tiles and all((moments[name]["exp_avg"] == 0).any() for name in tiles)
    state = {
        part: {key: torch.full_like(value, 7) for key, value in flatten(expected[part]).items()}
        for part in ("model", "optimizer")
    }
    ckptctl.load(state, source)
    for part, values in state.items():
        assert not differences(values, flatten(expected[part]))
    assert ckptctl.diff(converted, source).same


def test_tensors_with_same_target_name_are_refused(tmp_path: Path) -> None:
    """Averages of parameters are there under the names of both layouts."""
    meta = to_meta_names(STATE, CONFIG)
    averages = {**STATE, **{name: value.to(torch.uint8) for name, value in meta.items()}}
    save_hf(tmp_path / "assets", STATE, CONFIG)
    source = save_torch(tmp_path / "in.pt", {"model": dict(STATE), "ema": averages})
    with pytest.raises(RefusedError, match="two tensors would have the same name"):
        ckptctl.convert(
            source,
            tmp_path / "out.pt",
            to="torch",
            to_layout="meta",
            only="all",
            assets=tmp_path / "assets",
        )
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("torch_version", ["2_3", None])
@pytest.mark.parametrize("merged", ["gate_proj", "up_proj"])
def test_merged_parameters_of_different_groups_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, merged: str, torch_version: str | None
) -> None:
    """torch refuses an optimizer with a parameter in two groups.

    torch 2.3 and earlier save all groups as a single value.
    """
    monkeypatch.setattr(_version, "_derived_version", torch_version)
    golden = Golden.read("qwen3.tied")
    model = {name: value.float() for name, value in golden.state().items()}

    def convert(grouped: list[str]) -> Any:
        folder = tmp_path / f"model-{len(grouped)}"
        groups = [grouped, [name for name in model if name not in grouped]]
        settings = [{"lr": 0.1 * n, "params": names} for n, names in enumerate(groups)]
        state = {name: {"exp_avg": value} for name, value in model.items()}
        optimizer = {"state": state, "param_groups": settings}
        stock_save({"model": model, "optimizer": optimizer}, checkpoint_id=folder, no_dist=True)
        (folder / "config.json").write_text(json.dumps(golden.config))
        out = tmp_path / "out.pt"
        ckptctl.convert(folder, out, to="torch", to_layout="mcore", only="all")
        return torch.load(out, weights_only=True)["optimizer"]["param_groups"]

    with pytest.raises(RefusedError, match="different parameter groups") as caught:
        convert([name for name in model if merged in name])
    assert all(name in str(caught.value.why) for name in ("gate_proj", "up_proj", "linear_fc1"))
    groups = convert([name for name in model if "gate_proj" in name or "up_proj" in name])
    assert len(groups[0]["params"]) == len([name for name in model if "up_proj" in name])
    assert all("linear_fc1" in name for name in groups[0]["params"])
    assert not set(groups[0]["params"]) & set(groups[1]["params"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_different_steps_of_merged_parameters_have_no_adapter_hint(tmp_path: Path) -> None:
    golden = Golden.read("qwen3.tied")
    model = {name: value.float() for name, value in golden.state().items()}
    folder = tmp_path / "model"
    state = {
        name: {"step": torch.tensor(float(n)), "exp_avg": value}
        for n, (name, value) in enumerate(model.items())
    }
    saved = {"model": model, "optimizer": {"state": state}}
    stock_save(saved, checkpoint_id=folder, no_dist=True)
    (folder / "config.json").write_text(json.dumps(golden.config))
    with pytest.raises(MappingError, match="have different values") as caught:
        ckptctl.convert(
            folder,
            tmp_path / "out.pt",
            to="torch",
            to_layout="mcore",
            only="all",
        )
    assert "canonical" not in str(caught.value.hint)


def to_meta(tmp_path: Path, state: dict[str, object]) -> Any:
    """Convert a torch file with a model and *state* to the layout `meta`."""
    save_hf(tmp_path / "assets", STATE, CONFIG)
    source = save_torch(tmp_path / "in.pt", {"model": dict(STATE), **state})
    options: Any = {"to_layout": "meta", "only": "all", "assets": tmp_path / "assets"}
    ckptctl.convert(source, tmp_path / "out.pt", to="torch", **options)
    return torch.load(tmp_path / "out.pt", weights_only=False)


def test_lists_without_parameter_names_keep_repeated_items(tmp_path: Path) -> None:
    values: dict[str, object] = {"types": ["full", "full"], "order": OrderedDict(a=["x", "y", "x"])}
    found = to_meta(tmp_path, values)
    assert {key: found[key] for key in values} == values
    assert type(found["order"]) is dict  # as any dictionary between leaves


@pytest.mark.parametrize("prefix", ["", "model.", "module.", "_orig_mod."])
def test_parameter_names_in_values_follow_the_layout(tmp_path: Path, prefix: str) -> None:
    name, renamed = "model.norm.weight", f"{prefix}norm.weight"
    values = {
        "params": [prefix + name],
        "decay": [(prefix + name, 0.1), None],
        "by_number": {0: prefix + name},
        "names": (prefix + name,),
        "text": "the weight model.norm.weight is frozen",
    }
    found = to_meta(tmp_path, {"settings": values})["settings"]
    assert found == {
        "params": [renamed],
        "decay": [(renamed, 0.1), None],
        "by_number": {0: renamed},
        "names": (renamed,),
        "text": values["text"],
    }


@pytest.mark.parametrize(
    "state",
    [
        {"state": {0: {"exp_avg": torch.zeros(3)}}},
        {"adam": {0: {"exp_avg": torch.zeros(3)}}},
        {"trainer": {"optimizer": {0: {"momentum_buffer": torch.zeros(3)}}}},
        {"ema": {"shadow_params": [value.clone() for value in STATE.values()]}},
        {"lion": {0: {"m": next(iter(STATE.values())).clone()}}},
    ],
    ids=["state", "adam", "nested", "ema", "lion"],
)
def test_state_of_numbered_parameters_is_refused(tmp_path: Path, state: Any) -> None:
    with pytest.raises(RefusedError, match="cannot map optimizer state to its parameter"):
        to_meta(tmp_path, state)


def test_second_model_with_other_names_is_copied(tmp_path: Path) -> None:
    teacher = {f"layers.{n}.attention.out": value for n, value in enumerate(STATE.values())}
    assert not differences(to_meta(tmp_path, {"teacher": teacher})["teacher"], teacher)


def test_nested_state_stays_nested(tmp_path: Path) -> None:
    nested: dict[str, Any] = {}
    for name, value in STATE.items():
        node = nested
        for part in name.split(".")[:-1]:
            node = node.setdefault(part, {})
        node[name.rpartition(".")[2]] = value.clone()
    found = to_meta(tmp_path, {"optimizer": {"m": nested}})
    assert list(found) == ["model", "optimizer"]
    assert not differences(flatten(found["optimizer"]["m"]), found["model"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_equal_nan_settings_of_merged_parameters_are_equal(tmp_path: Path) -> None:
    golden = Golden.read("qwen3.tied")
    model = {name: value.float() for name, value in golden.state().items()}
    state = {name: {"exp_avg": value, "loss": math.nan} for name, value in model.items()}
    source = save_torch(tmp_path / "in.pt", {"model": model, "optimizer": {"state": state}})
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "config.json").write_text(json.dumps(golden.config))
    options: Any = {"to_layout": "mcore", "only": "all", "assets": tmp_path / "assets"}
    ckptctl.convert(source, tmp_path / "out.pt", to="torch", **options)
    found = torch.load(tmp_path / "out.pt", weights_only=True)["optimizer"]["state"]
    assert all(math.isnan(values["loss"]) for values in found.values())


def test_items_of_lists_keep_their_positions(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "loaders": [{}, {"step": torch.ones(1)}], "t": [1, {"a": 2}]}
    source = save_torch(tmp_path / "in.pt", state)
    ckptctl.convert(source, tmp_path / "out.pt", to="torch", only="all", exclude=["loaders.0"])
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert found["loaders"] == {1: {"step": torch.ones(1)}} and found["t"] == [1, {"a": 2}]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dictionaries_with_other_keys_load_as_stock_dcp_saves_them(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "w": torch.ones(2),
        "schedule": {"milestones": Counter({30: 1, 80: 2}), "x": 2},
        "odd": {1.5: 2, None: 3, (1, 2): {"q": 1}},
    }
    source = save_torch(tmp_path / "in.pt", state)
    plan = ckptctl.convert(source, tmp_path / "out", to="dcp", only="all").plan
    assert "DCP stores the keys of these as strings: `odd`, `schedule.milestones`" in plan.notes
    stock_save(state, checkpoint_id=tmp_path / "stock", no_dist=True)
    loaded = []
    for folder in ("out", "stock"):
        found = {
            "w": torch.zeros(2),
            "schedule": {"milestones": {"30": 0, "80": 0}, "x": 0},
            "odd": {"1.5": 0, "None": 0, "(1, 2)": {"q": 0}},
        }
        stock_load(found, checkpoint_id=tmp_path / folder, no_dist=True)
        loaded.append(flatten(found))
    assert not differences(*loaded)
    assert ckptctl.diff(source, tmp_path / "out").same


@pytest.mark.parametrize(
    ("options", "kept"),
    [({"include": ["model.*"]}, "model"), ({"exclude": ["model.*"]}, "step"), ({}, "both")],
    ids=["include", "exclude", "neither"],
)
def test_globs_apply_to_full_names_of_training_state(
    tmp_path: Path, options: Any, kept: str
) -> None:
    source = save_torch(tmp_path / "in.pt", {"model": dict(STATE), "step": torch.ones(2)})
    ckptctl.convert(source, tmp_path / "out.pt", to="torch", only="all", **options)
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert list(found) == (["model", "step"] if kept == "both" else [kept])
