"""The checkpoint that a command reads: opened as its options say, and what is then read of it."""

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

MANY = 100
"""Leaves that are read from files of their own: those nearest to the root."""
LARGE = 16_384
"""Bytes of a leaf with more than a number in it; a `torch.save` zip has a kilobyte at least."""
LONG = 200
"""Characters of a text that is not short, and about the digits of a number that is not."""


class SourceChoices(Protocol):
    """The options of a command that say how its source is read."""

    @property
    def format(self) -> str | None:
        """Format of the checkpoint; None: detect it."""

    @property
    def model_type(self) -> str | None:
        """Family, for shards that only a family can join."""

    @property
    def weights(self) -> Weights | None:
        """Which of the optimizer's and the model's weights."""

    @property
    def tag(self) -> str | None:
        """Which save of several."""

    @property
    def rules(self) -> str | TreePath | None:
        """How ranks divide tensors."""

    @property
    def ranks(self) -> int | None:
        """How many ranks saved it."""


def open_source(
    path: str | TreePath,
    chosen: SourceChoices,
    *,
    partial: bool = False,
    replicas: bool = False,
    documents: Mapping[str, Mapping[str, object]] | None = None,
    manifest: bool | None = True,
) -> Catalog:
    """Read the index of a checkpoint; see :func:`ckptctl.formats.open_checkpoint`."""
    asked = ReadOptions(
        chosen.model_type,
        chosen.weights,
        chosen.tag,
        Path(chosen.rules) if chosen.rules else None,
        chosen.ranks,
        partial,
        replicas,
        documents or {},
    )
    return formats.open_checkpoint(path, chosen.format, asked, manifest=manifest)


def located(catalog: Catalog, names: Iterable[str]) -> Catalog:
    """Prove that the tensors called *names* are whole; a catalog of these alone, and their bytes.

    They come in the order of *names*, of which any number may be given.
    """
    entries = {name: catalog.tensors[name] for name in names}
    for entry in entries.values():
        check_coverage(entry)
    return with_bytes(catalog, entries)


def with_bytes(catalog: Catalog, entries: Mapping[str, TensorEntry]) -> Catalog:
    """Find the bytes of *entries*, perhaps of some of their extents alone; of nothing else."""
    resolved = formats.resolve(replace(catalog, tensors=dict(entries), blobs={}, replicas={}))
    for entry in resolved.tensors.values():
        if entry.unsupported:
            check_coverage(entry)
    return resolved


def leaf_values(catalog: Catalog, names: Collection[str] | None = None) -> dict[str, str]:
    """Numbers and short texts among the leaves, as Python writes them.

    Others, and what is unreadable, are left out.

    Args:
        catalog: A checkpoint.
        names: Leaves of it; None: all whose values are at hand or near the root. Behind a URL
            those alone are that came with the index.
    """
    blobs = [blob for name, blob in catalog.blobs.items() if names is None or name in names]
    read = {blob.name: blob for blob in blobs if blob.file is None}
    if names is not None or _is_local(catalog):
        small = [blob for blob in blobs if blob.file is not None and blob.nbytes <= LARGE]
        small.sort(key=lambda blob: len(blob.path))
        read |= _read(catalog, small[: MANY if names is None else None])
    values = ((name, read[name].value) for name in catalog.blobs if name in read)
    return {name: repr(value) for name, value in values if _plain(value)}


def _is_local(catalog: Catalog) -> bool:
    with source_files(catalog.root) as files:
        return files.local


def _read(catalog: Catalog, blobs: Collection[Blob]) -> Mapping[str, Blob]:
    """Leaves with their values, without those that cannot be read."""
    wanted = replace(catalog, tensors={}, replicas={}, blobs={blob.name: blob for blob in blobs})
    try:
        return formats.resolve(wanted).blobs
    except CkptError:
        if len(blobs) < 2:
            return {}
    return {name: read for blob in blobs for name, read in _read(catalog, [blob]).items()}


def _plain(value: object) -> bool:
    # Of subclasses, which a pickle may name, nothing is known; and Python writes no integer of
    # more than 4,300 digits.
    if type(value) is int:
        return value.bit_length() <= LONG * 10 // 3
    return type(value) in (bool, float) or (type(value) is str and len(value) <= LONG)
