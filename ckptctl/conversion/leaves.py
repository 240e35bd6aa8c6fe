"""Functions that unpack tensors from non-tensor values, and select metadata strings of files."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ckptctl.catalog import Blob, Box, Catalog, Path, TensorEntry
from ckptctl.errors import UnsupportedError, exclude_hint
from ckptctl.formats.base import OutputLayout, OutputTensor, WritableFormat
from ckptctl.formats.shared.leaves import flatten_object, join_path
from ckptctl.formats.shared.stored_leaves import is_stored_tensor, make_extent
from ckptctl.notes import Notes
from ckptctl.planner.mapping.mapped import ComposedTensor
from ckptctl.storage.pickles.inert import walk_values
from ckptctl.storage.zips.zip_reader import StoredTensor

Parts = Mapping[str, tuple[str, ...]]
"""Maps the name of each unpacked leaf to the names of the leaves that replace it."""


def unpack_tensors(catalog: Catalog, names: Collection[str]) -> tuple[Catalog, Parts]:
    """Convert tensors that are nested in the leaves *names* to separate tensors.

    Return the changed catalog, and a mapping of each unpacked leaf to the leaves that replace it.
    """
    tensors, parts = dict(catalog.tensors), dict[str, tuple[str, ...]]()
    blobs: dict[str, Blob] = {}
    for name, blob in catalog.blobs.items():
        has_tensors = name in names and any(
            is_stored_tensor(node) for node in walk_values(blob.value)
        )
        where = f"{catalog.root}/{blob.file}" if blob.file else catalog.path
        leaves = (
            dict(flatten_object(blob.value, is_stored_tensor, blob.path, where=str(where)))
            if has_tensors
            else {}
        )
        for path, leaf in leaves.items():
            _add_leaf(blob, path, leaf, tensors, blobs)
        if leaves:
            parts[name] = tuple(map(join_path, leaves))
        else:
            blobs[name] = blob
    return replace(catalog, tensors=tensors, blobs=blobs), parts


def iterate_unpacked_tensors(
    catalog: Catalog, parts: Parts, training_names: Collection[str], root: str, keep_root: bool
) -> Iterator[tuple[ComposedTensor, Path]]:
    """Yield a composed tensor and a key path for each tensor unpacked from leaves of the model.

    The tensors are copied unchanged.

    Args:
        catalog: Catalog after unpacking.
        parts: Leaves that replace each unpacked leaf.
        training_names: Names of leaves outside the model, such as training state.
        root: Prefix of the model in the checkpoint.
        keep_root: Whether names in the output keep *root*.
    """
    for name in (part for names in parts.values() for part in names):
        entry = catalog.tensors.get(name)
        if entry is not None and name not in training_names and name.startswith(root):
            blob = Blob(name, entry.path)
            blob = blob if keep_root else blob_without_root(blob, root)
            yield ComposedTensor.from_unchanged(name, blob.name, entry.shape), blob.path


def _add_leaf(
    blob: Blob, path: Path, leaf: object, tensors: dict[str, TensorEntry], blobs: dict[str, Blob]
) -> None:
    name = join_path(path)
    if name in tensors or name in blobs:
        raise UnsupportedError(f"two values have the name `{name}`", where=f"`{blob.name}`")
    if isinstance(leaf, StoredTensor) and blob.file is None:
        raise UnsupportedError(
            f"cannot read `{blob.name}`: it is compressed and contains tensors",
            hint=exclude_hint(blob.name),
        )
    if isinstance(leaf, StoredTensor):
        extent = make_extent(leaf, blob.file or "", Box.whole(leaf.shape))
        tensors[name] = TensorEntry(name, leaf.dtype, leaf.shape, (extent,), path)
    else:
        blobs[name] = Blob(name, path, value=leaf)


DERIVED_METADATA_KEYS = ("format", "total_size", "total_parameters")
"""Metadata keys that are not copied, because their values are rewritten for the output."""
_HASH = re.compile(r"(?i)hash|sha256|md5")
_WORD = re.compile(r"[^\s\"'\[\]{}(),:]+")


def select_metadata(
    catalog: Catalog, tensors: Sequence[OutputTensor], target: WritableFormat, notes: Notes
) -> dict[str, str]:
    """Select the metadata strings that remain valid in the output, and add notes on skipped ones.

    A string that describes tensors or contains a hash remains valid only if names, shapes and
    dtypes are unchanged and nothing is computed.
    """
    output_tensors = {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}
    source_tensors = {name: (entry.dtype, entry.shape) for name, entry in catalog.tensors.items()}
    changed = output_tensors != source_tensors or bool(catalog.computed)
    metadata: dict[str, str] = {}
    for key, text in catalog.metadata.items():
        if key in DERIVED_METADATA_KEYS or (text in source_tensors and key in source_tensors):
            continue
        if not target.keeps_metadata:
            _skip_string(key, f"{target.name} does not store metadata", notes)
        elif changed and _describes_tensors(key, text, source_tensors):
            _skip_string(key, "it describes tensors that change", notes)
        else:
            metadata[key] = text
    return metadata


def remove_hashes(strings: Mapping[str, str], notes: Notes) -> dict[str, str]:
    """Return *strings* without hashes of the source's bytes, and add a note on the removed ones."""
    hashes = [key for key in strings if _HASH.search(key)]
    for key in hashes:
        _skip_string(key, "it is a hash of the source's bytes", notes)
    return {key: text for key, text in strings.items() if key not in hashes}


def _skip_string(key: str, why: str, notes: Notes) -> None:
    notes.explain("skipped", {f"__metadata__.{key}": why})


def stores_same_bytes(
    catalog: Catalog, mapped: Iterable[ComposedTensor], output: OutputLayout
) -> bool:
    """Check if the output file contains the same bytes as the source file.

    Source and output must each consist of one file with the same tensors in the same order.
    """
    if any(
        not composed.is_rename or composed.sources[0].key != composed.key for composed in mapped
    ):
        return False
    stored = sorted(
        (extent.file, extent.offset, name)
        for name, entry in catalog.tensors.items()
        for extent in entry.extents
        if entry.alias_of is None
    )
    written = sorted((record.file, record.offset, record.name) for record in output.records)
    one_file = len({file for file, *_ in stored}) == len({file for file, *_ in written}) == 1
    return one_file and [name for *_, name in stored] == [name for *_, name in written]


def _describes_tensors(key: str, text: str, names: Collection[str]) -> bool:
    return bool(_HASH.search(key)) or any(
        word in names or word.rpartition(".")[0] in names for word in (key, *_WORD.findall(text))
    )


def blob_without_root(blob: Blob, root: str) -> Blob:
    """Return *blob* without the prefix *root* in its name and path."""
    return replace(blob, name=blob.name.removeprefix(root), path=path_without_root(blob.path, root))


def split_at_container(path: Path, root: str) -> tuple[Path, str]:
    """Split *path* at the container dictionary that the prefix *root* names.

    Return the keys of the container, and the prefix of the container in leaf names.
    """
    candidates = ((path[:n], f"{join_path(path[:n])}.") for n in range(len(path) - 1, 0, -1))
    return next(
        ((head, prefix) for head, prefix in candidates if root.startswith(prefix)), ((), "")
    )


def path_without_root(path: Path, root: str) -> Path:
    """Return *path* without the prefix *root*, which may end in the middle of a key."""
    head, prefix = split_at_container(path, root)
    first, *remaining_keys = path[len(head) :]
    rest = root.removeprefix(prefix)
    return (str(first).removeprefix(rest), *remaining_keys) if rest else (first, *remaining_keys)
