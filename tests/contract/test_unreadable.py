"""Each file of a checkpoint that may not be read: every command ends with 8, and deletes nothing.

Root may read everything, so the commands run in a process that gave up these capabilities.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ckptctl.cli.app import app
from ckptctl.errors import StorageError

DATA = Path(__file__).parents[1] / "data"
CHECKPOINTS = {
    "hf": "tiny-llama3-hf",
    "hf-rank-shards": "hf-rank-shards/hf_sharded/ckpt",
    "dcp": "dcp/dcp_2d/ckpt",
    "dcp-rank-local": "dcp-rank-local/w2/ckpt",
    "deepspeed": "deepspeed/z3_fp32/ckpt",
    "deepspeed-universal": "deepspeed/universal_z2_w3/ckpt",
    "megatron": "megatron/tp2_ep2/ckpt",
    "mcore": "wrappers/megatron/ckpt/iter_0000010",
    "rank-files": "rank_files/verl/ckpt",
    "torch-checkpointing": "torch_checkpointing/two_rank/ckpt",
    "torchsnapshot": "wrappers/torchsnapshot/ckpt/snap",
    "vescale": "vescale/w2/ckpt",
    "lightning": "wrappers/lightning_fsdp1/ckpt/epoch=0-step=2.ckpt",
}
MORE = [name for name in CHECKPOINTS if name not in ("hf", "dcp")]
UNUSED = ("generation_config.json", "tokenizer", "chat_template", "fsdp_config.json")
"""What the names of files begin with that hold neither weights nor their description."""
EVERY = 3
"""Of so many files of a checkpoint one is taken away at a time; the folder always."""
FOLDERS = 2
CAPABILITIES = 0b110
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH."""


def drop_capabilities() -> None:
    """Obey the modes of files as any user does."""

    class Head(ctypes.Structure):
        _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]

    class Data(ctypes.Structure):
        _fields_ = [(name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable")]

    libc = ctypes.CDLL(None, use_errno=True)
    head, data = Head(0x20080522, 0), (Data * 2)()
    assert libc.capget(ctypes.byref(head), data) == 0
    for name in ("effective", "permitted", "inheritable"):
        setattr(data[0], name, getattr(data[0], name) & ~CAPABILITIES)
    assert libc.capset(ctypes.byref(head), data) == 0


def lines(run: Path, checkpoint: Path, scratch: Path, rules: list[str]) -> dict[str, list[str]]:
    """Return a command line of each command that reads a checkpoint, or a run."""
    own, output = str(checkpoint), str(scratch / "out.pt")
    prune = ["prune", str(run), "--keep-last", "1", "--include-incomplete", "--min-age", "0s"]
    return {
        "inspect": ["inspect", own, *rules],
        "verify": ["verify", own, *rules],
        "verify --level full": ["verify", own, "--level", "full", *rules],
        "convert": ["convert", own, output, "--to", "torch", *rules],
        "diff": ["diff", own, own, *rules],
        "report": ["report", own, "-o", str(scratch / "page.html"), *rules],
        "ls": ["ls", str(run)],
        "latest": ["latest", str(run)],
        "prune --dry-run": [*prune, "--dry-run"],
        "prune": [*prune, "--yes"],
    }


def codes(given: dict[str, list[str]], scratch: Path) -> dict[str, int]:
    """Return what each command line ends with."""
    found = {}
    for name, line in given.items():
        found[name] = CliRunner().invoke(app, line, prog_name="ckptctl").exit_code
        for file in scratch.iterdir():
            file.unlink()
    return found


def denied(checkpoint: Path) -> Iterator[Path]:
    """Yield what is taken away in turn."""
    folders = [checkpoint, *(path for path in sorted(checkpoint.rglob("*")) if path.is_dir())]
    files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file()]
    yield from folders[:FOLDERS]
    yield from [path for path in files if not path.name.startswith(UNUSED)][::EVERY]


def sweep(name: str, folder: Path) -> dict[str, dict[str, int]]:
    """Return what does not end with 8, or was deleted, by the path that could not be read."""
    source = DATA / CHECKPOINTS[name]
    run, scratch = folder / "run", folder / "scratch"
    scratch.mkdir()
    checkpoint = run / (source.name if source.suffix == ".ckpt" else "step-2")
    shutil.copytree(source, checkpoint, copy_function=shutil.copyfile)
    for path in (checkpoint, *checkpoint.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    rules = ["--rules", "megatron-core"] if name in ("megatron", "mcore") else []
    given = lines(run, checkpoint, scratch, rules if name == "megatron" else [])
    drop_capabilities()
    usual = codes(given, scratch)
    found: dict[str, dict[str, int]] = {}
    for path in denied(checkpoint):
        mode = path.stat().st_mode
        path.chmod(0)
        wrong = {
            line: code
            for line, code in codes(given, scratch).items()
            if code != StorageError.exit_code and usual[line] == 0
        }
        if not path.exists():
            wrong["deleted"] = -1
        path.chmod(mode)
        if wrong:
            found[str(path.relative_to(run))] = wrong
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hf", "dcp", *MORE])
def test_unreadable_file_exits_8_in_every_command(tmp_path: Path, name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.contract.test_unreadable", name, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {}


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_disk_read_error_in_verify_exits_8(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    real = os.preadv

    def fail(descriptor: int, *rest: object) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("__1_0.distcp"):
            raise OSError(number, os.strerror(number))
        return real(descriptor, *rest)  # type: ignore[arg-type]

    def fail_at(descriptor: int, nbytes: int, offset: int) -> bytes:
        buffer = bytearray(nbytes)
        return bytes(buffer[: fail(descriptor, [buffer], offset)])

    monkeypatch.setattr(os, "preadv", fail)
    monkeypatch.setattr(os, "pread", fail_at)
    source = str(DATA / CHECKPOINTS["dcp"])
    found = CliRunner().invoke(app, ["verify", source, "--level", "full"], prog_name="ckptctl")
    assert found.exit_code == StorageError.exit_code
    assert errno.errorcode[number] in found.output


if __name__ == "__main__":
    print(json.dumps(sweep(sys.argv[1], Path(sys.argv[2]))))
