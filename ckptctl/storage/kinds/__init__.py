"""How virtual files are computed: a :class:`Kind` each, found in the modules of this package.

A module has ``KINDS``, its kinds by name. Nothing else needs to be told about them. Each reads the
tensors that a virtual file is made of from :class:`Inputs`.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from ckptctl import dtypes
from ckptctl.catalog import Box, Computed, TensorEntry
from ckptctl.installed import has_torch, require_package, require_torch
from ckptctl.planner.copying.copies import permutes
from ckptctl.planner.plan import Plan
from ckptctl.planner.strided import Strided
from ckptctl.storage.arithmetic import elements
from ckptctl.storage.tensor_reader import TensorReader

if TYPE_CHECKING:
    import torch

    from ckptctl.storage.computed import OpenFiles
    from ckptctl.storage.files import SourceFiles
    from ckptctl.storage.outcome import Rounding


SEEK = 64 << 10
"""Bytes that are read in the time in which reading begins anew elsewhere."""
MOST = 8 << 20
"""Bytes of whole rows that are read where a part of them is asked for."""
PIECE = 1 << 20
"""Bytes of a matrix that are read at a time."""


class Inputs:
    """What one virtual file is made of."""

    def __init__(self, opened: OpenFiles, name: str, computed: Computed) -> None:
        self.opened = opened
        self._name = name
        self._computed = computed
        self._readers: dict[str, TensorReader] = {}

    def entry(self, key: str) -> TensorEntry:
        """Return the tensor called *key* in the definition."""
        return self._computed.inputs[key].entry

    def files(self, key: str) -> SourceFiles:
        """Return the files that the input *key* lies in."""
        return self.opened.roots(self._computed.inputs[key].root)

    def room(self, use: str, nbytes: int) -> memoryview:
        """Return memory for one use, until more is asked for the same; not an input's name."""
        return self.opened.buffers.get(use, nbytes)[:nbytes]

    def tensor(self, key: str, rows: range) -> torch.Tensor:
        """Return consecutive rows of the input *key*, seen as a matrix of its last dimension.

        Returns:
            ``[len(rows), last dimension]``; a copy, until the next call for *key*.
        """
        entry = self.entry(key)
        return elements(self.raw(key, rows), entry.dtype, last_of(entry.shape))

    def block(self, key: str, rows: range, columns: range) -> torch.Tensor:
        """Return consecutive columns of such rows, of which no more is read where that is faster.

        Returns:
            ``[len(rows), len(columns)]``; until the next call for *key*.
        """
        entry = self.entry(key)
        width, item = last_of(entry.shape), dtypes.itemsize(entry.dtype)
        more, whole = (width - len(columns)) * item, len(rows) * width * item
        near = more == 0 or (more < SEEK and whole <= MOST)
        if near or len(entry.extents) > 1 or not self.files(key).local:
            return self.tensor(key, rows)[:, columns.start : columns.stop]
        return elements(self._read(key, rows, columns), entry.dtype, len(columns))

    def turned(
        self,
        key: str,
        columns: range,
        dtype: str,
        made: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Return what is made of consecutive columns of a matrix, transposed.

        Args:
            key: Of the matrix.
            columns: They are columns of *key*.
            dtype: What *made* returns.
            made: Is called for some rows.

        Returns:
            ``[columns, rows]``; kept for the next call, so do not write.
        """
        import torch

        entry = self.entry(key)
        height, _ = entry.shape
        step = max(PIECE // (entry.shape[1] * dtypes.itemsize(entry.dtype)), 1)

        def read() -> memoryview:
            found = [
                # torch transposes in blocks where it writes dense memory. One row is dense already,
                # in memory that the next one takes, so it has to be copied, too.
                made(self.block(key, range(start, min(start + step, height)), columns))
                .t()
                .clone(memory_format=torch.contiguous_format)
                for start in range(0, height, step)
            ]
            kept = memoryview(bytearray(sum(part.nbytes for part in found)))
            into, start = elements(kept, dtype, height), 0
            for part in found:
                into[:, start : start + part.shape[1]].copy_(part)
                start += part.shape[1]
            return kept

        return elements(self.opened.kept((self._name, f"{key} {columns}"), read), dtype, height)

    def raw(self, key: str, rows: range) -> memoryview:
        """Return the bytes of :meth:`tensor`, for what needs no arithmetic; likewise a copy."""
        return self._read(key, rows, range(last_of(self.entry(key).shape)))

    def scratch(self, use: str, dtype: str, count: int) -> torch.Tensor:
        """Return room for *count* elements, whatever is in it, until the next call for *use*.

        New memory for each rectangle would cost more than most of what is done in it.
        """
        room = self.room(f"/{use}", count * dtypes.itemsize(dtype))
        return elements(room, dtype, max(count, 1)).view(-1)[:count]

    def given(self, key: str, rows: range) -> torch.Tensor | None:
        """Return the source's own elements behind :meth:`tensor`; None: all of them are finite."""
        made = self.opened.computed(self.entry(key).extents[0].file)
        return made.given(rows) if made else self.tensor(key, rows)

    def whole(self, key: str) -> torch.Tensor:
        """Return all of a small input as it is shaped; kept for the next call, so do not write.

        Nothing bounds its size: it is for inputs that are small by nature.
        """
        entry = self.entry(key)
        rows, columns = range(math.prod(entry.shape[:-1])), range(last_of(entry.shape))

        def read() -> memoryview:
            return self._read(key, rows, columns, memoryview(bytearray(entry.nbytes)))

        kept = self.opened.kept((self._name, key), read)
        return elements(kept, entry.dtype, last_of(entry.shape)).view(entry.shape)

    def _read(
        self, key: str, rows: range, columns: range, room: memoryview | None = None
    ) -> memoryview:
        """Fill *room*, or that of *key*, with consecutive columns of consecutive rows."""
        if room is None:
            room = self.room(key, len(rows) * len(columns) * dtypes.itemsize(self.entry(key).dtype))
        reader = self._readers.get(key)
        if reader is None:
            files = self.opened.reader(self._computed.inputs[key].root)
            matrix = Strided.whole(self.entry(key)).as_matrix()
            reader = self._readers[key] = TensorReader(files, matrix)
        reader.fill(rectangle(rows, columns), room)
        return room


Given = Callable[[Inputs, range], "torch.Tensor | None"]
"""Returns of consecutive rows the elements that the source itself has there, ``[rows, last
dimension]``: what is infinite or NaN among these may be so. None: nothing is."""
Compute = Callable[[Inputs, Computed, range, range, memoryview], "Rounding | None"]


@dataclass(frozen=True, slots=True)
class Kind:
    """How one kind of virtual file is computed.

    Attributes:
        compute: Writes a rectangle of a virtual file. It gets what reads the tensors that the file
            is made of; the file, seen as a matrix: its last dimension and all others; consecutive
            rows; consecutive elements of each of them; and room for exactly those elements,
            row-major, in the file's dtype. Where it quantizes, it returns how far these are off.
        given: Knows the source's own elements, where the arithmetic can leave the range of a
            dtype; None: it does none.
        plain: Whether a file is computed without torch.
        rows: How many rows are best computed together, from a multiple of that number on.
        package: The package that computes it, which an extra of the same name installs; empty:
            there is none beside torch.
    """

    compute: Compute
    given: Given | None = None
    plain: Callable[[Computed], bool] = lambda _: False
    rows: int = 1
    package: str = ""


@cache
def kinds() -> dict[str, Kind]:
    """Return the kinds by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    modules = (importlib.import_module(f"{__name__}.{name}") for name in names)
    return {name: kind for module in modules for name, kind in module.KINDS.items()}


def given_to(computed: Computed) -> Given | None:
    """Return the reader of the source's own elements; None: *computed* does no arithmetic."""
    return kinds()[computed.kind].given


def needs_torch(computed: Computed) -> bool:
    """Return whether torch computes *computed*."""
    return not kinds()[computed.kind].plain(computed)


def takes_torch(plan: Plan) -> bool:
    """Return whether elements are computed, cast or transposed one by one: with torch."""
    return calculates(plan) or any(map(permutes, plan.transfers))


def calculates(plan: Plan) -> bool:
    """Return whether elements are computed or cast: with torch."""
    if any(map(needs_torch, plan.computed.values())):
        return True
    return any(one.casts for one in plan.transfers)


def require_torch_for(plan: Plan, what: str) -> None:
    """Refuse *plan*, before anything is read, where it takes torch and there is none."""
    if not has_torch() and takes_torch(plan):
        require_torch(what, "elements are cast, computed or transposed one by one")
    for package in sorted({kinds()[one.kind].package for one in plan.computed.values()} - {""}):
        require_package(package, what)


def last_of(shape: tuple[int, ...]) -> int:
    """Return the last dimension of *shape*; 1 where there is none."""
    return shape[-1] if shape else 1


def rectangle(rows: range, columns: range) -> Box:
    """Return a box of a matrix."""
    return Box((rows.start, columns.start), (len(rows), len(columns)))
