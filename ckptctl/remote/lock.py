"""A lock on a remote folder: a small file that one run creates, refreshes and removes.

Object stores have no locks that end with a process. This one is created on the condition that it
does not exist, if the store supports conditions, and rewritten every minute. On the same machine,
its holder counts as dead when its process has exited or has been silent for an hour. On another
machine, it counts as dead when the file has not been written for five minutes, by the clock of the
store. The next run then takes over the lock, which lists the files that the dead run was writing.

A holder whose machine slept, or a store without conditions, may briefly leave two runs that both
consider the lock theirs. Therefore each critical step first reads the lock again
(:meth:`RemoteLock.require`).
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
from ckptctl.storage.writing import (
    BUSY_MESSAGE,
    LEASE_SECONDS,
    OWN_LOCK_TOKENS,
    LockRecord,
    UploadedFile,
    is_dead,
    parse_lock,
)

BEAT = 60.0
"""Seconds between updates of the lock."""
TRIES = 3


class RemoteLock:
    """The lock of one output folder or file."""

    def __init__(
        self,
        store: FsspecStore,
        name: str,
        names: Sequence[str],
        *,
        doomed: Mapping[str, UploadedFile] | None = None,
        busy: str = BUSY_MESSAGE,
    ) -> None:
        self._store, self._name, self._busy = store, name, busy
        self._object = ConditionalObject(store, name)
        said = LockRecord(
            secrets.token_hex(8), processes.current_process(), tuple(names), doomed=doomed or {}
        )
        self._said = said
        self._mutex = threading.Lock()
        self._over = threading.Event()
        self._proven = 0.0

    def take(self) -> LockRecord | None:
        """Acquire the lock and start a thread that refreshes it.

        Returns:
            The record of a dead holder, or None if there was none.

        Raises:
            RefusedError: Another run holds the lock.
        """
        with self._store.errors(self._name, "write"):
            self._store.make_folder()
            left = self._taken_over()
        if not self.ours():
            raise self._refusal(None)
        OWN_LOCK_TOKENS.add(self._said.token)
        threading.Thread(target=self._live, daemon=True).start()
        return left

    def ours(self) -> bool:
        """Read the lock and return whether this run holds it."""
        now = _now()
        with self._store.errors(self._name, "read"):
            found = parse_lock(self._object.read() or b"")
        if found is None or found.token != self._said.token:
            return False
        self._proven = now
        return True

    def require(self) -> None:
        """Read the lock and raise unless this run holds it."""
        if not self.ours():
            raise StorageError(
                self._busy,
                where=self._store.url,
                why=f"`{self._name}` no longer belongs to this run",
                hint="run only one such command at a time",
            )

    def still(self) -> None:
        """Raise unless this run holds the lock, or did so within the last minute."""
        if not 0 <= _now() - self._proven < BEAT:
            self.require()

    @property
    def names(self) -> tuple[str, ...]:
        """Files that the lock records as being written."""
        return self._said.names

    def note(self, name: str, sent: UploadedFile) -> None:
        """Record a file as uploaded, so that a later run can reuse it."""
        self._write(lambda said: replace(said, sent={**said.sent, name: sent}))

    def note_names(self, names: Sequence[str]) -> None:
        """Record further files before they are written."""
        self._write(lambda said: replace(said, names=(*said.names, *names)))

    def note_removal(self, names: Sequence[str]) -> None:
        """Record files before they are removed to make room."""
        self._write(lambda said: replace(said, removed=tuple(names)))

    def now(self) -> float:
        """Return the time of the store's clock in seconds, or the local time if it has none."""
        self._write(lambda said: said)
        with self._store.errors(self._name, "access"):
            return self._object.written() / 1e9 or time.time()

    def leave(self, writing: LockRecord | None = None) -> None:
        """Release the lock, but keep its record for a later run."""
        self.stop()
        self._write(lambda said: replace(writing or said, process=None, token=said.token))

    def drop(self) -> None:
        """Release and remove the lock."""
        self.stop()
        with self._mutex, self._store.errors(self._name, "remove"):
            if self.ours():
                self._object.remove()

    def stop(self) -> None:
        """Stop refreshing the lock, which then exists without a holder."""
        self._over.set()
        OWN_LOCK_TOKENS.discard(self._said.token)

    def _write(self, change: Callable[[LockRecord], LockRecord]) -> None:
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

    def _taken_over(self) -> LockRecord | None:
        """Write the lock, and return the record of a dead holder, if any."""
        data = self._said.to_bytes()
        for _ in range(TRIES):
            if self._object.create(data):
                return None
            content = self._object.read()
            if content is None:
                continue
            found = parse_lock(content)
            if found is None or not is_dead(found, self._age):
                raise self._refusal(found)
            if self._object.replace(content, data):
                return found
        return None

    def _age(self) -> float | None:
        with suppress(FileNotFoundError):
            return self._object.age(self._said.token)
        return inf  # it was just removed

    def _refusal(self, found: LockRecord | None) -> RefusedError:
        process = found and found.process
        return RefusedError(
            self._busy,
            where=self._store.url,
            why=f"process {process.number} on {process.host}" if process else None,
            hint="wait for it to finish; a process killed on another machine counts as dead "
            f"{LEASE_SECONDS / 60:.0f} minutes after its last update of `{self._name}`",
        )


def _now() -> float:
    """Return the seconds of a clock that also runs while the machine sleeps, if there is one."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.time() if clock is None else time.clock_gettime(clock)


class ConditionalObject:
    """A remote object that is created and replaced conditionally, such as a lock.

    It is created on the condition that it does not exist, if the store supports conditions. S3,
    Google and Azure also replace it on the condition that it has the version last read or written,
    so that a request delayed by a sleeping machine has no effect. On other stores, the object is
    read before.
    """

    def __init__(self, store: FsspecStore, name: str) -> None:
        self._system, self._path = store.system, store.path(name)
        self._version = ""
        """Version last written by this process, if the store replaces conditionally."""
        self._versions = store.versions

    def read(self) -> bytes | None:
        """Return the content, or None if the object does not exist."""
        try:
            return bytes(self._system.cat_file(self._path))
        except FileNotFoundError:
            return None

    def create(self, data: bytes) -> bool:
        """Create the object, or return False if it exists."""
        if self.read() is not None:  # some stores silently ignore conditions
            return False
        try:
            self._note(self._system.pipe_file(self._path, data, mode="create"))
        except Exception as error:
            if is_taken(error):
                return self.read() == data  # the client may have retried after a lost response
            if not knows_no_conditions(error):
                raise
            self._system.pipe_file(self._path, data)
        return True

    def replace(self, content: bytes, data: bytes) -> bool:
        """Replace the object, or return False if its content is no longer *content*.

        If several runs try, one succeeds if the store replaces conditionally. On other stores, the
        others notice when they read the object.
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
        """Write the object, or return False if another run has written it since."""
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
        """Remove the object."""
        self._system.rm_file(self._path)

    def age(self, own: str) -> float | None:
        """Return the age in seconds by the store's clock, or None if it is unknown."""
        probe = f"{self._path}-{own}"
        self._system.pipe_file(probe, b"")
        try:
            times = [self.written(path) for path in (self._path, probe)]
        finally:
            self._system.rm_file(probe)
        return (times[1] - times[0]) / 1e9 if all(times) else None

    def written(self, path: str = "") -> int:
        """Return the modification time in nanoseconds, or 0 if the store has none."""
        self._system.invalidate_cache()
        return entry_of(self._system.info(path or self._path), "").mtime_ns

    def _note(self, answer: object) -> None:
        """Remember the version in the store's response to a write."""
        known = self._versions is not None and isinstance(answer, Mapping)
        self._version = entry_of(answer, "").version if known else ""  # type: ignore[arg-type]
