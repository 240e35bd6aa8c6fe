"""How a process ends while threads are at work."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import atexit, threading, time
from ckptctl.storage import threads

atexit.register(print, "the interpreter shut down")
stop = threading.Event()
thread = {thread}
thread.start()
print("said")
threads.exit_if_daemons_run(7)
stop.set()
"""


@pytest.mark.parametrize(
    ("thread", "code", "said"),
    [
        ("threads.create_daemon(time.sleep, 60)", 7, "said\n"),
        ("threads.create_daemon(int)", 0, "said\nthe interpreter shut down\n"),
        ("threading.Thread(target=stop.wait)", 0, "said\nthe interpreter shut down\n"),
    ],
)
def test_leave_exits_immediately_only_with_running_daemon_thread(
    thread: str, code: int, said: str
) -> None:
    script = SCRIPT.format(thread=thread)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, said, "")
