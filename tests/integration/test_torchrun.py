"""Commands on many ranks that torchrun started: the bytes of one process, or nothing at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptctl
from ckptctl.storage.destinations import get_staging_directory
from tests import torchrun
from tests.checkpoints import differences, load_any_reference, save_hf, tiny_llama
from tests.checkpoints.adapters import random_adapter, save_peft

REPOSITORY = Path(__file__).parents[2]
METADATA = 400_000
"""Bytes of headers, directories and lists that every rank may read for itself."""
JOB = "tests.integration.torchrun_job"


def launch(
    arguments: list[str], ranks: int, folder: Path, timeout: float = 150
) -> subprocess.CompletedProcess[str]:
    """Start Python with *arguments* on *ranks* ranks; one rank is an ordinary process."""
    if ranks > 1:
        return torchrun.launch(arguments, ranks, folder, timeout)
    command = [sys.executable, *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    child = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        output, errors = child.communicate()
        raise AssertionError(f"no end after {timeout} s\n{output}{errors}") from None
    return subprocess.CompletedProcess(command, child.returncode, output, errors)


def run_job(
    folder: Path, ranks: int, *, timeout: float = 150, **job: Any
) -> tuple[list[list[dict[str, Any]]], str]:
    """Return what came out on every rank, and what all of them printed."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "job.json"
    path.write_text(json.dumps({**job, "report": str(folder / "report")}))
    done = launch(["-m", JOB, str(path)], ranks, folder, timeout)
    reports = [folder / f"report.{rank}" for rank in range(ranks)]
    found = [json.loads(one.read_text()) if one.exists() else [] for one in reports]
    return found, done.stdout + done.stderr


def contents(path: Path) -> dict[str, str]:
    """Return the SHA-256 of every file at *path*, by name."""
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files
    }


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """Return a folder with what is converted; one tensor of ``big`` is most of it."""
    folder = tmp_path_factory.mktemp("sources")
    torch.manual_seed(3)
    big = {
        "a.weight": torch.randn(70, 3),
        "b.weight": torch.randn(2501, 1003),
        "c.weight": torch.randn(1003, 501).to(torch.bfloat16),
        "d.bias": torch.randn(9),
    }
    (folder / "big").mkdir()
    save_file(big, folder / "big" / "model.safetensors", {"format": "pt"})
    state, config = tiny_llama("llama3")
    save_hf(folder / "llama", state, config)
    save_peft(folder / "adapter", random_adapter(state))
    shutil.copytree(data / "dcp-rank-local" / "w2", folder / "ranks")
    return folder


def commands(sources: Path, out: Path) -> list[list[str]]:
    """Return command lines, each of which may use what the ones before it wrote."""
    big, llama = str(sources / "big"), str(sources / "llama")
    return [
        ["convert", big, f"{out}/dcp", "--to", "dcp"],
        ["convert", f"{out}/dcp", f"{out}/hf", "--to", "hf", "--dtype", "bf16", "--verify"],
        ["convert", f"{out}/dcp", f"{out}/torch.pt", "--to", "torch"],
        ["convert", llama, f"{out}/meta", "--to", "meta", "--mp", "2"],
        ["convert", big, f"{out}/plain", "--to", "dcp", "--no-checksum", "--max-shard-size", "1MB"],
        ["consolidate", str(sources / "ranks"), f"{out}/whole", "--to", "dcp", "--optimizer"],
        ["merge", llama, str(sources / "adapter"), f"{out}/merged", "--to", "hf"],
        ["verify", f"{out}/torch.pt", "--level", "full", "--nan"],
        ["verify", f"{out}/dcp", "--level", "full", "--manifest"],
    ]


@pytest.fixture(scope="module")
def alone(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """Return what one process writes, and how many bytes it reads for each command."""
    folder = tmp_path_factory.mktemp("alone")
    (found,), printed = run_job(folder, 1, commands=commands(sources, folder / "out"))
    assert [one["code"] for one in found] == [0] * len(commands(sources, folder)), printed
    return folder / "out", [one["read"] for one in found]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_multi_rank_output_matches_single_process(
    ranks: int, sources: Path, alone: tuple[Path, list[int]], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    asked = commands(sources, out)
    found, printed = run_job(tmp_path, ranks, commands=asked)
    for rank, results in enumerate(found):
        assert [one["code"] for one in results] == [0] * len(asked), (rank, printed)
    assert contents(out) == contents(alone[0])
    assert printed.count("files\t") == 9, "every command prints once"
    read = [[one["read"] for one in results] for results in found]
    for index, command in enumerate(asked):
        parts = [counts[index] for counts in read]
        assert sum(parts) <= alone[1][index] + ranks * METADATA, (command, parts)
    # The big tensor is cut: no rank reads most of it.
    assert max(counts[0] for counts in read) < 1.1 * alone[1][0] / ranks + METADATA, read
    assert max(counts[7] for counts in read) < alone[1][7]


@pytest.mark.slow
def test_single_process_output_matches_source(sources: Path, alone: tuple[Path, list[int]]) -> None:
    expected = load_any_reference(sources / "big")
    for name in ("dcp", "torch.pt", "plain"):
        assert not differences(load_any_reference(alone[0] / name), expected)


def flip(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))


def nothing_is_left(target: Path) -> None:
    assert not target.exists()
    assert not get_staging_directory(target).exists()


@pytest.mark.slow
def test_multi_rank_errors_are_printed_once(
    sources: Path, alone: tuple[Path, list[int]], tmp_path: Path
) -> None:
    """A dry run on many ranks, a resumed one, damaged sources, none at all."""
    torn, wrong = tmp_path / "torn", tmp_path / "wrong"
    shutil.copytree(sources / "big", torn)
    os.truncate(torn / "model.safetensors", 5_000_000)
    shutil.copytree(alone[0] / "dcp", wrong)
    flip(wrong / "__0_0.distcp", 5_000)
    flip(wrong / "__0_0.distcp", 10_500_000)
    out = tmp_path / "out"
    convert = ["convert", str(sources / "big"), str(out), "--to", "dcp"]
    asked = [
        [*convert, "--dry-run"],
        [*convert, "--resume"],
        ["convert", str(torn), str(out), "--to", "dcp"],
        ["verify", str(torn)],
        ["verify", str(wrong), "--level", "full"],
        ["convert", str(sources / "nothing"), str(out), "--to", "dcp"],
    ]
    found, printed = run_job(tmp_path, 2, commands=asked)
    for results in found:
        assert [one["code"] for one in results] == [0, 6, 4, 4, 4, 3], printed
    assert printed.count(f"target\t{out}") == 1
    assert printed.count("`--resume` is not supported with multiple ranks") == 1
    assert printed.count("no such file or directory") == 1
    errors = [found.why for found in ckptctl.verify(wrong, level="full").errors]
    assert len(errors) >= 3
    assert all(printed.count(str(why)) == 1 for why in errors), printed
    nothing_is_left(out)


@pytest.mark.slow
def test_different_options_across_ranks_are_refused(sources: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    asked = [["convert", str(sources / "big"), str(out), "--to", "dcp"]]
    found, printed = run_job(tmp_path, 2, commands=asked, more={"1": ["--dtype", "bf16"]})
    assert [results[0]["code"] for results in found] == [2, 2], printed
    assert printed.count("option `dtype`") == 1 and "'bfloat16' on rank 1" in printed
    nothing_is_left(out)


@pytest.mark.slow
def test_overflow_counts_are_summed_over_ranks(tmp_path: Path) -> None:
    """Each of them has some of the elements that become infinite."""
    large = torch.full((1000, 900), 1e5)
    save_file({"large": large}, tmp_path / "large.safetensors", {"format": "pt"})
    out = tmp_path / "out.pt"
    convert = ["convert", str(tmp_path / "large.safetensors"), str(out), "--to", "torch"]
    convert += ["--dtype", "fp16"]
    found, printed = run_job(tmp_path / "refused", 2, commands=[convert])
    assert [results[0]["code"] for results in found] == [6, 6], printed
    assert printed.count("`large`: 900,000 infinite") == 1, printed
    nothing_is_left(out)
    found, printed = run_job(tmp_path / "done", 2, commands=[[*convert, "--allow-overflow"]])
    assert [results[0]["code"] for results in found] == [0, 0], printed
    assert "`large`: 900,000 infinite" in printed


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of packages that transformers imports
def test_missing_tensor_of_reference_is_refused_on_all_ranks(tmp_path: Path) -> None:
    """Rank 0 compares for all ranks, when they plan a conversion and when they verify."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.OPTConfig(**sizes, word_embed_proj_dim=16, vocab_size=50)
    complete, lossy, out, old = (tmp_path / name for name in ("complete", "lossy", "out", "old"))
    transformers.OPTForCausalLM(config).save_pretrained(complete)
    state = load_any_reference(complete)
    lost = "model.decoder.layers.1.fc1.bias"
    save_hf(lossy, {name: value for name, value in state.items() if name != lost})
    shutil.copy(complete / "config.json", lossy)
    shutil.copytree(complete, old)
    before = contents(old)
    reference = ["--reference", "transformers"]
    asked = [
        ["convert", str(complete), str(out), "--to", "dcp", *reference],
        ["convert", str(lossy), str(old), "--to", "dcp", "--overwrite", *reference],
        ["verify", str(lossy), *reference],
    ]
    found, printed = run_job(tmp_path / "job", 2, timeout=600, commands=asked)
    for results in found:
        assert [one["code"] for one in results] == [0, 4, 4], printed
    assert [[one["compared"] for one in results] for results in found] == [[1, 1, 1], [0, 0, 0]]
    assert printed.count(f"`OPTForCausalLM` requires `{lost}`") == 1, printed
    assert not differences(load_any_reference(out), state)
    assert contents(old) == before
    assert not get_staging_directory(old).exists()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_full_disk_on_one_rank_fails_all_ranks(rank: int, sources: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    asked = [["convert", str(sources / "big"), str(out), "--to", "torch"]]
    fault = {"rank": rank, "kind": "full", "after": 1}
    found, printed = run_job(tmp_path, 3, commands=asked, faults=[fault])
    assert [results[0]["code"] for results in found] == [8, 8, 8], printed
    assert printed.count("ENOSPC") == 1
    assert ("rank 1: cannot write" in printed) == (rank == 1)
    nothing_is_left(out)


@pytest.mark.slow
def test_failure_on_one_rank_stops_others_early(sources: Path, tmp_path: Path) -> None:
    """Rank 0 waits within its share until the other one has failed, and is stopped there."""
    out = tmp_path / "out"
    small = ["--memory", "64KiB", "--jobs", "1"]
    asked = [["convert", str(sources / "big"), str(out), "--to", "torch", *small]]
    told = str(get_staging_directory(out) / "failed")
    waiting = {"rank": 0, "kind": "wait", "after": 20, "until": told}
    faults = [waiting, {"rank": 1, "kind": "full", "after": 1}]
    found, printed = run_job(tmp_path, 2, commands=asked, faults=faults)
    assert [results[0]["code"] for results in found] == [8, 8], printed
    assert found[0][0]["written"] < 50, "80 writes are its share"
    nothing_is_left(out)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_killed_rank_publishes_nothing_and_rerun_succeeds(
    rank: int, sources: Path, tmp_path: Path
) -> None:
    """Nothing is published; where rank 0 is killed, the next run removes what it left."""
    out = tmp_path / "out"
    asked = [["convert", str(sources / "big"), str(out), "--to", "torch"]]
    fault = {"rank": rank, "kind": "kill", "after": 1}
    run_job(tmp_path, 3, commands=asked, faults=[fault])
    assert not out.exists()
    if rank:
        nothing_is_left(out)
    (found,), printed = run_job(tmp_path / "again", 1, commands=asked)
    assert found[0]["code"] == 0, printed
    assert not get_staging_directory(out).exists()


@pytest.mark.slow
def test_module_under_torchrun_matches_single_process_output(
    sources: Path, alone: tuple[Path, list[int]], tmp_path: Path
) -> None:
    out = tmp_path / "dcp"
    arguments = ["-m", "ckptctl", "convert", str(sources / "big"), str(out), "--to", "dcp", "-q"]
    done = launch(arguments, 2, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{out}\n"
    expected = contents(alone[0] / "dcp")
    del expected["SHA256SUMS"]
    assert contents(out) == expected


def test_single_process_imports_no_distributed_code(sources: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from ckptctl.cli.app import app; "
        f"app(['convert', {str(sources / 'big')!r}, 'out', '--to', 'dcp'], standalone_mode=False); "
        "sys.exit('torch' in sys.modules or 'ckptctl.distributed' in sys.modules)"
    )
    done = launch(["-c", code], 1, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_command_inside_training_rank_needs_single_process(sources: Path, tmp_path: Path) -> None:
    """It says that nobody answers, ends with SIGTERM, and the training's own groups still work."""
    job = tmp_path / "job.py"
    job.write_text(f"""
import signal, subprocess, sys
import torch, torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    asked = ["convert", {str(sources / "big")!r}, "out", "--to", "dcp"]
    command = [sys.executable, "-m", "ckptctl", *asked]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    line = child.stderr.readline()
    assert "waiting for the other ranks (this is rank 0 of 2" in line, line
    child.send_signal(signal.SIGTERM)
    assert child.stderr.read() == "error: interrupted\\n"
    assert child.wait() == 130
    assert subprocess.run([*command, "--single-process"]).returncode == 0
ones = torch.ones(1)
dist.all_reduce(ones, group=dist.new_group())
assert ones == 2
dist.destroy_process_group()
""")
    done = launch([str(job)], 2, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not differences(
        load_any_reference(tmp_path / "out"), load_any_reference(sources / "big")
    )
