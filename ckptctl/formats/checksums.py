"""Read ``ckptctl.manifest.json``, which has checksums for formats that store none."""

from __future__ import annotations

from dataclasses import replace

from ckptctl.catalog import MANIFEST, Catalog, TensorEntry
from ckptctl.errors import CkptError
from ckptctl.storage.files import source_files
from ckptctl.storage.json_reader import read_json
from ckptctl.storage.schema import wrap_malformed_errors
from ckptctl.tree import TreePath

SCHEMA = "ckptctl.manifest/1"
ChunkLocation = tuple[str, int]
"""File name of a chunk, and its offset in the file in bytes."""


def attach_manifest_checksums(catalog: Catalog, *, allow_remote: bool = True) -> Catalog:
    """Return *catalog* with the checksums from the manifest next to the checkpoint.

    If the names, dtypes or shapes in the manifest differ from those in the catalog, the weights of
    another model have replaced the original ones. The manifest is then ignored, and a note is
    added. If the checkpoint is incomplete, only tensors in the catalog are compared.

    Args:
        catalog: Catalog of the checkpoint.
        allow_remote: Whether to read the manifest even if the checkpoint is in remote storage.
    """
    with source_files(catalog.root) as files:
        should_read = allow_remote or files.local
        if not should_read or not (files.root / MANIFEST).is_file() or catalog.path.is_file():
            return catalog
        manifest = _parse_manifest(read_json(files, MANIFEST), str(files.root / MANIFEST))
    actual = {name: (entry.dtype, entry.shape) for name, entry in catalog.tensors.items()}
    recorded = {name: (dtype, shape) for name, (dtype, shape, _) in manifest.items()}
    if catalog.findings:
        recorded = {name: kind for name, kind in recorded.items() if name in actual}
    if recorded != actual:
        note = f"{MANIFEST} describes other tensors and is not used"
        return replace(catalog, notes=(*catalog.notes, note))
    tensors: dict[str, TensorEntry] = {}
    for name, entry in catalog.tensors.items():
        crcs = manifest[name][2]
        extents = tuple(
            replace(extent, crc32=crcs.get((extent.file, extent.offset)))
            if extent.codec == "raw" and extent.crc32 is None
            else extent
            for extent in entry.extents
        )
        tensors[name] = entry if extents == entry.extents else replace(entry, extents=extents)
    return replace(catalog, tensors=tensors)


def read_carried_file_sizes(root: TreePath) -> dict[str, int]:
    """Map files that ``--carry`` copied into *root* to their sizes in bytes.

    The result is empty if *root* has no readable manifest.
    """
    try:
        with source_files(root) as files:
            content = read_json(files, MANIFEST)
    except CkptError:
        return {}
    entries = content.get("carried") if isinstance(content, dict) else None
    items = entries.items() if isinstance(entries, dict) else ()
    return {str(name): size for name, size in items if isinstance(size, int)}


def _parse_manifest(
    content: object, where: str
) -> dict[str, tuple[str, tuple[int, ...], dict[ChunkLocation, int]]]:
    """Map tensor names to the dtype, the shape and the CRC-32 of every chunk in a manifest.

    The result is empty if *content* does not have the schema of a manifest.
    """
    hint = "delete the file, or copy the checkpoint again"
    with wrap_malformed_errors("this is not a manifest", where, hint):
        if not isinstance(content, dict) or content["schema"] != SCHEMA:
            return {}
        return {
            name: (
                str(tensor["dtype"]),
                tuple(tensor["shape"]),
                {
                    (c["file"], c["offset"]): int(c["crc32"], 16)
                    for c in tensor["chunks"]
                    if "crc32" in c
                },
            )
            for name, tensor in content["tensors"].items()
        }
