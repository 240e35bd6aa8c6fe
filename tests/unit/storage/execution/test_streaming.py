"""Files that are written from front to back have the bytes of those that are filled in parallel."""

from __future__ import annotations

import io
import itertools
import math
import random
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from ckptctl.catalog import build_memory_name, compute_row_major_strides
from ckptctl.errors import ChangedError, DamagedError
from ckptctl.planner.plan import CrcLookup, OutputFile, Plan, Record, Transfer
from ckptctl.planner.strided import StridedTensor
from ckptctl.storage.execution.execution_options import ExecutionOptions
from ckptctl.storage.execution.executor import execute_plan
from ckptctl.storage.execution.streaming import stream_plan
from tests.transfers import stored, target
from tests.unit.storage.execution.test_memory import plan

HOW = ExecutionOptions(jobs=1, sync=False)
SHAPES = ((), (0, 3), (7,), (40, 30), (200, 100, 90))


class Store:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    @contextmanager
    def create(self, name: str) -> Iterator[io.BytesIO]:
        file = io.BytesIO()
        yield file
        self.files[name] = file.getvalue()


def tensors(order: random.Random) -> tuple[Plan, dict[str, memoryview]]:
    """Plan two files of tensors in memory, some with permuted or sparse elements."""
    memory: dict[str, memoryview] = {}
    transfers: list[Transfer] = []
    records: list[Record] = []
    files: list[OutputFile] = []
    for name in ("x", "y"):
        end = 4
        for shape in SHAPES:
            dims = list(range(len(shape)))
            order.shuffle(dims)
            dense = compute_row_major_strides(tuple(shape[dim] for dim in dims))
            steps = [0] * len(shape)
            for dim, step in zip(dims, dense, strict=True):
                steps[dim] = step * order.choice((1, 2))
            source = stored(build_memory_name(str(len(memory))), shape, offset=3, strides=steps)
            memory[source.name] = memoryview(order.randbytes(source.extents[0].nbytes + 3))
            box = target(name, end, shape, len(records))
            transfers.append(Transfer("t", StridedTensor.from_entry(source), (box,)))
            nbytes = math.prod(shape)
            records.append(Record("t", name, end, nbytes))
            end += nbytes
        numbers = range(len(records) - len(SHAPES), len(records))

        def frame(
            crc_of: CrcLookup, end: int = end, numbers: range = numbers
        ) -> Iterator[tuple[int, bytes]]:
            yield 0, b"head"
            yield end, b"".join(crc_of(number).to_bytes(4, "little") for number in numbers)

        files.append(OutputFile(name, end + 4 * len(numbers), frame))
    return Plan(
        Path("/"), {}, Path(), False, tuple(files), tuple(records), tuple(transfers), (), ""
    ), memory


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_streamed_files_match_parallel_run(tmp_path: Path, seed: int, checksum: bool) -> None:
    made, memory = tensors(random.Random(seed))
    how, store = replace(HOW, checksum=checksum), Store()
    execute_plan(made, tmp_path, how, lambda _: None, memory=memory)
    stream_plan(made, store.create, how, memory)
    assert store.files == {name: (tmp_path / name).read_bytes() for name in ("x", "y")}


def test_header_with_checksum_is_streamed_before_data() -> None:
    content, store = random.Random(1).randbytes(3 << 20), Store()

    def frame(crc_of: CrcLookup) -> Iterator[tuple[int, bytes]]:
        yield 0, crc_of(0).to_bytes(4, "little")
        yield 4 + len(content), b""

    name, done = build_memory_name("0"), list[int]()
    source, into = stored(name, [len(content)]), target("x", 4, [len(content)], 0)
    record, file = Record("t", "x", 4, len(content)), OutputFile("x", 4 + len(content), frame)
    made = plan(source, into, record, [file], Path())
    stream_plan(made, store.create, replace(HOW, pace=done.append), {name: memoryview(content)})
    assert store.files == {"x": zlib.crc32(content).to_bytes(4, "little") + content}
    assert sum(done) == len(content) and max(done) <= 1 << 20


def test_streamed_source_change_or_checksum_mismatch_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"abcd")
    source = stored("in", [4], crc32=zlib.crc32(b"abcd"))
    file = OutputFile("x", 4, lambda _: itertools.repeat((4, b""), 1))
    made = plan(source, target("x", 0, [4], 0), Record("t", "x", 0, 4), [file], tmp_path)
    store = Store()
    stream_plan(made, store.create, replace(HOW, checksum=False))
    assert store.files == {"x": b"abcd"}
    with (tmp_path / "in").open("r+b") as changed:
        changed.write(b"b")
    with pytest.raises(ChangedError):
        stream_plan(made, store.create, HOW)
    wrong = plan(source, target("x", 0, [4], 0), Record("t", "x", 0, 4), [file], tmp_path)
    with pytest.raises(DamagedError, match="does not match"):
        stream_plan(wrong, store.create, replace(HOW, checksum=False))


def test_interrupt_stops_streaming_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    content, store = bytes(3 << 20), Store()
    name = build_memory_name("0")
    file = OutputFile("x", len(content), lambda _: itertools.repeat((len(content), b""), 1))
    source, into = stored(name, [len(content)]), target("x", 0, [len(content)], 0)
    made = plan(source, into, Record("t", "x", 0, len(content)), [file], Path())
    begun = threading.Event()

    def interrupted(future: Future[None]) -> None:
        begun.wait(10)
        raise KeyboardInterrupt

    def pace(_: int) -> None:
        begun.set()
        time.sleep(0.2)

    monkeypatch.setattr(Future, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stream_plan(made, store.create, replace(HOW, pace=pace), {name: memoryview(content)})
    assert not store.files
