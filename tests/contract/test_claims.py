"""What commands claim of a checkpoint follows from what was changed in it and what was read.

Every command that states completeness is asked about the same change. All give one verdict, in the
output and in JSON, and none claims more than the change and the bytes that were read bear out.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import ckptctl
from ckptctl.cli.app import app
from ckptctl.errors import CkptError, DamagedError, MissingTensorsError
from ckptctl.verbs.verification.model_check import UNCOUNTED_LAYERS
from ckptctl.verdict import UNKNOWN_MODEL, Verdict
from tests.checkpoints import save_dcp, save_hf, save_torch, tiny_llama
from tests.runs import START, age
from tests.sweeps import one_in

State = dict[str, torch.Tensor]
EXIT = {Verdict.COMPLETE: 0, Verdict.DAMAGED: 4, Verdict.UNKNOWN: 9}
FORMATS = ("hf", "dcp", "torch")
STATE, CONFIG = tiny_llama()
FEW = ("model.norm.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight")
OTHERS = {f"net.block.{n}.w{m}": torch.full((4, 3), float(n + m)) for n in range(2) for m in (1, 2)}


def run(*arguments: object) -> tuple[int, Any]:
    """Run a command with ``--json``; return its exit code and its document."""
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    return done.exit_code, json.loads(done.stdout or done.stderr)


def write(folder: Path, name: str, state: Mapping[str, Any], config: Any = None) -> Path:
    """Write *state* as a step of a run, with other people's code."""
    path = folder / "run" / "step-1"
    path.mkdir(parents=True)
    match name:
        case "hf":
            save_hf(path, state, shards=2)
        case "dcp":
            save_dcp(path, state)
        case "torch":
            save_torch(path / "pytorch_model.bin", state)
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    age(path, START)
    return path


def verdicts(path: Path) -> Iterator[tuple[str, str]]:
    """Yield what each command that states a verdict says of the step at *path*."""
    for level in ("fast", "headers", "full"):
        code, found = run("verify", path, "--level", level)
        assert code == EXIT[Verdict(found["verdict"])]
        yield f"verify --level {level}", found["verdict"]
    yield "inspect", said_by("inspect", path)
    yield "ls", run("ls", path.parent)[1]["checkpoints"][0]["verdict"]
    page = path.parent.parent / "report.html"
    yield "report", said_by("report", path, "--output", page, "--overwrite")


def said_by(command: str, *arguments: object) -> str:
    """Return the verdict of a command, or the one that its error amounts to."""
    code, found = run(command, *arguments)
    if "verdict" in found:
        return str(found["verdict"])
    return next(verdict.value for verdict, exit_code in EXIT.items() if exit_code == code)


def require_verdict(path: Path, verdict: str) -> None:
    found = dict(verdicts(path))
    assert found == dict.fromkeys(found, verdict)


@pytest.mark.parametrize("format", FORMATS)
def test_complete_checkpoint_is_complete_in_every_command(tmp_path: Path, format: str) -> None:
    path = write(tmp_path, format, STATE, CONFIG)
    require_verdict(path, "complete")
    assert run("verify", path)[1]["complete"] is True
    assert run("inspect", path)[1]["complete"] is True


@pytest.mark.parametrize("format", one_in(4, FORMATS))
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FEW else pytest.mark.slow) for n in STATE]
)
def test_missing_tensor_is_damaged_in_every_command(tmp_path: Path, format: str, name: str) -> None:
    path = write(tmp_path, format, {n: t for n, t in STATE.items() if n != name}, CONFIG)
    require_verdict(path, "damaged")
    assert run("inspect", path)[1]["lacks"] == [name]
    (finding,) = run("verify", path)[1]["findings"]
    assert (finding["severity"], finding["basis"], finding["tensor"]) == ("error", "model", name)
    with pytest.raises(MissingTensorsError) as caught:
        ckptctl.convert(path, tmp_path / "out", to="dcp")
    assert caught.value.exit_code == 4 and name in str(caught.value.why)
    assert run("latest", path.parent)[0] == 4
    later = path.parent / "step-2"
    shutil.copytree(path, later)
    age(later, START + 60)
    code, plan = run("prune", path.parent, "--keep-last", "1", "--include-incomplete", "--dry-run")
    assert code == 0 and {one["action"] for one in plan["decisions"]} == {"skip"}


@pytest.mark.parametrize("format", one_in(4, FORMATS))
@pytest.mark.parametrize("dropped", [None, *OTHERS])
def test_unknown_model_type_is_structure_complete(
    tmp_path: Path, format: str, dropped: str | None
) -> None:
    state = {name: tensor for name, tensor in OTHERS.items() if name != dropped}
    path = write(tmp_path, format, state, {"model_type": "of_nobody"})
    require_verdict(path, "complete")
    for command in ("verify", "inspect"):
        _, found = run(command, path)
        assert found["complete"] is None and found["scope"] == "structure"
        assert UNKNOWN_MODEL in found["notes"]
    code, done = run("convert", path, tmp_path / "out", "--to", "dcp", "--dry-run")
    assert code == 0 and UNKNOWN_MODEL in done["notes"]


def test_missing_last_layer_without_config_is_noted_not_damaged(tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in STATE.items() if ".layers.1." not in name}
    require_verdict(write(tmp_path / "with", "dcp", state, CONFIG), "damaged")
    path = write(tmp_path / "without", "dcp", state)
    require_verdict(path, "complete")
    for command in ("verify", "inspect"):
        assert UNCOUNTED_LAYERS in run(command, path)[1]["notes"]


@pytest.mark.parametrize("format", FORMATS)
def test_stray_tensor_is_named_by_every_command(tmp_path: Path, format: str) -> None:
    stray = "model.layers.0.extra.weight"
    path = write(tmp_path, format, {**STATE, stray: torch.ones(3)}, CONFIG)
    require_verdict(path, "complete")
    for arguments in (
        ("verify", path),
        ("inspect", path),
        ("convert", path, tmp_path / "out", "--to", "dcp", "--dry-run"),
    ):
        _, found = run(*arguments)
        assert any(stray in note for note in found["notes"]), arguments


def data_files(path: Path) -> list[Path]:
    return [file for file in sorted(path.rglob("*")) if file.is_file() and file.suffix != ".json"]


@pytest.mark.parametrize("format", FORMATS)
def test_missing_or_truncated_file_is_damaged_in_every_command(tmp_path: Path, format: str) -> None:
    for number, file in enumerate(data_files(write(tmp_path / "whole", format, STATE, CONFIG))):
        for cut in (None, 0, file.stat().st_size // 2):
            path = write(tmp_path / f"{number}-{cut}", format, STATE, CONFIG)
            damaged = path / file.name
            if cut is None and len(data_files(path)) > 1:
                damaged.unlink()
            else:
                damaged.write_bytes(damaged.read_bytes()[: cut or 0])
            age(path, START)
            require_verdict(path, "damaged")
            with pytest.raises(CkptError):
                ckptctl.convert(path, tmp_path / "out", to="hf")


def flipped_copies(path: Path, to: Path) -> Iterator[tuple[Path, str]]:
    """Yield copies of *path* with one bit flipped in the middle of the data of one file."""
    for file in data_files(path):
        if file.stat().st_size < 4096 or file.name == ".metadata":
            continue  # an index has no data
        copy = to / f"flipped-{file.name}"
        shutil.copytree(path, copy)
        content = bytearray(file.read_bytes())
        content[len(content) * 2 // 3] ^= 1
        (copy / file.name).write_bytes(content)
        yield copy, file.name


@pytest.mark.parametrize("format", FORMATS)
def test_flipped_bit_is_never_reported_as_verified(tmp_path: Path, format: str) -> None:
    for copy, file in flipped_copies(write(tmp_path, format, STATE, CONFIG), tmp_path):
        code, found = run("verify", copy, "--level", "full")
        if format == "hf":  # nothing is recorded of its bytes
            assert (code, found["verdict"], found["data"]) == (0, "complete", "not verifiable")
            assert run("verify", copy, "--level", "full", "--require-verified")[0] == 9
        else:
            assert (code, found["verdict"]) == (4, "damaged"), file
            assert found["data"] == "partly verified"
            assert found["verified_tensors"] < found["tensors"]
        for level in ("fast", "headers"):
            assert run("verify", copy, "--level", level)[1]["data"] == "not read"


@pytest.mark.parametrize("format", FORMATS)
def test_flipped_bit_is_damage_when_manifest_exists(tmp_path: Path, format: str) -> None:
    source = write(tmp_path, format, STATE, CONFIG)
    code, found = run("verify", source, "--level", "full", "--manifest")
    assert code == 0
    code, found = run("verify", source, "--level", "full", "--require-verified")
    assert (code, found["data"], found["verified_tensors"]) == (0, "verified", len(STATE))
    for copy, file in flipped_copies(source, tmp_path):
        code, found = run("verify", copy, "--level", "full")
        assert (code, found["verdict"]) == (4, "damaged"), file
        for pair in ((source, copy), (copy, source)):
            try:
                assert not ckptctl.diff(*pair).same
            except DamagedError as error:
                assert file in str(error.where)


@pytest.mark.parametrize("format", FORMATS)
def test_bytes_read_cover_verified_bytes(tmp_path: Path, format: str) -> None:
    path = write(tmp_path, format, STATE, CONFIG)
    _, before = run("verify", path, "--level", "full")
    assert before["bytes_read"] >= before["verified_bytes"]
    assert (before["bytes_read"] == 0) == (format == "hf")
    run("verify", path, "--level", "full", "--manifest")
    _, after = run("verify", path, "--level", "full")
    assert after["bytes_read"] >= after["verified_bytes"] == after["bytes"]
