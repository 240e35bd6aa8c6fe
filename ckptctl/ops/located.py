"""The bytes of some of a checkpoint's tensors, and of nothing else that it holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ckptctl import formats
from ckptctl.catalog import Catalog, TensorEntry
from ckptctl.planner.boxes import check_coverage


def located(catalog: Catalog, names: Iterable[str]) -> Catalog:
    """Prove that the tensors called *names* are whole, and find their bytes.

    Args:
        catalog: As it was read.
        names: Of tensors in it, in any number.

    Returns:
        A catalog of these tensors alone, in the order of their names.

    Raises:
        CoverageError: One is not whole.
        DamagedError: What lies in a file is not what the index says.
    """
    entries = {name: catalog.tensors[name] for name in names}
    for entry in entries.values():
        check_coverage(entry)
    return with_bytes(catalog, entries)


def with_bytes(catalog: Catalog, entries: Mapping[str, TensorEntry]) -> Catalog:
    """Find the bytes of *entries*; other tensors, leaves and replicas are not looked at.

    Args:
        catalog: As it was read.
        entries: Tensors of it, perhaps without some of their extents.

    Raises:
        DamagedError: What lies in a file is not what the index says.
        UnsupportedError: One holds elements that are not read.
    """
    found = formats.resolve(replace(catalog, tensors=dict(entries), blobs={}, replicas={}))
    for entry in found.tensors.values():
        if entry.unsupported:
            check_coverage(entry)
    return found
