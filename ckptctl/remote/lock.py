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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf

from ckptctl.errors import RefusedError, StorageError
from ckptctl.remote.conditions import UNKNOWN, code_of, is_taken, knows_no_conditions
from ckptctl.remote.store import FsspecStore, entry_of
from ckptctl.storage import processes
from ckptctl.storage.writing import BUSY, HELD, SILENCE, Sent, Writing, is_dead, parse

BEAT = 60.0
"""Seconds between signs of life."""
TRIES = 3


class RemoteLock:
    """The lock of one output."""

    def __init__(
        self,
        store: FsspecStore,
        name: str,
        names: Sequence[str],
        *,
        doomed: Mapping[str, Sent] | None = None,
        busy: str = BUSY,
    ) -> None:
        self._store, self._name, self._busy = store, name, busy
        self._object = ConditionalObject(store, name)
        said = Writing(secrets.token_hex(8), processes.own(), tuple(names), doomed=doomed or {})
        self._said = said
        self._mutex = threading.Lock()
        self._over = threading.Event()
        self._proven = 0.0

    def take(self) -> Writing | None:
        """Take the lock, and keep it alive from now on.

        Returns:
            What a dead holder left; None: there was none.
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
        """Prove that the lock is this run's."""
        if not self.ours():
            raise StorageError(
                self._busy,
                where=self._store.url,
                why=f"`{self._name}` no longer belongs to this run",
                hint="run only one such command at a time",
            )

    def still(self) -> None:
        """Do as :meth:`require` does, if that was last proven long ago."""
        if not 0 <= _now() - self._proven < BEAT:
            self.require()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the files that it says are written."""
        return self._said.names

    def note(self, name: str, sent: Sent) -> None:
        """Note that a file need not be sent again."""
        self._write(lambda said: replace(said, sent={**said.sent, name: sent}))

    def note_names(self, names: Sequence[str]) -> None:
        """Note, beforehand, further files that are written."""
        self._write(lambda said: replace(said, names=(*said.names, *names)))

    def note_removal(self, names: Sequence[str]) -> None:
        """Note, beforehand, that files are removed to make room."""
        self._write(lambda said: replace(said, removed=tuple(names)))

    def now(self) -> float:
        """Return the time by the clock of the store, in seconds; where it tells none, our own."""
        self._write(lambda said: said)
        with self._store.errors(self._name, "access"):
            return self._object.written() / 1e9 or time.time()

    def leave(self, writing: Writing | None = None) -> None:
        """Let go, and say what is left for a later run."""
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
        """Write the lock, and return what a dead holder left in it."""
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
            self._busy,
            where=self._store.url,
            why=f"process {process.number} on {process.host}" if process else None,
            hint="wait for it to finish; a process killed on another machine counts as dead "
            f"{SILENCE / 60:.0f} minutes after its last update of `{self._name}`",
        )


def _now() -> float:
    """Return seconds of a clock that goes on while the machine sleeps, where there is one."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.time() if clock is None else time.clock_gettime(clock)


class ConditionalObject:
    """An object, such as that of the lock: created, and replaced, on conditions.

    It is created on the condition that there is none, where the store knows conditions. S3, Google
    and Azure also replace one on the condition that it is still the one that was read, or written,
    last: a request that was on its way while its machine slept then changes nothing any more.
    Elsewhere it is read before.
    """

    def __init__(self, store: FsspecStore, name: str) -> None:
        self._system, self._path = store.system, store.path(name)
        self._version = ""
        """Of what this process wrote last, where the store replaces on conditions."""
        self._versions = store.versions

    def read(self) -> bytes | None:
        """Return its content; None: there is none."""
        try:
            return bytes(self._system.cat_file(self._path))
        except FileNotFoundError:
            return None

    def create(self, data: bytes) -> bool:
        """Return whether it was created, which it is not if it is there."""
        if self.read() is not None:  # some stores know no conditions, and do not say so
            return False
        try:
            self._note(self._system.pipe_file(self._path, data, mode="create"))
        except Exception as error:
            if is_taken(error):
                return self.read() == data  # of an answer that is lost the client asks again
            if not knows_no_conditions(error):
                raise
            self._system.pipe_file(self._path, data)
        return True

    def replace(self, content: bytes, data: bytes) -> bool:
        """Return whether it was replaced, which it is not unless it says *content* still.

        Of several that try, one succeeds where the store replaces on conditions; elsewhere the
        others learn of it by reading it.
        """
        self._version = ""
        if self._versions:
            self._system.invalidate_cache()
            with suppress(FileNotFoundError):
                self._version = entry_of(self._system.info(self._path), "").version
        if self.read() != content:
            return False
        if self._version:
            return self.write(data)
        with suppress(FileNotFoundError):
            self._system.rm_file(self._path)
        return self.create(data)

    def write(self, data: bytes) -> bool:
        """Return whether it was written anew, which it is not if somebody else wrote it."""
        known = self._version
        try:
            if self._versions and known:
                self._note(self._versions.replace(self._path, data, known))
            else:
                self._note(self._system.pipe_file(self._path, data))
        except Exception as error:
            gone = isinstance(error, FileNotFoundError)
            if not known or not (gone or is_taken(error) or code_of(error) in UNKNOWN):
                raise
            self._version = ""
            if gone or is_taken(error):
                return self.read() == data
            self._system.pipe_file(self._path, data)
        return True

    def remove(self) -> None:
        """Remove it."""
        self._system.rm_file(self._path)

    def age(self, own: str) -> float | None:
        """Return the seconds since it was written, by the clock of the store; None: unknown."""
        probe = f"{self._path}-{own}"
        self._system.pipe_file(probe, b"")
        try:
            times = [self.written(path) for path in (self._path, probe)]
        finally:
            self._system.rm_file(probe)
        return (times[1] - times[0]) / 1e9 if all(times) else None

    def written(self, path: str = "") -> int:
        """Return when it was written, in nanoseconds; 0: the store does not tell."""
        self._system.invalidate_cache()
        return entry_of(self._system.info(path or self._path), "").mtime_ns

    def _note(self, answer: object) -> None:
        """Note what the store answers to a write."""
        known = self._versions is not None and isinstance(answer, Mapping)
        self._version = entry_of(answer, "").version if known else ""  # type: ignore[arg-type]
