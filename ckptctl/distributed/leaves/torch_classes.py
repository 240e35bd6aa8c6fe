"""Objects of torch classes in non-tensor values: nested tensors, devices and layouts.

Storages are copied from the zip archive of the value, and tensors must be within them. Tensors with
the same storage share memory, as with ``torch.load``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

import torch

from ckptctl import dtypes
from ckptctl.distributed.leaves.records import (
    MAX_INT,
    NestedBuilder,
    RecordBuilder,
    check_int,
    check_str,
    get_arguments,
    malformed_record_error,
)
from ckptctl.errors import UnsupportedError
from ckptctl.storage.pickles.inert import Global, Inert
from ckptctl.storage.zips.directory import ZipRecord
from ckptctl.storage.zips.zip_reader import StoredTensor

MAX_REPEATED_BYTES = 1 << 30
"""Maximum size in bytes of a tensor that repeats elements of a smaller storage."""
_DEVICE = re.compile(r"[a-z]{2,16}")


class ZipStorages:
    """Storages in one zip archive, and the tensors that are views of them."""

    def __init__(self, records: Mapping[str, ZipRecord], read: Callable[[int, int], bytes]) -> None:
        self._records = records
        self._read = read
        self._tensors: dict[str, torch.Tensor] = {}

    def build_tensor(self, stored: StoredTensor) -> torch.Tensor:
        """Return a tensor that views its storage, or raise if its offset or shape is invalid."""
        if stored.unsupported:
            return self._build_mirrored_view(stored)
        dtype = getattr(torch, stored.dtype)
        itemsize = dtypes.get_itemsize(stored.dtype)
        memory = self._read_storage(stored.storage)
        start, remainder = divmod(stored.offset - self._records[stored.storage].offset, itemsize)
        strides = _compute_strides(stored)
        reach = math.prod(stored.shape) and 1 + start + sum(
            (size - 1) * step for size, step in zip(stored.shape, strides, strict=True)
        )
        if start < 0 or remainder or reach * itemsize > memory.numel():
            raise malformed_record_error("torch.Tensor", "it extends beyond its storage")
        nbytes = math.prod(filter(None, stored.shape)) * itemsize
        if nbytes > max(memory.numel(), MAX_REPEATED_BYTES) and (reach or nbytes >= MAX_INT):
            raise malformed_record_error("torch.Tensor", f"its shape is {list(stored.shape)}")
        if stored.dtype == "bool" and memory.numel() and int(memory.max()) > 1:
            raise malformed_record_error("torch.Tensor", "some of its bytes are not a valid bool")
        if stored.requires_grad and not (dtype.is_floating_point or dtype.is_complex):
            raise malformed_record_error("torch.Tensor", f"{stored.dtype} cannot have a gradient")
        view = torch.empty(0, dtype=dtype).set_(
            memory.untyped_storage(), start if reach else 0, stored.shape, strides
        )
        return view.requires_grad_(stored.requires_grad)

    def _build_mirrored_view(self, stored: StoredTensor) -> torch.Tensor:
        """Return a view with the conjugate or negative bit set, like ``torch.conj`` does."""
        if stored.base is None:
            raise UnsupportedError(f"{stored.unsupported}")
        view = self.build_tensor(stored.base).detach()
        if not view.is_complex() and (stored.flags != {"neg"} or not view.is_floating_point()):
            raise malformed_record_error("torch.Tensor", f"{stored.dtype} with flags")
        view = view.conj() if "conj" in stored.flags else view
        view = torch._neg_view(view) if "neg" in stored.flags else view
        return view.requires_grad_(stored.requires_grad)

    def _read_storage(self, key: str) -> torch.Tensor:
        if key not in self._tensors:
            record = self._records[key]
            content = bytearray(self._read(record.offset, record.nbytes))
            empty = torch.empty(0, dtype=torch.uint8)
            self._tensors[key] = (
                torch.frombuffer(content, dtype=torch.uint8).clone() if content else empty
            )
        return self._tensors[key]


def _compute_strides(stored: StoredTensor) -> tuple[int, ...]:
    """Return the strides of a tensor in elements, with stride 1 for dimensions of size 1.

    Tensors with no recorded strides or with no elements get contiguous strides.
    """
    if stored.strides is not None and 0 not in stored.shape:
        pairs = zip(stored.shape, stored.strides, strict=True)
        return tuple(stride if size > 1 else 1 for size, stride in pairs)
    strides, step = [], 1
    for size in reversed(stored.shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def build_device(record: Inert, _: NestedBuilder) -> object:
    """Create a ``torch.device`` from its type and its optional index."""
    kind, *index = get_arguments(record, 1, 2)
    if not _DEVICE.fullmatch(check_str(record, kind)):
        raise malformed_record_error(record, "its kind is invalid")
    try:
        return torch.device(str(kind), *(check_int(record, number, 0, 128) for number in index))
    except RuntimeError as error:
        raise malformed_record_error(record, str(error).partition("\n")[0]) from None


def build_layout(record: Inert, _: NestedBuilder) -> object:
    """Look up a ``torch.layout`` by name."""
    (name,) = get_arguments(record, 1)
    layout = getattr(torch, check_str(record, name).removeprefix("torch."), None)
    if not isinstance(layout, torch.layout):
        raise malformed_record_error(record, "its name is invalid")
    return layout


def build_parameter(record: Inert, make: NestedBuilder) -> object:
    """Create a ``torch.nn.Parameter`` from a tensor, ignoring any pickled hooks."""
    data, grad, *_hooks = get_arguments(record, 3)
    tensor = make(data)
    if not isinstance(tensor, torch.Tensor) or type(grad) is not bool:
        raise malformed_record_error(record, "it does not wrap a tensor")
    if grad and not (tensor.is_floating_point() or tensor.is_complex()):
        raise malformed_record_error(record, f"{tensor.dtype} cannot have a gradient")
    return torch.nn.Parameter(tensor, grad)


def reject_subclass(_: Inert, __: NestedBuilder) -> object:
    """Raise an error, because the tensor is of a subclass or has extra attributes."""
    raise malformed_record_error("torch.Tensor", "it is a subclass, or has extra attributes")


TORCH_BUILDERS: dict[Global, RecordBuilder] = {
    Global("torch._tensor", "_rebuild_from_type_v2"): reject_subclass,
    Global("torch", "device"): build_device,
    Global("torch.serialization", "_get_layout"): build_layout,
    Global("torch._utils", "_rebuild_parameter"): build_parameter,
}
