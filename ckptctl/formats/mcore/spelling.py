"""Canonical names of Megatron-Core's tensors, which have several naming conventions.

============= ================================= =============================== ===================
tensor        canonical name                    other name                      shape of the other
============= ================================= =============================== ===================
a layer       ``decoder.layers.3.x`` ``[...]``  ``decoder.layers.x`` ``[L, …]`` stack of all layers
gate and up   ``linear_fc1.weight`` ``[2f, d]`` ``weight_w``, ``weight_v``      one half each
experts       ``experts.experts.x`` ``[E, …]``  ``experts.experts.5.x``         one row each
experts       ``experts.experts.x`` ``[E, …]``  ``experts.x5``, Megatron-FSDP   one row each
experts       ``experts.experts.x`` ``[E, …]``  ``experts.local_experts.5.x``   one row each
============= ================================= =============================== ===================

If layers have two kinds of attention with different shapes, Megatron-Bridge calls the attention
``self_attention_sliding`` or ``self_attention_global``, and stacks the layers of each kind. The
numbers of these layers follow from the recorded configuration
(``Gemma4DenseSelfAttention.sharded_state_dict``).

The bytes are the same with different boxes, which :mod:`ckptctl.formats.mcore.joining` converts.
The same applies to the optimizer state, whose names are ``optimizer.state.exp_avg.`` and a
parameter name.

Source: ``megatron/core/transformer/`` (``transformer_block.py``, ``mlp.py``, ``moe/experts.py``)
and ``optimizer/optimizer.py`` (``chained_0.``), ``fsdp_dtensor_checkpoint.py`` (Megatron-FSDP);
NeMo's names start with ``module.``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from ckptctl.catalog import TensorEntry
from ckptctl.errors import CoverageError, UnsupportedError, quote_names
from ckptctl.formats.shared.findings import FaultCollector
from ckptctl.planner.mapping.adapters import has_adapter_factors
from ckptctl.units import pluralize

_PREFIX = re.compile(r"(?:(?:chained_\d+\.)?(optimizer\.state\.\w+\.))?(?:module\.)*")
_LAYER = re.compile(r"(\d{1,6})\.(.+)", re.DOTALL)
_EXPERT = re.compile(r"(.*\.experts)\.(?:experts|local_experts)\.(\d{1,6})\.(.+)", re.DOTALL)
_GROUPED = re.compile(r"(.*\.mlp\.experts)\.(linear_fc[12]\.(?:weight|bias))(\d{1,6})", re.DOTALL)
_HALF = re.compile(r"(.*\.linear_fc1\.(?:weight|bias)\d*)_([wv])", re.DOTALL)
_FSDP_PART = re.compile(r"\d+|\d*_w")
_PART_STATE = re.compile(r"(.*\.linear_fc[12]\.(?:weight|bias)(?:\d+|\d*_[wv]))(\.\w+)", re.DOTALL)
_STACK = re.compile(r"(.*?\.(?:layers|deepstack_merger_list))\.(.*)", re.DOTALL)
"""Megatron-Bridge stores the mergers of Qwen 3 VL as it stores layers."""
_ATTENTION_KIND = re.compile(r"self_attention_(sliding|global)\.")
HALF_SUFFIXES = "wv"
DECODER = "decoder.layers"
MAX_LAYERS = MAX_EXPERTS = 1 << 14
"""Maximum number of layers and experts in tensor names and arguments."""
_UNEVEN_ARGUMENTS = ("heterogeneous_layers_config_path", "heterogeneous_block_specs")
"""Training arguments of models in which some layers may have no tensors."""


class TensorNameParts(NamedTuple):
    """Parts of a tensor name.

    Attributes:
        prefix: Canonical name up to the layer number, or the full name.
        suffix: Canonical name after the layer number, or an empty string.
        stack: Container of the layers, such as ``decoder.layers``. Empty outside of layers.
        layer: Layer number, or None if all layers are stacked.
        expert: Expert number, or None if the tensor has all experts or is not an expert.
        half: 0 for gate, 1 for up, or None if the tensor has both or neither.
    """

    prefix: str
    suffix: str = ""
    stack: str = ""
    layer: int | None = None
    expert: int | None = None
    half: int | None = None

    @property
    def is_stacked(self) -> bool:
        """Whether the tensor contains all layers along dimension 0."""
        return bool(self.stack) and self.layer is None

    @property
    def attention_kind(self) -> str:
        """Kind of attention of all layers that this tensor stacks, or empty if it has no kind."""
        match = _ATTENTION_KIND.match(self.suffix) if self.is_stacked else None
        return match[1] if match else ""

    @property
    def tensor_kind(self) -> tuple[str, str]:
        """Stack of this tensor and its name within a layer, which are equal in all layers."""
        return self.stack, self.suffix if self.stack else self.prefix

    def format_canonical_name(self, layer: int | None = None) -> str:
        """Return the canonical name. *layer* is the layer number if this tensor is stacked."""
        number = self.layer if layer is None else layer
        return self.prefix + (f"{number}." if self.stack else "") + self.suffix


def parse_tensor_name(name: str) -> TensorNameParts:
    """Parse the name of a tensor, for all naming conventions of Megatron-Core.

    Names of the optimizer state that Megatron-FSDP saved for a part of a parameter end with the
    name of the state, such as ``.exp_avg``.
    """
    if state := _PART_STATE.fullmatch(name):
        parts = parse_tensor_name(state[1])
        if parts.suffix:
            return parts._replace(suffix=parts.suffix + state[2])
        return parts._replace(prefix=parts.prefix + state[2])
    prefix = _PREFIX.match(name)
    state_prefix = (prefix[1] or "") if prefix else ""
    rest = name[prefix.end() :] if prefix else name
    expert = half = None
    if part := _HALF.fullmatch(rest):
        rest, half = part[1], HALF_SUFFIXES.index(part[2])
    if single := _EXPERT.fullmatch(rest):
        rest, expert = f"{single[1]}.experts.{single[3]}", int(single[2])
    elif single := _GROUPED.fullmatch(rest):
        rest, expert = f"{single[1]}.experts.{single[2]}", int(single[3])
    stacked = _STACK.fullmatch(rest)
    if stacked is None:
        return TensorNameParts(state_prefix + rest, expert=expert, half=half)
    stack, layer_name = stacked[1], stacked[2]
    numbered = _LAYER.fullmatch(layer_name)
    layer, suffix = (int(numbered[1]), numbered[2]) if numbered else (None, layer_name)
    return TensorNameParts(f"{state_prefix}{stack}.", suffix, stack, layer, expert, half)


def is_fsdp_checkpoint(names: Iterable[str]) -> bool:
    """Return whether *names* contain a gate or up tensor that Megatron-FSDP saved separately."""
    parts = (name.rpartition(".linear_fc1.weight") for name in names)
    return any(".mlp." in f"{head}." and _FSDP_PART.fullmatch(tail) for head, _, tail in parts)


def find_parameter_name(name: str) -> str | None:
    """Return the canonical name of the parameter whose optimizer state is called *name*.

    Returns None unless the parameter is one that Megatron-FSDP saves as separate tensors.
    """
    match = _PART_STATE.fullmatch(name)
    return parse_tensor_name(match[1]).format_canonical_name() if match else None


def parse_tensor_names(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorNameParts]:
    """Parse the names of *tensors*, treating 0-d tensors as unstacked and as no part of another."""
    parsed = {name: parse_tensor_name(name) for name in tensors}
    unstacked = (
        name
        for name, parts in parsed.items()
        if not tensors[name].shape and (parts.is_stacked or _PART_STATE.fullmatch(name))
    )
    return {**parsed, **{name: TensorNameParts(name) for name in unstacked}}


def require_all_layers(
    tensors: Mapping[str, TensorEntry],
    parsed_names: Mapping[str, TensorNameParts],
    arguments: Mapping[str, object],
    faults: FaultCollector,
) -> None:
    """Raise or add a finding if layers are missing according to names, shapes or *arguments*."""
    by_stack: dict[str, dict[str, TensorNameParts]] = {}
    for name, parts in parsed_names.items():
        if parts.stack:
            by_stack.setdefault(parts.stack, {})[name] = parts
    for stack, members in by_stack.items():
        argument_count = _read_layer_count(arguments) if stack == DECODER else None
        stacked = {
            tensors[name].shape[0]: name
            for name, parts in members.items()
            if parts.is_stacked and not parts.attention_kind
        }
        layers = {parts.layer for parts in members.values() if parts.layer is not None}
        _require_layer_count(stack, stacked, layers, argument_count, str(faults.root))
        missing = (
            ()
            if stacked or has_adapter_factors(members)
            else sorted({*range(argument_count or max(layers) + 1)} - layers)
        )
        if missing and not any(map(arguments.get, _UNEVEN_ARGUMENTS)):
            message = pluralize(len(missing), f"layer of `{stack}` is", f"layers of `{stack}` are")
            error = CoverageError(
                f"{message} missing",
                where=str(faults.root),
                why=quote_names([str(layer) for layer in missing]),
                hint="check whether a pipeline stage is missing",
            )
            faults.add_or_raise(error)


def _require_layer_count(
    stack: str,
    stacked: Mapping[int, str],
    layers: Collection[int],
    argument_count: int | None,
    where: str,
) -> None:
    """Raise if names, shapes and arguments disagree on the number of layers, or it is too large."""
    evidence_by_count = {count: f"`{name}` has {count:,}" for count, name in stacked.items()}
    high = max(layers, default=-1) + 1
    if high and (high > (argument_count or high) or any(high > count for count in stacked)):
        evidence_by_count.setdefault(high, f"there is a layer {high - 1:,}")
    if argument_count is not None and evidence_by_count:
        evidence_by_count.setdefault(
            argument_count, f"the trainer's arguments specify {argument_count:,}"
        )
    if len(evidence_by_count) > 1:
        raise UnsupportedError(
            f"the number of layers of `{stack}` is ambiguous",
            where=where,
            why=quote_names(list(evidence_by_count.values()), quote=""),
            hint="remove the files of other saves",
        )
    if max(evidence_by_count, default=high) > MAX_LAYERS:
        why = quote_names(list(evidence_by_count.values()), quote="")
        message = f"`{stack}` has more than {MAX_LAYERS:,} layers"
        raise UnsupportedError(message, where=where, why=why)


def _read_layer_count(arguments: Mapping[str, object]) -> int | None:
    """Return the number of decoder layers in the training *arguments*, or None if not recorded."""
    values = (arguments.get(name) for name in ("decoder_num_layers", "num_layers"))
    return next((count for count in values if type(count) is int and 0 < count <= MAX_LAYERS), None)


def count_experts(
    parsed_names: Iterable[TensorNameParts], arguments: Mapping[str, object], where: str
) -> dict[tuple[str, str], int]:
    """Count the experts of each tensor kind whose experts are stored as separate tensors.

    Returns the counts by :attr:`TensorNameParts.tensor_kind`.
    """
    counts: dict[tuple[str, str], int] = {}
    values = (arguments.get(name) for name in ("num_experts", "num_moe_experts"))
    argument_count = next(
        (count for count in values if type(count) is int and count <= MAX_EXPERTS), 0
    )
    for parts in parsed_names:
        if parts.expert is not None:
            if parts.expert >= MAX_EXPERTS:
                raise UnsupportedError(
                    f"there are more than {MAX_EXPERTS:,} experts",
                    where=where,
                    why=f"expert {parts.expert:,} of `{parts.tensor_kind[1]}`",
                )
            counts[parts.tensor_kind] = max(
                counts.get(parts.tensor_kind, argument_count), parts.expert + 1
            )
    return counts


def read_attention_kinds(record: Mapping[str, object]) -> list[str]:
    """Read the kind of attention of each decoder layer, or return [] if *record* has none.

    Source: ``is_layer_window_attention`` in ``megatron/core/transformer/utils.py``.
    """
    count, pattern = _read_layer_count(record), record.get("window_attn_skip_freq")
    if count is None or not record.get("window_size"):
        return []
    if type(pattern) is int and pattern > 0:
        has_window = [layer % pattern != 0 for layer in range(1, count + 1)]
    elif isinstance(pattern, list) and len(pattern) == count:
        has_window = [value in (True, 1, "sliding_attention") for value in pattern]
    else:
        return []
    return ["sliding" if value else "global" for value in has_window]


def number_stacked_layers(
    tensors: Mapping[str, TensorEntry],
    parsed_names: Mapping[str, TensorNameParts],
    attention_kinds: Sequence[str],
    where: str,
) -> dict[str, list[int]]:
    """List the layer numbers in tensors that stack the layers of one kind, by kind of attention.

    Raises:
        UnsupportedError: *attention_kinds* do not state them, or contradict a shape.
    """
    numbers: dict[str, list[int]] = {}
    for name, parts in parsed_names.items():
        kind = parts.attention_kind
        if not kind:
            continue
        numbers[kind] = [n for n, other in enumerate(attention_kinds) if other == kind]
        if len(numbers[kind]) != tensors[name].shape[0]:
            states = f"`window_attn_skip_freq` states {len(numbers[kind])}"
            why = states if attention_kinds else "no file states `window_attn_skip_freq`"
            raise UnsupportedError(
                "the numbers of stacked layers are unknown",
                where=where,
                why=f"`{name}` has {pluralize(tensors[name].shape[0], 'layer')}; {why}",
                hint="keep the `run_config.yaml` of the save next to its `.metadata`",
            )
    return numbers
