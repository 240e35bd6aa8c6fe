"""What torchrun starts in tests: commands one after the other, with counted reads and made faults.

``python -m tests.integration.torchrun_job JOB.json`` where the job is an object::

    commands   argument lists
    more       further arguments of all commands, by rank
    faults     of {"rank", "kind": "kill" | "full" | "wait", "after": writes}; what waits goes on
               once there is something at the path "until", and it is time to look for it
    report     where each rank writes what came out: ``REPORT.RANK``. It counts comparisons with
               transformers
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE = 60
"""Seconds after which a rank goes on whatever it waits for."""


def main(path: str) -> int:
    """Run the job at *path* and return the code of its last command."""
    from ckptctl.cli.app import app

    job = json.loads(Path(path).read_text())
    rank = os.environ.get("RANK", "0")
    report = Path(f"{job['report']}.{rank}")
    counts = count_reads()
    compared = count_comparisons()
    writes: list[int] = []
    for fault in job.get("faults", ()):
        if fault["rank"] == int(rank):
            make_fault(writes, **fault)
    results: list[dict[str, Any]] = []
    code = 0
    for command in job["commands"]:
        before, begun, first = sum(counts), len(writes), len(compared)
        arguments = [*command, *job.get("more", {}).get(rank, [])]
        code = app(arguments, prog_name="ckptctl", standalone_mode=False) or 0
        done = {"read": sum(counts) - before, "written": len(writes) - begun}
        results.append({"code": code, **done, "compared": len(compared) - first})
        report.write_text(json.dumps(results))
    return code


def count_reads() -> list[int]:
    """Return a list to which every positioned read adds its bytes."""
    counts: list[int] = []

    def counting(real: Callable[..., Any], nbytes: Callable[[Any], int]) -> Callable[..., Any]:
        def read(*arguments: Any) -> Any:
            found = real(*arguments)
            counts.append(nbytes(found))
            return found

        return read

    os.preadv = counting(os.preadv, int)
    os.pread = counting(os.pread, len)
    return counts


def count_comparisons() -> list[str]:
    """Return a list to which every comparison with transformers adds the model type."""
    from ckptctl.references import transformers

    compared: list[str] = []
    real = transformers.compare_with_transformers

    def compare(config: Any, shapes: Any) -> Any:
        compared.append(config["model_type"])
        return real(config, shapes)

    transformers.compare_with_transformers = compare
    return compared


def make_fault(writes: list[int], rank: int, kind: str, after: int, until: str = "") -> None:
    """Let the process die or wait, or its disk be full, at a write; note in *writes* each."""
    real = os.pwrite
    left = [after]

    def pwrite(*arguments: Any) -> int:
        left[0] -= 1
        writes.append(left[0])
        if kind == "wait" and left[0] == -1:
            wait_for(Path(until))
        elif kind == "wait":
            pass
        elif left[0] < 0 and kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    os.pwrite = pwrite


def wait_for(path: Path) -> None:
    """Wait until something is at *path*; what never comes is not waited for for ever."""
    from ckptctl.ranks.sharing import POLL_SECONDS

    end = time.monotonic() + PATIENCE
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
