"""Objects of torch classes in non-tensor values: nested tensors, devices and layouts.

Storages are copied from the zip archive of the value, and tensors must be within them. Tensors of
one storage share it, as with ``torch.load``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

import torch

from ckptctl import dtypes
from ckptctl.distributed.leaves.records import (
    MAX_INT,
    Make,
    Maker,
    arguments,
    integer,
    text,
    wrong,
)
from ckptctl.errors import UnsupportedError
from ckptctl.storage.pickles.inert import Global, Inert
from ckptctl.storage.zips.directory import ZipRecord
from ckptctl.storage.zips.zip_reader import StoredTensor

MOST_REPEATED = 1 << 30
"""Maximum size in bytes of a tensor that repeats elements of a smaller storage."""
_DEVICE = re.compile(r"[a-z]{2,16}")


class Storages:
    """Tensors and their storages in one zip archive."""

    def __init__(self, records: Mapping[str, ZipRecord], read: Callable[[int, int], bytes]) -> None:
        self._records = records
        self._read = read
        self._made: dict[str, torch.Tensor] = {}

    def tensor(self, stored: StoredTensor) -> torch.Tensor:
        """Return a tensor that views its storage, or raise if it is invalid."""
        if stored.unsupported:
            return self._mirrored(stored)
        dtype = getattr(torch, stored.dtype)
        itemsize = dtypes.itemsize(stored.dtype)
        memory = self._memory(stored.storage)
        start, inside = divmod(stored.offset - self._records[stored.storage].offset, itemsize)
        strides = _strides(stored)
        reach = math.prod(stored.shape) and 1 + start + sum(
            (size - 1) * step for size, step in zip(stored.shape, strides, strict=True)
        )
        if start < 0 or inside or reach * itemsize > memory.numel():
            raise wrong("torch.Tensor", "it extends beyond its storage")
        nbytes = math.prod(filter(None, stored.shape)) * itemsize
        if nbytes > max(memory.numel(), MOST_REPEATED) and (reach or nbytes >= MAX_INT):
            raise wrong("torch.Tensor", f"its shape is {list(stored.shape)}")
        if stored.dtype == "bool" and memory.numel() and int(memory.max()) > 1:
            raise wrong("torch.Tensor", "some of its bytes are not a valid bool")
        if stored.requires_grad and not (dtype.is_floating_point or dtype.is_complex):
            raise wrong("torch.Tensor", f"{stored.dtype} cannot have a gradient")
        found = torch.empty(0, dtype=dtype).set_(
            memory.untyped_storage(), start if reach else 0, stored.shape, strides
        )
        return found.requires_grad_(stored.requires_grad)

    def _mirrored(self, stored: StoredTensor) -> torch.Tensor:
        """Return a lazily conjugated or negated view."""
        if stored.base is None:
            raise UnsupportedError(f"{stored.unsupported}")
        found = self.tensor(stored.base).detach()
        if not found.is_complex() and (stored.flags != {"neg"} or not found.is_floating_point()):
            raise wrong("torch.Tensor", f"{stored.dtype} with flags")
        found = found.conj() if "conj" in stored.flags else found
        found = torch._neg_view(found) if "neg" in stored.flags else found
        return found.requires_grad_(stored.requires_grad)

    def _memory(self, key: str) -> torch.Tensor:
        if key not in self._made:
            record = self._records[key]
            content = bytearray(self._read(record.offset, record.nbytes))
            empty = torch.empty(0, dtype=torch.uint8)
            self._made[key] = (
                torch.frombuffer(content, dtype=torch.uint8).clone() if content else empty
            )
        return self._made[key]


def _strides(stored: StoredTensor) -> tuple[int, ...]:
    """Return the strides of a tensor, with 1 for dimensions of size 1."""
    if stored.strides is not None and 0 not in stored.shape:
        pairs = zip(stored.shape, stored.strides, strict=True)
        return tuple(stride if size > 1 else 1 for size, stride in pairs)
    found, step = [], 1
    for size in reversed(stored.shape):
        found.append(step)
        step *= max(size, 1)
    return tuple(reversed(found))


def _device(record: Inert, _: Make) -> object:
    """Create a ``torch.device``."""
    kind, *index = arguments(record, 1, 2)
    if not _DEVICE.fullmatch(text(record, kind)):
        raise wrong(record, "its kind is invalid")
    try:
        return torch.device(str(kind), *(integer(record, one, 0, 128) for one in index))
    except RuntimeError as error:
        raise wrong(record, str(error).partition("\n")[0]) from None


def _layout(record: Inert, _: Make) -> object:
    """Look up a ``torch.layout`` by name."""
    (name,) = arguments(record, 1)
    found = getattr(torch, text(record, name).removeprefix("torch."), None)
    if not isinstance(found, torch.layout):
        raise wrong(record, "its name is invalid")
    return found


def _parameter(record: Inert, make: Make) -> object:
    """Create a parameter around a tensor, without hooks."""
    data, grad, *_hooks = arguments(record, 3)
    tensor = make(data)
    if not isinstance(tensor, torch.Tensor) or type(grad) is not bool:
        raise wrong(record, "it does not wrap a tensor")
    if grad and not (tensor.is_floating_point() or tensor.is_complex()):
        raise wrong(record, f"{tensor.dtype} cannot have a gradient")
    return torch.nn.Parameter(tensor, grad)


def _subclass(_: Inert, __: Make) -> object:
    """Reject tensor subclasses and tensors with extra attributes."""
    raise wrong("torch.Tensor", "it is a subclass, or has extra attributes")


TORCH: dict[Global, Maker] = {
    Global("torch._tensor", "_rebuild_from_type_v2"): _subclass,
    Global("torch", "device"): _device,
    Global("torch.serialization", "_get_layout"): _layout,
    Global("torch._utils", "_rebuild_parameter"): _parameter,
}
