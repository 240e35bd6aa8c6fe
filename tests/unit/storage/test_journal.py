"""The journal believes only what is whole and meant for this plan."""

from __future__ import annotations

import errno
import os

import pytest

from ckptctl.errors import StorageError
from ckptctl.storage.journal import Done, Journal

HEADER = {"digest": "abc", "checksum": True}
FIRST = [Done(0, 0, [1, 2], []), Done(3, 7, [5], [6])]
SECOND = [Done(4, 0, [9], [])]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "journal"
    with Journal(path, HEADER, resume=False) as journal:
        journal.append(FIRST)
        journal.append(SECOND)
    return path


def reopened(path, header=HEADER, resume=True):
    with Journal(path, header, resume=resume) as journal:
        return list(journal.done.values())


def test_units_come_back(path):
    assert reopened(path) == [*FIRST, *SECOND]


def test_every_torn_end_keeps_what_came_before(path):
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        full = [FIRST, SECOND][: max(0, whole[:length].count(b"\n") - 1)]
        assert reopened(path) == [unit for units in full for unit in units]
        assert path.stat().st_size == sum(map(len, lines[: len(full) + 1])) * (
            length >= len(lines[0])
        )


def test_a_damaged_line_ends_it(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    assert reopened(path) in ([], FIRST)


def test_appending_after_a_torn_line(path):
    path.write_bytes(path.read_bytes()[:-3])
    with Journal(path, HEADER, resume=True) as journal:
        journal.append([Done(8, 8, [8], [8])])
    assert reopened(path) == [*FIRST, Done(8, 8, [8], [8])]


def test_another_plan_starts_over(path):
    assert reopened(path, {**HEADER, "digest": "abd"}) == []
    assert path.stat().st_size == 0


def test_without_resume_it_starts_over(path):
    assert reopened(path, resume=False) == []


def test_a_restarted_journal_can_be_appended_to(path):
    with Journal(path, HEADER, resume=True) as journal:
        journal.restart()
        assert journal.done == {}
        journal.append(SECOND)
    assert reopened(path) == SECOND


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "journal").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="ELOOP"):
        Journal(tmp_path / "journal", HEADER, resume=True)


@pytest.mark.parametrize("name", ["write", "fsync"])
def test_failures_are_reported(path, monkeypatch, name):
    def failing(*_):
        raise OSError(errno.EIO, "bad")

    with Journal(path, HEADER, resume=True) as journal:
        monkeypatch.setattr(os, name, failing)
        with pytest.raises(StorageError, match="EIO"):
            journal.append(FIRST)
