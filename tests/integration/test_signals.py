"""Ctrl-C and SIGTERM to whole processes while they move or read bytes, and at no other time.

A process counts as at work once the kernel has read much more for it than any program or index
holds (``/proc/PID/io``); the checkpoints are holes in files, so they take no room.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from tests.checkpoints.adapters import save_peft
from tests.runs import save_step
from tests.sweeps import one_in

ROOT = Path(__file__).parents[2]
MB = 1_000_000
NBYTES = 768 * MB
BEGUN = 100 * MB
"""More than importing torch reads, and a part of the work."""
SOON = 300 * MB
"""What a process may still read after the signal; 668 MB are left to be read."""
HANGS = 60_000
WIDTH = 4096
KEY = "base_model.model.model.layers.0.mlp.up_proj"
READING = {
    "verify": "{big} --level full --nan --jobs 1",
    "diff": "{big} {other} --jobs 1",
    "inspect": "{big} --stats",
    "report": "{big} --stats -o {out}.html",
}
WRITING = {
    "convert": "{big} {out} --to dcp --jobs 1",
    "convert to one file": "{big} {out}.pt --to torch --jobs 1",
    "convert and resume": "{big} {out} --to dcp --jobs 1 --resume",
    "consolidate": "{shards} {out} --to dcp --jobs 1",
    "extract": "{big} '*' -o {out}.safetensors --jobs 1",
    "merge": "{big} {adapter} {out} -m llama3 --allow-missing --jobs 1",
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    folder = tmp_path_factory.mktemp("signals")
    for name in ("big", "other"):
        sparse(folder / name)
    weights = {
        f"{KEY}.lora_A.weight": torch.ones(2, WIDTH),
        f"{KEY}.lora_B.weight": torch.ones(NBYTES // 4 // WIDTH, 2),
    }
    save_peft(folder / "adapter", weights)
    sparse(folder / "shards", files=2)
    yield {path.name: path for path in folder.iterdir()}
    shutil.rmtree(folder)


def sparse(folder: Path, files: int = 1) -> None:
    """Write tensors of zeros that take no room on the disk."""
    folder.mkdir()
    rows = NBYTES // 4 // WIDTH // files
    names = [f"model.layers.{number}.mlp.up_proj.weight" for number in range(files)]
    for number, name in enumerate(names):
        size = rows * WIDTH * 4
        entry = {name: {"dtype": "F32", "shape": [rows, WIDTH], "data_offsets": [0, size]}}
        header = json.dumps(entry).encode()
        header += b" " * (-len(header) % 8)
        with (folder / file_name(number, files)).open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + size)
    if files > 1:
        index = {"weight_map": {name: file_name(n, files) for n, name in enumerate(names)}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def file_name(number: int, files: int) -> str:
    numbered = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
    return "model.safetensors" if files == 1 else numbered


def read_by(pid: int) -> int:
    """Return how many bytes the kernel has read for a process; 0: it was deleted."""
    if not Path("/proc/self/io").exists():
        pytest.skip("the kernel does not say what a process reads")
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    return int(lines[0].split()[1])


def stopped(
    words: Sequence[str], number: int, begun: Callable[[int], bool]
) -> tuple[int, str, str, int]:
    """Send a signal to the program once it has begun; return how it ended and what it read then."""
    running = subprocess.Popen(
        [sys.executable, "-m", "ckptctl", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not begun(running.pid):
        if running.poll() is not None:
            break
        time.sleep(0.001)
    assert running.poll() is None, f"it ended before the signal: {running.communicate()}"
    running.send_signal(number)
    before = after = read_by(running.pid)
    for _ in range(HANGS):
        after = max(after, read_by(running.pid))
        if running.poll() is not None:
            break
        time.sleep(0.001)
    out, said = running.communicate(timeout=1)
    return running.returncode, out, said, after - before


def filled(line: str, places: dict[str, Path], out: Path) -> list[str]:
    name, _, text = line.partition(" ")
    words = text.replace("'", "").format(out=out, **places).split()
    return [name, *words]


@pytest.mark.parametrize(
    ("name", "number"),
    one_in(
        2,
        [
            ("convert", signal.SIGINT),
            ("convert", signal.SIGTERM),
            *(
                pytest.param(name, signal.SIGINT, marks=pytest.mark.slow)
                for name in WRITING
                if name != "convert"
            ),
            pytest.param("convert and resume", signal.SIGTERM, marks=pytest.mark.slow),
            pytest.param("extract", signal.SIGTERM, marks=pytest.mark.slow),
        ],
    ),
)
def test_interrupted_write_exits_130_and_cleans_up(
    places: dict[str, Path], tmp_path: Path, name: str, number: int
) -> None:
    words = filled(f"{name.split()[0]} {WRITING[name]}", places, tmp_path / "out")
    code, out, said, read = stopped(words, number, lambda pid: read_by(pid) > BEGUN)
    assert (code, out) == (130, "")
    errors = 1 + ("--allow-missing" in words)  # what is missing is said before the work begins
    assert said.endswith("error: interrupted\n") and said.count("error: ") == errors, said
    assert read < SOON
    left = [item.name for item in tmp_path.iterdir()]
    assert left == ([".out.ckptctl-staging"] if "--resume" in words else [])


@pytest.mark.parametrize(
    ("name", "machine", "number"),
    one_in(
        2,
        [
            ("verify", False, signal.SIGINT),
            *(
                pytest.param(name, False, signal.SIGINT, marks=pytest.mark.slow)
                for name in ("diff", "inspect", "report")
            ),
            ("diff", True, signal.SIGINT),
            pytest.param("verify", False, signal.SIGTERM, marks=pytest.mark.slow),
        ],
    ),
)
def test_interrupted_read_exits_130(
    places: dict[str, Path], tmp_path: Path, name: str, machine: bool, number: int
) -> None:
    words = filled(f"{name} {READING[name]}", places, tmp_path / "out")
    more = ["--json"] if machine else []
    begun: Callable[[int], bool] = lambda pid: read_by(pid) > BEGUN  # noqa: E731
    code, out, said, read = stopped([*words, *more], number, begun)
    assert (code, out) == (130, "")
    if machine:
        assert json.loads(said)["error"]["code"] == "interrupted"
    else:
        assert said.endswith("error: interrupted\n") and said.count("error: ") == 1, said
    assert read < SOON
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, id="ctrl-c"),
        pytest.param(signal.SIGTERM, id="term", marks=pytest.mark.slow),
    ],
)
def test_interrupted_prune_keeps_newest_and_resumes(tmp_path: Path, number: int) -> None:
    """What is left is whole or in the trash, and the next run goes on."""
    names = [f"step-{step}" for step in range(1, 301)]
    for name in names:
        save_step(tmp_path / name)
    words = ["prune", str(tmp_path), "--keep-last", "1", "--yes"]
    begun: Callable[[int], bool] = lambda _: not (tmp_path / names[4]).exists()  # noqa: E731
    code, _, said, read = stopped(words, number, begun)
    assert code == 130 and said.endswith("error: interrupted\n"), said
    assert read < SOON
    left = {item.name for item in tmp_path.iterdir()} - {".ckptctl-trash"}
    assert 1 < len(left) < len(names) - 4
    assert left == set(names[-len(left) :]), "the oldest go first"
    assert all((tmp_path / name / "model.safetensors").stat().st_size > 64 for name in left)
    done = subprocess.run([sys.executable, "-m", "ckptctl", *words], cwd=ROOT, capture_output=True)
    assert done.returncode == 0
    assert os.listdir(tmp_path) == [names[-1]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ls", "latest"])
def test_interrupted_listing_exits_130(tmp_path: Path, name: str) -> None:
    for step in range(1, 301):
        save_step(tmp_path / f"step-{step}").joinpath("model.safetensors").write_bytes(b"torn")
    begun: Callable[[int], bool] = lambda pid: opened(pid, tmp_path)  # noqa: E731
    code, out, said, read = stopped([name, str(tmp_path)], signal.SIGINT, begun)
    assert (code, out, said) == (130, "", "error: interrupted\n")
    assert read < SOON


def opened(pid: int, folder: Path) -> bool:
    """Return whether a process has a file below *folder* open."""
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            if str(folder) in os.readlink(link):
                return True
        except OSError:
            continue
    return False
