"""Plans of loads: used again when nothing changed, never when anything did."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckptctl.distributed.loading import load_plan
from ckptctl.distributed.loading.load import load
from ckptctl.distributed.loading.load_plan import LOAD_PLANS
from ckptctl.errors import MappingError
from ckptctl.save_load.loading.identity import compute_identity
from ckptctl.save_load.loading.load_options import LoadOptions
from ckptctl.save_load.loading.reading import PreparedRead
from tests.checkpoints import save_dcp
from tests.gloo import run_on_ranks
from tests.integration.load_plan_ranks import again_on_ranks, settled, two_groups

Calls = list[str]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """Note what a load does beside reading: ``open``, ``map`` and ``locate``."""
    found: Calls = []

    def noted(owner: Any, name: str, word: str) -> None:
        own = getattr(owner, name)

        def call(*given: Any, **named: Any) -> Any:
            found.append(word)
            return own(*given, **named)

        monkeypatch.setattr(owner, name, call)

    noted(LoadOptions, "open_catalog", "open")
    noted(load_plan, "map_state", "map")
    noted(PreparedRead, "plan_located_tensors", "plan")
    LOAD_PLANS.clear()
    yield found
    LOAD_PLANS.clear()


def saved(folder: Path, fill: float) -> Path:
    """Save a model and a step, both of *fill*, long enough ago to have an identity."""
    state = {"model": {"w": torch.full((31, 7), fill), "b": torch.full((5,), fill)}, "at": fill}
    return settled(Path(save_dcp(folder, state)))


def loaded(folder: Path, **options: Any) -> float:
    """Load into zeros and return what fills them."""
    state: dict[str, Any] = {"model": {"w": torch.zeros(31, 7), "b": torch.zeros(5)}, "at": 0.0}
    report = load(state, folder, **options)
    assert report.bytes_read == (31 * 7 + 5) * 4 and not report.missing
    found = {*state["model"]["w"].flatten().tolist(), *state["model"]["b"].tolist(), state["at"]}
    assert len(found) == 1, found
    return float(found.pop())


def test_second_load_reuses_plan(tmp_path: Path, calls: Calls) -> None:
    folder = saved(tmp_path / "a", 1.5)
    assert loaded(folder) == 1.5
    assert calls == ["open", "map", "plan"]
    assert loaded(folder) == 1.5
    assert calls == ["open", "map", "plan"]
    assert loaded(folder, strict=False) == 1.5
    assert calls == ["open", "map", "plan"] * 2, "other options are another plan"


def test_load_of_next_step_reuses_mapping_and_plan(tmp_path: Path, calls: Calls) -> None:
    first, second = saved(tmp_path / "step-1", 1.5), saved(tmp_path / "step-2", 2.5)
    assert loaded(first) == 1.5
    assert loaded(second) == 2.5
    assert calls == ["open", "map", "plan", "open"]
    assert [loaded(first), loaded(second)] == [1.5, 2.5]
    assert calls == ["open", "map", "plan", "open"]


def test_changed_checkpoint_or_state_is_planned_again(tmp_path: Path, calls: Calls) -> None:
    folder = saved(tmp_path / "a", 1.5)
    assert loaded(folder) == 1.5
    data = next(iter(folder.glob("*.distcp")))
    data.write_bytes(data.read_bytes())
    settled(folder)
    assert loaded(folder) == 1.5 and calls.count("open") == 2
    shutil.rmtree(folder)
    saved(folder, 2.5)
    assert loaded(folder) == 2.5 and calls.count("open") == 3
    wide = {"model": {"w": torch.zeros(31, 7).double(), "b": torch.zeros(5)}, "at": 0.0}
    with pytest.raises(MappingError, match="a different dtype"):
        load(wide, folder)
    tall = {"model": {"w": torch.zeros(7, 31), "b": torch.zeros(5)}, "at": 0.0}
    with pytest.raises(MappingError, match="a different shape"):
        load(tall, folder)
    strided: dict[str, Any] = {
        "model": {"w": torch.zeros(7, 31).t(), "b": torch.zeros(5)},
        "at": 0.0,
    }
    load(strided, folder)
    assert bool((strided["model"]["w"] == 2.5).all())


def test_same_metadata_with_moved_elements_is_planned_again(tmp_path: Path, calls: Calls) -> None:
    """``.metadata`` says where an item is, not where in it the elements are."""
    first, second = saved(tmp_path / "a", 1.5), tmp_path / "b"
    shutil.copytree(first, second)
    data = next(iter(second.glob("*.distcp")))
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    items = FileSystemReader(second).read_metadata().storage_data
    place = next(item for index, item in items.items() if index.fqn == "model.w")
    content = bytearray(data.read_bytes())
    item = bytes(content[place.offset : place.offset + place.length])
    content[place.offset : place.offset + place.length] = _shifted(item, place.length)
    data.write_bytes(content)
    settled(second)
    assert loaded(first) == 1.5
    assert loaded(second) == 1.5
    assert calls == ["open", "map", "plan", "open", "plan"]


def _shifted(item: bytes, nbytes: int) -> bytes:
    """Return the same zip, its records elsewhere in it, in as many bytes."""
    import io
    import zipfile

    found = io.BytesIO()
    source = zipfile.ZipFile(io.BytesIO(item))
    infos = source.infolist()
    name = infos[0].filename.partition("/")[0] + "/pad"
    headers = sum(30 + 46 + 2 * len(one) for one in (name, *(info.filename for info in infos)))
    room = nbytes - 22 - headers - sum(info.file_size for info in infos)
    assert room > 0
    with zipfile.ZipFile(found, "w", zipfile.ZIP_STORED) as target:
        target.writestr(name, bytes(room))
        for info in infos:
            target.writestr(info.filename, source.read(info))
    assert len(found.getvalue()) == nbytes
    return found.getvalue()


def test_identity_changes_with_content_and_needs_settled_files(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    file = tmp_path / "a" / "x"
    file.write_bytes(b"1")
    assert compute_identity([tmp_path]) is None, "too fresh"
    settled(tmp_path)
    first = compute_identity([tmp_path, None])
    assert first is not None and compute_identity([tmp_path]) == first
    status = file.stat()
    file.write_bytes(b"2")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    settled(tmp_path)
    assert compute_identity([tmp_path]) != first
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    settled(tmp_path)
    assert compute_identity([tmp_path]) is not None
    assert compute_identity([tmp_path / "missing"]) is None


def test_repeated_load_on_ranks_matches_saved_state(tmp_path: Path) -> None:
    state = {"w": torch.arange(96.0).reshape(24, 4), "r": torch.arange(5000.0), "at": 3}
    folder = settled(Path(save_dcp(tmp_path / "a", state)))
    torch.save(state, tmp_path / "truth.pt")
    run_on_ranks(again_on_ranks, (2,), str(folder), str(tmp_path / "truth.pt"))


def test_overlapping_groups_reuse_plans_without_hanging(tmp_path: Path) -> None:
    run_on_ranks(two_groups, (3,), str(tmp_path), timeout=60)


def test_load_runs_garbage_collection_at_most_once(tmp_path: Path) -> None:
    """With torch imported one search takes longer than a load of many small tensors."""
    state = {f"layers.{number}.w": torch.ones(2) for number in range(400)}
    save_file(state, tmp_path / "model.safetensors")
    searches: list[str] = []

    def note(phase: str, _: object) -> None:
        searches.append(phase)

    load(state, tmp_path)
    LOAD_PLANS.clear()
    gc.collect()
    gc.callbacks.append(note)
    try:
        load(state, tmp_path)
    finally:
        gc.callbacks.remove(note)
    assert searches in ([], ["start", "stop"]), "one afterwards"
    assert gc.isenabled()
