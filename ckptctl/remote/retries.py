"""Retries of network requests that fail temporarily, with exponential backoff.

A request fails for good when no request has succeeded for the timeout of the policy. s3fs and gcsfs
also retry rejected requests themselves, and huggingface_hub does for status 429.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ckptctl.errors import UsageError
from ckptctl.remote.conditions import status_of

T = TypeVar("T")
VARIABLE = "CKPTCTL_TIMEOUT"
DEFAULT = 30.0
"""Timeout in seconds."""
SILENT = 0.1
"""Fraction of the timeout after which the user is notified."""
LONGEST = 8.0
"""Longest wait between two tries, in seconds."""
BUSY = (408, 429, 500, 502, 503, 504)
"""HTTP statuses of temporary failures, the same that huggingface_hub retries."""
BROKEN = frozenset(
    {
        *("HTTPClientError", "IncompleteReadError"),
        *("TimeoutException", "NetworkError", "RemoteProtocolError"),
    }
)
"""Exceptions of botocore for truncated bodies, and of httpx for broken connections."""
OFFLINE = "OfflineModeIsEnabled"
"""Exception of huggingface_hub in offline mode: a ConnectionError that retries cannot fix."""


@dataclass(slots=True)
class Patience:
    """Retry policy for remote stores, with a total timeout and exponential backoff.

    Attributes:
        seconds: Timeout from the first failure, or None for that of the environment.
        first: Wait before the second try, in seconds. Later waits double.
        tell: Called once with a message after a tenth of the timeout.
    """

    seconds: float | None = None
    first: float = 0.5
    tell: Callable[[str], None] | None = None
    _since: float | None = None
    _last: float = 0.0
    _told: bool = False

    def answered(self) -> None:
        """Reset the timeout after a successful request."""
        self._since, self._told = None, False

    def wait(self, wait: float, place: str, error: Exception) -> bool:
        """Wait before another try, or return False if the timeout has expired."""
        limit, now = self.limit, time.monotonic()
        if self._since is None or now - self._last > limit:
            self._since, self._told = now, False
        self._last, waited = now, now - self._since
        if waited >= limit:
            return False
        if waited >= SILENT * limit and self.tell and not self._told:
            self._told = True
            said = status_of(error) or type(error).__name__
            self.tell(f"waiting up to {limit:g} s for {place}, which responds with {said}")
        time.sleep(min(wait, limit - waited))
        self._last = time.monotonic()
        return True

    @property
    def limit(self) -> float:
        """Total retry timeout in seconds."""
        if self.seconds is not None:
            return self.seconds
        text = os.environ.get(VARIABLE) or str(DEFAULT)
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds < float("inf"):
            raise UsageError(f"{VARIABLE} is not a number of seconds", why=f"its value is `{text}`")
        return seconds


patience = Patience()
"""The retry policy of this process."""


def persistent(ask: Callable[[], T], place: str) -> T:
    """Call *ask*, retrying transient errors with exponential backoff, and return its result."""
    wait = patience.first
    while True:
        try:
            answer = ask()
        except Exception as error:
            if not passes(error) or not patience.wait(wait, place, error):
                raise
            wait = min(2 * wait, LONGEST)
        else:
            patience.answered()
            return answer


def retried(read: Callable[[bytearray], None], place: str) -> bytearray:
    """Call *read* with a buffer to append to, with retries, and return the buffer."""
    data = bytearray()
    persistent(lambda: read(data), place)
    return data


def passes(error: Exception) -> bool:
    """Return whether the same request may succeed later."""
    status = status_of(error)
    if status is not None:
        return status in BUSY
    if type(error).__name__ == OFFLINE:
        return False
    broken = type(error).__module__.partition(".")[0] == "aiohttp"
    broken = broken or not BROKEN.isdisjoint(kind.__name__ for kind in type(error).__mro__)
    return broken or isinstance(error, ConnectionError | TimeoutError)
