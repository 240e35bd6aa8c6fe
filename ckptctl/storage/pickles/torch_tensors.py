"""Tensors described by ``torch.save`` pickles, checked against their declared storages.

Sources: ``torch/_utils.py`` (``_rebuild_*``), ``torch/storage.py``. No number in the
pickle is trusted. The elements of a tensor must be inside the storage that the pickle declares, and
the code that locates the storage must compare the declared size with the actual bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from ckptctl import dtypes
from ckptctl.errors import UnsupportedError
from ckptctl.storage.pickles.inert import Global, Size
from ckptctl.units import pluralize

MAX_RANK = 64
MAX_INT = 1 << 63


QUANTIZED = {
    "QInt8Storage": ("qint8", 1),
    "QUInt8Storage": ("quint8", 1),
    "QInt32Storage": ("qint32", 4),
    "QUInt4x2Storage": ("quint4x2", 1),
    "QUInt2x4Storage": ("quint2x4", 1),
}
"""Torch dtype and element size in bytes of quantized storages, which are not supported."""
MAX_EXPANDED_BYTES = 1 << 40
"""Maximum size in bytes of an expanded view, which repeats the elements of its storage."""
DERIVED_FLAGS = frozenset({"conj", "neg"})
"""Flags of views whose elements are conjugates or negatives of the elements of the storage."""
_FLAGGED_DTYPES = frozenset(
    {"complex32", "complex64", "complex128", "float16", "float32", "float64"}
)
"""Dtypes that views with :data:`DERIVED_FLAGS` can have, including real parts of complex ones."""


class UnreadableTensorError(UnsupportedError):
    """The elements of a tensor cannot be read.

    Args:
        reason: Kind of tensor, such as "sparse", for the message.
        dtype: Dtype, by its torch name.
        shape: Shape of the tensor.
        base: The same tensor without *flags*, or None if it is not supported for another reason.
        flags: Flags of the view that are not supported, by their torch names.
    """

    def __init__(
        self,
        reason: str,
        dtype: object = "unknown",
        shape: object = (),
        base: object = None,
        flags: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(f"{reason} tensors are not supported")
        self.reason = reason
        self.dtype = dtype.name if isinstance(dtype, Global) else str(dtype)
        self.shape = _parse_sizes(shape)
        self.base = base
        self.flags = flags

    @property
    def unsupported_message(self) -> str:
        """Message that explains why the tensor is not supported."""
        return f"{self.reason} tensors are not supported"


@dataclass(frozen=True, slots=True)
class TensorView:
    """Tensor that a pickle describes as a view of a storage.

    Attributes:
        dtype: Dtype, by its torch name.
        shape: Shape of the tensor.
        strides: Strides in elements, or None if the tensor is contiguous.
        offset: Offset of the first element in the storage, in bytes.
        nbytes: Bytes from the start of the first to the end of the last element, 0 if empty.
        storage: Key of the storage.
        storage_nbytes: Declared size of the storage in bytes.
        requires_grad: Recorded value of ``requires_grad``.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    offset: int
    nbytes: int
    storage: str
    storage_nbytes: int
    requires_grad: bool


@dataclass(slots=True, eq=False)
class StorageRef:
    """Storage that a persistent id of a pickle declares.

    Attributes:
        key: Name of the storage's record in the zip.
        dtype: Dtype of a typed storage, or ``uint8`` for an untyped storage.
        nbytes: Declared size in bytes.
        build_tensor: Converts a view of the storage to the tensor that the reader returns.
    """

    key: str
    dtype: str
    nbytes: int
    build_tensor: Callable[[TensorView], object] = lambda view: view


def parse_storage_id(pid: object) -> tuple[str, str, int]:
    """Return key, dtype and size in bytes of the storage that a persistent id declares.

    The persistent id is ``("storage", class, key, device, numel)``.
    """
    if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage":
        raise UnsupportedError("malformed storage", why="a persistent id is not a storage")
    _, storage_class, key, _, numel = pid
    if type(storage_class) is not Global or type(key) is not str or not _is_size(numel):
        raise UnsupportedError("malformed storage", why="invalid class, key or size")
    if storage_class.name == "UntypedStorage":
        return key, "uint8", numel
    dtype_info = dtypes.BY_STORAGE.get(storage_class.name)
    if dtype_info is None:
        quantized = QUANTIZED.get(storage_class.name)
        if quantized is None:
            raise UnsupportedError(
                f"storages of class `{storage_class.name}` are not supported", why=f"storage {key}"
            )
        return key, quantized[0], numel * quantized[1]
    return key, dtype_info.name, numel * dtype_info.itemsize


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < MAX_INT


def _parse_sizes(value: object) -> tuple[int, ...]:
    if type(value) not in (tuple, Size) or len(value) > MAX_RANK:  # type: ignore[arg-type]
        raise UnsupportedError(
            "malformed tensor", why="the shape is not a tuple of at most 64 sizes"
        )
    for item in value:  # type: ignore[attr-defined]
        if item.__class__ is not int or not 0 <= item < MAX_INT:
            raise UnsupportedError("malformed tensor", why="invalid size or stride")
    return tuple(value)  # type: ignore[arg-type]


@lru_cache(maxsize=4096)
def compute_layout(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int, bool]:
    """Return the number of elements, their span in the storage, and whether they are contiguous.

    The span is the number of storage elements from the first to the last element, inclusive.
    """
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


def _build_view(
    storage: object,
    offset: object,
    size: object,
    stride: object,
    requires_grad: object,
    dtype: str | None,
) -> object:
    shape, strides = _parse_sizes(size), _parse_sizes(stride)
    if (
        not isinstance(storage, StorageRef)
        or not _is_size(offset)
        or type(requires_grad) is not bool
    ):
        raise UnsupportedError("malformed tensor", why="invalid storage, offset or flag")
    if len(shape) != len(strides):
        raise UnsupportedError(
            "malformed tensor",
            why=f"{pluralize(len(shape), 'size')}, {pluralize(len(strides), 'stride')}",
        )
    dtype = dtype or storage.dtype
    if dtype not in dtypes.BY_NAME:
        raise UnreadableTensorError(f"`{dtype}`", dtype, shape)
    itemsize = dtypes.get_itemsize(dtype)
    numel, span, row_major = compute_layout(shape, strides)
    start = offset * itemsize if numel else 0  # type: ignore[operator]
    where = f"storage {storage.key}"
    if start + span * itemsize > storage.nbytes:
        raise UnsupportedError(
            "a tensor extends beyond its storage",
            why=f"shape {list(shape)}, strides {list(strides)}, offset {offset} need"
            f" {pluralize(start + span * itemsize, 'byte')}, {where} has {storage.nbytes:,}",
        )
    if numel * itemsize > max(storage.nbytes, MAX_EXPANDED_BYTES):
        raise UnreadableTensorError("excessively expanded", dtype, shape)
    return storage.build_tensor(
        TensorView(
            dtype,
            shape,
            None if row_major else strides,
            start,
            span * itemsize,
            storage.key,
            storage.nbytes,
            requires_grad,
        )
    )


def _reject_flags(metadata: object, view: object) -> object:
    """Return *view*, or raise if *metadata* has flags such as ``conj`` that change the elements."""
    if metadata is not None and not isinstance(metadata, dict):
        raise UnsupportedError("malformed tensor", why="the metadata is not a dict")
    flags = frozenset(str(name) for name, value in (metadata or {}).items() if value)
    if flags:
        reason = f"{' and '.join(sorted(flags))} flagged"
        dtype, shape = view.dtype, view.shape  # type: ignore[attr-defined]
        base = view if flags <= DERIVED_FLAGS and dtype in _FLAGGED_DTYPES else None
        raise UnreadableTensorError(reason, dtype, shape, base, flags)
    return view


def _rebuild_tensor(storage: object, offset: object, size: object, stride: object) -> object:
    return _build_view(storage, offset, size, stride, False, None)


def _rebuild_tensor_v2(
    storage: object,
    offset: object,
    size: object,
    stride: object,
    grad: object,
    _hooks: object,
    metadata: object = None,
) -> object:
    view = _build_view(storage, offset, size, stride, grad, None)
    return view if metadata is None else _reject_flags(metadata, view)


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
    if type(dtype) is not Global or dtype.module != "torch":
        raise UnsupportedError("malformed tensor", why="invalid dtype")
    return _reject_flags(metadata, _build_view(storage, offset, size, stride, grad, dtype.name))


def _rebuild_parameter(data: object, grad: object, _hooks: object, _state: object = None) -> object:
    if type(grad) is not bool or not hasattr(data, "requires_grad"):
        raise UnsupportedError("malformed parameter", why="the parameter does not wrap a tensor")
    return replace(data, requires_grad=grad)  # type: ignore[type-var]


def _rebuild_sparse_tensor(_layout: object, data: object) -> object:
    parts = data if type(data) is tuple else ()
    values = next((p for p in reversed(parts[:3]) if hasattr(p, "dtype")), None)
    shape = next((part for part in reversed(parts) if type(part) in (tuple, Size)), ())
    raise UnreadableTensorError("sparse", getattr(values, "dtype", "unknown"), shape)


def _rebuild_qtensor(storage: object, _offset: object, size: object, *_rest: object) -> object:
    raise UnreadableTensorError("quantized", getattr(storage, "dtype", "unknown"), size)


def _rebuild_nested_tensor(buffer: object, *_rest: object) -> object:
    raise UnreadableTensorError("nested", getattr(buffer, "dtype", "unknown"))


def _rebuild_meta_tensor_no_storage(dtype: object, size: object, *_rest: object) -> object:
    raise UnreadableTensorError("meta", dtype, size)


def _rebuild_wrapper_subclass(_kind: object, dtype: object, size: object, *_rest: object) -> object:
    raise UnreadableTensorError("wrapper-subclass", dtype, size)


def _rebuild_device_tensor_from_numpy(_data: object, dtype: object, *_rest: object) -> object:
    raise UnreadableTensorError("XLA or other device", dtype)


def _rebuild_device_tensor_from_cpu_tensor(data: object, *_rest: object) -> object:
    shape = getattr(data, "shape", ())
    raise UnreadableTensorError("XLA or other device", getattr(data, "dtype", "unknown"), shape)


REBUILDERS: dict[str, Callable[..., object]] = {
    "_rebuild_tensor": _rebuild_tensor,
    "_rebuild_tensor_v2": _rebuild_tensor_v2,
    "_rebuild_tensor_v3": _rebuild_tensor_v3,
    "_rebuild_parameter": _rebuild_parameter,
    "_rebuild_parameter_with_state": _rebuild_parameter,
    "_rebuild_sparse_tensor": _rebuild_sparse_tensor,
    "_rebuild_qtensor": _rebuild_qtensor,
    "_rebuild_nested_tensor": _rebuild_nested_tensor,
    "_rebuild_meta_tensor_no_storage": _rebuild_meta_tensor_no_storage,
    "_rebuild_wrapper_subclass": _rebuild_wrapper_subclass,
    "_rebuild_device_tensor_from_numpy": _rebuild_device_tensor_from_numpy,
    "_rebuild_device_tensor_from_cpu_tensor": _rebuild_device_tensor_from_cpu_tensor,
}
"""Functions that rebuild tensors, by their names in ``torch._utils``."""
