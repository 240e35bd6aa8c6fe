"""A command that the environment calls a rank: one process on request, and patient aloud."""

from __future__ import annotations

import threading

import pytest

from ckptctl.cli import ranks
from ckptctl.cli.output import Printer
from ckptctl.errors import StorageError


def test_single_process_option_ignores_rank_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ranks.TORCHRUN_VARIABLES:
        monkeypatch.setenv(name, "2")
    assert ranks.join_ranks(single_process=True, machine=False).world == 1


def test_waiting_for_ranks_is_announced_from_worker_thread(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are waited for in another thread, so that a signal ends the wait; that is said once."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(ranks, "SLOW_RANK_NOTICE_SECONDS", 0.01)
    said = threading.Event()

    def warning(_: Printer, text: str) -> None:
        print(text)
        said.set()

    monkeypatch.setattr(Printer, "print_warning", warning)

    def meet() -> threading.Thread:
        said.wait()
        return threading.current_thread()

    assert ranks._join_with_notice(meet, Printer()) is not threading.main_thread()
    assert capsys.readouterr().out.startswith("waiting for the other ranks (this is rank 1 of 2")


def test_unreachable_ranks_raise_storage_error() -> None:
    def meet() -> None:
        raise StorageError("the other ranks do not answer")

    with pytest.raises(StorageError, match="do not answer"):
        ranks._join_with_notice(meet, Printer())
