"""Tree of the tensors of one or two checkpoints, by the parts of their names.

Only the index is read. :func:`measure` reads the data of one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Literal

from ckptctl import families
from ckptctl.catalog import Catalog, Extent, TensorEntry
from ckptctl.conversion.recognition.model import ModelRequest
from ckptctl.conversion.sources import locate_tensors, open_source
from ckptctl.errors import MappingError
from ckptctl.results import JsonField, Result
from ckptctl.storage.computed import open_catalog_reader
from ckptctl.storage.paths import redact_path
from ckptctl.tree import TreePath
from ckptctl.units import to_natural_key
from ckptctl.verbs.inspection.inspect import (
    describe_catalog,
    describe_contents,
    open_readable_part,
)
from ckptctl.verbs.inspection.inspect_options import InspectOptions
from ckptctl.verbs.inspection.inspect_result import Inspection
from ckptctl.verbs.statistics import Statistics, measure_tensor

Order = Literal["size", "name"]
Mark = Literal["", "=", "!", "<", ">"]
"""Comparison of the two sides: same dtypes and shapes, different ones, only in A, only in B."""
MAX_NAME_PARTS = 64
"""Maximum number of components that a name is split into, which limits the depth."""
MAX_SHOWN_EXTENTS = 20
BINS = 40


@dataclass(frozen=True, slots=True)
class Entry(Result):
    """Entry of the top level of the tree."""

    name: Annotated[
        str, JsonField("name up to the first dot; complete if no other tensor has that part")
    ]
    tensors: Annotated[int, JsonField("number of tensors")]
    nbytes: Annotated[int, JsonField("bytes of these tensors", name="bytes")]


@dataclass(frozen=True, slots=True)
class Contents(Result):
    """Top level of the tree of a checkpoint."""

    path: Annotated[str, JsonField("path as given")]
    entries: Annotated[tuple[Entry, ...], JsonField("entries, largest first")]


@dataclass(frozen=True)
class BrowsedCheckpoint:
    """Open checkpoint, of which only the index was read."""

    catalog: Catalog
    inspection: Inspection


@dataclass(eq=False)
class Node:
    """Module or tensor in the tree.

    Attributes:
        name: Last part of the name.
        parent: Module that contains it, or None for the root.
        children: Modules and tensors in it, by the next part of their names.
        entries: Tensor of this name in each checkpoint, or None.
        nbytes: Bytes of all tensors in it, in each checkpoint.
        tensors: Number of tensors in it, in each checkpoint.
        mark: Comparison of both checkpoints, or empty if there is only one.
    """

    name: str
    parent: Node | None = None
    children: dict[str, Node] = field(default_factory=dict)
    entries: list[TensorEntry | None] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    tensors: list[int] = field(default_factory=list)
    mark: Mark = ""

    @property
    def full_name(self) -> str:
        """Name with those of all modules that contain it."""
        parts: list[str] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            parts.append(node.name)
            node = node.parent
        return ".".join(reversed(parts))

    @property
    def is_tensor(self) -> bool:
        """Whether a tensor has exactly this name."""
        return any(entry is not None for entry in self.entries)

    def sort_children(self, order: Order) -> list[Node]:
        """Return the children in natural order of their names, or the largest first."""
        by_name = sorted(self.children.values(), key=lambda node: to_natural_key(node.name))
        if order == "name":
            return by_name
        return sorted(by_name, key=lambda node: -max(node.nbytes))


def open_for_browsing(path: str | TreePath, options: InspectOptions) -> BrowsedCheckpoint:
    """Open a checkpoint, or the part of an incomplete one that can be read."""
    with families.use_converter_file(options.converter):
        catalog = open_readable_part(partial(open_source, path, options, manifest=None))
        shown = redact_path(path)
        try:
            inspection = describe_catalog(shown, catalog, {}, ModelRequest(options.model_type))
        except MappingError as error:
            inspection = describe_contents(shown, catalog, {})
            inspection = replace(inspection, notes=(*inspection.notes, error.what))
    return BrowsedCheckpoint(catalog, inspection)


def build_tree(checkpoints: Sequence[BrowsedCheckpoint]) -> Node:
    """Build the tree of all tensors of *checkpoints*."""
    count = len(checkpoints)
    root = _make_node("", None, count)
    for side, checkpoint in enumerate(checkpoints):
        for entry in checkpoint.catalog.tensors.values():
            nbytes = 0 if entry.alias_of else entry.nbytes
            node = root
            _add_tensor(node, side, nbytes)
            for part in entry.name.split(".", MAX_NAME_PARTS - 1):
                child = node.children.get(part)
                if child is None:
                    child = node.children[part] = _make_node(part, node, count)
                node = child
                _add_tensor(node, side, nbytes)
            node.entries[side] = entry
    for node in walk(root, parents_first=False):
        _merge_only_child(node)
        if count == 2:
            node.mark = _compare(node)
    return root


def _merge_only_child(node: Node) -> None:
    """Merge a module with its only entry, so that ``norm`` and ``weight`` are one entry."""
    if node.parent is None or node.is_tensor or len(node.children) != 1:
        return
    (child,) = node.children.values()
    node.name = f"{node.name}.{child.name}"
    node.entries, node.children = child.entries, child.children
    for grandchild in node.children.values():
        grandchild.parent = node


def _make_node(name: str, parent: Node | None, count: int) -> Node:
    return Node(name, parent, {}, [None] * count, [0] * count, [0] * count)


def _add_tensor(node: Node, side: int, nbytes: int) -> None:
    node.nbytes[side] += nbytes
    node.tensors[side] += 1


def walk(root: Node, *, parents_first: bool = True) -> Iterator[Node]:
    """Yield all nodes, and parents before or after their children."""
    nodes, stack = [], [root]
    while stack:
        node = stack.pop()
        nodes.append(node)
        stack += reversed(node.children.values())
    yield from nodes if parents_first else reversed(nodes)


def _compare(node: Node) -> Mark:
    """Compare the dtypes and shapes of all tensors of a node, whose children are compared."""
    if not node.tensors[1]:
        return "<"
    if not node.tensors[0]:
        return ">"
    a, b = node.entries
    if (a is None) != (b is None):
        return "!"
    if a and b and (a.dtype, a.shape) != (b.dtype, b.shape):
        return "!"
    return "=" if all(child.mark == "=" for child in node.children.values()) else "!"


def find_tensors(root: Node, text: str) -> list[Node]:
    """Return the tensors whose names contain *text*, regardless of case, in natural order."""
    wanted = text.lower()
    matches = [
        (node.full_name, node)
        for node in walk(root)
        if node.is_tensor and wanted in node.full_name.lower()
    ]
    matches.sort(key=lambda item: to_natural_key(item[0]))
    return [node for _, node in matches]


def list_contents(checkpoint: BrowsedCheckpoint) -> Contents:
    """List the top level of the tree of *checkpoint*."""
    root = build_tree([checkpoint])
    entries = (
        Entry(node.name, node.tensors[0], node.nbytes[0]) for node in root.sort_children("size")
    )
    return Contents(checkpoint.inspection.path, tuple(entries))


def locate_extents(checkpoint: BrowsedCheckpoint, entry: TensorEntry) -> Sequence[Extent]:
    """Return the extents of a tensor, with byte ranges of its elements.

    This may read headers inside files, but no data.
    """
    name = entry.alias_of or entry.name
    return locate_tensors(checkpoint.catalog, [name]).tensors[name].extents


def measure(
    checkpoint: BrowsedCheckpoint, entry: TensorEntry, advance: Callable[[int], None]
) -> Statistics | None:
    """Read a tensor twice and return its statistics, or None if its dtype is not numeric.

    *advance* is called with numbers of bytes read. It may raise to stop reading.
    """
    from ckptctl.storage.arithmetic import import_torch

    import_torch()
    name = entry.alias_of or entry.name
    located = locate_tensors(checkpoint.catalog, [name])
    with open_catalog_reader(located) as files:
        return measure_tensor(files, located.tensors[name], advance, BINS)
