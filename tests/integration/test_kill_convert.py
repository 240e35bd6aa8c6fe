"""``kill -9`` at random moments of whole conversions: the destination is absent or complete."""

import hashlib
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoints import tiny_llama

TRIALS = 12


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kill") / "source"
    folder.mkdir()
    state, config = tiny_llama("llama3", hidden=512, vocab=8192, ffn=1536)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def digest(folder):
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        found.update(str(path.relative_to(folder)).encode())
        found.update(path.read_bytes() if path.is_file() else b"")
    return found.hexdigest()


def convert(source, target, to, *options):
    command = [sys.executable, "-m", "ckptctl", "convert", str(source), str(target), "--to", to]
    return subprocess.Popen([*command, "-q", *options], stdout=subprocess.DEVNULL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("to", "options"),
    [
        ("meta", ["--mp", "2", "--jobs", "16"]),
        ("dcp", ["--resume"]),
        ("dcp", ["--resume", "--jobs", "16", "--max-shard-size", "1MB"]),
    ],
)
def test_convert_killed_at_random_leaves_complete_or_none(source, tmp_path, to, options):
    torch.manual_seed(0)
    rng = random.Random(0)
    before = digest(source)
    reference = tmp_path / "reference"
    start = time.monotonic()
    assert convert(source, reference, to, *options).wait() == 0
    duration = time.monotonic() - start
    whole = digest(reference)
    killed = 0
    for trial in range(TRIALS):
        target = tmp_path / f"out-{trial}"
        process = convert(source, target, to, *options)
        if trial:
            time.sleep(rng.uniform(0.3, 1.05) * duration)
        else:  # as soon as it writes
            while process.poll() is None and not list(tmp_path.glob(f".{target.name}.*")):
                time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        killed += process.wait() != 0
        assert not target.exists() or digest(target) == whole
        if not target.exists():
            others = ["--jobs", "1" if "--jobs" in options else "16"]
            assert convert(source, target, to, *options, *others).wait() == 0
            assert digest(target) == whole
    assert killed
    assert digest(source) == before
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".out-0")]


OFTEN = """
from functools import partial
from ckptctl.storage.execution import execution_options
often = partial(execution_options.ExecutionOptions, journal_every=1)
execution_options.ExecutionOptions = often
from ckptctl.cli.app import main
main()
"""
"""The program, with a journal from the first bytes on."""


@pytest.mark.slow
def test_interrupted_convert_is_resumed_by_its_hint(source, tmp_path):
    """Interrupted in mid-copy without a word of --resume, gone on with by the hint alone."""
    reference, target = tmp_path / "reference", tmp_path / "out"
    left = tmp_path / ".out.ckptctl-staging"
    assert convert(source, reference, "dcp").wait() == 0
    how = [str(source), str(target), "--to", "dcp", "--jobs", "1", "--memory", "64KiB"]
    command = [sys.executable, "-c", OFTEN, "convert", *how]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    journal = left / "journal"
    while process.poll() is None and not (journal.exists() and journal.stat().st_size):
        time.sleep(0.0005)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "are written and kept\n" in said, said
    before = journal.read_bytes(), digest(left / "data")
    assert convert(source, target, "dcp").wait() == 6
    assert convert(source, target, "meta", "--resume").wait() == 6
    assert (journal.read_bytes(), digest(left / "data")) == before and not target.exists()
    hint = shlex.split(said.rpartition("hint: resume with `")[2].partition("`")[0])
    assert hint == ["ckptctl", "convert", *how, "--resume"]
    again = subprocess.run(
        [sys.executable, "-m", *hint, "--json"], capture_output=True, text=True, timeout=60
    )
    assert json.loads(again.stdout)["resumed_bytes"] > 0, again.stderr
    assert digest(target) == digest(reference)
    assert sorted(os.listdir(tmp_path)) == ["out", "reference"]
