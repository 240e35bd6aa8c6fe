"""Proof that what a state has no place for holds nothing that it needs."""

from __future__ import annotations

from ckptctl.errors import MappingError
from ckptctl.ops.conversion.tile_embeddings import require_regular
from ckptctl.ops.loading.state_mapping import StateMapping
from ckptctl.ops.located import located
from ckptctl.storage.compare import all_zero, equal
from ckptctl.storage.computed import open_reader


def require_nothing_lost(mapping: StateMapping) -> None:
    """Read what the mapping drops because it is another tensor once more, or nothing at all.

    Raises:
        MappingError: It is not.
        CoverageError: A tensor is not whole.
    """
    catalog, root = mapping.catalog, mapping.root
    names = {*mapping.must_be_zero, *(name for pair in mapping.must_equal for name in pair)}
    for tiling in mapping.tilings:
        regions = (*tiling.empty, *(part for pair in tiling.equal for part in pair))
        names |= {root + region.key for region in regions}
    catalog = located(catalog, [name for name in catalog.tensors if name in names])
    with open_reader(catalog) as files:
        for name in mapping.must_be_zero:
            if not all_zero(files, catalog.tensors[name]):
                raise MappingError(
                    f"`{name}` has no place in the state and is not zero",
                    where=catalog.path,
                    why="leaving it out would change the model",
                )
        for tiling in mapping.tilings:
            require_regular(files, catalog, root, tiling)
        for kept, dropped in mapping.must_equal:
            if not equal(files, catalog.tensors[kept], catalog.tensors[dropped]):
                raise MappingError(
                    f"`{dropped}` and `{kept}` hold different values",
                    where=catalog.path,
                    why="in the state one tensor stands for both",
                )
