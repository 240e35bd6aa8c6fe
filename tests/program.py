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
import select
import selectors
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

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


class ForkedProgram(subprocess.Popen[str]):
    """``ckptctl`` in a fork that is sent signals, or runs while others run.

    Args:
        words: What follows the name of the program.
        modules: Modules that take long to import, which its server does once.
        **options: Those of ``subprocess.Popen``.
    """

    def __init__(self, words: Sequence[object], modules: Sequence[str], **options: Any) -> None:
        self._modules = tuple(modules)
        super().__init__([*map(str, words)], text=True, **options)

    def _execute_child(self, args: Sequence[str], *options: Any) -> None:
        """Have the server fork; the arguments are those of the method that it overrides."""
        folder, variables, pipes = options[4], options[5], options[9:15]
        given = (pipes[0], pipes[3], pipes[5])
        streams = [number if one < 0 else one for number, one in enumerate(given)]
        self._status, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        variables = dict(os.environ if variables is None else variables)
        request = json.dumps([[*args], variables, folder or os.getcwd()]).encode()
        assert len(request) < REQUEST_BYTES
        socket.send_fds(_server(self._modules), [request], [*streams, its.fileno()])
        its.close()
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
        self._status.settimeout(SECONDS)
        self.pid = int(self._status.recv(16))
        self._child_created = True

    def _internal_poll(self, *_: object, **__: object) -> int | None:
        return self._ended(0)

    def _wait(self, timeout: float | None) -> int:
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            self.returncode = int(self._status.recv(16))
            self._status.close()
        return self.returncode


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
def _server(modules: tuple[str, ...] = ()) -> socket.socket:
    """Start the process that is forked; it ends when the socket is closed, as the tests end."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    warnings = ("-W", "ignore") if modules else ()  # those modules warn
    subprocess.Popen(
        [sys.executable, *warnings, "-m", "tests.program", str(its.fileno()), *modules],
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
    waiting: set[int] = set()
    while True:
        request, streams, _, _ = socket.recv_fds(connection, REQUEST_BYTES, 4)
        if not request:
            os._exit(0)
        child = os.fork()
        if not child:
            connection.close()
            if len(streams) > 3:
                _fork_and_report(socket.socket(fileno=streams.pop()))
            words, variables, folder = json.loads(request)
            return _become(words, variables, folder, streams)
        for one in streams:
            os.close(one)
        if len(streams) > 3:
            waiting.add(child)
            waiting = {one for one in waiting if not os.waitpid(one, os.WNOHANG)[0]}
        else:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            connection.send(str(code).encode())


def _fork_and_report(status: socket.socket) -> None:
    """Return in a fork; this process sends its id and its exit code, and ends."""
    child = os.fork()
    if not child:
        status.close()
        return
    status.send(str(child).encode())
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status.send(str(code).encode())
    os._exit(0)


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
    tempfile.tempdir = None  # of the server's environment
    os.chdir(folder)
    sys.argv[1:] = words


if __name__ == "__main__":
    from ckptctl import cli, inspect

    for module in pkgutil.iter_modules(cli.__path__):
        importlib.import_module(f"ckptctl.cli.{module.name}")
    inspect(REPOSITORY / "tests/data/tiny-llama3-hf")  # builds tables that all children have then
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])))
    runpy.run_module("ckptctl", run_name="__main__", alter_sys=True)
