"""Tensors inside of leaves, as in the sharded objects of Megatron, taken out of them.

A leaf of a DCP directory is one ``torch.save`` zip: a list of dictionaries with tensors in it, say.
A target that cannot copy that zip as it is gets its tensors as tensors, at the same place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from ckptctl.catalog import Blob, Box, Catalog, Path, TensorEntry
from ckptctl.errors import UnsupportedError
from ckptctl.formats.shared.structure import flatten, join
from ckptctl.formats.torch_file import extent_of, is_stored
from ckptctl.ops.conversion.output_tensors import unrooted
from ckptctl.planner.mapping.mapped import MappedTensor
from ckptctl.storage.pickles.reader import walk
from ckptctl.storage.zips.reader import StoredTensor

Parts = Mapping[str, tuple[str, ...]]
"""For each leaf that was taken apart the names of what it became."""


def unpacked(catalog: Catalog, names: Collection[str]) -> tuple[Catalog, Parts]:
    """Return *catalog* with the tensors in its leaves as tensors of their own.

    Args:
        catalog: A checkpoint.
        names: The leaves that were read; others stay as they are.

    Raises:
        UnsupportedError: A tensor in a leaf would be called as something else is.
    """
    tensors, parts = dict(catalog.tensors), dict[str, tuple[str, ...]]()
    blobs: dict[str, Blob] = {}
    for name, blob in catalog.blobs.items():
        found = dict(_leaves(blob) if name in names and _holds_tensors(blob) else ())
        for path, leaf in found.items():
            _add(blob, path, leaf, tensors, blobs)
        if found:
            parts[name] = tuple(map(join, found))
        else:
            blobs[name] = blob
    return replace(catalog, tensors=tensors, blobs=blobs), parts


def inside_model(
    catalog: Catalog, parts: Parts, outside: Collection[str], root: str, keep_root: bool
) -> Iterator[tuple[MappedTensor, Path]]:
    """Yield what becomes of tensors that were taken out of leaves of the model.

    Args:
        catalog: What :func:`unpacked` returned.
        parts: Likewise.
        outside: Names that are not the model's.
        root: The model's prefix, with its dot.
        keep_root: Whether the output has it too.
    """
    for name in (part for names in parts.values() for part in names):
        entry = catalog.tensors.get(name)
        if entry is not None and name not in outside and name.startswith(root):
            kept = Blob(name, entry.path)
            kept = kept if keep_root else unrooted(kept, root)
            yield MappedTensor.same(name, kept.name, entry.shape), kept.path


def _holds_tensors(blob: Blob) -> bool:
    return any(is_stored(node) for node in walk(blob.value))


def _leaves(blob: Blob) -> Iterator[tuple[Path, object]]:
    yield from flatten(blob.value, is_stored, blob.path)


def _add(
    blob: Blob,
    path: Path,
    leaf: object,
    tensors: dict[str, TensorEntry],
    blobs: dict[str, Blob],
) -> None:
    name = join(path)
    if name in tensors or name in blobs:
        raise UnsupportedError(f"two leaves are both called `{name}`", where=f"`{blob.name}`")
    if isinstance(leaf, StoredTensor):
        extent = extent_of(leaf, blob.file or "", Box.whole(leaf.shape))
        tensors[name] = TensorEntry(name, leaf.dtype, leaf.shape, (extent,), path)
    else:
        blobs[name] = Blob(name, path, value=leaf)
