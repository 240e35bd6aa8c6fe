"""Saving in training: plans used again, values, failures, ranks that die, modes."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptctl.distributed.loading.load import load
from ckptctl.distributed.saving import destination
from ckptctl.distributed.saving.save import save
from ckptctl.errors import CkptError, StorageError, UsageError
from ckptctl.planner import balance
from ckptctl.storage import file_system
from tests.gloo import RankFailure, run_on_ranks
from tests.integration import saving_ranks
from tests.integration.saving_ranks import stock_load, tensors


@pytest.mark.slow
def test_save_plans_are_reused_but_never_stale(tmp_path: Path) -> None:
    run_on_ranks(saving_ranks.plans_are_used_again_and_never_stale, (2,), tmp_path)


def test_values_differing_across_ranks_are_saved_per_rank(tmp_path: Path) -> None:
    run_on_ranks(saving_ranks.values_that_differ_change, (3,), tmp_path)


@pytest.mark.slow
def test_large_replica_is_written_by_all_ranks(tmp_path: Path) -> None:
    run_on_ranks(saving_ranks.all_write_a_large_replica, (2,), tmp_path)


@pytest.mark.slow
def test_device_tensors_are_saved(tmp_path: Path) -> None:
    run_on_ranks(saving_ranks.from_a_device, (2,), tmp_path)


def test_failure_on_one_rank_fails_save_everywhere(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    run_on_ranks(saving_ranks.one_rank_fails, (2, 3), tmp_path / "runs")


@pytest.mark.parametrize(
    ("phase", "victim"),
    [
        pytest.param("before the plan", 1, marks=pytest.mark.slow),
        pytest.param("after the plan", 1, marks=pytest.mark.slow),
        ("while writing", 1),
        pytest.param("while writing", 0, marks=pytest.mark.slow),
        pytest.param("when written", 0, marks=pytest.mark.slow),
    ],
)
def test_killed_rank_keeps_previous_checkpoint(tmp_path: Path, phase: str, victim: int) -> None:
    root = tmp_path / "run"
    save(tensors(0), root / "step", sync=False)
    with pytest.raises(RankFailure):
        run_on_ranks(saving_ranks.killed_at, (2,), root, phase, victim)
    assert not list(tmp_path.glob("returned-*"))
    found = stock_load(root / "step", tensors(0))
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors(0).items())
    run_on_ranks(saving_ranks.save_again, (2,), root)


@pytest.mark.parametrize(
    ("world", "count"),
    [
        (1, 13),
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(2, 24, marks=pytest.mark.slow),
    ],
)
def test_kill_during_threaded_save_publishes_nothing(
    tmp_path: Path, world: int, count: int
) -> None:
    root = tmp_path / "run"
    root.mkdir()
    with pytest.raises(RankFailure):
        run_on_ranks(saving_ranks.killed_among_threads, (world,), root, count)
    assert not list(tmp_path.glob("returned-*"))
    assert not (root / "step").exists()
    state = saving_ranks.many(2)
    save(state, root / "step", files=7, jobs=16, sync=False)
    assert {path.name for path in root.iterdir()} == {"step"}
    assert len(list((root / "step").glob("*.distcp"))) == 7
    assert same_all(stock_load(root / "step", state), state)


def same_all(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return all(same(found[name], value) for name, value in expected.items())


def test_save_without_collectives_is_complete_and_convertible(tmp_path: Path) -> None:
    import ckptctl

    run_on_ranks(saving_ranks.without_collectives, (1, 2, 3), tmp_path)
    for folder in sorted(tmp_path.iterdir()):
        assert ckptctl.verify(folder).verdict == "complete", folder
        out = tmp_path / f"{folder.name}.pt"
        ckptctl.convert(folder, out, to="torch")
        found = torch.load(out, weights_only=True)
        for name, tensor in tensors(3).items():
            assert torch.equal(found[name], tensor), (folder.name, name)


def test_concurrently_written_metadata_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs save to one place without collectives, on a system without ``renameat2``."""

    def unsupported(*_: object) -> None:
        raise file_system.UnsupportedRenameError

    original = destination.RankFolderTarget.write_files

    def fill(*words: Any) -> None:
        original(*words)
        (tmp_path / "x/__0.metadata").write_bytes(b"of another run")

    monkeypatch.setattr(file_system, "rename_atomically", unsupported)
    monkeypatch.setattr(destination.RankFolderTarget, "write_files", fill)
    with pytest.raises(StorageError, match="EEXIST"):
        save({"w": torch.ones(3)}, tmp_path / "x", collectives=False)
    assert (tmp_path / "x/__0.metadata").read_bytes() == b"of another run"


def test_unfinished_rank_local_save_is_overwritten(tmp_path: Path) -> None:
    from ckptctl.formats import open_checkpoint

    folder = Path(save(tensors(0), tmp_path / "x", collectives=False, sync=False))
    os.rename(folder / "__0.metadata", folder / "__0.metadata.tmp")
    with pytest.raises(CkptError):
        open_checkpoint(folder)
    (folder / "__0_7.distcp").touch()
    (folder / "__10_0.distcp").touch()
    save(tensors(1), folder, collectives=False, sync=False)
    assert sorted(path.name for path in folder.iterdir()) == [
        "__0.metadata",
        "__0_0.distcp",
        "__10_0.distcp",
    ]
    with pytest.raises(CkptError, match="cannot replace"):
        save(tensors(1), folder, collectives=False, overwrite=True)


class Counter:
    """A Stateful object."""

    def __init__(self, count: int) -> None:
        self.count = torch.tensor(count)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "kind": "counter"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def kinds() -> dict[str, Any]:
    """Return every kind of leaf."""
    torch.manual_seed(1)
    shared = torch.randn(4, 3)
    return {
        "transposed": torch.randn(5, 7).t(),
        "strided": torch.randn(6, 8)[::2, 1::3],
        "expanded": torch.randn(3, 1).expand(3, 4),
        "conj": torch.randn(2, 2, dtype=torch.complex64).conj(),
        "zero": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "one": shared,
        "tied": shared,
        "float8": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False]),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "nested": {"list": [torch.ones(2), {"a": 1}, "text"], "tuple": (1, torch.ones(1)), 7: 8},
        "counter": Counter(3),
        "numpy": np.random.RandomState(3).get_state(),
        "scalar": np.float64(1.5),
        "none": None,
    }


def test_leaf_types_are_saved_like_stock_dcp(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_saver import save as stock_save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock_save(kinds(), checkpoint_id=tmp_path / "stock", no_dist=True)
    for files, jobs in ((1, 1), (3, 2), (9, 16)):
        ours = save(kinds(), tmp_path / f"ours{files}", sync=False, files=files, jobs=jobs)
        theirs = FileSystemReader(tmp_path / "stock").read_metadata()
        found = FileSystemReader(ours).read_metadata()
        assert found.planner_data == theirs.planner_data
        assert found.state_dict_metadata == theirs.state_dict_metadata
        flat: dict[str, Any] = dict.fromkeys(theirs.state_dict_metadata)
        for name, entry in theirs.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                flat[name] = torch.zeros(entry.size, dtype=entry.properties.dtype)
        one, other = stock_load(ours, flat), stock_load(tmp_path / "stock", flat)
        for name in flat:
            assert same(one[name], other[name]), name


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(
            one.contiguous().reshape(-1).view(torch.uint8),
            other.contiguous().reshape(-1).view(torch.uint8),
        )
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_file_count_follows_jobs_and_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def files_of(name: str, **options: Any) -> int:
        folder = save(tensors(0), tmp_path / name, sync=False, **options)
        found = stock_load(folder, tensors(1))
        assert all(map(same, found.values(), tensors(0).values()))
        return len(list(folder.glob("*.distcp")))

    assert files_of("small", jobs=5) == 1
    monkeypatch.setattr(balance, "MIN_FILE_BYTES", 120)
    assert files_of("two", jobs=6) == 2
    monkeypatch.setattr(balance, "MIN_FILE_BYTES", 8)
    assert files_of("tensors", jobs=7) == 3
    assert files_of("said", jobs=4, files=1) == 1
    assert files_of("unchecked", jobs=4, checksum=False) == 3


def test_save_creates_missing_parents_of_relative_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert save(tensors(0), "a/b/c", sync=False) == tmp_path / "a/b/c"
    assert (tmp_path / "a/b/c/.metadata").is_file()


@pytest.mark.parametrize(
    ("name", "value"), [("files", 0), ("files", "2"), ("jobs", -1), ("memory", "1MiB")]
)
def test_invalid_files_and_jobs_are_usage_errors(tmp_path: Path, name: str, value: object) -> None:
    with pytest.raises(UsageError, match="is not an integer >=") as caught:
        save(tensors(0), tmp_path / "out", sync=False, **{name: value})  # type: ignore[arg-type]
    assert caught.value.where == name and not list(tmp_path.iterdir())
    two: Any = np.int64(2)
    saved = save(tensors(0), tmp_path / "out", sync=False, files=two, jobs=two)
    with pytest.raises(UsageError, match="is not an integer >= 0"):
        load(tensors(0), saved, jobs=-1)
