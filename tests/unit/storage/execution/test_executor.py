"""The executor on real files: bytes, checksums, faults, resuming."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import threading
import time
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ckptctl import dtypes
from ckptctl.errors import ChangedError, DamagedError, StorageError
from ckptctl.file_identity import FileIdentity
from ckptctl.planner.copying import blocks, copies
from ckptctl.planner.plan import OutputFile, Plan, RawCopy, Record, Transfer
from ckptctl.planner.strided import StridedTensor, concat
from ckptctl.storage import arithmetic
from ckptctl.storage.crc import crc32
from ckptctl.storage.execution import execution_options, worker
from ckptctl.storage.execution.execution_options import ExecutionOptions
from ckptctl.storage.execution.executor import execute_plan
from ckptctl.storage.sources import Sources
from ckptctl.storage.unfinished import UnfinishedWorkError
from tests.transfers import regrouped, stored, target

ROWS, COLUMNS = 96, 64


def identity(path):
    found = os.stat(path)
    return FileIdentity.from_stat(found)


class Case:
    """A source directory and a plan that copies it in several ways at once."""

    def __init__(self, root: Path, seed: int = 1):
        self.source, self.out = root / "source", root / "out"
        self.source.mkdir(parents=True)
        self.out.mkdir()
        self.journal = root / "journal"
        self.random = random.Random(seed)
        self.records: list[Record] = []
        self.transfers: list[Transfer] = []
        self.expected: list[bytes] = []
        self.blobs: dict[str, bytes] = {}
        self.size = 16
        self.progress = 0

    def tensor(self, name, shape, dtype="bfloat16"):
        item = dtypes.get_itemsize(dtype)
        data = self.random.randbytes(math.prod(shape) * item)
        (self.source / name).write_bytes(data)
        return data, stored(name, shape, dtype=dtype, crc32=zlib.crc32(data))

    def record(self, nbytes, expected):
        self.records.append(Record(f"t{len(self.records)}", "all.bin", self.size, nbytes))
        self.expected.append(expected)
        self.size += nbytes
        return len(self.records) - 1, self.size - nbytes

    def add(self, axes, source_dims, target_dims, permute, dtype="bfloat16", to=None):
        """Add a tensor whose target is ``permute(source elements)``."""
        name = f"s{len(self.transfers)}"
        shape = tuple(math.prod(axes[a] for a in g) for g in source_dims)
        data, source = self.tensor(name, shape, dtype)
        want = permute(data)
        record, offset = self.record(len(want), want)
        shape = tuple(math.prod(axes[a] for a in g) for g in target_dims)
        item = dtypes.get_itemsize(to or dtype)
        box = target("all.bin", offset, shape, record, item=item)
        tensor = regrouped(StridedTensor.from_entry(source), axes, source_dims, target_dims)
        self.transfers.append(Transfer(f"t{record}", tensor.cast(to or dtype), (box,)))

    def everything(self):
        rows = ((0,), (1,))
        self.add((ROWS, COLUMNS), rows, rows, lambda data: data)
        self.add((), (), (), lambda data: data)
        self.add((0, 4), rows, rows, lambda data: data)

        def rope(data):
            tensor = torch.frombuffer(bytearray(data), dtype=torch.int16)
            return tensor.view(4, 2, 8, 64).transpose(1, 2).contiguous().numpy().tobytes()

        self.add((4, 2, 8, 64), ((0, 1, 2), (3,)), ((0, 2, 1), (3,)), rope)

        def transpose(data):
            tensor = torch.frombuffer(bytearray(data), dtype=torch.int16)
            return tensor.view(ROWS, COLUMNS).t().contiguous().numpy().tobytes()

        self.add((ROWS, COLUMNS), rows, ((1,), (0,)), transpose)

        def cast(data):
            tensor = torch.frombuffer(bytearray(data), dtype=torch.bfloat16)
            return tensor.to(torch.float32).view(torch.uint8).numpy().tobytes()

        self.add((ROWS, COLUMNS), rows, rows, cast, to="float32")
        return self.plan()

    def plan(self, raw=b"side file"):
        (self.source / "config.json").write_bytes(raw)
        self.blobs = {"sub/config.json": raw}
        records = self.records

        def frame(crc_of):
            yield 0, b"HEAD"
            last = sum(crc_of(i) for i, r in enumerate(records) if r.file == "all.bin")
            yield 8, (last % 2**32).to_bytes(4, "little")

        sources = {p.name: identity(p) for p in self.source.iterdir()}
        return Plan(
            self.source,
            sources,
            self.out,
            False,
            (
                OutputFile("all.bin", self.size, frame),
                OutputFile("sub/config.json", len(raw), lambda _: iter(())),
                OutputFile("empty", 3, lambda _: iter([(0, b"abc")])),
            ),
            tuple(self.records),
            tuple(self.transfers),
            (RawCopy("config.json", 0, len(raw), "sub/config.json"),),
            "d1",
            checked=frozenset(
                (number, entry.name)
                for number, one in enumerate(self.transfers)
                for entry in one.iterate_stored_tensors()
            ),
        )

    def run(self, plan, **options):
        journal = options.pop("journal", None)
        self.progress = 0

        def count(nbytes):
            assert threading.current_thread() is threading.main_thread()
            self.progress += nbytes

        return execute_plan(plan, self.out, ExecutionOptions(**options), count, journal)

    def check(self, plan, done, checksum=True):
        data = (self.out / "all.bin").read_bytes()
        assert len(data) == self.size
        for record, want, crc in zip(self.records, self.expected, done.crcs, strict=True):
            assert data[record.offset : record.offset + record.nbytes] == want, record.name
            assert crc == (zlib.crc32(want) if checksum else 0)
        total = sum(done.crcs) % 2**32
        assert data[:16] == b"HEAD" + bytes(4) + total.to_bytes(4, "little") + bytes(4)
        for name, want in self.blobs.items():
            assert (self.out / name).read_bytes() == want
        assert (self.out / "empty").read_bytes() == b"abc"
        amount = sum(map(len, self.expected)) + sum(map(len, self.blobs.values()))
        assert done.bytes_written + done.resumed_bytes == amount == self.progress


@pytest.fixture(params=[1, 3])
def jobs(request):
    return request.param


@pytest.fixture
def case(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "FEW_RUNS_LIMIT", 512)
    return Case(tmp_path)


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("memory", [64 << 20, 1])
def test_all_transfer_kinds_produce_expected_bytes(case, jobs, checksum, memory):
    plan = case.everything()
    assert copies.needs_permutation(plan.transfers[4])
    done = case.run(plan, jobs=jobs, checksum=checksum, memory=memory)
    case.check(plan, done, checksum)
    assert os.stat(case.out / "all.bin").st_mode & 0o777 == 0o666 & ~umask()


def umask():
    value = os.umask(0)
    os.umask(value)
    return value


def test_large_tensors_are_split_into_tiles(case, jobs):
    rows = ((0,), (1,))
    case.add((9000, 1024), rows, rows, lambda data: data)
    plan = case.plan()
    tiles = list(
        copies.tile_transfer(
            plan.transfers[0], plan.records, ExecutionOptions().compute_tile_limits()
        )
    )
    assert [tile.nbytes for tile in tiles] == [16 << 20, (9000 << 11) - (16 << 20)]
    case.check(plan, case.run(plan, jobs=jobs))


@pytest.mark.parametrize("name", ["bool", "uint64", "float8_e4m3fn", "complex64", "complex128"])
def test_every_element_size_is_permuted_exactly(case, name):
    item = dtypes.get_itemsize(name)

    def transpose(data):
        elements = [data[i : i + item] for i in range(0, len(data), item)]
        return b"".join(elements[r * 40 + c] for c in range(40) for r in range(30))

    case.add((30, 40), ((0,), (1,)), ((1,), (0,)), transpose, dtype=name)
    plan = case.plan()
    assert copies.needs_permutation(plan.transfers[0])
    case.check(plan, case.run(plan))


@pytest.mark.usefixtures("two_torch_threads")
def test_execution_preserves_torch_thread_count(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "FEW_RUNS_LIMIT", 512)
    before = torch.get_num_threads()
    seen: set[int] = set()
    cast, permute = arithmetic.cast_elements, arithmetic.permute_elements

    def watching(function):
        def watched(*args):
            assert torch.get_num_threads() == 1
            fresh = threading.Thread(target=lambda: seen.add(torch.get_num_threads()))
            fresh.start()
            fresh.join()
            return function(*args)

        return watched

    monkeypatch.setattr(worker, "cast_elements", watching(cast))
    monkeypatch.setattr(worker, "permute_elements", watching(permute))
    cases = [Case(tmp_path / name) for name in ("a", "b")]
    plans = [case.everything() for case in cases]
    runs = [
        threading.Thread(target=execute_plan, args=(plan, case.out, ExecutionOptions(jobs=2), bool))
        for plan, case in zip(plans, cases, strict=True)
    ]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert seen == {before} == {torch.get_num_threads()}
    for case in cases:
        assert case.expected[5] in (case.out / "all.bin").read_bytes()


@pytest.mark.parametrize("number", range(6))
def test_source_checksum_mismatch_is_damaged(case, jobs, number):
    plan = case.everything()
    if number == 2:
        pytest.skip("an empty tensor has no bytes")
    path = case.source / f"s{number}"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    plan = replace(plan, sources={name: identity(case.source / name) for name in plan.sources})
    with pytest.raises(DamagedError) as caught:
        case.run(plan, jobs=jobs)
    assert (caught.value.where, f"`s{number}`" in caught.value.what) == (str(path), True)
    case.run(plan, jobs=jobs, checksum=False)


def test_concatenated_tensors_are_checksummed(case):
    halves = [case.tensor(f"h{i}", (ROWS, 32)) for i in range(2)]
    want = b"".join(data[row * 64 : row * 64 + 64] for row in range(ROWS) for data, _ in halves)
    number, offset = case.record(len(want), want)
    tensors = [StridedTensor.from_entry(one) for _, one in halves]
    box = target("all.bin", offset, (ROWS, 64), number, item=2)
    case.transfers.append(Transfer("t", concat(tensors, 1), (box,)))
    plan = case.plan()
    case.check(plan, case.run(plan))
    (extent,) = halves[1][1].extents
    wrong = replace(halves[1][1], extents=(replace(extent, crc32=1),))
    tensor = concat([tensors[0], StridedTensor.from_entry(wrong)], 1)
    plan = replace(plan, transfers=(replace(plan.transfers[0], tensor=tensor),))
    with pytest.raises(DamagedError, match="checksum"):
        case.run(plan)


def test_source_changed_during_run_is_an_error(case, monkeypatch):
    plan = case.everything()
    real = os.preadv
    changed = []

    def preadv(descriptor, views, offset):
        if not changed:
            changed.append(1)
            (case.source / "s1").write_bytes(b"zz")
        return real(descriptor, views, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(ChangedError):
        case.run(plan, checksum=False)


def test_source_changed_or_missing_since_planning_is_an_error(case):
    plan = case.everything()
    os.utime(case.source / "s3", ns=(1, 1))
    with pytest.raises(ChangedError, match="`s3` changed"):
        case.run(plan)
    (case.source / "s3").unlink()
    with pytest.raises(ChangedError, match="`s3` changed"):
        case.run(plan)


@pytest.mark.parametrize("content", [b"side file, longer", b"side", None])
def test_sidecar_file_changed_since_planning_is_an_error(case, content):
    plan = case.everything()
    plan = replace(plan, sources={n: i for n, i in plan.sources.items() if n != "config.json"})
    if content is None:
        (case.source / "config.json").unlink()
    else:
        (case.source / "config.json").write_bytes(content)
    with pytest.raises(ChangedError, match=r"`config\.json` changed"):
        case.run(plan)
    assert not list(case.out.iterdir())


def test_part_of_source_file_fills_output_file(case):
    plan = case.everything()
    (case.source / "config.json").write_bytes(b"....side file")
    sources = {n: i for n, i in plan.sources.items() if n != "config.json"}
    raw = replace(plan.raw_copies[0], offset=4)
    plan = replace(plan, sources=sources, raw_copies=(raw,))
    case.check(plan, case.run(plan))


def test_source_replaced_during_read_is_an_error(case, monkeypatch):
    plan = case.everything()
    real, once = os.preadv, threading.Lock()

    def preadv(descriptor, views, offset):
        if once.acquire(blocking=False):
            path = case.source / "s0"
            other = case.source / "other"
            other.write_bytes(path.read_bytes())
            os.utime(other, ns=(0, path.stat().st_mtime_ns))
            other.rename(path)
        return real(descriptor, views, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(ChangedError, match="changed"):
        case.run(plan)


def test_short_reads_and_writes_are_completed(case, jobs, monkeypatch):
    plan = case.everything()
    read, write = os.preadv, os.pwrite

    def preadv(descriptor, views, offset):
        return read(descriptor, [views[0][: max(1, len(views[0]) // 3)]], offset)

    def pwrite(descriptor, data, offset):
        return write(descriptor, memoryview(data)[: max(1, len(data) // 3)], offset)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(os, "pwrite", pwrite)
    case.check(plan, case.run(plan, jobs=jobs))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("name", ["pwrite", "fsync", "preadv"])
@pytest.mark.parametrize("at", [0, 2])
def test_failing_system_calls_are_storage_errors(case, jobs, monkeypatch, number, name, at):
    plan = case.everything()
    real = getattr(os, name)
    calls = []

    def failing(*args):
        calls.append(1)
        if len(calls) > at:
            raise OSError(number, os.strerror(number))
        return real(*args)

    monkeypatch.setattr(os, name, failing)
    with pytest.raises(StorageError, match=errno.errorcode[number]) as caught:
        case.run(plan, jobs=jobs)
    if (name, number) == ("pwrite", errno.ENOSPC):
        assert "free" in (caught.value.why or "")


def test_truncated_source_is_damaged(case):
    plan = case.everything()
    path = case.source / "s0"
    path.write_bytes(path.read_bytes()[:-1])
    plan = replace(plan, sources=plan.sources | {"s0": identity(path)})
    with pytest.raises(DamagedError, match="truncated"):
        case.run(plan)


def test_kernel_copies_fall_back_to_reads_and_writes(case, monkeypatch):
    plan = case.everything()
    calls = []

    def unsupported(*args):
        calls.append(1)
        raise OSError(errno.EXDEV, "no")

    monkeypatch.setattr(os, "copy_file_range", unsupported)
    case.check(plan, case.run(plan, jobs=1, checksum=False), checksum=False)
    assert len(calls) == 1


def test_interrupt_stops_run_and_threads(case):
    before = set(threading.enumerate())
    plan = case.everything()

    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute_plan(plan, case.out, ExecutionOptions(), interrupt)
    assert not set(threading.enumerate()) - before


def interrupted(case, plan, monkeypatch, after):
    """Run until *after* tiles are done and journaled; then fail."""
    real = worker.Worker.execute_unit
    done = []

    def do(self, unit):
        if len(done) >= after:
            deadline = time.monotonic() + 10
            while case.journal.read_bytes().count(b"\n") <= after and time.monotonic() < deadline:
                time.sleep(0.01)
            raise StorageError("injected")
        done.append(unit)
        return real(self, unit)

    with monkeypatch.context() as patch:
        patch.setattr(worker.Worker, "execute_unit", do)
        patch.setattr("ckptctl.storage.execution.lanes.BATCH_UNITS", 1)
        with pytest.raises(StorageError, match="injected"):
            case.run(plan, jobs=1, journal=case.journal, journal_every=1, resume=True)
    return done


def units_done(monkeypatch):
    """Return a list that grows by the name of each unit that is done from now on."""
    redone = []
    real = worker.Worker.execute_unit

    def do(self, unit):
        redone.append((unit.transfer, unit.number))
        return real(self, unit)

    monkeypatch.setattr(worker.Worker, "execute_unit", do)
    return redone


def test_resume_redoes_only_units_not_in_journal(case, monkeypatch):
    plan = case.everything()
    interrupted(case, plan, monkeypatch, 3)
    journaled = case.journal.read_bytes()
    assert journaled.count(b"\n") == 4
    redone = units_done(monkeypatch)
    done = case.run(plan, journal=case.journal, resume=True)
    case.check(plan, done)
    assert done.resumed_bytes > 0
    assert (0, 0) not in redone
    assert len(redone) == len(set(redone))


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("at", ["written", "read"])
def test_journal_unit_with_wrong_checksum_count_is_redone(case, monkeypatch, at, checksum):
    plan = case.everything()
    how = {"journal": case.journal, "checksum": checksum, "journal_every": 1}
    case.run(plan, **how)
    first, *_ = case.journal.read_bytes().splitlines(keepends=True)
    unit = {"written": [0], "read": [], at: [0] * 99}
    text = json.dumps({"units": [[0, 0, unit["written"], unit["read"], []]]}).encode()
    case.journal.write_bytes(first + b"%08x %s\n" % (crc32(text), text))
    redone = units_done(monkeypatch)
    case.check(plan, case.run(plan, resume=True, **how), checksum)
    assert (0, 0) in redone


@pytest.mark.parametrize("jobs", [2, 12])
def test_run_resumes_on_host_with_other_cores_and_devices(case, monkeypatch, jobs):
    """Fewer threads have larger tiles: those of the run that began the journal hold."""
    monkeypatch.setattr(execution_options, "ARITHMETIC_BYTES", 1 << 14)
    plan = case.everything()
    begun = [(unit.transfer, unit.number) for unit in interrupted(case, plan, monkeypatch, 4)]
    assert (
        ExecutionOptions(jobs=1).compute_tile_limits()
        != ExecutionOptions(jobs=jobs).compute_tile_limits()
    )
    whole = {name: replace(one, device=one.device + 1) for name, one in plan.sources.items()}
    monkeypatch.setattr(Sources, "require_unchanged", lambda _: None)
    redone = units_done(monkeypatch)
    how = {"jobs": jobs, "journal": case.journal, "resume": True, "journal_every": 1}
    done = case.run(replace(plan, sources=whole), **how)
    case.check(plan, done)
    assert begun[-1] == (4, 0) and (4, 1) in redone and not set(begun) & set(redone)


def test_resume_without_checksums_rereads_nothing(case, monkeypatch):
    plan = case.everything()
    how = {"journal": case.journal, "checksum": False, "journal_every": 1}
    case.run(plan, **how)
    monkeypatch.setattr("ckptctl.storage.execution.run_files.OutputFiles.compute_crc", None)
    assert case.run(plan, resume=True, **how).resumed_bytes > 0


def test_changed_staged_bytes_are_redone_on_resume(case, monkeypatch):
    plan = case.everything()
    done = interrupted(case, plan, monkeypatch, 3)
    write = done[0].tile.writes[0]
    with (case.out / write.file).open("r+b") as file:
        file.seek(write.offset)
        byte = file.read(1)
        file.seek(write.offset)
        file.write(bytes([byte[0] ^ 1]))
    case.check(plan, case.run(plan, journal=case.journal, resume=True))


@pytest.mark.parametrize(
    "spoil", ["digest", "journal", "size", "no-resume", "checksum", "source", "raw", "version"]
)
def test_run_that_cannot_resume_starts_over_or_is_refused(case, monkeypatch, spoil):
    plan = case.everything()
    plan = replace(plan, sources={n: i for n, i in plan.sources.items() if n != "config.json"})
    interrupted(case, plan, monkeypatch, 3)
    (case.out / "litter").write_bytes(b"old")
    with (case.out / "all.bin").open("r+b") as file:
        file.seek(16)
        file.write(b"tampered")
    resume, checksum = True, True
    if spoil == "digest":
        plan = replace(plan, digest="other")
    elif spoil == "journal":
        case.journal.unlink()
    elif spoil == "size":
        (case.out / "empty").write_bytes(b"")
    elif spoil == "checksum":
        checksum = False
    elif spoil == "source":
        os.utime(case.source / "s0", ns=(1, 1))
        plan = replace(plan, sources=plan.sources | {"s0": identity(case.source / "s0")})
    elif spoil == "raw":
        os.utime(case.source / "config.json", ns=(1, 1))
    elif spoil == "version":
        monkeypatch.setattr("ckptctl.storage.execution.journal.JOURNAL_VERSION", 1)
    else:
        resume = False
    if spoil in ("digest", "checksum", "source", "raw", "version"):
        before = case.journal.read_bytes()
        reason = "another version of ckptctl" if spoil == "version" else "had other options, or"
        with pytest.raises(UnfinishedWorkError, match=reason):
            case.run(plan, journal=case.journal, resume=True, checksum=checksum)
        assert case.journal.read_bytes() == before and (case.out / "litter").exists()
        resume = False
    done = case.run(plan, journal=case.journal, resume=resume, checksum=checksum)
    case.check(plan, done, checksum)
    assert done.resumed_bytes == 0
    assert not (case.out / "litter").exists()


def test_unwritten_record_bytes_raise(case):
    plan = case.everything()
    with pytest.raises(Exception, match="written"):
        case.run(replace(plan, transfers=plan.transfers[1:]))


@pytest.mark.slow
def test_many_files_need_few_descriptors(tmp_path):
    case = Case(tmp_path)
    files = []
    for number in range(700):
        data, source = case.tensor(f"s{number}", (4,))
        files.append((f"o{number}", data))
        case.records.append(Record(f"t{number}", f"o{number}", 0, 8))
        box = target(f"o{number}", 0, (4,), number, item=2)
        case.transfers.append(Transfer("t", StridedTensor.from_entry(source), (box,)))
    plan = case.plan()
    outputs = tuple(OutputFile(name, 8, lambda _: iter(())) for name, _ in files)
    plan = replace(plan, files=outputs, raw_copies=())
    opened, most = len(os.listdir("/proc/self/fd")), []
    real = os.fsync

    def fsync(descriptor):
        most.append(len(os.listdir("/proc/self/fd")))
        real(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        case.run(plan, jobs=2)
    assert all((case.out / name).read_bytes() == data for name, data in files)
    assert max(most) - opened < 300
    assert len(os.listdir("/proc/self/fd")) == opened


def test_thread_count_is_limited_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ckptctl.storage.execution.execution_options.get_default_thread_count", lambda: 16
    )
    assert ExecutionOptions().threads == 16
    assert ExecutionOptions(memory=512 << 10).threads == 8
    assert ExecutionOptions(memory=1).threads == 1
    assert ExecutionOptions(jobs=16, memory=512 << 10).threads == 16
    of_few, of_many = (ExecutionOptions(jobs=jobs).compute_tile_limits() for jobs in (2, 64))
    assert ExecutionOptions(jobs=64).count_threads_that_fit(of_many) == 64
    assert ExecutionOptions(jobs=64).count_threads_that_fit(of_few) == 7
    assert ExecutionOptions(memory=1).count_threads_that_fit(of_few) == 1
