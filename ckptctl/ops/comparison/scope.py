"""What of two checkpoints is compared, and how the second one becomes the first."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from ckptctl import formats
from ckptctl.catalog import Catalog
from ckptctl.errors import MappingError, RefusedError, UsageError, listed
from ckptctl.ops.conversion.unpacked import unpacked
from ckptctl.ops.loading.options import LoadOptions
from ckptctl.ops.loading.state_mapping import StateMapping, map_state
from ckptctl.ops.saving.local_shards import TensorMeta
from ckptctl.storage.paths import path_at


@dataclass(frozen=True, slots=True)
class Scope:
    """What is compared.

    Attributes:
        include: Globs; none: all.
        exclude: Globs.
        only: ``model``, or ``all`` that the checkpoints hold.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    only: Literal["model", "all"] = "all"

    def chosen(self, name: str) -> bool:
        """Return whether the globs take *name*."""
        taken = not self.include or any(fnmatchcase(name, glob) for glob in self.include)
        return taken and not any(fnmatchcase(name, glob) for glob in self.exclude)

    def require_used(self, names: Collection[str]) -> None:
        """Refuse a glob that matches nothing.

        Raises:
            MappingError: There is one.
        """
        for glob in (*self.include, *self.exclude):
            if not any(fnmatchcase(name, glob) for name in names):
                raise MappingError(
                    f"no tensor matches `{glob}`",
                    why=f"among {len(names):,} names, such as {listed(sorted(names), 2)}",
                    hint="patterns match whole names: `*` stands for anything, dots included",
                )


def map_other(a: Catalog, b: Catalog, options: LoadOptions) -> StateMapping:
    """Map *b* to the layout of *a*, as a whole, or else as far as it goes.

    A configuration that only *a* has says the sizes of both.

    Raises:
        UsageError: The user named something that does not exist.
        MappingError: Layouts were named, and do not fit.
    """
    state = {n: TensorMeta(e.dtype, e.shape, e.path) for n, e in a.tensors.items()}
    if a.documents and not b.documents:
        options = replace(options, assets=path_at(a.root))
    try:
        whole = map_state(b, state, options)
        if state.keys() <= whole.offered:
            return whole
    except (MappingError, RefusedError):
        return map_state(b, state, replace(options, partial=True))
    try:
        part = map_state(b, state, replace(options, partial=True))
    except (MappingError, UsageError):
        return whole
    better = len(part.offered & state.keys()) > len(whole.offered & state.keys())
    return part if better else whole


def read_leaves(catalog: Catalog) -> Catalog:
    """Return *catalog* with the values of its other leaves, and tensors in them as tensors."""
    read = formats.resolve(replace(catalog, tensors={}, replicas={}))
    blobs = {**catalog.blobs, **read.blobs}
    return unpacked(replace(catalog, blobs=blobs), tuple(blobs))[0]
