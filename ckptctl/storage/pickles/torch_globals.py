"""Globals that pickles of ``torch.save`` may reference, and their replacements.

Source: ``torch/_weights_only_unpickler.py`` (what torch itself allows).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePosixPath

from ckptctl import dtypes
from ckptctl.errors import UnsupportedError
from ckptctl.storage.pickles.inert import Builder, DictRecord, Global, Inert, Size
from ckptctl.storage.pickles.torch_tensors import REBUILDERS

_REBUILT = frozenset(Global("torch._utils", name) for name in REBUILDERS)
_PLAIN_CLASSES = frozenset(
    {
        Global("torch", "Tensor"),
        Global("torch.nn.parameter", "Parameter"),
        Global("torch.nn.parameter", "Buffer"),
    }
)


def _rebuild_from_type(fn: object, kind: object, args: object, attributes: object) -> object:
    """Rebuild a regular tensor without its Python attributes, which contain no elements.

    Instances of tensor subclasses become inert records. They are only accepted if unknown globals
    are allowed.
    """
    is_regular = type(kind) is Global and kind in _PLAIN_CLASSES
    if is_regular and isinstance(fn, Builder) and fn.source in _REBUILT:
        if type(args) is not tuple:
            raise UnsupportedError("malformed tensor", why="the arguments are not a tuple")
        return fn.fn(*args)
    return Inert("torch._tensor", "_rebuild_from_type_v2", (fn, kind, args, attributes))


def _encode_text(text: object, encoding: object = "utf-8") -> bytes:
    if type(text) is not str or encoding not in ("latin1", "latin-1", "utf-8"):
        raise UnsupportedError(
            "malformed bytes", why="only the encodings latin1 and utf-8 are supported"
        )
    return text.encode(encoding)


def _require_bytes(data: object = b"") -> bytes:
    if type(data) is not bytes:
        raise UnsupportedError("malformed bytes", why="the argument is not a bytes object")
    return data


def _build_bytearray(data: object = b"", encoding: object = None) -> bytearray:
    return bytearray(_require_bytes(data) if encoding is None else _encode_text(data, encoding))


def _build_complex(real: object, imaginary: object = 0.0) -> complex:
    if type(real) not in (int, float) or type(imaginary) not in (int, float):
        raise UnsupportedError("malformed complex number", why="a component is not a number")
    return complex(real, imaginary)  # type: ignore[call-overload,no-any-return]


def _list_members(items: object = ()) -> list[object]:
    if type(items) not in (list, tuple, set, frozenset):
        raise UnsupportedError("malformed set", why="the argument is not a list")
    return list(items)  # type: ignore[call-overload,no-any-return]


def _build_path(*parts: object) -> str:
    if any(type(part) is not str for part in parts):
        raise UnsupportedError("malformed path", why="a component is not a string")
    return str(PurePosixPath(*parts))  # type: ignore[arg-type]


def _build_ordered_dict() -> DictRecord:
    return DictRecord(_ORDERED)


def _build_defaultdict(*factory: object) -> DictRecord:
    if len(factory) > 1 or (factory and type(factory[0]) not in (Global, Builder, type(None))):
        raise UnsupportedError("malformed defaultdict", why="the default factory is not a class")
    return DictRecord(_DEFAULT, factory)


_ORDERED = Global("collections", "OrderedDict")
_DEFAULT = Global("collections", "defaultdict")

_BUILDERS: dict[str, dict[str, Callable[..., object]]] = {
    "torch._utils": {**REBUILDERS},
    "torch._tensor": {"_rebuild_from_type_v2": _rebuild_from_type},
    "torch": {"Size": Size},
    "_codecs": {"encode": _encode_text},
    "builtins": {
        "bytes": _require_bytes,
        "bytearray": _build_bytearray,
        "complex": _build_complex,
        "slice": slice,
        "set": lambda items=(): set(_list_members(items)),
        "frozenset": lambda items=(): frozenset(_list_members(items)),
    },
    "collections": {"OrderedDict": _build_ordered_dict, "defaultdict": _build_defaultdict},
    **{
        module: dict.fromkeys(("Path", "PosixPath", "PurePath", "PurePosixPath", "WindowsPath",
                               "PureWindowsPath"), _build_path)
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


def _name_attribute(owner: object, name: object) -> Global | Inert:
    if type(owner) is Global and type(name) is str and name.isidentifier():
        return Global(owner.module, f"{owner.name}.{name}")
    return Inert(*GETATTR, (owner, name))


GETATTR = ("builtins", "getattr")
ATTRIBUTES: dict[tuple[str, str], object] = {
    GETATTR: Builder(_name_attribute, source=Global(*GETATTR))
}
"""Replacement of ``getattr``, which returns the names of nested classes and enum members.

Protocols before 4 write nested classes as ``getattr(owner, name)``. Python 3.11.0 to 3.11.3 also
writes enum members this way in every protocol (CPython, ``Enum.__reduce_ex__``).
"""
