"""What is converted to what, and the processes that compete at it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

PYTHON = sys.executable


@dataclass(frozen=True, slots=True)
class Direction:
    """One conversion to measure.

    Attributes:
        name: For ``--only`` and the tables.
        source: Kind of source that ``build`` makes.
        to: Target format.
        options: For ``ckptctl convert``.
        peer: Name of torch's own way in ``peers``, if it has one.
        checksum: Whether ckptctl computes checksums.
    """

    name: str
    source: str
    to: str
    options: tuple[str, ...] = ()
    peer: str | None = None
    checksum: bool = True

    def without_checksum(self) -> Direction:
        """Return the same with ``--no-checksum``."""
        options = (*self.options, "--no-checksum")
        return Direction(f"{self.name}+nocrc", self.source, self.to, options, None, False)


_LLAMA = ("-m", "llama3")
_TABLE = (
    Direction("hf-dcp", "hf", "dcp", (), "hf-dcp"),
    Direction("dcp-hf", "dcp", "hf", ("--assets", "{assets}"), "dcp-hf"),
    Direction("hf-meta", "hf", "meta", _LLAMA),
    Direction("meta-hf", "meta1", "hf", _LLAMA),
    Direction("meta-mp2", "meta1", "meta", (*_LLAMA, "--mp", "2")),
    Direction("mp2-hf", "meta2", "hf", _LLAMA),
    Direction("mp2-mp1", "meta2", "meta", (*_LLAMA, "--mp", "1")),
    Direction("hf-torch", "hf", "torch"),
    Direction("torch-hf", "torch", "hf", ("--assets", "{assets}")),
    Direction("dcp-torch", "dcp", "torch", (), "dcp-torch"),
    Direction("torch-dcp", "torch", "dcp", (), "torch-dcp"),
    Direction("hf-reshard", "hf", "hf", ("--max-shard-size", "300MB")),
    Direction("hf-f32", "hf", "hf", ("--dtype", "float32")),
    Direction("hf-f16", "hf", "hf", ("--dtype", "float16")),
)
_FAMILIES = (
    Direction("moe-stack", "mixtral-hf", "dcp", ("--to-layout", "hf-v5")),
    Direction("moe-unstack", "mixtral-v5", "hf", ("-m", "mixtral")),
    Direction("phi3-split", "phi3-hf", "dcp", ("--to-layout", "torchtune")),
    Direction("phi3-fuse", "phi3-tune", "hf", ("-m", "phi3")),
    Direction("gptoss-transpose", "gptoss-hf", "dcp", ("--to-layout", "openai")),
)
_ALL = (*_TABLE, *_FAMILIES)
BY_NAME = {d.name: d for direction in _ALL for d in (direction, direction.without_checksum())}
DEFAULT = (*(direction.name for direction in _ALL), "hf-dcp+nocrc", "meta-hf+nocrc")


@dataclass(frozen=True, slots=True)
class Setting:
    """What all commands of a run share.

    Attributes:
        disk: Durable: fsync on our side, ``sync -f`` after ``cp -r``.
        jobs: Threads of ckptctl and of the bare loop; None: as many as there are cores.
    """

    disk: bool = False
    jobs: int | None = None


def commands(
    direction: Direction, source: Path, assets: Path, target: Path, setting: Setting
) -> dict[str, list[str]]:
    """Return the command of each contestant: ``ckptctl``, ``cp``, ``bare`` and maybe ``torch``.

    Args:
        direction: What is converted.
        source: The source checkpoint.
        assets: Directory with its ``config.json``.
        target: Does not exist yet.
        setting: Disk or tmpfs, threads.
    """
    found = {
        "ckptctl": ours(direction, source, assets, target, setting),
        "cp": _cp(source, target, setting.disk),
        "bare": _bare(direction, source, target, setting),
    }
    if direction.peer:
        peer = [PYTHON, "-m", "tests.benchmarks.peers", direction.peer, str(source), str(target)]
        found["torch"] = peer
    return found


def ours(
    direction: Direction, source: Path, assets: Path, target: Path, setting: Setting
) -> list[str]:
    """Return the ``ckptctl convert`` command line."""
    options = [option.format(assets=assets) for option in direction.options]
    if setting.jobs:
        options += ["--jobs", str(setting.jobs)]
    command = [PYTHON, "-m", "ckptctl", "convert", str(source), str(target), "--to", direction.to]
    return [*command, *options, "-q"]


def _cp(source: Path, target: Path, disk: bool) -> list[str]:
    if not disk:
        return ["cp", "-r", str(source), str(target)]
    return ["sh", "-c", 'cp -r "$1" "$2" && sync -f "$2"', "sh", str(source), str(target)]


def _bare(direction: Direction, source: Path, target: Path, setting: Setting) -> list[str]:
    script = str(Path(__file__).with_name("bare_loop.py"))
    command = [PYTHON, script, str(source), str(target)]
    command += [] if direction.checksum else ["--no-crc"]
    command += ["--fsync"] if setting.disk else []
    return command + (["--threads", str(setting.jobs)] if setting.jobs else [])
