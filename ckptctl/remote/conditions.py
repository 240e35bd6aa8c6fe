"""Send conditional requests to object stores.

An object is only replaced or removed if it still has a given version. The version is an ETag on S3
(``If-Match``) and Azure, and a generation on Google (``ifGenerationMatch``). If the object has
another version, the store responds with an error that :func:`is_precondition_failure` recognizes.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from typing import Any, Protocol
from urllib.parse import quote

PRECONDITION_CODES = ("PreconditionFailed", "ConditionalRequestConflict")
UNSUPPORTED_CODES = ("NotImplemented",)


def is_precondition_failure(error: Exception) -> bool:
    """Return whether *error* means that the condition of a request was not met."""
    has_known_type = isinstance(error, FileExistsError) or get_s3_code(error) in PRECONDITION_CODES
    return has_known_type or get_http_status(error) in (409, 412)


def is_unsupported_condition(error: Exception) -> bool:
    """Return whether *error* means that conditional requests are not supported.

    Either the store or the client may not support them.
    """
    is_client_error = isinstance(error, TypeError | ValueError | NotImplementedError)
    is_missing_call = isinstance(error, OSError) and error.errno == errno.ENOSYS
    is_boto_validation = type(error).__name__ == "ParamValidationError"
    return (
        is_client_error
        or is_missing_call
        or is_boto_validation
        or get_s3_code(error) in UNSUPPORTED_CODES
    )


def get_http_status(error: BaseException) -> int | None:
    """Return the HTTP status code of *error*, or None if it has no status code."""
    for name in ("status", "code", "status_code"):  # of aiohttp, gcsfs, Azure
        if isinstance(status := getattr(error, name, None), int):
            return status or None
    status = getattr(getattr(error, "response", None), "status_code", None)  # of httpx
    return status if isinstance(status, int) else None


def get_s3_code(error: BaseException) -> str:
    """Return the S3 error code of *error*, or an empty string if it has no error code."""
    response = getattr(error.__cause__ or error, "response", None)
    details = response.get("Error", {}) if isinstance(response, Mapping) else {}
    return str(details.get("Code", ""))


class ConditionalRequests(Protocol):
    """Interface for conditional requests to one store, with paths of its fsspec file system."""

    def replace_object(self, path: str, data: bytes, version: str) -> object:
        """Replace the object at *path* if it has *version*, and return the store's response."""

    def remove_object(self, path: str, version: str) -> None:
        """Remove the object at *path* if it has *version*."""


def find_conditional_requests(system: Any, schemes: set[str]) -> ConditionalRequests | None:
    """Return the conditional requests of the file system *system*, or None if unsupported.

    *schemes* are the URL schemes of the file system.
    """
    return next((kind(system) for scheme, kind in _BY_SCHEME.items() if scheme in schemes), None)


class _S3Requests:
    def __init__(self, system: Any) -> None:
        self._system = system

    def replace_object(self, path: str, data: bytes, version: str) -> object:
        return self._system.pipe_file(path, data, IfMatch=version)

    def remove_object(self, path: str, version: str) -> None:
        bucket, key, _ = self._system.split_path(path)
        self._system.call_s3("delete_object", Bucket=bucket, Key=key, IfMatch=version)


class _GoogleRequests:
    def __init__(self, system: Any) -> None:
        self._system = system

    def replace_object(self, path: str, data: bytes, version: str) -> object:
        bucket, key, _ = self._system.split_path(path)
        upload_url = f"{self._system._location}/upload/storage/v1/b/{quote(bucket, safe='')}/o"
        parameters = {"uploadType": "media", "name": key, "ifGenerationMatch": version}
        return self._system.call("POST", upload_url, data=data, json_out=True, **parameters)

    def remove_object(self, path: str, version: str) -> None:
        bucket, key, _ = self._system.split_path(path)
        self._system.call("DELETE", "b/{}/o/{}", bucket, key, ifGenerationMatch=version)


class _AzureRequests:
    def __init__(self, system: Any) -> None:
        from azure.core import MatchConditions

        self._system, self._if_not_modified = system, MatchConditions.IfNotModified

    def replace_object(self, path: str, data: bytes, version: str) -> object:
        return self._system.pipe_file(
            path, data, etag=version, match_condition=self._if_not_modified
        )

    def remove_object(self, path: str, version: str) -> None:
        from fsspec.asyn import sync

        sync(self._system.loop, self._remove_blob, path, version)

    async def _remove_blob(self, path: str, version: str) -> None:
        from azure.core.exceptions import ResourceNotFoundError

        container, blob, _ = self._system.split_path(path)
        async with self._system.service_client.get_blob_client(container, blob) as client:
            try:
                await client.delete_blob(etag=version, match_condition=self._if_not_modified)
            except ResourceNotFoundError as error:
                raise FileNotFoundError(path) from error


_BY_SCHEME: dict[str, Callable[[Any], ConditionalRequests]] = {
    "s3": _S3Requests,
    "gs": _GoogleRequests,
    "az": _AzureRequests,
}
