"""Pickle reader that never imports or calls the globals that a file names.

The reader supports the opcodes of protocols 0 to 5 (``Lib/pickletools.py``, PEP 307, 3154, 574)
that torch and Python write. Globals are looked up in a table of inert replacements. A truncated
pickle raises :class:`~ckptctl.errors.DamagedError`, any other malformed pickle raises
:class:`~ckptctl.errors.UnsupportedError`.

The reader is stricter than :mod:`pickle`. A key may not occur twice in a dict. Keys are plain
values, small tuples of plain values, or records. Builders may not expand a shared value repeatedly.
The number of objects is limited by the size of the pickle; shared objects count at every visit.
EXT*, INST, OBJ, text persistent ids, Python 2 byte strings of protocol 0 and out-of-band buffers
are rejected.
"""

from __future__ import annotations

import struct
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Protocol

from ckptctl.errors import CkptError, DamagedError, UnsafePickleError, UnsupportedError
from ckptctl.storage.pickles.inert import (
    NO_SIZES,
    Builder,
    DictRecord,
    Global,
    Inert,
    Size,
    check_key,
    check_tree,
)
from ckptctl.storage.pickles.torch_globals import ATTRIBUTES
from ckptctl.storage.threads import pause_gc
from ckptctl.units import pluralize

GlobalsTable = Mapping[tuple[str, str], object]
Stack = list[object]
Unknown = Literal["refuse", "inert"]
MAX_COLLIDING = 64
"""Maximum number of keys with the same hash, which a hostile file can construct."""
MAX_OPCODE_BYTES = 9
"""Maximum size in bytes of a fixed-length opcode, including its argument."""
SHARED_ALLOWANCE = 1 << 16
FREE_OBJECTS = 1_000_000
BYTES_PER_OBJECT = 4
"""Minimum bytes of a pickle per container, record and memo entry beyond :data:`FREE_OBJECTS`.

A dict takes one byte in a pickle and 72 in memory, a memo entry a hundred. Pickles of state dicts,
optimizers and ``.metadata`` have at least seven bytes per object.
"""
FREE_VALUES = 1 << 11
VALUES_PER_BYTE = 8
"""Maximum values that a pickle may expand to per byte, beyond :data:`FREE_VALUES`.

A pickle without shared values has fewer values than bytes.
"""
MAX_MARKS = 1000
_COPY_WEIGHT, _HASHED_COPY_WEIGHT = 4, 8
"""Number of values counted for an element that a builder copies into a list or into a set."""
_CALL_OBJECTS, _NEW_GLOBAL_OBJECTS = 2, 4
"""Number of objects counted for the result of a call, and for the first use of a global."""
MAX_SHOWN_NAME = 200
_PYTHON2_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_PYTHON2_NAMES = {("builtins", "xrange"): ("builtins", "range")}
_TEXTS = frozenset({str, bytes, bytearray})
_CONTAINERS = frozenset({tuple, list, dict, set, frozenset, DictRecord, Size})
_MALFORMED = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
    struct.error,
)
STOP = b"."
SET_OBJECTS = 4
"""Number of objects counted for an empty set, which takes as much memory as four tuples."""


class Hook(Protocol):
    """Fast path that runs frequent sequences of opcodes instead of the machine.

    Attributes:
        memo: Memo of the machine.
        taken: Number of memo entries that the hook has skipped, so that *memo* does not contain
            them.
    """

    memo: dict[int, object]
    taken: int

    @property
    def sizes(self) -> Mapping[type, Callable[[Any], int]]:
        """Functions that count the values in objects created by the hook, by class."""

    def __call__(self, data: bytes, pos: int, stack: Stack, outer: list[Stack]) -> int:
        """Run supported opcodes from position *pos*, and return the position of the next opcode.

        *stack* is the current stack of the machine. *outer* contains the stacks below its marks.
        """


def past_end_error(data: bytes, where: str, why: str) -> CkptError:
    """Build the error for an opcode whose argument extends past the end of the pickle.

    If the last byte is not STOP, the pickle is truncated. Otherwise, a length field is wrong.
    """
    if data.endswith(STOP):
        return UnsupportedError("malformed pickle", where=where, why=why)
    return DamagedError("the pickle is truncated", where=where, why=why)


def load_pickle(
    data: bytes,
    *,
    where: str,
    table: GlobalsTable,
    unknown: Unknown = "refuse",
    persistent_load: Callable[[object], object] | None = None,
    hook: Hook | None = None,
    max_values: int | None = None,
) -> object:
    """Read one pickle without importing or calling the globals that it names.

    Args:
        data: Bytes of the pickle, which must end with its STOP opcode.
        where: File name to show in errors.
        table: Replacements by module and name. A :class:`Builder` is called with the arguments of
            REDUCE and NEWOBJ. Calling a :class:`Global` creates an :class:`Inert` record. Other
            replacements are constants. Python 2 names are translated before the look-up.
        unknown: Whether to raise for a global that is not in *table* (``refuse``) or to create
            records of it (``inert``).
        persistent_load: Returns the object for a persistent id, or None to reject all ids.
        hook: Called after each BUILD. If it runs any opcodes, the pickle must not number its memo
            entries (BINPUT).
        max_values: Maximum number of values that the pickle may expand to, or None to derive it
            from the size of the pickle.

    Returns:
        The object, of plain values, containers and replacements from *table*. It can be walked
        recursively (:func:`~ckptctl.storage.pickles.inert.check_tree` has accepted it).

    Raises:
        UnsafePickleError: A global is not in *table*, or an opcode refers to an external object.
        DamagedError: The pickle is truncated.
        UnsupportedError: The pickle is malformed, or expands to too many values.
    """
    machine = PickleMachine(data, where, table, unknown, persistent_load, hook)
    limit = FREE_VALUES + VALUES_PER_BYTE * len(data) if max_values is None else max_values
    sizes = NO_SIZES if hook is None else hook.sizes
    try:
        with pause_gc():
            return machine.run_checked(limit, sizes)
    except CkptError as error:
        error.where = error.where or where
        traceback.clear_frames(error.__traceback__)
        raise
    except _MALFORMED as error:
        traceback.clear_frames(error.__traceback__)
        why = f"{type(error).__name__} before byte {machine.pos:,}"
        if machine.pos + MAX_OPCODE_BYTES > len(data):
            raise past_end_error(data, where, why) from error
        raise UnsupportedError("malformed pickle", where=where, why=why) from error
    finally:
        # Callers keep errors, whose tracebacks would otherwise keep all objects alive.
        del machine


class PickleMachine:
    """State machine that runs the opcodes of one pickle.

    Frequent opcodes are implemented in :meth:`run`, rare opcodes in :data:`RARE_OPCODES`.
    """

    __slots__ = (
        "allowance", "colliding", "data", "globals", "hook", "memo", "most", "persistent_load",
        "pos", "room", "table", "tuples", "unknown", "where",
    )  # fmt: skip

    def __init__(
        self,
        data: bytes,
        where: str,
        table: GlobalsTable,
        unknown: Unknown,
        persistent_load: Callable[[object], object] | None,
        hook: Hook | None,
    ) -> None:
        self.data = data
        self.where = where
        self.table = table
        self.unknown = unknown
        self.persistent_load = persistent_load
        self.hook = hook
        self.pos = 0
        self.memo: dict[int, object] = {} if hook is None else hook.memo
        self.globals: dict[tuple[str, str], object] = {}
        self.allowance = 4 * len(data) + SHARED_ALLOWANCE
        self.room = self.most = FREE_OBJECTS + len(data) // BYTES_PER_OBJECT
        self.tuples: dict[int, tuple[object, ...]] = {}
        self.colliding: dict[int, set[tuple[object, ...]]] = {}

    def run_checked(self, limit: int, sizes: Mapping[type, Callable[[Any], int]]) -> object:
        """Run all opcodes up to STOP, and return the resulting object.

        Raises an error if the object has more than *limit* values when expanded into a tree.
        """
        root = self.run()
        check_tree(root, limit=limit, where=self.where, sizes=sizes)
        return root

    def run(self) -> object:
        """Run all opcodes up to STOP, and return the resulting object before its size is checked.

        All frequent opcodes are in one long function, the most frequent first. The ``.metadata`` of
        100,000 tensors has twelve million opcodes, and a call for each would double the time.
        Slices past the end of the data are short, and reading the next opcode then fails, so their
        length is not checked.
        """
        data = self.data
        memo, max_memo = self.memo, self.most
        pos = taken = 0
        outer: list[list[object]] = []
        stack: list[object] = []
        try:
            while True:
                op = data[pos]
                pos += 1
                if op == 0x94:  # MEMOIZE
                    memo_size = len(memo)
                    memo[memo_size + taken] = stack[-1]
                    if memo_size > max_memo:
                        raise self.too_many_objects_error()
                elif op == 0x68:  # BINGET
                    stack.append(memo[data[pos]])
                    pos += 1
                elif op == 0x8C:  # SHORT_BINUNICODE
                    end = pos + 1 + data[pos]
                    stack.append(str(data[pos + 1 : end], "utf-8", "surrogatepass"))
                    pos = end
                elif op == 0x4B:  # BININT1
                    stack.append(data[pos])
                    pos += 1
                elif op == 0x71:  # BINPUT
                    memo[data[pos]] = stack[-1]
                    pos += 1
                    self.disable_hook()
                elif op == 0x6A:  # LONG_BINGET
                    stack.append(memo[int.from_bytes(data[pos : pos + 4], "little")])
                    pos += 4
                elif op == 0x72:  # LONG_BINPUT
                    memo[int.from_bytes(data[pos : pos + 4], "little")] = stack[-1]
                    pos += 4
                    self.disable_hook()
                elif op == 0x28:  # MARK
                    outer.append(stack)
                    stack = []
                    if len(outer) > MAX_MARKS:
                        raise UnsupportedError("the pickle is nested too deeply")
                elif op == 0x52:  # REDUCE
                    args = stack.pop()
                    stack[-1] = self.call_target(stack[-1], args, False)
                elif op == 0x85:  # TUPLE1
                    stack[-1] = (stack[-1],)
                    self.room -= 1
                    if self.room < 0:
                        raise self.too_many_objects_error()
                elif op == 0x86:  # TUPLE2
                    second = stack.pop()
                    stack[-1] = (stack[-1], second)
                    self.room -= 1
                    if self.room < 0:
                        raise self.too_many_objects_error()
                elif op == 0x75:  # SETITEMS
                    items = stack
                    stack = outer.pop()
                    self.set_items(stack[-1], items)
                elif op == 0x62:  # BUILD
                    state = stack.pop()
                    stack[-1].build(state)  # type: ignore[attr-defined]
                    if self.hook is not None:
                        pos = self.hook(data, pos, stack, outer)
                        taken = self.hook.taken
                elif op == 0x7D:  # EMPTY_DICT
                    stack.append({})
                    self.count_objects(1)
                elif op == 0x29:  # EMPTY_TUPLE
                    stack.append(())
                elif op == 0x81:  # NEWOBJ
                    args = stack.pop()
                    stack[-1] = self.call_target(stack[-1], args, True)
                elif op == 0x74:  # TUPLE
                    items = stack
                    stack = outer.pop()
                    stack.append(tuple(items))
                    self.count_objects(1)
                elif op == 0x4D:  # BININT2
                    stack.append(data[pos] | data[pos + 1] << 8)
                    pos += 2
                elif op == 0x58:  # BINUNICODE
                    end = pos + 4 + int.from_bytes(data[pos : pos + 4], "little")
                    stack.append(str(data[pos + 4 : end], "utf-8", "surrogatepass"))
                    pos = end
                elif op == 0x2E:  # STOP
                    return self.pop_result(stack, outer, pos)
                elif (closer := MARK_OPCODES.get(op)) is not None:
                    items = stack
                    stack = outer.pop()
                    closer(self, stack, items)
                elif (cold := RARE_OPCODES.get(op)) is not None:
                    pos = cold(self, stack, pos)
                else:
                    raise self.refused_opcode_error(op, pos)
        finally:
            self.pos = pos

    def pop_result(self, stack: list[object], outer: list[list[object]], pos: int) -> object:
        """Pop the result at STOP, or raise if other values or further bytes remain."""
        if len(stack) != 1 or outer:
            raise UnsupportedError(
                "malformed pickle", why="the stack does not contain exactly one value at STOP"
            )
        if pos != len(self.data):
            raise UnsupportedError(
                "malformed pickle",
                why=f"{pluralize(len(self.data) - pos, 'byte follows', 'bytes follow')} its end",
            )
        return stack[0]

    def refused_opcode_error(self, op: int, pos: int) -> CkptError:
        """Build the error for a rejected or unknown opcode."""
        name = REFUSED.get(op)
        position = f"at byte {pos - 1:,}"
        if not op and not any(self.data[pos:]):
            return DamagedError(
                "the pickle was not written completely", why=f"only zeros {position}"
            )
        if name is None:
            return UnsupportedError("malformed pickle", why=f"unknown opcode {op:#04x} {position}")
        return UnsafePickleError(
            f"the pickle uses {name}, which no checkpoint needs", where=self.where, why=position
        )

    def count_objects(self, count: int) -> None:
        """Count new objects, and raise if there are too many for a checkpoint of this size."""
        self.room -= count
        if self.room < 0:
            raise self.too_many_objects_error()

    def too_many_objects_error(self) -> CkptError:
        """Build the error for a pickle with too many objects for its size."""
        return UnsupportedError(
            "the pickle contains more objects than a checkpoint of its size",
            why=f"more than {pluralize(self.most, 'container')}, records or names in "
            f"{pluralize(len(self.data), 'byte')}",
        )

    def disable_hook(self) -> None:
        """Disable the hook after an opcode with an explicit memo index, and check the memo size."""
        if len(self.memo) > self.most:
            raise self.too_many_objects_error()
        if self.hook is not None and self.hook.taken:
            raise UnsupportedError("malformed pickle", why="only some memo entries are numbered")
        self.hook = None

    def call_target(self, target: object, args: object, newobj: bool) -> object:
        """Return the result of REDUCE or NEWOBJ on *target* with the arguments *args*."""
        if type(args) is not tuple:
            raise UnsupportedError("malformed pickle", why="the arguments are not a tuple")
        self.count_objects(_CALL_OBJECTS)
        if type(target) is Global:
            return Inert(target.module, target.name, args, newobj=newobj)
        if type(target) is not Builder:
            raise UnsupportedError(
                "malformed pickle", why=f"a value of type {type(target).__name__} is called"
            )
        for arg in args:
            if arg.__class__ in _TEXTS:
                self.allowance -= len(arg)
            elif arg.__class__ in _CONTAINERS:
                self.allowance -= len(arg) * (
                    _HASHED_COPY_WEIGHT if target.hashes else _COPY_WEIGHT
                )
        if self.allowance < 0:
            raise UnsupportedError(
                "the pickle expands without bound", why="one value is copied repeatedly"
            )
        if target.hashes:
            for arg in args:
                self.check_keys(arg)
        return target.fn(*args)

    def check_keys(self, keys: Iterable[object]) -> None:
        """Raise unless each of *keys* is cheap to hash and compare."""
        for key in keys:
            if key.__class__ is not str:
                values = check_key(key)
                self.count_objects(values if values > 1 else 0)  # each value is hashed or compared
                if isinstance(key, tuple):
                    self.check_collisions(key)

    def check_collisions(self, key: tuple[object, ...]) -> None:
        """Raise if too many tuples have the same hash as *key*, which would make dicts slow."""
        number = hash(key)
        self.count_objects(1)
        if self.tuples.setdefault(number, key) != key:
            colliding_tuples = self.colliding.setdefault(number, set())
            colliding_tuples.add(key)
            if len(colliding_tuples) > MAX_COLLIDING:
                raise UnsupportedError(
                    "too many key collisions",
                    why=f"more than {MAX_COLLIDING} tuples have the same hash",
                )

    def set_items(self, target: object, items: list[object]) -> None:
        """Add *items*, which alternate between keys and values, to a dict or record *target*."""
        keys, values = items[::2], items[1::2]
        self.check_keys(keys)
        if len(keys) != len(values):
            raise UnsupportedError("malformed pickle", why="a key without a value")
        if isinstance(target, dict):
            expected = len(target) + len(keys)
            target.update(zip(keys, values, strict=True))
            if len(target) != expected:
                raise UnsupportedError("malformed pickle", why="a dict has the same key twice")
        elif isinstance(target, Inert):
            if target.entries is None:
                target.entries = []
            self.count_objects(len(keys))
            target.entries += zip(keys, values, strict=True)
        else:
            raise UnsupportedError(
                "malformed pickle", why=f"items are set on a value of type {type(target).__name__}"
            )

    def find_global(self, module: str, name: str, pos: int) -> object:
        """Return the replacement of the global *module*.*name*, or raise if it is not allowed."""
        key = (_PYTHON2_MODULES.get(module, module), name)
        key = _PYTHON2_NAMES.get(key, key)
        replacement = self.globals.get(key, self)
        if replacement is self:
            replacement = self.table.get(key, self)
            if replacement is self:
                if self.unknown == "refuse":
                    raise UnsafePickleError(
                        f"the pickle references `{escape_name(key[0])}.{escape_name(key[1])}`, "
                        "which is not allowed",
                        where=self.where,
                        why=f"at byte {pos:,} of the pickle; nothing was imported or run",
                    )
                replacement = ATTRIBUTES.get(key) or Global(*key)
            self.count_objects(_NEW_GLOBAL_OBJECTS)
            self.globals[key] = replacement
        return replacement


def escape_name(text: str) -> str:
    """Escape non-ASCII and control characters of *text*, and truncate it for a message."""
    text = text.encode("unicode_escape").decode("ascii")
    return text if len(text) <= MAX_SHOWN_NAME else text[:MAX_SHOWN_NAME] + "…"


# ------------------------------------------------------------------------------- rare opcodes


def _read_line(machine: PickleMachine, pos: int) -> tuple[bytes, int]:
    end = machine.data.find(b"\n", pos)
    if end < 0:
        raise past_end_error(machine.data, machine.where, f"no newline after byte {pos:,}")
    return machine.data[pos:end], end + 1


def _read_counted(machine: PickleMachine, pos: int, width: int) -> tuple[bytes, int]:
    """Read a length field of *width* bytes and then as many bytes.

    Returns the bytes after the length field and the position of the next opcode.
    """
    start = pos + width
    end = start + int.from_bytes(machine.data[pos:start], "little")
    if end > len(machine.data):
        raise past_end_error(
            machine.data, machine.where, f"a string (at byte {pos:,}) extends past the end"
        )
    return machine.data[start:end], end


def _push_constant(value: object) -> Callable[[PickleMachine, Stack, int], int]:
    def push_value(_machine: PickleMachine, stack: Stack, pos: int) -> int:
        stack.append(value)
        return pos

    return push_value


def _push_new(make: Callable[[], object], count: int) -> Callable[[PickleMachine, Stack, int], int]:
    def push_value(machine: PickleMachine, stack: Stack, pos: int) -> int:
        machine.count_objects(count)
        stack.append(make())
        return pos

    return push_value


def _push_counted(
    width: int, convert: Callable[[bytes], object]
) -> Callable[[PickleMachine, Stack, int], int]:
    def push_value(machine: PickleMachine, stack: Stack, pos: int) -> int:
        raw, pos = _read_counted(machine, pos, width)
        stack.append(convert(raw))
        return pos

    return push_value


def _push_packed(layout: str) -> Callable[[PickleMachine, Stack, int], int]:
    form = struct.Struct(layout)

    def push_value(machine: PickleMachine, stack: Stack, pos: int) -> int:
        stack.append(form.unpack_from(machine.data, pos)[0])
        return pos + form.size

    return push_value


def _push_line(convert: Callable[[bytes], object]) -> Callable[[PickleMachine, Stack, int], int]:
    def push_value(machine: PickleMachine, stack: Stack, pos: int) -> int:
        raw, pos = _read_line(machine, pos)
        stack.append(convert(raw))
        return pos

    return push_value


def _decode_utf8(raw: bytes) -> str:
    return str(raw, "utf-8", "surrogatepass")


def _parse_integer(raw: bytes) -> object:
    if raw in (b"00", b"01"):
        return raw == b"01"
    return int(raw.removesuffix(b"L"))


def _decode_long(raw: bytes) -> int:
    return int.from_bytes(raw, "little", signed=True)


def _run_proto(machine: PickleMachine, _stack: Stack, pos: int) -> int:
    if machine.data[pos] > 5:
        raise UnsupportedError("malformed pickle", why=f"unknown protocol {machine.data[pos]}")
    return pos + 1


def _run_frame(machine: PickleMachine, _stack: Stack, pos: int) -> int:
    if int.from_bytes(machine.data[pos : pos + 8], "little") > len(machine.data) - pos - 8:
        raise past_end_error(
            machine.data, machine.where, f"a frame (at byte {pos:,}) extends past the end"
        )
    return pos + 8


def _run_pop(_machine: PickleMachine, stack: Stack, pos: int) -> int:
    stack.pop()
    return pos


def _run_dup(_machine: PickleMachine, stack: Stack, pos: int) -> int:
    stack.append(stack[-1])
    return pos


def _run_get(machine: PickleMachine, stack: Stack, pos: int) -> int:
    raw, pos = _read_line(machine, pos)
    stack.append(machine.memo[_parse_memo_index(raw)])
    return pos


def _run_put(machine: PickleMachine, stack: Stack, pos: int) -> int:
    raw, pos = _read_line(machine, pos)
    machine.memo[_parse_memo_index(raw)] = stack[-1]
    machine.disable_hook()
    return pos


def _parse_memo_index(raw: bytes) -> int:
    number = int(raw)
    if number < 0:
        raise UnsupportedError("malformed pickle", why=f"invalid memo entry {number}")
    return number


def _run_global(machine: PickleMachine, stack: Stack, pos: int) -> int:
    module, next_pos = _read_line(machine, pos)
    name, next_pos = _read_line(machine, next_pos)
    stack.append(machine.find_global(_decode_utf8(module), _decode_utf8(name), pos - 1))
    return next_pos


def _run_stack_global(machine: PickleMachine, stack: Stack, pos: int) -> int:
    name, module = stack.pop(), stack.pop()
    if type(name) is not str or type(module) is not str:
        raise UnsupportedError("malformed pickle", why="the name of a global is not a string")
    stack.append(machine.find_global(module, name, pos - 1))
    return pos


def _run_newobj_ex(machine: PickleMachine, stack: Stack, pos: int) -> int:
    keywords, args = stack.pop(), stack.pop()
    if keywords != {}:
        raise UnsupportedError(
            "malformed pickle", why="an object is created with keyword arguments"
        )
    stack[-1] = machine.call_target(stack[-1], args, True)
    return pos


def _run_tuple3(machine: PickleMachine, stack: Stack, pos: int) -> int:
    machine.count_objects(1)
    third, second = stack.pop(), stack.pop()
    stack[-1] = (stack[-1], second, third)
    return pos


def _run_append(machine: PickleMachine, stack: Stack, pos: int) -> int:
    value = stack.pop()
    _run_appends(machine, stack, [value])
    return pos


def _run_setitem(machine: PickleMachine, stack: Stack, pos: int) -> int:
    value, key = stack.pop(), stack.pop()
    machine.set_items(stack[-1], [key, value])
    return pos


def _run_binpersid(machine: PickleMachine, stack: Stack, pos: int) -> int:
    if machine.persistent_load is None:
        raise UnsafePickleError(
            "the pickle refers to an external object",
            where=machine.where,
            why=f"persistent id at byte {pos - 1:,}",
        )
    stack[-1] = machine.persistent_load(stack[-1])
    return pos


def _run_appends(_machine: PickleMachine, stack: Stack, items: Stack) -> None:
    target = stack[-1]
    if isinstance(target, list):
        target += items
    elif isinstance(target, Inert):
        if target.appended is None:
            target.appended = []
        target.appended += items
    else:
        raise UnsupportedError(
            "malformed pickle", why=f"items are appended to a value of type {type(target).__name__}"
        )


def _run_additems(machine: PickleMachine, stack: Stack, items: Stack) -> None:
    target = stack[-1]
    if not isinstance(target, set):
        raise UnsupportedError(
            "malformed pickle", why=f"members are added to a value of type {type(target).__name__}"
        )
    machine.check_keys(items)
    target.update(items)


def _run_frozenset(machine: PickleMachine, stack: Stack, items: Stack) -> None:
    machine.count_objects(SET_OBJECTS)
    machine.check_keys(items)
    stack.append(frozenset(items))


def _run_list(machine: PickleMachine, stack: Stack, items: Stack) -> None:
    machine.count_objects(1)
    stack.append(items)


def _run_dict(machine: PickleMachine, stack: Stack, items: Stack) -> None:
    machine.count_objects(1)
    stack.append({})
    machine.set_items(stack[-1], items)


def _run_pop_mark(_machine: PickleMachine, _stack: Stack, _items: Stack) -> None:
    pass


RARE_OPCODES: dict[int, Callable[[PickleMachine, Stack, int], int]] = {
    ord("N"): _push_constant(None),
    0x88: _push_constant(True),
    0x89: _push_constant(False),
    ord("]"): _push_new(list, 1),
    0x8F: _push_new(set, SET_OBJECTS),
    ord("J"): _push_packed("<i"),
    ord("G"): _push_packed(">d"),
    ord("I"): _push_line(_parse_integer),
    ord("L"): _push_line(_parse_integer),
    ord("F"): _push_line(float),
    ord("V"): _push_line(lambda raw: str(raw, "raw-unicode-escape")),
    ord("U"): _push_counted(1, _decode_utf8),
    ord("T"): _push_counted(4, _decode_utf8),
    ord("C"): _push_counted(1, bytes),
    ord("B"): _push_counted(4, bytes),
    0x8E: _push_counted(8, bytes),
    0x8D: _push_counted(8, _decode_utf8),
    0x96: _push_counted(8, bytearray),
    0x8A: _push_counted(1, _decode_long),
    0x8B: _push_counted(4, _decode_long),
    0x80: _run_proto,
    0x95: _run_frame,
    ord("0"): _run_pop,
    ord("2"): _run_dup,
    ord("g"): _run_get,
    ord("p"): _run_put,
    ord("c"): _run_global,
    0x93: _run_stack_global,
    0x92: _run_newobj_ex,
    0x87: _run_tuple3,
    ord("a"): _run_append,
    ord("s"): _run_setitem,
    ord("Q"): _run_binpersid,
}

MARK_OPCODES: dict[int, Callable[[PickleMachine, Stack, Stack], None]] = {
    ord("e"): _run_appends,
    0x90: _run_additems,
    0x91: _run_frozenset,
    ord("l"): _run_list,
    ord("d"): _run_dict,
    ord("1"): _run_pop_mark,
}

REFUSED: dict[int, str] = {
    0x82: "EXT1",
    0x83: "EXT2",
    0x84: "EXT4",
    ord("i"): "INST",
    ord("o"): "OBJ",
    ord("P"): "PERSID",
    ord("S"): "STRING",
    0x97: "NEXT_BUFFER",
    0x98: "READONLY_BUFFER",
}
