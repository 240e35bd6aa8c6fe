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
``-``                 the layout has no such tensor
``key#1``             part 1 of a tensor that is concatenated along its first dimension
``key#1.2``           part 1 of a tensor that is concatenated along dimension 2
``experts.{x}.key``   an index that is an axis of the tensor: it is spread over as many keys
====================  ============================================================================

The same key in several rows, without ``#``: one stored tensor is all of them. Later tables replace
cells or axes of earlier ones; a layout may be declared like another and then has that one's cells
wherever the tables give it none of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from ckptctl.planner.families.templates import Template


class TableError(ValueError):
    """A table is not written as this module describes."""

    def __init__(self, message: str, line: str) -> None:
        super().__init__(message)
        self.line = line


Dims = tuple[tuple[str, ...], ...]

_GROUP = re.compile(r"\(([^()]*)\)|([a-z]+\*?)")
_GAP = re.compile(r" {2,}")
_NAME = re.compile(r"(\w+)(?:@(\w+))?(?:(\?)(\w*))?\Z")
_CELL = re.compile(r"([^#\s]+)(?:#(\d)(?:\.(\d))?)?\Z")


@dataclass(frozen=True, slots=True)
class Leaf:
    """How one layout stores a logical tensor.

    Attributes:
        dims: The axes grouped in each stored dimension, outermost first.
        spread: Axes that are indices of the key: each entry is a stored tensor of its own.
        part: Its place among those that are concatenated in the stored tensor; None: not so.
        along: The dimension along which they are concatenated.
    """

    key: Template
    dims: Dims
    spread: tuple[str, ...] = ()
    part: int | None = None
    along: int = 0

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
    if _GROUP.sub("", text).strip():
        raise ValueError(f"axes `{text}`")
    groups = [(m[1] if m[1] is not None else m[2]).split() for m in _GROUP.finditer(text)]
    starred = [axis[:-1] for group in groups for axis in group if axis.endswith("*")]
    dims = tuple(tuple(axis.removesuffix("*") for axis in group) for group in groups)
    names = [axis for group in dims for axis in group]
    if len(starred) > 1 or len(set(names)) != len(names):
        raise ValueError(f"axes `{text}`: repeated")
    return dims, starred[0] if starred else None


def show_dims(dims: Dims) -> str:
    """Return *dims* as a table writes them."""
    return " ".join(group[0] if len(group) == 1 else f"({' '.join(group)})" for group in dims)


@dataclass(frozen=True, slots=True)
class _Cell:
    key: Template
    part: int | None
    along: int
    axes: str

    @classmethod
    def parse(cls, prefix: str, text: str) -> _Cell | None:
        name, _, axes = text.partition(" ")
        if name == "-":
            return None
        found = _CELL.match(name)
        if found is None:
            raise ValueError(f"cell `{text}`")
        parse_dims(axes)
        part = None if found[2] is None else int(found[2])
        return cls(Template.parse(prefix + found[1]), part, int(found[3] or 0), axes)

    def leaf(self, indices: tuple[str, ...], axes: str) -> Leaf:
        own = bool(self.axes)
        return _leaf(self.key.text, self.axes or axes, own, indices, self.part, self.along)


@lru_cache(maxsize=16384)
def _leaf(
    text: str, axes: str, own: bool, indices: tuple[str, ...], part: int | None, along: int
) -> Leaf:
    """Return a leaf, the same one for all families that store a tensor alike."""
    key, dims = Template.parse(text), parse_dims(axes)[0]
    spread = tuple(index for index in key.indices if index not in indices)
    if not own:
        kept = (tuple(axis for axis in group if axis not in spread) for group in dims)
        dims = tuple(group for group, old in zip(kept, dims, strict=True) if group or not old)
    return Leaf(key, dims, spread, part, along)


@dataclass(slots=True)
class _Row:
    block: int
    indices: tuple[str, ...]
    optional: bool
    together: str
    variant: str | None
    axes: str = ""
    cells: dict[str, _Cell | None] = field(default_factory=dict)

    def tensor(self, name: str, like: Mapping[str, str]) -> Tensor:
        split = parse_dims(self.axes)[1]
        cells = self.cells | {
            layout: self.cells.get(base)
            for layout, base in like.items()
            if layout not in self.cells
        }
        leaves = {
            layout: cell.leaf(self.indices, self.axes) for layout, cell in cells.items() if cell
        }
        return Tensor(
            name,
            self.block,
            self.indices,
            split,
            self.optional,
            self.variant,
            leaves,
            together=self.together,
        )


@dataclass(frozen=True, slots=True)
class _Column:
    layouts: tuple[str, ...]
    prefix: str

    @classmethod
    def parse(cls, text: str) -> _Column:
        names, _, prefix = text.partition(":")
        return cls(tuple(name.strip() for name in names.split(",")), prefix.strip())


def parse_tables(tables: Sequence[str], like: Mapping[str, str]) -> tuple[Tensor, ...]:
    """Return the logical tensors of *tables*, later ones amending earlier ones."""
    rows: dict[str, _Row] = {}
    for block, table in enumerate(tables):
        for line in _lines(table):
            new = _Row(block, line.indices, line.optional, line.together, line.variant)
            row = rows.setdefault(line.name, new)
            row.axes = row.axes if line.axes is None else line.axes
            row.cells |= line.cells
    return tuple(row.tensor(name, like) for name, row in rows.items())


class _Line(NamedTuple):
    """A row of one table."""

    name: str
    indices: tuple[str, ...]
    optional: bool
    together: str
    variant: str | None
    axes: str | None
    cells: Mapping[str, _Cell | None]


@lru_cache(maxsize=1024)
def _lines(table: str) -> tuple[_Line, ...]:
    """Return the rows of a table; many families share one."""
    header, *body = [line.strip() for line in table.splitlines() if line.strip()] or [""]
    names = _GAP.split(header)
    if names[0] != "logical":
        raise TableError("a table begins with `logical`", header)
    columns = [_Column.parse(text) for text in names if text not in ("logical", "axes")]
    found = []
    for line in body:
        try:
            found.append(_read_line(names, columns, _GAP.split(line)))
        except ValueError as error:
            raise TableError(str(error), line) from error
    return tuple(found)


def _read_line(names: list[str], columns: list[_Column], cells: list[str]) -> _Line:
    if len(cells) != len(names):
        raise ValueError(f"row `{cells[0]}` has {len(cells)} cells of {len(names)}")
    prefix = columns[0].prefix if columns else ""
    indices = Template.parse(prefix.rstrip(".")).indices if prefix else ()
    called = _NAME.match(cells[0])
    if called is None:
        raise ValueError(f"row `{cells[0]}`")
    name = ".".join([called[1], *(f"{{{index}}}" for index in indices)])
    axes = dict(zip(names, cells, strict=True)).get("axes")
    parse_dims(axes or "")
    kept = {
        layout: _Cell.parse(column.prefix, cell)
        for column, cell in zip(columns, cells[len(names) - len(columns) :], strict=True)
        for layout in column.layouts
    }
    return _Line(name, indices, bool(called[3]), called[4] or "", called[2], axes, kept)
