"""Writer of protocol 2 pickles, which torch also writes and its weights-only reader accepts.

The output is identical to that of the C pickler (``Modules/_pickle.c``), except that equal strings
are shared even if they are different objects.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from ckptctl import dtypes
from ckptctl.errors import RefusedError
from ckptctl.storage.pickles.inert import Builder, DictRecord, Global, Inert, Size

BATCH_ITEMS = 1000
_PYTHON2_MODULES = {"builtins": "__builtin__", "copyreg": "copy_reg"}
_UINT = struct.Struct("<I").pack
_INT = struct.Struct("<i").pack
_DOUBLE = struct.Struct(">d").pack
_BININT1 = tuple(b"K" + bytes((value,)) for value in range(256))
_BINPUT = tuple(b"q" + bytes((index,)) for index in range(256))
_BINGET = tuple(b"h" + bytes((index,)) for index in range(256))
_ORDERED = Global("collections", "OrderedDict")
_UNTYPED = Global("torch.storage", "UntypedStorage")
_V2 = Global("torch._utils", "_rebuild_tensor_v2")
_V3 = Global("torch._utils", "_rebuild_tensor_v3")
_PARAMETER = Global("torch._utils", "_rebuild_parameter")
_TYPED = {
    name: Global("torch", dtype_info.storage or "") for name, dtype_info in dtypes.BY_NAME.items()
}


@dataclass(frozen=True, slots=True, eq=False)
class StorageTensor:
    """Tensor to pickle as a view of a storage in the same ``torch.save`` zip.

    If the same object occurs twice in the pickled object, torch loads one shared tensor.

    Attributes:
        storage_key: Name of the storage's record below ``data/``.
        storage_nbytes: Size of the storage in bytes.
        dtype: Dtype, by its torch name.
        offset: Offset in the storage of the first element, in elements.
        shape: Shape of the tensor.
        strides: Strides in elements.
        requires_grad: Whether the loaded tensor requires gradients.
    """

    storage_key: str
    storage_nbytes: int
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool = False


def dump_pickle(obj: object) -> bytes:
    """Serialize *obj*, which may contain inert objects, to a pickle.

    Raises:
        RefusedError: A value cannot be written, or *obj* is nested too deeply.
    """
    writer = _PickleWriter()
    try:
        writer.write_object(obj)
    except RecursionError as error:
        raise RefusedError("the object is nested too deeply to be written") from error
    return b"\x80\x02" + writer.out + b"."


class _PickleWriter:
    """Writer of one pickle, which writes each object with the method in ``_HANDLERS``."""

    __slots__ = ("emit", "globals", "kept", "objects", "out", "size", "strings")

    def __init__(self) -> None:
        self.out = bytearray()
        self.emit = self.out.extend
        self.size = 0
        """Number of entries in the memo."""
        self.strings: dict[str, int] = {}
        self.globals: dict[Global, int] = {}
        self.objects: dict[int, int] = {}
        """Memo index of each container, by identity."""
        self.kept: list[object] = []
        """Temporary containers, kept alive so that their ids are not reused."""

    def add_to_memo(self) -> int:
        """Add the last written object to the memo and return its memo index."""
        index = self.size
        self.size = index + 1
        self.emit(_BINPUT[index] if index < 256 else b"r" + _UINT(index))
        return index

    def write_reference(self, index: int) -> None:
        """Write a reference to the memo entry *index*."""
        self.emit(_BINGET[index] if index < 256 else b"j" + _UINT(index))

    def write_string(self, text: str) -> None:
        """Write a string, or a reference if an equal string has already been written."""
        index = self.strings.get(text)
        if index is not None:
            self.write_reference(index)
            return
        raw = text.encode("utf-8", "surrogatepass")
        self.emit(b"X" + _UINT(len(raw)) + raw)
        self.strings[text] = self.add_to_memo()

    def write_integer(self, value: int) -> None:
        """Write an integer with the shortest possible opcode."""
        if 0 <= value < 256:
            self.emit(_BININT1[value])
        elif 0 <= value < 65536:
            self.emit(b"M" + value.to_bytes(2, "little"))
        elif -(1 << 31) <= value < 1 << 31:
            self.emit(b"J" + _INT(value))
        else:
            raw = _encode_long(value)
            small = len(raw) < 256
            self.emit((b"\x8a" + bytes((len(raw),)) if small else b"\x8b" + _UINT(len(raw))) + raw)

    def write_bool(self, value: bool) -> None:
        """Write True or False."""
        self.emit(b"\x88" if value else b"\x89")

    def write_none(self, _: None) -> None:
        """Write None."""
        self.emit(b"N")

    def write_float(self, value: float) -> None:
        """Write a float."""
        self.emit(b"G" + _DOUBLE(value))

    def write_global(self, global_name: Global) -> None:
        """Write a global, or a reference if the same global has already been written."""
        index = self.globals.get(global_name)
        if index is not None:
            self.write_reference(index)
            return
        module = _PYTHON2_MODULES.get(global_name.module, global_name.module)
        if "\n" in module + global_name.name:
            raise RefusedError("a global with a line break in its name cannot be written")
        self.emit(f"c{module}\n{global_name.name}\n".encode())
        self.globals[global_name] = self.add_to_memo()

    def write_object(self, obj: object) -> None:
        """Write an object with the handler for its class."""
        handler = _HANDLERS.get(obj.__class__)
        if handler is None:
            handler = _PickleWriter.write_inert if isinstance(obj, Inert) else _reject_object
        handler(self, obj)

    def write_if_known(self, obj: object) -> bool:
        """Write a reference to *obj* if it was already written, and return whether it was."""
        index = self.objects.get(id(obj))
        if index is None:
            return False
        self.write_reference(index)
        return True

    def write_builder(self, builder: Builder) -> None:
        if builder.source is None:
            raise RefusedError("a table entry without a name cannot be written")
        self.write_global(builder.source)

    def write_new_tuple(self, items: Sequence[object]) -> None:
        """Write a tuple to which no later object refers."""
        count = len(items)
        if not count:
            self.emit(b")")
            return
        if count > 3:
            self.emit(b"(")
        for item in items:
            self.write_object(item)
        self.emit((b"\x85", b"\x86", b"\x87")[count - 1] if count <= 3 else b"t")
        self.add_to_memo()

    def write_tuple(self, items: tuple[object, ...]) -> None:
        if items and self.write_if_known(items):
            return
        self.write_new_tuple(items)
        if items:
            self.objects[id(items)] = self.size - 1

    def write_list(self, items: list[object]) -> None:
        if self.write_if_known(items):
            return
        self.emit(b"]")
        self.objects[id(items)] = self.add_to_memo()
        self.write_appends(items)

    def write_appends(self, items: Sequence[object]) -> None:
        if len(items) == 1:
            self.write_object(items[0])
            self.emit(b"a")
            return
        for start in range(0, len(items), BATCH_ITEMS):
            self.emit(b"(")
            for item in items[start : start + BATCH_ITEMS]:
                self.write_object(item)
            self.emit(b"e")

    def write_dict(self, obj: dict[object, object]) -> None:
        if self.write_if_known(obj):
            return
        self.emit(b"}")
        self.objects[id(obj)] = self.add_to_memo()
        self.write_setitems(obj.items())

    def write_setitems(self, items: Iterable[tuple[object, object]]) -> None:
        remaining, save = iter(items), self.write_object
        while batch := tuple(islice(remaining, BATCH_ITEMS)):
            if len(batch) > 1:
                self.emit(b"(")
            for key, value in batch:
                save(key)
                save(value)
            self.emit(b"u" if len(batch) > 1 else b"s")

    def write_call(
        self, obj: object, target: Global, args: tuple[object, ...], op: bytes = b"R"
    ) -> None:
        """Write a call of *target* with opcode *op*, and add its result *obj* to the memo."""
        self.write_global(target)
        self.write_tuple(args)
        self.emit(op)
        self.objects[id(obj)] = self.add_to_memo()

    def write_temporary_call(self, obj: object, target: Global, args: tuple[object, ...]) -> None:
        """Write a call (see :meth:`write_call`), and keep its temporary arguments alive.

        The memo contains the ids of the arguments, which must not be reused.
        """
        if self.write_if_known(obj):
            return
        self.kept.append((obj, args))
        self.write_call(obj, target, args)

    def write_inert(self, obj: object) -> None:
        if self.write_if_known(obj):
            return
        assert isinstance(obj, Inert)
        op = b"\x81" if obj.newobj else b"R"
        self.write_call(obj, Global(obj.module, obj.name), obj.args, op)
        if obj.appended is not None:
            self.write_appends(obj.appended)
        if obj.entries is not None:
            self.write_setitems(obj.entries)
        if obj.state is not None:
            self.write_object(obj.state)
            self.emit(b"b")

    def write_dict_record(self, obj: DictRecord) -> None:
        if self.write_if_known(obj):
            return
        self.write_call(obj, obj.origin, obj.args)
        self.write_setitems(obj.items())
        if obj.state is not None:
            self.write_object(obj.state)
            self.emit(b"b")

    def write_ordered_dict(self, obj: OrderedDict[object, object]) -> None:
        if self.write_if_known(obj):
            return
        self.write_call(obj, _ORDERED, ())
        self.write_setitems(obj.items())

    def write_bytes(self, value: bytes) -> None:
        target, args = Global("_codecs", "encode"), (value.decode("latin1"), "latin1")
        if not value:
            self.write_temporary_call(value, Global("builtins", "bytes"), ())
        else:
            self.write_temporary_call(value, target, args)

    def write_tensor(self, obj: StorageTensor) -> None:
        """Write a tensor as ``Tensor.__reduce_ex__`` does, with the persistent id of its storage.

        torch cannot load a tensor that requires a gradient if its dtype has no typed storage.
        Therefore such a tensor is written as a parameter.
        """
        if self.write_if_known(obj):
            return
        typed = _TYPED[obj.dtype]
        parameter = obj.requires_grad and not typed.name
        if parameter:
            self.write_global(_PARAMETER)
        numel = obj.storage_nbytes // (dtypes.get_itemsize(obj.dtype) if typed.name else 1)
        emit, string = self.emit, self.write_string
        self.write_global(_V2 if typed.name else _V3)
        emit(b"((")
        string("storage")
        self.write_global(typed if typed.name else _UNTYPED)
        string(obj.storage_key)
        string("cpu")
        self.write_integer(numel)
        emit(b"t")
        self.add_to_memo()
        emit(b"Q")
        self.write_integer(obj.offset)
        self.write_new_tuple(obj.shape)
        self.write_new_tuple(obj.strides)
        emit(b"\x88" if obj.requires_grad and not parameter else b"\x89")
        self.write_no_hooks()
        if not typed.name:
            self.write_global(Global("torch", obj.dtype))
        emit(b"t")
        self.add_to_memo()
        emit(b"R")
        if parameter:
            self.add_to_memo()
            emit(b"\x88")
            self.write_no_hooks()
            emit(b"\x87")
            self.add_to_memo()
            emit(b"R")
        self.objects[id(obj)] = self.add_to_memo()

    def write_no_hooks(self) -> None:
        self.write_global(_ORDERED)
        self.emit(b")R")
        self.add_to_memo()


def _encode_long(value: int) -> bytes:
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if len(raw) > 1 and value < 0 and raw[-1] == 0xFF and raw[-2] & 0x80:
        return raw[:-1]
    return raw


def _reject_object(_writer: _PickleWriter, obj: object) -> None:
    object_type = type(obj)
    raise RefusedError(
        f"a value of type `{object_type.__module__}.{object_type.__qualname__}` cannot be written",
        hint="store only tensors, numbers, strings and containers of them",
    )


def _build_call_writer(
    name: str, get_call_args: Callable[..., tuple[object, ...]]
) -> Callable[..., None]:
    target = Global("builtins", name)

    def write_value(writer: _PickleWriter, obj: object) -> None:
        writer.write_temporary_call(obj, target, get_call_args(obj))

    return write_value


def _sort_members(items: Iterable[object]) -> list[object]:
    """Sort the members of a set in an order that does not depend on the process."""
    return sorted(items, key=lambda item: (type(item).__name__, repr(item)))


def _write_size(writer: _PickleWriter, value: Size) -> None:
    writer.write_temporary_call(value, Global("torch", "Size"), (tuple(value),))


_HANDLERS: dict[type, Callable[..., None]] = {
    str: _PickleWriter.write_string,
    int: _PickleWriter.write_integer,
    bool: _PickleWriter.write_bool,
    type(None): _PickleWriter.write_none,
    float: _PickleWriter.write_float,
    tuple: _PickleWriter.write_tuple,
    list: _PickleWriter.write_list,
    dict: _PickleWriter.write_dict,
    bytes: _PickleWriter.write_bytes,
    OrderedDict: _PickleWriter.write_ordered_dict,
    DictRecord: _PickleWriter.write_dict_record,
    Inert: _PickleWriter.write_inert,
    Global: _PickleWriter.write_global,
    Builder: _PickleWriter.write_builder,
    StorageTensor: _PickleWriter.write_tensor,
    complex: _build_call_writer("complex", lambda value: (value.real, value.imag)),
    bytearray: _build_call_writer("bytearray", lambda value: (bytes(value),)),
    slice: _build_call_writer("slice", lambda value: (value.start, value.stop, value.step)),
    set: _build_call_writer("set", lambda value: (_sort_members(value),)),
    frozenset: _build_call_writer("frozenset", lambda value: (_sort_members(value),)),
    Size: _write_size,
}
