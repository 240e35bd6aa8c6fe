"""The memory of tensors as the executor writes it: in place, or copied into them part by part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import cast

import torch

from ckptctl.distributed.state import memory
from ckptctl.errors import RefusedError
from ckptctl.storage.compare import row_major

LONG = 4096


class Filled:
    """A tensor that takes its elements as if they lay row by row, whatever its strides and device.

    Args:
        tensor: On any device.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __setitem__(self, part: slice, content: memoryview) -> None:
        """Write a part, as bytes of the row-major elements."""
        with torch.inference_mode(self._tensor.is_inference()):
            for place, elements in _parts(self._tensor, part.start, content):
                place.copy_(elements)


class Compared:
    """A tensor that is to have the elements already that are written to it row by row.

    Args:
        tensor: On any device.
        differs: Called when it has others, once or more often.
    """

    def __init__(self, tensor: torch.Tensor, differs: Callable[[], None]) -> None:
        self._tensor = tensor
        self._differs = differs

    def __setitem__(self, part: slice, content: memoryview) -> None:
        """Compare a part, given as bytes of the row-major elements."""
        for place, elements in _parts(self._tensor, part.start, content):
            own = place.resolve_conj().resolve_neg().contiguous().cpu()
            if not torch.equal(*(one.reshape(-1).view(torch.uint8) for one in (own, elements))):
                self._differs()


Part = tuple[torch.Tensor, torch.Tensor]
"""A view of a tensor, and elements of the same shape."""


def _parts(tensor: torch.Tensor, first: int, content: memoryview) -> Iterator[Part]:
    """Yield where the bytes behind the first ones of the row-major elements belong."""
    elements = torch.frombuffer(content, dtype=tensor.dtype)
    yield from _split(tensor, first // tensor.element_size(), elements)


def _split(tensor: torch.Tensor, start: int, elements: torch.Tensor) -> Iterator[Part]:
    """Yield the places of *elements*, which come behind the first *start* ones of *tensor*."""
    if tensor.ndim < 2:
        target = tensor.reshape(1) if tensor.ndim == 0 else tensor
        yield target[start : start + len(elements)], elements
        return
    inner = math.prod(tensor.shape[1:])
    first, skip = divmod(start, inner)
    if skip:
        count = min(inner - skip, len(elements))
        yield from _split(tensor[first], skip, elements[:count])
        first, elements = first + 1, elements[count:]
    rows = len(elements) // inner
    if rows:
        whole = elements[: rows * inner].view(rows, *tensor.shape[1:])
        yield tensor[first : first + rows], whole
    if len(elements) > rows * inner:
        yield from _split(tensor[first + rows], 0, elements[rows * inner :])


def in_place(tensor: torch.Tensor) -> bool:
    """Return whether files are read straight into *tensor*: long rows in host memory."""
    if tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
        return False
    run = tensor.element_size()
    for size, step in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if size != 1 and step * tensor.element_size() != run:
            return run >= LONG and _descending(tensor)
        run *= size
    return True


def _descending(tensor: torch.Tensor) -> bool:
    steps = [n for size, n in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
    return steps == sorted(steps, reverse=True)


def steps_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the elements between neighbours along each dimension, as a plan sees them."""
    return tuple(tensor.stride()) if in_place(tensor) else row_major(tuple(tensor.shape))


def target(tensor: torch.Tensor) -> memoryview:
    """Return what the executor writes to; the tensor has to outlive it.

    Raises:
        RefusedError: Several of its elements are one in memory.
    """
    if any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
        raise RefusedError(
            "an expanded tensor cannot be filled",
            where=f"shape {list(tensor.shape)}, strides {list(tensor.stride())}",
            hint="`clone` it first",
        )
    return memory(tensor) if in_place(tensor) else cast(memoryview, Filled(tensor))
