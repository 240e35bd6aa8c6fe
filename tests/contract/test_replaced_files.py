"""A run whose newest step has something else in place of one rank's file: what all verbs say.

That step is never complete, whichever format it has, and the one before it stays.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckptctl
from ckptctl.errors import CkptError
from ckptctl.planner.retention import Policy
from ckptctl.runs.removal import plan_prune, run_prune
from tests.checkpoints import save_hf, save_meta
from tests.contract.damaged import CONFIG, STATE
from tests.runs import START, age
from tests.sweeps import one_in

SAMPLES = {
    "deepspeed": ("deepspeed/z1_bf16/ckpt", "*/*rank_1*optim_states.pt"),
    "deepspeed, model": ("deepspeed/z1_bf16/ckpt", "*/*model_states.pt"),
    "deepspeed, stage 3": ("deepspeed/z3_fp32/ckpt", "*/*rank_1*model_states.pt"),
    "deepspeed-universal": ("deepspeed/universal_z2_w3/ckpt", "**/*.weight/fp32.pt"),
    "megatron": ("megatron/tp2_ep2/ckpt", "iter_*/mp_rank_01_001/*.pt"),
    "megatron, first": ("megatron/tp2_ep2/ckpt", "iter_*/mp_rank_00_000/*.pt"),
    "dcp": ("dcp/dcp2/ckpt", "__1_0.distcp"),
    "rank-files": ("rank_files/verl/ckpt", "**/model*rank_1.pt"),
}
MADE: dict[str, tuple[Callable[[Path], object], str]] = {
    "meta": (lambda path: save_meta(path, STATE, CONFIG, mp=2), "*.01.pth"),
    "meta, first": (lambda path: save_meta(path, STATE, CONFIG, mp=2), "*.00.pth"),
    "hf": (lambda path: save_hf(path, STATE, CONFIG, shards=2), "*-00002-of-*"),
}
CONTENT: dict[str, Callable[[bytes], bytes]] = {
    "garbage": lambda whole: random.Random(0).randbytes(len(whole)),
    "text": lambda _: b"no space left on device\n",
    "zeros": lambda whole: bytes(len(whole)),
    "cut": lambda whole: whole[: len(whole) // 3],
    "empty": lambda _: b"",
}
EXIT_CODES = {"garbage": (9,), "text": (4, 9), "zeros": (4,), "cut": (4,), "empty": (4,)}
"""Where an index says how long a file is, one that is too short is damaged, whatever it holds."""


@pytest.mark.parametrize("kind", one_in(2, [*SAMPLES, *MADE]))
def test_replaced_file_is_refused_and_keeps_older_step(
    data: Path, tmp_path: Path, kind: str
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    older, newer = run / "step-1", run / "step-2"
    if kind in SAMPLES:
        shutil.copytree(data / SAMPLES[kind][0], older)
    else:
        run.mkdir()
        MADE[kind][0](older)
    shutil.copytree(older, newer)
    rules = "megatron-core" if kind.startswith("megatron") else None
    assert ckptctl.verify(newer, rules=rules).verdict == "complete"
    (file, *_) = sorted(newer.glob((SAMPLES | MADE)[kind][1]))
    whole = file.read_bytes()
    for name, content in CONTENT.items():
        file.write_bytes(content(whole))
        age(older, START)
        age(newer, START + 60)
        found = ckptctl.verify(newer, rules=rules)
        assert found.exit_code in EXIT_CODES[name], (name, found.findings)
        with pytest.raises(CkptError) as caught:
            ckptctl.convert(newer, out, to="torch", rules=rules)
        assert caught.value.exit_code in (4, 5, 9), (name, caught.value)
        assert not out.exists()
        plan = plan_prune(run, Policy(last=1))
        assert "step-1" in {one.name for one in plan.list_decisions("keep")}, name
        assert not run_prune(plan).done
        assert older.is_dir()


@pytest.mark.parametrize("name", ["optimizer.pt", "rng_state_1.pth", "optimizer.bin"])
def test_damaged_trainer_state_is_error_and_keeps_older_step(tmp_path: Path, name: str) -> None:
    """As by a full disk: the model is complete, and no run resumes from there."""
    run = tmp_path / "run"
    for step in (1, 2):
        folder = save_hf(run / f"checkpoint-{step}", STATE, CONFIG)
        torch.save({"state": {}, "step": torch.tensor(step)}, folder / name)
    file = run / "checkpoint-2" / name
    whole = file.read_bytes()
    assert not ckptctl.verify(file.parent).findings
    for kind in ("zeros", "cut", "empty"):
        file.write_bytes(CONTENT[kind](whole))
        age(file.parent, START + 60)
        age(run / "checkpoint-1", START)
        (found,) = ckptctl.verify(file.parent).errors
        assert (found.file, found.tensor) == (name, None)
        assert "checkpoint-1" in {
            one.name for one in plan_prune(run, Policy(last=1)).list_decisions("keep")
        }
        ckptctl.convert(file.parent, tmp_path / f"{kind}.pt", to="torch")
    file.write_bytes(b"of a program that nobody knows")
    assert ckptctl.verify(file.parent).verdict == "complete"
    file.write_bytes(whole[:-2] + b"\x05\0note")
    assert not ckptctl.verify(file.parent).findings
    file.write_bytes(whole + bytes(512))
    assert not ckptctl.verify(file.parent).findings
    torch.load(file)
