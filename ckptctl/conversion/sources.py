"""Functions that open the source checkpoint of a command and locate the bytes of its tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from ckptctl import formats
from ckptctl.catalog import Blob, Catalog, TensorEntry
from ckptctl.errors import CkptError
from ckptctl.formats.base import ReadOptions, Weights
from ckptctl.planner.boxes import check_coverage
from ckptctl.storage.files import source_files
from ckptctl.tree import TreePath

MAX_LEAVES = 100
"""Maximum number of leaves that are read from separate files.

Leaves closest to the root of the saved object are read first.
"""
MAX_LEAF_BYTES = 16_384
"""Maximum size in bytes of a leaf that is read.

The smallest `torch.save` zip has about 1,000 bytes.
"""
MAX_TEXT_LENGTH = 200
"""Maximum number of characters in a text, and about the maximum number of digits in an integer."""


class SourceChoices(Protocol):
    """Options that determine how a source checkpoint is read."""

    @property
    def format(self) -> str | None:
        """Format of the checkpoint, or None to detect it."""

    @property
    def model_type(self) -> str | None:
        """Model type, which some formats require to merge shards, or None if not set."""

    @property
    def weights(self) -> Weights | None:
        """Whether to read the optimizer's fp32 weights or the model weights, or None if not set."""

    @property
    def tag(self) -> str | None:
        """Name of the tag folder to read, or None if not set."""

    @property
    def rules(self) -> str | TreePath | None:
        """File with the rules for splitting tensors across ranks, or None if not set."""

    @property
    def ranks(self) -> int | None:
        """Number of ranks that saved the checkpoint, or None if not set."""


def open_source(
    path: str | TreePath,
    choices: SourceChoices,
    *,
    partial: bool = False,
    replicas: bool = False,
    documents: Mapping[str, Mapping[str, object]] | None = None,
    manifest: bool | None = True,
) -> Catalog:
    """Read the index of a checkpoint with :func:`ckptctl.formats.open_checkpoint`.

    For *partial*, *replicas* and *documents*, see :class:`~ckptctl.formats.base.ReadOptions`.
    """
    read_options = ReadOptions(
        choices.model_type,
        choices.weights,
        choices.tag,
        Path(choices.rules) if choices.rules else None,
        choices.ranks,
        partial,
        replicas,
        documents or {},
    )
    return formats.open_checkpoint(path, choices.format, read_options, manifest=manifest)


def locate_tensors(catalog: Catalog, names: Iterable[str]) -> Catalog:
    """Locate the bytes of the tensors called *names*, and check that their extents tile them.

    The returned catalog contains only the tensors called *names*, in this order.
    """
    entries = {name: catalog.tensors[name] for name in names}
    for entry in entries.values():
        check_coverage(entry)
    return locate_bytes(catalog, entries)


def locate_bytes(catalog: Catalog, entries: Mapping[str, TensorEntry]) -> Catalog:
    """Locate the bytes of *entries*, whose extents may cover only some elements of each tensor."""
    resolved = formats.resolve_codecs(
        replace(catalog, tensors=dict(entries), blobs={}, replicas={})
    )
    for entry in resolved.tensors.values():
        if entry.unsupported:
            check_coverage(entry)
    return resolved


def read_short_values(catalog: Catalog, names: Collection[str] | None = None) -> dict[str, str]:
    """Read the leaves that are numbers or short texts, and return them as Python literals by name.

    Longer texts, other types and unreadable values are skipped.

    Args:
        catalog: Catalog of the checkpoint.
        names: Names of leaves, or None for all values that the index contains or that are near the
            root. For a URL, only values in the index are returned.
    """
    blobs = [blob for name, blob in catalog.blobs.items() if names is None or name in names]
    readable_blobs = {blob.name: blob for blob in blobs if blob.file is None}
    if names is not None or _is_local(catalog):
        small = [blob for blob in blobs if blob.file is not None and blob.nbytes <= MAX_LEAF_BYTES]
        small.sort(key=lambda blob: len(blob.path))
        readable_blobs |= _read_blobs(catalog, small[: MAX_LEAVES if names is None else None])
    values = (
        (name, readable_blobs[name].value) for name in catalog.blobs if name in readable_blobs
    )
    return {name: repr(value) for name, value in values if _is_short_value(value)}


def _is_local(catalog: Catalog) -> bool:
    with source_files(catalog.root) as files:
        return files.local


def _read_blobs(catalog: Catalog, blobs: Collection[Blob]) -> Mapping[str, Blob]:
    """Read the values of *blobs*, and return them by name, without unreadable ones."""
    selection = replace(catalog, tensors={}, replicas={}, blobs={blob.name: blob for blob in blobs})
    try:
        return formats.resolve_codecs(selection).blobs
    except CkptError:
        if len(blobs) < 2:
            return {}
    return {name: read for blob in blobs for name, read in _read_blobs(catalog, [blob]).items()}


def _is_short_value(value: object) -> bool:
    # A pickle may contain subclasses with other behavior. Python does not format integers of more
    # than 4,300 digits.
    if type(value) is int:
        return value.bit_length() <= MAX_TEXT_LENGTH * 10 // 3
    return type(value) in (bool, float) or (type(value) is str and len(value) <= MAX_TEXT_LENGTH)
