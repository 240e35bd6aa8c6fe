"""Non-tensor values: tensors nested in them, and the metadata strings of files."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ckptctl.catalog import Blob, Box, Catalog, Path, TensorEntry
from ckptctl.errors import UnsupportedError, excluding
from ckptctl.formats.base import OutputLayout, OutputTensor, WritableFormat
from ckptctl.formats.shared.leaves import flatten, join
from ckptctl.formats.shared.stored_leaves import extent_of, is_stored
from ckptctl.notes import Notes
from ckptctl.planner.mapping.mapped import ComposedTensor
from ckptctl.storage.pickles.inert import walk_values
from ckptctl.storage.zips.zip_reader import StoredTensor

Parts = Mapping[str, tuple[str, ...]]
"""Names of the leaves that each unpacked leaf became."""


def unpacked(catalog: Catalog, names: Collection[str]) -> tuple[Catalog, Parts]:
    """Make tensors that are nested in other leaves separate tensors of *catalog*."""
    tensors, parts = dict(catalog.tensors), dict[str, tuple[str, ...]]()
    blobs: dict[str, Blob] = {}
    for name, blob in catalog.blobs.items():
        holds = name in names and any(is_stored(node) for node in walk_values(blob.value))
        where = f"{catalog.root}/{blob.file}" if blob.file else catalog.path
        found = dict(flatten(blob.value, is_stored, blob.path, where=str(where))) if holds else {}
        for path, leaf in found.items():
            _add(blob, path, leaf, tensors, blobs)
        if found:
            parts[name] = tuple(map(join, found))
        else:
            blobs[name] = blob
    return replace(catalog, tensors=tensors, blobs=blobs), parts


def inside_model(
    catalog: Catalog, parts: Parts, outside: Collection[str], root: str, keep_root: bool
) -> Iterator[tuple[ComposedTensor, Path]]:
    """Yield the mapping of tensors that were unpacked from leaves of the model."""
    for name in (part for names in parts.values() for part in names):
        entry = catalog.tensors.get(name)
        if entry is not None and name not in outside and name.startswith(root):
            kept = Blob(name, entry.path)
            kept = kept if keep_root else unrooted(kept, root)
            yield ComposedTensor.from_unchanged(name, kept.name, entry.shape), kept.path


def _add(
    blob: Blob, path: Path, leaf: object, tensors: dict[str, TensorEntry], blobs: dict[str, Blob]
) -> None:
    name = join(path)
    if name in tensors or name in blobs:
        raise UnsupportedError(f"two values have the name `{name}`", where=f"`{blob.name}`")
    if isinstance(leaf, StoredTensor) and blob.file is None:
        raise UnsupportedError(
            f"cannot read `{blob.name}`: it is compressed and contains tensors",
            hint=excluding(blob.name),
        )
    if isinstance(leaf, StoredTensor):
        extent = extent_of(leaf, blob.file or "", Box.whole(leaf.shape))
        tensors[name] = TensorEntry(name, leaf.dtype, leaf.shape, (extent,), path)
    else:
        blobs[name] = Blob(name, path, value=leaf)


DERIVED = ("format", "total_size", "total_parameters")
"""Metadata keys whose values are rewritten or derived from the tensors."""
_HASH = re.compile(r"(?i)hash|sha256|md5")
_WORD = re.compile(r"[^\s\"'\[\]{}(),:]+")


def kept_strings(
    catalog: Catalog, tensors: Sequence[OutputTensor], target: WritableFormat, notes: Notes
) -> dict[str, str]:
    """Select the metadata strings that remain valid in the output. Note the others as skipped.

    A string that describes tensors or contains a hash remains valid only if names, shapes and
    dtypes are unchanged and nothing is computed.
    """
    made = {one.name: (one.dtype, one.shape) for one in tensors}
    there = {name: (entry.dtype, entry.shape) for name, entry in catalog.tensors.items()}
    changed = made != there or bool(catalog.computed)
    kept: dict[str, str] = {}
    for key, text in catalog.metadata.items():
        if key in DERIVED or (text in there and key in there):
            continue
        if not target.keeps_metadata:
            _skip_string(key, f"{target.name} does not store metadata", notes)
        elif changed and _tells_of_tensors(key, text, there):
            _skip_string(key, "it describes tensors that change", notes)
        else:
            kept[key] = text
    return kept


def without_hashes(strings: Mapping[str, str], notes: Notes) -> dict[str, str]:
    """Remove hashes of the source's bytes from *strings*."""
    hashes = [key for key in strings if _HASH.search(key)]
    for key in hashes:
        _skip_string(key, "it is a hash of the source's bytes", notes)
    return {key: text for key, text in strings.items() if key not in hashes}


def _skip_string(key: str, why: str, notes: Notes) -> None:
    notes.explain("skipped", {f"__metadata__.{key}": why})


def same_data(catalog: Catalog, mapped: Iterable[ComposedTensor], output: OutputLayout) -> bool:
    """Check if the output stores its tensors in one file, like the source and in the same order."""
    if any(not one.is_rename or one.sources[0].key != one.key for one in mapped):
        return False
    held = sorted(
        (extent.file, extent.offset, name)
        for name, entry in catalog.tensors.items()
        for extent in entry.extents
        if entry.alias_of is None
    )
    made = sorted((record.file, record.offset, record.name) for record in output.records)
    one_file = len({file for file, *_ in held}) == len({file for file, *_ in made}) == 1
    return one_file and [name for *_, name in held] == [name for *_, name in made]


def _tells_of_tensors(key: str, text: str, names: Collection[str]) -> bool:
    return bool(_HASH.search(key)) or any(
        word in names or word.rpartition(".")[0] in names for word in (key, *_WORD.findall(text))
    )


def unrooted(blob: Blob, root: str) -> Blob:
    """Return *blob* without the prefix *root* in its name and path."""
    return replace(blob, name=blob.name.removeprefix(root), path=inside(blob.path, root))


def container(path: Path, root: str) -> tuple[Path, str]:
    """Split *path* at the container that *root* names. Return its keys and its prefix."""
    held = ((path[:n], f"{join(path[:n])}.") for n in range(len(path) - 1, 0, -1))
    return next(((head, prefix) for head, prefix in held if root.startswith(prefix)), ((), ""))


def inside(path: Path, root: str) -> Path:
    """Return *path* without *root*, which may end within a key."""
    head, prefix = container(path, root)
    first, *others = path[len(head) :]
    rest = root.removeprefix(prefix)
    return (str(first).removeprefix(rest), *others) if rest else (first, *others)
