"""What only data can prove: before a run that nothing is lost, after it that all was written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from ckptctl.catalog import Box, Catalog
from ckptctl.errors import CkptError, MappingError, StorageError, spell_option
from ckptctl.ops.conversion.plan import ConversionPlan
from ckptctl.ops.ranks import sharing
from ckptctl.ops.ranks.coordinator import Alone, Coordinator, together
from ckptctl.ops.ranks.sharing import portion
from ckptctl.ops.verification.items import portion_of
from ckptctl.ops.verification.items import require_equal as replicas_equal
from ckptctl.planner.mapping.adapters import ADAPTER_LAYOUTS, CANONICAL
from ckptctl.planner.mapping.mapped import Omission, Padding, Region
from ckptctl.planner.plan import Plan, RawCopy
from ckptctl.storage.compare import all_zero, equal
from ckptctl.storage.computed import open_reader
from ckptctl.storage.crc import crc_of
from ckptctl.storage.files import Readable, SourceFiles, source_files
from ckptctl.storage.publish import Staging
from ckptctl.storage.tensor_reader import TensorReader
from ckptctl.storage.tree import TreePath
from ckptctl.units import counted

Proof = tuple[int, Callable[[], None]]
"""Bytes that are read, and what raises if something does not hold."""


def require_equal(plan: ConversionPlan, ranks: Coordinator) -> None:
    """Prove that tensors which are dropped hold what the kept ones hold, or nothing at all."""
    if plan.replicated is not None:
        replicas_equal(portion_of(plan.replicated, ranks))
    change = plan.change
    if not (change.must_be_zero or change.omissions or plan.must_equal):
        return
    with open_reader(plan.source) as files:
        found = [*_zeros(plan, files), *_equals(plan, files)]
        for _, prove in portion(ranks, found, lambda proof: proof[0]):
            prove()


def _zeros(plan: ConversionPlan, files: Readable) -> Iterator[Proof]:
    root = plan.recognition.root

    def prove(name: str) -> None:
        if not all_zero(files, plan.source.tensors[root + name]):
            raise MappingError(
                f"`{name}` is not zero, and layout `{plan.to_layout}` cannot store it",
                where=plan.source.path,
                why="skipping it would change the model",
                hint=f"pass {spell_option(f'--exclude {name}')} to skip it anyway",
            )

    for name in plan.change.must_be_zero:
        yield plan.source.tensors[root + name].nbytes, partial(prove, name)


def _equals(plan: ConversionPlan, files: Readable) -> Iterator[Proof]:
    def prove(kept: str, dropped: str) -> None:
        if not equal(files, *(plan.source.tensors[name] for name in (kept, dropped))):
            raise _differ(plan, kept, dropped)

    root = plan.recognition.root
    for omission in plan.change.omissions:
        yield 1, partial(require_nothing_omitted, files, plan.source, root, omission)
    for kept, dropped in plan.must_equal:
        yield plan.source.tensors[kept].nbytes, partial(prove, kept, dropped)


def _differ(plan: ConversionPlan, kept: str, dropped: str) -> MappingError:
    tied = dropped.removeprefix(plan.recognition.root) in plan.dropped
    apart = f"{plan.to_layout}{CANONICAL}"
    return MappingError(
        f"`{dropped}` is tied to `{kept}` but has different values"
        if tied
        else f"`{dropped}` and `{kept}` have different values",
        where=plan.source.path,
        why="the configuration or the model type states that they are tied"
        if tied
        else f"layout `{plan.to_layout}` stores them as one tensor",
        hint=f"pass {spell_option('--untie')} to keep both"
        if tied
        else f"use layout `{apart}`, which stores both"
        if apart in ADAPTER_LAYOUTS
        else None,
    )


def require_nothing_omitted(
    files: Readable, catalog: Catalog, root: str, omission: Omission
) -> None:
    """Prove that nothing is lost when rows for aspect ratios become a grid, or padding goes."""
    if isinstance(omission, Padding):
        _require_padding(files, catalog, root, omission)
        return
    for one, other in omission.equal:
        if _read(files, catalog, root, one) != _read(files, catalog, root, other):
            raise _irregular(catalog, root, one, f"row {other.origin[0]} has different values")
    for part in omission.empty:
        if any(_read(files, catalog, root, part)):
            raise _irregular(catalog, root, part, "a part outside all tiles is not zero")


def _require_padding(files: Readable, catalog: Catalog, root: str, padding: Padding) -> None:
    for name in not_padding(files, catalog, root, padding):
        raise MappingError(
            f"rows beyond the vocabulary size of {padding.size:,} are not zero",
            where=f"{catalog.path}, tensor `{name}`",
            why=f"the tensor has {counted(padding.rows, 'row')}; no file states that the rest "
            "is padding, and config.json may belong to another model",
            hint=f"pass {spell_option(f'--vocab-size {padding.size}')} to drop them anyway, or "
            f"{spell_option(f'--vocab-size {padding.rows}')} to keep them",
        )


def not_padding(files: Readable, catalog: Catalog, root: str, padding: Padding) -> Iterator[str]:
    """Yield the tensors that have something in rows that are to be left out."""
    for part in padding.empty:
        entry = catalog.tensors[root + part.key]
        if any(map(any, TensorReader(files, entry).windows(Box(part.origin, part.sizes)))):
            yield entry.name


def _read(files: Readable, catalog: Catalog, root: str, part: Region) -> bytearray:
    reader = TensorReader(files, catalog.tensors[root + part.key])
    return reader.read(Box(part.origin, part.sizes))


def _irregular(catalog: Catalog, root: str, part: Region, why: str) -> MappingError:
    return MappingError(
        "the aspect-ratio embeddings do not form a single grid of tiles",
        where=f"{catalog.path}, tensor `{root}{part.key}`, row {part.origin[0]}",
        why=f"{why}; transformers trains each row separately",
        hint="use layout hf or hf-v5",
    )


WINDOW = 4 << 20
"""Bytes that are compared at a time."""


def require_published(plan: Plan, crcs: Sequence[int], ranks: Coordinator | None = None) -> None:
    """Read what was published and compare every byte that was written.

    Records are compared with their checksums, headers and the like with what they were made of,
    raw copies with their sources.
    """
    ranks = ranks or Alone()
    target = plan.target
    root = target.parent if plan.single_file else target
    records = list(zip(plan.records, crcs, strict=True))
    with source_files(root) as files:
        for file in plan.files:
            _drop_cache(files, file.path)
            if files.size(file.path) != file.size:
                why = (
                    f"the file has {counted(files.size(file.path), 'byte')} instead of "
                    f"{file.size:,}"
                )
                raise _unlike(file.path, root / file.path, why)
        for record, expected in portion(ranks, records, lambda pair: pair[0].nbytes):
            if crc_of(files, record.file, record.offset, record.nbytes) != expected:
                place = _range(record.offset, record.nbytes)
                raise _unlike(record.name, root / record.file, place)
        for file in portion(ranks, plan.files, lambda file: file.size):
            for offset, data in file.frame(crcs.__getitem__):
                if not _holds(files, file.path, offset, data):
                    raise _unlike(file.path, root / file.path, _range(offset, len(data)))
        for raw in portion(ranks, plan.raw_copies, lambda raw: raw.nbytes):
            with source_files(raw.root or plan.source_root) as sources:
                if not _copied(files, sources, raw):
                    place = _range(raw.target_offset, raw.nbytes)
                    raise _unlike(raw.target, root / raw.target, place)


def _unlike(name: str, where: TreePath, why: str) -> StorageError:
    return StorageError(
        f"`{name}` differs from what was written when it is read back",
        where=str(where),
        why=why,
        hint="convert again to another location; this storage is unreliable",
    )


def _range(offset: int, nbytes: int) -> str:
    return f"bytes {offset:,} to {offset + nbytes:,} differ"


def _holds(files: SourceFiles, name: str, offset: int, data: bytes) -> bool:
    return all(
        files.read(name, offset + start, len(part)) == part
        for start in range(0, len(data), WINDOW)
        for part in (data[start : start + WINDOW],)
    )


def _copied(files: SourceFiles, sources: SourceFiles, raw: RawCopy) -> bool:
    return all(
        files.read(raw.target, raw.target_offset + start, size)
        == sources.read(raw.source, raw.offset + start, size)
        for start in range(0, raw.nbytes, WINDOW)
        for size in (min(WINDOW, raw.nbytes - start),)
    )


def _drop_cache(files: SourceFiles, name: str) -> None:
    """Ask the system to forget the file's pages, so that the disk itself is read."""
    if not files.local:
        return
    descriptor = files.descriptor(name)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def require_readable(
    plan: Plan, stage: Staging | None, crcs: Sequence[int], ranks: Coordinator
) -> None:
    """Read the published output again, and take it back if it is not what was written."""

    def read_again() -> None:
        sharing.wait_for(Path(plan.target))
        require_published(plan, crcs, ranks)

    try:
        together(ranks, read_again)
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
