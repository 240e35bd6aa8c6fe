"""The globals that a ``torch.save`` pickle and a harmless leaf may name, and what stands for each.

Sources: ``torch/_utils.py`` (``_rebuild_*``), ``torch/_weights_only_unpickler.py`` (what torch
itself allows), ``torch/storage.py``. Nothing here believes a number of the file: a tensor's
elements must lie inside the storage that the pickle declares, whoever places that storage must
compare it with the bytes that exist.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import PurePosixPath

from ckptctl import dtypes
from ckptctl.errors import DamagedError, FormatError
from ckptctl.storage.inert import Builder, DictRecord, Global, Inert, Size

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


_TENSORS: dict[str, Callable[..., object]] = {
    "_rebuild_tensor": _rebuild_tensor,
    "_rebuild_tensor_v2": _rebuild_tensor_v2,
    "_rebuild_tensor_v3": _rebuild_tensor_v3,
    "_rebuild_parameter": _rebuild_parameter,
    "_rebuild_parameter_with_state": _rebuild_parameter,
}
_PLAIN_CLASSES = frozenset(
    {
        Global("torch", "Tensor"),
        Global("torch.nn.parameter", "Parameter"),
        Global("torch.nn.parameter", "Buffer"),
    }
)


def _rebuild_from_type(fn: object, kind: object, args: object, attributes: object) -> object:
    """Drop the Python attributes of a plain tensor: they are not data.

    Subclasses, which only get here when unknown globals are let pass, stay records.
    """
    plain = type(kind) is Global and kind in _PLAIN_CLASSES
    if plain and type(fn) is Builder and fn.fn in _TENSORS.values():
        if type(args) is not tuple:
            raise DamagedError("malformed tensor", why="its arguments are not a tuple")
        return fn.fn(*args)
    return Inert("torch._tensor", "_rebuild_from_type_v2", (fn, kind, args, attributes))


def _encode(text: object, encoding: object = "utf-8") -> bytes:
    if type(text) is not str or encoding not in ("latin1", "latin-1", "utf-8"):
        raise DamagedError("malformed bytes", why="only latin1 and utf-8 text is encoded")
    return text.encode(encoding)


def _bytes(data: object = b"") -> bytes:
    if type(data) is not bytes:
        raise DamagedError("malformed bytes", why="they are not made from bytes")
    return data


def _bytearray(data: object = b"", encoding: object = None) -> bytearray:
    return bytearray(_bytes(data) if encoding is None else _encode(data, encoding))


def _complex(real: object, imaginary: object = 0.0) -> complex:
    if type(real) not in (int, float) or type(imaginary) not in (int, float):
        raise DamagedError("malformed complex number", why="a part is not a number")
    return complex(real, imaginary)  # type: ignore[call-overload,no-any-return]


def _members(items: object = ()) -> list[object]:
    if type(items) not in (list, tuple, set, frozenset):
        raise DamagedError("malformed set", why="it is not made from a list")
    return list(items)  # type: ignore[call-overload,no-any-return]


def _path(*parts: object) -> str:
    if any(type(part) is not str for part in parts):
        raise DamagedError("malformed path", why="a part is not a string")
    return str(PurePosixPath(*parts))  # type: ignore[arg-type]


def _ordered() -> DictRecord:
    return DictRecord(_ORDERED)


def _defaultdict(*factory: object) -> DictRecord:
    if len(factory) > 1 or (factory and type(factory[0]) not in (Global, Builder, type(None))):
        raise DamagedError("malformed defaultdict", why="its factory is not a class")
    return DictRecord(_DEFAULT, factory)


def _unsupported(kind: str) -> Callable[..., object]:
    def refuse(*_args: object) -> object:
        raise FormatError(f"{kind} tensors are not supported")

    return refuse


_ORDERED = Global("collections", "OrderedDict")
_DEFAULT = Global("collections", "defaultdict")

_BUILDERS: dict[str, dict[str, Callable[..., object]]] = {
    "torch._utils": {
        **_TENSORS,
        "_rebuild_sparse_tensor": _unsupported("sparse"),
        "_rebuild_qtensor": _unsupported("quantised"),
        "_rebuild_nested_tensor": _unsupported("nested"),
        "_rebuild_meta_tensor_no_storage": _unsupported("meta"),
        "_rebuild_wrapper_subclass": _unsupported("wrapper-subclass"),
        "_rebuild_device_tensor_from_numpy": _unsupported("XLA or other device"),
        "_rebuild_device_tensor_from_cpu_tensor": _unsupported("XLA or other device"),
    },
    "torch._tensor": {"_rebuild_from_type_v2": _rebuild_from_type},
    "torch": {"Size": Size},
    "_codecs": {"encode": _encode},
    "builtins": {
        "bytes": _bytes,
        "bytearray": _bytearray,
        "complex": _complex,
        "slice": slice,
        "set": lambda items=(): set(_members(items)),
        "frozenset": lambda items=(): frozenset(_members(items)),
    },
    "collections": {"OrderedDict": _ordered, "defaultdict": _defaultdict},
    **{
        module: dict.fromkeys(("Path", "PosixPath", "PurePath", "PurePosixPath", "WindowsPath",
                               "PureWindowsPath"), _path)
        for module in ("pathlib", "pathlib._local")
    },
}  # fmt: skip

_STORAGES = (
    *dtypes.BY_STORAGE,
    *("QInt8Storage", "QUInt8Storage", "QInt32Storage", "QUInt4x2Storage", "QUInt2x4Storage"),
    "UntypedStorage",
)
_TORCH_NAMES = (
    *dtypes.BY_NAME,
    *("quint8", "qint8", "qint32", "quint4x2", "quint2x4"),
    *("bits1x8", "bits2x4", "bits4x2", "bits8", "bits16"),
    *(f"{sign}int{width}" for sign in ("", "u") for width in range(1, 8)),
    *("per_tensor_affine", "per_channel_affine"),
    *("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged"),
    *("contiguous_format", "preserve_format", "channels_last", "channels_last_3d"),
    *("device", "memory_format", "layout", "dtype", "Tensor"),
    *_STORAGES,
)
_NUMPY_DTYPES = (
    *("Bool", "Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64"),
    *("Float16", "Float32", "Float64", "Complex64", "Complex128", "Str", "Bytes", "Object"),
)
_NAMES: dict[str, tuple[str, ...]] = {
    "torch": _TORCH_NAMES,
    "torch.cuda": _STORAGES,
    "torch.storage": _STORAGES,
    "torch._tensor": ("Tensor",),
    "torch.serialization": ("_get_layout",),
    "torch.nn.parameter": ("Parameter", "Buffer"),
    "builtins": ("list", "dict", "int", "float", "str", "bool", "tuple", "object", "range"),
    "collections": ("Counter", "deque"),
    "datetime": ("datetime", "date", "time", "timedelta", "timezone"),
    "decimal": ("Decimal",),
    "uuid": ("UUID", "SafeUUID"),
    "argparse": ("Namespace",),
    "types": ("SimpleNamespace",),
    "_io": ("BytesIO", "StringIO"),
    "numpy": ("ndarray", "dtype", *(name.lower() for name in _NUMPY_DTYPES)),
    "numpy.dtypes": tuple(f"{name}DType" for name in _NUMPY_DTYPES),
    "numpy.core.multiarray": ("scalar", "_reconstruct"),
    "numpy._core.multiarray": ("scalar", "_reconstruct"),
    "numpy._core.numeric": ("_frombuffer",),
    "numpy.core.numeric": ("_frombuffer",),
}

TORCH_TABLE: dict[tuple[str, str], object] = {
    (module, name): Global(module, name) for module, names in _NAMES.items() for name in names
} | {
    (module, name): Builder(fn, name in ("set", "frozenset"), Global(module, name))
    for module, builders in _BUILDERS.items()
    for name, fn in builders.items()
}
