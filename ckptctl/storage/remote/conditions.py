"""What stores say of requests: their status, and what became of the conditions they had."""

from __future__ import annotations

import errno
from collections.abc import Mapping

TAKEN = ("PreconditionFailed", "ConditionalRequestConflict")
UNKNOWN = ("NotImplemented",)


def is_taken(error: Exception) -> bool:
    """Return whether a store says that another thing is there than the condition demands."""
    known = isinstance(error, FileExistsError) or code_of(error) in TAKEN
    return known or status_of(error) in (409, 412)


def knows_no_conditions(error: Exception) -> bool:
    """Return whether a store, or its client, does not know what creating on a condition is."""
    strange = isinstance(error, TypeError | ValueError | NotImplementedError)
    unknown = isinstance(error, OSError) and error.errno == errno.ENOSYS
    named = type(error).__name__ == "ParamValidationError"
    return strange or unknown or named or code_of(error) in UNKNOWN


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status that an error is about; None: about none."""
    for name in ("status", "code", "status_code"):  # of aiohttp, gcsfs, Azure
        if isinstance(found := getattr(error, name, None), int):
            return found or None
    found = getattr(getattr(error, "response", None), "status_code", None)  # of httpx
    return found if isinstance(found, int) else None


def code_of(error: BaseException) -> str:
    """Return what S3 calls an error; empty: it is none of S3's."""
    response = getattr(error.__cause__ or error, "response", None)
    found = response.get("Error", {}) if isinstance(response, Mapping) else {}
    return str(found.get("Code", ""))
