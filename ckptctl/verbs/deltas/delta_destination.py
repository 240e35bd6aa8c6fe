"""Destination of a delta: a local folder, or a URL of an object store or a bucket of the Hub."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ckptctl.conversion.destinations import Destination, require_destination
from ckptctl.conversion.upload import NOT_ATOMIC_NOTE, create_scratch_directory, hold_upload
from ckptctl.errors import SourceNotFoundError, UsageError
from ckptctl.formats.delta import MANIFEST
from ckptctl.storage.destinations import Replaceable, destination_exists_error
from ckptctl.storage.paths import parse_path, resolve_source_path
from ckptctl.storage.publish import stage_output
from ckptctl.storage.threads import raise_on_sigterm
from ckptctl.storage.urls import is_hub_repository
from ckptctl.tree import TreePath, UploadRequest, UrlPath
from ckptctl.verbs.deltas.delta_files import is_delta
from ckptctl.verbs.deltas.published import INDEX, is_replaceable_update


def _is_replaceable(path: TreePath) -> bool:
    return is_delta(path) or is_replaceable_update(path)


REPLACEABLE_DELTA = Replaceable(_is_replaceable, "a delta")


class StagedDelta(Protocol):
    """Delta that is written to a local folder before it is published."""

    @property
    def data(self) -> Path:
        """Folder in which the files are written."""

    def publish(self) -> list[str]:
        """Publish the files, and return notes to show to the user."""


def resolve_delta_destination(
    sources: Sequence[TreePath], dst: str | TreePath, *, overwrite: bool
) -> Destination:
    """Return the destination at which a delta is to be written.

    Raises:
        RefusedError: The path is in use, or overlaps a source.
        UsageError: It is a repository of the Hub.
    """
    target = parse_path(dst)
    if isinstance(target, UrlPath) and is_hub_repository(target.url):
        raise UsageError(
            "cannot write a delta to a repository of the Hub",
            where=str(dst),
            why="repositories keep every version, and deltas are made often",
            hint="write it to a bucket (hf://buckets/ORG/NAME/FOLDER), or to a local folder, and "
            "upload that with `hf upload`",
        )
    (destination, *_) = [
        require_destination(source, target, overwrite, REPLACEABLE_DELTA) for source in sources
    ]
    return destination


@contextmanager
def stage_delta(
    destination: Destination, read: Mapping[TreePath, Iterable[str]], *, overwrite: bool
) -> Iterator[StagedDelta]:
    """Create a folder for a delta, which is published at *destination*, and remove it afterwards.

    Args:
        destination: Where to publish the delta.
        read: Names of the files that the delta is made from, by folder.
        overwrite: Whether to replace a delta.

    Raises:
        RefusedError: The destination exists.
    """
    if not isinstance(destination.path, UrlPath):
        with stage_output(
            Path(destination.path), overwrite=overwrite, is_checkpoint=REPLACEABLE_DELTA
        ) as stage:
            yield stage
        return
    url = destination.path
    if not overwrite:
        _require_free(url)
    with raise_on_sigterm(), create_scratch_directory() as folder:
        yield _ScratchDelta(folder, url, read, overwrite)


def _require_free(url: UrlPath) -> None:
    """Raise if there is a delta or a checkpoint at *url*, before anything is computed.

    The upload checks again that the destination is free.
    """
    try:
        folder = resolve_source_path(url)
    except SourceNotFoundError:
        return
    if any((folder / name).is_file() for name in (MANIFEST, INDEX)):
        raise destination_exists_error(folder, REPLACEABLE_DELTA)


@dataclass(frozen=True, slots=True)
class _ScratchDelta:
    """Delta in a temporary folder, from which it is uploaded."""

    data: Path
    _url: UrlPath
    _read: Mapping[TreePath, Iterable[str]]
    _overwrite: bool

    def publish(self) -> list[str]:
        """Upload all files, and return notes to show to the user.

        The last file is the manifest or index, without which it is no delta.
        """
        paths = [path for path in self.data.rglob("*") if path.is_file()]
        names = sorted(str(path.relative_to(self.data)) for path in paths)
        names.sort(key=lambda name: name in (MANIFEST, INDEX))
        request = UploadRequest(
            names,
            overwrite=self._overwrite,
            is_checkpoint=lambda: REPLACEABLE_DELTA(resolve_source_path(self._url)),
            noun=REPLACEABLE_DELTA.noun,
            read=self._read,
        )
        with hold_upload(self._url, request) as upload:
            for name in names[:-1]:
                upload.upload_file(name, self.data / name)
            upload.require_complete()
            upload.upload_file(names[-1], self.data / names[-1])
            upload.publish_files()
            self._url.tree.forget_url(str(self._url))
        return [] if self._url.tree.atomic or len(names) == 1 else [NOT_ATOMIC_NOTE]
