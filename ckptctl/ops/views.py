"""Parts of stored tensors as tensors of their own: nothing is copied for that."""

from __future__ import annotations

from dataclasses import replace

from ckptctl import dtypes
from ckptctl.catalog import Box, TensorEntry
from ckptctl.errors import UnsupportedError, spell_option
from ckptctl.storage.compare import row_major


def steps(entry: TensorEntry) -> tuple[int, ...]:
    """Return how far apart the elements of a tensor lie in each dimension.

    Raises:
        UnsupportedError: It lies in several pieces.
    """
    if len(entry.extents) != 1:
        raise UnsupportedError(
            "a tensor of the adapter is stored in several parts",
            where=f"tensor `{entry.name}`",
            why="it must be stored in one part",
            hint=f"convert the adapter with {spell_option('--to peft')} first",
        )
    return entry.extents[0].strides or row_major(entry.shape)


def view(
    whole: TensorEntry, name: str, at: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> TensorEntry:
    """Return a part of a tensor, from an element on."""
    item = dtypes.itemsize(whole.dtype)
    span = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + 1
    part = replace(
        whole.extents[0],
        box=Box.whole(shape),
        offset=whole.extents[0].offset + at * item,
        nbytes=span * item,
        strides=strides,
        crc32=None,
        within=None,
    )
    return replace(whole, name=name, path=(name,), shape=shape, extents=(part,), alias_of=None)
