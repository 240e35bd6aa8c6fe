"""Lock a remote folder with a small file that one run creates, refreshes and removes.

Object stores have no locks that are released when a process exits. If the store supports
conditional requests, the lock file is only created if it does not exist. It is rewritten every
minute. On the same machine,
its holder counts as dead when its process has exited or has been silent for an hour. On another
machine, it counts as dead when the file has not been written for five minutes, by the clock of the
store. The next run then takes over the lock, which lists the files that the dead run was writing.

If the machine of a holder slept, or the store does not support conditional requests, two runs may
briefly both consider the lock theirs. Therefore each critical step first reads the lock again
(:meth:`RemoteLock.require_ours`).
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
from ckptctl.remote.conditions import (
    UNSUPPORTED_CODES,
    get_s3_code,
    is_precondition_failure,
    is_unsupported_condition,
)
from ckptctl.remote.store import FsspecStore, make_tree_entry
from ckptctl.storage import processes
from ckptctl.storage.writing import (
    BUSY_MESSAGE,
    LEASE_SECONDS,
    OWN_LOCK_TOKENS,
    LockRecord,
    UploadedFile,
    is_holder_dead,
    parse_lock,
)

HEARTBEAT_SECONDS = 60.0
"""Seconds between updates of the lock file."""
MAX_TRIES = 3


class RemoteLock:
    """Lock of one remote output folder or file.

    Args:
        store: Store of the folder.
        name: Name of the lock file.
        names: Names of the files that this run writes, which the lock records.
        doomed: Files that this run removes, which the lock also records.
        busy: Error message if another run holds the lock.
    """

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
        writing = LockRecord(
            secrets.token_hex(8), processes.get_current_process(), tuple(names), doomed=doomed or {}
        )
        self._record = writing
        self._mutex = threading.Lock()
        self._stop_event = threading.Event()
        self._last_verified_at = 0.0

    def acquire_lock(self) -> LockRecord | None:
        """Acquire the lock and start a thread that refreshes it.

        Returns:
            The record of a dead holder, or None if there was none.

        Raises:
            RefusedError: Another run holds the lock.
        """
        with self._store.translate_errors(self._name, "write"):
            self._store.make_folder()
            leftover = self._create_or_take_over()
        if not self.is_ours():
            raise self._busy_error(None)
        OWN_LOCK_TOKENS.add(self._record.token)
        threading.Thread(target=self._run_heartbeat, daemon=True).start()
        return leftover

    def is_ours(self) -> bool:
        """Read the lock file, and return whether this run holds the lock."""
        now = _read_boottime()
        with self._store.translate_errors(self._name, "read"):
            holder = parse_lock(self._object.read_content() or b"")
        if holder is None or holder.token != self._record.token:
            return False
        self._last_verified_at = now
        return True

    def require_ours(self) -> None:
        """Read the lock file, and raise unless this run holds the lock."""
        if not self.is_ours():
            raise StorageError(
                self._busy,
                where=self._store.url,
                why=f"`{self._name}` no longer belongs to this run",
                hint="run only one such command at a time",
            )

    def require_still_ours(self) -> None:
        """Raise unless this run holds the lock. A check within the last minute is not repeated."""
        if not 0 <= _read_boottime() - self._last_verified_at < HEARTBEAT_SECONDS:
            self.require_ours()

    @property
    def file_names(self) -> tuple[str, ...]:
        """Names of the files that this run writes, as recorded in the lock."""
        return self._record.names

    def record_upload(self, name: str, sent: UploadedFile) -> None:
        """Record in the lock that the file *name* is uploaded, so that a later run can reuse it."""
        self._update_record(lambda writing: replace(writing, sent={**writing.sent, name: sent}))

    def record_files_to_write(self, names: Sequence[str]) -> None:
        """Record in the lock that this run will also write the files *names*."""
        self._update_record(lambda writing: replace(writing, names=(*writing.names, *names)))

    def record_removals(self, names: Sequence[str]) -> None:
        """Record in the lock that this run will remove the old files *names*."""
        self._update_record(lambda writing: replace(writing, removed=tuple(names)))

    def read_store_clock(self) -> float:
        """Return the time of the store's clock in seconds, or local time if the store has none."""
        self._update_record(lambda writing: writing)
        with self._store.translate_errors(self._name, "access"):
            return self._object.read_modification_time_ns() / 1e9 or time.time()

    def leave_for_next_run(self, writing: LockRecord | None = None) -> None:
        """Release the lock, but keep its file with the record *writing* for a later run.

        *writing* defaults to the current record.
        """
        self.stop_heartbeat()
        self._update_record(
            lambda current: replace(writing or current, process=None, token=current.token)
        )

    def release_lock(self) -> None:
        """Release the lock, and remove its file if this run holds it."""
        self.stop_heartbeat()
        with self._mutex, self._store.translate_errors(self._name, "remove"):
            if self.is_ours():
                self._object.remove_object()

    def stop_heartbeat(self) -> None:
        """Stop refreshing the lock, and leave its file in place without a holder."""
        self._stop_event.set()
        OWN_LOCK_TOKENS.discard(self._record.token)

    def _update_record(self, change: Callable[[LockRecord], LockRecord]) -> None:
        with self._mutex:
            self.require_ours()
            writing = change(self._record)
            with self._store.translate_errors(self._name, "write"):
                while not self._object.try_write(writing.to_bytes()):
                    self.require_ours()
            self._record = writing

    def _run_heartbeat(self) -> None:
        while not self._stop_event.wait(HEARTBEAT_SECONDS):
            with suppress(Exception), self._mutex:
                if not self._stop_event.is_set() and self.is_ours():
                    self._object.try_write(self._record.to_bytes())

    def _create_or_take_over(self) -> LockRecord | None:
        """Write the lock file, and return the record of a dead holder, or None if it had none."""
        data = self._record.to_bytes()
        for _ in range(MAX_TRIES):
            if self._object.try_create(data):
                return None
            content = self._object.read_content()
            if content is None:
                continue
            holder = parse_lock(content)
            if holder is None or not is_holder_dead(holder, self._measure_age):
                raise self._busy_error(holder)
            if self._object.try_replace(content, data):
                return holder
        return None

    def _measure_age(self) -> float | None:
        with suppress(FileNotFoundError):
            return self._object.measure_age_seconds(self._record.token)
        return inf  # it was just removed

    def _busy_error(self, holder: LockRecord | None) -> RefusedError:
        process = holder and holder.process
        return RefusedError(
            self._busy,
            where=self._store.url,
            why=f"process {process.number} on {process.host}" if process else None,
            hint="wait for it to finish; a process killed on another machine counts as dead "
            f"{LEASE_SECONDS / 60:.0f} minutes after its last update of `{self._name}`",
        )


def _read_boottime() -> float:
    """Return seconds since boot including sleep, or the system time without such a clock."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.time() if clock is None else time.clock_gettime(clock)


class ConditionalObject:
    """Remote object, such as a lock file, that is created and replaced conditionally.

    If the store supports conditions, the object is only created if it does not exist. S3, Google
    and Azure also replace it only if it has the version last read or written, so that a request
    delayed by a sleeping machine has no effect. On other stores, the object is read and compared
    before it is replaced.
    """

    def __init__(self, store: FsspecStore, name: str) -> None:
        self._system, self._path = store.system, store.resolve_path(name)
        self._version = ""
        """Version that this process last wrote, or an empty string if unknown."""
        self._conditional_requests = store.conditional_requests

    def read_content(self) -> bytes | None:
        """Return the content of the object, or None if it does not exist."""
        try:
            return bytes(self._system.cat_file(self._path))
        except FileNotFoundError:
            return None

    def try_create(self, data: bytes) -> bool:
        """Create the object with the content *data*, or return False if it already exists."""
        if self.read_content() is not None:  # some stores silently ignore conditions
            return False
        try:
            self._record_version(self._system.pipe_file(self._path, data, mode="create"))
        except Exception as error:
            if is_precondition_failure(error):
                return (
                    self.read_content() == data
                )  # the client may have retried after a lost response
            if not is_unsupported_condition(error):
                raise
            self._system.pipe_file(self._path, data)
        return True

    def try_replace(self, content: bytes, data: bytes) -> bool:
        """Replace the object with *data*, or return False if its content is no longer *content*.

        If several runs try at the same time, only one succeeds on stores with conditional requests.
        On other stores, a run notices that it was overwritten when it reads the object.
        """
        self._version = ""
        if self._conditional_requests:
            self._system.invalidate_cache()
            with suppress(FileNotFoundError):
                self._version = make_tree_entry(self._system.info(self._path), "").version
        if self.read_content() != content:
            return False
        if self._version:
            return self.try_write(data)
        with suppress(FileNotFoundError):
            self._system.rm_file(self._path)
        return self.try_create(data)

    def try_write(self, data: bytes) -> bool:
        """Write *data* to the object, or return False if another run has written it since."""
        version = self._version
        try:
            if self._conditional_requests and version:
                self._record_version(
                    self._conditional_requests.replace_object(self._path, data, version)
                )
            else:
                self._record_version(self._system.pipe_file(self._path, data))
        except Exception as error:
            is_missing = isinstance(error, FileNotFoundError)
            if not version or not (
                is_missing
                or is_precondition_failure(error)
                or get_s3_code(error) in UNSUPPORTED_CODES
            ):
                raise
            self._version = ""
            if is_missing or is_precondition_failure(error):
                return self.read_content() == data
            self._system.pipe_file(self._path, data)
        return True

    def remove_object(self) -> None:
        """Remove the object from the store unconditionally."""
        self._system.rm_file(self._path)

    def measure_age_seconds(self, token: str) -> float | None:
        """Return the object's age in seconds by the store's clock, or None if unknown.

        Writes and removes a temporary object whose name ends with *token*.
        """
        probe = f"{self._path}-{token}"
        self._system.pipe_file(probe, b"")
        try:
            times = [self.read_modification_time_ns(path) for path in (self._path, probe)]
        finally:
            self._system.rm_file(probe)
        return (times[1] - times[0]) / 1e9 if all(times) else None

    def read_modification_time_ns(self, path: str = "") -> int:
        """Return the modification time of *path* in nanoseconds, or 0 if the store has none.

        *path* defaults to this object.
        """
        self._system.invalidate_cache()
        return make_tree_entry(self._system.info(path or self._path), "").mtime_ns

    def _record_version(self, answer: object) -> None:
        """Store the object version from *answer*, which is the store's response to a write."""
        has_version = self._conditional_requests is not None and isinstance(answer, Mapping)
        self._version = make_tree_entry(answer, "").version if has_version else ""  # type: ignore[arg-type]
