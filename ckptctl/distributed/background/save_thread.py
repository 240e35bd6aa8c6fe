"""One save in the background: its thread, its outcome, and whom that is told."""

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


def in_background(work: Callable[[], None], name: str) -> Future[None]:
    """Do *work* in a thread that the interpreter waits for at its end; return the outcome."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    try:
        threading.Thread(target=run, name=name).start()
    except RuntimeError:  # the system has no thread left
        run()
    return done


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

    def publish(self) -> Self:
        """Say that it has been saved, and return this."""
        self.staged.set()
        self.decided.set()
        self.set_result(self.path)
        return self

    def skip(self) -> Self:
        """Leave the save out, and return this."""
        self.skipped = True
        self.decided.set()
        self.set_result(None)
        return self


class SaveThread:
    """Writes a copied state. The interpreter waits for it at its end: it is no daemon."""

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
        self._begin: SimpleQueue[bool] = SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, name=f"save {future.path.name}", daemon=False
        )

    def start(self) -> None:
        """Have a thread ready, which waits for :meth:`proceed` or :meth:`abandon`."""
        try:
            self._thread.start()
        except RuntimeError as error:
            self._work.pop()[1]()
            raise StorageError(
                "cannot start a thread for the save",
                why=str(error),
                hint="raise the limit on processes (`ulimit -u`), or save synchronously",
            ) from error

    def proceed(self) -> None:
        """Let it write."""
        self._begin.put(True)

    def abandon(self) -> None:
        """Let it end without having written, and give the memory back."""
        self._begin.put(False)
        self._thread.join()
        self._work.pop()[1]()

    @property
    def busy(self) -> bool:
        """Return whether it goes on."""
        return not self.future.done()

    @property
    def here(self) -> bool:
        """Return whether this thread is the current one: a callback of it asks."""
        return threading.current_thread() is self._thread

    def join(self) -> None:
        """Wait for its end."""
        self._thread.join()

    def take_failure(self) -> BaseException | None:
        """Return its failure, once."""
        failure, self._failure = self._failure, None
        return failure

    @property
    def failed(self) -> bool:
        """Return whether it failed and nobody has taken that yet."""
        return self._failure is not None

    def _run(self) -> None:
        proceed = None
        while proceed is None:
            if not threading.main_thread().is_alive():  # the interpreter ends before a decision
                return
            with suppress(Empty):
                proceed = self._begin.get(timeout=1)
        if not proceed:
            return
        self._call(self._on_staged, "on_staged")
        # Nothing here may keep the copy, or tensors that were not copied, when it is written.
        write, release = self._work.pop()
        try:
            path = write()
        except BaseException as error:
            del write
            self._give_back(release)
            self._failure = error
            _log.error("%s was not saved: %s", self.future.path, error)
            self.future.set_exception(error)
            self.future.decided.set()
        else:
            del write
            self.future.decided.set()
            self._give_back(release)
            self._call(self._on_published, "on_published")
            self.future.set_result(path)

    def _give_back(self, release: Callable[[], None]) -> None:
        """Give the copy's memory back; the outcome of the save is known, and does not change."""
        try:
            release()
        except BaseException:  # others wait for the future
            _log.exception("the host memory of %s was not released", self.future.path)

    def _call(self, callback: Callback | None, name: str) -> None:
        """Call *callback*; a save does not fail because of it."""
        if callback is None:
            return
        try:
            callback(self.future.path)
        except BaseException as error:  # SystemExit, too: others wait for the future
            self.future.callback_errors.append(error)
            _log.exception("%s of %s failed", name, self.future.path)
