"""Another vocabulary size: rows of zeros are added at the end, or rows are cut off there.

Trainers pad the vocabulary for their kernels or for model parallelism; rows beyond the tokenizer's
are never looked up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ckptctl.errors import MappingError
from ckptctl.planner.layouts import Layout, Stored
from ckptctl.planner.mapping.mapped import MappedTensor, View, Zeros


def resized(
    tensors: Sequence[MappedTensor], layouts: tuple[Layout, Layout], axis: str, size: int
) -> tuple[list[MappedTensor], list[Zeros]]:
    """Return *tensors* with another size of *axis*, and the zeros that fill what is added.

    Args:
        tensors: What becomes what.
        layouts: The source's and the target's.
        axis: An axis that has a dimension to itself wherever it occurs.
        size: Its new size.

    Raises:
        MappingError: A tensor is concatenated along *axis*, or none has it.
    """
    found: list[MappedTensor] = []
    zeros: list[Zeros] = []
    touched = False
    for mapped in tensors:
        dims = [
            _dim(layout, side[0].key, axis)
            for layout, side in zip(layouts, (mapped.sources, mapped.targets), strict=True)
        ]
        if dims[0] is None or dims[1] is None:
            found.append(mapped)
            continue
        touched = True
        one, added = _resized(mapped, dims[0], dims[1], size)
        found.append(one)
        zeros += added
    if not touched:
        raise MappingError(f"no tensor has a dimension of its own for axis {axis}")
    return found, zeros


def _dim(layout: Layout, key: str, axis: str) -> int | None:
    match = layout.table.find(key)
    if match is None or not isinstance(match[0], Stored):
        return None
    for _, leaf in match[0].parts:
        if (axis,) in leaf.dims:
            dim = leaf.dims.index((axis,))
            if leaf.part is not None and leaf.along == dim:
                raise MappingError(
                    f"axis {axis} cannot be resized where it is joined with another",
                    where=f"tensor `{key}`",
                )
            return dim
    return None


def _resized(
    mapped: MappedTensor, read: int, written: int, size: int
) -> tuple[MappedTensor, list[Zeros]]:
    source, target = mapped.sources[0], mapped.targets[0]
    position = source.dims[len(source.lead) + read][0]
    before = mapped.axes[position]
    if size >= before:
        return mapped, list(_filling(mapped, target, written, before, size))
    axes = tuple(size if n == position else old for n, old in enumerate(mapped.axes))
    cut = replace(
        mapped,
        axes=axes,
        sources=tuple(_cut(view, read, size) for view in mapped.sources),
        targets=tuple(_cut(view, written, size) for view in mapped.targets),
    )
    return cut, []


def _cut(view: View, dim: int, size: int) -> View:
    return replace(view, sizes=_with(view.sizes, dim, size))


def _filling(
    mapped: MappedTensor, target: View, dim: int, before: int, size: int
) -> Iterator[Zeros]:
    if size > before:
        origin = _with(target.origin, dim, target.origin[dim] + before)
        shape = _with(target.sizes, dim, size - before)
        like = mapped.sources[0].key
        yield Zeros(target.key, shape, "", target.key, origin=origin, like=like)


def _with(sizes: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return tuple(size if n == dim else old for n, old in enumerate(sizes))
