"""Retry network requests that fail temporarily, with exponential backoff.

A request fails permanently if no request has succeeded within the timeout of the retry policy.
s3fs and gcsfs also retry rejected requests themselves, and huggingface_hub retries status 429.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ckptctl.errors import UsageError
from ckptctl.remote.conditions import get_http_status

T = TypeVar("T")
TIMEOUT_VARIABLE = "CKPTCTL_TIMEOUT"
DEFAULT_TIMEOUT_SECONDS = 30.0
"""Retry timeout in seconds if the environment variable ``CKPTCTL_TIMEOUT`` is not set."""
NOTICE_FRACTION = 0.1
"""Fraction of the retry timeout after which the user is notified."""
MAX_BACKOFF_SECONDS = 8.0
"""Maximum wait between two tries in seconds."""
RETRYABLE_STATUSES = (408, 429, 500, 502, 503, 504)
"""HTTP status codes of temporary failures, which huggingface_hub also retries."""
RETRYABLE_EXCEPTIONS = frozenset(
    {
        *("HTTPClientError", "IncompleteReadError"),
        *("TimeoutException", "NetworkError", "RemoteProtocolError"),
    }
)
"""Names of botocore's exceptions for truncated bodies and httpx's for broken connections."""
OFFLINE_EXCEPTION = "OfflineModeIsEnabled"
"""Name of huggingface_hub's offline-mode exception, a ConnectionError that is not retried."""


@dataclass(slots=True)
class RetryPolicy:
    """Retry policy for remote stores, with a total timeout and exponential backoff.

    Attributes:
        timeout_seconds: Timeout after the first failure, or None to read ``CKPTCTL_TIMEOUT``.
        first_wait_seconds: Wait before the second try. Each later wait is twice as long.
        notify: Function that is called once with a message after a tenth of the timeout.
    """

    timeout_seconds: float | None = None
    first_wait_seconds: float = 0.5
    notify: Callable[[str], None] | None = None
    _first_failure_seconds: float | None = None
    _last_failure_seconds: float = 0.0
    _is_notified: bool = False

    def record_success(self) -> None:
        """Record a successful request, which resets the timeout."""
        self._first_failure_seconds, self._is_notified = None, False

    def wait_for_retry(self, seconds: float, place: str, error: Exception) -> bool:
        """Wait for *seconds* before another try, or return False if the timeout has expired."""
        limit, now = self.limit_seconds, time.monotonic()
        if self._first_failure_seconds is None or now - self._last_failure_seconds > limit:
            self._first_failure_seconds, self._is_notified = now, False
        self._last_failure_seconds, waited = now, now - self._first_failure_seconds
        if waited >= limit:
            return False
        if waited >= NOTICE_FRACTION * limit and self.notify and not self._is_notified:
            self._is_notified = True
            reason = get_http_status(error) or type(error).__name__
            self.notify(f"waiting up to {limit:g} s for {place}, which responds with {reason}")
        time.sleep(min(seconds, limit - waited))
        self._last_failure_seconds = time.monotonic()
        return True

    @property
    def limit_seconds(self) -> float:
        """Retry timeout in seconds, from the attribute, the environment variable or the default."""
        if self.timeout_seconds is not None:
            return self.timeout_seconds
        text = os.environ.get(TIMEOUT_VARIABLE) or str(DEFAULT_TIMEOUT_SECONDS)
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds < float("inf"):
            raise UsageError(
                f"{TIMEOUT_VARIABLE} is not a number of seconds", why=f"its value is `{text}`"
            )
        return seconds


retry_policy = RetryPolicy()
"""Retry policy that all remote stores of this process share."""


def call_with_retries(request: Callable[[], T], place: str) -> T:
    """Call *request* and return its result, retrying transient errors with exponential backoff.

    *place* is the URL or path for messages.
    """
    wait = retry_policy.first_wait_seconds
    while True:
        try:
            answer = request()
        except Exception as error:
            if not is_transient(error) or not retry_policy.wait_for_retry(wait, place, error):
                raise
            wait = min(2 * wait, MAX_BACKOFF_SECONDS)
        else:
            retry_policy.record_success()
            return answer


def read_with_retries(read: Callable[[bytearray], object], place: str) -> bytearray:
    """Call *read* with an empty buffer to append to, and return the buffer.

    After a transient error, *read* is called again with the bytes received so far.
    """
    data = bytearray()
    call_with_retries(lambda: read(data), place)
    return data


def is_transient(error: Exception) -> bool:
    """Return whether *error* is temporary, so that the same request may succeed later."""
    status = get_http_status(error)
    if status is not None:
        return status in RETRYABLE_STATUSES
    if type(error).__name__ == OFFLINE_EXCEPTION:
        return False
    is_broken_connection = type(error).__module__.partition(".")[0] == "aiohttp"
    is_broken_connection = is_broken_connection or not RETRYABLE_EXCEPTIONS.isdisjoint(
        kind.__name__ for kind in type(error).__mro__
    )
    return is_broken_connection or isinstance(error, ConnectionError | TimeoutError)
