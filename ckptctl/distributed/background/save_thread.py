"""Thread that runs one background save, and the future and callbacks of that save."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Self

from ckptctl.errors import StorageError
from ckptctl.tree import TreePath

Callback = Callable[[Any], object]
_log = logging.getLogger("ckptctl")


def run_in_background(work: Callable[[], None], name: str) -> Future[None]:
    """Run *work* in a thread for which the interpreter waits at exit.

    Returns:
        A future of the outcome, already done if the system has no threads left.
    """
    future: Future[None] = Future()

    def run_work() -> None:
        try:
            work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    try:
        threading.Thread(target=run_work, name=name).start()
    except RuntimeError:  # the system has no threads left
        run_work()
    return future


class SaveFuture(Future[TreePath | None]):
    """Outcome of :func:`ckptctl.async_save`, a ``concurrent.futures.Future``.

    ``result()`` returns the absolute path of the published checkpoint, or None if the save was
    skipped. If the save failed, it raises the error on every rank. A save cannot be cancelled.

    Attributes:
        path: Destination of the checkpoint.
        skipped: Whether the ranks skipped this save because the last one was still running.
        staged: Set when the state is copied and can change.
        decided: Set when the checkpoint is published, before callbacks run, or has failed.
        callback_errors: Exceptions raised by callbacks.
    """

    def __init__(self, path: TreePath) -> None:
        super().__init__()
        self.path = path
        self.skipped = False
        self.staged = threading.Event()
        self.decided = threading.Event()
        self.callback_errors: list[BaseException] = []
        self.set_running_or_notify_cancel()

    def mark_published(self) -> Self:
        """Mark the checkpoint as published, and return self."""
        self.staged.set()
        self.decided.set()
        self.set_result(self.path)
        return self

    def mark_skipped(self) -> Self:
        """Mark the save as skipped, and return self."""
        self.skipped = True
        self.decided.set()
        self.set_result(None)
        return self


class SaveThread:
    """Non-daemon thread that writes a state after it was copied to host memory."""

    def __init__(
        self,
        future: SaveFuture,
        write: Callable[[], TreePath],
        release: Callable[[], None],
        on_staged: Callback | None,
        on_published: Callback | None,
    ) -> None:
        self.future = future
        self._work: list[tuple[Callable[[], TreePath], Callable[[], None]]] = [(write, release)]
        self._on_staged = on_staged
        self._on_published = on_published
        self._decision: SimpleQueue[bool] = SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run_save, name=f"save {future.path.name}", daemon=False
        )

    def start(self) -> None:
        """Start the thread, which waits until :meth:`allow_writing` or :meth:`abandon` is called.

        Raises:
            StorageError: The system has no threads left.
        """
        try:
            self._thread.start()
        except RuntimeError as error:
            self._work.pop()[1]()
            raise StorageError(
                "cannot start a thread for the save",
                why=str(error),
                hint="raise the limit on processes (`ulimit -u`), or save synchronously",
            ) from error

    def allow_writing(self) -> None:
        """Allow the waiting thread to write the checkpoint."""
        self._decision.put(True)

    def abandon(self) -> None:
        """End the thread without writing, and release the memory of the copy."""
        self._decision.put(False)
        self._thread.join()
        self._work.pop()[1]()

    @property
    def is_busy(self) -> bool:
        """Whether the save is still running."""
        return not self.future.done()

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller runs in this thread, for example in a callback of the save."""
        return threading.current_thread() is self._thread

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def take_failure(self) -> BaseException | None:
        """Return the error of the save, or None if it has not failed or the error was returned."""
        failure, self._failure = self._failure, None
        return failure

    @property
    def has_failed(self) -> bool:
        """Whether the save failed and :meth:`take_failure` has not returned its error yet."""
        return self._failure is not None

    def _run_save(self) -> None:
        proceed = None
        while proceed is None:
            if not threading.main_thread().is_alive():  # the interpreter exits before a decision
                return
            with suppress(Empty):
                proceed = self._decision.get(timeout=1)
        if not proceed:
            return
        self._run_callback(self._on_staged, "on_staged")
        # After the write, no reference here may keep the copy or tensors alive.
        write, release = self._work.pop()
        try:
            path = write()
        except BaseException as error:
            del write
            self._release_memory(release)
            self._failure = error
            _log.error("%s was not saved: %s", self.future.path, error)
            self.future.set_exception(error)
            self.future.decided.set()
        else:
            del write
            self.future.decided.set()
            self._release_memory(release)
            self._run_callback(self._on_published, "on_published")
            self.future.set_result(path)

    def _release_memory(self, release: Callable[[], None]) -> None:
        """Call *release* to free the copied state. Errors do not change the outcome of the save."""
        try:
            release()
        except BaseException:  # callers wait for the future
            _log.exception("the host memory of %s was not released", self.future.path)

    def _run_callback(self, callback: Callback | None, name: str) -> None:
        """Call *callback* unless it is None. Exceptions that it raises do not fail the save."""
        if callback is None:
            return
        try:
            callback(self.future.path)
        except BaseException as error:  # even SystemExit, because callers wait for the future
            self.future.callback_errors.append(error)
            _log.exception("%s of %s failed", name, self.future.path)
