"""``config_groups`` of compressed-tensors: quantization settings for each layer.

A layer belongs to the group with a target that equals its name, otherwise to the group with a
pattern that matches its name, otherwise to the group that targets a class such as ``Linear``.
Tensors decide which layers are quantized; it is an error if ``ignore`` lists a quantized layer.

Sources: ``quantization/quant_config.py``, ``quantization/quant_args.py`` and ``utils/match.py`` of
compressed-tensors 0.20.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from ckptctl.errors import MappingError
from ckptctl.numerics.quantization.scheme import TensorGroup
from ckptctl.numerics.quantization.statement import Json, QuantizationConfig
from ckptctl.units import pluralize

CONFIG_GROUPS = "config_groups"
MIXED_PRECISION = "mixed-precision"
MAX_PATTERN_LENGTH = 300
"""Maximum length of a pattern, in characters."""
NESTED_REPETITION = re.compile(r"\)[*+{]")
"""Regex that finds nested repetitions, whose matching time can be exponential."""
MAX_REPETITIONS = 5
"""Largest number of repetitions in a pattern.

Each repetition can multiply the matching time by the length of a name.
"""


@dataclass(frozen=True, slots=True)
class WeightArguments:
    """Quantization settings of the weights in one of the ``config_groups``.

    Attributes:
        bits: Bits of an element.
        number_type: ``int`` or ``float``.
        strategy: Which elements share a scale: ``tensor``, ``channel``, ``group`` (of columns),
            ``block`` (of rows and columns), or ``tensor_group`` (a group, plus a global scale).
        group: Number of columns in a group, or 0 if the strategy has no groups.
        block: Numbers of rows and columns in a block.
        symmetric: Whether quantization is symmetric, i.e. needs no zero points.
        order: Value of ``actorder`` (the order in which columns were quantized), or empty if it is
            not set.
    """

    bits: int
    number_type: str
    strategy: str
    group: int
    block: tuple[int, int]
    symmetric: bool
    order: str


def parse_weight_arguments(
    group: TensorGroup, formats: Mapping[str, tuple[str, ...]]
) -> WeightArguments:
    """Parse the quantization settings of a layer's weights from ``config_groups``.

    Args:
        group: The tensors of the layer's weight, with the quantization config.
        formats: Possible dtypes of stored weights, by supported compression format.

    Raises:
        MappingError: The config has no settings for the layer, or contradicts itself or the
            tensors.
    """
    if isinstance(cached := group.cache.get(CONFIG_GROUPS), WeightArguments):
        return cached
    quant_config = group.quant_config
    config_group = _find_config_group(group)
    format_name = config_group.get("format") or quant_config.content.get("format")
    if format_name not in (None, MIXED_PRECISION) and group.lead.dtype not in formats.get(
        str(format_name), ()
    ):
        why = f"`{group.lead.name}` is {group.lead.dtype}"
        raise MappingError(
            f"`format` {format_name!r} does not match the tensors",
            where=quant_config.where,
            why=why,
        )
    weights = QuantizationConfig(
        quant_config.method, _as_mapping(config_group.get("weights")), quant_config.where
    )
    group_size = weights.read_number("group_size", -1) or 0
    default = "tensor" if not group_size else "channel" if group_size < 0 else "group"
    match weights.content.get("block_structure"):
        case [int(block_rows), int(block_columns)] if block_rows > 0 and block_columns > 0:
            block = (block_rows, block_columns)
        case _:
            block = (0, 0)
    symmetric = weights.read_flag("symmetric")
    order = weights.content.get("actorder", "")
    group.cache[CONFIG_GROUPS] = result = WeightArguments(
        weights.read_number("num_bits") or 8,
        str(weights.content.get("type") or "int"),
        str(weights.content.get("strategy") or default),
        max(group_size, 0),
        block,
        symmetric is not False,
        "group" if order is True else str(order),
    )
    return result


def _as_mapping(value: object) -> Json:
    return value if isinstance(value, Mapping) else {}


def _find_config_group(group: TensorGroup) -> Json:
    """Find the entry of ``config_groups`` that applies to the layer of *group*."""
    quant_config = group.quant_config
    _require_only_quantized(quant_config)
    groups = [
        _as_mapping(item) for item in _as_mapping(quant_config.content.get(CONFIG_GROUPS)).values()
    ]
    groups = [item for item in groups if isinstance(item.get("weights"), Mapping)]
    if not groups:
        raise group.missing_setting_error(CONFIG_GROUPS, "a group with `weights` is required")
    if any(
        _matches_target(group.module, item, quant_config)
        for item in _list_strings(quant_config.content.get("ignore"))
    ):
        raise MappingError(
            f"`{group.lead.name}` is quantized, but `ignore` lists its layer",
            where=quant_config.where,
        )
    if len(groups) == 1:
        return groups[0]
    by_name = [item for item in groups if group.module in _list_strings(item.get("targets"))]
    by_pattern = [
        item
        for item in groups
        if any(
            _matches_target(group.module, target, quant_config)
            for target in _list_strings(item.get("targets"))
        )
    ]
    by_class = [  # groups that target classes such as ``Linear`` instead of layers
        item
        for item in groups
        if any(
            target_name.isidentifier() and target_name[0].isupper()
            for target_name in _list_strings(item.get("targets"))
        )
    ]
    candidates = by_name or by_pattern or by_class
    if not candidates or any(item["weights"] != candidates[0]["weights"] for item in candidates):
        raise MappingError(
            f"{pluralize(len(candidates), 'group targets', 'groups target')} `{group.module}`",
            why="`config_groups` must assign exactly one group to each layer",
            where=quant_config.where,
        )
    return candidates[0]


def _require_only_quantized(quant_config: QuantizationConfig) -> None:
    """Raise if the config also states sparsity or weight transforms."""
    sparse_format = _as_mapping(quant_config.content.get("sparsity_config")).get("format", "dense")
    if sparse_format != "dense":
        raise MappingError(
            f"`sparsity_config` format {sparse_format!r} is not supported", where=quant_config.where
        )
    if _as_mapping(quant_config.content.get("transform_config")).get("config_groups"):
        why = "it rotates weights and, at run time, activations"
        raise MappingError("`transform_config` is not supported", where=quant_config.where, why=why)


def _list_strings(value: object) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _matches_target(module: str, target: str, quant_config: QuantizationConfig) -> bool:
    if not target.startswith("re:"):
        return target == module
    return (
        _compile_pattern(target.removeprefix("re:"), quant_config.where).match(module) is not None
    )


@cache
def _compile_pattern(text: str, where: str) -> re.Pattern[str]:
    try:
        repeating = sum(map(text.count, "*+{"))
        if (
            len(text) <= MAX_PATTERN_LENGTH
            and repeating <= MAX_REPETITIONS
            and not NESTED_REPETITION.search(text)
        ):
            return re.compile(text)
    except re.error:
        pass
    raise MappingError(f"the pattern `{text[:MAX_PATTERN_LENGTH]}` is not supported", where=where)
