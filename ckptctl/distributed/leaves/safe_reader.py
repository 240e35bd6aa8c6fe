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
from ckptctl.distributed.leaves.numpy_classes import NUMPY
from ckptctl.distributed.leaves.records import (
    Makers,
    class_of,
    integer,
    require_positions,
    unknown,
    wrong,
)
from ckptctl.distributed.leaves.standard_classes import STANDARD
from ckptctl.distributed.leaves.torch_classes import TORCH, Storages
from ckptctl.errors import UnsupportedError
from ckptctl.storage.files import MemoryFiles
from ckptctl.storage.pickles.inert import Builder, DictRecord, Global, Inert, Size
from ckptctl.storage.zips.zip_reader import KEEPING_TABLE, StoredTensor, read_archive

MAKERS: Makers = {**STANDARD, **NUMPY, **TORCH}
TABLE = {**KEEPING_TABLE, **{(key.module, key.name): key for key in MAKERS}}
MAX_RECORD_KEYS = 10_000
"""Maximum number of keys and members that are not plain values, whose hashes could collide."""
SHARED_TIMES = 4
SHARED_ALLOWANCE = 1 << 16
_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray)
_FACTORIES: Mapping[Global, Callable[[], object]] = {
    Global(kind.__module__, kind.__name__): kind
    for kind in (list, dict, int, float, str, bool, tuple, set, frozenset, bytes, OrderedDict)
}


def read_leaf(content: bytes, where: str) -> object:
    """Return the value that ``torch.save`` wrote to the zip archive *content*.

    Raises:
        UnsafePickleError: It contains an object of a class that is not known to be harmless.
        UnsupportedError: It contains an object of a known class in a form that the class does not
            write.
        CkptError: See :func:`ckptctl.storage.zips.zip_reader.read_archive`.
    """
    files = MemoryFiles(content, Path(where))
    archive = read_archive(files, "", 0, len(content), unknown="inert", table=TABLE)
    storages = Storages(archive.storages, lambda at, count: files.read("", at, count))
    try:
        return _LeafValues(storages, SHARED_ALLOWANCE + SHARED_TIMES * len(content)).make(
            archive.root
        )
    except (ArithmeticError, ValueError, TypeError, RuntimeError, MemoryError) as error:
        why = f"{type(error).__name__}: {error}"
        raise UnsupportedError("an object in it cannot be created", why=why) from None


class _LeafValues:
    """Builder of the objects of one value, which keeps their identities.

    Arguments of constructors may have *allowance* bytes in total, counted at each use.
    """

    def __init__(self, storages: Storages, allowance: int) -> None:
        self._storages = storages
        self._allowance = allowance
        self._made: dict[int, object] = {}
        self._record_keys = 0

    def make(self, record: object) -> Any:
        """Return the value of a record, including nested ones."""
        if type(record) in _PLAIN:
            return record
        if id(record) not in self._made:
            self._made[id(record)] = self._new(record)
        return self._made[id(record)]

    def _new(self, record: object) -> object:
        if isinstance(record, StoredTensor):
            return self._storages.tensor(record)
        if isinstance(record, Inert):
            return self._instance(record)
        if isinstance(record, DictRecord):
            return self._dict_record(record)
        if isinstance(record, Global | Builder):
            return _named(record)
        return self._container(record)

    def _instance(self, record: Inert) -> object:
        maker = MAKERS.get(Global(record.module, record.name))
        if maker is None:
            raise unknown(record)
        state = record.state if type(record.state) is tuple else ()
        self._allowance -= sum(map(_size, (*record.args, *state)))
        if self._allowance < 0:
            raise wrong(record, "one value is copied too many times")
        return maker(record, self.make)

    def _container(self, record: object) -> object:
        if type(record) is list:
            return [self.make(one) for one in record]
        if type(record) is tuple:
            found = tuple(self.make(one) for one in record)
            require_positions(dict(zip(("", "key", "pos"), found, strict=False)))
            return found
        if type(record) is dict:
            pairs = self._pairs("dict", record)
            require_positions(pairs)
            return pairs
        if type(record) in (set, frozenset):
            return self._members(record)  # type: ignore[arg-type]
        if type(record) is slice:
            return slice(*(self.make(one) for one in (record.start, record.stop, record.step)))
        if type(record) is Size:
            return torch.Size([integer("torch.Size", one) for one in record])
        raise unknown(type(record).__name__)

    def _pairs(self, kind: str, record: Mapping[object, object]) -> dict[object, object]:
        found = {self._key(key): self.make(value) for key, value in record.items()}
        if len(found) != len(record):
            raise wrong(kind, "two keys are equal")
        return found

    def _members(self, record: set[object] | frozenset[object]) -> object:
        found = [self._key(one) for one in record]
        made = set(found) if type(record) is set else frozenset(found)
        if len(made) != len(record):
            raise wrong(type(record).__name__, "two members are equal")
        return made

    def _key(self, record: object) -> object:
        if type(record) not in _PLAIN:
            self._record_keys += 1
            if self._record_keys > MAX_RECORD_KEYS:
                raise wrong("dict", f"more than {MAX_RECORD_KEYS:,} keys are not plain values")
        return self.make(record)

    def _dict_record(self, record: DictRecord) -> object:
        found: dict[object, object]
        if record.origin.name == "defaultdict":
            given = record.args[0] if record.args else None
            known = given.source if isinstance(given, Builder) else given
            if given is not None and (not isinstance(known, Global) or known not in _FACTORIES):
                kind = known if isinstance(known, Global) else class_of("?")
                raise unknown(f"defaultdict of {kind}")
            factory = _FACTORIES[known] if isinstance(known, Global) else None
            found = defaultdict(factory, self._pairs("defaultdict", record))
        else:
            found = OrderedDict(self._pairs("OrderedDict", record))
        if record.state is not None:
            state = self.make(record.state)
            named = type(state) is dict and all(type(name) is str for name in state)
            if type(found) is not OrderedDict or not named:
                raise wrong(record.origin, "its state is not a dict of attributes")
            vars(found).update(state)
        return found


def _size(part: object) -> int:
    """Return the number of bytes that a constructor copies from an argument."""
    if isinstance(part, str | bytes | bytearray):
        return len(part)
    return part.bit_length() >> 3 if isinstance(part, int) else 0


def _named(record: Global | Builder) -> object:
    """Return the torch dtype of a global, or raise for any other one."""
    known = record.source if isinstance(record, Builder) else record
    if known and known.module == "torch" and known.name in dtypes.BY_NAME:
        return getattr(torch, known.name)
    raise unknown(f"{known}, as a standalone value")
