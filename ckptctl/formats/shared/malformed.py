"""What Python raises at metadata of another shape than expected, as an error of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ckptctl.errors import UnsupportedError


@contextmanager
def malformed(what: str, where: str, hint: str | None = None) -> Iterator[None]:
    """Turn what goes wrong while fields are taken out of foreign data into one error.

    Args:
        what: What is wrong then, as in ``this is not a manifest``.
        where: The file.
        hint: What to do about it; None: nothing.

    Raises:
        UnsupportedError: A field is missing, or is not what it should be.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise UnsupportedError(what, where=where, why=why, hint=hint) from error
