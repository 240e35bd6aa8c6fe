"""One small object that several processes write in turns: created, and replaced, on conditions.

``If-None-Match: *`` creates one, where the store knows conditions. S3 also replaces one on the
condition that it is still the one that was read, or written, last (``If-Match``): a request that
was on its way while its machine slept then changes nothing any more. Elsewhere it is read before.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from contextlib import suppress

from ckptctl.storage.remote.store import FsspecStore, stored

TAKEN = ("PreconditionFailed", "ConditionalRequestConflict")
UNKNOWN = ("NotImplemented",)


class LockObject:
    """One object of a store.

    Args:
        store: The folder that it lies in.
        name: Its name there.
    """

    def __init__(self, store: FsspecStore, name: str) -> None:
        self._system, self._path = store.system, store.path(name)
        self._version = ""
        """Of what this process wrote last, where the store replaces on conditions."""
        self._swaps = store.is_s3

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

        Of several that try, one succeeds on S3; elsewhere the others learn of it by reading it.
        """
        self._version = self._version_there()
        if self.read() != content:
            return False
        if self._version:
            return self.write(data)
        with suppress(FileNotFoundError):
            self._system.rm_file(self._path)
        return self.create(data)

    def write(self, data: bytes) -> bool:
        """Return whether it was written anew, which it is not if somebody else wrote it."""
        asked = {"IfMatch": self._version} if self._version else {}
        try:
            self._note(self._system.pipe_file(self._path, data, **asked))
        except Exception as error:
            gone = isinstance(error, FileNotFoundError)
            if not asked or not (gone or is_taken(error) or _code(error) in UNKNOWN):
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
        """Return the seconds since it was written, by the clock of the store; None: unknown.

        Args:
            own: What no other process calls an object beside it.

        Raises:
            FileNotFoundError: It is not there.
        """
        probe = f"{self._path}-{own}"
        self._system.pipe_file(probe, b"")
        try:
            times = [self._written(path) for path in (self._path, probe)]
        finally:
            self._system.rm_file(probe)
        return (times[1] - times[0]) / 1e9 if all(times) else None

    def _written(self, path: str) -> int:
        self._system.invalidate_cache()
        return stored(self._system.info(path), "").mtime_ns

    def _version_there(self) -> str:
        if not self._swaps:
            return ""
        self._system.invalidate_cache()
        with suppress(FileNotFoundError):
            return str(self._system.info(self._path).get("ETag") or "")
        return ""

    def _note(self, answer: object) -> None:
        """Note what S3 answers to a write."""
        known = self._swaps and isinstance(answer, Mapping)
        self._version = str(answer.get("ETag") or "") if known else ""  # type: ignore[attr-defined]


def is_taken(error: Exception) -> bool:
    """Return whether a store says that another thing is there than the condition demands."""
    known = isinstance(error, FileExistsError) or _code(error) in TAKEN
    return known or any(getattr(error, name, None) in (409, 412) for name in ("status", "code"))


def knows_no_conditions(error: Exception) -> bool:
    """Return whether a store, or its client, does not know what creating on a condition is."""
    strange = isinstance(error, TypeError | ValueError | NotImplementedError)
    unknown = isinstance(error, OSError) and error.errno == errno.ENOSYS
    named = type(error).__name__ == "ParamValidationError"
    return strange or unknown or named or _code(error) in UNKNOWN


def _code(error: BaseException) -> str:
    response = getattr(error.__cause__ or error, "response", None)
    found = response.get("Error", {}) if isinstance(response, Mapping) else {}
    return str(found.get("Code", ""))
