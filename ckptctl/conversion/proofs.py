"""Checks that read tensor data before writing and after publishing.

Before writing, dropped data is proven to be redundant. After publishing, the output is read back.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ckptctl.catalog import Catalog, TensorEntry
from ckptctl.conversion.plan import ConversionPlan
from ckptctl.conversion.replicas import require_equal_replicas, select_rank_replicas
from ckptctl.errors import CkptError, MappingError, StorageError, format_option
from ckptctl.planner.copying.blocks import build_view
from ckptctl.planner.mapping.adapters import CANONICAL_SUFFIX
from ckptctl.planner.mapping.mapped import RedundantData, Region
from ckptctl.planner.plan import Plan, RawCopy
from ckptctl.planner.strided import StridedTensor
from ckptctl.ranks import sharing
from ckptctl.ranks.coordinator import RankCollectives, SingleProcess, run_on_all_ranks
from ckptctl.ranks.sharing import select_rank_share
from ckptctl.storage.compare import are_tensors_equal, is_all_zero
from ckptctl.storage.computed import open_catalog_reader
from ckptctl.storage.crc import compute_crc
from ckptctl.storage.files import Readable, SourceFiles, source_files
from ckptctl.storage.publish import Staging
from ckptctl.tree import TreePath
from ckptctl.units import pluralize


def require_redundant_data(plan: ConversionPlan, ranks: RankCollectives) -> None:
    """Raise if replicas differ, or if data that *plan* drops is not redundant."""
    if plan.replicated is not None:
        require_equal_replicas(select_rank_replicas(plan.replicated, ranks))
    if not plan.redundant:
        return
    entries = plan.source.tensors
    shares = select_rank_share(ranks, plan.redundant, lambda item: entries[item.part.key].nbytes)
    with open_catalog_reader(plan.source) as files:
        for lost_data in find_lost_data(files, plan.source, shares):
            raise _lost_data_error(plan, lost_data)


def find_lost_data(
    files: Readable, catalog: Catalog, redundant: Iterable[RedundantData]
) -> Iterator[RedundantData]:
    """Yield the items of *redundant* whose elements are neither zero nor equal to a kept copy."""
    for item in redundant:
        part = _select_region(catalog, item.part)
        if item.same_as is None:
            is_redundant = is_all_zero(files, part)
        else:
            is_redundant = are_tensors_equal(files, _select_region(catalog, item.same_as), part)
        if not is_redundant:
            yield item


def _select_region(catalog: Catalog, region: Region) -> TensorEntry:
    entry = catalog.tensors[region.key]
    if not region.sizes:
        return entry
    part = StridedTensor.from_entry(entry)
    for dim, (start, size) in enumerate(zip(region.origin, region.sizes, strict=True)):
        part = part.narrow(dim, start, size)
    return build_view(entry, part)


def _lost_data_error(plan: ConversionPlan, lost: RedundantData) -> MappingError:
    """Build the error for dropped data that turned out not to be redundant."""
    if lost.kind != "tensor":
        return lost_part_error(plan.source, lost)
    key = lost.part.key
    name = key.removeprefix(plan.recognition.root)
    if lost.same_as is None:
        return MappingError(
            f"`{name}` is not zero, and layout `{plan.change.target_layout}` cannot store it",
            where=plan.source.path,
            why="skipping it would change the model",
            hint=f"pass {format_option(f'--exclude {name}')} to skip it anyway",
        )
    if name in plan.dropped:
        return MappingError(
            f"`{key}` is tied to `{lost.same_as.key}` but has different values",
            where=plan.source.path,
            why="the configuration or the model type states that they are tied",
            hint=f"pass {format_option('--untie')} to keep both",
        )
    layouts = plan.change.family.layouts if plan.change.family else ()
    both = f"{plan.change.target_layout}{CANONICAL_SUFFIX}"
    return MappingError(
        f"`{key}` and `{lost.same_as.key}` have different values",
        where=plan.source.path,
        why=f"layout `{plan.change.target_layout}` stores them as one tensor",
        hint=f"use layout `{both}`, which stores both" if both in layouts else None,
    )


def lost_part_error(catalog: Catalog, lost: RedundantData) -> MappingError:
    """Build the error for elements of a tensor that the output would lose."""
    key, origin, sizes = lost.part
    if lost.kind == "padding":
        (size, padding) = next((o, n) for o, n in zip(origin, sizes, strict=True) if o)
        rows = size + padding
        return MappingError(
            f"rows beyond the vocabulary size of {size:,} are not zero",
            where=f"{catalog.path}, tensor `{key}`",
            why=f"the tensor has {pluralize(rows, 'row')}; no file states that the rest "
            "is padding, and config.json may belong to another model",
            hint=f"pass {format_option(f'--vocab-size {size}')} to drop them anyway, or "
            f"{format_option(f'--vocab-size {rows}')} to keep them",
        )
    row, why = origin[0], "a part outside all tiles is not zero"
    if lost.same_as is not None:
        row, why = lost.same_as.origin[0], f"row {row} has different values"
    return MappingError(
        "the aspect-ratio embeddings do not form a single grid of tiles",
        where=f"{catalog.path}, tensor `{key}`, row {row}",
        why=f"{why}; transformers trains each row separately",
        hint="use layout hf or hf-v5",
    )


WINDOW_BYTES = 4 << 20
"""Number of bytes that are read and compared at a time."""


def require_intact_output(
    plan: Plan, crcs: Sequence[int], ranks: RankCollectives | None = None
) -> None:
    """Read the published output back, and raise if any byte differs from the intended output.

    Records are compared with their CRC-32 values in *crcs*, headers and other contents with the
    plan, and copied sidecar files with their sources.
    """
    ranks = ranks or SingleProcess()
    target = plan.target
    root = target.parent if plan.single_file else target
    records = list(zip(plan.records, crcs, strict=True))
    with source_files(root) as files:
        for file in plan.files:
            _drop_page_cache(files, file.path)
            if files.size(file.path) != file.size:
                why = (
                    f"the file has {pluralize(files.size(file.path), 'byte')} instead of "
                    f"{file.size:,}"
                )
                raise _read_back_error(file.path, root / file.path, why)
        for record, expected in select_rank_share(ranks, records, lambda pair: pair[0].nbytes):
            if compute_crc(files, record.file, record.offset, record.nbytes) != expected:
                place = _format_range(record.offset, record.nbytes)
                raise _read_back_error(record.name, root / record.file, place)
        for file in select_rank_share(ranks, plan.files, lambda file: file.size):
            for offset, data in file.frame(crcs.__getitem__):
                if not _has_content(files, file.path, offset, data):
                    raise _read_back_error(
                        file.path, root / file.path, _format_range(offset, len(data))
                    )
        for raw in select_rank_share(ranks, plan.raw_copies, lambda raw: raw.nbytes):
            with source_files(raw.root or plan.source_root) as sources:
                if not _is_equal_copy(files, sources, raw):
                    place = _format_range(raw.target_offset, raw.nbytes)
                    raise _read_back_error(raw.target, root / raw.target, place)


def _read_back_error(name: str, where: TreePath, why: str) -> StorageError:
    return StorageError(
        f"`{name}` differs from what was written when it is read back",
        where=str(where),
        why=why,
        hint="convert again to another location; this storage is unreliable",
    )


def _format_range(offset: int, nbytes: int) -> str:
    return f"bytes {offset:,} to {offset + nbytes:,} differ"


def _has_content(files: SourceFiles, name: str, offset: int, data: bytes) -> bool:
    return all(
        files.read(name, offset + start, len(part)) == part
        for start in range(0, len(data), WINDOW_BYTES)
        for part in (data[start : start + WINDOW_BYTES],)
    )


def _is_equal_copy(files: SourceFiles, sources: SourceFiles, raw: RawCopy) -> bool:
    return all(
        files.read(raw.target, raw.target_offset + start, size)
        == sources.read(raw.source, raw.offset + start, size)
        for start in range(0, raw.nbytes, WINDOW_BYTES)
        for size in (min(WINDOW_BYTES, raw.nbytes - start),)
    )


def _drop_page_cache(files: SourceFiles, name: str) -> None:
    """Evict the file's pages from the page cache, so that reads reach the disk."""
    if not files.local:
        return
    descriptor = files.open_descriptor(name)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def verify_or_withdraw_output(
    plan: Plan, stage: Staging | None, crcs: Sequence[int], ranks: RankCollectives
) -> None:
    """Read the published output back, and withdraw the output if it is damaged."""

    def read_again() -> None:
        sharing.wait_until_visible(Path(plan.target))
        require_intact_output(plan, crcs, ranks)

    try:
        run_on_all_ranks(ranks, read_again)
    except BaseException as error:
        if stage is None:
            raise
        try:
            outcome = stage.revert()
        except CkptError as failure:
            outcome = f"the output could not be rolled back ({failure.what}) and is still there"
        if isinstance(error, CkptError):
            error.why = "; ".join(filter(None, (error.why, outcome)))
        raise
