"""Reader of non-tensor values that neither runs code of a file nor trusts its contents.

The pickle is parsed to inert records (:mod:`ckptctl.storage.pickles.pickle_reader`). Objects of
known classes are then created by constructors with checked arguments. ``__setstate__`` is never
called, because even harmless classes trust its argument: flags of a numpy dtype can turn bytes into
pointers.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ckptctl import dtypes
from ckptctl.distributed.leaves.numpy_classes import NUMPY_BUILDERS
from ckptctl.distributed.leaves.records import (
    RecordBuilders,
    check_int,
    disallowed_class_error,
    format_class,
    malformed_record_error,
    require_positions,
)
from ckptctl.distributed.leaves.standard_classes import STANDARD_BUILDERS
from ckptctl.distributed.leaves.torch_classes import TORCH_BUILDERS, ZipStorages
from ckptctl.errors import UnsupportedError
from ckptctl.storage.files import MemoryFiles
from ckptctl.storage.pickles.inert import Builder, DictRecord, Global, Inert, Size
from ckptctl.storage.zips.zip_reader import TABLE_WITH_UNREAD_TENSORS, StoredTensor, read_archive

ALL_BUILDERS: RecordBuilders = {**STANDARD_BUILDERS, **NUMPY_BUILDERS, **TORCH_BUILDERS}
CLASS_TABLE = {**TABLE_WITH_UNREAD_TENSORS, **{(key.module, key.name): key for key in ALL_BUILDERS}}
MAX_RECORD_KEYS = 10_000
"""Maximum number of dict keys and set members that are objects.

The limit bounds the time that crafted hash collisions can cost.
"""
SHARED_FACTOR = 4
SHARED_BYTES = 1 << 16
_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray)
_FACTORIES: Mapping[Global, Callable[[], object]] = {
    Global(kind.__module__, kind.__name__): kind
    for kind in (list, dict, int, float, str, bool, tuple, set, frozenset, bytes, OrderedDict)
}


def read_leaf(content: bytes, where: str) -> object:
    """Return the value that ``torch.save`` wrote to the zip archive *content*.

    Raises:
        UnsafePickleError: The value contains an object of a class that is not known to be harmless.
        UnsupportedError: An object of a known class was pickled in a way that this class never
            uses.
        CkptError: See :func:`ckptctl.storage.zips.zip_reader.read_archive`.
    """
    files = MemoryFiles(content, Path(where))
    archive = read_archive(files, "", 0, len(content), unknown="inert", table=CLASS_TABLE)
    storages = ZipStorages(archive.storages, lambda at, count: files.read("", at, count))
    try:
        return _ValueBuilder(storages, SHARED_BYTES + SHARED_FACTOR * len(content)).make_value(
            archive.root
        )
    except (ArithmeticError, ValueError, TypeError, RuntimeError, MemoryError) as error:
        why = f"{type(error).__name__}: {error}"
        raise UnsupportedError("an object in it cannot be created", why=why) from None


class _ValueBuilder:
    """Builder that creates one object for each record of a pickled value.

    The total size of all constructor arguments is limited to *allowance* bytes. An argument that
    is used repeatedly counts each time.
    """

    def __init__(self, storages: ZipStorages, allowance: int) -> None:
        self._storages = storages
        self._allowance = allowance
        self._made: dict[int, object] = {}
        self._record_keys = 0

    def make_value(self, record: object) -> Any:
        """Return the value of a record, including the values of its nested records."""
        if type(record) in _PLAIN:
            return record
        if id(record) not in self._made:
            self._made[id(record)] = self._build_value(record)
        return self._made[id(record)]

    def _build_value(self, record: object) -> object:
        if isinstance(record, StoredTensor):
            return self._storages.build_tensor(record)
        if isinstance(record, Inert):
            return self._build_instance(record)
        if isinstance(record, DictRecord):
            return self._build_dict_record(record)
        if isinstance(record, Global | Builder):
            return _resolve_dtype(record)
        return self._build_container(record)

    def _build_instance(self, record: Inert) -> object:
        maker = ALL_BUILDERS.get(Global(record.module, record.name))
        if maker is None:
            raise disallowed_class_error(record)
        state = record.state if type(record.state) is tuple else ()
        self._allowance -= sum(map(_count_bytes, (*record.args, *state)))
        if self._allowance < 0:
            raise malformed_record_error(record, "one value is copied too many times")
        return maker(record, self.make_value)

    def _build_container(self, record: object) -> object:
        if type(record) is list:
            return [self.make_value(element) for element in record]
        if type(record) is tuple:
            members = tuple(self.make_value(element) for element in record)
            require_positions(dict(zip(("", "key", "pos"), members, strict=False)))
            return members
        if type(record) is dict:
            pairs = self._build_pairs("dict", record)
            require_positions(pairs)
            return pairs
        if type(record) in (set, frozenset):
            return self._build_members(record)  # type: ignore[arg-type]
        if type(record) is slice:
            return slice(
                *(self.make_value(element) for element in (record.start, record.stop, record.step))
            )
        if type(record) is Size:
            return torch.Size([check_int("torch.Size", element) for element in record])
        raise disallowed_class_error(type(record).__name__)

    def _build_pairs(self, kind: str, record: Mapping[object, object]) -> dict[object, object]:
        pairs = {self._build_key(key): self.make_value(value) for key, value in record.items()}
        if len(pairs) != len(record):
            raise malformed_record_error(kind, "two keys are equal")
        return pairs

    def _build_members(self, record: set[object] | frozenset[object]) -> object:
        members = [self._build_key(member) for member in record]
        unique = set(members) if type(record) is set else frozenset(members)
        if len(unique) != len(record):
            raise malformed_record_error(type(record).__name__, "two members are equal")
        return unique

    def _build_key(self, record: object) -> object:
        if type(record) not in _PLAIN:
            self._record_keys += 1
            if self._record_keys > MAX_RECORD_KEYS:
                raise malformed_record_error(
                    "dict", f"more than {MAX_RECORD_KEYS:,} keys are not plain values"
                )
        return self.make_value(record)

    def _build_dict_record(self, record: DictRecord) -> object:
        mapping: dict[object, object]
        if record.origin.name == "defaultdict":
            factory_record = record.args[0] if record.args else None
            factory_global = (
                factory_record.source if isinstance(factory_record, Builder) else factory_record
            )
            if factory_record is not None and (
                not isinstance(factory_global, Global) or factory_global not in _FACTORIES
            ):
                kind = factory_global if isinstance(factory_global, Global) else format_class("?")
                raise disallowed_class_error(f"defaultdict of {kind}")
            factory = _FACTORIES[factory_global] if isinstance(factory_global, Global) else None
            mapping = defaultdict(factory, self._build_pairs("defaultdict", record))
        else:
            mapping = OrderedDict(self._build_pairs("OrderedDict", record))
        if record.state is not None:
            state = self.make_value(record.state)
            has_str_keys = type(state) is dict and all(type(name) is str for name in state)
            if type(mapping) is not OrderedDict or not has_str_keys:
                raise malformed_record_error(record.origin, "its state is not a dict of attributes")
            vars(mapping).update(state)
        return mapping


def _count_bytes(part: object) -> int:
    """Return the number of bytes that a constructor copies from an argument."""
    if isinstance(part, str | bytes | bytearray):
        return len(part)
    return part.bit_length() >> 3 if isinstance(part, int) else 0


def _resolve_dtype(record: Global | Builder) -> object:
    """Return the torch dtype that the pickled global *record* refers to, or raise for others."""
    source = record.source if isinstance(record, Builder) else record
    if source and source.module == "torch" and source.name in dtypes.BY_NAME:
        return getattr(torch, source.name)
    raise disallowed_class_error(f"{source}, as a standalone value")
