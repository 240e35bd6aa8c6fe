"""Families of LoRA and DoRA adapters, derived from the families of the base models.

LoRA (Hu et al., arXiv:2106.09685) changes a layer ``W`` (out, in) to ``W + s B A`` with ``lora_b``
= B (out, R) and ``lora_a`` = A (R, in). DoRA (Liu et al., arXiv:2402.09353) also scales the rows to
the norms in ``magnitude``. B and the magnitude have the same row order as W, so that the tables of
the model family also map them. If a layer is concatenated with others into one tensor, it owns the
corresponding rows of the tensor's B and shares A.

Sources: peft's ``tuners/lora`` and ``utils/save_and_load.py``, torchtune's ``modules/peft`` and
``models/convert_weights.py``, torchtitan's ``components/lora.py``, mistral-inference's ``lora.py``,
Megatron-Bridge's ``peft/utils.py`` and ``peft/canonical_lora.py``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from ckptctl.planner.families.declarations import AFTER
from ckptctl.planner.families.tables import Dims, Leaf, LogicalTensor
from ckptctl.planner.families.templates import Template
from ckptctl.planner.layouts import HF, Family
from ckptctl.planner.mapping.matching import match_keys

ADAPTER_SUFFIX = "-lora"
"""Suffix that is appended to a model type to name the family of its adapters."""

UNFUSED = "apart"
"""Layout in which each logical tensor is separate, with the row order of another layout."""

RANK_AXIS = "R"
PEFT_PREFIX = "base_model.model."
PEFT_LAYOUTS = ("peft", "peft-v5")
STACKED = "hf-v5"
"""Layout of the parameters in which transformers 5 stacks the experts of a layer."""
FACTOR_ROLES = ("lora_a", "lora_b", "magnitude")
EMBEDDING_TENSOR = "embed"
"""Name of the axis that enumerates experts."""
COPY_INFIXES = {"saved": "", "beneath": ".base_layer"}
"""Key infixes of complete tensors in an adapter, which replace a layer or are its base layer."""
_PLAIN_SUFFIXES = (".lora_a.weight", ".lora_b.weight", ".magnitude")
_PEFT_SUFFIXES = (".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector")
_MCORE_SUFFIXES = (".linear_in.weight", ".linear_out.weight")
_PEFT_EMBEDDING_SUFFIXES = (".lora_embedding_B", ".lora_embedding_A")
"""PEFT's suffixes for B and A of an embedding, which PEFT stores transposed."""
_PAIR_SUFFIXES = (
    _PLAIN_SUFFIXES,
    _PEFT_SUFFIXES,
    (*_MCORE_SUFFIXES, ""),
    (*reversed(_PEFT_EMBEDDING_SUFFIXES), _PEFT_SUFFIXES[2]),
)
"""Suffixes of the factors whose first and last dimension is the rank, and of the magnitudes."""
RANK_FIRST_SUFFIXES = (
    _PLAIN_SUFFIXES[0],
    _PEFT_SUFFIXES[0],
    _MCORE_SUFFIXES[0],
    _PEFT_EMBEDDING_SUFFIXES[1],
)
"""Suffixes of factors whose first dimension is the rank."""


class _FactorNaming(NamedTuple):
    """Names that a program gives to the adapter factors of a layer.

    Attributes:
        layout: Layout of the base model.
        suffixes: Suffix of the layer name for each role, in order. The last roles may be missing.
        module: Infix between the layer name and the suffix.
        parts: Infix for each part of a concatenated layer with separate factors, or empty if the
            concatenated layer has common factors.
    """

    layout: str
    suffixes: tuple[str, ...]
    module: str = ""
    parts: Mapping[str, str] = {}


CANONICAL_SUFFIX = "-canonical"
"""Layout suffix for Megatron-Bridge's adapters with separate factors for concatenated layers."""
_MCORE_PART_NAMES = {"q": "q", "k": "k", "v": "v", "w1": "gate", "w3": "up"}
_NAMINGS = {
    "peft": _FactorNaming("hf", _PEFT_SUFFIXES),
    "peft-v5": _FactorNaming("hf-v5", _PEFT_SUFFIXES),
    "torchtune": _FactorNaming("torchtune", _PLAIN_SUFFIXES),
    "torchtitan@0.3": _FactorNaming("torchtitan@0.3", _PLAIN_SUFFIXES[:2]),
    "mistral": _FactorNaming("mistral", _PEFT_SUFFIXES[:2]),
    "mcore": _FactorNaming("mcore", _MCORE_SUFFIXES, ".adapter"),
    f"mcore{CANONICAL_SUFFIX}": _FactorNaming(
        "mcore",
        _MCORE_SUFFIXES,
        ".adapter",
        {n: f".adapter_{part}" for n, part in _MCORE_PART_NAMES.items()},
    ),
}
ADAPTER_LAYOUTS = tuple(_NAMINGS)
SCALED_BIAS_LAYOUTS = ("torchtune",)
"""Layouts of programs in which DoRA also scales the bias of a layer, unlike in PEFT."""
_ADAPTER_KEY = re.compile(
    r"\.lora_(?:[abAB]|embedding_[AB])(?:\.|\Z)"
    r"|\.adapter(?:\.adapter_\w+)?\.linear_(?:in|out)\.weight\Z"
)
_WEIGHT_SUFFIX = ".weight"


def has_adapter_factors(names: Collection[str]) -> bool:
    """Return whether any of the tensor *names* is a low-rank factor of an adapter."""
    return any(_ADAPTER_KEY.search(name) for name in names)


def is_factor(name: str) -> bool:
    """Return whether *name* is a low-rank factor or a DoRA magnitude of an adapter."""
    return name.endswith((*_PLAIN_SUFFIXES, *_PEFT_SUFFIXES, *_PEFT_EMBEDDING_SUFFIXES)) or (
        name.endswith(_MCORE_SUFFIXES) and has_adapter_factors([name])
    )


def list_unpaired_factors(names: Collection[str]) -> list[str]:
    """List the low-rank factors among *names* that have only A without B, or B without A."""
    pairs = {_PEFT_EMBEDDING_SUFFIXES, *(naming.suffixes[:2] for naming in _NAMINGS.values())}
    return [
        name
        for name in names
        for suffix, other_suffix in (*pairs, *((b, a) for a, b in pairs))
        if name.endswith(suffix)
        and is_factor(name)
        and name.removesuffix(suffix) + other_suffix not in names
    ]


class FactorPair(NamedTuple):
    """Names of the two low-rank factors of a layer, and of its DoRA magnitudes.

    Attributes:
        rank_first: Name of the factor whose first dimension is the rank.
        rank_last: Name of the factor whose last dimension is the rank.
        magnitude: Name of the magnitudes if the layer has any, or an empty string.
    """

    rank_first: str
    rank_last: str
    magnitude: str


def list_factor_pairs(names: Collection[str]) -> list[FactorPair]:
    """List the pairs of low-rank factors among *names*."""
    return [
        FactorPair(name, module + rank_last, module + magnitude)
        for name in names
        for rank_first, rank_last, magnitude in _PAIR_SUFFIXES
        if name.endswith(rank_first) and is_factor(name)
        for module in [name.removesuffix(rank_first)]
        if module + rank_last in names
    ]


def get_module_name(name: str) -> str:
    """Return the name of the layer that an adapter tensor changes, without PEFT's prefix."""
    for suffix in (*_PEFT_SUFFIXES, *_PLAIN_SUFFIXES, *_MCORE_SUFFIXES, *_PEFT_EMBEDDING_SUFFIXES):
        name = name.removesuffix(suffix)
    return name.removeprefix(PEFT_PREFIX)


@cache
def derive_adapter_family(base: Family) -> Family:
    """Derive the family of the adapters of *base*.

    It has the layouts of *base* in which programs write adapters. Layout names are the same, except
    that ``peft`` replaces ``hf``. Layouts that insert layers at positions from a
    config are excluded, as are those with words that depend on the kind of the layer, and those
    that number two kinds of experts in halves: an adapter may have any subset of experts, so its
    keys do not show the halves.
    """
    inserting_layouts = {shift.layout for shift in base.shifts if shift.place != AFTER}
    inserting_layouts |= {name for name in base.layouts if base.list_layer_words(name)}
    namings = {
        name: naming
        for model in base.layouts
        for name, naming in _NAMINGS.items()
        if naming.layout == model and model not in inserting_layouts
    }
    # MTP layers, which follow all others, have no adapters.
    trailing_indices = {shift.index for shift in base.shifts}
    tensors = [
        tensor for tensor in base.tensors.values() if not trailing_indices & {*tensor.indices}
    ]
    return Family(
        name=base.name + ADAPTER_SUFFIX,
        title=f"LoRA and DoRA adapters of {base.title}",
        layouts=tuple(namings),
        tables=(),
        rows=tuple(row for tensor in tensors for row in _iterate_adapter_tensors(tensor, namings)),
        architecture=base.architecture,
        constants=base.constants,
        composite=base.composite,
        sizes=base.sizes,
        free=(RANK_AXIS, *base.free),
        partial=True,
        refines=base.refines and base.refines + ADAPTER_SUFFIX,
        config_signs=base.config_signs,
        params_signs=base.params_signs,
        megatron=base.megatron,
        tiny={**base.tiny, RANK_AXIS: 3},
    )


@cache
def derive_unfused_adapters(base: Family, layout: str) -> Family:
    """Derive the adapter family of *base*, with :data:`UNFUSED` in the row order of *layout*.

    In :data:`UNFUSED`, factors of embeddings are stored like factors of linear layers
    (:func:`to_linear_factor_name`).
    """
    family = derive_adapter_family(base)
    stored = {
        t.name: _build_unfused_leaf(base, t, t.leaves[layout])
        for t in base.tensors.values()
        if layout in t.leaves
    }
    rows = []
    for tensor in family.rows:
        head, role = tensor.name.partition(".")[0].rsplit("-", 1)
        leaf = stored.get(".".join([head, *tensor.name.split(".")[1:]]))
        if leaf is not None and (role in COPY_INFIXES or _is_matrix(leaf)):
            unfused_leaf = _build_factor_leaf(leaf, role, leaf.key).standalone
            linear_leaves = {
                name: _to_linear_leaf(leaf_of_layout)
                for name, leaf_of_layout in tensor.leaves.items()
            }
            tensor = replace(
                tensor, leaves={**linear_leaves, UNFUSED: _name_unfused(tensor, unfused_leaf)}
            )
        rows.append(tensor)
    return replace(family, rows=tuple(rows), layouts=(*family.layouts, UNFUSED))


@cache
def derive_stacked_adapters(base: Family, layout: str, *, is_transposed: bool = False) -> Family:
    """Derive the family of factors of expert stacks, with :data:`UNFUSED` for model *layout*.

    PEFT stores one A ``[experts R, in]`` and one B ``[out, R experts]`` for a stack, under the name
    of the parameter in transformers 5. In :data:`UNFUSED`, every expert has its own factors.

    Args:
        base: Family of the models.
        layout: Layout of the model, whose row order :data:`UNFUSED` has.
        is_transposed: Whether A has the stack's output features and B its input features.
    """
    rows = []
    for tensor in base.tensors.values():
        stack, leaf = tensor.leaves.get(STACKED), tensor.leaves.get(layout)
        expert_leaf = leaf and _build_unfused_leaf(base, tensor, leaf)
        if stack is None or expert_leaf is None or len(expert_leaf.spread_axes) != 1:
            continue
        (expert_axis,) = expert_leaf.spread_axes
        expert_rows = sorted(expert_leaf.dims[0])
        if stack.dims[:1] != ((expert_axis,),) or len(stack.dims) != 3:
            continue
        outputs, inputs = sorted(stack.dims[1:], key=lambda dims: sorted(dims) != expert_rows)
        shared_a = PEFT_PREFIX + stack.key.text + _PEFT_SUFFIXES[0]
        shared_b = PEFT_PREFIX + stack.key.text + _PEFT_SUFFIXES[1]
        a_rank, b_rank = (expert_axis, RANK_AXIS), (RANK_AXIS, expert_axis)
        part, interleave_axis = stack.part, stack.interleave_axis
        stacked_leaves = (
            (
                Leaf(Template.parse(shared_b), (inputs, b_rank)),
                Leaf(Template.parse(shared_a), (a_rank, outputs), (), part, 1, interleave_axis),
            )
            if is_transposed
            else (
                Leaf(Template.parse(shared_a), (a_rank, inputs)),
                Leaf(Template.parse(shared_b), (outputs, b_rank), (), part, 0, interleave_axis),
            )
        )
        for role, stacked_leaf in zip(FACTOR_ROLES[:2], stacked_leaves, strict=True):
            row = _build_row(tensor, role, {})
            unfused_leaf = _build_factor_leaf(expert_leaf, role, expert_leaf.key).standalone
            leaves = {PEFT_LAYOUTS[1]: stacked_leaf, UNFUSED: _name_unfused(row, unfused_leaf)}
            rows.append(replace(row, leaves=leaves))
    return Family(
        name=base.name + ADAPTER_SUFFIX,
        title=f"LoRA adapters of expert stacks of {base.title}",
        layouts=(PEFT_LAYOUTS[1], UNFUSED),
        tables=(),
        rows=tuple(rows),
        architecture=base.architecture,
        constants=base.constants,
        composite=base.composite,
        sizes=base.sizes,
        free=(RANK_AXIS, *base.free),
        partial=True,
    )


@cache
def map_scaled_biases(base: Family, layout: str) -> Mapping[str, str]:
    """Map the weight of each layer to its bias, if DoRA scales biases in *layout*.

    Returns:
        Names of logical tensors, without indices. Empty if DoRA does not scale biases.
    """
    tensors = base.tensors.values() if layout in SCALED_BIAS_LAYOUTS else ()
    keys = {
        leaf.key.text: tensor.name.partition(".")[0]
        for tensor in tensors
        if (leaf := tensor.leaves.get(layout)) is not None
    }
    bias_by_weight = {
        key: key.removesuffix(_WEIGHT_SUFFIX) + ".bias"
        for key in keys
        if key.endswith(_WEIGHT_SUFFIX)
    }
    return {
        keys[key]: keys[bias_key] for key, bias_key in bias_by_weight.items() if bias_key in keys
    }


@cache
def derive_unfused_model(base: Family, layout: str) -> Family:
    """Derive a copy of *base* that has only the layouts *layout* and :data:`UNFUSED`.

    In :data:`UNFUSED`, every expert has tensors of its own.
    """
    rows = tuple(
        replace(
            tensor,
            leaves={
                layout: leaf,
                UNFUSED: _name_unfused(tensor, _build_unfused_leaf(base, tensor, leaf)),
            },
        )
        for tensor in base.tensors.values()
        if (leaf := tensor.leaves.get(layout)) is not None
    )
    return replace(
        base,
        layouts=(layout, UNFUSED),
        tables=(),
        like={},
        rows=rows,
        drops=tuple(drop for drop in base.drops if drop.layout == layout),
        shifts=tuple(shift for shift in base.shifts if shift.layout == layout),
        ties=(),
        companions=(),
    )


def _iterate_adapter_tensors(
    tensor: LogicalTensor, namings: Mapping[str, _FactorNaming]
) -> Iterator[LogicalTensor]:
    """Yield all tensors that an adapter may contain for *tensor* of the base model."""
    leaves = {
        n: tensor.leaves[naming.layout]
        for n, naming in namings.items()
        if naming.layout in tensor.leaves
    }
    linear = {name: leaf for name, leaf in leaves.items() if _is_linear(leaf)}
    roles: tuple[str, ...] = FACTOR_ROLES
    if tensor.name == EMBEDDING_TENSOR:  # only PEFT trains these factors, without magnitudes
        linear, roles = (
            {n: leaf for n, leaf in linear.items() if n in PEFT_LAYOUTS},
            FACTOR_ROLES[:2],
        )
    if linear:
        rows = sorted(next(iter(linear.values())).dims[0])
        same_rows = {n: leaf for n, leaf in linear.items() if sorted(leaf.dims[0]) == rows}
        for number, role in enumerate(roles):
            factor_leaves = {
                name: _build_factor_leaf(part, role, key)
                for name, leaf in same_rows.items()
                if number < len(namings[name].suffixes)
                for part, key in [_find_factor(tensor, name, leaf, number)]
            }
            if tensor.name == EMBEDDING_TENSOR:
                factor_leaves = {
                    name: _to_embedding_leaf(leaf) for name, leaf in factor_leaves.items()
                }
            if factor_leaves:
                yield _build_row(tensor, role, factor_leaves)
    for role, infix in COPY_INFIXES.items():
        copies = {
            name: replace(leaf, key=_build_copy_key(leaf.key.text, infix))
            for name, leaf in leaves.items()
            if name in PEFT_LAYOUTS and "." in leaf.key.text  # PEFT copies modules only
        }
        if copies:
            yield _build_row(tensor, role, copies)


def list_adaptable_modules(base: Family, layout: str, names: Collection[str]) -> list[str]:
    """List the modules to which an adapter in *layout* can add factors, except routers and experts.

    *names* are the names of the model's tensors in the tables of *base*.
    """
    leaves = {
        tensor.name.partition(".")[0].removesuffix(f"-{FACTOR_ROLES[1]}"): (tensor.indices, leaf)
        for tensor in derive_adapter_family(base).rows
        if (leaf := tensor.leaves.get(layout)) is not None
        and tensor.name.partition(".")[0].endswith(f"-{FACTOR_ROLES[1]}")
        and not leaf.spread_axes
    }
    modules: dict[str, None] = {}
    for name in names:
        head, *numbers = name.split(".")
        indices, leaf = leaves.get(head, ((), None))
        if leaf is not None and head != ROUTER and len(numbers) == len(indices):
            values = dict(zip(indices, map(int, numbers), strict=True))
            modules[get_module_name(leaf.key.format_key(values))] = None
    return list(modules)


ROUTER = "router"
"""Name of routers in the tables. Some also have rows for shared experts."""


def _is_linear(leaf: Leaf) -> bool:
    """Return whether *leaf* is a linear layer, or one part of a concatenated linear layer."""
    return leaf.key.text.endswith(_WEIGHT_SUFFIX) and _is_matrix(leaf)


def _is_matrix(leaf: Leaf) -> bool:
    """Return whether *leaf* is a matrix, or some of the rows of one."""
    return len(leaf.dims) == 2 and not (leaf.part is not None and leaf.concat_dim)


def _build_unfused_leaf(base: Family, tensor: LogicalTensor, leaf: Leaf) -> Leaf:
    """Build the leaf of *tensor* in :data:`UNFUSED` from its leaf in the layout of the model.

    Every expert has a tensor of its own. A linear layer is a matrix, even if the layout of the
    model divides or transposes it, or joins the experts.
    """
    linear = next(
        (
            other
            for name in (HF, STACKED)
            if (other := tensor.leaves.get(name)) is not None and _is_linear(other)
        ),
        None,
    )
    expert_axes = base.expert_axes.union(linear.spread_axes if linear else ())
    experts, *dims = leaf.dims or ((),)
    if len(dims) == 2 and len(experts) == 1 and experts[0] in expert_axes and not leaf.spread_axes:
        return Leaf(leaf.key, tuple(dims), experts, offset=leaf.offset)
    is_joined = linear is not None and not {*linear.spread_axes} <= {*leaf.spread_axes}
    is_divided = is_joined or not _is_matrix(leaf)
    if linear and is_divided and sorted(linear.axes) == sorted(leaf.axes):
        return Leaf(leaf.key, linear.dims, linear.spread_axes, offset=leaf.offset)
    return leaf.standalone


def list_linear_keys(family: Family, layout: str, keys: Collection[str]) -> list[str]:
    """List the weights of linear layers among *keys*, except embeddings and routers.

    Routers are excluded because PEFT adds no factors to the router modules of transformers 5.
    """
    groups = match_keys(family, family.get_layout(layout), keys).groups
    leaves = (leaf for tensor in family.tensors.values() for leaf in tensor.leaves.values())
    expert_axes = family.expert_axes.union(*(leaf.spread_axes for leaf in leaves))
    router_dims = {(axis,) for axis in expert_axes}
    linear = {
        key
        for group in groups
        if all(
            _is_linear(leaf)
            and router_dims.isdisjoint(leaf.dims)
            and tensor.name.partition(".")[0] != ROUTER
            for tensor, leaf in group.stored.parts
        )
        for key in group.keys
        if not _is_embedding(key)
    }
    return [key for key in keys if key in linear]


def _is_embedding(key: str) -> bool:
    """Return whether *key* is a token embedding or an embedding of relative distances."""
    parents = key.split(".")[:-1]
    module = next((part for part in reversed(parents) if not part.isdecimal()), "")
    distances = key.endswith(".relative_attention_bias.weight")
    return "embed" in module or distances or key == "shared.weight"


def _find_factor(
    tensor: LogicalTensor, name: str, leaf: Leaf, number: int
) -> tuple[Leaf, Template]:
    """Return the leaf of the base model that a factor changes, and the key of the factor."""
    naming = _NAMINGS[name]
    part = naming.parts.get(tensor.name.partition(".")[0], "") if leaf.part is not None else ""
    prefix = PEFT_PREFIX if name in PEFT_LAYOUTS else ""
    module = prefix + leaf.key.text.removesuffix(_WEIGHT_SUFFIX) + naming.module
    return leaf.standalone if part else leaf, Template.parse(
        module + part + naming.suffixes[number]
    )


def to_linear_factor_name(name: str) -> str:
    """Convert the name of an embedding factor to the name that a linear factor would have."""
    for suffix, linear in zip(_PEFT_EMBEDDING_SUFFIXES, _PEFT_SUFFIXES, strict=False):
        if name.endswith(suffix):
            return name.removesuffix(suffix) + linear
    return name


def _to_linear_leaf(leaf: Leaf) -> Leaf:
    """Convert the leaf of an embedding factor to the leaf of a linear factor, if it is one."""
    name = to_linear_factor_name(leaf.key.text)
    if name == leaf.key.text:
        return leaf
    return replace(leaf, key=Template.parse(name), dims=leaf.dims[::-1])


def _to_embedding_leaf(leaf: Leaf) -> Leaf:
    """Transpose the leaf of a linear factor, as PEFT stores the factors of embeddings."""
    for suffix, linear in zip(_PEFT_EMBEDDING_SUFFIXES, _PEFT_SUFFIXES, strict=False):
        if leaf.key.text.endswith(linear):
            key = Template.parse(leaf.key.text.removesuffix(linear) + suffix)
            return replace(leaf, key=key, dims=leaf.dims[::-1])
    return leaf


def _build_copy_key(key: str, infix: str) -> Template:
    module, dot, last = key.rpartition(".")
    return Template.parse(PEFT_PREFIX + module + infix + dot + last)


def _build_factor_leaf(leaf: Leaf, role: str, key: Template) -> Leaf:
    """Build the leaf of the adapter tensor *role* for a tensor that is stored as *leaf*."""
    if role in COPY_INFIXES:
        return replace(leaf, key=key)
    rows: Dims = (leaf.dims[0],)
    if role == "lora_a":
        return Leaf(key, ((RANK_AXIS,), leaf.dims[1]), leaf.spread_axes)
    if role == "lora_b":
        rows = (leaf.dims[0], (RANK_AXIS,))
    return Leaf(key, rows, leaf.spread_axes, leaf.part, interleave_axis=leaf.interleave_axis)


def _build_row(tensor: LogicalTensor, role: str, leaves: Mapping[str, Leaf]) -> LogicalTensor:
    head, dot, rest = tensor.name.partition(".")
    return LogicalTensor(
        name=f"{head}-{role}{dot}{rest}",
        block=tensor.block,
        indices=tensor.indices,
        split_axis=None,
        optional=True,
        variant=None,
        leaves=leaves,
        scaled_weight=tensor.scaled_weight,
        group=tensor.group,
    )


def _name_unfused(tensor: LogicalTensor, leaf: Leaf) -> Leaf:
    spread = [f"{{{axis}}}" for axis in leaf.spread_axes]
    return replace(leaf, key=Template.parse(".".join([tensor.name, *spread])))
