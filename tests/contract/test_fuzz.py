"""Every reader on input of each hostile kind, in a child with little memory and little time.

Each registered format has a checkpoint that it reads. Each kind of file in that is replaced by
what attacks a reader of such files, and the commands that read are run. They answer or refuse; they
never raise anything else, and never take more memory or time than the child has. A new format
inherits the test.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import ckptctl
from ckptctl import formats
from ckptctl.errors import CkptError
from tests import hostile, limits
from tests.checkpoints import save_hf, tiny_llama
from tests.checkpoints.adapters import random_adapter, save_peft
from tests.contract.additions import FORMATS
from tests.contract.samples import write_checkpoint
from tests.sweeps import one_in

MEMORY, SECONDS = 1 << 30, 30
"""What a child may take beyond what was imported. Most take a hundredth of it."""
EXIT_CODES = frozenset({2, 3, 4, 5, 6, 7, 8, 9})


OWNERS = ("dcp", "gguf", "hf", "torch")
"""Formats whose hostile files are passed to all commands: one for each kind of binary file.

`latest` and `prune` read a checkpoint as `ls` does, and are skipped for the other formats.
"""
OPTIONS: Mapping[str, Mapping[str, Any]] = {"megatron": {"rules": "megatron-core"}}
"""What has to be said to read one, by the format."""


# ------------------------------------------------------------------------------------ kinds of file


def _zipped(pickles: Mapping[str, bytes]) -> dict[str, bytes]:
    return {
        name: hostile.zip_of(hostile.torch_entries(pickled, {}))
        for name, pickled in pickles.items()
    }


@cache
def pickles(count: int = 20_000) -> Mapping[str, bytes]:
    """Return pickles that share, nest, swell, or have long names.

    Of those that share what ends as a key is left to the tests of the machine.
    """
    found = {**hostile.exhausting_pickles(10 * count), **hostile.sharing_pickles(count=count)}
    keys = ("-in-a-frozenset", "-as-a-key", "-in-a-key")
    found = {name: content for name, content in found.items() if not name.endswith(keys)}
    return {**found, **hostile.long_name_pickles(count)}


KINDS: Mapping[str, Callable[[], Mapping[str, bytes]]] = {
    "zip": lambda: _zipped(pickles()),
    "pickle": pickles,
    "json": hostile.evil_json,
    "yaml": lambda: {name: text.encode() for name, text in hostile.evil_yaml().items()},
    "safetensors": hostile.evil_safetensors,
    "gguf": hostile.evil_gguf,
    "text": hostile.evil_text,
}


SHORTER: Mapping[str, Callable[[], Mapping[str, bytes]]] = {
    "zip": lambda: _zipped(pickles(5_000)),
    "pickle": lambda: pickles(5_000),
    "json": lambda: hostile.evil_json(50_000),
    "safetensors": lambda: hostile.evil_safetensors(5_000),
}
"""The same cases, a quarter as long, for all formats but one that are read by the same code."""


@cache
def make_contents(kind: str, *, is_short: bool) -> Mapping[str, bytes]:
    """Return the contents of each case of a kind of file."""
    return (SHORTER.get(kind, KINDS[kind]) if is_short else KINDS[kind])()


def kind_of(file: Path) -> str:
    """Return what kind of file that is, by its content and, of text, by its name."""
    head = file.read_bytes()[:512]
    if head.startswith(b"PK\3\4"):
        return "zip"
    if head.startswith(b"GGUF"):
        return "gguf"
    if len(head) > 1 and head[0] == 0x80 and head[1] <= 5:
        return "pickle"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < file.stat().st_size:
        return "safetensors"
    if file.suffix in (".yaml", ".yml"):
        return "yaml"
    if head.lstrip()[:1] in (b"{", b"["):
        return "json"
    return "text" if head and b"\0" not in head else "data"


def files_of(path: Path) -> dict[str, list[Path]]:
    """Return the files of each kind in a checkpoint, sorted."""
    files = [path] if path.is_file() else sorted(item for item in path.rglob("*") if item.is_file())
    found: dict[str, list[Path]] = {}
    for file in files:
        found.setdefault(kind_of(file), []).append(file)
    return found


# ------------------------------------------------------------------------------------ commands


def commands(path: Path, **options: Any) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the commands that read a checkpoint, and those that read the run that it is in."""
    out = path.parent / "out"
    yield "inspect", lambda: ckptctl.inspect(path, **options).to_json()
    yield "verify", lambda: ckptctl.verify(path, level="fast", **options).to_json()
    yield "convert", lambda: ckptctl.plan_conversion(path, out, to="dcp", **options)
    yield "ls", lambda: ckptctl.ls(path.parent).to_json()
    yield "latest", lambda: ckptctl.latest(path.parent)
    yield "prune", lambda: ckptctl.plan_prune(path.parent, keep_last=1).to_json()


def attempt(path: Path, skipped: Collection[str] = (), **options: Any) -> str:
    """Run the commands except *skipped*; return what each of them answers, as its exit code."""
    codes = []
    for name, command in commands(path, **options):
        if name in skipped:
            continue
        try:
            command()
            codes.append(f"{name} 0")
        except CkptError as error:
            assert error.exit_code in EXIT_CODES, f"{name}: {error!r}"
            codes.append(f"{name} {error.exit_code}")
    return ", ".join(codes)


def attack(path: Path, file: Path, content: bytes, **options: Any) -> str:
    """Return what happened that must not, with *content* in *file*."""
    kept = file.read_bytes()
    file.write_bytes(content)
    try:
        return limits.run_limited(
            lambda: attempt(path, **options), memory=MEMORY, seconds=SECONDS
        ).problem
    finally:
        file.write_bytes(kept)


def read_here(source: Path, name: str) -> None:
    """Run the commands on a copy of a healthy checkpoint in this process.

    Then its forks have the modules and tables that each would load for itself, which takes longer
    than most of them run.
    """
    copy = source.parent / "copy" / source.name
    copy.parent.mkdir()
    (shutil.copytree if source.is_dir() else shutil.copy)(source, copy)
    attempt(copy, **OPTIONS.get(name, {}))
    shutil.rmtree(copy.parent)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that returns a run with one checkpoint of a format, and a pointer."""

    @cache
    def made(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        source = write_checkpoint(name, folder)
        (folder / "run").mkdir()
        step = folder / "run" / ("step-1" if source.is_dir() else "epoch=0-step=1.ckpt")
        if source.is_file() and source.suffix == ".gguf":
            step = folder / "run" / source.name
        read_here(source, name)
        return source.rename(step)

    return made


def cases() -> Iterator[tuple[str, str, str]]:
    known = {kind: tuple(made()) for kind, made in KINDS.items()}
    for name in FORMATS:
        for kind, found in known.items():
            yield from ((name, kind, case) for case in found)


@pytest.mark.parametrize("name", one_in(4, FORMATS))
def test_every_format_inspects_its_own_checkpoint(run: Any, name: str) -> None:
    path = run(name)
    folders = (item for item in path.rglob("*") if item.is_dir())
    assert any(name in formats.sniff_formats(item) for item in (path, *folders))
    assert files_of(run(name)).keys() & KINDS.keys()
    options = OPTIONS.get(name, {})
    ended = limits.run_limited(lambda: attempt(path, **options), memory=MEMORY, seconds=SECONDS)
    assert ended.result.startswith("inspect 0"), ended


@pytest.mark.parametrize(("name", "kind", "case"), one_in(167, cases()))
def test_hostile_files_are_read_or_refused(run: Any, name: str, kind: str, case: str) -> None:
    path = run(name)
    found = files_of(path).get(kind)
    if not found:  # a checkpoint of that format has no such file
        return
    skipped = () if name in OWNERS else ("latest", "prune")
    options = OPTIONS.get(name, {})
    content = make_contents(kind, is_short=name not in OWNERS)[case]
    problem = attack(path, found[0], content, skipped=skipped, **options)
    assert not problem, f"{found[0].name}: {problem}"


CONFIGS = ("config.json", "adapter_config.json", "run_config.yaml")
NUMBERS = [
    pytest.param(file, value, id=f"{value!r}-{file}")
    for file in CONFIGS
    for value in hostile.NUMBERS
]


@pytest.mark.parametrize(("file", "value"), one_in(21, NUMBERS))
def test_hostile_config_numbers_are_read_or_refused(
    run: Any, tmp_path: Path, file: str, value: object
) -> None:
    """Each member has the value in turn, all of them in one child."""
    state, config = tiny_llama("llama3", layers=1)
    path = save_hf(tmp_path / "run/step-1", state, config)
    if file == "adapter_config.json":
        path = save_peft(tmp_path / "run/step-2", random_adapter(state))
    run("peft" if file == "adapter_config.json" else "hf")  # reads one in this process
    known = json.loads((path / ("config.json" if "run" in file else file)).read_text())

    def work() -> str:
        for member in known:
            (path / file).write_text(json.dumps({**known, member: value}))
            try:
                attempt(path)
            except Exception as error:
                error.add_note(f"with {member} = {value!r}")
                raise
        return "read"

    ended = limits.run_limited(work, memory=MEMORY, seconds=4 * SECONDS)
    assert not ended.problem, ended.problem


@pytest.mark.parametrize(
    "pointer", ["latest", "last_checkpoint", "latest_checkpointed_iteration.txt"]
)
@pytest.mark.parametrize("case", one_in(4, hostile.evil_text()))
def test_hostile_latest_pointer_causes_no_crash(tmp_path: Path, pointer: str, case: str) -> None:
    path = save_hf(tmp_path / "run/step-1", *tiny_llama("llama3", layers=1))
    (tmp_path / "run" / pointer).write_bytes(hostile.evil_text()[case])
    ended = limits.run_limited(lambda: attempt(path), memory=MEMORY, seconds=SECONDS)
    assert not ended.problem, ended.problem


@pytest.mark.parametrize("case", one_in(4, hostile.evil_text()))
def test_hostile_modeling_module_causes_no_crash(tmp_path: Path, case: str) -> None:
    state, config = tiny_llama("llama3", layers=1)
    config |= {"auto_map": {"AutoModel": "modeling_own.Own"}}
    path = save_hf(tmp_path / "run/step-1", state, config)
    (path / "modeling_own.py").write_bytes(hostile.evil_text(120_000)[case])
    ended = limits.run_limited(lambda: attempt(path), memory=MEMORY, seconds=SECONDS)
    assert not ended.problem, ended.problem


# ------------------------------------------------------------------------------------ the limits


def test_run_limited_reports_memory_error() -> None:
    assert "MemoryError" in limits.run_limited(lambda: str(len(bytearray(2 << 30)))).problem


def test_run_limited_kills_child_over_time_limit() -> None:
    def work() -> str:
        while True:
            pass

    assert "killed by SIG" in limits.run_limited(work, seconds=1).problem


def test_run_limited_reports_child_exception() -> None:
    def work() -> str:
        raise ValueError("here")

    assert "ValueError: here" in limits.run_limited(work).problem
