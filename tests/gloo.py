"""Run a function on several gloo ranks, without a start of Python and torch for each of them.

One server per test process imports torch once, with a single thread. It forks a process for each
job, which forks the ranks of one world size after another; the test process is never forked. Jobs
of a library that takes seconds to import have a server of their own, which imports that as well.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

WHERE = signal.SIGQUIT
"""Asks a process where it is. A dump by the clock reads frames while they change, and may crash."""

SECONDS_TO_NOTICE = 20
"""How long ranks may take to notice that another one was killed."""
REPOSITORY = Path(__file__).parent.parent
TORCH_PARTS = ("distributed.checkpoint", "distributed.tensor", "_dynamo")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}


class RankFailure(AssertionError):
    """A rank failed; the message holds what every rank printed."""


def run_on_ranks(
    function: Callable[..., None] | str,
    worlds: Sequence[int],
    *arguments: Any,
    timeout: float = 120,
    library: str = "",
) -> None:
    """Call ``function(rank, world, *arguments)`` on every rank, one world size after another.

    Args:
        function: At the top level of an importable module; or ``module:name``, where only the
            ranks shall import that module.
        worlds: World sizes.
        *arguments: Picklable.
        timeout: Seconds for all of it.
        library: A module that the server imports before it forks the jobs that name it.

    Raises:
        RankFailure: A rank raised, or the time ran out.
    """
    in_time, code, output = run_job(
        function, list(worlds), *arguments, timeout=timeout, library=library
    )
    if not in_time:
        raise RankFailure(f"no end after {timeout} s\n{output}")
    if code:
        raise RankFailure(output)


def run_job(
    function: Callable[..., Any] | str,
    worlds: list[int] | None,
    *arguments: Any,
    timeout: float,
    library: str = "",
) -> tuple[bool, int, str]:
    """Call a function in a fork of the server, on the ranks of some *worlds* if there are any.

    Returns:
        Whether it ended in time, its exit code, and what it printed. Without *worlds*, the
        function returns the exit code.
    """
    if not isinstance(function, str):
        function = f"{function.__module__}:{function.__qualname__}"
    with tempfile.TemporaryDirectory() as folder:
        content = (function.split(":"), worlds, arguments, {**os.environ, **ENVIRONMENT})
        Path(folder, "job.pickle").write_bytes(pickle.dumps(content))
        in_time, code = _run(folder, timeout, library)
        output = Path(folder, "output").read_text(errors="replace")
    return in_time, code, output


def _run(folder: str, timeout: float, library: str) -> tuple[bool, int]:
    """Have the job in *folder* run; return whether it ended in time, and its exit code."""
    server = _server(threading.get_ident(), library)
    assert server.stdin and server.stdout
    server.stdin.write(f"{folder}\n".encode())
    job = int(server.stdout.readline())
    in_time = bool(select.select([server.stdout], [], [], timeout)[0])
    if not in_time:
        os.killpg(job, WHERE)
        time.sleep(1)
        os.killpg(job, signal.SIGKILL)
    return in_time, int(server.stdout.readline())


@cache
def _server(_: int, library: str) -> subprocess.Popen[bytes]:
    """Start the server of a thread, which ends when its standard input is closed."""
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.gloo", *filter(None, [library])],
        cwd=REPOSITORY,
        env=os.environ | ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
    )
    atexit.register(server.__exit__, None, None, None)
    return server


def _serve(*libraries: str) -> None:
    """Import torch and *libraries*, and fork a process for each folder that standard input names.

    Prints the id and the exit code of each.
    """
    import torch

    # Before the fork, so that all ranks share what takes seconds; DTensor imports _dynamo late.
    # The module of each function imports pytest.
    for needed in (*(f"torch.{part}" for part in TORCH_PARTS), "pytest", "tests.checkpoints"):
        importlib.import_module(needed)
    import ckptctl

    for name in ckptctl.__all__:
        getattr(ckptctl, name)
    with contextlib.redirect_stdout(sys.stderr):  # some print that there is no GPU
        for library in libraries:
            importlib.import_module(library)
    torch.set_num_threads(1)
    _warm_up()
    gc.freeze()
    for line in sys.stdin:
        job = os.fork()
        if not job:
            _job(Path(line.rstrip("\n")))
        print(job, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(job, 0)[1]), flush=True)


def _warm_up() -> None:
    """Save, read and convert a model once: each rank would load modules and tables for itself."""
    import torch

    import ckptctl

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, to in enumerate(("dcp", "torch", "meta")):
            ckptctl.convert(REPOSITORY / "tests/data/tiny-llama3-hf", folder / str(number), to=to)
        ckptctl.save({"a": torch.ones(2, 2)}, folder / "run" / "step-1")
        ckptctl.load({"a": torch.ones(2, 2)}, folder / "run" / "step-1")
        ckptctl.verify(folder / "run" / "step-1")
        ckptctl.latest(folder / "run")


def _job(folder: Path) -> NoReturn:
    """Run the job in *folder*, whose output becomes a file there, in a session of its own."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)
    faulthandler.register(WHERE, all_threads=False)
    code = 1
    try:
        (module, name), worlds, arguments, environment = pickle.loads(
            (folder / "job.pickle").read_bytes()
        )
        os.environ.clear()
        os.environ.update(environment)
        function = getattr(importlib.import_module(module), name)
        if worlds is None:
            code = function(*arguments)
        else:
            code = int(not all(_world_succeeds(function, world, arguments) for world in worlds))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _world_succeeds(function: Callable[..., None], world: int, arguments: tuple[Any, ...]) -> bool:
    port = _free_port()
    ranks = {_fork(function, rank, world, port, arguments): rank for rank in range(world)}
    if failure := _first_failure(ranks):
        print(f"world size {world} failed: {failure}", file=sys.stderr)
    return not failure


def _first_failure(running: dict[int, int]) -> str:
    """Wait for the ranks of these processes; after the first failure stop those that wait for it.

    Returns:
        Which rank failed first, and how its process ended.
    """
    failure, deadline = "", 0.0
    while running:
        child, status = os.waitpid(-1, os.WNOHANG if failure else 0)
        if child:
            rank = running.pop(child)
        elif time.monotonic() > deadline:
            for other in running:
                os.kill(other, signal.SIGKILL)
            deadline += SECONDS_TO_NOTICE
        else:
            time.sleep(0.05)
        if status and not failure:
            code = os.waitstatus_to_exitcode(status)
            failure = f"rank {rank} first, with exit code {code}"
            # Others may be about to say what they found, or have to notice that it was killed.
            deadline = time.monotonic() + (SECONDS_TO_NOTICE if code < 0 else 0.5)
    return failure


def _fork(
    function: Callable[..., None], rank: int, world: int, port: int, arguments: tuple[Any, ...]
) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
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
    _serve(*sys.argv[1:])
