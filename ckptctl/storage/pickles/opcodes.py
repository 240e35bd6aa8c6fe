"""The opcodes of pickles that are too rare for the main loop of :mod:`.pickle_reader`."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ckptctl.errors import CkptError, DamagedError, UnsafePickleError, UnsupportedError
from ckptctl.storage.pickles.inert import Inert

if TYPE_CHECKING:
    from ckptctl.storage.pickles.pickle_reader import Machine

Stack = list[object]
STOP = b"."
SET = 4
"""How many objects an empty set counts: it takes as much memory as four tuples."""


class Hook(Protocol):
    """Takes opcodes off the machine's hands.

    Attributes:
        memo: The machine's.
        taken: How many entries of the memo its opcodes made that are not in *memo*.
    """

    memo: dict[int, object]
    taken: int

    @property
    def sizes(self) -> Mapping[type, Callable[[Any], int]]:
        """Return how many values its own objects stand for, by their classes."""

    def __call__(self, data: bytes, pos: int, stack: Stack, outer: list[Stack]) -> int:
        """Do what the opcodes from *pos* on say, as far as it knows them; return where it ends."""


def past_end(data: bytes, where: str, why: str) -> CkptError:
    """Return the error for a pickle that goes on where its bytes do not.

    One without its STOP was cut off; in one that has it a length is wrong.
    """
    if data.endswith(STOP):
        return UnsupportedError("malformed pickle", where=where, why=why)
    return DamagedError("the pickle is truncated", where=where, why=why)


def _line(machine: Machine, pos: int) -> tuple[bytes, int]:
    end = machine.data.find(b"\n", pos)
    if end < 0:
        raise past_end(machine.data, machine.where, f"no newline after byte {pos:,}")
    return machine.data[pos:end], end + 1


def _take(machine: Machine, pos: int, width: int) -> tuple[bytes, int]:
    """Return the bytes behind a length field of *width* bytes."""
    start = pos + width
    end = start + int.from_bytes(machine.data[pos:start], "little")
    if end > len(machine.data):
        raise past_end(
            machine.data, machine.where, f"a string (at byte {pos:,}) extends past the end"
        )
    return machine.data[start:end], end


def _constant(value: object) -> Callable[[Machine, Stack, int], int]:
    def push(_machine: Machine, stack: Stack, pos: int) -> int:
        stack.append(value)
        return pos

    return push


def _fresh(make: Callable[[], object], count: int) -> Callable[[Machine, Stack, int], int]:
    def push(machine: Machine, stack: Stack, pos: int) -> int:
        machine.make(count)
        stack.append(make())
        return pos

    return push


def _counted(
    width: int, convert: Callable[[bytes], object]
) -> Callable[[Machine, Stack, int], int]:
    def push(machine: Machine, stack: Stack, pos: int) -> int:
        raw, pos = _take(machine, pos, width)
        stack.append(convert(raw))
        return pos

    return push


def _packed(layout: str) -> Callable[[Machine, Stack, int], int]:
    form = struct.Struct(layout)

    def push(machine: Machine, stack: Stack, pos: int) -> int:
        stack.append(form.unpack_from(machine.data, pos)[0])
        return pos + form.size

    return push


def _text(convert: Callable[[bytes], object]) -> Callable[[Machine, Stack, int], int]:
    def push(machine: Machine, stack: Stack, pos: int) -> int:
        raw, pos = _line(machine, pos)
        stack.append(convert(raw))
        return pos

    return push


def _utf8(raw: bytes) -> str:
    return str(raw, "utf-8", "surrogatepass")


def _integer(raw: bytes) -> object:
    if raw in (b"00", b"01"):
        return raw == b"01"
    return int(raw.removesuffix(b"L"))


def _long(raw: bytes) -> int:
    return int.from_bytes(raw, "little", signed=True)


def _proto(machine: Machine, _stack: Stack, pos: int) -> int:
    if machine.data[pos] > 5:
        raise UnsupportedError("malformed pickle", why=f"unknown protocol {machine.data[pos]}")
    return pos + 1


def _frame(machine: Machine, _stack: Stack, pos: int) -> int:
    if int.from_bytes(machine.data[pos : pos + 8], "little") > len(machine.data) - pos - 8:
        raise past_end(
            machine.data, machine.where, f"a frame (at byte {pos:,}) extends past the end"
        )
    return pos + 8


def _pop(_machine: Machine, stack: Stack, pos: int) -> int:
    stack.pop()
    return pos


def _dup(_machine: Machine, stack: Stack, pos: int) -> int:
    stack.append(stack[-1])
    return pos


def _get(machine: Machine, stack: Stack, pos: int) -> int:
    raw, pos = _line(machine, pos)
    stack.append(machine.memo[_slot(raw)])
    return pos


def _put(machine: Machine, stack: Stack, pos: int) -> int:
    raw, pos = _line(machine, pos)
    machine.memo[_slot(raw)] = stack[-1]
    machine.unhook()
    return pos


def _slot(raw: bytes) -> int:
    number = int(raw)
    if number < 0:
        raise UnsupportedError("malformed pickle", why=f"invalid memo entry {number}")
    return number


def _global(machine: Machine, stack: Stack, pos: int) -> int:
    module, after = _line(machine, pos)
    name, after = _line(machine, after)
    stack.append(machine.find(_utf8(module), _utf8(name), pos - 1))
    return after


def _stack_global(machine: Machine, stack: Stack, pos: int) -> int:
    name, module = stack.pop(), stack.pop()
    if type(name) is not str or type(module) is not str:
        raise UnsupportedError("malformed pickle", why="the name of a global is not a string")
    stack.append(machine.find(module, name, pos - 1))
    return pos


def _newobj_ex(machine: Machine, stack: Stack, pos: int) -> int:
    keywords, args = stack.pop(), stack.pop()
    if keywords != {}:
        raise UnsupportedError(
            "malformed pickle", why="an object is created with keyword arguments"
        )
    stack[-1] = machine.call(stack[-1], args, True)
    return pos


def _tuple3(machine: Machine, stack: Stack, pos: int) -> int:
    machine.make(1)
    third, second = stack.pop(), stack.pop()
    stack[-1] = (stack[-1], second, third)
    return pos


def _append(machine: Machine, stack: Stack, pos: int) -> int:
    value = stack.pop()
    _appends(machine, stack, [value])
    return pos


def _set_item(machine: Machine, stack: Stack, pos: int) -> int:
    value, key = stack.pop(), stack.pop()
    machine.set_items(stack[-1], [key, value])
    return pos


def _persistent(machine: Machine, stack: Stack, pos: int) -> int:
    if machine.persistent_load is None:
        raise UnsafePickleError(
            "the pickle refers to an external object",
            where=machine.where,
            why=f"persistent id at byte {pos - 1:,}",
        )
    stack[-1] = machine.persistent_load(stack[-1])
    return pos


def _appends(_machine: Machine, stack: Stack, items: Stack) -> None:
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


def _add_items(machine: Machine, stack: Stack, items: Stack) -> None:
    target = stack[-1]
    if not isinstance(target, set):
        raise UnsupportedError(
            "malformed pickle", why=f"members are added to a value of type {type(target).__name__}"
        )
    machine.check_keys(items)
    target.update(items)


def _frozenset(machine: Machine, stack: Stack, items: Stack) -> None:
    machine.make(SET)
    machine.check_keys(items)
    stack.append(frozenset(items))


def _list(machine: Machine, stack: Stack, items: Stack) -> None:
    machine.make(1)
    stack.append(items)


def _dict(machine: Machine, stack: Stack, items: Stack) -> None:
    machine.make(1)
    stack.append({})
    machine.set_items(stack[-1], items)


def _drop(_machine: Machine, _stack: Stack, _items: Stack) -> None:
    pass


COLD: dict[int, Callable[[Machine, Stack, int], int]] = {
    ord("N"): _constant(None),
    0x88: _constant(True),
    0x89: _constant(False),
    ord("]"): _fresh(list, 1),
    0x8F: _fresh(set, SET),
    ord("J"): _packed("<i"),
    ord("G"): _packed(">d"),
    ord("I"): _text(_integer),
    ord("L"): _text(_integer),
    ord("F"): _text(float),
    ord("V"): _text(lambda raw: str(raw, "raw-unicode-escape")),
    ord("U"): _counted(1, _utf8),
    ord("T"): _counted(4, _utf8),
    ord("C"): _counted(1, bytes),
    ord("B"): _counted(4, bytes),
    0x8E: _counted(8, bytes),
    0x8D: _counted(8, _utf8),
    0x96: _counted(8, bytearray),
    0x8A: _counted(1, _long),
    0x8B: _counted(4, _long),
    0x80: _proto,
    0x95: _frame,
    ord("0"): _pop,
    ord("2"): _dup,
    ord("g"): _get,
    ord("p"): _put,
    ord("c"): _global,
    0x93: _stack_global,
    0x92: _newobj_ex,
    0x87: _tuple3,
    ord("a"): _append,
    ord("s"): _set_item,
    ord("Q"): _persistent,
}

CLOSERS: dict[int, Callable[[Machine, Stack, Stack], None]] = {
    ord("e"): _appends,
    0x90: _add_items,
    0x91: _frozenset,
    ord("l"): _list,
    ord("d"): _dict,
    ord("1"): _drop,
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
