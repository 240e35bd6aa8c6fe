"""Run torchrun in a fork of a process that has imported torch, and its ranks in forks of that.

Its launcher and its agent are torch's own. Only Python's start and the imports, which take seconds
in each process, are saved: a rank is forked where the agent would start another Python.
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.gloo import run_job


def launch(
    arguments: Sequence[str], ranks: int, folder: Path, timeout: float = 150
) -> subprocess.CompletedProcess[str]:
    """Run Python with *arguments* in *folder* on *ranks* ranks, which torchrun starts.

    Args:
        arguments: ``-m`` and a module, or the path of a script, and what follows.
        ranks: Number of ranks.
        folder: Current directory of the ranks.
        timeout: Seconds for all of it.
    """
    printed = folder / ".printed"
    printed.mkdir(exist_ok=True)
    names = [str(printed / name) for name in ("out", "err")]
    in_time, code, said = run_job(
        run, None, [*arguments], ranks, str(folder), names, timeout=timeout
    )
    out, err = (Path(name).read_text(errors="replace") for name in names)
    if not in_time:
        raise AssertionError(f"no end after {timeout} s\n{out}{err}{said}")
    return subprocess.CompletedProcess(["torchrun", *arguments], code, out, err + said)


def run(arguments: list[str], ranks: int, folder: str, printed: Sequence[str]) -> int:
    """Run torchrun in this process; return its exit code."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    for stream, path in enumerate(printed, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), stream)
    os.chdir(folder)
    assert "Popen" in vars(subprocess_handler)
    vars(subprocess_handler)["Popen"] = Fork
    try:
        torchrun.main(["--standalone", f"--nproc-per-node={ranks}", *arguments])
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except Exception:
        traceback.print_exc()
        return 1
    return 0


class Fork(subprocess.Popen[bytes]):
    """A fork of this process in place of another Python with the same arguments."""

    def _execute_child(self, args: Sequence[str], *options: Any) -> None:
        """Fork; the arguments are those of the method that it overrides."""
        environment = options[5]
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            _become(args, environment)
        self._child_created = True


def _become(words: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Do what Python with these *words* would do, and end as it would."""
    code = 1
    try:
        os.setsid()
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        atexit._clear()
        os.environ.clear()
        os.environ.update(environment)
        _, *words = words
        while words[0] == "-u":
            words = words[1:]
        try:
            if words[0] == "-m":
                sys.argv = words[1:]
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                sys.argv = [*words]
                sys.path.insert(0, str(Path(words[0]).parent))
                runpy.run_path(words[0], run_name="__main__")
            code = 0
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
