"""Conditional requests to object stores.

An object is replaced or removed on the condition that it still has a given version: an ETag on S3
(``If-Match``) and Azure, a generation on Google (``ifGenerationMatch``). If it has another version,
the store responds with an error that :func:`is_taken` recognizes.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from typing import Any, Protocol
from urllib.parse import quote

TAKEN = ("PreconditionFailed", "ConditionalRequestConflict")
UNKNOWN = ("NotImplemented",)


def is_taken(error: Exception) -> bool:
    """Return whether an error means that the condition of a request is not met."""
    known = isinstance(error, FileExistsError) or code_of(error) in TAKEN
    return known or status_of(error) in (409, 412)


def knows_no_conditions(error: Exception) -> bool:
    """Return whether an error means that the store or client cannot create conditionally."""
    strange = isinstance(error, TypeError | ValueError | NotImplementedError)
    unknown = isinstance(error, OSError) and error.errno == errno.ENOSYS
    named = type(error).__name__ == "ParamValidationError"
    return strange or unknown or named or code_of(error) in UNKNOWN


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of an error, or None if it has none."""
    for name in ("status", "code", "status_code"):  # of aiohttp, gcsfs, Azure
        if isinstance(found := getattr(error, name, None), int):
            return found or None
    found = getattr(getattr(error, "response", None), "status_code", None)  # of httpx
    return found if isinstance(found, int) else None


def code_of(error: BaseException) -> str:
    """Return the S3 error code of an error, or an empty string if it has none."""
    response = getattr(error.__cause__ or error, "response", None)
    found = response.get("Error", {}) if isinstance(response, Mapping) else {}
    return str(found.get("Code", ""))


class Versions(Protocol):
    """Conditional requests of one store. Paths are those of its fsspec file system."""

    def replace(self, path: str, data: bytes, version: str) -> object:
        """Replace an object if it has *version*, and return the response of the store."""

    def remove(self, path: str, version: str) -> None:
        """Remove an object if it has *version*."""


def versions_of(system: Any, schemes: set[str]) -> Versions | None:
    """Return the conditional requests of a file system, or None if it supports none."""
    return next((kind(system) for scheme, kind in _KINDS.items() if scheme in schemes), None)


class _S3:
    def __init__(self, system: Any) -> None:
        self._system = system

    def replace(self, path: str, data: bytes, version: str) -> object:
        return self._system.pipe_file(path, data, IfMatch=version)

    def remove(self, path: str, version: str) -> None:
        bucket, key, _ = self._system.split_path(path)
        self._system.call_s3("delete_object", Bucket=bucket, Key=key, IfMatch=version)


class _Google:
    def __init__(self, system: Any) -> None:
        self._system = system

    def replace(self, path: str, data: bytes, version: str) -> object:
        bucket, key, _ = self._system.split_path(path)
        place = f"{self._system._location}/upload/storage/v1/b/{quote(bucket, safe='')}/o"
        asked = {"uploadType": "media", "name": key, "ifGenerationMatch": version}
        return self._system.call("POST", place, data=data, json_out=True, **asked)

    def remove(self, path: str, version: str) -> None:
        bucket, key, _ = self._system.split_path(path)
        self._system.call("DELETE", "b/{}/o/{}", bucket, key, ifGenerationMatch=version)


class _Azure:
    def __init__(self, system: Any) -> None:
        from azure.core import MatchConditions

        self._system, self._same = system, MatchConditions.IfNotModified

    def replace(self, path: str, data: bytes, version: str) -> object:
        return self._system.pipe_file(path, data, etag=version, match_condition=self._same)

    def remove(self, path: str, version: str) -> None:
        from fsspec.asyn import sync

        sync(self._system.loop, self._remove, path, version)

    async def _remove(self, path: str, version: str) -> None:
        from azure.core.exceptions import ResourceNotFoundError

        container, blob, _ = self._system.split_path(path)
        async with self._system.service_client.get_blob_client(container, blob) as client:
            try:
                await client.delete_blob(etag=version, match_condition=self._same)
            except ResourceNotFoundError as error:
                raise FileNotFoundError(path) from error


_KINDS: dict[str, Callable[[Any], Versions]] = {"s3": _S3, "gs": _Google, "az": _Azure}
