"""Validate values of facts by kind, and convert them from and to Megatron-Core."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from ckptctl.errors import MappingError, format_option
from ckptctl.planner.config_facts import parse_size
from ckptctl.planner.families.facts import NEEDED, Fact
from ckptctl.units import pluralize

Values: TypeAlias = Mapping[str, object]

GREEDY_TOPK, GROUP_LIMITED_TOPK = "greedy", "group_limited_greedy"
"""Values of DeepSeek-V2's ``topk_method``."""


def require_number(value: object, name: str) -> float:
    """Return *value* as a float, or raise if it is not a positive number."""
    ok = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not ok or not 0 < float(str(value)) < math.inf:
        raise MappingError(f"`{name}` is not a positive number", where=name, why=f"it is {value!r}")
    return float(str(value))


def require_flag(value: object, name: str) -> bool:
    """Return *value*, or raise if it is not a boolean."""
    if isinstance(value, bool):
        return value
    raise MappingError(f"`{name}` must be true or false", where=name, why=f"it is {value!r}")


Check: TypeAlias = Callable[[Any, str], object]
Converter: TypeAlias = Callable[[Any, str, Values], object]
"""Function that converts a value, given its name and the other values of the same file."""


@dataclass(frozen=True, slots=True)
class FactKind:
    """How to validate values of a fact, and convert them from and to Megatron-Core's fields.

    Attributes:
        validate: Validates a value of config.json, params.json or GGUF.
        from_megatron: Converts Megatron-Core's field to the value in config.json, or None to only
            validate it.
        to_megatron: Converts the value in config.json to the field, or None to only validate it.
        neutral: Value that applies in versions of Megatron-Core without such a field.
        allows_null: Whether null is a valid value.
    """

    validate: Check
    from_megatron: Converter | None = None
    to_megatron: Converter | None = None
    neutral: object = NEEDED
    allows_null: bool = False


def check_value(fact: Fact, value: object, name: str) -> object:
    """Validate and return the value of *fact* that a file states under *name*.

    None is returned unchanged.
    """
    return None if value is None else FACT_KINDS[fact.kind].validate(value, name)


def read_megatron_value(fact: Fact, fields: Values) -> object:
    """Convert the value of *fact* from Megatron-Core's *fields* to config.json."""
    value, read = fields[fact.megatron], FACT_KINDS[fact.kind].from_megatron
    return read(value, fact.megatron, fields) if read else check_value(fact, value, fact.megatron)


def write_megatron_value(fact: Fact, values: Values) -> object:
    """Convert the value of *fact* from config.json to Megatron-Core's field.

    Args:
        fact: The fact.
        values: Values in config.json of *fact* and of the facts that it depends on, by name.
    """
    value, write = values[fact.config], FACT_KINDS[fact.kind].to_megatron
    return write(value, fact.config, values) if write else check_value(fact, value, fact.config)


def _parse_positive_or_none(value: object, name: str, _: Values) -> int | None:
    """Return a count, or None for 0."""
    return None if value == 0 and not isinstance(value, bool) else parse_size(value, name)


def _read_window(value: object, name: str, _: Values) -> int | None:
    """Convert a ``(left, right)`` window to the number of keys that a token attends to.

    Megatron-Core counts the keys before the token, and transformers' ``sliding_window`` also the
    token itself. A negative size means no bound; to the right, the causal mask is the bound.
    """
    if value is None:
        return None
    match value:
        case [int(left), 0 | -1] if not isinstance(left, bool) and left >= -1:
            return None if left < 0 else left + 1
    raise MappingError(
        f"`{name}` is not a causal window",
        where=name,
        why=f"it is {value!r}; expected (left, 0)"[:200],
    )


def _read_dense_layer_count(value: object, name: str, fields: Values) -> int:
    """Convert a list such as ``[0, 0, 1, 1]`` to the number of leading dense layers."""
    if value == 1 and not isinstance(value, bool):
        return 0
    if isinstance(value, (list, tuple)):
        first_moe_layer = next(
            (layer for layer, is_moe in enumerate(value) if is_moe != 0), len(value)
        )
        if all(is_moe == 1 for is_moe in value[first_moe_layer:]) and fields.get(
            "num_layers"
        ) == len(value):
            return first_moe_layer
    raise MappingError(
        f"`{name}` does not put all layers without experts before those with experts",
        where=name,
        why=f"it is {value!r}"[:200],
        hint=assets_hint(),
    )


def _write_moe_layer_pattern(value: object, name: str, facts: Values) -> list[int]:
    """Convert the number of leading dense layers to a list with 0 (dense) or 1 for each layer."""
    layers = parse_size(facts["num_hidden_layers"], "num_hidden_layers") or 0
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= layers:
        raise MappingError(f"`{name}` is not a number of layers", why=f"it is {value!r}")
    return [0] * value + [1] * (layers - value)


def _read_topk_method(value: object, name: str, fields: Values) -> str:
    """Return the ``topk_method``, i.e. whether experts are selected from all or the best groups.

    Megatron-Core ranks a group by several of its experts, transformers by the best one.
    """
    if (parse_size(value, name) or 1) == 1:
        return GREEDY_TOPK
    expert_count = parse_size(fields.get("moe_router_topk"), "moe_router_topk") or 0
    groups = parse_size(fields.get("moe_router_group_topk"), "moe_router_group_topk") or 1
    experts_per_group = expert_count // groups
    return (
        GROUP_LIMITED_TOPK
        if experts_per_group == 1
        else f"groups ranked by their best {pluralize(experts_per_group, 'expert')}"
    )


def _write_expert_group_count(value: object, name: str, facts: Values) -> int | None:
    """Return the number of expert groups, or None if all experts are in one group.

    Raises an error if Megatron-Core would select other experts than transformers.
    """
    names = ("n_group", "num_experts_per_tok", "topk_group")
    group_count, expert_count, limit = (parse_size(facts[field], field) or 1 for field in names)
    if group_count > 1 and (value == GREEDY_TOPK or expert_count // limit != 1):
        why = "Megatron-Core selects experts from groups differently"
        raise inexpressible_error("Megatron-Core's configuration", name, value, why)
    return None if group_count == 1 else group_count


def _read_shared_expert_count(value: object, name: str, fields: Values) -> int:
    """Return the size of the shared expert in units of one routed expert's size."""
    if value in (None, 0):
        return 0
    size = parse_size(value, name)
    expert_size = parse_size(fields.get("moe_ffn_hidden_size"), "moe_ffn_hidden_size")
    if size is None or expert_size is None or size % expert_size:
        raise MappingError(
            f"`{name}` is not a multiple of `moe_ffn_hidden_size`",
            where=name,
            why=f"{value!r} and {expert_size!r}",
        )
    return size // expert_size


def _write_shared_expert_size(value: object, name: str, facts: Values) -> int | None:
    expert_size = parse_size(facts["moe_intermediate_size"], "moe_intermediate_size") or 0
    experts = _parse_positive_or_none(value, name, facts)
    return None if experts is None else experts * expert_size


def _invert_inverse_root(value: object, name: str, _: Values) -> float | None:
    """Return the number whose inverse square root is *value*, rounded if close to an integer."""
    if value is None:
        return None
    exact = require_number(value, name) ** -2
    return round(exact) if math.isclose(exact, round(exact), rel_tol=1e-6) else exact


def _read_interval(value: object, name: str, _: Values) -> int | None:
    """Convert a list such as ``[1, 1, 1, 0]`` to the interval of layers with full attention (0).

    Megatron-Core also accepts the interval itself.
    """
    if not isinstance(value, (list, tuple)):
        return parse_size(value, name)
    interval = value.index(0) + 1 if 0 in value else 0
    if interval and list(value) == [int(n % interval > 0) for n in range(1, len(value) + 1)]:
        return interval
    raise MappingError(
        f"`{name}` does not have full attention in layers at a fixed interval",
        where=name,
        why=f"it is {value!r}"[:200],
        hint=assets_hint(),
    )


def list_indexer_types(layers: int, period: int, start: int) -> list[str]:
    """List which layers have an indexer, for every *period*-th layer from layer *start* on.

    Layers are counted from 1, and all layers before *start* have one. Other layers reuse the tokens
    of the layer before. transformers and Megatron-Core (``is_dsa_skip_topk_layer``) agree.
    """
    steps = (max(layer - max(start, 1), 0) for layer in range(1, layers + 1))
    return ["shared" if step % period else "full" for step in steps]


def _read_indexer_types(_value: object, name: str, fields: Values) -> list[str] | None:
    counts = [fields.get("num_layers"), fields.get("dsa_indexer_topk_freq", 1)]
    layers, period = (parse_size(count, name) or 1 for count in counts)
    start = fields.get("dsa_indexer_skip_topk_offset") or 0
    return list_indexer_types(layers, period, parse_size(start, name) or 1 if start else 0)


def _find_indexer_period(value: object, name: str) -> tuple[int, int]:
    """Return the period and start that :func:`list_indexer_types` turns into *value*."""
    if value is None:
        return 1, 0
    types = value if isinstance(value, list) else []
    for period in range(1, len(types) + 1):
        for start in range(len(types) if period > 1 else 1):
            if types == list_indexer_types(len(types), period, start):
                return period, start
    why = "layers without an indexer do not repeat in a period"
    raise inexpressible_error("Megatron-Core's configuration", name, value, why)


def _read_rotated_size(value: object, name: str, fields: Values) -> int:
    """Convert the part of each head that is rotated to a number of dimensions."""
    size = parse_size(fields.get("kv_channels"), "kv_channels")
    rotated = require_number(value, name) * (size or 0)
    if not rotated or not math.isclose(rotated, round(rotated)):
        raise MappingError(
            f"`{name}` does not rotate a whole number of dimensions",
            where=name,
            why=f"{value!r} of {size!r}",
        )
    return round(rotated)


def _write_rotated_part(value: object, name: str, facts: Values) -> float | None:
    rotated, size = parse_size(value, name), parse_size(facts["head_dim"], "head_dim")
    return None if rotated is None or size is None else rotated / size


LAYER_LETTERS: Mapping[str, str] = {
    "linear_attention": "M",
    "mamba": "M",
    "full_attention": "*",
    "attention": "*",
    "moe": "E",
    "mlp": "-",
}
"""Letter of each layer type in Megatron-Core's pattern of a hybrid model (``hybrid_model.py``)."""
MTP_SEPARATOR, STAGE_SEPARATOR = "/", "|"


def read_layer_letters(value: object, name: str, _: Values) -> list[str] | None:
    """Convert a pattern such as ``M*E|M-/*E`` to the types of all layers except MTP layers."""
    if value is None:
        return None
    types = {letter: layer_type for layer_type, letter in [*LAYER_LETTERS.items()][::-1]}
    text = value if isinstance(value, str) else "?"
    letters = text.partition(MTP_SEPARATOR)[0].replace(STAGE_SEPARATOR, "")
    if unknown := sorted(set(letters) - types.keys()):
        raise MappingError(
            f"`{name}` has unknown layer types",
            where=name,
            why=f"{unknown} in {value!r}"[:200],
            hint=assets_hint(),
        )
    return [types[letter] for letter in letters]


def _write_layer_letters(value: object, name: str, _: Values) -> str:
    types = value if isinstance(value, list) else []
    if not types or not all(isinstance(kind, str) and kind in LAYER_LETTERS for kind in types):
        why = f"its layer types are {', '.join(LAYER_LETTERS)}"
        raise inexpressible_error("Megatron-Core's configuration", name, value, why)
    return "".join(LAYER_LETTERS[kind] for kind in types)


def _write_mtp_letters(value: object, name: str, facts: Values) -> str | None:
    return _write_layer_letters(value, name, facts) if facts["num_nextn_predict_layers"] else None


def _require_sections(value: object, name: str) -> list[int]:
    """Return the numbers of rotary pairs for time, height and width."""
    sizes = list(value) if isinstance(value, (list, tuple)) else []
    if len(sizes) == 3 and all(type(size) is int and size >= 0 for size in sizes):
        return sizes
    raise MappingError(f"`{name}` must be three sizes", where=name, why=f"it is {value!r}"[:200])


def assets_hint() -> str:
    """Return the hint to pass the trained model's config.json."""
    return f"pass {format_option('--assets DIR')} with the trained model's config.json"


def inexpressible_error(
    file: str, name: str, value: object, why: str, hint: str | None = None
) -> MappingError:
    """Build the error for a fact of config.json that *file* cannot express."""
    message = f"{file} cannot express `{name}`: {value!r}"
    return MappingError(message, where="config.json", why=why, hint=hint)


FACT_KINDS: Mapping[str, FactKind] = {
    "count": FactKind(parse_size),
    "number": FactKind(require_number),
    "flag": FactKind(require_flag),
    # A count or null.
    "optional": FactKind(parse_size, to_megatron=_parse_positive_or_none, allows_null=True),
    # A count or 0, which Megatron-Core states as null.
    "tally": FactKind(
        parse_size,
        lambda value, name, others: _parse_positive_or_none(value, name, others) or 0,
        _parse_positive_or_none,
        neutral=0,
    ),
    # A number for which null means 1.
    "factor": FactKind(
        require_number,
        lambda value, name, _: 1.0 if value is None else require_number(value, name),
        lambda value, name, _: None if value in (None, 1.0) else require_number(value, name),
        neutral=1.0,
    ),
    # A flag that Megatron-Core states inverted.
    "not": FactKind(
        require_flag,
        lambda value, name, _: None if value is None else not require_flag(value, name),
        lambda value, name, _: not require_flag(value, name),
    ),
    # The number of keys that a token attends to, including itself, or null.
    "window": FactKind(
        lambda value, name: parse_size(
            int(value) if isinstance(value, str) and value.isdecimal() else value, name
        ),
        _read_window,
        lambda value, name, _: None if (size := parse_size(value, name)) is None else [size - 1, 0],
        neutral=None,
        allows_null=True,
    ),
    # A count for which null means 1.
    "groups": FactKind(
        parse_size,
        lambda value, name, _: parse_size(value, name) or 1,
        lambda value, name, _: None if value == 1 else parse_size(value, name),
        neutral=1,
    ),
    # How experts are selected, which Megatron-Core states as the number of groups.
    "method": FactKind(parse_size, _read_topk_method, _write_expert_group_count),
    # The number of dense layers before those with experts.
    "dense": FactKind(parse_size, _read_dense_layer_count, _write_moe_layer_pattern, neutral=0),
    # The size of the shared expert in units of one routed expert's size.
    "shared": FactKind(parse_size, _read_shared_expert_count, _write_shared_expert_size, neutral=0),
    # Which layers have an indexer, which Megatron-Core states as two numbers.
    "index period": FactKind(
        parse_size,
        _read_indexer_types,
        lambda value, name, _: _find_indexer_period(value, name)[0],
        neutral=None,
    ),
    "index start": FactKind(
        parse_size,
        _read_indexer_types,
        lambda value, name, _: _find_indexer_period(value, name)[1],
        neutral=None,
    ),
    # The interval of layers with full attention among layers with linear attention.
    "interval": FactKind(parse_size, _read_interval),
    # The numbers of rotary pairs for time, height and width.
    "sections": FactKind(_require_sections),
    # The types of layers, which Megatron-Core states as letters.
    "layer letters": FactKind(parse_size, read_layer_letters, _write_layer_letters),
    "MTP letters": FactKind(parse_size, read_layer_letters, _write_mtp_letters, neutral=None),
    # The number of rotated dimensions of a head, which Megatron-Core states as a part of all.
    "rotated": FactKind(parse_size, _read_rotated_size, _write_rotated_part),
    # A number that Megatron-Core states as its inverse square root.
    "root": FactKind(
        require_number,
        _invert_inverse_root,
        lambda value, name, _: 1 / math.sqrt(require_number(value, name)),
    ),
}
