"""Tensor listings: a collapsed tree, a row per tensor, or Markdown.

The tree shortens thousands of names: ``model.layers.0.w`` to ``model.layers.31.w`` become one
branch ``model.layers.[0-31]``. Layers that differ form separate branches, such as ``[0-2]`` and
``[3-60]``. This applies at every depth, including experts in layers. For a training checkpoint,
the model is a tree, and each other kind of training state is one branch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from ckptctl.cli import tables
from ckptctl.cli.tables import Column, StyledText
from ckptctl.errors import format_model_types
from ckptctl.units import NaturalKey, format_bytes, format_count, pluralize, to_natural_key

if TYPE_CHECKING:
    from ckptctl.cli.output import Printer, Row
    from ckptctl.verbs.inspection.inspect_result import Inspection, TensorInfo
    from ckptctl.verbs.statistics import Statistics

_HISTOGRAM_CHARACTERS = "▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉█"


TREE_COLUMNS = (
    tables.name_column(keep=24),
    Column(),
    Column(),
    tables.number_column(),
    Column(drop=1),
    tables.name_column(keep=24, drop=2),
)
"""Columns of the tensor tree on a terminal."""
LEAF_COLUMNS = tables.titled_columns("name", "dtype", "shape", "copies", "bytes")
"""Columns of the tensor tree in TSV output."""
TENSOR_COLUMNS = (
    tables.name_column("name"),
    Column("dtype", drop=1),
    Column("shape", drop=3),
    tables.number_column("bytes", drop=2),
    tables.number_column("min"),
    tables.number_column("max"),
    tables.number_column("mean", drop=6),
    tables.number_column("std", drop=5),
    tables.number_column("nan"),
    tables.number_column("inf"),
    Column("histogram", drop=4),
)
COLUMNS_WITHOUT_STATS = 4
"""Number of leading columns that are shown without ``--stats``."""


def make_tree_rows(output: Printer, branches: Sequence[Branch]) -> list[Row]:
    """List the rows of the tensor tree.

    A terminal gets nested branches. TSV output gets only leaves, with their full names.
    """
    visited = walk_branches(branches)
    if output.mode == "human":
        largest_bytes = (
            max((top_branch.nbytes for top_branch in branches), default=0)
            if output.draws_bars
            else 0
        )
        return [_make_tree_row(nesting, branch, largest_bytes) for nesting, _, _, branch in visited]
    return [
        (
            label,
            shorten_dtype(branch.dtype)
            if branch.dtype
            else pluralize(branch.tensors * outer, "tensor"),
            str(list(branch.shape)) if branch.dtype else "",
            str(branch.copies * outer),
            str(branch.nbytes * outer),
        )
        for _, label, outer, branch in visited
        if branch.dtype or not branch.children
    ]


def _make_tree_row(nesting: int, branch: Branch, largest_bytes: int) -> Row:
    """Make the row of a branch, with a bar of its size relative to *largest_bytes*.

    If *largest_bytes* is 0, the row has no bar.
    """
    label = "  " * nesting + branch.label
    times = f" x {branch.copies:,}" if branch.copies > 1 else ""
    bar = StyledText(
        "" if nesting or not largest_bytes else format_bar(branch.nbytes, largest_bytes), "name"
    )
    if branch.dtype is None:
        tensor_count = pluralize(branch.tensors // branch.copies, "tensor")
        return label, tensor_count + times, "", format_bytes(branch.nbytes), bar
    tied = f"tied to {branch.alias_of}" if branch.alias_of else ""
    shape = f"{list(branch.shape)}{times}"
    return label, shape, shorten_dtype(branch.dtype), format_bytes(branch.nbytes), bar, tied


def format_bar(nbytes: int, largest_bytes: int, width: int = 16) -> str:
    """Draw a bar whose length is the fraction *nbytes* / *largest_bytes* of *width* characters."""
    eighths = -(-8 * width * nbytes // largest_bytes)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def make_tensor_rows(
    output: Printer, tensors: Sequence[TensorInfo], sort: str, stats: bool
) -> list[tuple[str, ...]]:
    """Make one row per tensor, sorted by name or size."""
    ordered = sorted(
        tensors, key=lambda t: (-t.nbytes if sort == "size" else 0, to_natural_key(t.name))
    )
    return [
        (
            tensor.name,
            shorten_dtype(tensor.dtype),
            str(list(tensor.shape)),
            format_size(output, tensor.nbytes),
            *(_format_statistics(tensor.statistics) if stats else ()),
        )
        for tensor in ordered
    ]


def _format_statistics(statistics: Statistics | None) -> tuple[str, ...]:
    if statistics is None:
        return ("-",) * (len(TENSOR_COLUMNS) - COLUMNS_WITHOUT_STATS)
    values = (statistics.minimum, statistics.maximum, statistics.mean, statistics.std)
    return (
        *("-" if value is None else f"{value:.4g}" for value in values),
        str(statistics.nan),
        str(statistics.inf),
        format_histogram(statistics.histogram),
    )


def format_histogram(histogram: Sequence[int]) -> str:
    """Draw *histogram* with one character per bin, and a dot for empty bins."""
    largest_count = max(histogram, default=0)
    scale = len(_HISTOGRAM_CHARACTERS) - 1
    return "".join(
        _HISTOGRAM_CHARACTERS[round(scale * count / largest_count)] if count else "."
        for count in histogram
    )


def shorten_dtype(dtype: str) -> str:
    """Return the short name of *dtype*, or *dtype* itself if it has no known short name."""
    from ckptctl.dtypes import BY_NAME

    return BY_NAME[dtype].short if dtype in BY_NAME else dtype


def format_size(output: Printer, nbytes: int) -> str:
    """Format *nbytes* with a unit for a terminal, or as an exact number for TSV."""
    return format_bytes(nbytes) if output.mode == "human" else str(nbytes)


def format_model_type(inspection: Inspection) -> str:
    """Format the model type, or the candidates if it is ambiguous."""
    return (
        inspection.model_type or format_model_types(inspection.candidates) or "unknown model type"
    )


def format_files(inspection: Inspection) -> str:
    """Format the total size and the number of the checkpoint's files."""
    return f"{format_bytes(inspection.nbytes)} in {pluralize(len(inspection.files), 'file')}"


def render_markdown(inspection: Inspection, branches: Sequence[Branch]) -> Iterator[str]:
    """Yield the lines of a Markdown summary and a table of *branches*."""
    for name, value in (
        ("Format", inspection.format),
        ("Model type", format_model_type(inspection)),
        ("Parameters", f"{format_count(inspection.parameters)} ({inspection.parameters:,})"),
        (
            "Types",
            ", ".join(
                f"{shorten_dtype(n)} ({pluralize(usage.tensors, 'tensor')})"
                for n, usage in inspection.dtypes.items()
            ),
        ),
        ("Size", format_files(inspection)),
    ):
        yield f"- **{name}:** {_escape_markdown(value)}"
    yield ""
    yield "| tensor | shape | dtype | copies | size |"
    yield "| --- | --- | --- | ---: | ---: |"
    for _, label, outer, branch in walk_branches(branches):
        if branch.dtype or not branch.children:
            shape = str(list(branch.shape)) if branch.dtype else pluralize(branch.tensors, "tensor")
            dtype = shorten_dtype(branch.dtype) if branch.dtype else ""
            cells = (_format_code(label), shape, dtype, f"{branch.copies * outer:,}")
            size = format_bytes(branch.nbytes * outer)
            yield f"| {' | '.join(cells)} | {size} |"


def _escape_markdown(text: str) -> str:
    return "".join(f"\\{c}" if c in "\\`*_{}[]<>|#" else c for c in text)


def _format_code(name: str) -> str:
    # In a table, a bar ends the cell even in code, and a backtick ends the code.
    return f"`{name}`" if not {"`", "|"} & set(name) else _escape_markdown(name)


# ------------------------------------------------------------ the tree

Order = Literal["name", "size"]
Signature = tuple[object, ...]
MAX_NAME_PARTS = 64
"""Maximum number of components that a name is split into, which limits the recursion."""


class Branch(NamedTuple):
    """Branch of a tensor tree, which is a tensor or a group, or several equal ones.

    Attributes:
        label: Name relative to the parent, as in ``model.layers.[0-31]``.
        copies: Number of equal tensors or groups that this branch represents.
        tensors: Number of tensors in all copies, within one copy of the parent.
        nbytes: Bytes in all copies, within one copy of the parent. Aliases count as 0.
        dtype: Dtype of a single tensor, or None for a group.
        children: Branches of one copy. Empty if the depth was limited.
    """

    label: str
    copies: int
    tensors: int
    nbytes: int
    dtype: str | None = None
    shape: tuple[int, ...] = ()
    alias_of: str | None = None
    children: tuple[Branch, ...] = ()


class _Node:
    def __init__(self) -> None:
        self.leaf: TensorInfo | None = None
        self.children: dict[str, _Node] = {}


def build_tree(
    tensors: Iterable[TensorInfo], sort: Order = "name", depth: int | None = None
) -> list[Branch]:
    """Build the tree of *tensors*, sorted by name or by size (largest first).

    Subtrees deeper than *depth* name components are aggregated.
    """
    root = _Node()
    for tensor in tensors:
        node = root
        for part in tensor.name.split(".", MAX_NAME_PARTS - 1):
            node = node.children.setdefault(part, _Node())
        node.leaf = tensor
    return _sort_branches(_build_children(root, depth), sort)


def build_model_tree(
    tensors: Sequence[TensorInfo], root: str, format: str, sort: Order
) -> list[Branch]:
    """Build the tree of the model under *root*, with one branch per kind of training state."""
    from ckptctl.conversion.recognition.roots import FOLDED_PARTS, Part, classify_leaf

    parts: dict[Part, list[TensorInfo]] = {}
    for tensor in tensors:
        parts.setdefault(classify_leaf(tensor.name, root, format), []).append(tensor)
    if "model" not in parts:
        return build_tree(tensors, sort)
    branches = build_tree(parts["model"], sort) + build_tree(parts.get("rest", ()), sort, depth=1)
    groups = ((part, build_tree(parts[part])) for part in FOLDED_PARTS if part in parts)
    return branches + [
        _make_group(part, 1, part_branches, hides_children=True) for part, part_branches in groups
    ]


def walk_branches(branches: Sequence[Branch]) -> Iterator[tuple[int, str, int, Branch]]:
    """Yield ``(nesting, full label, copies of the parent, branch)``, parents first."""
    stack = [(0, "", 1, branch) for branch in reversed(branches)]
    while stack:
        nesting, prefix, outer_copies, branch = stack.pop()
        label = prefix + branch.label
        yield nesting, label, outer_copies, branch
        inner = outer_copies * branch.copies
        stack += [(nesting + 1, f"{label}.", inner, child) for child in reversed(branch.children)]


def format_index_ranges(indices: Sequence[int]) -> str:
    """Format ascending *indices* as ranges: ``0-31``, ``0-46:2`` (every second), ``0,5``."""
    parts: list[str] = []
    start = 0
    while start < len(indices):
        end = start + 1
        step = indices[end] - indices[start] if end < len(indices) else 0
        while end < len(indices) and indices[end] - indices[end - 1] == step:
            end += 1
        if step != 1 and end - start < 3:
            end = start + 1
        parts.append(_format_index_range(indices[start], indices[end - 1], step))
        start = end
    return ",".join(parts)


def _format_index_range(first: int, last: int, step: int) -> str:
    if first == last:
        return str(first)
    return f"{first}-{last}" + (f":{step}" if step > 1 else "")


def _build_children(node: _Node, depth: int | None) -> list[Branch]:
    numbered = {int(key): child for key, child in node.children.items() if _is_index(key)}
    if len(numbered) < 2:
        numbered = {}
    unnumbered = (
        branch
        for key, child in node.children.items()
        if not (numbered and _is_index(key))
        for branch in _build_prefixed_branches(key, child, depth)
    )
    return sorted(
        [*unnumbered, *_merge_numbered_children(numbered, depth)], key=lambda branch: branch.label
    )


def _build_prefixed_branches(key: str, node: _Node, depth: int | None) -> list[Branch]:
    """Build the branches of *node* with labels that start with *key*, without a parent branch."""
    branches = [_make_leaf(key, node.leaf)] if node.leaf else []
    if depth is not None and depth <= 1:
        children = _build_children(node, None)
        return branches + ([_make_group(key, 1, children, hides_children=True)] if children else [])
    children = _build_children(node, None if depth is None else depth - 1)
    return branches + [child._replace(label=f"{key}.{child.label}") for child in children]


def _merge_numbered_children(numbered: dict[int, _Node], depth: int | None) -> Iterator[Branch]:
    """Yield the branches of numbered children such as layers. Equal branches are merged."""
    hide = depth is not None and depth <= 1
    indices_by_signature: dict[Signature, list[int]] = {}
    children: dict[int, list[Branch]] = {}
    for index in sorted(numbered):
        node = numbered[index]
        children[index] = _build_children(node, None if hide or depth is None else depth - 1)
        leaf = _make_signature(_make_leaf("", node.leaf)) if node.leaf else None
        signature = (leaf, *(_make_signature(child) for child in children[index]))
        indices_by_signature.setdefault(signature, []).append(index)
    for indices in indices_by_signature.values():
        first = indices[0]
        label = f"[{format_index_ranges(indices)}]" if len(indices) > 1 else str(first)
        leaf_of_first = numbered[first].leaf
        if leaf_of_first:
            yield _make_leaf(label, leaf_of_first, len(indices))
        if children[first]:
            yield _make_group(label, len(indices), children[first], hide)


def _make_leaf(label: str, leaf: TensorInfo, copies: int = 1) -> Branch:
    nbytes = 0 if leaf.alias_of else leaf.nbytes * copies
    return Branch(label, copies, copies, nbytes, leaf.dtype, leaf.shape, leaf.alias_of)


def _make_group(
    label: str, copies: int, children: Sequence[Branch], hides_children: bool
) -> Branch:
    tensors = copies * sum(child.tensors for child in children)
    nbytes = copies * sum(child.nbytes for child in children)
    return Branch(
        label, copies, tensors, nbytes, children=() if hides_children else tuple(children)
    )


def _make_signature(branch: Branch) -> Signature:
    is_tied = branch.alias_of is not None
    own_facts = (branch.label, branch.tensors, branch.nbytes, branch.dtype, branch.shape, is_tied)
    return (*own_facts, *(_make_signature(child) for child in branch.children))


def _sort_branches(branches: Iterable[Branch], sort: Order) -> list[Branch]:
    def get_sort_key(branch: Branch) -> tuple[int, NaturalKey]:
        size = -branch.nbytes if sort == "size" else 0
        return size, to_natural_key(branch.label.replace("[", ""))

    sorted_branches = (
        b._replace(children=tuple(_sort_branches(b.children, sort))) for b in branches
    )
    return sorted(sorted_branches, key=get_sort_key)


def _is_index(key: str) -> bool:
    # A short decimal number without leading zeros; int() rejects more than 4300 digits.
    return key.isascii() and key.isdecimal() and len(key) <= 18 and str(int(key)) == key
