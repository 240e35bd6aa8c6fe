"""What a library function is watched by while it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from ckptctl.storage.threads import Advance

Watch = Callable[[int], AbstractContextManager[Advance | None]]
"""Takes the bytes in all; its context yields what is to be called with bytes done, or None."""


def unwatched(_: int) -> AbstractContextManager[None]:
    """Show nothing."""
    return nullcontext()


@contextmanager
def one_of_many(advance: Advance | None, nbytes: int) -> Iterator[Advance]:
    """Yield what is to be called with the bytes of one part of the whole, as they are done."""
    left = nbytes

    def told(done: int) -> None:
        nonlocal left
        done = min(done, left)
        left -= done
        if advance and done:
            advance(done)

    try:
        yield told
    finally:
        told(left)
