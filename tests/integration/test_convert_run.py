"""``convert``, ``consolidate`` and ``verify`` with ``--each``: the checkpoints of a run."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import ckptctl
from ckptctl.errors import PartialError, RefusedError, UsageError
from tests.checkpoints import save_hf, tiny_llama
from tests.hub_server import Hub
from tests.program import run_program
from tests.runs import START, age, tear
from tests.sweeps import one_in

STEPS = (100, 200, 300, 400, 1000)
LOG = "ckptctl.run.jsonl"
of_the_client = pytest.mark.filterwarnings("ignore::DeprecationWarning")
TINY = Path("tests/data/tiny-llama3-hf").absolute()


def make_run(folder: Path, steps: tuple[int, ...] = STEPS, **sizes: Any) -> Path:
    """Write a run with other weights at each step, saved by safetensors."""
    generator = torch.Generator().manual_seed(0)
    state, config = tiny_llama("llama3", **sizes)
    for step in steps:
        moved = {
            name: (tensor.float() + torch.randn(tensor.shape, generator=generator)).bfloat16()
            for name, tensor in state.items()
        }
        save_hf(folder / f"step-{step}", moved, config)
        (folder / f"step-{step}" / "tokenizer.json").write_text('{"model": {}}')
    time.sleep(0.01)  # file times advance every few milliseconds
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file below *folder*, except the log."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != LOG
    }


def identities(folder: Path) -> dict[str, tuple[int, int]]:
    """Return inode and modification time of each file, which change if it is written again."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != LOG)
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}


def convert_alone(run: Path, folder: Path, **options: Any) -> dict[str, str]:
    """Convert each checkpoint by itself, and return the digests of the outputs."""
    for path in run.iterdir():
        ckptctl.convert(path, folder / path.name, **options)
    return digests(folder)


def statuses(result: ckptctl.RunConversionResult) -> dict[str, str]:
    return {item.name: item.status for item in result.checkpoints}


def log_lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / LOG).read_text().splitlines()]


@pytest.mark.parametrize(
    "options",
    one_in(
        5,
        [
            {"to": "dcp"},
            {"to": "meta", "mp": 2},
            {"to": "hf", "dtype": "fp32", "verify": True},
            {"to": "mcore"},
            {"to": "hf", "quantize": "fp8-channel"},
        ],
    ),
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_outputs_equal_single_conversions_and_are_not_written_twice(
    tmp_path: Path, run: Path, options: dict[str, Any]
) -> None:
    expected, before = convert_alone(run, tmp_path / "alone", **options), digests(run)
    result = ckptctl.convert_run(run, tmp_path / "out", **options)
    assert set(statuses(result).values()) == {"converted"}
    assert digests(tmp_path / "out") == expected
    written = identities(tmp_path / "out")
    again = ckptctl.convert_run(run, tmp_path / "out", **options)
    assert set(statuses(again).values()) == {"present"}, again.checkpoints
    assert identities(tmp_path / "out") == written and digests(run) == before
    assert [line["status"] for line in log_lines(tmp_path / "out")] == [
        *["converted"] * len(STEPS),
        *["present"] * len(STEPS),
    ]


def test_outputs_of_single_conversions_are_present(tmp_path: Path, run: Path) -> None:
    convert_alone(run, tmp_path / "out", to="dcp")
    assert set(statuses(ckptctl.convert_run(run, tmp_path / "out", to="dcp")).values()) == {
        "present"
    }


def flip_byte(path: Path, position: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    status = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def swap_source(run: Path) -> None:
    """Replace a checkpoint by another one of the same size and times."""
    old, new = run / "step-200", run / "new"
    make_run(new, (7, 200))
    for path in old.iterdir():
        shutil.copystat(path, new / "step-200" / path.name)
    shutil.rmtree(old)
    (new / "step-200").rename(old)
    shutil.rmtree(new)


def swap_older_source(run: Path) -> None:
    """Replace a checkpoint by one whose files are older than all outputs."""
    shutil.rmtree(run / "step-200")
    (run.parent / "older" / "step-200").rename(run / "step-200")


def replace_output(_: Path, out: Path) -> None:
    shutil.rmtree(out)
    shutil.copytree(out.parent / "step-300", out)


def swap_older_source_without_log(run: Path, out: Path) -> None:
    swap_older_source(run)
    (out.parent / LOG).unlink()


def refresh_stale_output(run: Path, out: Path) -> None:
    """Change the source, then give its output new times, as a copy has."""
    flip_byte(run / "step-200/model.safetensors")
    for path in out.iterdir():
        os.utime(path)


DAMAGES: Mapping[str, Callable[[Path, Path], object]] = {
    "tensor": lambda _, out: flip_byte(out / "model.safetensors"),
    "source byte": lambda run, _: flip_byte(run / "step-200/model.safetensors"),
    "config": lambda _, out: flip_byte(out / "config.json", 5),
    "tokenizer": lambda _, out: flip_byte(out / "tokenizer.json", 5),
    "cut": lambda _, out: os.truncate(out / "model.safetensors", 1000),
    "no tokenizer": lambda _, out: (out / "tokenizer.json").unlink(),
    "no manifest": lambda _, out: (out / "ckptctl.manifest.json").unlink(),
    "other manifest": lambda _, out: shutil.copy(
        out.parent / "step-300/ckptctl.manifest.json", out
    ),
    "other checkpoint": replace_output,
    "source swapped": lambda run, _: swap_source(run),
    "older source": lambda run, _: swap_older_source(run),
    "older source, no log": swap_older_source_without_log,
    "copy of a stale output": refresh_stale_output,
}


@pytest.mark.parametrize("damage", one_in(4, DAMAGES))
def test_output_is_present_only_if_it_is_shown_to_be(tmp_path: Path, damage: str) -> None:
    make_run(tmp_path / "older", (5, 200))
    run = make_run(tmp_path / "run", (100, 200, 300))
    out = tmp_path / "out"
    ckptctl.convert_run(run, out, to="hf")
    time.sleep(0.01)
    DAMAGES[damage](run, out / "step-200")
    before, written = digests(out), identities(out)
    result = ckptctl.convert_run(run, out, to="hf")
    expected = dict.fromkeys(("step-100", "step-200", "step-300"), "present")
    assert statuses(result) == {**expected, "step-200": "failed"}
    (failed,) = (item for item in result.checkpoints if item.status == "failed")
    assert isinstance(failed.error, RefusedError) and "overwrite=True" in str(failed.error.hint)
    assert (digests(out), identities(out)) == (before, written), "nothing is replaced"
    with pytest.raises(PartialError, match="1 of 3 checkpoints was not converted"):
        result.require_complete()
    result = ckptctl.convert_run(run, out, to="hf", overwrite=True)
    assert statuses(result) == {**expected, "step-200": "converted"}
    assert digests(out) == convert_alone(run, tmp_path / "alone", to="hf")
    assert statuses(ckptctl.convert_run(run, out, to="hf")) == expected


def test_conversion_with_other_options_is_not_present(tmp_path: Path, run: Path) -> None:
    ckptctl.convert_run(run, tmp_path / "out", to="hf", steps="100")
    for options in ({"to": "hf", "dtype": "fp32"}, {"to": "dcp"}, {"to": "hf", "exclude": "lm*"}):
        result = ckptctl.convert_run(run, tmp_path / "out", steps="100", **options)  # type: ignore[arg-type]
        assert statuses(result) == {"step-100": "failed"}, options


def test_folder_of_other_files_is_never_replaced(tmp_path: Path, run: Path) -> None:
    (tmp_path / "out" / "step-100").mkdir(parents=True)
    (tmp_path / "out" / "step-100" / "notes.txt").write_text("mine")
    result = ckptctl.convert_run(run, tmp_path / "out", to="hf", overwrite=True)
    assert statuses(result)["step-100"] == "failed"
    assert (tmp_path / "out" / "step-100" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("overwrite", [False, True])
def test_error_for_what_is_no_checkpoint_does_not_suggest_to_overwrite_it(
    tmp_path: Path, run: Path, overwrite: bool
) -> None:
    (tmp_path / "out" / "step-100").mkdir(parents=True)
    (tmp_path / "out" / "step-100" / "notes.txt").write_text("mine")
    (tmp_path / "out" / "step-200").symlink_to(tmp_path / "nowhere")
    result = ckptctl.convert_run(run, tmp_path / "out", to="hf", overwrite=overwrite)
    errors = {item.name: item.error for item in result.checkpoints if item.error}
    assert errors.keys() == {"step-100", "step-200"}
    assert "is not a checkpoint and is not overwritten" in errors["step-100"].what
    assert "symbolic link" in errors["step-200"].what
    assert not any("overwrite=True" in str(error.hint) for error in errors.values())


@pytest.mark.parametrize(
    ("run", "count"),
    [("dcp/torchtitan/steps/ckpt/checkpoint", 2), ("wrappers/lightning_plain/ckpt", 2)],
)
def test_runs_of_trainers(tmp_path: Path, run: str, count: int) -> None:
    source = Path("tests/data") / run
    result = ckptctl.convert_run(source, tmp_path / "out", to="hf")
    assert list(statuses(result).values()) == ["converted"] * count
    for item in result.checkpoints:
        target = item.planned.target
        checkpoint = Path(item.planned.checkpoint.path)
        ckptctl.convert(checkpoint, tmp_path / "alone" / target.name, to="hf")
    assert digests(tmp_path / "out") == digests(tmp_path / "alone")
    again = ckptctl.convert_run(source, tmp_path / "out", to="hf")
    assert list(statuses(again).values()) == ["present"] * count


# Selection


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, STEPS),
        ({"steps": "100:300"}, (100, 200, 300)),
        ({"steps": "200:1000:400"}, (200, 1000)),
        ({"steps": ["::200"]}, (200, 400, 1000)),
        ({"steps": "400:"}, (400, 1000)),
        ({"steps": ["100,1000"]}, (100, 1000)),
        ({"steps": ["step-1*", "300"]}, (100, 300, 1000)),
        ({"steps": "run/step-100/"}, (100,)),
        ({"keep_last": 2}, (400, 1000)),
        ({"keep_every": 200}, (200, 400, 1000)),
        ({"keep": "step-3*"}, (300, 1000)),
        ({"keep_last": 1, "steps": ":300"}, (300,)),
    ],
    ids=str,
)
def test_options_select_checkpoints(
    tmp_path: Path, run: Path, options: dict[str, Any], steps: tuple[int, ...]
) -> None:
    plan = ckptctl.plan_run_conversion(run, tmp_path / "out", to="hf", **options)
    assert [item.checkpoint.step for item in plan.checkpoints] == list(steps)
    if "steps" not in options and options:
        kept = ckptctl.plan_prune(run, **options).list_decisions("keep")
        assert [decision.checkpoint.step for decision in kept] == list(steps)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": "500"}, "matches no checkpoint"),
        ({"steps": "epoch*"}, "matches no checkpoint"),
        ({"steps": "300:100"}, "contains no step"),
        ({"steps": "1:2:0"}, "every 0th"),
        ({"steps": "100,"}, "is empty"),
        ({"keep": "x*"}, "keeps nothing"),
        ({"keep_last": 0}, "keeps nothing"),
        ({"task": "3/2"}, "not one of 1 to 2"),
        ({"task": "0/2"}, "not one of 1 to 2"),
        ({"task": "1/0"}, "no task"),
        ({"task": "2"}, "form I/N"),
        ({"task": "1/2/3"}, "form I/N"),
        ({"task": "-1/2"}, "form I/N"),
        ({"task": "/2"}, "number of this task is unknown"),
    ],
    ids=str,
)
def test_wrong_selection_is_an_error(
    tmp_path: Path, run: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((UsageError, RefusedError), match=message):
        ckptctl.convert_run(run, tmp_path / "out", to="hf", **options)
    assert not (tmp_path / "out").exists()


def test_incomplete_checkpoints_are_skipped_with_exit_code_7(tmp_path: Path, run: Path) -> None:
    tear(run / "step-200")
    (run / "step-600").mkdir()  # empty
    (run / "step-700").mkdir()
    (run / "step-700" / "model.safetensors").write_bytes(b"not a checkpoint at all" * 100)
    (run / ".step-800.ckptctl-staging").mkdir()
    os.utime(run / ".step-800.ckptctl-staging", (1, 1))
    (run / "logs").mkdir()
    shutil.copytree(run / "step-100", run / "step-900")  # copied without its configuration
    (run / "step-900" / "config.json").unlink()
    outside = shutil.copytree(run / "step-300", tmp_path / "elsewhere")
    (run / "step-1200").symlink_to(outside)
    found = run_program(["convert", run, tmp_path / "out", "--to", "dcp", "--each", "--json"])
    assert found.returncode == 7, found.stderr
    document = json.loads(found.stdout)
    assert json.loads(found.stderr)["error"]["exit_code"] == 7
    by_name = {item["name"]: item for item in document["checkpoints"]}
    skipped = {name for name, item in by_name.items() if item["status"] == "skipped"}
    assert skipped == {"step-200", "step-600", "step-700", ".step-800.ckptctl-staging"}
    assert all(by_name[name]["reason"] for name in skipped)
    converted = {name for name, item in by_name.items() if item["status"] == "converted"}
    assert converted == {f"step-{step}" for step in (100, 300, 400, 900, 1000, 1200)}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*converted, LOG}
    dry = run_program(["convert", run, tmp_path / "no", "--to", "dcp", "--each", "--dry-run"])
    assert dry.returncode == 7 and not (tmp_path / "no").exists()
    assert "skip\tstep-200\t" in dry.stdout
    assert "error: 4 of 10 checkpoints cannot be converted" in dry.stderr
    dry = run_program(["convert", run, tmp_path / "no", "--to", "dcp", "--each", "-n", "-q"])
    assert {Path(line).name for line in dry.stdout.splitlines()} == converted


def test_allow_missing_converts_damaged_checkpoints(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", (100, 200))
    ckptctl.convert(run / "step-100", run / "step-300", to="hf", max_shard_size="60KB")
    next((run / "step-300").glob("*2-of*")).unlink()
    age(run / "step-300", START)  # else it counts as being written
    result = ckptctl.convert_run(run, tmp_path / "out", to="hf", allow_missing=True)
    assert set(statuses(result).values()) == {"converted"}
    assert result.checkpoints[-1].missing
    with pytest.raises(PartialError, match="1 of 3 checkpoints is incomplete"):
        result.require_complete()
    again = ckptctl.convert_run(run, tmp_path / "out", to="hf", allow_missing=True)
    assert again.checkpoints[-1].missing and not again.checkpoints[-1].is_success


def test_options_complete_checkpoints_of_which_tensors_are_missing(tmp_path: Path) -> None:
    name = "model.norm.weight"
    run = make_run(tmp_path / "run", (100, 200))
    base = make_run(tmp_path / "base", (1,)) / "step-1"
    config = json.loads((run / "step-100" / "config.json").read_text())
    state = load_file(run / "step-100" / "model.safetensors")
    save_hf(run / "step-100", {key: state[key] for key in state if key != name}, config)
    age(run / "step-100", START)  # else it counts as being written
    result = ckptctl.convert_run(run, tmp_path / "none", to="hf")
    assert statuses(result) == {"step-100": "skipped", "step-200": "converted"}
    choices: tuple[dict[str, Any], ...] = ({"fill_from": base}, {"exclude": [name]})
    for number, options in enumerate(choices):
        out = tmp_path / f"out-{number}"
        alone = convert_alone(run, tmp_path / f"alone-{number}", to="hf", **options)
        result = ckptctl.convert_run(run, out, to="hf", **options)
        assert statuses(result) == {"step-100": "converted", "step-200": "converted"}
        assert digests(out) == alone
        again = ckptctl.convert_run(run, out, to="hf", **options)
        assert set(statuses(again).values()) == {"present"}
    shape = load_file(base / "model.safetensors")
    save_hf(base, {**shape, name: shape[name] + 1}, config)
    again = ckptctl.convert_run(run, tmp_path / "out-0", to="hf", fill_from=base)
    assert statuses(again) == {"step-100": "failed", "step-200": "present"}


def test_error_of_one_checkpoint_does_not_stop_others(tmp_path: Path, run: Path) -> None:
    state = load_file(run / "step-200" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    state[name] = torch.full_like(state[name], 60_000.0) * 2  # infinite in fp16
    save_hf(run / "step-200", state, json.loads((run / "step-200/config.json").read_text()))
    result = ckptctl.convert_run(run, tmp_path / "out", to="hf", dtype="fp16")
    assert statuses(result) == {
        **dict.fromkeys((f"step-{step}" for step in STEPS), "converted"),
        "step-200": "failed",
    }
    assert not (tmp_path / "out" / "step-200").exists()


def test_checkpoint_of_another_model_is_reported(tmp_path: Path, run: Path) -> None:
    save_hf(run / "step-250", *tiny_llama("llama3", layers=3))
    save_hf(run / "step-260", *tiny_llama("llama3", vocab=256))
    plan = ckptctl.plan_run_conversion(run, tmp_path / "out", to="dcp")
    assert [warning.partition(":")[0] for warning in plan.warnings] == ["`step-250`", "`step-260`"]
    assert all("another model than most checkpoints" in warning for warning in plan.warnings)
    result = ckptctl.convert_run(run, tmp_path / "out", to="dcp")
    assert set(statuses(result).values()) == {"converted"}


def test_wrong_paths_are_errors(tmp_path: Path, run: Path) -> None:
    def fail(code: int, message: str, *words: object) -> None:
        found = run_program(["convert", *words, "--to", "hf", "--each"])
        assert found.returncode == code and message in found.stderr, found.stderr

    fail(3, "this is a checkpoint, not a folder of checkpoints", run / "step-100", tmp_path / "o")
    fail(3, "no such directory", tmp_path / "nothing", tmp_path / "o")
    fail(6, "the destination is the run itself", run, run)
    fail(6, "the destination is the run itself", run, f"{run}/{{name}}")
    fail(6, "the destination is a checkpoint", run, run / "step-100")
    shutil.copytree(run / "step-100", tmp_path / "linked")
    (run / "step-500").symlink_to(tmp_path / "linked")
    for folder in ("step-100/o", "step-100/o/{name}", "step-500/o", "step-1100", "../linked/o"):
        words = (run, f"{run}/{folder}", "--steps", "200,500")
        fail(6, "the destination is inside a checkpoint of the run", *words)
    (run / "step-500").unlink()
    (tmp_path / "file").write_text("x")
    fail(2, "found a file", run, tmp_path / "file")
    save_hf(run / "global_step100", *tiny_llama())
    fail(2, "two checkpoints have the same destination", run, f"{tmp_path}/o/{{step}}")
    text = f"{tmp_path}/o/{{name}}/../x"
    fail(2, "two checkpoints have the same destination", run, text, "--overwrite")
    for task in ("1/2", "2/2", "6/6"):  # the checkpoints may be in different parts
        words = (run, f"{tmp_path}/o/{{step}}", "--task", task)
        fail(2, "two checkpoints have the same destination", *words)
    assert not (tmp_path / "o").exists()


def test_unfinished_save_has_no_destination_of_its_own(tmp_path: Path, run: Path) -> None:
    (run / "tmp-checkpoint-100").mkdir()
    plan = ckptctl.plan_run_conversion(run, f"{tmp_path}/out/{{step}}", to="hf", steps="100")
    assert {item.name: item.action for item in plan.checkpoints} == {
        "tmp-checkpoint-100": "skip",
        "step-100": "convert",
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--task", "1/2"], "`--task` requires `--each`"),
        (["--steps", "100"], "`--steps` requires `--each`"),
        (["--keep-last", "2"], "`--keep-last` requires `--each`"),
        (["--each", "--no-checksum"], "`--each` conflicts with `--no-checksum`"),
        (["--each", "--to", "torch"], "writes a file for each checkpoint"),
        (["--each", "--resume", "--restart"], "`--resume` conflicts with `--restart`"),
    ],
    ids=str,
)
def test_wrong_options_are_errors(
    tmp_path: Path, run: Path, words: list[str], message: str
) -> None:
    to = [] if "--to" in words else ["--to", "hf"]
    found = run_program(["convert", run, tmp_path / "out", *to, *words])
    assert found.returncode == 2 and message in found.stderr, found.stderr


def test_several_ranks_are_refused(tmp_path: Path, run: Path) -> None:
    words = [run, tmp_path / "out", "--to", "hf", "--each"]
    ranks = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    found = run_program(["convert", *words], **ranks)
    assert found.returncode == 2 and "single process" in found.stderr
    assert run_program(["convert", *words, "--single-process"], **ranks).returncode == 0


# Names


def test_fields_of_destination_are_replaced(tmp_path: Path, run: Path) -> None:
    ckptctl.convert_run(run, f"{tmp_path}/pt/{{name}}.pt", to="torch", steps=":200")
    names = sorted(path.name for path in (tmp_path / "pt").iterdir())
    assert names == [LOG, "step-100.pt", "step-200.pt"]
    ckptctl.convert_run(run, f"{tmp_path}/s/model-{{step}}/hf", to="hf", steps="100")
    assert (tmp_path / "s" / "model-100" / "hf" / "config.json").exists()
    again = ckptctl.convert_run(run, f"{tmp_path}/pt/{{name}}.pt", to="torch", steps="100")
    assert statuses(again) == {"step-100": "failed"}, "a file has no manifest"


@pytest.mark.parametrize("template", ["", "/hf-{step}"])
def test_home_folder_in_destination_is_expanded(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    for status in ("converted", "present"):
        result = ckptctl.convert_run(run, f"~/out{template}", to="hf", steps="100")
        assert statuses(result) == {"step-100": status}, result.checkpoints
    assert [line["status"] for line in log_lines(tmp_path / "home" / "out")] == [
        "converted",
        "present",
    ]


def test_name_with_special_characters_is_selected(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", (1, 2))
    (run / "step-1").rename(run / "[a]-step=1")
    plan = ckptctl.plan_run_conversion(run, tmp_path / "out", to="hf", steps="[a]-step=1")
    assert [item.name for item in plan.checkpoints] == ["[a]-step=1"]


def test_log_that_is_no_file_is_not_opened(tmp_path: Path, run: Path) -> None:
    (tmp_path / "out").mkdir()
    os.mkfifo(tmp_path / "out" / LOG)
    for status in ("converted", "present"):
        found = run_program(["convert", run, tmp_path / "out", "--to", "hf", "--each"])
        assert found.returncode == 0 and found.stdout.count(f"{status}\tstep-") == len(STEPS)
        assert f"cannot append to `{LOG}`" in found.stderr


def test_fields_in_names_are_not_replaced(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", (1,))
    (run / "step-1").rename(run / "{step}-step=7")
    plan = ckptctl.plan_run_conversion(run, f"{tmp_path}/{{step}}/{{name}}", to="hf")
    assert str(plan.checkpoints[0].target) == f"{tmp_path}/7/{{step}}-step=7"


def test_lightning_files_lose_their_suffix(tmp_path: Path) -> None:
    state, _ = tiny_llama()
    run = tmp_path / "run"
    run.mkdir()
    for epoch in (0, 1):
        content = {"state_dict": state, "global_step": 10, "pytorch-lightning_version": "2.6.6"}
        torch.save(content, run / f"epoch={epoch}-step={10 * (epoch + 1)}.ckpt")
    result = ckptctl.convert_run(run, tmp_path / "out", to="hf", assets=TINY, trust_assets=True)
    assert set(statuses(result)) == {"epoch=0-step=10.ckpt", "epoch=1-step=20.ckpt"}
    assert {path.name for path in (tmp_path / "out").iterdir()} - {LOG} <= {
        "epoch=0-step=10",
        "epoch=1-step=20",
    }


# Tasks


def test_union_of_tasks_equals_one_run(tmp_path: Path, run: Path) -> None:
    expected = convert_alone(run, tmp_path / "alone", to="dcp")
    for count in (1, 3, 7):
        out = tmp_path / f"out-{count}"
        order = random.Random(count).sample(range(1, count + 1), count)
        done = [
            name
            for number in order
            for name in statuses(ckptctl.convert_run(run, out, to="dcp", task=f"{number}/{count}"))
        ]
        assert sorted(done) == sorted(f"step-{step}" for step in STEPS), "each in one task"
        assert digests(out) == expected


def test_number_of_tasks_may_be_huge(tmp_path: Path, run: Path) -> None:
    plans = [
        ckptctl.plan_run_conversion(run, tmp_path / "out", to="hf", task=f"{number}/999999999")
        for number in (1, 2, 3, 4, 5, 6, 999999999)
    ]
    assert [len(plan.checkpoints) for plan in plans] == [1, 1, 1, 1, 1, 0, 0]
    assert {plan.checkpoints[0].name for plan in plans[:5]} == {f"step-{step}" for step in STEPS}


def test_slurm_array_divides_run(tmp_path: Path, run: Path) -> None:
    words = ["convert", run, tmp_path / "out", "--to", "dcp", "--each", "--json"]
    array = {
        "SLURM_ARRAY_TASK_MIN": "0",
        "SLURM_ARRAY_TASK_MAX": "20",
        "SLURM_ARRAY_TASK_STEP": "10",
        "SLURM_ARRAY_TASK_COUNT": "3",
    }
    names: list[str] = []
    for task in ("20", "0", "10"):
        found = run_program(words, SLURM_ARRAY_TASK_ID=task, **array)
        assert found.returncode == 0, found.stderr
        names += [item["name"] for item in json.loads(found.stdout)["checkpoints"]]
    assert sorted(names) == sorted(f"step-{step}" for step in STEPS)
    assert digests(tmp_path / "out") == convert_alone(run, tmp_path / "alone", to="dcp")
    # The environment of a job applies to the command line only.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_ARRAY_TASK_ID", "0")
        assert len(ckptctl.verify_run(run).checkpoints) == len(STEPS)


def program(words: list[object]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "ckptctl", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.mark.slow
def test_killed_tasks_may_be_repeated_in_any_order(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", hidden=256, vocab=4096, ffn=512)
    expected = convert_alone(run, tmp_path / "alone", to="dcp")
    out, rng, before = tmp_path / "out", random.Random(0), digests(run)
    killed, published = 0, set[str]()
    for trial in range(12):
        task = f"{rng.randint(1, 3)}/3"
        process = program(
            ["convert", run, out, "--to", "dcp", "--each", "--resume", "--task", task]
        )
        if trial % 2:  # as soon as it writes
            while process.poll() is None and not list(out.glob(".*.ckptctl-staging/data/*")):
                time.sleep(0.001)
        else:
            time.sleep(rng.uniform(0.8, 3))
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
        visible = {path.name for path in out.glob("step-*")} if out.exists() else set()
        assert published <= visible, "no output disappears"
        published = visible
        for name in visible:
            files = {k: v for k, v in expected.items() if k.startswith(f"{name}/")}
            assert {f"{name}/{k}": v for k, v in digests(out / name).items()} == files
    assert killed
    written = identities(out)
    for number in (3, 1, 2):
        words = ["convert", run, out, "--to", "dcp", "--each", "--resume"]
        assert run_program([*words, "--task", f"{number}/3"]).returncode == 0
    assert digests(out) == expected, "and no staging directory is left"
    assert {name: one for name, one in identities(out).items() if name in written} == {
        name: one for name, one in written.items() if ".ckptctl-staging" not in name
    }, "no output is written twice"
    assert digests(run) == before


INTERRUPTED = """
import signal, sys, time
from functools import partial
from ckptctl.storage.execution import execution_options
from ckptctl.verbs import run_conversion as op
often = partial(execution_options.ExecutionOptions, journal_every=1)
execution_options.ExecutionOptions = often
convert = op.run_conversion
seconds = float(sys.argv.pop(1))
def convert_slowly(plan, progress=None):
    def advance(nbytes):
        if progress:
            progress(nbytes)
        target = plan.plan.target
        if target.name == "step-200":
            time.sleep(seconds or 0.05)
            journal = target.with_name(".step-200.ckptctl-staging") / "journal"
            # Without an entry besides the header, there is nothing to resume.
            if not seconds and len(journal.read_bytes().splitlines()) > 1:
                signal.raise_signal(signal.SIGINT)
    return convert(plan, advance)
op.run_conversion = convert_slowly
from ckptctl.cli.app import main
main()
"""
"""The program, interrupted while it copies the second checkpoint, or slow if given seconds."""


SLURM_TASK = ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_MAX")


def test_interrupted_run_is_resumed_by_its_hint(tmp_path: Path) -> None:
    run, out = make_run(tmp_path / "run", (100, 200, 300)), tmp_path / "out"
    expected = convert_alone(run, tmp_path / "alone", to="dcp")
    words = ["convert", str(run), str(out), "--to", "dcp", "--each"]
    found = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, "0", *words, "--memory", "64KiB", "--jobs", "1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **dict.fromkeys(SLURM_TASK, "0"), "SLURM_ARRAY_TASK_COUNT": "1"},
    )
    assert found.returncode == 130, found.stderr
    assert "error: interrupted" in found.stderr and "1 of 3 checkpoints" in found.stderr
    assert found.stdout.splitlines()[1:] and "step-100" in found.stdout
    assert sorted(path.name for path in out.iterdir() if path.name != LOG) == [
        ".step-200.ckptctl-staging",
        "step-100",
    ]
    assert [(line["name"], line["status"]) for line in log_lines(out)] == [
        ("step-100", "converted")
    ]
    written = identities(out / "step-100")
    hint = shlex.split(found.stderr.rpartition("hint: resume with `")[2].partition("`")[0])
    # The environment of the job determines the task, which a shell elsewhere has not.
    assert hint[0] == "ckptctl" and hint[-2:] == ["--resume", "--task=1/1"]
    resumed = run_program([*hint[1:], "--json"])
    assert resumed.returncode == 0, resumed.stderr
    statuses = [item["status"] for item in json.loads(resumed.stdout)["checkpoints"]]
    assert statuses == ["present", "converted", "converted"]
    assert digests(out) == expected and identities(out / "step-100") == written


def run_on_terminal(command: list[str], **variables: str) -> list[str]:
    """Run *command* on a terminal, and return the lines that appear on it."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env={**os.environ, **variables}
    )
    os.close(slave)
    shown = b""
    with suppress(OSError):  # Linux says EIO once the other side is closed
        while content := os.read(master, 1 << 16):
            shown += content
    os.close(master)
    assert process.wait(60) == 0, shown
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    return [line for line in text.replace("\r", "\n").splitlines() if line.strip()]


def test_progress_on_a_terminal_names_the_checkpoint(tmp_path: Path) -> None:
    run, out = make_run(tmp_path / "run", (100, 200)), tmp_path / "out"
    words = ["convert", str(run), str(out), "--to", "dcp", "--each"]
    lines = run_on_terminal(
        [sys.executable, "-c", INTERRUPTED, "0.8", *words],
        TERM="xterm-256color",
        COLUMNS="100",
        NO_COLOR="1",
    )
    assert any("copying step-200 (2 of 2)" in line and "%" in line for line in lines), lines
    outcomes = [line for line in lines if re.match(r"step-\d+: converted · ", line)]
    assert [line.partition(":")[0] for line in outcomes] == ["step-100", "step-200"], lines
    assert re.match(r"2 converted; .* written in ", lines[-1]), lines


def test_other_entries_of_the_folder_are_listed_as_skipped(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", (100, 200))
    shutil.copytree(run / "step-200", run / "final")
    (run / "step-300").symlink_to("nowhere")
    (run / "latest").symlink_to("step-200")
    (run / "step-best").symlink_to("step-200")
    (run / "step-400").write_text("")
    (run / "logs").mkdir()
    (run / "latest_checkpointed_iteration.txt").write_text("200")
    expected = {
        "final": "unknown: a checkpoint without a step in its name",
        "logs": "no checkpoint",
        "step-300": "unknown: the target of the link does not exist",
        "step-400": "unknown: named like a checkpoint, but not a folder",
        "step-best": "a link to another checkpoint of the run",
    }
    plan = ckptctl.plan_run_conversion(run, tmp_path / "out", to="dcp")
    assert plan.others == expected
    result = ckptctl.convert_run(run, tmp_path / "out", to="dcp")
    assert result.others == expected and set(statuses(result).values()) == {"converted"}
    assert ckptctl.verify_run(run).others == expected
    assert not ckptctl.verify_run(run, steps="100").others
    assert (tmp_path / "out" / "ckptctl.run.jsonl").exists()
    assert not ckptctl.verify_run(tmp_path / "out").others
    words = ["convert", run, tmp_path / "out", "--to", "dcp", "--each"]
    for more in (["--dry-run"], []):
        found = run_program([*words, *more])
        assert found.returncode == 0
        for name, reason in expected.items():
            assert f"skipped, {reason}: `{name}`" in found.stderr
    assert json.loads(run_program([*words, "--json"]).stdout)["others"] == expected


def test_task_of_the_environment_is_stated_before_the_first_checkpoint(
    tmp_path: Path, run: Path
) -> None:
    lines = run_on_terminal(
        [sys.executable, "-m", "ckptctl", "verify", str(run), "--each"],
        SLURM_ARRAY_TASK_ID="0",
        SLURM_ARRAY_TASK_MIN="0",
        SLURM_ARRAY_TASK_COUNT="2",
        TERM="dumb",
    )
    assert lines[0] == "task 1 of 2 (from SLURM_ARRAY_TASK_ID)" and "step-" in lines[1]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--steps", "100-300"], "did you mean `100:300`?"),
        (["--steps", "step-1O0"], "did you mean `step-100`?"),
        (["--steps", "260"], "the closest step is 300"),
        (["--steps", "100:x"], "pass a step, a range FIRST:LAST[:EVERY], or a glob of names"),
        (["--task", "0/2"], "I counts from 1 to N"),
        (["--task", "1-2"], "I counts from 1 to N"),
        (["--step", "100"], "`--steps` selects checkpoints of a run"),
        (["--stpes", "100"], "did you mean `--steps`?"),
    ],
    ids=lambda words: "-".join(words) if isinstance(words, list) else "",
)
def test_mistyped_selection_has_a_hint(
    tmp_path: Path, run: Path, words: list[str], hint: str
) -> None:
    found = run_program(["convert", run, tmp_path / "out", "--to", "dcp", "--each", *words])
    assert found.returncode != 0 and f"hint: {hint}" in found.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_overlapping_tasks_do_not_corrupt_outputs(tmp_path: Path, run: Path) -> None:
    expected = convert_alone(run, tmp_path / "alone", to="dcp")
    words: list[object] = ["convert", run, tmp_path / "out", "--to", "dcp", "--each", "--resume"]
    processes = [program([*words, *extra]) for extra in ([], [], ["--task", "1/2"])]
    assert {process.wait() for process in processes} <= {0, 7}
    assert run_program(words).returncode == 0
    assert digests(tmp_path / "out") == expected
    lines = log_lines(tmp_path / "out")
    converted = sorted(line["name"] for line in lines if line["status"] == "converted")
    assert converted == sorted(f"step-{step}" for step in STEPS), "each is written once"


# The how-to page, as schedulers run it

PAGE = Path("docs/how-to/convert-a-run.md")


def page_block(tmp_path: Path, language: str, word: str) -> str:
    """Return the block of the page that has *word*, with the paths of the test."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (block,) = (block for block in blocks if word in block)
    return str(block).replace("/shared", str(tmp_path))


def path_with_program(tmp_path: Path) -> str:
    """Return ``PATH`` with a program ``ckptctl`` that this Python runs."""
    program = tmp_path / "bin" / "ckptctl"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m ckptctl "$@"\n')
    program.chmod(0o755)
    return f"{program.parent}:{os.environ['PATH']}"


def run_job(tmp_path: Path, command: list[str], **variables: str) -> None:
    environment = {
        "PATH": path_with_program(tmp_path),
        "HOME": str(tmp_path),
        "PYTHONPATH": str(Path().absolute()),
        **variables,
    }
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


def require_converted_once(tmp_path: Path, run: Path) -> None:
    assert digests(tmp_path / "run-hf") == convert_alone(run, tmp_path / "alone", to="hf")
    converted = [line["name"] for line in log_lines(tmp_path / "run-hf")]
    assert sorted(converted) == sorted(f"step-{step}" for step in STEPS)


@pytest.mark.slow
def test_slurm_script_of_page(tmp_path: Path, run: Path) -> None:
    script = tmp_path / "convert.sbatch"
    script.write_text(page_block(tmp_path, "bash", "#SBATCH"))
    first, last = re.findall(r"--array=(\d+)-(\d+)", script.read_text())[0]
    for task in range(int(last), int(first) - 1, -1):
        array = {"ID": str(task), "MIN": first, "MAX": last, "STEP": "1", "COUNT": last}
        variables = {f"SLURM_ARRAY_TASK_{name}": value for name, value in array.items()}
        run_job(tmp_path, ["bash", str(script)], **variables)
    require_converted_once(tmp_path, run)


@pytest.mark.slow
def test_kubernetes_job_of_page(tmp_path: Path, run: Path) -> None:
    job = yaml.safe_load(page_block(tmp_path, "yaml", "kind: Job"))
    (container,) = job["spec"]["template"]["spec"]["containers"]
    for index in range(job["spec"]["completions"]):
        words = [*container["command"], *container["args"]]
        run_job(tmp_path, words, JOB_COMPLETION_INDEX=str(index))
    require_converted_once(tmp_path, run)


@pytest.mark.slow
def test_xargs_line_of_page(tmp_path: Path, run: Path) -> None:
    run_job(tmp_path, ["bash", "-c", page_block(tmp_path, "bash", "xargs")])
    require_converted_once(tmp_path, run)


# Output


def test_one_line_per_checkpoint_in_a_pipe(tmp_path: Path, run: Path) -> None:
    words = ["convert", run, tmp_path / "out", "--to", "dcp", "--each"]
    found = run_program(words)
    header, *rows = (line.split("\t") for line in found.stdout.splitlines())
    assert header == ["status", "name", "size", "target", "why"]
    assert [row[:2] for row in rows] == [["converted", f"step-{step}"] for step in STEPS]
    found = run_program([*words, "--quiet"])
    assert found.stdout.splitlines() == [str(tmp_path / "out" / f"step-{step}") for step in STEPS]


# Other commands


def test_consolidate_each(tmp_path: Path) -> None:
    source = Path("tests/data/dcp-rank-local/w2/ckpt").absolute()
    for step in (1, 2):
        shutil.copytree(source, tmp_path / "run" / f"step-{step}")
    found = run_program(["consolidate", tmp_path / "run", tmp_path / "out", "--each", "--json"])
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["counts"] == {"converted": 2}
    ckptctl.consolidate(source, dst=tmp_path / "alone")
    manifest = "ckptctl.manifest.json"  # names the source
    expected = {k: v for k, v in digests(tmp_path / "alone").items() if k != manifest}
    for step in (1, 2):
        found_files = digests(tmp_path / "out" / f"step-{step}")
        assert {k: v for k, v in found_files.items() if k != manifest} == expected
    found = run_program(["consolidate", tmp_path / "run", tmp_path / "out", "--each"])
    assert [line.split("\t")[0] for line in found.stdout.splitlines()[1:]] == ["present"] * 2
    found = run_program(["consolidate", tmp_path / "run", "--metadata-only", "--each"])
    assert found.returncode == 2 and "conflicts" in found.stderr


def test_verify_each(tmp_path: Path, run: Path) -> None:
    ckptctl.convert_run(run, tmp_path / "out", to="dcp")
    words = ["verify", tmp_path / "out", "--each", "--level", "full"]
    found = run_program([*words, "--require-verified", "--json"])
    assert found.returncode == 0, found.stderr
    document = json.loads(found.stdout)
    assert document["counts"] == {"complete": 5}
    assert {item["verification"]["data"] for item in document["checkpoints"]} == {"verified"}
    flip_byte(next((tmp_path / "out" / "step-300").glob("*.distcp")), 3000)
    found = run_program(words)
    assert found.returncode == 7 and "1 of 5 checkpoints did not pass" in found.stderr
    rows = [line.split("\t") for line in found.stdout.splitlines()]
    assert [row[0] for row in rows[1:]] == ["complete"] * 2 + ["damaged"] + ["complete"] * 2
    found = run_program([*words, "-q"])
    assert found.stdout.startswith("step-300: ") and len(found.stdout.splitlines()) == 1
    parts = [ckptctl.verify_run(tmp_path / "out", task=f"{n}/2") for n in (1, 2)]
    assert sum(len(part.checkpoints) for part in parts) == 5
    assert run_program([*words, "--manifest", "--steps", "100"]).returncode == 0
    assert (tmp_path / "out" / "step-100" / "SHA256SUMS").exists()


# URLs


@of_the_client
def test_run_is_read_from_the_hub(hub: Hub, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", (100, 200))
    hub.add("org/run", run)
    result = ckptctl.convert_run("hf://org/run", tmp_path / "out", to="dcp")
    assert set(statuses(result).values()) == {"converted"}, result.checkpoints
    assert digests(tmp_path / "out") == convert_alone(run, tmp_path / "alone", to="dcp")
    again = ckptctl.convert_run("hf://org/run", tmp_path / "out", to="dcp")
    assert set(statuses(again).values()) == {"present"}


@pytest.mark.parametrize("template", ["", "/hf-{step}"])
def test_run_is_written_to_an_object_store(tmp_path: Path, template: str) -> None:
    run, place = make_run(tmp_path / "run", (100, 200)), f"memory://{tmp_path.name}"
    result = ckptctl.convert_run(run, f"{place}{template}", to="hf")
    assert set(statuses(result).values()) == {"converted"}, result.checkpoints
    target = str(result.checkpoints[0].planned.target)
    assert target == f"{place}/{'hf-100' if template else 'step-100'}"
    assert ckptctl.verify(target, level="full").data == "verified"
    again = ckptctl.convert_run(run, f"{place}{template}", to="hf")
    assert set(statuses(again).values()) == {"present"}, again.checkpoints
    flip_byte(run / "step-200" / "model.safetensors")
    again = ckptctl.convert_run(run, f"{place}{template}", to="hf")
    assert statuses(again) == {"step-100": "present", "step-200": "failed"}
    assert "`model.safetensors` of the source changed" in again.checkpoints[1].reason
    again = ckptctl.convert_run(run, f"{place}{template}", to="hf", overwrite=True)
    assert statuses(again) == {"step-100": "present", "step-200": "converted"}


@pytest.mark.parametrize("folder", ["", "/{name}", "/hf-{step}", "/step-100/o", "/step-7/{step}"])
def test_outputs_at_a_url_are_not_written_into_the_run(tmp_path: Path, folder: str) -> None:
    place = f"memory://{tmp_path.name}"
    ckptctl.convert_run(make_run(tmp_path / "run", (100, 200)), place, to="hf")
    with pytest.raises(RefusedError, match=r"the run itself|inside a checkpoint of the run"):
        ckptctl.convert_run(place, place + folder, to="dcp", steps="200")
    result = ckptctl.convert_run(place, f"{place}/dcp", to="dcp", steps="200")
    assert statuses(result) == {"step-200": "converted"}


@pytest.mark.slow
@of_the_client
def test_branches_of_a_hub_repository(hub: Hub, run: Path) -> None:
    repository = hub.repositories["org/new"]
    result = ckptctl.convert_run(run, "hf://org/new@{name}", to="hf", steps="100:300", task="1/1")
    assert set(statuses(result).values()) == {"converted"}, [
        item.error and item.error.line for item in result.checkpoints
    ]
    assert set(repository.branches) == {"step-100", "step-200", "step-300"}
    for step in (100, 200, 300):
        files = repository.at(f"step-{step}")
        assert files is not None
        source = run / f"step-{step}" / "model.safetensors"
        assert files[1]["model.safetensors"] == source.read_bytes()
    assert set(repository.files) == {"README.md"}, "the default branch is unchanged"
    uploads = list(hub.uploads)
    again = ckptctl.convert_run(run, "hf://org/new@{name}", to="hf")
    assert statuses(again) == {
        **dict.fromkeys(("step-100", "step-200", "step-300"), "present"),
        **dict.fromkeys(("step-400", "step-1000"), "converted"),
    }
    assert hub.uploads[: len(uploads)] == uploads and len(hub.uploads) == len(uploads) + 2
    flip_byte(run / "step-200" / "model.safetensors")
    changed = ckptctl.convert_run(run, "hf://org/new@{name}", to="hf")
    assert statuses(changed)["step-200"] == "failed"
    reasons = {item.name: item.reason for item in changed.checkpoints}
    assert "`model.safetensors` of the source changed" in reasons["step-200"]
    changed = ckptctl.convert_run(run, "hf://org/new@{name}", to="hf", overwrite=True)
    assert statuses(changed)["step-200"] == "converted"
    assert set(statuses(changed).values()) == {"converted", "present"}


@pytest.mark.slow
@of_the_client
def test_existing_branch_and_folder_of_hub_repository(hub: Hub, run: Path) -> None:
    result = ckptctl.convert_run(run, "hf://org/new/run", to="hf", steps="100,200")
    assert set(statuses(result).values()) == {"converted"}
    assert {"run/step-100/config.json", "run/step-200/config.json"} <= {
        *hub.repositories["org/new"].files
    }
    again = ckptctl.convert_run(run, "hf://org/new/run", to="hf", steps="100")
    assert statuses(again) == {"step-100": "present"}
    flip_byte(run / "step-100" / "model.safetensors")
    result = ckptctl.convert_run(run, "hf://org/new/run", to="hf", steps="100,300")
    assert statuses(result) == {"step-100": "failed", "step-300": "converted"}
    again = ckptctl.convert_run(run, "hf://org/new/run", to="hf", steps="100:300")
    assert statuses(again) == {
        "step-100": "failed",
        **dict.fromkeys(("step-200", "step-300"), "present"),
    }, "a later commit of the branch does not count"
    result = ckptctl.convert_run(run, "hf://org/nothing@{name}", to="hf", steps="100")
    assert statuses(result) == {"step-100": "failed"}
    assert "no such repository" in result.checkpoints[0].reason
