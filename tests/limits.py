"""Run work in a child process that has little memory and little time.

A limit on memory is one on the address space: what is imported before counts, so the child says
how much it may take beyond that. One on time is one on the processor's, which no busy machine
shortens. Whoever passes either is killed or gets a :class:`MemoryError`.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MEMORY = 512 << 20
SECONDS = 20


@dataclass(frozen=True)
class Ended:
    """How a child ended.

    Attributes:
        result: What the work returned; empty: it did not end well.
        problem: What happened instead; empty: nothing.
    """

    result: str = ""
    problem: str = ""


def run_limited(work: Callable[[], str], *, memory: int = MEMORY, seconds: int = SECONDS) -> Ended:
    """Run *work* in a fork with *memory* bytes more than this process has, for CPU *seconds*."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reading)
        _run(work, writing, memory, seconds)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return Ended(problem=f"killed by {name} ({seconds} s, {memory >> 20} MiB): {said}")
    failed = os.WEXITSTATUS(status) != 0
    return Ended(problem=said or "it exited") if failed else Ended(result=said or " ")


def _run(work: Callable[[], str], writing: int, memory: int, seconds: int) -> None:
    """Do the work in the child; it never returns to the tests that the parent goes on with."""
    code = 1
    try:
        # Nothing of pytest's may be called in here, nor may the child wait for its threads.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + memory, size + memory))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.settrace(None)
        gc.freeze()  # a search of the parent's objects would copy their memory
        try:
            said = work()
            code = 0
        except BaseException as error:
            said = "".join(traceback.format_exception(error, limit=-6))[-4000:]
        os.write(writing, said.encode(errors="replace")[:60_000])
    finally:
        os._exit(code)
