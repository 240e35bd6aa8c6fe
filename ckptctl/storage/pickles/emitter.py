"""Opcodes of plain values, and the memo of what was written before."""

from __future__ import annotations

import struct

from ckptctl.errors import RefusedError
from ckptctl.storage.pickles.inert import Global

_OLD_MODULES = {"builtins": "__builtin__", "copyreg": "copy_reg"}
_UINT = struct.Struct("<I").pack
_INT = struct.Struct("<i").pack
_DOUBLE = struct.Struct(">d").pack
_BININT1 = tuple(b"K" + bytes((value,)) for value in range(256))
_BINPUT = tuple(b"q" + bytes((index,)) for index in range(256))
_BINGET = tuple(b"h" + bytes((index,)) for index in range(256))


class PickleEmitter:
    """Collects the opcodes of one pickle."""

    __slots__ = ("emit", "globals", "out", "size", "strings")

    def __init__(self) -> None:
        self.out = bytearray()
        self.emit = self.out.extend
        self.strings: dict[str, int] = {}
        self.globals: dict[Global, int] = {}
        self.size = 0

    def put(self) -> int:
        """Remember the object just written; return its memo index."""
        index = self.size
        self.size = index + 1
        self.emit(_BINPUT[index] if index < 256 else b"r" + _UINT(index))
        return index

    def get(self, index: int) -> None:
        """Write a reference to a remembered object."""
        self.emit(_BINGET[index] if index < 256 else b"j" + _UINT(index))

    def string(self, text: str) -> None:
        """Write text; equal texts are shared."""
        index = self.strings.get(text)
        if index is not None:
            self.get(index)
            return
        raw = text.encode("utf-8", "surrogatepass")
        self.emit(b"X" + _UINT(len(raw)) + raw)
        self.strings[text] = self.put()

    def integer(self, value: int) -> None:
        """Write a whole number in the shortest of its forms."""
        if 0 <= value < 256:
            self.emit(_BININT1[value])
        elif 0 <= value < 65536:
            self.emit(b"M" + value.to_bytes(2, "little"))
        elif -(1 << 31) <= value < 1 << 31:
            self.emit(b"J" + _INT(value))
        else:
            raw = _long(value)
            small = len(raw) < 256
            self.emit((b"\x8a" + bytes((len(raw),)) if small else b"\x8b" + _UINT(len(raw))) + raw)

    def truth(self, value: bool) -> None:
        """Write True or False."""
        self.emit(b"\x88" if value else b"\x89")

    def nothing(self, _: None) -> None:
        """Write None."""
        self.emit(b"N")

    def number(self, value: float) -> None:
        """Write a float."""
        self.emit(b"G" + _DOUBLE(value))

    def name(self, found: Global) -> None:
        """Write a global."""
        index = self.globals.get(found)
        if index is not None:
            self.get(index)
            return
        module = _OLD_MODULES.get(found.module, found.module)
        if "\n" in module + found.name:
            raise RefusedError("a global with a line break in its name cannot be written")
        self.emit(f"c{module}\n{found.name}\n".encode())
        self.globals[found] = self.put()


def _long(value: int) -> bytes:
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if len(raw) > 1 and value < 0 and raw[-1] == 0xFF and raw[-2] & 0x80:
        return raw[:-1]
    return raw
