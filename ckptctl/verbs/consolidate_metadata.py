"""Add the missing global ``.metadata`` to a rank-local DCP directory, without moving tensors.

:func:`plan_metadata` verifies that the ranks' files form a complete checkpoint and writes nothing.
:func:`run_metadata` writes ``.metadata`` atomically. Any world size can then load the checkpoint.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from ckptctl import formats
from ckptctl.catalog import Catalog
from ckptctl.columns import get_codecs
from ckptctl.errors import ChangedError, FormatError, RefusedError, UnsupportedError, format_option
from ckptctl.file_identity import FileIdentity
from ckptctl.formats.base import Listing, OutputTensor, TensorPlace
from ckptctl.formats.dcp import METADATA
from ckptctl.formats.dcp.metadata import Item
from ckptctl.formats.dcp.metadata_writer import encode_metadata
from ckptctl.formats.dcp_rank_local import FORMAT, list_metadata_files
from ckptctl.planner.boxes import check_coverage
from ckptctl.results import Inline, JsonField, Result, round_seconds
from ckptctl.storage.destinations import require_writable
from ckptctl.storage.file_system import write_file
from ckptctl.storage.files import source_files
from ckptctl.storage.paths import require_local
from ckptctl.storage.publish import stage_output
from ckptctl.storage.threads import pause_gc
from ckptctl.tree import TreePath

RESULT_FIELDS = "source target from_format ranks tensors blobs chunks data_bytes bytes"


@dataclass(frozen=True, slots=True)
class MetadataPlan(Result, order=f"dry_run {RESULT_FIELDS}"):
    """Plan of a metadata file for a directory.

    Attributes:
        content: Content of the file.
        identities: Identity of each file that the metadata refers to.
    """

    source: Annotated[Path, JsonField("absolute path of the directory")]
    ranks: Annotated[int, JsonField("number of ranks with files")]
    tensors: Annotated[int, JsonField("number of tensors")]
    blobs: Annotated[int, JsonField("number of non-tensor values")]
    chunks: Annotated[int, JsonField("number of tensor boxes, replicas counted once")]
    data_bytes: Annotated[int, JsonField("bytes of all tensors; they are not moved")]
    content: bytes
    identities: Mapping[str, FileIdentity]
    notes: Annotated[tuple[str, ...], JsonField("further notes")]

    @property
    def dry_run(self) -> Annotated[Literal[True], JsonField("only with `--dry-run`")]:
        """Always true for a plan."""
        return True

    @property
    def target(self) -> Annotated[Path, JsonField()]:
        """Absolute path of the added file."""
        return self.source / METADATA

    @property
    def from_format(self) -> Annotated[str, JsonField("`dcp-rank-local`")]:
        """Format of the directory."""
        return FORMAT.name

    @property
    def nbytes(self) -> Annotated[int, JsonField(name="bytes")]:
        """Size of the added file."""
        return len(self.content)


@dataclass(frozen=True, slots=True)
class MetadataResult(Result, order=f"{RESULT_FIELDS} notes"):
    """Result of adding the metadata file.

    Attributes:
        notes: Notes about publishing.
    """

    plan: Annotated[MetadataPlan, Inline(RESULT_FIELDS)]
    seconds: Annotated[float, JsonField("elapsed time; absent with `--dry-run`", to=round_seconds)]
    notes: tuple[str, ...]

    @property
    def all_notes(self) -> Annotated[tuple[str, ...], JsonField(name="notes")]:
        """Further notes."""
        return (*self.plan.notes, *self.notes)

    @property
    def target(self) -> Path:
        """Path of the written ``.metadata`` file."""
        return self.plan.target


def plan_metadata(path: str | TreePath) -> MetadataPlan:
    """Build the global metadata, without writing anything.

    The header of every write item (a few kilobytes per chunk) is read and compared with the
    metadata that the ranks wrote.
    """
    require_local(
        path,
        f"{format_option('--metadata-only')} is not supported for URLs (it adds a file next to "
        "those of the ranks)",
        hint=f"omit {format_option('--metadata-only')} to write a new checkpoint anywhere",
    )
    source = Path(formats.to_existing_path(path))
    _require_no_metadata(source)
    if FORMAT.sniff(Listing(source)) is None:
        raise FormatError(
            "not a DCP checkpoint with per-rank metadata",
            where=str(source),
            why="expected a directory with __0.metadata, one per rank",
            hint=f"omit {format_option('--metadata-only')}, which only applies to saves by "
            "`dcp.save(use_collectives=False)`",
        )
    names = list_metadata_files(source)
    with source_files(source) as files:
        identities = {name: files.read_identity(name) for name in names}
    with pause_gc():
        catalog = FORMAT.read(source)
        for entry in catalog.tensors.values():
            check_coverage(entry)
        _require_torch_items(catalog)
        FORMAT.resolve_codecs(catalog)
        content = _encode_metadata(catalog)
    with source_files(source) as files:
        identities |= {name: files.read_identity(name) for name in catalog.files}
    return MetadataPlan(
        source,
        len(names),
        len(catalog.tensors),
        len(catalog.blobs),
        sum(len(entry.extents) for entry in catalog.tensors.values()),
        catalog.nbytes,
        content,
        identities,
        catalog.notes,
    )


def run_metadata(plan: MetadataPlan) -> MetadataResult:
    """Write the ``.metadata`` file of *plan* atomically."""
    start = time.monotonic()
    _require_no_metadata(plan.source)
    _require_unchanged(plan)
    with stage_output(plan.target, single_file=True) as stage:
        write_file(stage.data / METADATA, plan.content)
        _require_unchanged(plan)
        stage.publish()
    return MetadataResult(plan, time.monotonic() - start, tuple(stage.notes))


def _require_torch_items(catalog: Catalog) -> None:
    """Raise if a write item is not a `torch.save` zip, which this ``.metadata`` requires."""
    codecs = (codec for entry in catalog.tensors.values() for codec in get_codecs(entry.extents))
    has_other_codecs = any(codec != "torch" for codec in codecs)
    if has_other_codecs or any(blob.extension for blob in catalog.blobs.values()):
        raise UnsupportedError(
            "items are compressed or in safetensors format",
            where=catalog.path,
            why=f"{format_option('--metadata-only')} requires items written by `torch.save`",
            hint=f"omit {format_option('--metadata-only')} to write a new checkpoint",
        )


def _encode_metadata(catalog: Catalog) -> bytes:
    tensors = [
        OutputTensor(t.name, t.dtype, t.shape, t.path, requires_grad=t.requires_grad)
        for t in catalog.tensors.values()
    ]
    boxes = {
        entry.name: [TensorPlace(extent.box, 0) for extent in entry.extents]
        for entry in catalog.tensors.values()
    }
    items: dict[tuple[str, tuple[int, ...] | None], Item] = {
        (entry.name, extent.box.offsets): Item(extent.file, extent.offset, extent.nbytes)
        for entry in catalog.tensors.values()
        for extent in entry.extents
    }
    for blob in catalog.blobs.values():
        assert blob.file is not None
        items[blob.name, None] = Item(blob.file, blob.offset, blob.nbytes)
    return encode_metadata(tensors, list(catalog.blobs.values()), boxes, items)


def _require_no_metadata(source: Path) -> None:
    if os.path.lexists(source / METADATA):
        raise RefusedError(
            "the checkpoint already has global metadata",
            where=str(source / METADATA),
            hint="load the checkpoint as it is, or remove this file if it is from an older save",
        )
    require_writable(source / METADATA)


def _require_unchanged(plan: MetadataPlan) -> None:
    with source_files(plan.source) as files:
        changed = [
            name
            for name, identity in plan.identities.items()
            if files.read_identity(name) != identity
        ]
    if changed:
        raise ChangedError(plan.source, changed[0])
