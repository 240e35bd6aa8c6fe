"""Requests over a network that fail now and then: asked for again, for a while.

The waiting is over when nothing has answered for :attr:`Patience.seconds`, however many requests
that were. s3fs and gcsfs ask again by themselves for what was refused, and huggingface_hub does
where it was told to come back later (429).
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
"""Seconds."""
SILENT = 0.1
"""The part of the whole time after which the waiting is spoken of."""
LONGEST = 8.0
"""Seconds between two tries."""
BUSY = (408, 429, 500, 502, 503, 504)
"""HTTP statuses that pass; those on which huggingface_hub asks again."""
BROKEN = frozenset(
    {
        *("HTTPClientError", "IncompleteReadError"),
        *("TimeoutException", "NetworkError", "RemoteProtocolError"),
    }
)
"""What botocore raises of a body that breaks off, and httpx of a connection."""
OFFLINE = "OfflineModeIsEnabled"
"""What huggingface_hub raises instead of asking: a ConnectionError that no waiting ends."""


@dataclass(slots=True)
class Patience:
    """How long a place that does not answer is asked again.

    Attributes:
        seconds: From the first failure on; None: what the environment says.
        first: Seconds before the second try; each further wait is twice as long.
        tell: Called once, when a tenth of that time has passed.
    """

    seconds: float | None = None
    first: float = 0.5
    tell: Callable[[str], None] | None = None
    _since: float | None = None
    _last: float = 0.0
    _told: bool = False

    def answered(self) -> None:
        """Begin anew: there was an answer."""
        self._since, self._told = None, False

    def wait(self, wait: float, place: str, error: Exception) -> bool:
        """Wait before another try; return whether there is to be one."""
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
        """Return the seconds."""
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
"""That of this process."""


def persistent(ask: Callable[[], T], place: str) -> T:
    """Return the answer to *ask*, asked again while its errors may pass."""
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
    """Return the bytes that *read* appended; see :func:`persistent`."""
    data = bytearray()
    persistent(lambda: read(data), place)
    return data


def passes(error: Exception) -> bool:
    """Return whether the same request may succeed a little later."""
    status = status_of(error)
    if status is not None:
        return status in BUSY
    if type(error).__name__ == OFFLINE:
        return False
    broken = type(error).__module__.partition(".")[0] == "aiohttp"
    broken = broken or not BROKEN.isdisjoint(kind.__name__ for kind in type(error).__mro__)
    return broken or isinstance(error, ConnectionError | TimeoutError)
