"""Cache of save and load plans, which are reused for states with the same structure."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

MAX_ENTRIES = 8
MAX_BYTES = 1 << 30


class CachedPlan(Protocol):
    """Interface of plans that report their approximate memory size to the cache."""

    @property
    def nbytes(self) -> int:
        """Approximate memory size of the plan in bytes."""


T = TypeVar("T", bound=CachedPlan)


class PlanCache(Generic[T]):
    """Thread-safe LRU cache of plans, keyed by a digest of a rank's state."""

    def __init__(self, entries: int = MAX_ENTRIES, nbytes: int = MAX_BYTES) -> None:
        self._entries = entries
        self._nbytes = nbytes
        self._plans: OrderedDict[bytes, T] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[object, tuple[int, int]]:
        """Pickle this cache as an empty one with the same limits."""
        return PlanCache, (self._entries, self._nbytes)

    def get(self, key: bytes) -> T | None:
        """Return the plan for *key* and mark it as recently used, or return None."""
        with self._lock:
            plan = self._plans.get(key)
            if plan:
                self._plans.move_to_end(key)
            return plan

    def put(self, key: bytes, plan: T) -> None:
        """Store *plan* under *key*, and evict the least recently used plans above the limits."""
        with self._lock:
            self._plans[key] = plan
            self._plans.move_to_end(key)
            while len(self._plans) > 1 and (
                len(self._plans) > self._entries
                or sum(cached_plan.nbytes for cached_plan in self._plans.values()) > self._nbytes
            ):
                self._plans.popitem(last=False)

    def list_keys(self) -> list[bytes]:
        """List the keys of all cached plans, from least to most recently used."""
        with self._lock:
            return list(self._plans)

    def keep_only(self, predicate: Callable[[T], bool]) -> None:
        """Evict all plans for which *predicate* returns False."""
        with self._lock:
            for key in [key for key, plan in self._plans.items() if not predicate(plan)]:
                del self._plans[key]

    def list_plans(self) -> list[T]:
        """List all cached plans, most recently used first, without changing their order."""
        with self._lock:
            return list(reversed(self._plans.values()))

    def clear(self) -> None:
        """Evict all plans."""
        with self._lock:
            self._plans.clear()

    def __len__(self) -> int:
        with self._lock:
            return len(self._plans)
