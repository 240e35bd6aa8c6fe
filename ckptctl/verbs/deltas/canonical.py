"""A checkpoint of any format as tensors in one canonical layout.

Deltas are stated in the layout ``hf`` if the model type is known, and otherwise in the names that
the checkpoint has. The tensors are planned as for a conversion, and computed when they are read.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from ckptctl import dtypes, families
from ckptctl.catalog import Catalog, TensorEntry, build_computed_name, list_input_files
from ckptctl.columns import get_extent_files
from ckptctl.conversion.contents import build_memory_key
from ckptctl.conversion.convert import ConversionOptions, plan_tensors
from ckptctl.conversion.draft import Draft
from ckptctl.conversion.proofs import find_lost_data
from ckptctl.conversion.steps import select_steps
from ckptctl.conversion.transfers import build_target_tensor, read_identities
from ckptctl.errors import MappingError, UnsupportedError
from ckptctl.file_identity import FileIdentity
from ckptctl.formats.sidecar_files import select_skipped_files
from ckptctl.planner.copying.blocks import build_rearranged_file
from ckptctl.storage.computed import open_catalog_reader
from ckptctl.storage.files import Readable
from ckptctl.storage.sources import require_same_file, require_same_files
from ckptctl.storage.tensor_reader import TensorReader
from ckptctl.storage.threads import get_default_thread_count
from ckptctl.tree import TreePath

WINDOW_BYTES = 4 << 20
"""Number of bytes of a tensor that a thread reads at a time."""
TRAINING_STATE = "not part of the model"
"""Reason why optimizer state and other training state is left out."""
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class CanonicalCheckpoint:
    """Tensors of a checkpoint in the canonical layout.

    Attributes:
        catalog: Catalog of the tensors, by canonical name. They may be computed when read.
        dtypes: Dtype of each tensor, by canonical name, to which its elements are to be cast.
        draft: Draft of the conversion to the canonical layout.
        identities: Identity of each file with tensors and of each sidecar file, by relative path,
            by root.
    """

    catalog: Catalog
    dtypes: Mapping[str, str]
    draft: Draft
    identities: Mapping[TreePath, Mapping[str, FileIdentity]]

    @property
    def model_type(self) -> str | None:
        """Model type, or None if it is unknown."""
        family = self.draft.change.family
        return family.name if family else self.draft.model.model_type

    @property
    def layout(self) -> str | None:
        """Layout of the tensors, or None if it is unknown."""
        return self.draft.change.target_layout

    @property
    def left_out_values(self) -> dict[str, str]:
        """Tensors and values without a canonical tensor, such as optimizer state, with reasons."""
        draft = self.draft
        skipped = draft.notes.get_reasons("skipped")
        return {
            **draft.notes.get_reasons("dropped"),
            **skipped,
            **{name: TRAINING_STATE for name in draft.selection.rest if name in skipped},
        }

    @property
    def left_out(self) -> dict[str, str]:
        """Values and files that are not among the tensors or sidecar files, with reasons."""
        return {**self.left_out_values, **select_skipped_files(self.draft.assets.others)}

    def require_nothing_lost(self) -> None:
        """Raise if the canonical layout would lose data that is not redundant."""
        with open_catalog_reader(self.draft.located) as files:
            for lost in find_lost_data(files, self.draft.located, self.draft.redundant):
                raise MappingError(
                    f"`{lost.part.key}` is neither zero nor a copy of another tensor",
                    where=self.draft.catalog.path,
                    why=f"layout `{self.layout}`, in which deltas are stated, cannot store it",
                )

    def require_unchanged(self) -> None:
        """Raise `ChangedError` if the checkpoint changed since it was opened."""
        require_same_file(self.draft.source.opened)
        for root, identities in self.identities.items():
            require_same_files(root, identities)


def open_canonical(path: TreePath, options: ConversionOptions) -> CanonicalCheckpoint:
    """Plan the tensors of the checkpoint at *path* in the canonical layout.

    *options* are those of a conversion to the canonical layout.
    """
    # A plan has a destination, to which nothing is written here.
    unused = Path(tempfile.gettempdir()) / f".ckptctl-canonical-{os.getpid()}"
    with families.use_converter_file(options.converter):
        draft, _ = plan_tensors(path, unused, options, select_steps(options))
    located = draft.located
    computed = dict(located.computed)
    tensors: dict[str, TensorEntry] = {}
    first_names: dict[object, str] = {}
    for tensor in draft.tensors:
        composed = draft.mapped[tensor.name]
        entry = located.tensors[composed.sources[0].key]
        if entry.unsupported:
            raise UnsupportedError(
                f"`{tensor.name}` cannot be read",
                where=located.path,
                why=entry.unsupported,
            )
        memory = build_memory_key(composed, draft.catalog.tensors), tensor.dtype
        first_name = (
            tensor.name if draft.is_adapter else first_names.setdefault(memory, tensor.name)
        )
        if not composed.is_rename:
            strided = build_target_tensor(located, composed, entry.dtype, computed)
            file = build_computed_name(f"{tensor.name}@canonical")
            computed[file] = build_rearranged_file(located.root, strided)
            entry = computed[file].to_entry(tensor.name, (tensor.name,), file)
        tensors[tensor.name] = replace(
            entry,
            name=tensor.name,
            path=(tensor.name,),
            alias_of=None if first_name == tensor.name else first_name,
        )
    catalog = replace(located, tensors=tensors, computed=computed, blobs={}, replicas={})
    return CanonicalCheckpoint(
        catalog,
        {tensor.name: tensor.dtype for tensor in draft.tensors},
        draft,
        _identify_files(catalog, draft.assets.roots),
    )


def _identify_files(
    catalog: Catalog, sidecar_roots: Mapping[str, TreePath]
) -> dict[TreePath, dict[str, FileIdentity]]:
    """Read the identity of each file with tensors of *catalog*, and of each sidecar file."""
    names_by_root: dict[TreePath, set[str]] = {}
    for name, root in sidecar_roots.items():
        names_by_root.setdefault(root, set()).add(name)
    for entry in catalog.tensors.values():
        names_by_root.setdefault(catalog.root, set()).update(get_extent_files(entry.extents))
    for root, name in list_input_files(catalog.computed):
        names_by_root.setdefault(root, set()).add(name)
    return {
        root: read_identities(root, sorted(names - catalog.computed.keys()))
        for root, names in names_by_root.items()
    }


def iterate_blocks(files: Readable, entry: TensorEntry, block_bytes: int) -> Iterator[bytearray]:
    """Yield the elements of a tensor in row-major order, in blocks of *block_bytes* bytes."""
    pending = bytearray()
    windows = TensorReader(files, entry).iterate_windows(
        nbytes=max(WINDOW_BYTES, dtypes.get_itemsize(entry.dtype))
    )
    for window in windows:
        pending += window
        start = 0
        while len(pending) - start >= block_bytes:
            yield pending[start : start + block_bytes]
            start += block_bytes
        del pending[:start]
    if pending:
        yield pending


def map_in_threads(
    work: Callable[[T], R], items: Sequence[T], jobs: int | None
) -> Iterator[tuple[T, R]]:
    """Call *work* for all items in threads, and yield items with results in order.

    At most two results per thread are pending.
    """
    threads = jobs or get_default_thread_count()
    stopped = threading.Event()

    def run(item: T) -> R:
        if stopped.is_set():
            raise RuntimeError("stopped")
        return work(item)

    with ThreadPoolExecutor(threads, thread_name_prefix="ckptctl-delta") as pool:
        pending: list[tuple[T, Future[R]]] = []
        try:
            for item in items:
                pending.append((item, pool.submit(run, item)))
                if len(pending) >= 2 * threads:
                    first, future = pending.pop(0)
                    yield first, future.result()
            while pending:
                first, future = pending.pop(0)
                yield first, future.result()
        finally:
            stopped.set()
            for _, future in pending:
                future.cancel()


def select_stored(tensors: Mapping[str, TensorEntry]) -> list[str]:
    """Return the names of the tensors that do not share the memory of another one."""
    return [name for name, entry in tensors.items() if entry.alias_of not in tensors]
