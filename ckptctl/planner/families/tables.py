"""The text tables in which a model family is written, and the tensors they describe.

One row is one logical tensor, one column one layout (or several that agree)::

    logical  axes        hf: model.layers.{i}.              meta, torchtitan@0.2: layers.{i}.
    q        (h* r p) d  self_attn.q_proj.weight (h p r) d  attention.wq.weight
    q_bias?  (h* r p)    self_attn.q_proj.bias (h p r)      -

Columns are separated by two spaces or more. A column's prefix stands before each of its keys; its
indices (``{i}``) are those of the logical tensor as well. ``axes`` names the axes of each stored
dimension, outermost first, in einops' notation; a cell may give its own order after the key.

====================  ============================================================================
``*`` on an axis      it is divided among model-parallel ranks (none: every rank has a copy)
``name?``             the tensor may be absent from a whole model
``name?word``         likewise, but all tensors with this word are there, or none
``name@moe``          it belongs to a variant of the layer (:attr:`Family.variants`)
``scalar``            as its axes: it is a single number, a tensor without dimensions
``-``                 the layout has no such tensor
``key#1``             part 1 of a tensor that is concatenated along its first dimension
``key#1.2``           part 1 of a tensor that is concatenated along dimension 2
``key#1/k``           part 1 of a tensor whose rows hold all parts for each index along axis ``k``,
                      the outermost of its first dimension: query groups
``key-1``             its elements are stored less 1: a norm whose weight is added to one
``experts.{x}.key``   an index that is an axis of the tensor: it is spread over as many keys
``{c=gate|up}.key``   likewise, with words for numbers: that of entry 0, that of entry 1, ...
====================  ============================================================================

The same key in several rows, without ``#``: one stored tensor is all of them. Later tables replace
cells or axes of earlier ones; a layout may be declared like another and then has that one's cells
wherever the tables give it none of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from ckptctl.planner.families.templates import Template
from ckptctl.units import counted


class TableError(ValueError):
    """A table is not written as this module describes."""

    def __init__(self, message: str, line: str) -> None:
        super().__init__(message)
        self.line = line


Dims = tuple[tuple[str, ...], ...]

SCALAR = "scalar"
"""What a table says of the axes of a tensor that has none."""

_GROUP = re.compile(r"\(([^()]*)\)|([a-z]+\*?)")
_GAP = re.compile(r" {2,}")
_NAME = re.compile(r"(\w+)(?:@(\w+))?(?:(\?)(\w*))?\Z")
_CELL = re.compile(r"([^#\s]+?)(?:#(\d)(?:\.(\d)|/(\w+))?)?([+-]\d)?\Z")


@dataclass(frozen=True, slots=True)
class Leaf:
    """How one layout stores a logical tensor.

    Attributes:
        dims: The axes grouped in each stored dimension, outermost first.
        spread: Axes that are indices of the key: each entry is a stored tensor of its own.
        part: Its place among those that are concatenated in the stored tensor; None: not so.
        along: The dimension along which they are concatenated.
        within: The axis for each index of which they are; empty: once.
        plus: What is added to each element to store it.
    """

    key: Template
    dims: Dims
    spread: tuple[str, ...] = ()
    part: int | None = None
    along: int = 0
    within: str = ""
    plus: int = 0

    @property
    def alone(self) -> Leaf:
        """Return how it were stored if it were no part of anything."""
        return replace(self, part=None, along=0, within="")

    @property
    def place(self) -> tuple[object, ...]:
        """Return all but its key: where it lies in what is stored, and in which order."""
        return self.dims, self.spread, self.part, self.along, self.within, self.plus

    @property
    def groups(self) -> Dims:
        """Return the dimensions, those of spread axes first."""
        return (*((axis,) for axis in self.spread), *self.dims)

    @property
    def axes(self) -> tuple[str, ...]:
        """Return all axes in stored order, spread ones first."""
        return tuple(axis for group in self.groups for axis in group)

    def __str__(self) -> str:
        return show_dims(self.dims)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A logical tensor: one row.

    Attributes:
        name: As in ``q.{i}``.
        block: Number of the table it stands in; tensors of a block repeat together per index.
        split: The axis that is divided among model-parallel ranks; None: replicated.
        variant: The variant of the layer that has it; None: all of them.
        scales: The weight that it holds the scales of; None: it is no companion.
        together: What it shares with the optional tensors that it comes with; empty: it has none.
    """

    name: str
    block: int
    indices: tuple[str, ...]
    split: str | None
    optional: bool
    variant: str | None
    leaves: Mapping[str, Leaf]
    scales: str | None = None
    together: str = ""


@lru_cache(maxsize=4096)
def parse_dims(text: str) -> tuple[Dims, str | None]:
    """Return the groups of axes written as *text*, and the axis marked with a star.

    Raises:
        ValueError: Anything else than names and one level of parentheses.
    """
    if text == SCALAR:
        return (), None
    if _GROUP.sub("", text).strip():
        raise ValueError(f"invalid axes `{text}`")
    groups = [(m[1] if m[1] is not None else m[2]).split() for m in _GROUP.finditer(text)]
    starred = [axis[:-1] for group in groups for axis in group if axis.endswith("*")]
    dims = tuple(tuple(axis.removesuffix("*") for axis in group) for group in groups)
    names = [axis for group in dims for axis in group]
    if len(starred) > 1 or len(set(names)) != len(names):
        raise ValueError(f"repeated axis in `{text}`")
    return dims, starred[0] if starred else None


def show_dims(dims: Dims) -> str:
    """Return *dims* as a table writes them."""
    if not dims:
        return SCALAR
    return " ".join(group[0] if len(group) == 1 else f"({' '.join(group)})" for group in dims)


class _Cell(NamedTuple):
    key: str
    part: int | None
    along: int
    within: str
    plus: int
    axes: str


class _Row(NamedTuple):
    """A row of one table, or what later tables made of it."""

    name: str
    indices: tuple[str, ...]
    optional: bool
    together: str
    variant: str | None
    axes: str
    cells: Mapping[str, _Cell | None]
    block: int = 0

    def tensor(self, like: Mapping[str, str]) -> Tensor:
        others = {
            layout: self.cells.get(like[layout]) for layout in like if layout not in self.cells
        }
        leaves = {
            layout: _leaf(cell, self.axes, self.indices)
            for layout, cell in {**self.cells, **others}.items()
            if cell
        }
        return Tensor(
            self.name,
            self.block,
            self.indices,
            parse_dims(self.axes)[1],
            self.optional,
            self.variant,
            leaves,
            together=self.together,
        )


@lru_cache(maxsize=16384)
def _leaf(cell: _Cell, axes: str, indices: tuple[str, ...]) -> Leaf:
    """Return a leaf, the same one for all families that store a tensor alike."""
    key, dims = Template.parse(cell.key), parse_dims(cell.axes or axes)[0]
    spread = tuple(index for index in key.indices if index not in indices)
    if not cell.axes:
        kept = (tuple(axis for axis in group if axis not in spread) for group in dims)
        dims = tuple(group for group, old in zip(kept, dims, strict=True) if group or not old)
    return Leaf(key, dims, spread, *cell[1:-1])


def parse_tables(tables: Sequence[str], like: Mapping[str, str]) -> tuple[Tensor, ...]:
    """Return the logical tensors of *tables*, later ones amending earlier ones.

    A layout has the cells of the one that it is *like* where it has none of its own.
    """
    rows: dict[str, _Row] = {}
    for block, table in enumerate(tables):
        for row in _rows(table):
            if known := rows.get(row.name):
                cells = {**known.cells, **row.cells}
                rows[row.name] = known._replace(axes=row.axes or known.axes, cells=cells)
            else:
                rows[row.name] = row._replace(block=block)
    return tuple(row.tensor(like) for row in rows.values())


@lru_cache(maxsize=1024)
def _rows(table: str) -> tuple[_Row, ...]:
    """Return the rows of a table; many families share one."""
    header, *body = [line.strip() for line in table.splitlines() if line.strip()] or [""]
    names = _GAP.split(header)
    if names[0] != "logical":
        raise TableError("a table must begin with `logical`", header)
    rows = []
    for line in body:
        try:
            rows.append(_row(names, _GAP.split(line)))
        except ValueError as error:
            raise TableError(str(error), line) from error
    return tuple(rows)


def _row(names: list[str], texts: list[str]) -> _Row:
    """Return the row with *texts* in the columns called *names*."""
    if len(texts) != len(names):
        raise ValueError(
            f"row `{texts[0]}` has {counted(len(texts), 'cell')} instead of {len(names)}"
        )
    called = _NAME.match(texts[0])
    if called is None:
        raise ValueError(f"invalid row name `{texts[0]}`")
    row = dict(zip(names, texts, strict=True))
    axes = row.pop("axes", "")
    parse_dims(axes)
    indices: tuple[str, ...] | None = None
    cells: dict[str, _Cell | None] = {}
    for column, text in list(row.items())[1:]:
        layouts, _, prefix = column.partition(":")
        prefix = prefix.strip()
        if indices is None:
            indices = Template.parse(prefix.rstrip(".")).indices if prefix else ()
        cell = _cell(prefix, text)
        cells |= {layout.strip(): cell for layout in layouts.split(",")}
    name = ".".join([called[1], *(f"{{{index}}}" for index in indices or ())])
    return _Row(name, indices or (), bool(called[3]), called[4] or "", called[2], axes, cells)


def _cell(prefix: str, text: str) -> _Cell | None:
    name, _, axes = text.partition(" ")
    if name == "-":
        return None
    found = _CELL.match(name)
    if found is None:
        raise ValueError(f"invalid cell `{text}`")
    parse_dims(axes)
    key = Template.parse(prefix + found[1])
    part = None if found[2] is None else int(found[2])
    return _Cell(key.text, part, int(found[3] or 0), found[4] or "", int(found[5] or 0), axes)
