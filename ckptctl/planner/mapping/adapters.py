"""Families of LoRA and DoRA adapters, derived from those of their models.

A layer ``W`` (out, in) becomes ``W + s B A`` with ``lora_b`` = B (out, R) and ``lora_a`` = A (R,
in) (LoRA, Hu et al., arXiv:2106.09685); DoRA (Liu et al., arXiv:2402.09353) scales its rows to the
lengths in ``magnitude``. The rows of B and of the magnitude are in the order of those of W, so
that the tables of a model family also map them. A layer that is part of a concatenated tensor
has its rows of that tensor's B, and all of its A.

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

from ckptctl.planner.families.tables import Dims, Leaf, Tensor
from ckptctl.planner.families.templates import Template
from ckptctl.planner.layouts import Family
from ckptctl.planner.mapping.matching import match

SUFFIX = "-lora"
"""Suffix of the model type for its adapters."""

APART = "apart"
"""The layout of logical names without concatenation, with the row order of another layout."""

RANK = "R"
PREFIX = "base_model.model."
PEFT = ("peft", "peft-v5")
ROLES = ("lora_a", "lora_b", "magnitude")
EMBEDDING = "embed"
EXPERTS = "x"
"""The axis of a family's experts."""
COPIES = {"saved": "", "beneath": ".base_layer"}
"""Roles of complete tensors of the model: a replacement, and the base layer of factors."""
_PLAIN = (".lora_a.weight", ".lora_b.weight", ".magnitude")
_PEFT = (".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector")
_MCORE = (".linear_in.weight", ".linear_out.weight")
_EMBEDDED = (".lora_embedding_B", ".lora_embedding_A")
"""PEFT's suffixes for A and B of an embedding, which it stores transposed to look up A."""
RANKED = (_PLAIN[0], _PEFT[0], _MCORE[0], _EMBEDDED[1])
"""Suffixes of factors whose first dimension is the rank."""


class _Naming(NamedTuple):
    """A program's names for the factors of a layer.

    Attributes:
        layout: The model's layout.
        suffixes: Suffixes of the layer's name, in the order of roles. Later roles may be missing.
        module: Infix between the layer's name and the suffix.
        parts: Infix for each part of a concatenated layer with separate factors, or empty if the
            concatenated layer has common factors.
    """

    layout: str
    suffixes: tuple[str, ...]
    module: str = ""
    parts: Mapping[str, str] = {}


CANONICAL = "-canonical"
"""Megatron-Bridge's name for adapters whose concatenated layers have factors for each part."""
_PARTS = {"q": "q", "k": "k", "v": "v", "w1": "gate", "w3": "up"}
_NAMINGS = {
    "peft": _Naming("hf", _PEFT),
    "peft-v5": _Naming("hf-v5", _PEFT),
    "torchtune": _Naming("torchtune", _PLAIN),
    "torchtitan@0.3": _Naming("torchtitan@0.3", _PLAIN[:2]),
    "mistral": _Naming("mistral", _PEFT[:2]),
    "mcore": _Naming("mcore", _MCORE, ".adapter"),
    f"mcore{CANONICAL}": _Naming(
        "mcore", _MCORE, ".adapter", {n: f".adapter_{part}" for n, part in _PARTS.items()}
    ),
}
ADAPTER_LAYOUTS = tuple(_NAMINGS)
SCALED_BIASES = ("torchtune",)
"""Layouts of programs whose DoRA also scales the bias of a layer. PEFT's does not."""
_ADAPTED = re.compile(
    r"\.lora_(?:[abAB]|embedding_[AB])(?:\.|\Z)"
    r"|\.adapter(?:\.adapter_\w+)?\.linear_(?:in|out)\.weight\Z"
)
_WEIGHT = ".weight"


def is_adapter(names: Collection[str]) -> bool:
    """Return whether any of *names* is a low-rank factor."""
    return any(_ADAPTED.search(name) for name in names)


def is_factor(name: str) -> bool:
    """Return whether *name* is a low-rank factor or a magnitude."""
    return name.endswith((*_PLAIN, *_PEFT, *_EMBEDDED)) or (
        name.endswith(_MCORE) and is_adapter([name])
    )


def lone_factors(names: Collection[str]) -> list[str]:
    """List the factors among *names* whose counterpart is missing."""
    pairs = {_EMBEDDED, *(naming.suffixes[:2] for naming in _NAMINGS.values())}
    return [
        name
        for name in names
        for one, other in (*pairs, *((b, a) for a, b in pairs))
        if name.endswith(one) and is_factor(name) and name.removesuffix(one) + other not in names
    ]


def module_of(name: str) -> str:
    """Return the layer of an adapter's tensor, without PEFT's prefix."""
    for suffix in (*_PEFT, *_PLAIN, *_MCORE, *_EMBEDDED):
        name = name.removesuffix(suffix)
    return name.removeprefix(PREFIX)


@cache
def adapter_family(base: Family) -> Family:
    """Derive the family of the adapters of *base*.

    Its layouts are those of *base* in which programs write adapters, with the same names except for
    ``peft`` (``hf``). Layouts that insert layers at positions from a config are excluded.
    """
    placed = {shift.layout for shift in base.shifts if shift.place != "after"}
    namings = {
        name: naming
        for model in base.layouts
        for name, naming in _NAMINGS.items()
        if naming.layout == model and model not in placed
    }
    # MTP layers, which follow all others, have no adapters.
    behind = {shift.index for shift in base.shifts}
    tensors = [tensor for tensor in base.tensors.values() if not behind & {*tensor.indices}]
    return Family(
        name=base.name + SUFFIX,
        title=f"LoRA and DoRA adapters of {base.title}",
        layouts=tuple(namings),
        tables=(),
        rows=tuple(row for tensor in tensors for row in _rows(tensor, namings)),
        architecture=base.architecture,
        constants=base.constants,
        composite=base.composite,
        sizes=base.sizes,
        free=(RANK, *base.free),
        partial=True,
        refines=base.refines and base.refines + SUFFIX,
        config_signs=base.config_signs,
        params_signs=base.params_signs,
        megatron=base.megatron,
        tiny={**base.tiny, RANK: 3},
    )


@cache
def adapters_apart(base: Family, layout: str) -> Family:
    """Derive the adapter family with :data:`APART`, in the row order of *layout*.

    In this layout, embeddings have factors in the form of linear layers (:func:`as_linear`).
    """
    family = adapter_family(base)
    stored = {t.name: t.leaves[layout] for t in base.tensors.values() if layout in t.leaves}
    rows = []
    for tensor in family.rows:
        head, role = tensor.name.partition(".")[0].rsplit("-", 1)
        leaf = stored.get(".".join([head, *tensor.name.split(".")[1:]]))
        if leaf is not None and (role in COPIES or _linear(leaf)):
            apart = _leaf(leaf, role, leaf.key).alone
            held = {name: _plain(one) for name, one in tensor.leaves.items()}
            tensor = replace(tensor, leaves={**held, APART: _named(tensor, apart)})
        rows.append(tensor)
    return replace(family, rows=tuple(rows), layouts=(*family.layouts, APART))


@cache
def scaled_biases(base: Family, layout: str) -> Mapping[str, str]:
    """Find the biases that DoRA scales in an adapter's *layout*, by their weights.

    Returns:
        Names in the tables, without indices.
    """
    held = base.tensors.values() if layout in SCALED_BIASES else ()
    keys = {
        leaf.key.text: tensor.name.partition(".")[0]
        for tensor in held
        if (leaf := tensor.leaves.get(layout)) is not None
    }
    bias = {key: key.removesuffix(_WEIGHT) + ".bias" for key in keys if key.endswith(_WEIGHT)}
    return {keys[key]: keys[other] for key, other in bias.items() if other in keys}


@cache
def models_apart(base: Family, layout: str) -> Family:
    """Restrict *base* to *layout* and :data:`APART`."""
    rows = tuple(
        replace(
            tensor,
            leaves={layout: leaf, APART: _named(tensor, leaf.alone)},
        )
        for tensor in base.tensors.values()
        if (leaf := tensor.leaves.get(layout)) is not None
    )
    return replace(
        base,
        layouts=(layout, APART),
        tables=(),
        like={},
        rows=rows,
        drops=tuple(drop for drop in base.drops if drop.layout == layout),
        shifts=tuple(shift for shift in base.shifts if shift.layout == layout),
        ties=(),
        companions=(),
    )


def _rows(tensor: Tensor, namings: Mapping[str, _Naming]) -> Iterator[Tensor]:
    """Yield the possible adapter tensors of a tensor of the model."""
    held = {
        n: tensor.leaves[one.layout] for n, one in namings.items() if one.layout in tensor.leaves
    }
    linear = {name: leaf for name, leaf in held.items() if _linear(leaf)}
    roles: tuple[str, ...] = ROLES
    if tensor.name == EMBEDDING:  # only PEFT trains these factors, without magnitudes
        linear, roles = {n: leaf for n, leaf in linear.items() if n in PEFT}, ROLES[:2]
    if linear:
        rows = sorted(next(iter(linear.values())).dims[0])
        alike = {n: leaf for n, leaf in linear.items() if sorted(leaf.dims[0]) == rows}
        for number, role in enumerate(roles):
            found = {
                name: _leaf(part, role, key)
                for name, leaf in alike.items()
                if number < len(namings[name].suffixes)
                for part, key in [_factor(tensor, name, leaf, number)]
            }
            if tensor.name == EMBEDDING:
                found = {name: _embedded(leaf) for name, leaf in found.items()}
            if found:
                yield _row(tensor, role, found)
    for role, infix in COPIES.items():
        copies = {
            name: replace(leaf, key=_copied(leaf.key.text, infix))
            for name, leaf in held.items()
            if name in PEFT and "." in leaf.key.text  # PEFT copies modules only
        }
        if copies:
            yield _row(tensor, role, copies)


def _linear(leaf: Leaf) -> bool:
    """Return whether *leaf* is a linear layer, or some rows of a concatenated one."""
    named = leaf.key.text.endswith(_WEIGHT)
    return named and len(leaf.dims) == 2 and not (leaf.part is not None and leaf.along)


def linear_keys(family: Family, layout: str, keys: Collection[str]) -> list[str]:
    """List the weights of linear layers among *keys*, without embeddings and routers.

    transformers 5 has a separate module for routers, to which PEFT adds no factors.
    """
    groups = match(family, family.layout(layout), keys).groups
    linear = {
        key
        for group in groups
        if all(_linear(leaf) and (EXPERTS,) not in leaf.dims for _, leaf in group.stored.parts)
        for key in group.keys
        if not _is_looked_up(key)
    }
    return [key for key in keys if key in linear]


def _is_looked_up(key: str) -> bool:
    """Return whether *key* is an embedding of tokens or of distances."""
    module = key.rpartition(".")[0].rpartition(".")[2]
    distances = key.endswith(".relative_attention_bias.weight")
    return "embed" in module or distances or key == "shared.weight"


def _factor(tensor: Tensor, name: str, leaf: Leaf, number: int) -> tuple[Leaf, Template]:
    """Return the leaf of the model that a factor changes, and the factor's key."""
    naming = _NAMINGS[name]
    part = naming.parts.get(tensor.name.partition(".")[0], "") if leaf.part is not None else ""
    prefix = PREFIX if name in PEFT else ""
    module = prefix + leaf.key.text.removesuffix(_WEIGHT) + naming.module
    return leaf.alone if part else leaf, Template.parse(module + part + naming.suffixes[number])


def as_linear(name: str) -> str:
    """Convert the name of an embedding's factor to that of a linear layer's."""
    for suffix, linear in zip(_EMBEDDED, _PEFT, strict=False):
        if name.endswith(suffix):
            return name.removesuffix(suffix) + linear
    return name


def _plain(leaf: Leaf) -> Leaf:
    """Convert a leaf of an embedding's factor to that of a linear layer's. Others stay."""
    name = as_linear(leaf.key.text)
    if name == leaf.key.text:
        return leaf
    return replace(leaf, key=Template.parse(name), dims=leaf.dims[::-1])


def _embedded(leaf: Leaf) -> Leaf:
    """Convert a leaf of a factor to PEFT's transposed form for embeddings."""
    for suffix, linear in zip(_EMBEDDED, _PEFT, strict=False):
        if leaf.key.text.endswith(linear):
            key = Template.parse(leaf.key.text.removesuffix(linear) + suffix)
            return replace(leaf, key=key, dims=leaf.dims[::-1])
    return leaf


def _copied(key: str, infix: str) -> Template:
    module, dot, last = key.rpartition(".")
    return Template.parse(PREFIX + module + infix + dot + last)


def _leaf(leaf: Leaf, role: str, key: Template) -> Leaf:
    """Build the leaf of one factor, or of a copy, of a tensor that is stored as *leaf*."""
    if role in COPIES:
        return replace(leaf, key=key)
    rows: Dims = (leaf.dims[0],)
    if role == "lora_a":
        return Leaf(key, ((RANK,), leaf.dims[1]), leaf.spread)
    if role == "lora_b":
        rows = (leaf.dims[0], (RANK,))
    return Leaf(key, rows, leaf.spread, leaf.part, within=leaf.within)


def _row(tensor: Tensor, role: str, leaves: Mapping[str, Leaf]) -> Tensor:
    head, dot, rest = tensor.name.partition(".")
    return Tensor(
        name=f"{head}-{role}{dot}{rest}",
        block=tensor.block,
        indices=tensor.indices,
        split=None,
        optional=True,
        variant=None,
        leaves=leaves,
        scales=tensor.scales,
        together=tensor.together,
    )


def _named(tensor: Tensor, leaf: Leaf) -> Leaf:
    spread = [f"{{{axis}}}" for axis in leaf.spread]
    return replace(leaf, key=Template.parse(".".join([tensor.name, *spread])))
