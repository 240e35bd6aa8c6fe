"""Planners and storage for torch's own functions, in one process: what stock ones get wrong."""

from __future__ import annotations

import os
import pickle
import re
import signal
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner import SavePlanner as TorchSavePlanner

import ckptctl
from ckptctl.distributed import LoadPlanner, Reader, SavePlanner, Writer, compat
from ckptctl.errors import CkptError, StorageError, UsageError
from ckptctl.remote.blocks import BLOCK_BYTES
from ckptctl.remote.store import FsspecStore
from tests.checkpoints.dcp import in_three_shards
from tests.checkpoints.writers import save_hf
from tests.remote_reads import counted


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def save(state: dict[str, Any], path: object, planner: Any = None, **writer: Any) -> None:
    storage = Writer(path, **writer)  # type: ignore[arg-type]
    state_dict_saver.save(state, storage_writer=storage, planner=planner or SavePlanner())


def test_dcp_errors_name_python_options(tmp_path: Path) -> None:
    save({"a": torch.ones(1)}, tmp_path / "whole")
    with pytest.raises(CheckpointException) as caught:
        save({"a": torch.ones(1)}, tmp_path / "whole")
    assert "pass `overwrite=True`" in str(caught.value)


def load(state: dict[str, Any], path: object, planner: Any = None, **reader: Any) -> Reader:
    storage = Reader(path, **reader)  # type: ignore[arg-type]
    state_dict_loader.load(state, storage_reader=storage, planner=planner or LoadPlanner())
    return storage


def stock_save(state: dict[str, Any], path: Path, planner: Any = None) -> None:
    writer = FileSystemWriter(path)
    state_dict_saver.save(state, storage_writer=writer, planner=planner or DefaultSavePlanner())


def stock_load(state: dict[str, Any], path: Path) -> None:
    state_dict_loader.load(
        state, storage_reader=FileSystemReader(path), planner=DefaultLoadPlanner()
    )


class Failing(CkptError):
    """What a test makes fail."""


def test_private_torch_names_exist_in_installed_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(compat.find_missing_names()) == []
    assert {name for name in compat.__all__ if hasattr(compat, name)} == set(compat.__all__)
    assert {name for name in compat.PRIVATE if name[0] != "_"} < set(compat.__all__)
    monkeypatch.setitem(compat.PRIVATE, "gone", ("torch.distributed.checkpoint.planner", "gone"))
    assert list(compat.find_missing_names()) == ["torch.distributed.checkpoint.planner.gone"]


def test_untested_torch_version_warns() -> None:
    major, minor = compat.NEWEST_TESTED
    newer = f"{major}.{minor + 1}.0a0+git123"
    with pytest.warns(
        UserWarning, match=rf"torch {re.escape(newer)} is newer than {major}\.{minor}"
    ):
        compat.warn_if_untested(newer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for version in (f"{major}.{minor}.9+cu130", "2.6.0", "2.13.0+cpu"):
            compat.warn_if_untested(version)


def test_newest_tested_torch_matches_noxfile() -> None:
    listed = re.search(r"^TORCHES = \[(.*)\]$", Path("noxfile.py").read_text(), re.MULTILINE)
    assert listed
    assert listed[1].split(", ")[-1] == '"{}.{}"'.format(*compat.NEWEST_TESTED)


def test_changed_dtype_or_path_bypasses_plan_cache(tmp_path: Path) -> None:
    steps: list[dict[str, Any]] = [
        {"a": {"b": torch.ones(4)}},
        {"a": {"b": torch.ones(4, dtype=torch.bfloat16)}},
        {"a.b": torch.ones(4, dtype=torch.bfloat16)},
    ]
    stock = DefaultSavePlanner(enable_plan_caching=True)
    ours = SavePlanner()
    for number, state in enumerate(steps):
        stock_save(state, tmp_path / f"stock{number}", stock)
        save(state, tmp_path / f"ours{number}", ours)
    for cache in ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata"):
        getattr(TorchSavePlanner, f"_cached_{cache}").clear()

    def said(name: str) -> list[tuple[torch.dtype, object]]:
        found = [FileSystemReader(tmp_path / f"{name}{n}").read_metadata() for n in range(3)]
        entries = [one.state_dict_metadata["a.b"] for one in found]
        return [
            (entry.properties.dtype, one.planner_data["a.b"])  # type: ignore[union-attr]
            for entry, one in zip(entries, found, strict=True)
        ]

    assert said("ours") == [
        (torch.float32, ("a", "b")),
        (torch.bfloat16, ("a", "b")),
        (torch.bfloat16, ("a.b",)),
    ]
    assert said("stock") == [(torch.float32, ("a", "b"))] * 3  # wrong, twice


def test_different_dtype_is_an_error_or_a_cast(tmp_path: Path) -> None:
    stock_save({"w": torch.tensor([1.5, 300.0])}, tmp_path / "x")
    wrong = {"w": torch.zeros(2, dtype=torch.int8)}
    stock_load(wrong, tmp_path / "x")
    assert wrong["w"].tolist() != [1.5, 300.0]  # silently
    for planner in (LoadPlanner(), LoadPlanner(cast=True), DefaultLoadPlanner()):
        state = {"w": torch.zeros(2, dtype=torch.int8)}
        with pytest.raises(CheckpointException, match="a different dtype"):
            load(state, tmp_path / "x", planner)
        assert state["w"].tolist() == [0, 0]
    half = {"w": torch.zeros(2, dtype=torch.bfloat16)}
    with pytest.raises(CheckpointException, match="cast=True"):
        load(half, tmp_path / "x")
    planner = LoadPlanner(cast=True)
    load(half, tmp_path / "x", planner)
    assert half["w"].tolist() == [1.5, 300.0]
    assert planner.report.cast == {"w": ("float32", "bfloat16")}


def test_missing_elements_are_an_error_on_load(tmp_path: Path) -> None:
    torn(tmp_path / "x")
    stock = {"w": torch.full((8, 4), 7.0)}
    stock_load(stock, tmp_path / "x")
    assert (stock["w"][4:] == 7).all()  # what was there before, silently
    for planner in (LoadPlanner(), DefaultLoadPlanner()):
        state = {"w": torch.full((8, 4), 7.0)}
        with pytest.raises(CheckpointException, match=r"\[4:8, 0:4\]"):
            load(state, tmp_path / "x", planner)
        assert (state["w"] == 7).all()
    with pytest.raises(CheckpointException, match=r"\[4:8, 0:4\]"):
        state_dict_loader.load(
            {"w": torch.zeros(8, 4)},
            storage_reader=FileSystemReader(tmp_path / "x"),
            planner=LoadPlanner(),
        )


def torn(path: Path) -> None:
    """Write a checkpoint of whose tensor one half is recorded nowhere."""
    stock_save({"w": torch.ones(4, 4)}, path)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.state_dict_metadata["w"].size = torch.Size([8, 4])
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def test_leaves_missing_in_checkpoint_stay_unchanged(tmp_path: Path) -> None:
    save({"w": torch.ones(2), "other": 3}, tmp_path / "x")
    token = frozenset({1})
    stock = {"w": torch.zeros(2), "token": token}
    partial = DefaultLoadPlanner(allow_partial_load=True)
    state_dict_loader.load(stock, storage_reader=FileSystemReader(tmp_path / "x"), planner=partial)
    assert stock["token"] is None  # it was replaced
    state: dict[str, Any] = {"w": torch.zeros(2), "token": token}
    with pytest.raises(CheckpointException, match="token"):
        load(state, tmp_path / "x")
    planner = LoadPlanner(strict=False)
    load(state, tmp_path / "x", planner)
    assert state["token"] is token and torch.equal(state["w"], torch.ones(2))
    assert planner.report.missing == ("token",)
    assert planner.report.unexpected == ("other",)


def test_partial_load_reads_only_needed_bytes(tmp_path: Path) -> None:
    full = torch.arange(1 << 20, dtype=torch.float32).view(1024, 1024)
    save({"w": full}, tmp_path / "x")

    class Slice(DefaultLoadPlanner):
        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            (item,) = plan.items
            part = torch.Size([128, 1024])
            first = torch.Size([256, 0])
            object.__setattr__(item, "storage_offsets", first)
            object.__setattr__(item, "lengths", part)
            return plan

    state = {"w": torch.zeros(1024, 1024)}
    reader = load(state, tmp_path / "x", Slice())
    assert torch.equal(state["w"][:128], full[256:384])
    assert reader.bytes_read == full.nbytes // 8


def test_stock_reads_complete_chunk_for_partial_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock_save({"w": torch.ones(1024, 64)}, tmp_path / "x")
    read: list[int] = []
    original = torch.load

    def counting(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        read.append(found.nbytes)
        return found

    monkeypatch.setattr(torch, "load", counting)
    metadata = FileSystemReader(tmp_path / "x").read_metadata()
    (item,) = compat.create_read_items_for_chunk_list(
        "w",
        metadata.state_dict_metadata["w"],  # type: ignore[arg-type]
        [ChunkStorageMetadata(torch.Size([8, 0]), torch.Size([128, 64]))],
    )
    for storage, cost in ((FileSystemReader(tmp_path / "x"), 8), (Reader(tmp_path / "x"), 1)):
        part = torch.zeros(128, 64)
        planner = DefaultLoadPlanner()
        planner.resolve_tensor = lambda _, part=part: part  # type: ignore[method-assign, misc]
        storage.set_up_storage_reader(storage.read_metadata(), True)
        storage.read_data(LoadPlan([item]), planner).wait()
        assert (part == 1).all()
        found = storage.bytes_read if isinstance(storage, Reader) else read[-1]
        assert found == part.nbytes * cost


def test_worker_thread_errors_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"{number}": torch.ones(1 << 16) for number in range(8)}
    stock = FileSystemWriter(tmp_path / "stock", thread_count=4)
    create = stock.fs.create_stream

    def failing(path: Any, mode: str) -> Any:
        if threading.current_thread() is not threading.main_thread():
            raise OSError(28, "No space left on device")
        return create(path, mode)

    monkeypatch.setattr(stock.fs, "create_stream", failing)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    state_dict_saver.save(state, storage_writer=stock)
    stored = FileSystemReader(tmp_path / "stock").read_metadata().storage_data
    assert len(stored) < len(state)  # it has said that it saved all of it

    def full(*_: object) -> None:
        raise StorageError("No space left on device")

    monkeypatch.setattr("ckptctl.storage.execution.run_files.LocalSink.write", full)
    with pytest.raises(CheckpointException, match="No space left") as caught:
        save(state, tmp_path / "ours", jobs=4)
    assert caught.tb  # which keeps the writer alive
    assert [path.name for path in tmp_path.iterdir()] == ["stock"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_untrusted_leaf_code_is_not_run(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "x": Hostile(tmp_path / "ran")}
    with pytest.raises(CheckpointException, match="`x` cannot be saved"):
        save(state, tmp_path / "c")
    save(state, tmp_path / "c", SavePlanner(trusted=True))
    for planner in (LoadPlanner(), DefaultLoadPlanner()):
        with pytest.raises(CheckpointException, match="not known to be harmless"):
            load({"w": torch.zeros(2), "x": 0}, tmp_path / "c", planner)
    assert not (tmp_path / "ran").exists()
    stock_load({"w": torch.zeros(2), "x": 0}, tmp_path / "c")
    assert (tmp_path / "ran").exists()


class Hostile:
    """An object that makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_unwritten_items_fail_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Writer.write_data

    def forgetful(self: Writer, plan: Any, planner: Any) -> Any:
        future = write(self, plan, planner)
        future.value().pop()
        return future

    monkeypatch.setattr(Writer, "write_data", forgetful)
    with pytest.raises(CheckpointException, match="were not written"):
        save({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "x")
    assert not (tmp_path / "x").exists()
    monkeypatch.undo()
    save({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "x")
    assert [one.name for one in tmp_path.iterdir()] == ["x"]


def test_planner_that_changes_dtype_is_an_error(tmp_path: Path) -> None:
    class Lying(DefaultSavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:
            return super().transform_object(write_item, object).double()

    with pytest.raises(CheckpointException, match="does not match the plan"):
        save({"a": torch.ones(2)}, tmp_path / "x", Lying())
    assert not (tmp_path / "x").exists()


def test_all_tensor_kinds_roundtrip(tmp_path: Path) -> None:
    kinds = (torch.float8_e4m3fn, torch.complex64, torch.bool, torch.int64, torch.bfloat16)
    state: dict[str, Any] = {str(kind): torch.ones(3, 2).to(kind) for kind in kinds}
    state |= {
        "t": torch.arange(12.0).view(3, 4).t(),
        "every second": torch.arange(10)[::2],
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 3),
        "nested": {"list": [1, torch.ones(1)], "none": None},
    }
    expected = {name: one.clone() for name, one in state.items() if torch.is_tensor(one)}
    save(state, tmp_path / "x", files=3)
    for loader in (stock_load, load):
        fresh = {name: torch.zeros_like(one) for name, one in expected.items()}
        found: dict[str, Any] = {**fresh, "nested": {"list": [0, torch.zeros(1)], "none": 1}}
        loader(found, tmp_path / "x")
        for name, one in expected.items():
            assert torch.equal(found[name].float(), one.float()), name
        assert found["nested"] == {"list": [1, torch.ones(1)], "none": None}


def test_save_and_load_work_on_url(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/run"
    big = torch.arange(6_000_000, dtype=torch.float32).view(3000, 2000)
    state: dict[str, Any] = {"m": {"w": big, "t": torch.arange(12.0).view(3, 4).t()}, "step": 3}
    save(state, url)
    with pytest.raises(CheckpointException, match="exists"):
        save(state, url)
    found: dict[str, Any] = {"m": {"w": torch.zeros_like(big), "t": torch.zeros(4, 3)}, "step": 0}
    load(found, url)
    assert torch.equal(found["m"]["w"], big) and torch.equal(found["m"]["t"], state["m"]["t"])
    assert found["step"] == 3
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    stock: dict[str, Any] = {"m": {"w": torch.zeros_like(big), "t": torch.zeros(4, 3)}, "step": 0}
    state_dict_loader.load(stock, storage_reader=FsspecReader(url))
    assert torch.equal(stock["m"]["w"], big) and stock["step"] == 3
    with pytest.raises(CheckpointException, match="nothing"):
        load({"step": 0}, f"memory://{tmp_path.name}/nothing")


def test_partial_load_from_url_reads_ranges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"memory://{tmp_path.name}/parts"
    full = torch.arange(1 << 22, dtype=torch.float32).view(4096, 1024)
    save({"w": full, "unwanted": torch.ones(1 << 20)}, url)
    read = counted(monkeypatch)
    reader = Reader(url)
    metadata = reader.read_metadata()
    boxes = (((1024, 0), (512, 1024)), ((0, 1000), (4, 3)))
    chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in boxes]
    entry = metadata.state_dict_metadata["w"]
    items = compat.create_read_items_for_chunk_list("w", entry, chunks)  # type: ignore[arg-type]
    parts = {tuple(o): torch.zeros(s) for o, s in boxes}

    class Parts(DefaultLoadPlanner):
        def resolve_tensor(self, read_item: Any) -> torch.Tensor:
            return parts[tuple(read_item.dest_index.offset)]

    reader.set_up_storage_reader(metadata, True)
    reader.read_data(LoadPlan(items), Parts()).wait()
    assert torch.equal(parts[1024, 0], full[1024:1536])
    assert torch.equal(parts[0, 1000], full[:4, 1000:1003])
    assert sum(read) < (2 << 20) + 16 * BLOCK_BYTES


def test_failed_save_to_url_leaves_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"memory://{tmp_path.name}/failed"
    monkeypatch.setattr("ckptctl.storage.execution.streaming._StreamSink.write", _breaking)
    with pytest.raises(CheckpointException, match="the network is down"):
        save({"w": torch.ones(64, 64)}, url, checksum=False)
    store = FsspecStore(url)
    assert store.read_file_size(".metadata") == store.read_file_size("__0_0.distcp") == -1


def _breaking(sink: Any, offset: int, view: memoryview) -> None:
    sink._target.write(view[:100])
    raise Failing("the network is down")


def test_file_url_is_a_local_path(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, f"file://{tmp_path}/x")
    found = {"w": torch.zeros(3)}
    load(found, f"file://{tmp_path}/x")
    assert torch.equal(found["w"], torch.ones(3))
    assert (tmp_path / "x/.metadata").is_file()


def test_checkpoint_ids_are_validated_and_writer_is_picklable() -> None:
    assert Writer.validate_checkpoint_id("some/path") and Reader.validate_checkpoint_id("some/path")
    assert Writer.validate_checkpoint_id("memory://x")
    assert not Writer.validate_checkpoint_id("nosuch://x")
    assert pickle.loads(pickle.dumps(Writer("x"))).checkpoint_id == "x"


@pytest.mark.parametrize(
    "options",
    [{"dequantize": "int8"}, {"dequantize": "banana"}, {"weights": "both"}, {"sizes": {"dim": 0}}],
)
def test_invalid_reader_options_are_refused_as_by_load(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """They are refused as by ``ckptctl.load``, before anything is filled."""
    (option,) = options
    save({"w": torch.ones(3)}, tmp_path / "x")
    with pytest.raises(UsageError) as found:
        Reader(tmp_path / "x", **options)
    with pytest.raises(UsageError) as theirs:
        ckptctl.load({"w": torch.zeros(3)}, tmp_path / "x", **options)
    assert found.value.to_json() == theirs.value.to_json()
    assert option in str(found.value.where)


def test_quantized_tensors_are_dequantized_on_load(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    quantized = {"w": weight.to(torch.float8_e4m3fn), "w_scale_inv": torch.full((1, 1), 2.0)}
    save_hf(tmp_path / "x", quantized)
    found = {"w": torch.zeros(2, 3, dtype=torch.bfloat16)}
    load(found, tmp_path / "x", dequantize="bf16")
    assert torch.equal(found["w"].float(), weight * 2)


@pytest.mark.parametrize("rank", [0, 1])
def test_sharded_tensors_load_with_several_or_no_shards(tmp_path: Path, rank: int) -> None:
    full = torch.arange(48.0).reshape(8, 6)
    group = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", rank=rank, world_size=2, store=group.FakeStore())
    try:
        held = {"w": in_three_shards(full, rank)}
        state_dict_saver.save({"w": full}, storage_writer=Writer(tmp_path / "whole"), no_dist=True)
        if not rank:
            writer = Writer(tmp_path / "shards")
            state_dict_saver.save(held, storage_writer=writer, planner=SavePlanner(), no_dist=True)
        for path in tmp_path.iterdir():
            for reader in (Reader(path), FileSystemReader(path)):
                state = {"w": in_three_shards(torch.zeros_like(full), rank)}
                planner = LoadPlanner()
                state_dict_loader.load(state, storage_reader=reader, planner=planner, no_dist=True)
                pairs = zip(state["w"].local_shards(), held["w"].local_shards(), strict=True)
                assert all(torch.equal(one.tensor, truth.tensor) for one, truth in pairs)
                assert planner.report.loaded == ("w",)
    finally:
        dist.destroy_process_group()
