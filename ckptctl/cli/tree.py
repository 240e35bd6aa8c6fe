"""The names of a checkpoint as a tree, in which layers that are alike are shown once.

Thousands of names are a short tree: ``model.layers.0.w`` to ``model.layers.31.w`` become one branch
``model.layers.[0-31]``; layers that differ form branches of their own, as in ``[0-2]`` and
``[3-60]``. The same holds at every depth, for experts inside of layers too. Of a training
checkpoint the model is a tree, and what else a trainer saved one branch for each kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from ckptctl.units import NaturalKey, natural_key

if TYPE_CHECKING:
    from ckptctl.ops.inspection.result import TensorInfo

Order = Literal["name", "size"]
Signature = tuple[object, ...]
MAX_PARTS = 64
"""Names with more parts keep the rest in the last one: recursion stays bounded."""


class Branch(NamedTuple):
    """A tensor, a group of tensors, or several equal ones of either kind.

    Attributes:
        label: Name relative to the parent, as in ``model.layers.[0-31]``.
        copies: How many equal ones this stands for.
        tensors: Tensors in all copies, inside one copy of the parent.
        nbytes: Bytes in all copies, inside one copy of the parent; aliases count nothing.
        dtype: Of a single tensor; None: this is a group.
        children: What one copy holds; empty where the depth was limited.
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
    """Build the tree of *tensors*; *sort* by size puts the largest first.

    What lies below *depth* parts of a name is summed up.
    """
    root = _Node()
    for tensor in tensors:
        node = root
        for part in tensor.name.split(".", MAX_PARTS - 1):
            node = node.children.setdefault(part, _Node())
        node.leaf = tensor
    return _ordered(_children(root, depth), sort)


def folded(tensors: Sequence[TensorInfo], root: str, format: str, sort: Order) -> list[Branch]:
    """Build the tree of a model under *root*; what else a trainer saved is a branch each."""
    from ckptctl.ops.recognition.parts import FOLDED, Part, part_of

    parts: dict[Part, list[TensorInfo]] = {}
    for tensor in tensors:
        parts.setdefault(part_of(tensor.name, root, format), []).append(tensor)
    if "model" not in parts:
        return tree(tensors, sort)
    shown = tree(parts["model"], sort) + tree(parts.get("rest", ()), sort, depth=1)
    groups = ((part, tree(parts[part])) for part in FOLDED if part in parts)
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
    """Return ascending *indices* shortly: ``0-31``, ``0-46:2`` (every second), ``0,5``."""
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
    """Return *node* with its name put before those of its children, so that only groups nest."""
    branches = [_leaf(key, node.leaf)] if node.leaf else []
    if depth is not None and depth <= 1:
        below = _children(node, None)
        return branches + ([_group(key, 1, below, hide=True)] if below else [])
    below = _children(node, None if depth is None else depth - 1)
    return branches + [child._replace(label=f"{key}.{child.label}") for child in below]


def _groups(numbered: dict[int, _Node], depth: int | None) -> Iterator[Branch]:
    """Yield the children called 0, 1, 2, ..., equal ones together."""
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
        return size, natural_key(branch.label.replace("[", ""))

    nested = (b._replace(children=tuple(_ordered(b.children, sort))) for b in branches)
    return sorted(nested, key=key)


def _is_index(key: str) -> bool:
    # A short ASCII number written plainly: `007` is a name, and int() refuses 5000 digits.
    return key.isascii() and key.isdecimal() and len(key) <= 18 and str(int(key)) == key
