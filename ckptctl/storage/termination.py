"""SIGTERM as an exception, so that what was begun is cleaned up; leaving with threads at work."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

_WORKER = "ckptctl-worker"


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived; handled like Ctrl-C."""


@contextmanager
def terminable() -> Iterator[None]:
    """Turn SIGTERM into an exception, unless somebody else handles it."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def terminate(_number: int, _frame: FrameType | None) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def daemon(target: Callable[..., None], *args: object) -> threading.Thread:
    """Return a thread, not started, that does not keep the process alive."""
    return threading.Thread(target=target, args=args, name=_WORKER, daemon=True)


def leave(code: int) -> None:
    """End the process with *code* at once if a :func:`daemon` is still at work, else do nothing.

    While the interpreter shuts down it ends such a thread where that next asks for it. Inside of
    torch, which may be just being imported, the whole process is aborted by that.
    """
    if all(thread.name != _WORKER for thread in threading.enumerate()):
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
