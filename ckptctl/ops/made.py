"""Tensors that a layout has to have and no other one stores: they hold nothing but zeros."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckptctl import dtypes
from ckptctl.catalog import Box, Catalog, Computed, Extent, TensorEntry, computed_name
from ckptctl.planner.mapping import MappedTensor, Zeros


def made(
    catalog: Catalog, zeros: Sequence[Zeros], prefix: str
) -> tuple[Catalog, list[MappedTensor]]:
    """Return *catalog* with such tensors in virtual files, and how they become the target's.

    Args:
        catalog: The source.
        zeros: What is to be made.
        prefix: The model's prefix in the target.
    """
    entries, computed = dict(catalog.tensors), dict(catalog.computed)
    mapped: list[MappedTensor] = []
    for item in zeros:
        target = prefix + item.key
        name = computed_name(target)
        whole = Box.whole(item.shape)
        extent = Extent(whole, name, 0, whole.numel * dtypes.itemsize(item.dtype))
        entries[name] = TensorEntry(name, item.dtype, item.shape, (extent,), (target,))
        computed[name] = Computed("constant", item.dtype, item.shape)
        mapped.append(MappedTensor.same(name, target, item.shape))
    return replace(catalog, tensors=entries, computed=computed), mapped
