"""Objects that are replaced, or removed, on the condition that they still have a version.

S3 compares ETags (``If-Match``), Google generations (``ifGenerationMatch``), Azure ETags. Another
version is answered with an error that :func:`~ckptctl.storage.remote.conditions.is_taken`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import quote


class Versions(Protocol):
    """The conditions of a store. Paths are those of its file system."""

    def replace(self, path: str, data: bytes, version: str) -> object:
        """Write an object anew, and return what the store answers."""

    def remove(self, path: str, version: str) -> None:
        """Remove an object."""


def versions_of(system: Any, schemes: set[str]) -> Versions | None:
    """Return the conditions that a file system for *schemes* knows; None: none."""
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
