"""What is converted to what, and the processes that compete at it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.benchmarks.measure import PYTHON, TOOL
from tests.benchmarks.peers import WAYS

Options = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Direction:
    """One conversion to measure.

    Attributes:
        name: For ``--only`` and the tables.
        source: Kind of source that ``build`` makes.
        options: Keywords of :func:`ckptctl.convert`; ``{assets}`` is the source's configuration,
            ``{ninth}`` a little more than the ninth part of its bytes, ``{fourth}`` of the fourth.
        peers: Names of the peers' own ways in ``peers``.
        verb: The command, and function of Python, that does it; what ``merge`` merges in is the
            directory ``adapter`` in the source.
        trainers: Whether the source, or the peer, needs the trainers' Python.
    """

    name: str
    source: str
    options: Options = field(default_factory=dict)
    peers: tuple[str, ...] = ()
    verb: str = "convert"
    trainers: bool = False

    @property
    def checksum(self) -> bool:
        """Return whether ckptctl computes checksums."""
        return bool(self.options.get("checksum", True))

    def without_checksum(self) -> Direction:
        """Return the same with ``--no-checksum``."""
        options = {**self.options, "checksum": False}
        return replace(self, name=f"{self.name}+nocrc", options=options, peers=())

    def paths(self, source: Path, target: Path) -> list[str]:
        """Return the arguments."""
        adapter = [str(source / "adapter")] if self.verb == "merge" else []
        return [str(source), *adapter, str(target)]

    def keywords(self, assets: Path, nbytes: int, jobs: int | None) -> dict[str, object]:
        """Return the options.

        Args:
            assets: Directory with the source's ``config.json``.
            nbytes: Of the source.
            jobs: Threads; None: as many as ckptctl likes.
        """
        known = {"assets": assets, "ninth": int(nbytes / 8.4), "fourth": int(nbytes / 3.6)}
        found = {
            name: value.format(**known) if isinstance(value, str) else value
            for name, value in self.options.items()
        }
        return found | ({"jobs": jobs} if jobs else {})

    def command(self, source: Path, target: Path, keywords: Options) -> list[str]:
        """Return the command line."""
        words = []
        for name, value in keywords.items():
            option = name.replace("_", "-")
            on_off = [f"--{option}" if value else f"--no-{option}"]
            words += on_off if isinstance(value, bool) else [f"--{option}", str(value)]
        return [*TOOL, self.verb, *self.paths(source, target), *words, "-q"]


def _to(to: str, **options: object) -> Options:
    return {"to": to, **options}


_LLAMA = {"model_type": "llama3"}
_TABLE = (
    Direction("hf-dcp", "hf", _to("dcp"), ("hf-dcp",)),
    Direction("dcp-hf", "dcp", _to("hf", assets="{assets}"), ("dcp-hf",)),
    Direction("hf-meta", "hf", _to("meta", **_LLAMA)),
    Direction("meta-hf", "meta1", _to("hf", **_LLAMA)),
    Direction("meta-mp2", "meta1", _to("meta", **_LLAMA, mp=2)),
    Direction("mp2-hf", "meta2", _to("hf", **_LLAMA)),
    Direction("mp2-mp1", "meta2", _to("meta", **_LLAMA, mp=1)),
    Direction("hf-torch", "hf", _to("torch")),
    Direction("torch-hf", "torch", _to("hf", assets="{assets}")),
    Direction("dcp-torch", "dcp", _to("torch"), ("dcp-torch",)),
    Direction("torch-dcp", "torch", _to("dcp"), ("torch-dcp",)),
    Direction("hf-mcore", "hf", _to("mcore", **_LLAMA), ("hf-mcore",)),
    Direction("mcore-hf", "mcore", _to("hf", assets="{assets}")),
    Direction("hf-reshard", "hf", _to("hf", max_shard_size="300MB")),
    Direction("hf-f32", "hf", _to("hf", dtype="float32")),
    Direction("hf-f16", "hf", _to("hf", dtype="float16")),
)
_FAMILIES = (
    Direction("moe-stack", "mixtral-hf", _to("dcp", to_layout="hf-v5")),
    Direction("moe-unstack", "mixtral-v5", _to("hf", model_type="mixtral")),
    Direction("phi3-split", "phi3-hf", _to("dcp", to_layout="torchtune")),
    Direction("phi3-fuse", "phi3-tune", _to("hf", model_type="phi3")),
    Direction("gptoss-transpose", "gptoss-hf", _to("dcp", to_layout="openai")),
)
_MORE = (
    Direction("hf-hf9", "hf", _to("hf", max_shard_size="{ninth}")),
    Direction("hf-mp8", "hf", _to("meta", **_LLAMA, mp=8)),
    *(
        Direction(f"{kind}-bf16", kind, _to("hf", dequantize="bf16"))
        for kind in ("fp8", "int4", "nvfp4", "gptq", "awq")
    ),
    *(Direction(f"hf-{name}", "hf", _to("hf", quantize=name)) for name in ("fp8-block", "nvfp4")),
    Direction("lora-merge", "lora", verb="merge"),
)


def _consolidate(form: str, *peers: str, trainers: bool = False) -> Direction:
    return Direction(f"consolidate-{form}", form, {}, peers, "consolidate", trainers)


def _consolidate_to_files(form: str, files: int) -> Direction:
    """Merge per-rank safetensors into that many files, as the peers do."""
    peers = tuple(f"shards-{who}-{files}" for who in ("torch", "nemo", "tc"))
    found = replace(_consolidate(form), peers=peers)
    if files == 1:
        return found
    options = {"max_shard_size": "{fourth}"}
    return replace(found, name=f"{found.name}-files", options=options)


_RANKS = (
    _consolidate("dcp-columns"),
    _consolidate("dcp-rank-local"),
    _consolidate_to_files("hf-rank-shards", 1),
    _consolidate_to_files("hf-rank-shards", 4),
    _consolidate_to_files("hf-rank-shards-columns", 1),
    _consolidate("rank-files"),
    _consolidate("rank-files-columns"),
    _consolidate("zero1", "zero-hf", trainers=True),
    _consolidate("zero3", "zero-hf", trainers=True),
)
_TRAINERS = (
    _consolidate("torch-checkpointing", trainers=True),
    _consolidate("torchsnapshot", trainers=True),
)
_USUAL = (*_TABLE, *_FAMILIES, *_MORE, *_RANKS)
BY_NAME = {
    direction.name: direction
    for usual in (*_USUAL, *_TRAINERS)
    for direction in (usual, usual.without_checksum())
}
DEFAULT = (*(direction.name for direction in _USUAL), "hf-dcp+nocrc", "meta-hf+nocrc")


@dataclass(frozen=True, slots=True)
class Setting:
    """What all commands of a run share.

    Attributes:
        disk: Durable: fsync on our side, ``sync -f`` after ``cp -r``.
        jobs: Threads of ckptctl and of the bare loop; None: as many as there are cores.
        trainers: A Python with deepspeed, torch_checkpointing and torchsnapshot.
    """

    disk: bool = False
    jobs: int | None = None
    trainers: str | None = None


def commands(
    direction: Direction, source: Path, target: Path, keywords: Options, setting: Setting
) -> dict[str, list[str]]:
    """Return the command of each contestant: ``ckptctl``, ``cp``, ``bare`` and peers.

    Args:
        direction: What is converted.
        source: The source checkpoint.
        target: Does not exist yet.
        keywords: The direction's own.
        setting: Disk or tmpfs, threads.
    """
    found = {
        "ckptctl": direction.command(source, target, keywords),
        "cp": _cp(source, target, setting.disk),
        "bare": _bare(direction, source, target, setting),
    }
    for name in direction.peers:
        way = WAYS[name]
        if python := setting.trainers if way.package else PYTHON:
            peer = [python, "-m", "tests.benchmarks.peers", name, str(source), str(target)]
            found[way.contestant] = peer
    return found


def _cp(source: Path, target: Path, disk: bool) -> list[str]:
    if not disk:
        return ["cp", "-r", str(source), str(target)]
    return ["sh", "-c", 'cp -r "$1" "$2" && sync -f "$2"', "sh", str(source), str(target)]


def _bare(direction: Direction, source: Path, target: Path, setting: Setting) -> list[str]:
    script = str(Path(__file__).with_name("bare_loop.py"))
    command = [PYTHON, script, str(source), str(target)]
    command += [] if direction.checksum else ["--crc", "none"]
    command += ["--fsync"] if setting.disk else []
    return command + (["--jobs", str(setting.jobs)] if setting.jobs else [])
