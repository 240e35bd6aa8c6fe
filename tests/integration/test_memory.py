"""Peak memory is a budget: the same for 150 MB and 300 MB, under a limit the kernel enforces."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import tiny_llama
from tests.contract.support import WRITABLE, place
from tests.sweeps import one_in

REPOSITORY = Path(__file__).parents[2]
MB = 1_000_000
# An address space counts code, thread stacks and buffers alike; the data would not fit in it. glibc
# reserves 64 MB of addresses, not of memory, for each thread's heap, as long as there are any left:
# with one heap for all the limit is about memory.
LIMIT = 140 * MB
LONG = ("meta", "torch")
"""Formats with the longest conversions: the slow tests have them."""
ONE_HEAP = {"MALLOC_ARENA_MAX": "1"}
PROGRAM = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))
import ckptctl
ckptctl.convert(sys.argv[1], sys.argv[2], to=sys.argv[3], jobs=2)
with open("/proc/self/status") as status:
    print(next(line.split()[1] for line in status if line.startswith("VmHWM")))
"""

THREADS = """
import sys
from dataclasses import replace
import ckptctl, torch
from ckptctl.conversion.conversion_options import WriteOptions

def peak():
    with open("/proc/self/status") as status:
        return int(next(line.split()[1] for line in status if line.startswith("VmHWM")))

def convert(**options):
    how = {"to": "dcp", "jobs": 16, "max_shard_size": "20MB"}
    return ckptctl.convert(sys.argv[1], sys.argv[2], **how, **options)

def converted_in_two_runs():
    execution = WriteOptions.to_execution_options
    WriteOptions.to_execution_options = lambda self: replace(execution(self), journal_every=1)
    done = []
    def interrupt(nbytes):
        done.append(nbytes)
        if sum(done) > 150_000_000:
            raise KeyboardInterrupt
    try:
        convert(resume=True, progress=interrupt)
    except KeyboardInterrupt:
        assert convert(resume=True).resumed_bytes > 50_000_000

def merge():
    from pathlib import Path
    from safetensors import safe_open
    from tests.checkpoints.adapters import save_peft
    with safe_open(sys.argv[1] + "/model.safetensors", "pt") as file:
        rows, columns = file.get_slice("lm_head.weight").get_shape()
    factors = {"A": torch.ones(8, columns), "B": torch.ones(rows, 8)}
    named = {f"base_model.model.lm_head.lora_{key}.weight": factors[key] for key in factors}
    adapter = save_peft(Path(sys.argv[2], "adapter"), named)
    return ckptctl.merge(sys.argv[1], adapter, sys.argv[2] + "/merged", jobs=16)

def load():
    from safetensors import safe_open
    with safe_open(sys.argv[1] + "/model.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}
    state = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    read, before = ckptctl.load, peak()
    read(state, sys.argv[1], jobs=16)
    assert not any(map(torch.any, state.values()))
    return peak() - before

before = peak()
"""


def llama(folder: Path, nbytes: int) -> Path:
    """Write a Llama of zeros, of which *nbytes* are embeddings and output, as safetensors."""
    width = 1024
    rows = nbytes // (2 * width * 2)
    state, config = tiny_llama(
        "llama3", hidden=64, layers=1, heads=2, kv_heads=2, vocab=80, ffn=224
    )
    config |= {"hidden_size": width, "vocab_size": rows, "head_dim": width // 2}
    config |= {"intermediate_size": 3584}
    shapes = {name: [_grown(size, width, rows) for size in t.shape] for name, t in state.items()}
    header: dict[str, object] = {}
    end = 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(header).encode()
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + end)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _grown(size: int, width: int, rows: int) -> int:
    return {64: width, 80: rows, 224: 3584}[size]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Return a folder in memory where there is one: the disk is not what is tested."""
    import tempfile

    parent = "/dev/shm" if Path("/dev/shm").is_dir() else None
    found = Path(tempfile.mkdtemp(dir=parent, prefix="ckptctl-memory-"))
    yield found
    shutil.rmtree(found)


def peak(source: Path, target: str, folder: Path) -> int:
    """Convert under the limit in a new process and return its peak resident memory in bytes."""
    out = place(folder, target)
    command = [sys.executable, "-c", PROGRAM.format(limit=LIMIT), source, out, target]
    done = subprocess.run(
        list(map(str, command)),
        cwd=REPOSITORY,
        env=os.environ | ONE_HEAP,
        capture_output=True,
        text=True,
        timeout=120,
    )
    out.unlink() if out.is_file() else shutil.rmtree(out, ignore_errors=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout) * 1024


@pytest.mark.parametrize(
    "target",
    one_in(2, [pytest.param(to, marks=pytest.mark.slow if to in LONG else ()) for to in WRITABLE]),
)
def test_convert_memory_is_independent_of_model_size(folder: Path, target: str) -> None:
    sizes = {}
    for nbytes in (150 * MB, 300 * MB):
        source = folder / f"model-{nbytes}"
        if not source.exists():
            llama(source, nbytes)
        sizes[nbytes] = peak(source, target, folder)
    small, large = sizes.values()
    assert large < 150 * MB
    assert large - small < 8 * MB


@pytest.mark.slow
@pytest.mark.parametrize(
    "work",
    [
        "convert(dtype='float16'); print(peak() - before)",
        *(
            pytest.param(work, marks=pytest.mark.slow)
            for work in (
                "convert(dtype='float32'); print(peak() - before)",
                "converted_in_two_runs(); print(peak() - before)",
                "merge(); print(peak() - before)",
                "print(load())",
            )
        ),
    ],
)
def test_sixteen_threads_stay_within_300_mb(folder: Path, work: str) -> None:
    source, out = folder / f"model-{300 * MB}", folder / "out"
    if not source.exists():
        llama(source, 300 * MB)
    command = [sys.executable, "-c", THREADS + work, str(source), str(out)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    shutil.rmtree(out, ignore_errors=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 < 300 * MB


def test_memory_limit_is_enforced(folder: Path) -> None:
    """The control: a program that reads a tensor whole does not live within it."""
    code = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({LIMIT}, {LIMIT}));"
    done = subprocess.run(
        [sys.executable, "-c", f"{code} bytearray({150 * MB})"], capture_output=True, text=True
    )
    assert "MemoryError" in done.stderr
