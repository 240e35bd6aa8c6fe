"""How virtual files are computed: a :class:`Kind` each, found in the modules of this package.

A module has ``KINDS``, its kinds by name. Nothing else needs to be told about them. Each fills an
:class:`Output`, a rectangle of a virtual file, from the :class:`InputTensor` that it is made of.
"""

from __future__ import annotations

import importlib
import pkgutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from ckptctl import dtypes
from ckptctl.catalog import Box, Computed, Input
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

T = TypeVar("T")
SEEK = 64 << 10
"""Bytes that are read in the time in which reading begins anew elsewhere."""
MOST = 8 << 20
"""Bytes of whole rows that are read where a part of them is asked for."""
PIECE = 1 << 20
"""Bytes of a matrix that are read at a time."""


class InputTensor:
    """One tensor that a virtual file is made of, read as a matrix of its last dimension.

    Attributes:
        entry: The tensor.
    """

    def __init__(self, opened: OpenFiles, made_of: Input, file: str, number: int) -> None:
        self.entry = made_of.entry
        self._opened = opened
        self._root = made_of.root
        self._key = file, number

    @property
    def files(self) -> SourceFiles:
        """Return the files that it lies in."""
        return self._opened.roots(self._root)

    def read(self, rows: range, columns: range | None = None) -> torch.Tensor:
        """Return consecutive columns, or all, of consecutive rows, until the next call.

        No more than the columns is read where that is faster.
        """
        width, item = last_of(self.entry.shape), dtypes.itemsize(self.entry.dtype)
        part = columns or range(width)
        more, complete = (width - len(part)) * item, len(rows) * width * item
        near = more == 0 or (more < SEEK and complete <= MOST)
        taken = part
        if near or len(self.entry.extents) > 1 or not self.files.local:
            taken = range(width)
        memory = self._opened.buffers.get(str(self._key[1]), len(rows) * len(taken) * item)
        memory = memory[: len(rows) * len(taken) * item]
        self._reader.fill(rectangle(rows, taken), memory)
        matrix = elements(memory, self.entry.dtype, len(taken))
        return matrix if taken == part else matrix[:, part.start : part.stop]

    def read_all(self) -> torch.Tensor:
        """Return all of a small tensor as it is shaped; kept for the next call, so do not write.

        Nothing bounds its size: it is for tensors that are small by nature.
        """
        entry = self.entry
        content = self._opened.cached(self._key, lambda: memoryview(self._reader.read()))
        return elements(content, entry.dtype, last_of(entry.shape)).view(entry.shape)

    def read_transposed(
        self, columns: range, dtype: str, convert: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Return consecutive columns of a matrix, converted some rows at a time and transposed.

        Args:
            columns: The columns.
            dtype: That of the result of *convert*.
            convert: Is called for some rows.

        Returns:
            ``[columns, rows]``; kept for the next call, so do not write.
        """
        import torch

        height, width = self.entry.shape
        step = max(PIECE // (width * dtypes.itemsize(dtype)), 1)

        def read() -> memoryview:
            parts = [
                # torch transposes in blocks where it writes dense memory. One row is dense already,
                # in memory that the next one takes, so it has to be copied, too.
                convert(self.read(range(start, min(start + step, height)), columns))
                .t()
                .clone(memory_format=torch.contiguous_format)
                for start in range(0, height, step)
            ]
            content = memoryview(bytearray(sum(part.nbytes for part in parts)))
            into, start = elements(content, dtype, height), 0
            for part in parts:
                into[:, start : start + part.shape[1]].copy_(part)
                start += part.shape[1]
            return content

        return elements(self._opened.cached((*self._key, columns), read), dtype, height)

    def source_rows(self, rows: range) -> torch.Tensor | None:
        """Return the elements that the checkpoint itself has in *rows*, or None if all are finite.

        Infinite and NaN elements among them are not made by arithmetic.
        """
        made = self._opened.computed(self.entry.extents[0].file)
        return made.source_rows(rows) if made and made.kind.overflows else self.read(rows)

    @cached_property
    def _reader(self) -> TensorReader:
        matrix = Strided.whole(self.entry).as_matrix()
        return TensorReader(self._opened.reader(self._root), matrix)


@dataclass(frozen=True, slots=True)
class Output:
    """A rectangle of a virtual file, which is seen as a matrix of its last dimension.

    Attributes:
        opened: The files of this thread.
        computed: The definition of the file.
        inputs: The tensors that it is made of.
        rows: Consecutive rows.
        columns: Consecutive elements of each of them.
        memory: Room for exactly those elements, row-major.
    """

    opened: OpenFiles
    computed: Computed
    inputs: Sequence[InputTensor]
    rows: range
    columns: range
    memory: memoryview

    @property
    def arguments(self) -> Any:
        """Return what else the kind has to know, of a type of its own."""
        return self.computed.arguments

    @property
    def elements(self) -> torch.Tensor:
        """Return the elements, ``[rows, columns]``, to be written."""
        return elements(self.memory, self.computed.dtype, len(self.columns))

    def groups(self, size: int) -> range:
        """Return the groups of so many columns that the rectangle has elements of."""
        return range(self.columns.start // size, -(-self.columns.stop // size))

    def write(self, values: torch.Tensor, first: int = 0) -> None:
        """Write, cast, the columns out of *values*: more of the same rows, from *first* on."""
        wide = values.reshape(len(self.rows), -1)
        self.elements.copy_(wide[:, self.columns.start - first : self.columns.stop - first])

    def scratch(self, use: str, dtype: str, count: int) -> torch.Tensor:
        """Return room for *count* elements, whatever is in it, until the next call for *use*.

        New memory for each rectangle would cost more than most of what is done in it.
        """
        nbytes = count * dtypes.itemsize(dtype)
        room = self.opened.buffers.get(f"/{use}", nbytes)[:nbytes]
        return elements(room, dtype, max(count, 1)).view(-1)[:count]


@dataclass(frozen=True, slots=True)
class Kind:
    """How one kind of virtual file is computed.

    Attributes:
        compute: Fills a rectangle; where it quantizes, it returns how far the elements are off.
        overflows: Whether its arithmetic can leave the range of a dtype.
        keeps_infinite: Whether elements that are infinite or NaN in the first input, which has the
            file's shape, may be so here; else arithmetic has made them.
        needs_torch: Whether torch computes a file.
        rows: How many rows are best computed together, from a multiple of that number on.
        package: The package that computes it, which an extra of the same name installs; empty:
            there is none beside torch.
    """

    compute: Callable[[Output], Rounding | None]
    overflows: bool = False
    keeps_infinite: bool = False
    needs_torch: Callable[[Computed], bool] = lambda _: True
    rows: int = 1
    package: str = ""


@dataclass(slots=True)
class _Result(Generic[T]):
    lock: threading.Lock = field(default_factory=threading.Lock)
    value: T | None = None


class SharedResults(Generic[T]):
    """Results that all threads share, by the files that they are of: each is computed once.

    Args:
        is_too_much: Returns whether results, each None until it is there, are too many to keep;
            those used longest ago are let go then. None: all are kept as long as the files.
    """

    def __init__(self, is_too_much: Callable[[Sequence[T | None]], bool] | None = None) -> None:
        self._is_too_much = is_too_much
        self._lock = threading.Lock()
        self._by_files: WeakKeyDictionary[SourceFiles, OrderedDict[object, _Result[T]]] = (
            WeakKeyDictionary()
        )

    def get(self, files: SourceFiles, key: object, compute: Callable[[], T]) -> T:
        """Return the result of *compute* for *key* of *files*, perhaps that of another thread."""
        with self._lock:
            known = self._by_files.setdefault(files, OrderedDict())
            result = known.setdefault(key, _Result())
            known.move_to_end(key)
            while self._is_too_much and len(known) > 1:
                if not self._is_too_much([one.value for one in known.values()]):
                    break
                known.popitem(last=False)
        with result.lock:
            if result.value is None:
                result.value = compute()
            return result.value


@cache
def kinds() -> dict[str, Kind]:
    """Return the kinds by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    modules = (importlib.import_module(f"{__name__}.{name}") for name in names)
    return {name: kind for module in modules for name, kind in module.KINDS.items()}


def can_overflow(computed: Computed) -> bool:
    """Return whether *computed* does arithmetic that can leave the range of a dtype."""
    return kinds()[computed.kind].overflows


def needs_torch(computed: Computed) -> bool:
    """Return whether torch computes *computed*."""
    return kinds()[computed.kind].needs_torch(computed)


def takes_torch(plan: Plan) -> bool:
    """Return whether elements are computed, cast or transposed one by one: with torch."""
    return calculates(plan) or any(map(permutes, plan.transfers))


def calculates(plan: Plan) -> bool:
    """Return whether elements are computed or cast: with torch."""
    if any(map(needs_torch, plan.computed.values())):
        return True
    return any(transfer.casts for transfer in plan.transfers)


def require_torch_for(plan: Plan, what: str) -> None:
    """Refuse *plan*, before anything is read, where it takes torch and there is none."""
    if not has_torch() and takes_torch(plan):
        require_torch(what, "elements are cast, computed or transposed one by one")
    packages = {kinds()[computed.kind].package for computed in plan.computed.values()}
    for package in sorted(packages - {""}):
        require_package(package, what)


def last_of(shape: tuple[int, ...]) -> int:
    """Return the last dimension of *shape*; 1 where there is none."""
    return shape[-1] if shape else 1


def rectangle(rows: range, columns: range) -> Box:
    """Return a box of a matrix."""
    return Box((rows.start, columns.start), (len(rows), len(columns)))
