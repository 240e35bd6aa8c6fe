"""The thread of one save: its future ends, whatever fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptctl.distributed.background.save_thread import SaveFuture, SaveThread


def broken() -> None:
    raise OSError("the device is gone")


def failing() -> Path:
    raise ZeroDivisionError


@pytest.mark.parametrize("fails", [False, True])
def test_failed_memory_release_does_not_change_save_outcome(
    capsys: pytest.CaptureFixture[str], fails: bool
) -> None:
    """The outcome is that of the save: what is published stays so."""
    published: list[Path] = []
    future = SaveFuture(Path("x"))
    write = failing if fails else lambda: Path("x")
    thread = SaveThread(future, write, broken, None, published.append)
    thread.start()
    thread.allow_writing()
    error = future.exception(timeout=20)
    thread.join()
    assert isinstance(error, ZeroDivisionError) if fails else future.result() == Path("x")
    assert thread.has_failed == fails and published == ([] if fails else [Path("x")])
    said = capsys.readouterr().err
    assert "was not released" in said and "the device is gone" in said
