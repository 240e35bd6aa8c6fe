"""The journal believes only what is whole and meant for this plan."""

from __future__ import annotations

import errno
import json
import os
import threading

import pytest

from ckptctl.errors import StorageError
from ckptctl.planner.copying.tile import TileLimits
from ckptctl.storage.crc import crc32
from ckptctl.storage.execution.journal import FinishedUnit, Journal
from ckptctl.storage.unfinished import UnfinishedWorkError

HEADER = {"digest": "abc", "checksum": True}
LIMITS = TileLimits(tile_bytes=128 << 10)
FIRST = [FinishedUnit(0, 0, [1, 2], []), FinishedUnit(3, 7, [5], [6])]
SECOND = [FinishedUnit(4, 0, [9], [], (1, 0, 2), (0.5, 0.25, 3e300))]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "journal"
    with Journal(path, HEADER, LIMITS, resume=False) as journal:
        journal.append_units(FIRST)
        journal.append_units(SECOND)
    return path


def reopened(path, header=HEADER, limits=LIMITS, resume=True):
    with Journal(path, header, limits, resume=resume) as journal:
        return list(journal.done_units.values())


def test_journaled_units_are_read_again(path):
    assert reopened(path) == [*FIRST, *SECOND]


def test_truncated_journal_keeps_complete_lines(path):
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        full = [FIRST, SECOND][: max(0, whole[:length].count(b"\n") - 1)]
        assert reopened(path) == [unit for units in full for unit in units]
        assert path.stat().st_size == sum(map(len, lines[: len(full) + 1])) * (
            length >= len(lines[0])
        )


def test_damaged_journal_line_ends_reading(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    assert reopened(path) in ([], FIRST)


def line(value):
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return b"%08x %s\n" % (crc32(text), text)


@pytest.mark.parametrize("said", [b"{", b"\xff", b"[" * 10**5, b"9" * 5000, [1], 5, None, {}])
def test_invalid_journal_line_ends_reading(path, said):
    first, second, _ = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second + line(said))
    assert reopened(path) == FIRST
    path.write_bytes(line(said) + second)
    if said == {}:
        with pytest.raises(UnfinishedWorkError):
            reopened(path)
    else:
        assert reopened(path) == []


@pytest.mark.parametrize(
    "unit",
    [
        *(5, [1], "abcde", [{}, [], [1], [], []], [0, -1, [1], [], []], [0, 0, 1, [], []]),
        *([0, 0, ["1"], [], []], [0, 0, [1.5], [], []], [0, 0, [1], [], 5], [0, 0, [1], [], [1]]),
    ],
)
def test_invalid_journal_unit_ends_reading(path, unit):
    path.write_bytes(path.read_bytes() + line({"units": [FIRST[0], unit]}))
    assert reopened(path) == [*FIRST, *SECOND]


@pytest.mark.parametrize(
    "limits",
    [
        *(None, 5, "abcd", {"tile": 1}, [], [1 << 16, True], [*LIMITS, True], [*LIMITS[:4], False]),
        *([size] * 4 + [True] for size in (0, -1, 1, 10**18, 65536.0, "a", True)),
        [*LIMITS[:3], 0, True],
    ],
)
def test_invalid_journal_limits_are_refused(path, limits):
    """They would be buffers of any size, or steps of a byte."""
    first, *rest = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(line({**json.loads(first[9:]), "limits": limits}) + b"".join(rest))
    before = path.read_bytes()
    with pytest.raises(UnfinishedWorkError):
        reopened(path)
    assert path.read_bytes() == before


def test_append_after_truncated_line_replaces_it(path):
    path.write_bytes(path.read_bytes()[:-3])
    with Journal(path, HEADER, LIMITS, resume=True) as journal:
        journal.append_units([FinishedUnit(8, 8, [8], [8])])
    assert reopened(path) == [*FIRST, FinishedUnit(8, 8, [8], [8])]


def test_journal_of_another_plan_is_refused_untouched(path):
    before = path.read_bytes()
    opened = len(os.listdir("/proc/self/fd"))
    with pytest.raises(UnfinishedWorkError, match="had other options") as caught:
        reopened(path, {**HEADER, "digest": "abd"})
    assert "`--restart` to discard the partial output" in str(caught.value.hint)
    assert path.read_bytes() == before and len(os.listdir("/proc/self/fd")) == opened
    assert reopened(path, {**HEADER, "digest": "abd"}, resume=False) == []


def test_units_of_another_plan_are_ignored_outside_staging(path):
    elsewhere = path.rename(path.with_name("not-in-a-staging-directory"))
    assert reopened(elsewhere, {**HEADER, "digest": "abd"}) == []


def test_truncated_journal_header_is_discarded(path):
    path.write_bytes(path.read_bytes()[:20])
    assert reopened(path) == [] and path.stat().st_size == 0


def test_journal_keeps_limits_of_first_run(path):
    assert reopened(path, limits=TileLimits(tile_bytes=64 << 10)) == [*FIRST, *SECOND]
    with Journal(path, HEADER, TileLimits(tile_bytes=64 << 10), resume=True) as journal:
        assert journal.limits == LIMITS
        journal.restart()
        assert journal.limits == TileLimits(tile_bytes=64 << 10)
        journal.append_units(FIRST)
    with Journal(path, HEADER, LIMITS, resume=True) as journal:
        assert journal.limits == TileLimits(tile_bytes=64 << 10)


def test_journal_starts_over_without_resume(path):
    assert reopened(path, resume=False) == []


def test_restarted_journal_accepts_appends(path):
    with Journal(path, HEADER, LIMITS, resume=True) as journal:
        journal.restart()
        assert journal.done_units == {}
        journal.append_units(SECOND)
    assert reopened(path) == SECOND


def test_journal_symlink_is_not_followed(tmp_path):
    (tmp_path / "journal").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="ELOOP"):
        Journal(tmp_path / "journal", HEADER, LIMITS, resume=True)


@pytest.mark.parametrize("name", ["write", "fsync"])
def test_journal_write_failure_is_a_storage_error(path, monkeypatch, name):
    def failing(*_):
        raise OSError(errno.EIO, "bad")

    with Journal(path, HEADER, LIMITS, resume=True) as journal:
        monkeypatch.setattr(os, name, failing)
        with pytest.raises(StorageError, match="EIO"):
            journal.append_units(FIRST)


def test_closed_journal_appends_nothing(path):
    with Journal(path, HEADER, LIMITS, resume=True) as journal:
        pass
    before = path.read_bytes()
    with path.with_name("other").open("w+b", buffering=0) as other:
        assert other.fileno() == journal._descriptor, "the number was given away again"
        journal.append_units([FinishedUnit(8, 8, [8], [8])])
        assert other.read() == b""
    assert path.read_bytes() == before


def test_close_keeps_descriptor_of_blocked_write_open(path, monkeypatch):
    real, hanging, free = os.fsync, threading.Event(), threading.Event()
    seen = []

    def fsync(descriptor):
        hanging.set()
        free.wait(5)
        seen.append(os.path.samestat(os.fstat(descriptor), path.stat()))
        real(descriptor)

    opened = len(os.listdir("/proc/self/fd"))
    with Journal(path, HEADER, LIMITS, resume=True) as journal:
        monkeypatch.setattr(os, "fsync", fsync)
        thread = threading.Thread(target=journal.append_units, args=(SECOND,))
        thread.start()
        assert hanging.wait(5)
    free.set()
    thread.join()
    assert seen == [True]
    assert len(os.listdir("/proc/self/fd")) == opened


def test_long_journal_header_survives_restart(path):
    header = {**HEADER, "sources": ["x" * 100_000]}
    for resume in (False, True):
        with Journal(path, header, LIMITS, resume=resume) as journal:
            journal.restart()
            journal.append_units(FIRST)
    assert reopened(path, header) == FIRST
