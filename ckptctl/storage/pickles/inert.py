"""Inert objects that represent the objects of a pickle without importing or calling anything.

:mod:`ckptctl.storage.pickles.pickle_reader` creates these objects, and
:mod:`ckptctl.storage.pickles.pickle_writer` writes them as the original pickle did.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from ckptctl.errors import CkptError, UnsupportedError
from ckptctl.units import pluralize

MAX_DEPTH = 100
MAX_KEY_NODES = 128
MAX_KEY_BITS = 64  # hashes are modulo 2**61 - 1, so longer integers can be chosen to collide
TEXT_SHIFT_BITS = 3
"""Base-2 logarithm of the number of characters that :func:`check_tree` counts as one value."""
NO_SIZES: Mapping[type, Callable[[Any], int]] = {}
_TEXTS = frozenset({str, bytes, bytearray})
_ATOMS = frozenset({str, bytes, bool, float, type(None)})
_LEAVES = _ATOMS | {int}


@dataclass(frozen=True, slots=True)
class Global:
    """Name of a class or function referenced by a pickle, which is never imported.

    If a pickle calls a global (REDUCE, NEWOBJ), the result is an :class:`Inert` record.
    """

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, slots=True)
class Builder:
    """Safe replacement for a class or function, called with the arguments of REDUCE or NEWOBJ.

    Args:
        fn: Function to call. It must be cheap for any arguments, because the pickle may be hostile.
        hashes: Whether *fn* hashes the elements of its arguments, which are then checked first.
        source: Global that the builder replaces, which the pickle writer writes instead.
    """

    fn: Callable[..., object]
    hashes: bool = False
    source: Global | None = None


class Size(tuple[int, ...]):
    """A ``torch.Size`` that a pickle contains, as a tuple of integers."""

    __slots__ = ()


class DictRecord(dict[object, object]):
    """Instance of a dict subclass such as ``OrderedDict`` or ``defaultdict``.

    Attributes:
        origin: Name of the class.
        args: Arguments of the constructor, such as the factory of a ``defaultdict``.
        state: Instance attributes, such as ``{"_metadata": ...}`` of ``Module.state_dict()``.
    """

    __slots__ = ("args", "origin", "state")

    def __init__(self, origin: Global, args: tuple[object, ...] = ()) -> None:
        self.origin = origin
        self.args = args
        self.state: object = None

    def build(self, state: object) -> None:
        """Take the state of a BUILD opcode."""
        self.state = state

    def copy_with(self, items: dict[object, object]) -> DictRecord:
        """Return a record with the same class, arguments and state, but with other *items*."""
        copied = DictRecord(self.origin, self.args)
        copied.state = self.state
        copied.update(items)
        return copied


class Inert:
    """Instance of a class that was not imported.

    Records are equal if their classes, arguments and states are equal. Only records that consist of
    plain values are hashable. Subclasses may redefine equality.

    Attributes:
        module: Module of the class or function.
        name: Qualified name in the module.
        args: Positional arguments of the constructor or function.
        state: Argument of BUILD, usually a dict of attributes, or None.
        newobj: Whether the instance was created by NEWOBJ (``cls.__new__``) instead of REDUCE (a
            call).
        appended: Elements added by APPEND(S) to a subclass of list, or None.
        entries: Pairs added by SETITEM(S) to a subclass of dict, or None.
    """

    __slots__ = ("_key", "appended", "args", "entries", "module", "name", "newobj", "state")

    def __init__(
        self,
        module: str,
        name: str,
        args: tuple[object, ...] = (),
        state: object = None,
        *,
        newobj: bool = False,
    ) -> None:
        self.module = module
        self.name = name
        self.args = args
        self.state = state
        self.newobj = newobj
        self.appended: list[object] | None = None
        self.entries: list[tuple[object, object]] | None = None
        self._key: tuple[object, ...] | None = None

    def build(self, state: object) -> None:
        """Take the state of a BUILD opcode."""
        if self._key is not None:
            raise UnsupportedError(f"a `{self.module}.{self.name}` is modified after use as a key")
        self.state = state

    def get_key(self) -> tuple[object, ...]:
        """Return a tuple of strings and bytes that is equal for equal records.

        Numbers are converted to text, because Python only salts the hashes of text and bytes. A
        hostile file can choose numbers whose hashes collide, which makes dict lookups slow.
        """
        if self._key is None:
            if self.appended is not None or self.entries is not None:
                raise UnsupportedError(f"a container `{self.module}.{self.name}` is used as a key")
            state = self.state
            if type(state) is dict:
                if len(state) > MAX_KEY_NODES:
                    raise _large_key_error(f"{pluralize(len(state), 'attribute')}")
                if any(type(name) is not str for name in state):
                    raise UnsupportedError("an attribute name is not a string")
                state = tuple(sorted(state.items(), key=itemgetter(0)))
            check_key((self.args, state))
            self._key = (self.module, self.name, *_flatten_key((self.args, state), []))
        return self._key

    def __hash__(self) -> int:
        return hash(self.get_key())

    def __eq__(self, other: object) -> bool:
        return self is other or (type(other) is type(self) and self.get_key() == other.get_key())

    def __repr__(self) -> str:
        return f"<{self.module}.{self.name}>"


COMPARED_FIELDS = ("module", "name", "args", "state", "newobj", "appended", "entries")


def is_same_value(first: object, second: object) -> bool:
    """Return whether two non-tensor values have the same type and are equal, bitwise for floats.

    Values that cannot be compared are not the same.
    """
    if type(first) is not type(second):
        return False
    if isinstance(first, float) and isinstance(second, float):
        return struct.pack("<d", first) == struct.pack("<d", second)
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(is_same_value, first, second))
    if isinstance(first, Inert):
        return all(
            is_same_value(getattr(first, name), getattr(second, name)) for name in COMPARED_FIELDS
        )
    with suppress(CkptError):
        if not isinstance(first, dict) or not isinstance(second, dict):
            return bool(first == second)
        return (
            _get_dict_class(first) == _get_dict_class(second)
            and first.keys() == second.keys()
            and all(is_same_value(value, second[key]) for key, value in first.items())
        )
    return False


def _get_dict_class(value: object) -> object:
    return value.origin if isinstance(value, DictRecord) else None


def _flatten_key(value: tuple[object, ...], atoms: list[object]) -> list[object]:
    """Append all values nested in *value*, which :func:`check_key` has accepted, to *atoms*."""
    atoms.append(f"({len(value)}")
    for item in value:
        if item.__class__ is str or item.__class__ is bytes:
            atoms.append(item)
        elif item is None:
            atoms.append("=None")
        elif item.__class__ in _LEAVES:
            atoms.append(f"={item!r}")
        elif isinstance(item, tuple):
            _flatten_key(item, atoms)
        elif isinstance(item, Inert):
            atoms += item.get_key()
        else:
            atoms.append(f"={item!r}")
    return atoms


def check_key(value: object) -> int:
    """Count the values in a key, and raise if the key is too large to hash and compare quickly.

    All values of a record are counted each time the record occurs in the key.
    """
    nodes = 0
    pending = [value]
    while pending:
        item = pending.pop()
        nodes += 1
        value_type = type(item)
        if value_type in _ATOMS:
            pass
        elif isinstance(item, tuple) and value_type in (tuple, Size):
            if len(item) > MAX_KEY_NODES:
                raise _large_key_error(f"a tuple of {pluralize(len(item), 'item')}")
            if _ATOMS.issuperset(map(type, item)):  # no other check applies to them
                nodes += len(item)
            else:
                pending.extend(item)
        elif value_type is int:
            if item.bit_length() > MAX_KEY_BITS:  # type: ignore[attr-defined]
                raise _large_key_error(f"an integer of more than {MAX_KEY_BITS} bits")
        elif isinstance(item, Inert):
            nodes += len(item.get_key())
        elif value_type is not Global:
            raise UnsupportedError(
                f"a key is of type {value_type.__name__}", why="keys must be plain values"
            )
        if nodes > MAX_KEY_NODES:
            raise _large_key_error(f"it contains more than {MAX_KEY_NODES} values")
    return nodes


def _large_key_error(why: str) -> UnsupportedError:
    return UnsupportedError("a key is too large", why=why)


def check_tree(
    root: object, *, limit: int, where: str, sizes: Mapping[type, Callable[[Any], int]] = NO_SIZES
) -> int:
    """Count the values of *root* when expanded into a tree, and raise if the tree is too large.

    A pickle of 100 bytes can contain nested lists that each refer to the next one ten times, which
    makes ten billion leaves ("a billion laughs"). An accepted object can be walked recursively and
    written, because it has at most *limit* values, ``MAX_DEPTH`` levels and no cycles. Shared
    values are counted at each occurrence, and a text is counted by its length.

    Args:
        root: Object to check.
        limit: Maximum number of values.
        where: File name to show in errors.
        sizes: Functions that count the values of an object, by class of the object.
    """
    count = 1
    ancestor_ids: set[int] = set()
    levels: list[tuple[object, Iterator[object]]] = [(None, iter((root,)))]
    while levels:
        owner, items = levels[-1]
        value = next(items, levels)
        if value is levels:
            levels.pop()
            ancestor_ids.discard(id(owner))
            continue
        if value.__class__ in sizes:
            count += sizes[value.__class__](value)
            children: Collection[object] = ()
        else:
            children = _list_children(value)
        texts = (len(item) for item in children if item.__class__ in _TEXTS)  # type: ignore[arg-type]
        count += len(children) + (sum(texts) >> TEXT_SHIFT_BITS)
        if count > limit:
            raise UnsupportedError(
                "the pickle expands without bound",
                where=where,
                why=f"more than {pluralize(limit, 'value')}",
            )
        if not children:
            continue
        if len(levels) >= MAX_DEPTH:
            raise UnsupportedError(
                "the pickle is nested too deeply", where=where, why=f"more than {MAX_DEPTH} levels"
            )
        if id(value) in ancestor_ids:  # each level would copy its items
            raise UnsupportedError(
                "the pickle is nested too deeply", where=where, why="a value contains itself"
            )
        ancestor_ids.add(id(value))
        levels.append((value, (item for item in children if item.__class__ not in _LEAVES)))
    return count


def walk_values(root: object) -> Iterator[object]:
    """Yield *root* and every value nested in it, but only once for a shared container."""
    seen: set[int] = set()
    pending = [root]
    while pending:
        value = pending.pop()
        yield value
        if value.__class__ not in _LEAVES and id(value) not in seen:
            seen.add(id(value))
            pending.extend(_list_children(value))


def _list_children(value: object) -> Collection[object]:
    if isinstance(value, DictRecord):
        return [*value.values(), *_list_compound_keys(value), value.args, value.state]
    if isinstance(value, dict):
        keys = _list_compound_keys(value)
        return [*value.values(), *keys] if keys else value.values()
    if isinstance(value, list | tuple | set | frozenset):
        return value
    if isinstance(value, Inert):
        entries = [part for pair in value.entries or () for part in pair]
        return [*value.args, value.state, *(value.appended or ()), *entries]
    if isinstance(value, slice):
        return (value.start, value.stop, value.step)
    return ()


def _list_compound_keys(value: dict[object, object]) -> list[object]:
    return [key for key in value if key.__class__ not in _LEAVES]
