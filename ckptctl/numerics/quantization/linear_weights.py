"""Find the weights of linear layers that ``--quantize`` may quantize.

The family's tables list the matrices of the language model's layers. Matrices are excluded if they
have a row for each token or expert, a single row for each head, or are in layers without the hidden
size, such as a vision tower. ``Family.unquantized`` lists other weights that programs never read
quantized.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal

from ckptctl.numerics.quantization.recipes import WEIGHT
from ckptctl.planner.layouts import Family, Layout, LayoutTensor, Leaf

VOCABULARY_AXIS, HIDDEN_AXIS = "v", "d"
Role = Literal["linear", "experts", "transposed", "stacked", "other"]

FUSED_MODULES = (
    ("gate_proj", "up_proj"),
    ("q_proj", "k_proj", "v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("w1", "w3"),
)
"""Groups of modules that vLLM fuses.

The modules of a group must all be quantized or all unquantized, and share one global scale.

Source: ``FUSED_LAYER_NAMES`` in llm-compressor's ``observers/helpers.py``.
"""

HIDDEN_DIM_BY_STACK = {"gate_up_proj": 2, "down_proj": 1}
"""Stacked parameters of a module ``experts``, and the dimension of each that is the hidden size.

Source: ``FP8Experts`` in transformers' ``integrations/finegrained_fp8.py``.
"""

EXPERT_LAYERS_BY_STACK = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Layers of one expert that each stacked parameter concatenates along its output features.

Source: ``split_fused_moe_experts`` in llm-compressor's ``entrypoints/model_free/converter.py``, and
its ``modeling/moe/linear_experts.py`` for transposed stacks. vLLM reads these names for Gemma 4
(pull request 39045), Llama 4 (``llama4.py``) and Qwen 3 VL (``qwen3_vl_moe.py``).
"""


class TensorRoles:
    """Determines the role of each tensor in one layout of a family."""

    def __init__(self, family: Family, layout: Layout) -> None:
        self._family = family
        self._table = layout.table
        self._leaves = leaves = layout.leaves
        self._language_layers = {
            _get_layer_prefix(leaf) for leaf in leaves.values() if HIDDEN_AXIS in leaf.axes
        }
        groups = (group for leaf in leaves.values() for group in leaf.dims)
        self._head_axes = {group[0] for group in groups if len(group) > 1}
        self._interleaved_modules = {
            _get_module(leaf)
            for leaf in leaves.values()
            if self._is_expert_stack(leaf) and any(len(group) > 1 for group in leaf.dims)
        }

    @property
    def has_stacked_experts(self) -> bool:
        """Whether the layout stores all experts of a layer stacked in one tensor."""
        return any(self._is_expert_stack(leaf) for leaf in self._leaves.values())

    def get_role(self, key: str, shape: Sequence[int]) -> Role:
        """Return the role of the tensor *key*.

        Stacked experts are ``experts`` if they are ``[experts, out, in]`` and have a name under
        which transformers reads quantized stacks, ``transposed`` if they are ``[experts, in, out]``
        and have such a name, otherwise ``stacked``.
        """
        match = self._table.find_match(key)
        if match is None or not isinstance(match[0], LayoutTensor):
            return "other"
        stored = match[0]
        tensor, leaf = stored.parts[0]
        stem = tensor.name.partition(".")[0]
        is_quantized_variant = tensor.scaled_weight or tensor.variant in self._family.quantized
        is_language_weight = (
            tensor.indices
            and _get_layer_prefix(leaf) in self._language_layers
            and not is_quantized_variant
        )
        if not is_language_weight or stem in self._family.unquantized:
            return "other"
        axes = {axis for group in leaf.dims for axis in group}
        if self._is_expert_stack(leaf):
            if _get_module(leaf) in self._interleaved_modules:
                return "stacked"
            if _has_stack_name(leaf, is_transposed=True):
                return "transposed"
            is_readable = _has_stack_name(leaf) and not self._family.experts_apart
            return "experts" if is_readable else "stacked"
        if len(leaf.dims) != 2 or not stored.template.text.endswith(WEIGHT) or shape[0] == 1:
            return "other"
        rows = leaf.dims[0]
        is_head_gate = len(rows) == 1 and rows[0] in self._head_axes
        excluded_axes = {VOCABULARY_AXIS, *self._family.expert_axes}
        return "other" if is_head_gate or axes & excluded_axes else "linear"

    def _is_expert_stack(self, leaf: Leaf) -> bool:
        is_by_expert = len(leaf.dims) == 3 and len(leaf.dims[0]) == 1
        return is_by_expert and leaf.dims[0][0] in self._family.expert_axes


def _has_stack_name(leaf: Leaf, *, is_transposed: bool = False) -> bool:
    """Return whether *leaf* has the name and the dimensions of a stack in a module ``experts``.

    transformers' ``FP8Experts`` reads ``[experts, out, in]``. If *is_transposed* is true, the
    stack must be ``[experts, in, out]`` instead.
    """
    hidden = HIDDEN_DIM_BY_STACK.get(leaf.key.text.rpartition(".")[2], 0)
    simple = all(len(group) == 1 for group in leaf.dims)
    dim = 3 - hidden if is_transposed and hidden else hidden
    return simple and _get_module(leaf).endswith(".experts") and leaf.dims[dim] == (HIDDEN_AXIS,)


def _get_module(leaf: Leaf) -> str:
    return leaf.key.text.rpartition(".")[0]


def _get_layer_prefix(leaf: Leaf) -> str:
    """Return the key prefix before the layer number, such as ``model.layers.``."""
    return leaf.key.text.partition("{")[0]


def find_fused_groups(names: Collection[str]) -> Iterator[tuple[str, ...]]:
    """Yield each group of weights among *names* that vLLM fuses into one weight."""
    available = set(names)
    for name in names:
        module = name.removesuffix(WEIGHT)
        parent, dot, last_name = module.rpartition(".")
        for group in FUSED_MODULES:
            group_names = tuple(f"{parent}{dot}{part_name}{WEIGHT}" for part_name in group)
            if (
                last_name == group[0]
                and name.endswith(WEIGHT)
                and available.issuperset(group_names)
            ):
                yield group_names


def find_expert_stack_groups(names: Collection[str]) -> Iterator[tuple[str, ...]]:
    """Yield the expert stacks among *names*, grouped by their ``experts`` module."""
    names_by_module: dict[str, list[str]] = {}
    for name in names:
        module, _, last_name = name.rpartition(".")
        if last_name in HIDDEN_DIM_BY_STACK and module.endswith(".experts"):
            names_by_module.setdefault(module, []).append(name)
    return (tuple(group) for group in names_by_module.values())


def map_fused_groups(names: Collection[str]) -> Mapping[str, tuple[str, ...]]:
    """Map each of *names* to the fused group that it belongs to, or to only itself if none."""
    groups = {name: group for group in find_fused_groups(names) for name in group}
    return {name: groups.get(name, (name,)) for name in names}
