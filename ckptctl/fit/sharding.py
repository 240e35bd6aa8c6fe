"""Bytes of each weight on one GPU, from the axes in the tables of the model family.

A starred axis of a table is split across tensor-parallel ranks. Most tables have no stars. There,
the meaning of the axes determines the split, as in vLLM and Megatron-Core: attention by heads,
feed-forward networks by their hidden size, embedding and output by the vocabulary. All other
weights are counted on every rank.

Sources: vLLM 0.11 to 0.24, ``model_executor/layers/linear.py`` (``ColumnParallelLinear``,
``RowParallelLinear``, ``QKVParallelLinear``, which repeats key/value heads),
``vocab_parallel_embedding.py`` (which pads), ``fused_moe/layer.py`` (``determine_expert_map``),
``models/gpt_oss.py`` (which pads blocks), ``distributed/utils.py`` (``get_pp_indices``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from ckptctl.catalog import TensorEntry
from ckptctl.errors import MappingError
from ckptctl.planner.axes import AxisSizes
from ckptctl.planner.config_facts import Json, read_layer_sizes
from ckptctl.planner.families.tables import Leaf, LogicalTensor
from ckptctl.planner.layouts import Family, LayoutTensor
from ckptctl.planner.model_parallel import PartSplit, compute_part_lengths

KEY_VALUE_HEADS, VOCABULARY, LAYERS = "k", "v", "i"
SPLIT_AXES = (
    *(("h",), ("k", "q"), ("k",)),
    *(("lh",), ("lk",), ("mh",), ("mi",)),
    *(("f",), ("fb",), ("m",), ("em",), ("s",), ("v",)),
)
"""Axes that tensor-parallel ranks split, in order of precedence.

Heads of attention, of linear attention and of state space layers, feed-forward sizes, also in MXFP4
(blocks of 32 elements, or bytes of 2), vocabulary.
"""
EXPERT_SPLIT_AXES = (("vm",),)
"""Axes that ranks also split in experts. In vision towers, which every rank has, they differ."""
BLOCKS_BY_AXIS = {"f": "fb"}
"""Axes of blocks in MXFP4, which ranks do not divide, by the axis that they divide."""
PADDED_AXES = (VOCABULARY, "fb")
"""Axes that are padded if their size is not divisible."""
NOT_SIZES = ("n_shared_experts",)
"""Fields whose axis has another meaning than in most families."""
REPLICATED_WORDS = ("router", "norm", "index")
"""Beginnings or parts of names of weights that every rank has."""


@dataclass(frozen=True, slots=True)
class Share:
    """Share of a weight that the fullest rank has.

    Attributes:
        rank: Share of the weight's bytes.
        is_expert: Whether the weight belongs to experts.
    """

    rank: Fraction
    is_expert: bool


@dataclass(frozen=True, slots=True)
class Ranks:
    """Number of ranks that share a pipeline stage.

    Attributes:
        tensor: Tensor-parallel size.
        expert: Number of ranks among which experts are distributed; 1 if they are split.
    """

    tensor: int
    expert: int


def get_logical_name(tensor: LogicalTensor) -> str:
    """Return the name of *tensor* without indices."""
    return tensor.name.partition(".")[0]


def is_layer_tensor(tensor: LogicalTensor) -> bool:
    """Return whether *tensor* belongs to the layers that config.json counts."""
    return tensor.indices[-1:] == (LAYERS,)


def get_layer_sizes(
    family: Family, sizes: AxisSizes, config: Json | None, layer: int | None, total: int
) -> AxisSizes:
    """Return the sizes of axes in one of *total* layers, or outside the layers if it is None."""
    if not family.layer_sizes or config is None or layer is None:
        return sizes
    axes = {**sizes.axes, **read_layer_sizes(family, config, layer, total)}
    return AxisSizes(axes, sizes.products)


def compute_share(
    family: Family, stored: LayoutTensor, entry: TensorEntry, sizes: AxisSizes, ranks: Ranks
) -> Share:
    """Compute the share of a stored tensor on the fullest rank.

    Raises:
        MappingError: A size is unknown, or a number of heads is not divisible.
    """
    tensor = stored.parts[0][0]
    is_expert = _is_expert(family, tensor, stored.leaves[0])
    if is_expert and ranks.expert > 1:
        axis = next(axis for axis in stored.leaves[0].axes if axis in family.expert_axes)
        count = _get_count(family, (axis,), sizes, entry.name)
        return Share(Fraction(math.ceil(count / ranks.expert), count), is_expert)
    if ranks.tensor == 1:
        return Share(Fraction(1), is_expert)
    tensor_by_part = {leaf.part: logical for logical, leaf in reversed(stored.parts)}
    leaves = stored.leaves
    if len(leaves) == 1:
        axis_share = _compute_part_share(family, tensor, leaves[0], entry, sizes, ranks.tensor)
        return Share(axis_share, is_expert)
    splits = [PartSplit(leaf, None, None) for leaf in leaves]
    lengths = compute_part_lengths(family, entry.name, splits, sizes)
    shares = [
        _compute_part_share(family, tensor_by_part[leaf.part], leaf, entry, sizes, ranks.tensor)
        for leaf in leaves
    ]
    weighted = (length * share for length, share in zip(lengths, shares, strict=True))
    return Share(sum(weighted, Fraction(0)) / sum(lengths), is_expert)


def _is_expert(family: Family, tensor: LogicalTensor, leaf: Leaf) -> bool:
    name = get_logical_name(tensor)
    return not family.expert_axes.isdisjoint(leaf.axes) and not name.startswith("router")


def _compute_part_share(
    family: Family,
    tensor: LogicalTensor,
    leaf: Leaf,
    entry: TensorEntry,
    sizes: AxisSizes,
    ranks: int,
) -> Fraction:
    """Compute the share of one part of a stored tensor that a tensor-parallel rank has."""
    axes = find_split_axes(family, tensor, leaf)
    if not axes:
        return Fraction(1)
    block = BLOCKS_BY_AXIS.get(axes[0]) if len(axes) == 1 else None
    if block is not None and block in sizes.axes:
        axes = (block,)
    whole = next((dim for dim, group in enumerate(leaf.dims) if group == axes), None)
    if whole is not None and leaf.part is None:
        count = entry.shape[whole]
    else:
        count = _get_count(family, axes, sizes, entry.name)
    return compute_axis_share(family, axes, count, ranks)


def find_split_axes(family: Family, tensor: LogicalTensor, leaf: Leaf) -> tuple[str, ...]:
    """Return the axes that tensor-parallel ranks split together, or nothing if none is split."""
    name = get_logical_name(tensor)
    if any(name.startswith(word) for word in REPLICATED_WORDS) or "norm" in name.split("_"):
        return ()
    if tensor.scaled_weight:
        scaled = family.tensors[tensor.scaled_weight]
        return find_split_axes(family, scaled, next(iter(scaled.leaves.values())))
    if tensor.split_axis and tensor.split_axis not in family.expert_axes:
        return (tensor.split_axis,)
    unusual = {axis for axis, (field, _) in family.sizes.items() if field.endswith(NOT_SIZES)}
    present = set(leaf.axes) - unusual
    candidates: tuple[tuple[str, ...], ...] = SPLIT_AXES
    if not family.expert_axes.isdisjoint(leaf.axes):
        candidates = (*SPLIT_AXES, *EXPERT_SPLIT_AXES)
    return next((axes for axes in candidates if present.issuperset(axes)), ())


def compute_axis_share(family: Family, axes: tuple[str, ...], count: int, ranks: int) -> Fraction:
    """Compute the share of *count* entries along *axes* that the fullest rank has.

    Key/value heads are repeated if ranks outnumber them. Vocabularies and blocks are padded.

    Raises:
        MappingError: *count* is not divisible.
    """
    if axes[0] in PADDED_AXES:
        return Fraction(math.ceil(count / ranks), count)
    if axes == (KEY_VALUE_HEADS,) and count < ranks and ranks % count == 0:
        return Fraction(1, count)
    if count % ranks:
        names = " and ".join(dict.fromkeys(family.describe_size(axis) for axis in axes))
        raise MappingError(f"{names} = {count} cannot be divided among {ranks} ranks")
    return Fraction(1, ranks)


def _get_count(family: Family, axes: tuple[str, ...], sizes: AxisSizes, key: str) -> int:
    count = sizes.find_size(family.expand_axes(axes))
    if not count:
        names = " and ".join(dict.fromkeys(family.describe_size(axis) for axis in axes))
        raise MappingError(f"{names} is unknown", where=f"tensor `{key}`")
    return count


def assign_layers(layers: int, stages: int) -> list[range]:
    """Assign layers to pipeline stages.

    As in vLLM, the stages before the last one have one more layer each if a remainder is left.

    Raises:
        MappingError: There are more stages than layers.
    """
    if stages > layers:
        raise MappingError(f"{layers} layers cannot be divided among {stages} pipeline stages")
    counts = [layers // stages] * stages
    for number in range(2, layers % stages + 2):
        counts[-number] += 1
    starts = [sum(counts[:stage]) for stage in range(stages)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def find_outer_stage(tensor: LogicalTensor, stages: int, heads: Mapping[str, str]) -> set[int]:
    """Return the stages that have a tensor outside the layers.

    The last stage has the final norm, the head and MTP layers. The first one has everything else.
    *heads* maps each tied embedding to its head.
    """
    name = get_logical_name(tensor)
    if name.startswith(("norm", "output", "mtp")) or tensor.group == "mtp":
        return {stages - 1}
    return {0, stages - 1} if tensor.name in heads else {0}
