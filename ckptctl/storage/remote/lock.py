"""A lock on a place behind a URL: a small file there that one run makes, keeps alive and removes.

No lock of an object store ends with its process. This one is created on the condition that it is
not there, where the store knows conditions, and written anew every minute. On its own machine its
holder is dead when its process has ended, or has been silent for an hour; elsewhere when the file
has not been written for five minutes, by the clock of the store. The next run then takes the lock
over, and finds in it what the dead one was writing.

A holder that only slept, or one of a store that knows no conditions, may believe for a moment that
the lock is still its own. So it reads it again before each step that counts:
:meth:`RemoteLock.require`.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf

from ckptctl.errors import RefusedError, StorageError
from ckptctl.storage import processes
from ckptctl.storage.remote.lock_object import LockObject
from ckptctl.storage.remote.store import FsspecStore
from ckptctl.storage.remote.writing import BUSY, HELD, SILENCE, Sent, Writing, is_dead, parse

BEAT = 60.0
"""Seconds between signs of life."""
TRIES = 3


class RemoteLock:
    """The lock of one output.

    Args:
        store: The folder that the lock lies in.
        name: The lock's own name.
        names: The files that are going to be written.
    """

    def __init__(self, store: FsspecStore, name: str, names: Sequence[str]) -> None:
        self._store, self._name = store, name
        self._object = LockObject(store, name)
        self._said = Writing(secrets.token_hex(8), processes.own(), tuple(names))
        self._mutex = threading.Lock()
        self._over = threading.Event()
        self._proven = 0.0

    def take(self) -> Writing | None:
        """Take the lock, and keep it alive from now on.

        Returns:
            What a dead holder left; None: there was none.

        Raises:
            RefusedError: A living one has it.
            StorageError: The place cannot be reached, or written to.
        """
        with self._store.errors(self._name, "write"):
            self._store.make_folder()
            left = self._taken_over()
        if not self.ours():
            raise self._refusal(None)
        HELD.add(self._said.token)
        threading.Thread(target=self._live, daemon=True).start()
        return left

    def ours(self) -> bool:
        """Return whether the lock is this run's."""
        now = _now()
        with self._store.errors(self._name, "read"):
            found = parse(self._object.read() or b"")
        if found is None or found.token != self._said.token:
            return False
        self._proven = now
        return True

    def require(self) -> None:
        """Prove that the lock is this run's.

        Raises:
            StorageError: It is not, or cannot be read.
        """
        if not self.ours():
            raise StorageError(
                BUSY,
                where=self._store.url,
                why=f"`{self._name}` is not of this run any more",
                hint="let one run at a time write there",
            )

    def still(self) -> None:
        """Do as :meth:`require` does, if that was last proven so long ago that it may have changed.

        Raises:
            StorageError: See there.
        """
        if not 0 <= _now() - self._proven < BEAT:
            self.require()

    def note(self, name: str, sent: Sent) -> None:
        """Note that a file need not be sent again."""
        self._write(lambda said: replace(said, sent={**said.sent, name: sent}))

    def note_removal(self, names: Sequence[str]) -> None:
        """Note, beforehand, that files are removed to make room."""
        self._write(lambda said: replace(said, removed=tuple(names)))

    def leave(self, writing: Writing | None = None) -> None:
        """Let go, and say what is left for a later run.

        Args:
            writing: What the lock says of that; None: what it said so far.
        """
        self.stop()
        self._write(lambda said: replace(writing or said, process=None, token=said.token))

    def drop(self) -> None:
        """Let go, and remove the lock."""
        self.stop()
        with self._mutex, self._store.errors(self._name, "remove"):
            if self.ours():
                self._object.remove()

    def stop(self) -> None:
        """Give no signs of life any more: the lock is there, and nobody holds it."""
        self._over.set()
        HELD.discard(self._said.token)

    def _write(self, change: Callable[[Writing], Writing]) -> None:
        with self._mutex:
            self.require()
            said = change(self._said)
            with self._store.errors(self._name, "write"):
                while not self._object.write(said.to_bytes()):
                    self.require()
            self._said = said

    def _live(self) -> None:
        while not self._over.wait(BEAT):
            with suppress(Exception), self._mutex:
                if not self._over.is_set() and self.ours():
                    self._object.write(self._said.to_bytes())

    def _taken_over(self) -> Writing | None:
        """Write the lock, and return what a dead holder left in it.

        Raises:
            RefusedError: A living one has it.
        """
        data = self._said.to_bytes()
        for _ in range(TRIES):
            if self._object.create(data):
                return None
            content = self._object.read()
            if content is None:
                continue
            found = parse(content)
            if found is None or not is_dead(found, self._age):
                raise self._refusal(found)
            if self._object.replace(content, data):
                return found
        return None

    def _age(self) -> float | None:
        with suppress(FileNotFoundError):
            return self._object.age(self._said.token)
        return inf  # it has just been removed

    def _refusal(self, found: Writing | None) -> RefusedError:
        process = found and found.process
        return RefusedError(
            BUSY,
            where=self._store.url,
            why=f"process {process.number} on {process.host}" if process else None,
            hint="wait for it to finish; one that was killed on another machine is taken for dead "
            f"{SILENCE / 60:.0f} minutes after its last sign of life, `{self._name}`",
        )


def _now() -> float:
    """Return seconds of a clock that goes on while the machine sleeps, where there is one."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.time() if clock is None else time.clock_gettime(clock)
