"""``config_groups`` of compressed-tensors: quantization settings for each layer.

A layer belongs to the group with a target that equals its name, then one that matches it, then one
that is a class such as ``Linear``. Tensors decide which layers are quantized; it is an error if
``ignore`` lists a quantized layer.

Sources: ``quantization/quant_config.py``, ``quantization/quant_args.py`` and ``utils/match.py`` of
compressed-tensors 0.20.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from ckptctl.errors import MappingError
from ckptctl.numerics.quantization.scheme import Group
from ckptctl.numerics.quantization.statement import Json, QuantizationStatement
from ckptctl.units import pluralize

NAME = "config_groups"
MIXED = "mixed-precision"
LONGEST = 300
"""Longest allowed pattern, in characters."""
REPEATED = re.compile(r"\)[*+{]")
"""Nested repetition, whose matching time is not bounded by the length of names."""
MOST = 5
"""Most repetitions in a pattern: each multiplies the matching time by the length of names."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """Quantization settings of the weights in a group.

    Attributes:
        bits: Bits of an element.
        kind: ``int`` or ``float``.
        strategy: The elements that share a scale: a ``tensor``, a ``channel``, a ``group`` of
            columns or a ``block`` of rows and columns; ``tensor_group`` is a group plus a global
            scale.
        group: Columns of a group, or 0 without groups.
        block: Rows and columns of a block.
        symmetric: Whether there are no zero points.
        order: ``actorder``: the order in which columns were quantized, or empty if not set.
    """

    bits: int
    kind: str
    strategy: str
    group: int
    block: tuple[int, int]
    symmetric: bool
    order: str


def arguments(group: Group, formats: Mapping[str, tuple[str, ...]]) -> Arguments:
    """Return the quantization settings of a layer's weights.

    Args:
        group: The layer's tensors.
        formats: Dtypes of the weights in each supported format.

    Raises:
        MappingError: The config has no settings for it, or contradicts itself or the tensors.
    """
    if isinstance(known := group.derived.get(NAME), Arguments):
        return known
    said = group.statement
    found = _chosen(group)
    form = found.get("format") or said.content.get("format")
    if form not in (None, MIXED) and group.lead.dtype not in formats.get(str(form), ()):
        why = f"`{group.lead.name}` is {group.lead.dtype}"
        raise MappingError(
            f"`format` {form!r} does not match the tensors", where=said.where, why=why
        )
    weights = QuantizationStatement(said.method, _mapping(found.get("weights")), said.where)
    size = weights.number("group_size", -1) or 0
    default = "tensor" if not size else "channel" if size < 0 else "group"
    match weights.content.get("block_structure"):
        case [int(down), int(across)] if down > 0 and across > 0:
            block = (down, across)
        case _:
            block = (0, 0)
    symmetric = weights.flag("symmetric")
    order = weights.content.get("actorder", "")
    group.derived[NAME] = result = Arguments(
        weights.number("num_bits") or 8,
        str(weights.content.get("type") or "int"),
        str(weights.content.get("strategy") or default),
        max(size, 0),
        block,
        symmetric is not False,
        "group" if order is True else str(order),
    )
    return result


def _mapping(value: object) -> Json:
    return value if isinstance(value, Mapping) else {}


def _chosen(group: Group) -> Json:
    """Return the group of ``config_groups`` that a layer belongs to."""
    said = group.statement
    _require_plain(said)
    groups = [_mapping(one) for one in _mapping(said.content.get(NAME)).values()]
    groups = [one for one in groups if isinstance(one.get("weights"), Mapping)]
    if not groups:
        raise group.unstated(NAME, "a group with `weights` is required")
    if any(_matches(group.module, one, said) for one in _texts(said.content.get("ignore"))):
        raise MappingError(
            f"`{group.lead.name}` is quantized, but `ignore` lists its layer",
            where=said.where,
        )
    if len(groups) == 1:
        return groups[0]
    named = [one for one in groups if group.module in _texts(one.get("targets"))]
    matching = [
        one
        for one in groups
        if any(_matches(group.module, target, said) for target in _texts(one.get("targets")))
    ]
    classes = [  # whose targets are classes, such as ``Linear``, instead of layers
        one
        for one in groups
        if any(t.isidentifier() and t[0].isupper() for t in _texts(one.get("targets")))
    ]
    found = named or matching or classes
    if not found or any(one["weights"] != found[0]["weights"] for one in found):
        raise MappingError(
            f"{pluralize(len(found), 'group targets', 'groups target')} `{group.module}`",
            why="`config_groups` must assign exactly one group to each layer",
            where=said.where,
        )
    return found[0]


def _require_plain(said: QuantizationStatement) -> None:
    """Raise if weights are sparse or transformed in addition to being quantized."""
    sparse = _mapping(said.content.get("sparsity_config")).get("format", "dense")
    if sparse != "dense":
        raise MappingError(
            f"`sparsity_config` format {sparse!r} is not supported", where=said.where
        )
    if _mapping(said.content.get("transform_config")).get("config_groups"):
        why = "it rotates weights and, at run time, activations"
        raise MappingError("`transform_config` is not supported", where=said.where, why=why)


def _texts(value: object) -> list[str]:
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


def _matches(module: str, target: str, said: QuantizationStatement) -> bool:
    if not target.startswith("re:"):
        return target == module
    return _pattern(target.removeprefix("re:"), said.where).match(module) is not None


@cache
def _pattern(text: str, where: str) -> re.Pattern[str]:
    try:
        repeating = sum(map(text.count, "*+{"))
        if len(text) <= LONGEST and repeating <= MOST and not REPEATED.search(text):
            return re.compile(text)
    except re.error:
        pass
    raise MappingError(f"the pattern `{text[:LONGEST]}` is not supported", where=where)
