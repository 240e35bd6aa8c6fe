"""What every registered format has to satisfy: one sniffs, and nothing half-written is complete."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ckptctl
from ckptctl import formats
from ckptctl.errors import CkptError
from ckptctl.formats.base import Format, WritableFormat
from ckptctl.storage.execution.finisher import Finisher
from ckptctl.storage.execution.worker import Worker
from ckptctl.verbs.verification.model_check import UNCOUNTED_LAYERS
from tests.checkpoints import save_bin, tiny_llama
from tests.contract.support import WRITABLE, build, place, snapshot
from tests.sweeps import one_in

STATE, CONFIG = tiny_llama("llama3", layers=1)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return one output of ours per writable format; several files where that is possible."""
    folder = tmp_path_factory.mktemp("outputs")
    source = build("hf", folder, STATE, CONFIG)
    found = {}
    for name in WRITABLE:
        cut_by = formats.get_writable_format(name).sharding_options
        options: dict[str, Any] = {"mp": 2} if "--mp" in cut_by else {}
        if "--max-shard-size" in cut_by:
            options = {"max_shard_size": "100KB"}
        found[name] = place(folder, name, f"output-{name}")
        ckptctl.convert(source, found[name], to=name, **options)
    return found


def test_registered_formats_have_name_and_title() -> None:
    for name, found in formats.load_all_formats().items():
        assert isinstance(found, Format)
        assert found.name == name
        assert found.title
    assert set(WRITABLE) <= set(formats.list_format_names())
    assert all(isinstance(formats.get_format(name), WritableFormat) for name in WRITABLE)


@pytest.mark.parametrize("name", WRITABLE)
def test_converted_output_is_detected_as_its_format(outputs: dict[str, Path], name: str) -> None:
    assert list(formats.sniff_formats(outputs[name])) == [name]
    found = ckptctl.inspect(outputs[name])
    assert found.format == name
    assert found.verdict == "complete"
    assert found.notes == ((UNCOUNTED_LAYERS,) if name == "torch" else ())


def test_third_party_checkpoint_is_detected_as_one_format(tmp_path: Path, data: Path) -> None:
    for name in WRITABLE:
        assert list(formats.sniff_formats(build(name, tmp_path, STATE, CONFIG))) == [name]
    assert list(formats.sniff_formats(save_bin(tmp_path / "bin", STATE, CONFIG, shards=2))) == [
        "hf"
    ]
    for folder in (data / "dcp").rglob(".metadata"):
        assert list(formats.sniff_formats(folder.parent)) == ["dcp"]


@pytest.mark.parametrize("name", WRITABLE)
def test_opened_output_lists_raw_tensors_and_their_files(
    outputs: dict[str, Path], name: str
) -> None:
    catalog = formats.resolve_codecs(formats.open_checkpoint(outputs[name]))
    assert catalog.format == name
    assert sum(catalog.files.values()) >= catalog.nbytes
    for key, entry in catalog.tensors.items():
        assert entry.name == key == ".".join(map(str, entry.path))
        assert {extent.file for extent in entry.extents} <= catalog.files.keys()
        assert all(extent.codec == "raw" for extent in entry.extents)


def damaged(path: Path, scratch: Path) -> Iterator[tuple[str, Path]]:
    """Yield copies of *path*, each with one data file missing or cut."""
    files = [path] if path.is_file() else sorted(item for item in path.iterdir())
    for file in (item for item in files if _holds_data(item)):
        for kind in ("missing", "empty", "half", "one-byte-short"):
            copy = scratch / path.name
            shutil.copytree(path, copy) if path.is_dir() else shutil.copy(path, copy)
            target = copy if path.is_file() else copy / file.name
            if kind == "missing":
                target.unlink()
            else:
                size = target.stat().st_size
                length = {"empty": 0, "half": size // 2, "one-byte-short": size - 1}[kind]
                target.write_bytes(target.read_bytes()[:length])
            yield f"{file.name} {kind}", copy
            shutil.rmtree(copy) if copy.is_dir() else copy.unlink(missing_ok=True)


def _holds_data(file: Path) -> bool:
    return file.suffix != ".json" and not file.name.startswith("tokenizer")


def is_complete(path: Path) -> bool:
    """Return whether *path* passes for a complete checkpoint, or a folder that holds one."""
    try:
        found = ckptctl.inspect(path)
    except CkptError:
        return False
    if found.checkpoints:
        return any(not member.problems for member in found.checkpoints)
    return found.verdict == "complete"


@pytest.mark.parametrize("name", one_in(3, WRITABLE))
def test_partial_output_is_never_complete(
    outputs: dict[str, Path], tmp_path: Path, name: str
) -> None:
    found = 0
    for what, copy in damaged(outputs[name], tmp_path):
        assert not is_complete(copy), what
        found += 1
    assert found


@pytest.mark.parametrize("name", one_in(3, WRITABLE))
def test_failed_run_staging_is_never_complete(
    outputs: dict[str, Path], tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a run that fails leaves for ``--resume``, wherever it fails among the copies."""
    real, count = Worker.execute_unit, 0
    for stop in range(0, 12, 3):

        def do(worker: Worker, unit: Any, stop: int = stop) -> Any:
            nonlocal count
            count += 1
            if count > stop:
                raise RuntimeError("killed")
            return real(worker, unit)

        count = 0
        monkeypatch.setattr(Worker, "execute_unit", do)
        _fails_unfinished(outputs["hf"], place(tmp_path, name, f"target-{stop}"), name)


@pytest.mark.parametrize("name", WRITABLE)
def test_output_with_unfinished_file_header_is_never_complete(
    outputs: dict[str, Path], tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All data is there, but one file has no header yet."""
    plan = ckptctl.plan_conversion(outputs["hf"], place(tmp_path, name, "plan"), to=name)
    real = Finisher._finish_file
    for number, (file, _) in enumerate(plan.files):
        target = place(tmp_path, name, f"target-{number}")
        lacking = target.name if plan.plan.single_file else file

        def finish(finisher: Finisher, path: str, lacking: str = lacking) -> None:
            if path == lacking:
                raise RuntimeError("killed")
            real(finisher, path)

        monkeypatch.setattr(Finisher, "_finish_file", finish)
        if _holds_data(Path(file)) or file.endswith("index.json"):
            _fails_unfinished(outputs["hf"], target, name)


def _fails_unfinished(source: Path, target: Path, name: str) -> None:
    with pytest.raises(RuntimeError, match="killed"):
        ckptctl.convert(source, target, to=name, resume=True, jobs=1)
    assert not target.exists()
    staged = list(target.parent.glob(f".{target.name}*"))
    assert len(staged) == 1
    for item in [target.parent, *staged, *staged[0].rglob("*")]:
        assert not is_complete(item), item


@pytest.mark.parametrize("name", WRITABLE)
def test_plan_writes_nothing_and_predicts_file_sizes(
    outputs: dict[str, Path], tmp_path: Path, name: str
) -> None:
    before = snapshot(outputs["hf"].parent)
    plan = ckptctl.plan_conversion(outputs["hf"], place(tmp_path, name), to=name)
    assert plan.nbytes > 0
    assert not list(tmp_path.iterdir())
    assert snapshot(outputs["hf"].parent) == before
    done = ckptctl.convert(outputs["hf"], place(tmp_path, name), to=name)
    path = done.target
    files = [path] if path.is_file() else sorted(path.iterdir())
    assert {(item.name, item.stat().st_size) for item in files} == set(plan.files)
