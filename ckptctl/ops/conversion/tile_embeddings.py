"""Whether the rows of an embedding of tiles come from one grid."""

from __future__ import annotations

from ckptctl.catalog import Box, Catalog
from ckptctl.errors import MappingError
from ckptctl.planner.mapping.mapped import Region
from ckptctl.planner.mapping.resizing import Tiling
from ckptctl.storage.compare import Readable, read_box


def require_regular(files: Readable, catalog: Catalog, root: str, tiling: Tiling) -> None:
    """Prove that nothing is lost when rows for aspect ratios become a grid.

    Args:
        files: The checkpoint's.
        catalog: The checkpoint.
        root: The model's prefix in it.
        tiling: What becomes of one embedding.

    Raises:
        MappingError: Two rows disagree about a tile, or hold something where none is.
    """
    for one, other in tiling.equal:
        if _read(files, catalog, root, one) != _read(files, catalog, root, other):
            raise _irregular(catalog, root, one, f"row {other.origin[0]} has other values")
    for part in tiling.empty:
        if any(_read(files, catalog, root, part)):
            raise _irregular(catalog, root, part, "what belongs to no tile is not zero")


def _read(files: Readable, catalog: Catalog, root: str, part: Region) -> bytearray:
    return read_box(files, catalog.tensors[root + part.key], Box(part.origin, part.sizes))


def _irregular(catalog: Catalog, root: str, part: Region, why: str) -> MappingError:
    return MappingError(
        "the embeddings of aspect ratios do not come from one grid of tiles",
        where=f"{catalog.path}, tensor `{root}{part.key}`, row {part.origin[0]}",
        why=f"{why}: transformers trains each row by itself",
        hint="only layouts hf and hf-v5 can hold this model",
    )
