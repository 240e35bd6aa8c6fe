"""What file systems behind URLs raise, as errors of ours, without what is secret in a URL."""

from __future__ import annotations

from ckptctl.errors import (
    ChangedError,
    CkptError,
    SourceNotFoundError,
    StorageError,
    UsageError,
)
from ckptctl.storage.remote.conditions import status_of
from ckptctl.storage.urls import hide, install_hint, masked, scheme_of

CREDENTIALS = "check the credentials and their permissions"
NETWORK = "check the URL, the network and the configured endpoint"
DENIED = (401, 403)
FORBIDDEN = "Forbidden: "
"""What gcsfs begins with where the status is 403, in an OSError without one."""
REPLACED = ("PreconditionFailed", "412")
"""What S3 answers when it has another version of an object."""


def failure_of(error: Exception, url: str, name: str, what: str) -> CkptError:
    """Return the error for what went wrong at a place; what is secret in *url* is not in it."""
    subject = f"`{name}`" if name else "it"
    said = next(iter(str(error).strip().splitlines()), "")
    where, why = masked(url), hide(f"{type(error).__name__}: {said}", url)
    answer = getattr(error.__cause__, "response", None) or {}
    if what == "read" and answer.get("Error", {}).get("Code") in REPLACED:
        return ChangedError(where, name, "another file has replaced it")
    status = status_of(error)
    missing = isinstance(error, FileNotFoundError) or status == 404
    if missing and what == "write":
        hint = f"create the bucket first, or {NETWORK}"
        return StorageError(f"cannot write {subject}", where=where, why=why, hint=hint)
    if missing:
        return SourceNotFoundError(f"{subject} is missing" if name else "not found", where=where)
    if isinstance(error, ImportError):
        hint = install_hint(scheme_of(url))
        return UsageError("a package is missing", where=where, why=why, hint=hint)
    denied = isinstance(error, PermissionError) or status in DENIED or said.startswith(FORBIDDEN)
    denied = denied or "credential" in f"{type(error).__name__} {said}".lower()
    hint = CREDENTIALS if denied else NETWORK
    return StorageError(f"cannot {what} {subject}", where=where, why=why, hint=hint)


def raise_other(error: OSError) -> None:
    """Raise what was wrong if it was not found for another reason than that it is not there.

    ``HTTPFileSystem`` says "not found" of whatever goes wrong.
    """
    cause = error.__cause__
    if isinstance(cause, Exception) and getattr(cause, "status", None) not in (None, 404, 410):
        raise cause
    if type(cause).__module__.startswith("aiohttp.client_exceptions") and not hasattr(
        cause, "status"
    ):
        raise cause  # type: ignore[misc]
