"""Tensors that a layout has to have and no other one stores: they hold nothing but zeros."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckptctl import dtypes
from ckptctl.catalog import Box, Catalog, Computed, Extent, TensorEntry, computed_name
from ckptctl.planner.mapping.mapped import MappedTensor, Zeros


def made(
    catalog: Catalog, zeros: Sequence[Zeros], root: str, prefix: str
) -> tuple[Catalog, list[MappedTensor]]:
    """Return *catalog* with such tensors in virtual files, and how they become the target's.

    Args:
        catalog: The source.
        zeros: What is to be made.
        root: The model's prefix in the source.
        prefix: The model's prefix in the target.
    """
    entries, computed = dict(catalog.tensors), dict(catalog.computed)
    mapped: list[MappedTensor] = []
    for item in zeros:
        target = prefix + item.key
        name = computed_name(f"{target}@{item.origin}" if item.origin else target)
        whole = Box.whole(item.shape)
        kind = item.dtype or entries[root + item.like].dtype
        extent = Extent(whole, name, 0, whole.numel * dtypes.itemsize(kind))
        path = entries[root + item.like].path if item.like else (target,)
        entries[name] = TensorEntry(name, kind, item.shape, (extent,), path)
        computed[name] = Computed("constant", kind, item.shape)
        mapped.append(_placed(MappedTensor.same(name, target, item.shape), item.origin))
    return replace(catalog, tensors=entries, computed=computed), mapped


def _placed(mapped: MappedTensor, origin: tuple[int, ...]) -> MappedTensor:
    if not origin:
        return mapped
    return replace(mapped, targets=(replace(mapped.targets[0], origin=origin),))
