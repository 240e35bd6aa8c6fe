"""Megatron's legacy format: what its ranks saved, damaged in every way, and contradictory."""

from __future__ import annotations

import json
import math
import os
import shutil
from argparse import Namespace
from collections.abc import Iterator, Mapping
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import ckptctl
from ckptctl import formats
from ckptctl.errors import (
    CkptError,
    DamagedError,
    FormatError,
    MappingError,
    UnsupportedError,
    UsageError,
)
from ckptctl.formats.base import ReadOptions
from ckptctl.formats.megatron.rules import DivisionRule, divide_tensor
from tests.checkpoints.golden import Golden
from tests.checkpoints.readers import differences
from tests.sweeps import one_in
from tests.unit.formats.damage import converted

RULES = "megatron-core"
SAMPLES = ("tp2_pp2_vp2", "tp2_ep2")
SAVE = "iter_0000010"
FILE = "model_optim_rng.pt"


def sample(data: Path, name: str) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = data / "megatron" / name
    return folder / "ckpt", load_file(folder / "expected.safetensors")


def bare(found: Mapping[str, object]) -> dict[str, object]:
    return {key.removeprefix("model."): value for key, value in found.items()}


@pytest.mark.parametrize("name", SAMPLES)
def test_megatron_samples_match_reference(data: Path, tmp_path: Path, name: str) -> None:
    source, expected = sample(data, name)
    for path in (source, source / SAVE):
        assert not differences(bare(converted(path, tmp_path, rules=RULES)), expected)
        assert list(formats.sniff_formats(path)) == ["megatron"]


def test_non_model_state_is_read_or_noted(data: Path) -> None:
    source, _ = sample(data, "tp2_ep2")
    found = formats.open_checkpoint(source, options=ReadOptions(rules=Path(RULES)))
    assert found.blobs["iteration"].value == 10
    assert found.blobs["opt_param_scheduler.num_steps"].value == 80
    assert not any(name.startswith(("optimizer", "rng_state")) for name in found.tensors)
    assert [note.partition(":")[0].partition(" (")[0] for note in found.notes] == [
        "skipped `optimizer`",
        "skipped `rng_state`",
        "copies on several ranks have equal recorded checksums",
        "objects of unknown classes can be read but not written",
    ]


def test_verify_and_inspect_accept_rules(data: Path) -> None:
    source, expected = sample(data, "tp2_ep2")
    assert ckptctl.verify(source, level="full", rules=RULES).verdict == "complete"
    found = ckptctl.inspect(source, rules=RULES)
    assert found.verdict == "complete"
    assert {entry.name.removeprefix("model.") for entry in found.tensors} == expected.keys()


def test_missing_rules_is_a_mapping_error_with_hint(data: Path) -> None:
    source, _ = sample(data, "tp2_ep2")
    with pytest.raises(MappingError) as caught:
        formats.open_checkpoint(source)
    assert "pass `--rules megatron-core`, which has a rule" in str(caught.value.hint)


# ---------------------------------------------------------------------------------------- damage


def damages(source: Path, scratch: Path) -> Iterator[tuple[str, Path]]:
    names = sorted(item.name for item in (source / SAVE).iterdir())
    copy = scratch / "copy"
    content = {name: (source / SAVE / name / FILE).read_bytes() for name in names}
    changes: list[tuple[str, dict[str, bytes | None]]] = []
    for name, data in content.items():
        changes += [(f"{name} missing", {name: None})]
        changes += [(f"{name} cut to {n}", {name: data[:n]}) for n in (0, 1, 5000, len(data) - 1)]
        flips = range(70, len(data), len(data) // 7)
        changes += [
            (f"{name} flipped at {at}", {name: data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]})
            for at in flips
        ]
    for one, other in permutations(names, 2):
        changes.append((f"{one} is {other}", {one: content[other]}))
        changes.append((f"{one} <-> {other}", {one: content[other], other: content[one]}))
    for what, files in changes:
        shutil.copytree(source, copy)
        for name, changed in files.items():
            (copy / SAVE / name / FILE).unlink()
            if changed is not None:
                (copy / SAVE / name / FILE).write_bytes(changed)
        yield what, copy
        shutil.rmtree(copy)


@pytest.mark.slow
@pytest.mark.parametrize("name", one_in(2, SAMPLES))
def test_damaged_rank_files_are_refused_or_harmless(data: Path, tmp_path: Path, name: str) -> None:
    source, expected = sample(data, name)
    for what, copy in damages(source, tmp_path):
        try:
            found = converted(copy, tmp_path, rules=RULES)
        except CkptError as error:
            assert error.exit_code in (3, 4, 9), (what, error.to_json())
            assert "mp_rank_" in f"{error.what} {error.where} {error.why}", (what, error.to_json())
        else:
            assert "flipped" in what, what
            assert not differences(bare(found), expected), what


@pytest.mark.parametrize("name", SAMPLES)
def test_missing_rank_file_loses_only_its_tensors(data: Path, tmp_path: Path, name: str) -> None:
    source, expected = sample(data, name)
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    gone = f"{SAVE}/mp_rank_01_001/{FILE}"
    (copy / gone).unlink()
    catalog = formats.open_checkpoint(copy, options=ReadOptions(rules=Path(RULES), partial=True))
    assert [one.file for one in catalog.findings] == [gone]
    assert {file for boxes in catalog.lost.values() for _, file in boxes} == {gone}
    found = bare(converted(copy, tmp_path, rules=RULES, allow_missing=True))
    assert found.keys() == expected.keys() - {key.removeprefix("model.") for key in catalog.lost}
    assert found
    assert not differences(found, {key: expected[key] for key in found})
    assert ckptctl.verify(copy, rules=RULES).verdict != "complete"


# --------------------------------------------------------------------------------- made here


def save(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> Path:
    """Write what *files* say into folders of ranks of one save."""
    for name, content in files.items():
        target = folder / SAVE / name
        target.mkdir(parents=True)
        torch.save(dict(content), target / FILE)
    (folder / "latest_checkpointed_iteration.txt").write_text("10\n")
    return folder


def content(model: object, **arguments: object) -> dict[str, Any]:
    return {"args": Namespace(**arguments), "iteration": 10, "checkpoint_version": 3.0} | {
        "model": model
    }


def two(tmp_path: Path, *models: object, **arguments: object) -> Path:
    """Write a checkpoint of two tensor-parallel ranks."""
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1, **arguments}
    files = {f"mp_rank_0{n}": content(model, **sizes) for n, model in enumerate(models)}
    return save(tmp_path / "source", files)


def rules_file(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "rules.toml"
    file.write_text(text)
    return file


def test_single_rank_converts_without_rules(tmp_path: Path) -> None:
    weight = torch.randn(3, 2)
    model = {"language_model": {"encoder": {"layers.0.w": weight}, "n": torch.ones(2)}}
    source = save(tmp_path / "source", {"mp_rank_00": content(model)})
    found = converted(source, tmp_path)
    assert not differences(
        found,
        {
            "language_model.encoder.layers.0.w": weight,
            "language_model.n": torch.ones(2),
        },
    )


def test_custom_rules_join_parts_along_any_dimension(tmp_path: Path) -> None:
    """Parts of different lengths that are divided each by itself, along any dimension."""
    whole = torch.arange(60.0).reshape(2, 15, 2)[:, :14]
    heads, rest = whole[:, :6], whole[:, 6:]
    models = [
        {"mix": torch.cat([heads[:, 3 * n : 3 * n + 3], rest[:, 4 * n : 4 * n + 4]], 1).clone(),
         "flat": whole[:1].clone(), "same": torch.ones(2)}
        for n in range(2)
    ]  # fmt: skip
    text = """
    [[rule]]
    names = ["mix"]
    dim = 1
    parts = [3, 4]
    size = "mixed"
    [[rule]]
    names = ["f*", "same"]
    replicated = true
    """
    source = two(tmp_path, *models, mixed=14)
    found = converted(source, tmp_path, rules=rules_file(tmp_path, text))
    assert not differences(found, {"mix": whole, "flat": whole[:1], "same": torch.ones(2)})


@pytest.mark.parametrize(
    ("text", "arguments", "error", "said"),
    [
        ("", {}, MappingError, "`a.w [2, 4]`, `layers.*.b [3]`"),
        ('[[rule]]\nnames=["*.w"]\ndim=0\n', {}, MappingError, "`layers.*.b [3]`"),
        ('[[rule]]\nnames=["*"]\ndim=1\n', {}, MappingError, "divides dimension 1"),
        ('[[rule]]\nnames=["*"]\ndim=0\nparts=2\n', {}, MappingError, "cannot be divided into 2"),
        ('[[rule]]\nnames=["*"]\ndim=0\nparts=[1,2]\n', {}, MappingError, "do not add up to 2"),
        ('[[rule]]\nnames=["*"]\ndim=0\nparts="gated"\n', {}, MappingError, "is gated"),
        ('[[rule]]\nnames=["*"]\ndim=0\nsize="v"\n', {"v": 5}, UnsupportedError, "adds up to 4"),
        ('[[rule]]\nnames=["*"]\nreplicated=true\n', {}, UnsupportedError, "differs between"),
        (
            '[layers]\n"layers"="n"\n[[rule]]\nnames=["*"]\ndim=0\n',
            {"n": 2},
            UnsupportedError,
            "is 2",
        ),
    ],
)
def test_rules_that_do_not_match_tensors_are_an_error(
    tmp_path: Path, text: str, arguments: dict[str, int], error: type[CkptError], said: str
) -> None:
    models = [{"a.w": torch.randn(2, 4), "layers.0.b": torch.randn(3)} for _ in range(2)]
    with pytest.raises(error) as caught:
        formats.open_checkpoint(
            two(tmp_path, *models, **arguments),
            options=ReadOptions(rules=rules_file(tmp_path, text)),
        )
    assert said in f"{caught.value.what} {caught.value.why}"


@pytest.mark.parametrize(
    "text",
    [
        "rule = 1", "[[rule]]", '[[rule]]\nnames=["*"]', '[[rule]]\nnames=["*"]\ndim=-1',
        '[[rule]]\nnames=["*"]\ndim=0\nreplicated=true', '[[rule]]\nnames="*"\ndim=0',
        '[[rule]]\nnames=["*"]\ndim=0\nparts=0', '[[rule]]\nnames=["*"]\ndim=0\nparts="half"',
        '[[rule]]\nname=["*"]\ndim=0', '[experts]\nnames=["x"]', "[layers]\nx=1", "= 3",
        '[[rule]]\nnames=["*"]\ndim=true', "\x00", '[[rule]]\nnames=["*"]\ndim=64',
    ],
)  # fmt: skip
def test_malformed_rules_file_is_a_usage_error(tmp_path: Path, text: str) -> None:
    source = two(tmp_path, {"w": torch.ones(2)}, {"w": torch.ones(2)})
    with pytest.raises(UsageError) as caught:
        formats.open_checkpoint(source, options=ReadOptions(rules=rules_file(tmp_path, text)))
    assert "rules.toml" in str(caught.value.where)


def test_gated_mlp_halves_are_joined_unless_swiglu_contradicts(tmp_path: Path) -> None:
    gate, up, down = torch.randn(4, 3), torch.randn(4, 3), torch.randn(3, 4)
    halves = [
        {"linear_fc1.weight": torch.cat([gate[s], up[s]]), "linear_fc2.weight": down[:, s].clone()}
        for s in (slice(0, 2), slice(2, 4))
    ]
    rules = rules_file(
        tmp_path,
        '[[rule]]\nnames=["*fc1*"]\ndim=0\nparts="gated"\n[[rule]]\nnames=["*fc2*"]\ndim=1\n',
    )
    source = two(tmp_path / "a", *halves, swiglu=True)
    found = converted(source, tmp_path, rules=rules)
    expected = {"linear_fc1.weight": torch.cat([gate, up]), "linear_fc2.weight": down}
    assert not differences(found, expected)
    plain = [
        {**half, "linear_fc1.weight": half["linear_fc1.weight"][:2].clone()} for half in halves
    ]
    source = two(tmp_path / "b", *plain, swiglu=False)
    expected["linear_fc1.weight"] = gate
    assert not differences(converted(source, tmp_path, rules=rules), expected)
    with pytest.raises(MappingError) as caught:
        formats.open_checkpoint(
            two(tmp_path / "c", *plain, swiglu=True), options=ReadOptions(rules=rules)
        )
    assert "`swiglu` is set" in str(caught.value.why)


@given(data=st.data())
def test_rank_division_matches_torch_slicing(data: Any) -> None:
    """Against torch: each part of the whole tensor cut by itself, the cuts put together."""
    ranks = data.draw(st.integers(1, 4))
    parts = tuple(data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4)))
    rank_shape = data.draw(st.lists(st.integers(1, 3), max_size=2))
    dim = data.draw(st.integers(0, len(rank_shape)))
    local = (*rank_shape[:dim], sum(parts), *rank_shape[dim:])
    division = divide_tensor(
        "x", local, DivisionRule(("x",), dim, parts), ranks, None, swiglu=False
    )
    whole = torch.arange(math.prod(division.shape)).reshape(division.shape)
    found = torch.full(division.shape, -1)
    cuts = torch.split(whole, [part * ranks for part in parts], dim)
    for rank in range(ranks):
        mine = torch.cat([torch.tensor_split(cut, ranks, dim)[rank] for cut in cuts], dim)
        assert mine.shape == local
        for box, start in division.iterate_pieces(rank):
            spans = [slice(s, s + n) for s, n in zip(start, box.sizes, strict=True)]
            there = [slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True)]
            assert (found[tuple(there)] == -1).all() or ranks == 1
            found[tuple(there)] = mine[tuple(spans)]
    assert torch.equal(found, whole)


DIVIDED = '[[rule]]\nnames=["*"]\ndim=0\n'


def refused(tmp_path: Path, source: Path, error: type[CkptError], said: str) -> None:
    with pytest.raises(error) as caught:
        formats.open_checkpoint(source, options=ReadOptions(rules=rules_file(tmp_path, DIVIDED)))
    assert said in f"{caught.value.what} {caught.value.why}"


def models() -> list[dict[str, torch.Tensor]]:
    return [{"w": torch.randn(2, 4)} for _ in range(2)]


def test_inconsistent_ranks_are_unsupported(tmp_path: Path) -> None:
    first, second = models()
    lacking = two(tmp_path / "a", first, {})
    refused(tmp_path, lacking, UnsupportedError, f"`{SAVE}/mp_rank_01/{FILE}` does not")
    other = two(tmp_path / "b", first, {"w": second["w"].half()})
    refused(tmp_path, other, UnsupportedError, "float16 [2, 4]")
    refused(
        tmp_path,
        two(tmp_path / "c", first, first),
        UnsupportedError,
        "records the same checksums as",
    )


def test_parallel_sizes_that_contradict_folders_are_refused(tmp_path: Path) -> None:
    sizes = {"tensor_model_parallel_size": 3}
    refused(tmp_path, two(tmp_path / "a", *models(), **sizes), DamagedError, "1 of 3 ranks' files")
    sizes = {"tensor_model_parallel_size": 1}
    refused(tmp_path, two(tmp_path / "b", *models(), **sizes), UnsupportedError, "several saves")
    sizes = {"pipeline_model_parallel_size": 2}
    refused(tmp_path, two(tmp_path / "c", *models(), **sizes), UnsupportedError, "2 numbers")
    stages = {"virtual_pipeline_model_parallel_size": 2}
    refused(
        tmp_path, two(tmp_path / "d", *models(), **stages), UnsupportedError, "virtual pipeline"
    )
    huge = {"tensor_model_parallel_size": 2**60}
    refused(tmp_path, two(tmp_path / "e", *models(), **huge), UnsupportedError, "invalid number")


def test_rank_files_of_different_iterations_are_unsupported(tmp_path: Path) -> None:
    one, other = (content(model, tensor_model_parallel_size=2) for model in models())
    source = save(tmp_path / "source", {"mp_rank_00": one, "mp_rank_01": other | {"iteration": 9}})
    refused(tmp_path, source, UnsupportedError, "mp_rank_01/model_optim_rng.pt` to 9")


def test_unexplained_second_folder_number_is_refused(tmp_path: Path) -> None:
    files = {f"mp_rank_00_00{n}": {"model": model} for n, model in enumerate(models())}
    source = save(tmp_path / "source", files)
    refused(tmp_path, source, FormatError, "second number")


def test_missing_pipeline_stage_hides_later_layer_numbers(tmp_path: Path) -> None:
    sizes = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2}
    files = {
        f"mp_rank_00_00{n}": content({"layers.0.w": torch.randn(2)}, **sizes) for n in range(2)
    }
    source = save(tmp_path / "source", files)
    rules = rules_file(tmp_path, '[layers]\nlayers = ""\n[[rule]]\nnames=["*"]\ndim=0\n')
    last, first = source / SAVE / "mp_rank_00_001", source / SAVE / "mp_rank_00_000"
    assert set(formats.open_checkpoint(source, options=ReadOptions(rules=rules)).tensors) == {
        "model.layers.0.w",
        "model.layers.1.w",
    }
    shutil.move(last, tmp_path / "last")
    found = formats.open_checkpoint(source, options=ReadOptions(rules=rules, partial=True))
    assert list(found.tensors) == ["model.layers.0.w"]
    assert len(found.findings) == 1
    shutil.move(first, tmp_path / "first")
    shutil.move(tmp_path / "last", last)
    with pytest.raises(UnsupportedError, match="number of layers is unknown"):
        formats.open_checkpoint(source, options=ReadOptions(rules=rules, partial=True))


def test_tracker_file_and_tag_select_iteration(tmp_path: Path) -> None:
    source = save(tmp_path / "source", {"mp_rank_00": content({"w": torch.ones(2)})})
    shutil.copytree(source / SAVE, source / "release")
    pointer = source / "latest_checkpointed_iteration.txt"
    assert list(formats.open_checkpoint(source).files) == [f"{SAVE}/mp_rank_00/{FILE}"]
    assert list(formats.open_checkpoint(source, options=ReadOptions(tag="release")).files) == [
        f"release/mp_rank_00/{FILE}"
    ]
    pointer.write_text("release")
    assert list(formats.open_checkpoint(source).files) == [f"release/mp_rank_00/{FILE}"]
    for text in ("11", "", "../source", "9" * 5000):
        pointer.write_text(text)
        with pytest.raises(UnsupportedError):
            formats.open_checkpoint(source)


def test_extra_state_is_skipped_with_note(tmp_path: Path) -> None:
    model = {"w": torch.ones(2), "a._extra_state": torch.ones(9), "b._extra_state": None}
    source = save(tmp_path / "source", {"mp_rank_00": content(model)})
    found = formats.open_checkpoint(source)
    assert list(found.tensors) == ["model.w"]
    assert any("_extra_state" in note for note in found.notes)


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch hostile",)


def test_hostile_pickles_are_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one = content({"w": torch.ones(2)}) | {"args": Hostile(), "rerun_state_machine": Hostile()}
    source = save(tmp_path / "source", {"mp_rank_00": one})
    assert list(formats.open_checkpoint(source).tensors) == ["model.w"]
    assert not Path("hostile").exists()


def test_single_rank_file_is_refused(data: Path) -> None:
    source, _ = sample(data, "tp2_ep2")
    with pytest.raises(FormatError, match="file of a single rank"):
        formats.open_checkpoint(source / SAVE / "mp_rank_00_000" / FILE, "megatron")


def qwen3_ranks(tmp_path: Path, **changed: object) -> Path:
    """Write Qwen 3 as two tensor-parallel ranks with the arguments of Megatron-LM."""
    golden = Golden.read("qwen3")
    config, joined = golden.config, tmp_path / "joined.pt"
    ckptctl.convert(golden.save(tmp_path / "model"), joined, to="torch", to_layout="mcore")
    models: list[dict[str, torch.Tensor]] = [{}, {}]
    for key, weight in torch.load(joined, weights_only=True).items():
        columns = key.endswith(("linear_proj.weight", "linear_fc2.weight"))
        halves: tuple[torch.Tensor, ...] = weight.chunk(2, 1 if columns else 0)
        if "norm" in key:
            halves = (weight, weight)
        elif "linear_fc1" in key:
            gate, up = (part.chunk(2) for part in weight.chunk(2))
            halves = tuple(torch.cat(pair) for pair in zip(gate, up, strict=True))
        for model, half in zip(models, halves, strict=True):
            model[key] = half.clone()
    arguments = {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": 4,
        "group_query_attention": True,
        "num_query_groups": 2,
        "kv_channels": 32,
        "swiglu": True,
        "add_bias_linear": False,
        "qk_layernorm": True,
        "num_experts": None,
        "normalization": "RMSNorm",
        "norm_epsilon": config["rms_norm_eps"],
        "position_embedding_type": "rope",
        "rotary_base": 1_000_000,
        "rotary_percent": 1.0,
        "use_rope_scaling": False,
        "rotary_scaling_factor": None,
        "untie_embeddings_and_output_weights": True,
        "max_position_embeddings": 4096,
        "padded_vocab_size": config["vocab_size"],
        "make_vocab_size_divisible_by": 64,
    }
    return two(tmp_path, *models, **arguments | changed)


def test_config_is_generated_from_trainer_args(tmp_path: Path) -> None:
    source, golden = qwen3_ranks(tmp_path), Golden.read("qwen3")
    with pytest.raises(MappingError, match="ambiguous"):  # a layer of Qwen 3.5 may be the same
        ckptctl.plan_conversion(source, tmp_path / "out", to="hf", rules=RULES)
    ckptctl.convert(source, tmp_path / "out", to="hf", rules=RULES, model_type="qwen3")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert not differences(written, golden.state())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    names = ("model_type", "num_hidden_layers", "num_key_value_heads", "head_dim", "rms_norm_eps")
    assert [config[name] for name in names] == [golden.config[name] for name in names]
    assert config["rope_theta"] == golden.config["rope_parameters"]["rope_theta"]


def test_trainer_args_are_kept_in_torch_dist(tmp_path: Path) -> None:
    source, out = qwen3_ranks(tmp_path), tmp_path / "out"
    ckptctl.convert(source, out, to="mcore", rules=RULES)
    common = torch.load(out / "release" / "common.pt", weights_only=False)
    kept = vars(common["args"])
    assert (kept["num_layers"], kept["norm_epsilon"], kept["rotary_base"]) == (2, 1e-6, 1_000_000)
    assert kept["tensor_model_parallel_size"] == 1 and kept["ckpt_format"] == "torch_dist"


@pytest.mark.parametrize(
    ("argument", "value"), [("num_attention_heads", 8), ("qk_layernorm", False)]
)
def test_trainer_args_that_contradict_tensors_are_refused(
    tmp_path: Path, argument: str, value: object
) -> None:
    source = qwen3_ranks(tmp_path, **{argument: value})
    options: Any = {"to": "hf", "rules": RULES, "model_type": "qwen3"}
    with pytest.raises(CkptError, match=r"contradict|disagree") as caught:
        ckptctl.convert(source, tmp_path / "out", **options)
    assert f"`{argument}` is {value} in {SAVE}/" in str(caught.value.why)


def test_trainer_args_that_contradict_assets_need_trust_assets(tmp_path: Path) -> None:
    state = {"w": torch.ones(4, 4)}
    told = {"num_attention_heads": 4, "norm_epsilon": 1e-5, "num_layers": 2}
    source = save(tmp_path / "in", {"mp_rank_00": content(state, **told)})
    assets = tmp_path / "assets"
    assets.mkdir()
    config = {"model_type": "x", "num_attention_heads": 4, "rms_norm_eps": 1e-5}
    (assets / "config.json").write_text(json.dumps(config))
    options: Any = {"to": "hf", "assets": assets}
    assert ckptctl.plan_conversion(source, tmp_path / "out", **options)
    (assets / "config.json").write_text(json.dumps(config | {"num_attention_heads": 8}))
    with pytest.raises(CkptError, match="contradict each other") as caught:
        ckptctl.plan_conversion(source, tmp_path / "out", **options)
    assert f"`num_attention_heads` is 4 in {SAVE}/mp_rank_00/{FILE} in" in str(caught.value.why)
    plan = ckptctl.plan_conversion(source, tmp_path / "out", trust_assets=True, **options)
    assert list(plan.decided) == ["num_attention_heads"]
