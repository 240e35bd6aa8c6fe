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
from ckptctl.cli.tables import Column, Painted
from ckptctl.errors import format_model_types
from ckptctl.units import NaturalKey, format_bytes, format_count, pluralize, to_natural_key

if TYPE_CHECKING:
    from ckptctl.cli.output import Printer, Row
    from ckptctl.verbs.inspection.inspect_result import Inspection, TensorInfo
    from ckptctl.verbs.statistics import Statistics

_BARS = "▁▂▃▄▅▆▇█"
_PARTS = " ▏▎▍▌▋▊▉█"


TREE = (
    tables.name(keep=24),
    Column(),
    Column(),
    tables.number(),
    Column(drop=1),
    tables.name(keep=24, drop=2),
)
"""Columns of the tree on a terminal."""
LEAVES = tables.titled("name", "dtype", "shape", "copies", "bytes")
"""Columns of the tree as TSV."""
TENSORS = (
    tables.name("name"),
    Column("dtype", drop=1),
    Column("shape", drop=3),
    tables.number("bytes", drop=2),
    tables.number("min"),
    tables.number("max"),
    tables.number("mean", drop=6),
    tables.number("std", drop=5),
    tables.number("nan"),
    tables.number("inf"),
    Column("histogram", drop=4),
)
PLAIN = 4
"""Number of these columns that are shown without ``--stats``."""


def collapsed(output: Printer, branches: Sequence[Branch]) -> list[Row]:
    """List the rows of the tree, nested for a terminal, otherwise leaves with full names."""
    walked = walk(branches)
    if output.mode == "human":
        most = max((one.nbytes for one in branches), default=0) if output.draws else 0
        return [_indented(nesting, branch, most) for nesting, _, _, branch in walked]
    return [
        (
            label,
            short(branch.dtype) if branch.dtype else pluralize(branch.tensors * outer, "tensor"),
            str(list(branch.shape)) if branch.dtype else "",
            str(branch.copies * outer),
            str(branch.nbytes * outer),
        )
        for _, label, outer, branch in walked
        if branch.dtype or not branch.children
    ]


def _indented(nesting: int, branch: Branch, most: int) -> Row:
    """Make the row of a branch, with a bar that *most* bytes fill. 0 omits the bar."""
    label = "  " * nesting + branch.label
    times = f" x {branch.copies:,}" if branch.copies > 1 else ""
    bar = Painted("" if nesting or not most else share(branch.nbytes, most), "name")
    if branch.dtype is None:
        each = pluralize(branch.tensors // branch.copies, "tensor")
        return label, each + times, "", format_bytes(branch.nbytes), bar
    tied = f"tied to {branch.alias_of}" if branch.alias_of else ""
    shape = f"{list(branch.shape)}{times}"
    return label, shape, short(branch.dtype), format_bytes(branch.nbytes), bar, tied


def share(part: int, most: int, width: int = 16) -> str:
    """Draw a bar of *part* / *most* of *width* characters."""
    eighths = -(-8 * width * part // most)
    return "█" * (eighths // 8) + _PARTS[eighths % 8].strip()


def listed_tensors(
    output: Printer, shown: Sequence[TensorInfo], sort: str, stats: bool
) -> list[tuple[str, ...]]:
    """Make one row per tensor, sorted by name or size."""
    ordered = sorted(
        shown, key=lambda t: (-t.nbytes if sort == "size" else 0, to_natural_key(t.name))
    )
    return [
        (
            tensor.name,
            short(tensor.dtype),
            str(list(tensor.shape)),
            size(output, tensor.nbytes),
            *(_numbers(tensor.statistics) if stats else ()),
        )
        for tensor in ordered
    ]


def _numbers(statistics: Statistics | None) -> tuple[str, ...]:
    if statistics is None:
        return ("-",) * (len(TENSORS) - PLAIN)
    values = (statistics.minimum, statistics.maximum, statistics.mean, statistics.std)
    return (
        *("-" if value is None else f"{value:.4g}" for value in values),
        str(statistics.nan),
        str(statistics.inf),
        bars(statistics.histogram),
    )


def bars(histogram: Sequence[int]) -> str:
    """Draw *histogram* with one character per bin, and a dot for empty bins."""
    top = max(histogram, default=0)
    scale = len(_BARS) - 1
    return "".join(_BARS[round(scale * count / top)] if count else "." for count in histogram)


def short(dtype: str) -> str:
    """Return the short name of *dtype*, or *dtype* itself if unknown."""
    from ckptctl.dtypes import BY_NAME

    return BY_NAME[dtype].short if dtype in BY_NAME else dtype


def size(output: Printer, nbytes: int) -> str:
    """Format *nbytes* with a unit for a terminal, otherwise as an exact number."""
    return format_bytes(nbytes) if output.mode == "human" else str(nbytes)


def model(found: Inspection) -> str:
    """Format the model type, or the candidates if it is ambiguous."""
    return found.model_type or format_model_types(found.candidates) or "unknown model type"


def files(found: Inspection) -> str:
    """Format the total size and the number of files."""
    return f"{format_bytes(found.nbytes)} in {pluralize(len(found.files), 'file')}"


def markdown(found: Inspection, branches: Sequence[Branch]) -> Iterator[str]:
    """Yield the lines of a Markdown summary and a table of *branches*."""
    for name, value in (
        ("Format", found.format),
        ("Model type", model(found)),
        ("Parameters", f"{format_count(found.parameters)} ({found.parameters:,})"),
        (
            "Types",
            ", ".join(
                f"{short(n)} ({pluralize(u.tensors, 'tensor')})" for n, u in found.dtypes.items()
            ),
        ),
        ("Size", files(found)),
    ):
        yield f"- **{name}:** {_cell(value)}"
    yield ""
    yield "| tensor | shape | dtype | copies | size |"
    yield "| --- | --- | --- | ---: | ---: |"
    for _, label, outer, branch in walk(branches):
        if branch.dtype or not branch.children:
            shape = str(list(branch.shape)) if branch.dtype else pluralize(branch.tensors, "tensor")
            dtype = short(branch.dtype) if branch.dtype else ""
            cells = (_code(label), shape, dtype, f"{branch.copies * outer:,}")
            size = format_bytes(branch.nbytes * outer)
            yield f"| {' | '.join(cells)} | {size} |"


def _cell(text: str) -> str:
    return "".join(f"\\{c}" if c in "\\`*_{}[]<>|#" else c for c in text)


def _code(name: str) -> str:
    # In a table, a bar ends the cell even in code, and a backtick ends the code.
    return f"`{name}`" if not {"`", "|"} & set(name) else _cell(name)


# ------------------------------------------------------------ the tree

Order = Literal["name", "size"]
Signature = tuple[object, ...]
MAX_PARTS = 64
"""Most parts that a name is split into, which bounds the recursion."""


class Branch(NamedTuple):
    """A tensor, a group of tensors, or several equal ones of either kind.

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


def tree(
    tensors: Iterable[TensorInfo], sort: Order = "name", depth: int | None = None
) -> list[Branch]:
    """Build the tree of *tensors*, sorted by name or by size (largest first).

    Tensors below the first *depth* parts of a name are summed up.
    """
    root = _Node()
    for tensor in tensors:
        node = root
        for part in tensor.name.split(".", MAX_PARTS - 1):
            node = node.children.setdefault(part, _Node())
        node.leaf = tensor
    return _ordered(_children(root, depth), sort)


def folded(tensors: Sequence[TensorInfo], root: str, format: str, sort: Order) -> list[Branch]:
    """Build the tree of the model under *root*, with one branch per kind of training state."""
    from ckptctl.conversion.recognition.roots import FOLDED_PARTS, Part, classify_part

    parts: dict[Part, list[TensorInfo]] = {}
    for tensor in tensors:
        parts.setdefault(classify_part(tensor.name, root, format), []).append(tensor)
    if "model" not in parts:
        return tree(tensors, sort)
    shown = tree(parts["model"], sort) + tree(parts.get("rest", ()), sort, depth=1)
    groups = ((part, tree(parts[part])) for part in FOLDED_PARTS if part in parts)
    return shown + [_group(part, 1, below, hide=True) for part, below in groups]


def walk(branches: Sequence[Branch]) -> Iterator[tuple[int, str, int, Branch]]:
    """Yield ``(nesting, full label, copies of the parent, branch)``, parents first."""
    stack = [(0, "", 1, branch) for branch in reversed(branches)]
    while stack:
        nesting, prefix, outer, branch = stack.pop()
        label = prefix + branch.label
        yield nesting, label, outer, branch
        inner = outer * branch.copies
        stack += [(nesting + 1, f"{label}.", inner, child) for child in reversed(branch.children)]


def spans(indices: Sequence[int]) -> str:
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
        parts.append(_span(indices[start], indices[end - 1], step))
        start = end
    return ",".join(parts)


def _span(first: int, last: int, step: int) -> str:
    if first == last:
        return str(first)
    return f"{first}-{last}" + (f":{step}" if step > 1 else "")


def _children(node: _Node, depth: int | None) -> list[Branch]:
    numbered = {int(key): child for key, child in node.children.items() if _is_index(key)}
    if len(numbered) < 2:
        numbered = {}
    named = (
        branch
        for key, child in node.children.items()
        if not (numbered and _is_index(key))
        for branch in _joined(key, child, depth)
    )
    return sorted([*named, *_groups(numbered, depth)], key=lambda branch: branch.label)


def _joined(key: str, node: _Node, depth: int | None) -> list[Branch]:
    """Return the branches of *node* with its name as a prefix, so that only groups nest."""
    branches = [_leaf(key, node.leaf)] if node.leaf else []
    if depth is not None and depth <= 1:
        below = _children(node, None)
        return branches + ([_group(key, 1, below, hide=True)] if below else [])
    below = _children(node, None if depth is None else depth - 1)
    return branches + [child._replace(label=f"{key}.{child.label}") for child in below]


def _groups(numbered: dict[int, _Node], depth: int | None) -> Iterator[Branch]:
    """Yield branches of the numbered children, equal ones merged."""
    hide = depth is not None and depth <= 1
    alike: dict[Signature, list[int]] = {}
    below: dict[int, list[Branch]] = {}
    for index in sorted(numbered):
        node = numbered[index]
        below[index] = _children(node, None if hide or depth is None else depth - 1)
        leaf = _signature(_leaf("", node.leaf)) if node.leaf else None
        signature = (leaf, *(_signature(child) for child in below[index]))
        alike.setdefault(signature, []).append(index)
    for indices in alike.values():
        first = indices[0]
        label = f"[{spans(indices)}]" if len(indices) > 1 else str(first)
        leaf_of_first = numbered[first].leaf
        if leaf_of_first:
            yield _leaf(label, leaf_of_first, len(indices))
        if below[first]:
            yield _group(label, len(indices), below[first], hide)


def _leaf(label: str, leaf: TensorInfo, copies: int = 1) -> Branch:
    nbytes = 0 if leaf.alias_of else leaf.nbytes * copies
    return Branch(label, copies, copies, nbytes, leaf.dtype, leaf.shape, leaf.alias_of)


def _group(label: str, copies: int, below: Sequence[Branch], hide: bool) -> Branch:
    tensors = copies * sum(child.tensors for child in below)
    nbytes = copies * sum(child.nbytes for child in below)
    return Branch(label, copies, tensors, nbytes, children=() if hide else tuple(below))


def _signature(branch: Branch) -> Signature:
    tied = branch.alias_of is not None
    what = (branch.label, branch.tensors, branch.nbytes, branch.dtype, branch.shape, tied)
    return (*what, *(_signature(child) for child in branch.children))


def _ordered(branches: Iterable[Branch], sort: Order) -> list[Branch]:
    def key(branch: Branch) -> tuple[int, NaturalKey]:
        size = -branch.nbytes if sort == "size" else 0
        return size, to_natural_key(branch.label.replace("[", ""))

    nested = (b._replace(children=tuple(_ordered(b.children, sort))) for b in branches)
    return sorted(nested, key=key)


def _is_index(key: str) -> bool:
    # A short decimal number without leading zeros; int() rejects more than 4300 digits.
    return key.isascii() and key.isdecimal() and len(key) <= 18 and str(int(key)) == key
