"""Run a function on several gloo ranks for the price of one start of Python.

One child process imports torch once, with a single thread, and forks the ranks of every world
size from there; so four ranks cost what one does, and the test process is never forked.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

STUCK = 25
"""Seconds after which a rank says where it is."""

REPOSITORY = Path(__file__).parent.parent


class RankFailure(AssertionError):
    """A rank failed; the message holds what every rank printed."""


def run_on_ranks(
    function: Callable[..., None] | str,
    worlds: Sequence[int],
    *arguments: Any,
    timeout: float = 120,
) -> None:
    """Call ``function(rank, world, *arguments)`` on every rank, one world size after another.

    Args:
        function: At the top level of an importable module; or ``module:name``, where only the
            ranks shall import that module.
        worlds: World sizes.
        *arguments: Picklable.
        timeout: Seconds for all of it.

    Raises:
        RankFailure: A rank raised, or the time ran out.
    """
    if not isinstance(function, str):
        function = f"{function.__module__}:{function.__qualname__}"
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.pickle"
        job.write_bytes(pickle.dumps((*function.split(":"), list(worlds), arguments)))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
        child = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.gloo", str(job)],
            cwd=REPOSITORY,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = child.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            output, _ = child.communicate()
            raise RankFailure(f"no end after {timeout} s\n{output}") from None
    if child.returncode:
        raise RankFailure(output)


def _main(job: str) -> int:
    import torch

    # Before the fork, so that the ranks share what takes seconds; DTensor imports _dynamo late.
    for needed in ("distributed.checkpoint", "distributed.tensor", "_dynamo"):
        importlib.import_module(f"torch.{needed}")
    module, name, worlds, arguments = pickle.loads(Path(job).read_bytes())
    torch.set_num_threads(1)
    function = getattr(importlib.import_module(module), name)
    for world in worlds:
        port = _free_port()
        children = [_fork(function, rank, world, port, arguments) for rank in range(world)]
        if not _all_succeed(set(children)):
            print(f"world size {world} failed", file=sys.stderr)
            return 1
    return 0


def _all_succeed(running: set[int]) -> bool:
    """Wait for the children; after the first failure stop the others, which wait for it."""
    succeeded = True
    while running:
        child, status = os.wait()
        running.discard(child)
        if status and succeeded:
            succeeded = False
            time.sleep(0.5)  # others may be about to say what they found
            for other in running:
                os.kill(other, signal.SIGKILL)
    return succeeded


def _fork(
    function: Callable[..., None], rank: int, world: int, port: int, arguments: tuple[Any, ...]
) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    faulthandler.dump_traceback_later(STUCK)
    try:
        import torch.distributed as dist

        # A TCP store on a fixed address, so that no name of the machine is looked up.
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
        )
        function(rank, world, *arguments)
        dist.barrier()
        code = 0
    except BaseException:
        print(f"--- rank {rank} of {world}", traceback.format_exc(), file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))
