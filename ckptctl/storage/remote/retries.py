"""Reads over a network that break off now and then: asked for again, a few times.

huggingface_hub, s3fs and gcsfs ask again by themselves for what was refused; what is here is for
web servers, and for bodies that end too early.
"""

from __future__ import annotations

import time
from collections.abc import Callable

WAITS = (0.5, 1.0, 2.0, 4.0)
"""Seconds before each further try."""
BUSY = (408, 429, 500, 502, 503, 504)
"""HTTP statuses that pass; those on which huggingface_hub asks again."""
BROKEN = frozenset({"HTTPClientError", "IncompleteReadError"})
"""What botocore raises of a body that breaks off."""


def retried(read: Callable[[bytearray], None]) -> bytearray:
    """Return what *read* found, asked again while what goes wrong may pass.

    Args:
        read: Appends bytes to what earlier tries found, and goes on behind them.

    Raises:
        Exception: What the last try raised, or the first one that does not pass.
    """
    found = bytearray()
    for wait in WAITS:
        try:
            read(found)
            return found
        except Exception as error:
            if not passes(error):
                raise
        time.sleep(wait)
    read(found)
    return found


def passes(error: Exception) -> bool:
    """Return whether the same request may succeed a little later."""
    status = getattr(error, "status", None)
    if status is not None:
        return status in BUSY
    broken = type(error).__module__.partition(".")[0] == "aiohttp"
    broken = broken or not BROKEN.isdisjoint(one.__name__ for one in type(error).__mro__)
    return broken or isinstance(error, ConnectionError | TimeoutError)
