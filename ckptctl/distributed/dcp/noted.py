"""Errors that pass through torch's own functions, which print their first line and their notes."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from ckptctl.errors import CkptError

P = ParamSpec("P")
R = TypeVar("R")


def noted(method: Callable[P, R]) -> Callable[P, R]:
    """Return *method* with where, why and hint of what it raises as notes."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except CkptError as error:
            known = getattr(error, "__notes__", ())
            for title in ("where", "why", "hint"):
                text = getattr(error, title)
                note = f"{title}: {text}"
                if text and note not in known:
                    error.add_note(note)
            raise

    return call
