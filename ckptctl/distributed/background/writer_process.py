"""Writer process, which executes plans on memory that the trainer shares with it.

It neither imports torch nor takes part in collectives. It receives only a plan, descriptors of
shared memory, and the location of each chunk in this memory. So it does not compete with training
for the GIL.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ckptctl.errors import CkptError, RefusedError, StorageError
from ckptctl.planner.plan import CrcLookup, OutputFile, Plan
from ckptctl.storage.execution.execution_options import Execution, ExecutionOptions
from ckptctl.storage.execution.executor import execute_plan

if TYPE_CHECKING:
    from ckptctl.distributed.background.host_memory import HostRegion

SharedRange = tuple[int, int, int]
"""Tuple of a region number, an offset in bytes within that region, and a size in bytes."""

_BLOCKED_SIGNALS = {
    getattr(signal, f"SIG{name}") for name in ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2")
}
_START_CODE = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from ckptctl.distributed.background.writer_process import main; main(int(sys.argv[1]))"
)


class WriterProcess:
    """Child process that executes one plan at a time, started for the first plan.

    The child exits when this process ends, even if it is killed, and then publishes nothing. A fork
    of this process cannot use the child.
    """

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._regions: weakref.WeakKeyDictionary[HostRegion, int] = weakref.WeakKeyDictionary()
        self._count = 0
        self._closing = threading.Lock()
        _writers.add(self)

    def execute(
        self,
        plan: Plan,
        root: Path,
        options: ExecutionOptions,
        progress: Callable[[int], None],
        memory: Mapping[str, memoryview],
        *,
        regions: Sequence[HostRegion],
    ) -> Execution:
        """Execute *plan* in the child, like the executor of :mod:`ckptctl.storage.execution`.

        *progress* is called only once. All of *memory* must be in *regions*.

        Raises:
            StorageError: The child exited before it was done.
        """
        connection = self.connect()
        try:
            for region in regions:
                if region not in self._regions:
                    assert self._child
                    connection.send((self._count, region.nbytes))
                    send_handle(connection, region.descriptor, self._child.pid)
                    self._regions[region] = self._count
                    self._count += 1
            numbers = [self._regions[region] for region in regions]
            places = {name: _locate_view(view, regions, numbers) for name, view in memory.items()}
            files = tuple(replace(file, frame=raise_no_frame) for file in plan.files)
            alive = {
                number
                for known_region, number in self._regions.items()
                if known_region.descriptor >= 0
            }
            connection.send((replace(plan, files=files), root, options, places, alive))
            result = self._answer_frame_requests(connection, plan)
        except (EOFError, OSError) as error:
            child = self._child
            self.close()
            status = child.returncode if child else None
            raise StorageError(
                "the writer process exited before the save was done",
                why="it was closed" if status is None else f"exit status {status}",
                hint="check the system log for an out-of-memory kill",
            ) from error
        progress(result.bytes_written)
        return result

    def close(self) -> None:
        """Kill the child process. A plan that it is executing fails."""
        with self._closing:
            if self._child is not None:
                self._child.kill()
                self._child.wait()
                self._child = None
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def forget_child(self) -> None:
        """Drop the reference to the child in a forked process, without killing the child."""
        if self._connection is not None:
            self._connection.close()
        self._connection = self._child = None

    def connect(self) -> Connection:
        """Return the connection to the child, which is started by the first call."""
        with self._closing:
            if self._connection is None:
                try:
                    self._connection = self._start_child()
                except OSError as error:
                    raise StorageError.from_os_error(error, "start", sys.executable) from error
            return self._connection

    def _start_child(self) -> Connection:
        if not hasattr(os, "memfd_create"):
            raise RefusedError(
                "this system does not support shared memory between processes",
                hint='save with mode="thread"',
            )
        parent_end, child_end = socket.socketpair()
        with parent_end, child_end:
            command = [sys.executable, "-c", _START_CODE, str(child_end.fileno()), *sys.path]
            # The trainer handles signals that are sent to all processes, and may need the child for
            # some more seconds. The child inherits the mask.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_SIGNALS)
            try:
                self._child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    pass_fds=[child_end.fileno()],
                    start_new_session=True,
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            self._regions = weakref.WeakKeyDictionary()
            self._count = 0
            return Connection(parent_end.detach())

    def _answer_frame_requests(self, connection: Connection, plan: Plan) -> Execution:
        """Send the file headers and indexes that the child requests, and return its result."""
        while True:
            message = connection.recv()
            if isinstance(message, Execution):
                return message
            if isinstance(message, CkptError):
                raise message
            number, crcs = cast(tuple[int, dict[int, int]], message)
            try:
                frame = list(plan.files[number].frame(crcs.__getitem__))
            except BaseException:
                self.close()  # otherwise the child would wait for an answer
                raise
            connection.send(frame)


def raise_no_frame(_: CrcLookup) -> Iterator[tuple[int, bytes]]:
    """Placeholder for the frame (header and index) of a file, which the child requests instead."""
    raise CkptError("the writer process did not request a file header from the training process")


def _locate_view(
    view: object, regions: Sequence[HostRegion], numbers: Sequence[int]
) -> SharedRange:
    if not isinstance(view, memoryview):
        raise CkptError("a chunk was not copied from its device")
    if not view.nbytes:
        return 0, 0, 0
    first = ctypes.addressof(ctypes.c_char.from_buffer(view))
    for number, region in zip(numbers, regions, strict=True):
        start = first - region.address
        if start >= 0 and start + view.nbytes <= region.nbytes:
            return number, start, view.nbytes
    raise CkptError("a chunk was not copied before the write")


_writers: weakref.WeakSet[WriterProcess] = weakref.WeakSet()


def _forget_children() -> None:
    for writer in list(_writers):
        writer.forget_child()


os.register_at_fork(after_in_child=_forget_children)


Regions = dict[int, memoryview]


def main(descriptor: int) -> None:
    """Execute plans in the child until the trainer closes the connection."""
    connection = Connection(descriptor)
    regions: Regions = {}
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(
        target=_receive_messages, args=(connection, regions, messages), daemon=True
    ).start()
    while True:
        plan, root, options, places = messages.get()
        memory = {
            name: regions[number][start : start + nbytes] if nbytes else memoryview(b"")
            for name, (number, start, nbytes) in places.items()
        }
        connection.send(_execute_plan(connection, messages, plan, root, options, memory))
        del memory
        gc.collect()  # reference cycles of an execution keep memory mapped


def _receive_messages(
    connection: Connection, regions: Regions, messages: queue.SimpleQueue[Any]
) -> None:
    """Put received messages into a queue, and exit once the trainer closes the connection."""
    try:
        while True:
            message = connection.recv()
            if isinstance(message, tuple) and len(message) == 2:
                number, nbytes = message
                descriptor = recv_handle(connection)
                mapped = mmap.mmap(descriptor, nbytes, prot=mmap.PROT_READ)
                os.close(descriptor)
                regions[number] = memoryview(mapped)
                continue
            if isinstance(message, tuple):
                *message, alive = message
                for stale in regions.keys() - alive:
                    del regions[stale]
            messages.put(message)
    except BaseException:
        os._exit(1)


def _execute_plan(
    connection: Connection,
    messages: queue.SimpleQueue[Any],
    plan: Plan,
    root: Path,
    options: ExecutionOptions,
    memory: Mapping[str, memoryview],
) -> Execution | CkptError:
    request_lock = threading.Lock()

    def with_requested_frame(number: int, file: OutputFile) -> OutputFile:
        """Return *file* with a frame (header and index) that the child requests from the trainer.

        The request contains the CRCs of the data that the frame must record.
        """
        record_indices = [
            index for index, record in enumerate(plan.records) if record.file == file.path
        ]

        def request_frame(crc_of: CrcLookup) -> Iterator[tuple[int, bytes]]:
            crcs = {index: crc_of(index) for index in record_indices}
            with request_lock:
                connection.send((number, crcs))
                answer: list[tuple[int, bytes]] = messages.get()
            yield from answer

        return replace(file, frame=request_frame)

    files = tuple(with_requested_frame(number, file) for number, file in enumerate(plan.files))
    try:
        return execute_plan(
            replace(plan, files=files), root, options, lambda _: None, memory=memory
        )
    except CkptError as error:
        return error
    except BaseException as error:
        return CkptError(f"{type(error).__name__}: {error}")


def build_plan_executor(
    region: HostRegion | None, writer: WriterProcess | None
) -> Callable[..., Execution]:
    """Build an executor of plans that read from *region*, the host copy of the state.

    The plans are executed in the process of *writer*, or in this process if *writer* is None.
    """
    regions = [region] if region else []
    if writer and regions:
        return partial(writer.execute, regions=regions)

    def execute_here(*plan: Any, memory: Mapping[str, memoryview]) -> Execution:
        for view in memory.values():
            _locate_view(view, regions, range(len(regions)))  # raises if it was not copied
        return execute_plan(*plan, memory=memory)  # type: ignore[misc]

    return execute_here
