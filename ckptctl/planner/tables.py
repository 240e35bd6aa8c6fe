"""The text tables in which a model family is written, and the tensors they describe.

One row is one logical tensor, one column one layout (or several that agree)::

    logical  axes        hf: model.layers.{i}.              meta, torchtitan@0.2: layers.{i}.
    q        (h* r p) d  self_attn.q_proj.weight (h p r) d  attention.wq.weight
    q_bias?  (h* r p)    self_attn.q_proj.bias (h p r)      -

Columns are separated by two spaces or more. A column's prefix stands before each of its keys; its
indices (``{i}``) are those of the logical tensor as well. ``axes`` names the axes of each stored
dimension, outermost first, in einops' notation; a cell may give its own order after the key.
``*`` marks the axis that is divided among model-parallel ranks (none: every rank has a copy),
``?`` a tensor that may be absent, ``-`` a layout that has no such tensor. Later tables replace
cells or axes of earlier ones; a layout may be declared like another and then has that one's cells
wherever the tables give it none of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckptctl.planner.templates import Template

Dims = tuple[tuple[str, ...], ...]

_GROUP = re.compile(r"\(([^()]*)\)|([a-z]+\*?)")


@dataclass(frozen=True, slots=True)
class Leaf:
    """How one layout stores a logical tensor.

    Attributes:
        key: Its name there.
        dims: The axes grouped in each stored dimension, outermost first.
    """

    key: Template
    dims: Dims

    @property
    def axes(self) -> tuple[str, ...]:
        """Return all axes in stored order."""
        return tuple(axis for group in self.dims for axis in group)

    def __str__(self) -> str:
        return show_dims(self.dims)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A logical tensor: one row.

    Attributes:
        name: As in ``q.{i}``.
        block: Number of the table it stands in; tensors of a block repeat together per index.
        indices: Names of its indices.
        split: The axis that is divided among model-parallel ranks; None: replicated.
        optional: Whether a model may do without it.
        leaves: By layout.
    """

    name: str
    block: int
    indices: tuple[str, ...]
    split: str | None
    optional: bool
    leaves: Mapping[str, Leaf]


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


@dataclass(slots=True)
class _Row:
    block: int
    indices: tuple[str, ...]
    optional: bool
    axes: str = ""
    cells: dict[str, tuple[Template, str] | None] = field(default_factory=dict)

    def tensor(self, name: str, like: Mapping[str, str]) -> Tensor:
        split = parse_dims(self.axes)[1]
        cells = self.cells | {
            layout: self.cells.get(base)
            for layout, base in like.items()
            if layout not in self.cells
        }
        leaves = {
            layout: Leaf(cell[0], parse_dims(cell[1] or self.axes)[0])
            for layout, cell in cells.items()
            if cell
        }
        return Tensor(name, self.block, self.indices, split, self.optional, leaves)


@dataclass(frozen=True, slots=True)
class _Column:
    layouts: tuple[str, ...]
    prefix: str

    @classmethod
    def parse(cls, text: str) -> _Column:
        names, _, prefix = text.partition(":")
        return cls(tuple(name.strip() for name in names.split(",")), prefix.strip())


def parse_tables(tables: Sequence[str], like: Mapping[str, str]) -> tuple[Tensor, ...]:
    """Return the logical tensors of *tables*, later ones amending earlier ones.

    Args:
        tables: As the module describes.
        like: For a layout the one whose cells it has by default.

    Raises:
        ValueError: A table is not written as the module describes.
    """
    rows: dict[str, _Row] = {}
    for block, table in enumerate(tables):
        lines = [re.split(r" {2,}", line.strip()) for line in table.splitlines() if line.strip()]
        header, *body = lines
        if header[0] != "logical":
            raise ValueError("a table begins with `logical`")
        for cells in body:
            if len(cells) != len(header):
                raise ValueError(f"row `{cells[0]}` has {len(cells)} cells of {len(header)}")
            _read_row(rows, block, header, cells)
    return tuple(row.tensor(name, like) for name, row in rows.items())


def _read_row(rows: dict[str, _Row], block: int, header: list[str], cells: list[str]) -> None:
    columns = [_Column.parse(text) for text in header if text not in ("logical", "axes")]
    prefix = columns[0].prefix if columns else ""
    indices = Template.parse(prefix.rstrip(".")).indices if prefix else ()
    name = ".".join([cells[0].removesuffix("?"), *(f"{{{index}}}" for index in indices)])
    row = rows.setdefault(name, _Row(block, indices, cells[0].endswith("?")))
    values = dict(zip(header, cells, strict=True))
    row.axes = values.get("axes", row.axes)
    for column, cell in zip(columns, cells[len(header) - len(columns) :], strict=True):
        key, _, own = cell.partition(" ")
        for layout in column.layouts:
            row.cells[layout] = None if key == "-" else (Template.parse(column.prefix + key), own)
