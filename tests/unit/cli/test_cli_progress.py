import io
import sys

import pytest

from ckptctl.cli import progress as module
from ckptctl.cli.output import Output
from ckptctl.cli.progress import progress


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def drive(clock, output=None):
    with progress(output or Output(), "copying", 4 << 20) as advance:
        for _ in range(4):
            clock[0] += 6
            if advance:
                advance(1 << 20)
    return advance


def test_a_line_every_ten_seconds(clock, capsys):
    drive(clock)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "copying: 2.0 MiB of 4.0 MiB (50 %), 170.7 KiB/s, 12.0 s left",
        "copying: 4.0 MiB of 4.0 MiB (100 %), 170.7 KiB/s, 0.00 s left",
    ]


@pytest.mark.parametrize("how", ["quiet", "machine", "environment"])
def test_silence(clock, capsys, monkeypatch, how):
    if how == "environment":
        monkeypatch.setenv("CKPTCTL_NO_PROGRESS", "1")
    assert drive(clock, Output(how == "machine", how == "quiet")) is None
    assert capsys.readouterr().err == ""


def test_a_bar_on_a_terminal(clock, monkeypatch):
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    drive(clock)
    assert "copying" in shown.getvalue()
    assert "MiB" in shown.getvalue()


def test_no_bar_for_what_is_quick(clock, monkeypatch):
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    with progress(Output(), "copying", 10) as advance:
        advance(10)
    assert shown.getvalue() == ""
