"""Run the program in forks of a process that has imported it, to save the start of Python.

A fork has streams, a folder and an environment of its own, and ends as the program does. What
Python itself reads when it starts, such as ``PYTHONUNBUFFERED``, needs a start: `needs_start`.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import runpy
import selectors
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
REQUEST_BYTES = 1 << 17
SECONDS = 60


def environment(**extra: str) -> dict[str, str]:
    """Return what the program has for an environment: little of that of the tests, and *extra*."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return {**kept, "PYTHONPATH": str(REPOSITORY), "TERM": "xterm-256color", **extra}


def needs_start(extra: Mapping[str, str]) -> bool:
    """Return whether Python reads one of these variables before the program begins."""
    return any(name.startswith(("PYTHON", "LC_", "LANG")) for name in extra)


def start_program(
    words: Sequence[object], streams: Sequence[int], **extra: str
) -> Callable[[], int]:
    """Start ``ckptctl`` with *words* in the folder of the tests.

    Args:
        words: What follows the name of the program.
        streams: Descriptors of its standard input, output and error; they may be closed then.
        **extra: Variables of its environment.

    Returns:
        A function that waits for its end and returns its exit code.
    """
    if needs_start(extra):
        command = [sys.executable, "-m", "ckptctl", *map(str, words)]
        stdin, stdout, stderr = streams
        process = subprocess.Popen(
            command, env=environment(**extra), stdin=stdin, stdout=stdout, stderr=stderr
        )
        return lambda: process.wait(SECONDS)
    server = _server()
    request = json.dumps([[*map(str, words)], environment(**extra), os.getcwd()]).encode()
    assert len(request) < REQUEST_BYTES
    socket.send_fds(server, [request], list(streams))
    return lambda: int(server.recv(REQUEST_BYTES))


def run_program(words: Sequence[object], **extra: str) -> subprocess.CompletedProcess[str]:
    """Run ``ckptctl`` with *words*, pipes for its outputs, and nothing to read."""
    pipes = [os.pipe(), os.pipe()]
    with open(os.devnull) as nothing:
        wait = start_program(words, [nothing.fileno(), *(end for _, end in pipes)], **extra)
    for _, end in pipes:
        os.close(end)
    with os.fdopen(pipes[0][0], "rb") as out, os.fdopen(pipes[1][0], "rb") as error:
        stdout, stderr = _read_both(out.fileno(), error.fileno())
    command = ["ckptctl", *map(str, words)]
    return subprocess.CompletedProcess(command, wait(), stdout.decode(), stderr.decode())


def _read_both(*descriptors: int) -> list[bytes]:
    """Read until all ends of two pipes are closed, whichever is filled first."""
    found = {one: bytearray() for one in descriptors}
    with selectors.DefaultSelector() as selector:
        for one in descriptors:
            selector.register(one, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select(SECONDS):
                data = os.read(key.fd, 1 << 16)
                found[key.fd] += data
                if not data:
                    selector.unregister(key.fd)
    return [bytes(one) for one in found.values()]


@cache
def _server() -> socket.socket:
    """Start the process that is forked; it ends when the socket is closed, as the tests end."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    subprocess.Popen(
        [sys.executable, "-m", "tests.program", str(its.fileno())],
        cwd=REPOSITORY,
        env=environment(),
        pass_fds=[its.fileno()],
        start_new_session=True,
    ).returncode = 0  # nobody waits for it, and no warning says so
    its.close()
    mine.settimeout(SECONDS)
    return mine


def _serve(connection: socket.socket) -> None:
    """Fork for each request; answer with exit codes. The child returns when the program may run."""
    while True:
        request, streams, _, _ = socket.recv_fds(connection, REQUEST_BYTES, 3)
        if not request:
            os._exit(0)
        child = os.fork()
        if not child:
            connection.close()
            words, variables, folder = json.loads(request)
            return _become(words, variables, folder, streams)
        for one in streams:
            os.close(one)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        connection.send(str(code).encode())


def _become(words: list[str], variables: dict[str, str], folder: str, streams: list[int]) -> None:
    """Take over what a new process of the program would have."""
    for number, one in enumerate(streams):
        os.dup2(one, number)
        os.close(one)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        mode, buffering = ("r", -1) if not number else ("w", 1 if number == 2 else -1)
        new = open(number, mode, buffering, old.encoding, old.errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    sys.argv[1:] = words


if __name__ == "__main__":
    from ckptctl import cli, inspect

    for module in pkgutil.iter_modules(cli.__path__):
        importlib.import_module(f"ckptctl.cli.{module.name}")
    inspect(REPOSITORY / "tests/data/tiny-llama3-hf")  # builds tables that all children have then
    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])))
    runpy.run_module("ckptctl", run_name="__main__", alter_sys=True)
