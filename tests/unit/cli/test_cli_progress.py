import io
import sys
import time

import pytest

from ckptctl.cli import progress as module
from ckptctl.cli.output import Printer
from ckptctl.cli.progress import show_progress


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
    with show_progress(output or Printer(), "copying", 4 << 20) as advance:
        for _ in range(4):
            clock[0] += 6
            if advance:
                advance(1 << 20)
    return advance


def test_progress_line_is_printed_every_ten_seconds(clock, capsys):
    drive(clock)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "copying: 2.0 MiB of 4.0 MiB (50 %), 170.7 KiB/s, 12 s left",
        "copying: 4.0 MiB of 4.0 MiB (100 %)",
    ]


@pytest.mark.parametrize("how", ["quiet", "machine", "environment"])
def test_progress_is_silent_when_disabled(clock, capsys, monkeypatch, how):
    if how == "environment":
        monkeypatch.setenv("CKPTCTL_NO_PROGRESS", "1")
    assert drive(clock, Printer(how == "machine", how == "quiet")) is None
    assert capsys.readouterr().err == ""


def test_terminal_shows_progress_bar(clock, monkeypatch):
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    drive(clock)
    assert "copying" in shown.getvalue()
    assert "4.0 MiB of 4.0 MiB (100 %)" in shown.getvalue()


def test_first_phase_is_shown_without_numbers(clock, capsys, monkeypatch):
    lines = module._LineDisplay(Printer(), "copying", 4 << 20, None, "loading torch")
    for nbytes in (0, 1 << 20):
        clock[0] += 11
        lines.advance(nbytes)
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with module._BarDisplay(Printer(), "copying", 4 << 20, None, "loading torch") as bar:
        bar.start_if_late()
        first = shown.getvalue()
        bar.advance(1 << 20)
        bar.bar.refresh()
    assert "loading torch" in first and "%" not in first
    assert "copying" in shown.getvalue() and "(25 %)" in shown.getvalue()
    assert capsys.readouterr().err.splitlines() == [
        "loading torch",
        "copying: 1.0 MiB of 4.0 MiB (25 %), 93.1 KiB/s, 33 s left",
    ]


def made(kind=module._LineDisplay, total=4 << 20):
    return kind(Printer(), "copying", total, "syncing")


def pace(clock, *steps):
    """Return what is said of the speed after *steps*: seconds, then bytes done in them."""
    lines = made(total=1 << 40)
    for seconds, nbytes in steps:
        clock[0] += seconds
        lines.advance(nbytes)
    return lines.list_speed_facts(clock[0])


def test_resumed_bytes_do_not_count_as_speed(clock):
    resumed = ((1, 600 << 30), (0.1, 100 << 30))
    assert pace(clock, *resumed) == ()
    assert pace(clock, *resumed, *[(1, 1 << 30)] * 4)[0] == "1.0 GiB/s"


def test_speed_is_measured_over_last_seconds(clock):
    assert pace(clock, *[(1, 1 << 20)] * 60, *[(1, 8 << 20)] * 30)[0] == "8.0 MiB/s"


def test_speed_of_slow_steps_is_measured(clock):
    assert pace(clock, *[(60, 6 << 30)] * 3)[0] == "102.4 MiB/s"


def test_speed_falls_while_stalled(clock):
    lines = made(total=1 << 40)
    for _ in range(40):
        clock[0] += 1
        lines.advance(1 << 20)
    assert lines.list_speed_facts(clock[0])[0] == "1.0 MiB/s"
    clock[0] += 45
    assert lines.list_speed_facts(clock[0])[0] == "256.0 KiB/s"


def test_completed_copy_is_shown_as_syncing(clock):
    lines = made()
    lines.advance(4 << 20)
    assert (lines.activity, lines.list_speed_facts(clock[0])) == ("syncing", ())


def test_narrow_terminal_shows_only_percent(clock):
    bar = made(module._BarDisplay)
    bar.done = 1 << 20
    assert bar.format_status(module.NARROW_COLUMNS - 1) == "25 %"
    assert bar.format_status(module.NARROW_COLUMNS) == "1.0 MiB of 4.0 MiB (25 %)"


def test_bar_appears_before_first_step(monkeypatch):
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(module, "QUIET_SECONDS", 0.01)
    monkeypatch.setenv("TERM", "xterm")
    with show_progress(Printer(), "reading", 10):
        end = time.monotonic() + 10
        while "reading" not in shown.getvalue() and time.monotonic() < end:
            time.sleep(0.01)
    assert "0 B of 10 B (0 %)" in shown.getvalue()


def test_quick_operation_shows_no_bar(clock, monkeypatch):
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    with show_progress(Printer(), "copying", 10) as advance:
        advance(10)
    assert shown.getvalue() == ""


def test_beginning_text_is_not_computed_if_quiet():
    def beginning() -> str:
        raise AssertionError("asked")

    with show_progress(Printer(quiet=True), "copying", 10, beginning=beginning) as advance:
        assert advance is None
