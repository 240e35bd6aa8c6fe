"""Plans of earlier saves and loads, for states that are structured as they were then."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

ENTRIES = 8
NBYTES = 1 << 30


class CachedPlan(Protocol):
    """A plan that a cache keeps."""

    @property
    def nbytes(self) -> int:
        """Return about how much memory it takes."""


T = TypeVar("T", bound=CachedPlan)


class PlanCache(Generic[T]):
    """The plans used last, by a digest of a rank's state; safe to use from several threads."""

    def __init__(self, entries: int = ENTRIES, nbytes: int = NBYTES) -> None:
        self._entries = entries
        self._nbytes = nbytes
        self._plans: OrderedDict[bytes, T] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[object, tuple[int, int]]:
        """Return a cache without plans for another process."""
        return PlanCache, (self._entries, self._nbytes)

    def get(self, key: bytes) -> T | None:
        """Return the plan for *key* and take note that it was used."""
        with self._lock:
            found = self._plans.get(key)
            if found:
                self._plans.move_to_end(key)
            return found

    def put(self, key: bytes, plan: T) -> None:
        """Keep *plan*, and let those go that were not used for longest."""
        with self._lock:
            self._plans[key] = plan
            self._plans.move_to_end(key)
            while len(self._plans) > 1 and (
                len(self._plans) > self._entries
                or sum(one.nbytes for one in self._plans.values()) > self._nbytes
            ):
                self._plans.popitem(last=False)

    def keys(self) -> list[bytes]:
        """Return the keys of all of them, the one used last at the end."""
        with self._lock:
            return list(self._plans)

    def keep(self, wanted: Callable[[T], bool]) -> None:
        """Let all go but those *wanted*."""
        with self._lock:
            for key in [key for key, plan in self._plans.items() if not wanted(plan)]:
                del self._plans[key]

    def plans(self) -> list[T]:
        """Return all of them, the one used last first; this does not count as using them."""
        with self._lock:
            return list(reversed(self._plans.values()))

    def clear(self) -> None:
        """Let all plans go."""
        with self._lock:
            self._plans.clear()

    def __len__(self) -> int:
        with self._lock:
            return len(self._plans)
