"""Find the linear weights of a model's layers in its family's tables.

These are the matrices of the language model's layers, except those with a row for each token or
expert, with a single row for each head, or in layers without the hidden size, such as a vision
tower. ``Family.unquantized`` lists other weights that programs never read quantized.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal

from ckptctl.numerics.quantization.recipes import WEIGHT
from ckptctl.planner.layouts import Family, Layout, LayoutTensor, Leaf

VOCABULARY, EXPERTS, HIDDEN = "v", "x", "d"
Role = Literal["linear", "experts", "stacked", "other"]

FUSED = (
    ("gate_proj", "up_proj"),
    ("q_proj", "k_proj", "v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("w1", "w3"),
)
"""Modules that vLLM fuses: all or none are quantized, with one global scale.

Source: ``FUSED_LAYER_NAMES`` in llm-compressor's ``observers/helpers.py``.
"""

EXPERTS_READ = {"gate_up_proj": 2, "down_proj": 1}
"""Stacks of a module ``experts``, and the dimension with the hidden size.

Source: ``FP8Experts`` in transformers' ``integrations/finegrained_fp8.py``.
"""


class Roles:
    """Roles of the tensors in one layout of a family."""

    def __init__(self, family: Family, layout: Layout) -> None:
        self._family = family
        self._table = layout.table
        self._leaves = leaves = layout.leaves
        self._language = {_layer(leaf) for leaf in leaves.values() if HIDDEN in leaf.axes}
        groups = (group for leaf in leaves.values() for group in leaf.dims)
        self._heads = {group[0] for group in groups if len(group) > 1}

    @property
    def stacks(self) -> bool:
        """Whether the layout stores experts stacked in one tensor."""
        return any(_stacked(leaf) for leaf in self._leaves.values())

    def of(self, key: str, shape: Sequence[int]) -> Role:
        """Return the role of the tensor *key*.

        Stacked experts are ``experts`` if they are ``[experts, out, in]`` and have a name by which
        transformers reads quantized stacks, otherwise ``stacked``.
        """
        found = self._table.find_meaning(key)
        if found is None or not isinstance(found[0], LayoutTensor):
            return "other"
        stored = found[0]
        tensor, leaf = stored.parts[0]
        stem = tensor.name.partition(".")[0]
        quantized = tensor.scaled_weight or tensor.variant in self._family.quantized
        known = tensor.indices and _layer(leaf) in self._language and not quantized
        if not known or stem in self._family.unquantized:
            return "other"
        axes = {axis for group in leaf.dims for axis in group}
        if _stacked(leaf):
            read = _read_stacked(leaf) and not self._family.experts_apart
            return "experts" if read else "stacked"
        if len(leaf.dims) != 2 or not stored.template.text.endswith(WEIGHT) or shape[0] == 1:
            return "other"
        rows = leaf.dims[0]
        gate = len(rows) == 1 and rows[0] in self._heads
        return "other" if gate or axes & {VOCABULARY, EXPERTS} else "linear"


def _stacked(leaf: Leaf) -> bool:
    return len(leaf.dims) == 3 and leaf.dims[0] == (EXPERTS,)


def _read_stacked(leaf: Leaf) -> bool:
    """Return whether ``FP8Experts`` reads a stack, whose second axis must be the output."""
    module, _, name = leaf.key.text.rpartition(".")
    hidden = EXPERTS_READ.get(name, 0)
    simple = all(len(group) == 1 for group in leaf.dims)
    return simple and module.endswith(".experts") and leaf.dims[hidden] == (HIDDEN,)


def _layer(leaf: Leaf) -> str:
    """Return the common prefix of a layer's keys, without the layer number."""
    return leaf.key.text.partition("{")[0]


def fused(names: Collection[str]) -> Iterator[tuple[str, ...]]:
    """Yield the groups of weights among *names* that programs fuse."""
    there = set(names)
    for name in names:
        module = name.removesuffix(WEIGHT)
        parent, dot, last = module.rpartition(".")
        for group in FUSED:
            every = tuple(f"{parent}{dot}{one}{WEIGHT}" for one in group)
            if last == group[0] and name.endswith(WEIGHT) and there.issuperset(every):
                yield every


def modules_of_experts(names: Collection[str]) -> Iterator[tuple[str, ...]]:
    """Yield the groups of expert stacks among *names* that belong to one module."""
    found: dict[str, list[str]] = {}
    for name in names:
        module, _, last = name.rpartition(".")
        if last in EXPERTS_READ and module.endswith(".experts"):
            found.setdefault(module, []).append(name)
    return (tuple(group) for group in found.values())


def together(names: Collection[str]) -> Mapping[str, tuple[str, ...]]:
    """Map each of *names* to the names it is fused with, including itself."""
    groups = {name: group for group in fused(names) for name in group}
    return {name: groups.get(name, (name,)) for name in names}
