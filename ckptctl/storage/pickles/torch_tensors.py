"""Tensors as ``torch.save`` pickles describe them, checked against the storage that they declare.

Sources: ``torch/_utils.py`` (``_rebuild_*``), ``torch/storage.py``. Nothing here believes a number
of the file: a tensor's elements must lie inside the storage that the pickle declares; whoever
places that storage must compare it with the bytes that exist.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from ckptctl import dtypes
from ckptctl.errors import DamagedError, FormatError
from ckptctl.storage.pickles.inert import Global, Size

MAX_RANK = 64
MAX_INT = 1 << 63


@dataclass(frozen=True, slots=True)
class TensorView:
    """A tensor as its pickle describes it, relative to its storage.

    Attributes:
        dtype: torch's name.
        shape: Sizes.
        strides: In elements; None when the elements lie in row-major order without gaps.
        offset: Bytes from the start of the storage to the first element.
        nbytes: Bytes from the first element to the last one, both included; 0: no elements.
        storage: Key of the storage.
        storage_nbytes: Declared size of the storage.
        requires_grad: What the checkpoint records.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    offset: int
    nbytes: int
    storage: str
    storage_nbytes: int
    requires_grad: bool


class StorageRef:
    """A storage as its persistent id declares it.

    Attributes:
        key: Name of its record.
        dtype: Element type of a typed storage; bytes are ``uint8``.
        nbytes: Declared size.
    """

    __slots__ = ("dtype", "key", "nbytes")

    def __init__(self, key: str, dtype: str, nbytes: int) -> None:
        self.key = key
        self.dtype = dtype
        self.nbytes = nbytes

    def place(self, view: TensorView) -> object:
        """Return what stands for a tensor over this storage; subclasses know where it lies."""
        return view


def storage_id(pid: object) -> tuple[str, str, int]:
    """Return key, dtype and bytes of the persistent id ``("storage", class, key, place, numel)``.

    Raises:
        DamagedError: It is not one.
        FormatError: The storage is of a kind that is not supported, as quantised ones.
    """
    if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage":
        raise DamagedError("malformed storage", why="a persistent id is not a storage")
    _, kind, key, _, numel = pid
    if type(kind) is not Global or type(key) is not str or not _is_size(numel):
        raise DamagedError("malformed storage", why="its class, key or size is not one")
    if kind.name == "UntypedStorage":
        return key, "uint8", numel
    found = dtypes.BY_STORAGE.get(kind.name)
    if found is None:
        raise FormatError(
            f"storages of class `{kind.name}` are not supported", why=f"storage {key}"
        )
    return key, found.name, numel * found.itemsize


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < MAX_INT


def _sizes(value: object) -> tuple[int, ...]:
    if type(value) not in (tuple, Size) or len(value) > MAX_RANK:  # type: ignore[arg-type]
        raise DamagedError("malformed tensor", why="its shape is not a tuple of at most 64 sizes")
    for item in value:  # type: ignore[attr-defined]
        if item.__class__ is not int or not 0 <= item < MAX_INT:
            raise DamagedError("malformed tensor", why="a size or stride is not one")
    return tuple(value)  # type: ignore[arg-type]


@lru_cache(maxsize=4096)
def geometry(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int, bool]:
    """Return how many elements there are, how many they span, and whether in row-major order."""
    numel = math.prod(shape)
    if numel == 0:
        return 0, 0, True
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return numel, span, False
        expected *= size
    return numel, span, True


def _view(
    storage: object, offset: object, size: object, stride: object, grad: object, dtype: str | None
) -> object:
    shape, strides = _sizes(size), _sizes(stride)
    if not isinstance(storage, StorageRef) or not _is_size(offset) or type(grad) is not bool:
        raise DamagedError("malformed tensor", why="its storage, offset or flag is not one")
    if len(shape) != len(strides):
        raise DamagedError("malformed tensor", why=f"{len(shape)} sizes, {len(strides)} strides")
    dtype = dtype or storage.dtype
    itemsize = dtypes.itemsize(dtype)
    numel, span, row_major = geometry(shape, strides)
    start = offset * itemsize  # type: ignore[operator]
    where = f"storage {storage.key}"
    if start + span * itemsize > storage.nbytes:
        raise DamagedError(
            "a tensor reaches beyond its storage",
            why=f"shape {list(shape)}, strides {list(strides)}, offset {offset} need"
            f" {start + span * itemsize:,} bytes, {where} has {storage.nbytes:,}",
        )
    if numel * itemsize > storage.nbytes:
        raise DamagedError(
            "a tensor is larger than its storage",
            why=f"shape {list(shape)} with strides {list(strides)} repeats the elements of {where}",
            hint="save `tensor.contiguous()` instead of an expanded view",
        )
    return storage.place(
        TensorView(
            dtype,
            shape,
            None if row_major else strides,
            start,
            span * itemsize,
            storage.key,
            storage.nbytes,
            grad,
        )
    )


def _check_flags(metadata: object) -> None:
    if metadata is not None and not isinstance(metadata, dict):
        raise DamagedError("malformed tensor", why="its metadata is not a dict")
    flags = [str(name) for name, value in (metadata or {}).items() if value]
    if flags:
        raise FormatError(
            f"tensors with the {' and '.join(flags)} flag are not supported",
            hint="save `tensor.resolve_conj().resolve_neg()`",
        )


def _rebuild_tensor(storage: object, offset: object, size: object, stride: object) -> object:
    return _view(storage, offset, size, stride, False, None)


def _rebuild_tensor_v2(
    storage: object,
    offset: object,
    size: object,
    stride: object,
    grad: object,
    _hooks: object,
    metadata: object = None,
) -> object:
    if metadata is not None:
        _check_flags(metadata)
    return _view(storage, offset, size, stride, grad, None)


def _rebuild_tensor_v3(
    storage: object,
    offset: object,
    size: object,
    stride: object,
    grad: object,
    _hooks: object,
    dtype: object,
    metadata: object = None,
) -> object:
    _check_flags(metadata)
    if type(dtype) is not Global or dtype.module != "torch":
        raise DamagedError("malformed tensor", why="its dtype is not one")
    if dtype.name not in dtypes.BY_NAME:
        raise FormatError(f"tensors of dtype `{dtype.name}` are not supported")
    return _view(storage, offset, size, stride, grad, dtype.name)


def _rebuild_parameter(data: object, grad: object, _hooks: object, _state: object = None) -> object:
    if type(grad) is not bool or not hasattr(data, "requires_grad"):
        raise DamagedError("malformed parameter", why="it does not wrap a tensor")
    return replace(data, requires_grad=grad)  # type: ignore[type-var]


REBUILDERS: dict[str, Callable[..., object]] = {
    "_rebuild_tensor": _rebuild_tensor,
    "_rebuild_tensor_v2": _rebuild_tensor_v2,
    "_rebuild_tensor_v3": _rebuild_tensor_v3,
    "_rebuild_parameter": _rebuild_parameter,
    "_rebuild_parameter_with_state": _rebuild_parameter,
}
"""What makes tensors, by its name in ``torch._utils``."""
