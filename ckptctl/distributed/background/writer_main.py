"""The loop of the writing process; see :mod:`ckptctl.distributed.background.writer_process`."""

from __future__ import annotations

import gc
import mmap
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any

from ckptctl.errors import CkptError
from ckptctl.planner.plan import CrcOf, OutputFile, Plan
from ckptctl.storage.execution.executor import execute
from ckptctl.storage.execution.options import Execution, ExecutionOptions

Regions = dict[int, memoryview]
Ask = Callable[[int, Mapping[int, int]], list[tuple[int, bytes]]]
"""Takes the number of a file and its records' CRCs; returns positions and bytes of its frame."""


def main(descriptor: int) -> None:
    """Carry out plans until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(descriptor)
    regions: Regions = {}
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, regions, messages), daemon=True).start()
    while True:
        plan, root, options, places = messages.get()
        memory = {name: _view(regions, place) for name, place in places.items()}
        connection.send(_done(connection, messages, plan, root, options, memory))
        del memory
        gc.collect()  # a run refers to itself, and to memory that the trainer wants to give back


def _receive(connection: Connection, regions: Regions, messages: queue.SimpleQueue[Any]) -> None:
    """Pass on messages; end the process when the connection is closed.

    Whatever is being written then belongs to a trainer that is gone.
    """
    try:
        while True:
            message = connection.recv()
            if isinstance(message, tuple) and len(message) == 2:
                _map(connection, regions, *message)
                continue
            if isinstance(message, tuple):
                *message, alive = message
                for gone in regions.keys() - alive:
                    del regions[gone]
            messages.put(message)
    except BaseException:
        os._exit(1)


def _map(connection: Connection, regions: Regions, number: int, nbytes: int) -> None:
    descriptor = recv_handle(connection)
    mapped = mmap.mmap(descriptor, nbytes, prot=mmap.PROT_READ)
    os.close(descriptor)
    regions[number] = memoryview(mapped)


def _view(regions: Regions, place: tuple[int, int, int]) -> memoryview:
    number, start, nbytes = place
    return regions[number][start : start + nbytes] if nbytes else memoryview(b"")


def _done(
    connection: Connection,
    messages: queue.SimpleQueue[Any],
    plan: Plan,
    root: Path,
    options: ExecutionOptions,
    memory: Mapping[str, memoryview],
) -> Execution | CkptError:
    asking = threading.Lock()

    def ask(number: int, crcs: Mapping[int, int]) -> list[tuple[int, bytes]]:
        with asking:
            connection.send((number, crcs))
            found: list[tuple[int, bytes]] = messages.get()
            return found

    files = tuple(_asking(plan, number, ask) for number in range(len(plan.files)))
    try:
        return execute(replace(plan, files=files), root, options, lambda _: None, memory=memory)
    except CkptError as error:
        return error
    except BaseException as error:
        return CkptError(f"{type(error).__name__}: {error}")


def _asking(plan: Plan, number: int, ask: Ask) -> OutputFile:
    """Return a file that asks the trainer for its frame."""
    file = plan.files[number]
    own = [index for index, record in enumerate(plan.records) if record.file == file.path]

    def frame(crc_of: CrcOf) -> Iterator[tuple[int, bytes]]:
        yield from ask(number, {index: crc_of(index) for index in own})

    return replace(file, frame=frame)
