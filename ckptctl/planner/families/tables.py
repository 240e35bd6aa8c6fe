"""Parser for the text tables of a model family, and the logical tensors that they define.

Each row is a logical tensor, and each column is a layout or several layouts with the same cells::

    logical  axes        hf: model.layers.{i}.              meta, torchtitan@0.2: layers.{i}.
    q        (h* r p) d  self_attn.q_proj.weight (h p r) d  attention.wq.weight
    q_bias?  (h* r p)    self_attn.q_proj.bias (h p r)      -

Two or more spaces separate columns. The prefix of a column precedes each of its keys. Indices in
the prefix (``{i}``) are also indices of the logical tensor. ``axes`` lists the axes of each stored
dimension, outermost first, in einops' notation. A cell may list a different order after the key.

====================  ============================================================================
``*`` on an axis      it is split across model-parallel ranks (none: every rank has a copy)
``name?``             the tensor is optional
``name?word``         optional, but a model has all tensors with this word, or none
``name@moe``          it belongs to a variant of the layer (:attr:`Family.variants`)
``scalar``            as axes: a single number, a tensor without dimensions
``-``                 the layout has no such tensor
``key#1``             part 1 of a tensor that is concatenated along its first dimension
``key#1.2``           part 1 of a tensor that is concatenated along dimension 2
``key#1/k``           part 1 of a tensor whose rows hold all parts for each index along axis ``k``,
                      the outermost of its first dimension: query groups
``key-1``             stored as weight - 1, as for a norm that multiplies by 1 + weight
``experts.{x}.key``   an index that is an axis of the tensor: there is a key for each entry
``shard_{n}.key``     the same after ``shard_``, the only word that an index may follow in a part
``{c=gate|up}.key``   the same with words for numbers: that of entry 0, that of entry 1, ...
``{n=1.0|2.1}.key``   the same with words of several parts, as for blocks of some stages
``{kind=a|b}.key``    the same, if ``kind`` is declared in :attr:`Family.layer_words`: the kind of
                      the layer determines the word, and each layer has one key
====================  ============================================================================

If several rows have the same key without ``#``, one stored tensor represents all of them. Later
tables replace cells or axes of earlier ones. A layout may be declared like another one, whose cells
it then inherits unless the tables override them. Inherited keys may have other prefixes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from ckptctl.planner.families.templates import Template
from ckptctl.units import pluralize


class TableError(ValueError):
    """Error for a table of a model family that cannot be parsed."""

    def __init__(self, message: str, line: str) -> None:
        super().__init__(message)
        self.line = line


Dims = tuple[tuple[str, ...], ...]
Prefixes: TypeAlias = Mapping[str, Mapping[str, str]]

SCALAR = "scalar"
"""Table entry for the axes of a 0-d tensor."""

_GROUP = re.compile(r"\(([^()]*)\)|([a-z]+\*?)")
_GAP = re.compile(r" {2,}")
_NAME = re.compile(r"(\w+)(?:@(\w+))?(?:(\?)(\w*))?\Z")
_CELL = re.compile(r"([^#\s]+?)(?:#(\d)(?:\.(\d)|/(\w+))?)?([+-]\d)?\Z")


@dataclass(frozen=True, slots=True)
class Leaf:
    """Position and axis order of a logical tensor in a stored tensor of one layout.

    Attributes:
        key: Template of the stored tensor's key.
        dims: Axes that each stored dimension merges, outermost first.
        spread_axes: Axes that are indices of the key. Each entry along such an axis is a separate
            stored tensor.
        part: Position among the concatenated parts of the stored tensor, or None if the stored
            tensor is not concatenated.
        concat_dim: Dimension of the stored tensor along which parts are concatenated.
        interleave_axis: Axis that the parts share, if they are concatenated separately at each
            index of this axis. Otherwise empty.
        offset: Number that is added to each element when it is stored.
    """

    key: Template
    dims: Dims
    spread_axes: tuple[str, ...] = ()
    part: int | None = None
    concat_dim: int = 0
    interleave_axis: str = ""
    offset: int = 0

    @property
    def standalone(self) -> Leaf:
        """The same leaf as a separate stored tensor, which is not concatenated with other parts."""
        return Leaf(self.key, self.dims, self.spread_axes, offset=self.offset)

    @property
    def placement(self) -> tuple[object, ...]:
        """All fields except the key, for comparison of leaves with different keys."""
        return (
            self.dims,
            self.spread_axes,
            self.part,
            self.concat_dim,
            self.interleave_axis,
            self.offset,
        )

    @property
    def groups(self) -> Dims:
        """Axes of each dimension of the logical tensor. Each spread axis is a leading dimension."""
        return (*((axis,) for axis in self.spread_axes), *self.dims)

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes, with spread axes first, then the axes of the stored dimensions in order."""
        return tuple(axis for group in self.groups for axis in group)

    def __str__(self) -> str:
        return format_dims(self.dims)


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """A logical tensor, which is one row of a table.

    Attributes:
        name: Name with placeholders for indices, as in ``q.{i}``.
        block: Number of the table that defines the tensor. All tensors of a table are repeated
            together for each index value.
        indices: Names of the indices.
        split_axis: Axis that is split across model-parallel ranks, or None if every rank has the
            complete tensor.
        optional: Whether a complete model may lack the tensor.
        variant: Layer variant that has the tensor, or None if all variants have it.
        leaves: Position and axis order of the tensor in each layout, by layout name.
        scaled_weight: Name of the weight whose quantization scales the tensor contains, or None.
        group: Word of the group of optional tensors to which it belongs, or empty.
    """

    name: str
    block: int
    indices: tuple[str, ...]
    split_axis: str | None
    optional: bool
    variant: str | None
    leaves: Mapping[str, Leaf]
    scaled_weight: str | None = None
    group: str = ""


@lru_cache(maxsize=4096)
def parse_dims(text: str) -> tuple[Dims, str | None]:
    """Parse the axes of each dimension, such as ``(h* e) d``.

    Returns:
        The axes of each dimension, and the axis with a star, or None if no axis has one.

    Raises:
        ValueError: *text* has other characters or nested parentheses, or an axis is repeated.
    """
    if text == SCALAR:
        return (), None
    if _GROUP.sub("", text).strip():
        raise ValueError(f"invalid axes `{text}`")
    groups = [(m[1] if m[1] is not None else m[2]).split() for m in _GROUP.finditer(text)]
    starred_axes = [axis[:-1] for group in groups for axis in group if axis.endswith("*")]
    dims = tuple(tuple(axis.removesuffix("*") for axis in group) for group in groups)
    names = [axis for group in dims for axis in group]
    if len(starred_axes) > 1 or len(set(names)) != len(names):
        raise ValueError(f"repeated axis in `{text}`")
    return dims, starred_axes[0] if starred_axes else None


def format_dims(dims: Dims) -> str:
    """Format *dims* in the notation of a table, such as ``(h e) d``."""
    if not dims:
        return SCALAR
    return " ".join(group[0] if len(group) == 1 else f"({' '.join(group)})" for group in dims)


class _Cell(NamedTuple):
    key: str
    part: int | None
    concat_dim: int
    interleave_axis: str
    offset: int
    axes: str


class _Row(NamedTuple):
    """A row of a table, or the result of merging rows with the same name from several tables."""

    name: str
    indices: tuple[str, ...]
    optional: bool
    group: str
    variant: str | None
    axes: str
    cells: Mapping[str, _Cell | None]
    block: int = 0

    def build_tensor(
        self, like: Mapping[str, str], prefixes: Prefixes, layer_words: frozenset[str]
    ) -> LogicalTensor:
        cells = dict(self.cells)
        for layout, origin in like.items():
            if layout not in self.cells:
                cell = self.cells.get(origin)
                renames = prefixes.get(layout)
                cells[layout] = _replace_prefix(cell, renames) if cell and renames else cell
        leaves = {
            layout: _build_leaf(cell, self.axes, self.indices, layer_words)
            for layout, cell in cells.items()
            if cell
        }
        return LogicalTensor(
            self.name,
            self.block,
            self.indices,
            parse_dims(self.axes)[1],
            self.optional,
            self.variant,
            leaves,
            group=self.group,
        )


def _replace_prefix(cell: _Cell, prefixes: Mapping[str, str]) -> _Cell:
    """Replace the longest prefix of the key of *cell* that *prefixes* contain."""
    matching = [prefix for prefix in prefixes if cell.key.startswith(prefix)]
    if not matching:
        return cell
    old = max(matching, key=len)
    return cell._replace(key=prefixes[old] + cell.key.removeprefix(old))


@lru_cache(maxsize=16384)
def _build_leaf(
    cell: _Cell, axes: str, indices: tuple[str, ...], layer_words: frozenset[str]
) -> Leaf:
    """Build the leaf for a cell. Families with equal cells share one cached leaf."""
    key, dims = Template.parse(cell.key), parse_dims(cell.axes or axes)[0]
    spread: tuple[str, ...] = ()
    if key.indices != indices:
        spread = tuple(index for index in key.indices if index not in {*indices, *layer_words})
    if spread and not cell.axes:
        kept_groups = (tuple(axis for axis in group if axis not in spread) for group in dims)
        dims = tuple(
            group for group, old in zip(kept_groups, dims, strict=True) if group or not old
        )
    return Leaf(key, dims, spread, *cell[1:-1])


def parse_tables(
    tables: Sequence[str],
    like: Mapping[str, str],
    prefixes: Prefixes | None = None,
    layer_words: frozenset[str] = frozenset(),
) -> tuple[LogicalTensor, ...]:
    """Parse *tables* into logical tensors, where later tables override cells of earlier tables.

    Args:
        tables: Text of each table.
        like: For a layout, another layout from which it inherits missing cells.
        prefixes: For a layout, prefixes of inherited keys, each with its replacement.
        layer_words: Names of placeholders for words that the kind of a layer determines.

    Raises:
        TableError: A table cannot be parsed.
    """
    rows: dict[str, _Row] = {}
    for block, table in enumerate(tables):
        for row in _parse_rows(table):
            if known_row := rows.get(row.name):
                cells = {**known_row.cells, **row.cells}
                rows[row.name] = known_row._replace(axes=row.axes or known_row.axes, cells=cells)
            else:
                rows[row.name] = row._replace(block=block)
    return tuple(row.build_tensor(like, prefixes or {}, layer_words) for row in rows.values())


@lru_cache(maxsize=1024)
def _parse_rows(table: str) -> tuple[_Row, ...]:
    """Parse the rows of *table*. Results are cached because many families share tables."""
    header, *body = [line.strip() for line in table.splitlines() if line.strip()] or [""]
    names = _GAP.split(header)
    if names[0] != "logical":
        raise TableError("a table must begin with `logical`", header)
    rows = []
    for line in body:
        try:
            rows.append(_parse_row(names, _GAP.split(line)))
        except ValueError as error:
            raise TableError(str(error), line) from error
    return tuple(rows)


def _parse_row(names: list[str], texts: list[str]) -> _Row:
    """Parse the cells *texts* of a row. *names* are the names of their columns."""
    if len(texts) != len(names):
        raise ValueError(
            f"row `{texts[0]}` has {pluralize(len(texts), 'cell')} instead of {len(names)}"
        )
    name_match = _NAME.match(texts[0])
    if name_match is None:
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
        cell = _parse_cell(prefix, text)
        cells |= {layout.strip(): cell for layout in layouts.split(",")}
    name = ".".join([name_match[1], *(f"{{{index}}}" for index in indices or ())])
    return _Row(
        name, indices or (), bool(name_match[3]), name_match[4] or "", name_match[2], axes, cells
    )


def _parse_cell(prefix: str, text: str) -> _Cell | None:
    name, _, axes = text.partition(" ")
    if name == "-":
        return None
    match = _CELL.match(name)
    if match is None:
        raise ValueError(f"invalid cell `{text}`")
    parse_dims(axes)
    key = Template.parse(prefix + match[1])
    part = None if match[2] is None else int(match[2])
    return _Cell(key.text, part, int(match[3] or 0), match[4] or "", int(match[5] or 0), axes)
