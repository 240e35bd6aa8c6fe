"""Success means on the disk: the order of syncs and the rename, and power that goes.

The order is that of the system calls of the run itself. The power goes from an ext4 file system in
a file: a copy of that file, with what the disk has by then, is mounted afterwards.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl
from ckptctl.storage import file_system
from tests import ext4
from tests.checkpoints import differences, load_any_reference, save_hf, tiny_llama
from tests.checkpoints.adapters import random_adapter, save_peft
from tests.contract.support import snapshot
from tests.sweeps import one_in

STATE, CONFIG = tiny_llama("llama3", hidden=128, vocab=2048, ffn=256)
NAME = "model.embed_tokens.weight"
WAYS: dict[str, Callable[[Path, Path], object]] = {
    "out-dcp": lambda given, out: ckptctl.convert(given, out, to="dcp", max_shard_size=200_000),
    "out-hf": lambda given, out: ckptctl.convert(given, out, to="hf", max_shard_size=200_000),
    "out-meta": lambda given, out: ckptctl.convert(given, out, to="meta", mp=2),
    "out.pt": lambda given, out: ckptctl.convert(given, out, to="torch"),
    "out-plain": lambda given, out: ckptctl.convert(given, out, to="dcp", checksum=False),
    "out-merged": lambda given, out: ckptctl.merge(given, given.parent / "adapter", out),
    "out.safetensors": lambda given, out: ckptctl.extract(given, NAME, out),
    "out.npy": lambda given, out: ckptctl.extract(given, NAME, out, dtype="fp32"),
    "out.html": lambda given, out: ckptctl.report(given, out),
    "out-saved": lambda given, out: ckptctl.save({"w": torch.ones(3)}, out),
}


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("given")
    save_peft(folder / "adapter", random_adapter(STATE))
    return save_hf(folder / "hf", STATE, CONFIG, shards=2)


class Watch:
    """Notes what of an output was on the disk when it got its name.

    Attributes:
        synced: For each inode, what it held when it was synced last.
        early: What was not on the disk when the output got its name.
        entered: Folders synced with the output, or what leads to it, in them.
        named: How many times the output got its name.
    """

    def __init__(self, target: Path, patch: pytest.MonkeyPatch) -> None:
        self.target = target
        self.synced: dict[int, tuple[int, int]] = {}
        self.early: list[str] = []
        self.entered: set[Path] = set()
        self.named = 0
        self._patch(patch, os, "fsync", self._sync)
        for module, name in (
            (file_system, "rename_atomically"),
            (os, "rename"),
            (os, "link"),
            (os, "replace"),
        ):
            self._patch(patch, module, name, self._move)

    def _patch(self, patch: pytest.MonkeyPatch, module: Any, name: str, note: Any) -> None:
        real = getattr(module, name)
        patch.setattr(module, name, lambda *words, **more: note(real, *words, **more))

    def _sync(self, real: Callable[[int], None], descriptor: int) -> None:
        real(descriptor)
        self.synced[os.fstat(descriptor).st_ino] = held(os.fstat(descriptor))
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        chain = (self.target, *self.target.parents)
        self.entered |= {path for one in chain if one.parent == path and one.exists()}

    def _move(self, real: Callable[..., None], source: Any, target: Any, *more: Any) -> None:
        if Path(target) == self.target:
            self.named += 1
            whole = Path(source)
            for item in (whole, *whole.rglob("*")):
                status = item.stat()
                if self.synced.get(status.st_ino) != held(status):
                    self.early.append(str(item.relative_to(whole)))
            self.entered.discard(self.target.parent)
        real(source, target, *more)


def held(status: os.stat_result) -> tuple[int, int]:
    return status.st_mtime_ns, status.st_size


@pytest.mark.parametrize("name", WAYS)
def test_output_is_synced_before_publishing(
    given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    target = tmp_path / "deep" / "er" / name
    watch = Watch(target, monkeypatch)
    WAYS[name](given, target)
    assert (watch.named, watch.early) == (1, [])
    made = {target.parent, tmp_path / "deep", tmp_path}
    assert made <= watch.entered, "a name itself is not on the disk"


@pytest.mark.parametrize("name", ["out-dcp", "out.pt"])
def test_output_is_synced_before_replacing_existing_one(
    given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    target = tmp_path / name
    WAYS[name](given, target)
    watch = Watch(target, monkeypatch)
    ckptctl.convert(given, target, to="torch" if target.is_file() else "hf", overwrite=True)
    assert (watch.named, watch.early) == (1, [])
    assert tmp_path in watch.entered


# ------------------------------------------------------------------------------------------- power


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own."""
    ext4.make(tmp_path / "disk", 24 << 20)
    yield from ext4.mounted(tmp_path / "disk")


def after_a_power_cut(disk: Path) -> Iterator[Path]:
    """Yield what a machine finds that starts again."""
    image = disk.with_name("disk")
    shutil.copyfile(image, image.with_name("copy"))
    yield from ext4.mounted(image.with_name("copy"))


def started(*words: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "ckptctl", *map(str, words)]
    return subprocess.Popen(command, stdout=-3, stderr=-3, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize(
    ("to", "name"), one_in(3, [("dcp", "out"), ("hf", "out"), ("torch", "out.pt")])
)
def test_power_cut_after_success_loses_nothing(given: Path, disk: Path, to: str, name: str) -> None:
    assert started("convert", given, disk / "deep" / name, "--to", to).wait(60) == 0
    for found in after_a_power_cut(disk):
        assert not differences(load_any_reference(found / "deep" / name), STATE)


def test_power_cut_loses_unsynced_file(disk: Path) -> None:
    """What is not synced is not there afterwards, so that the tests beside this one mean much."""
    (disk / "out").mkdir()
    (disk / "out" / "model.safetensors").write_bytes(bytes(100_000))
    for found in after_a_power_cut(disk):
        file = found / "out" / "model.safetensors"
        assert not file.exists() or file.stat().st_size != 100_000


@pytest.mark.slow
def test_power_cut_during_overwrite_leaves_old_or_new(given: Path, disk: Path) -> None:
    """The old one, or the new one."""
    old = {name: torch.zeros_like(one) for name, one in STATE.items()}
    save_hf(disk / "out", old, CONFIG)
    os.sync()
    start = time.monotonic()
    assert started("convert", given, disk / "first", "--to", "dcp").wait(60) == 0
    duration = time.monotonic() - start
    os.sync()
    for number in range(4):
        running = started("convert", given, disk / "out", "--to", "dcp", "--overwrite")
        time.sleep(duration * (0.6 + number / 10))
        running.send_signal(signal.SIGSTOP)
        for found in after_a_power_cut(disk):
            held = load_any_reference(found / "out")
            assert not differences(held, old) or not differences(held, STATE)
        running.send_signal(signal.SIGCONT)
        assert running.wait(60) == 0
        old = load_any_reference(disk / "out")


def test_power_cut_after_prune_keeps_retained_checkpoint(disk: Path) -> None:
    """What was to stay is there; what was removed is whole, in the trash, or gone."""
    for step in (1, 2, 3):
        save_hf(disk / "run" / f"step-{step}", STATE, CONFIG)
        os.utime(disk / "run" / f"step-{step}" / "model.safetensors", (step, step))
    os.sync()
    before = snapshot(disk / "run" / "step-1")
    assert started("prune", disk / "run", "--keep-last", 1, "--yes").wait(60) == 0
    for found in after_a_power_cut(disk):
        there = {item.name for item in (found / "run").iterdir()}
        assert "step-3" in there and there <= {"step-3", ".ckptctl-trash"}
        assert snapshot(found / "run" / "step-3") == before
