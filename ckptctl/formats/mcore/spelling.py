"""Canonical names of Megatron-Core's tensors, which have several naming conventions.

============= ================================= =============================== ===================
what          here                              or, by other options            then
============= ================================= =============================== ===================
a layer       ``decoder.layers.3.x`` ``[...]``  ``decoder.layers.x`` ``[L, …]`` a row of the other
gate and up   ``linear_fc1.weight`` ``[2f, d]`` ``weight_w``, ``weight_v``      one after the other
experts       ``experts.experts.x`` ``[E, …]``  ``experts.experts.5.x``         a row of it each
the same      ``experts.experts.x`` ``[E, …]``  ``experts.x5``, Megatron-FSDP   a row of it each
the same      ``experts.experts.x`` ``[E, …]``  ``experts.local_experts.5.x``   a row of it each
============= ================================= =============================== ===================

The bytes are the same with different boxes, which :mod:`ckptctl.formats.mcore.joining` converts.
The same applies to the optimizer state, whose names are ``optimizer.state.exp_avg.`` and a
parameter name.

Source: ``megatron/core/transformer/`` (``transformer_block.py``, ``mlp.py``, ``moe/experts.py``)
and ``optimizer/optimizer.py`` (``chained_0.``), ``fsdp_dtensor_checkpoint.py`` (Megatron-FSDP);
NeMo's names start with ``module.``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from ckptctl.catalog import TensorEntry
from ckptctl.errors import CoverageError, UnsupportedError, quote_names
from ckptctl.formats.shared.findings import Faults
from ckptctl.planner.mapping.adapters import is_adapter
from ckptctl.units import pluralize

_PREFIX = re.compile(r"(?:chained_\d+\.)?(optimizer\.state\.\w+\.)?(?:module\.)*")
_LAYER = re.compile(r"(\d{1,6})\.(.+)", re.DOTALL)
_EXPERT = re.compile(r"(.*\.experts)\.(?:experts|local_experts)\.(\d{1,6})\.(.+)", re.DOTALL)
_GROUPED = re.compile(r"(.*\.mlp\.experts)\.(linear_fc[12]\.(?:weight|bias))(\d{1,6})", re.DOTALL)
_HALF = re.compile(r"(.*\.linear_fc1\.(?:weight|bias)\d*)_([wv])", re.DOTALL)
_PART_OF_FSDP = re.compile(r"\d+|\d*_w")
_OF_PART = re.compile(r"(.*\.linear_fc[12]\.(?:weight|bias)(?:\d+|\d*_[wv]))\..+", re.DOTALL)
_LAYERS, HALVES = ".layers.", "wv"
DECODER = "decoder.layers"
MAX_LAYERS = MAX_EXPERTS = 1 << 14
"""Limits for the numbers in names and arguments."""
_UNEVEN = ("heterogeneous_layers_config_path", "heterogeneous_block_specs")
"""Arguments of models that may have layers without any tensors."""


class Spelling(NamedTuple):
    """Parts of a tensor name.

    Attributes:
        before: Canonical name up to the layer number, or the full name.
        after: Rest of the name.
        stack: Container of the layers, such as ``decoder.layers``; empty outside of layers.
        layer: Layer number; None if all layers are stacked.
        expert: Expert number; None for all experts, or none.
        half: 0 for gate, 1 for up; None for both, or neither.
    """

    before: str
    after: str = ""
    stack: str = ""
    layer: int | None = None
    expert: int | None = None
    half: int | None = None

    @property
    def stacked(self) -> bool:
        """Whether the tensor contains all layers along dimension 0."""
        return bool(self.stack) and self.layer is None

    @property
    def family(self) -> tuple[str, str]:
        """Key of this tensor in all layers, which is the stack and the name within a layer."""
        return self.stack, self.after if self.stack else self.before

    def name(self, layer: int | None = None) -> str:
        """Return the canonical name of the tensor, or of its *layer*."""
        number = self.layer if layer is None else layer
        return self.before + (f"{number}." if self.stack else "") + self.after


def spelling_of(name: str) -> Spelling:
    """Parse a tensor name."""
    found = _PREFIX.match(name)
    before = (found[1] or "") if found else ""
    rest = name[found.end() :] if found else name
    expert = half = None
    if part := _HALF.fullmatch(rest):
        rest, half = part[1], HALVES.index(part[2])
    if single := _EXPERT.fullmatch(rest):
        rest, expert = f"{single[1]}.experts.{single[3]}", int(single[2])
    elif single := _GROUPED.fullmatch(rest):
        rest, expert = f"{single[1]}.experts.{single[2]}", int(single[3])
    above, dot, inside = rest.partition(_LAYERS)
    if not dot:
        return Spelling(before + rest, expert=expert, half=half)
    stack, numbered = above + _LAYERS[:-1], _LAYER.fullmatch(inside)
    layer, after = (int(numbered[1]), numbered[2]) if numbered else (None, inside)
    return Spelling(f"{before}{stack}.", after, stack, layer, expert, half)


def is_of_fsdp(names: Iterable[str]) -> bool:
    """Return whether *names* are parts of tensors as Megatron-FSDP saves them."""
    parts = (name.rpartition(".linear_fc1.weight") for name in names)
    return any(".mlp." in f"{head}." and _PART_OF_FSDP.fullmatch(tail) for head, _, tail in parts)


def whole_of(name: str) -> str | None:
    """Return the canonical parameter name in the name of a part's state, or None."""
    found = _OF_PART.fullmatch(name)
    return spelling_of(found[1]).name() if found else None


def spellings(tensors: Mapping[str, TensorEntry]) -> dict[str, Spelling]:
    """Parse the names of *tensors*, treating 0-d tensors as unstacked."""
    found = {name: spelling_of(name) for name in tensors}
    alone = (name for name, one in found.items() if one.stacked and not tensors[name].shape)
    return {**found, **{name: Spelling(name) for name in alone}}


def require_layers(
    tensors: Mapping[str, TensorEntry],
    found: Mapping[str, Spelling],
    arguments: Mapping[str, object],
    faults: Faults,
) -> None:
    """Compare the numbers of layers in names, shapes and the trainer's *arguments*."""
    by_stack: dict[str, dict[str, Spelling]] = {}
    for name, one in found.items():
        if one.stack:
            by_stack.setdefault(one.stack, {})[name] = one
    for stack, members in by_stack.items():
        told = _told(arguments) if stack == DECODER else None
        stacked = {tensors[name].shape[0]: name for name, one in members.items() if one.stacked}
        layers = {one.layer for one in members.values() if one.layer is not None}
        _require_one(stack, stacked, layers, told, str(faults.root))
        absent = (
            ()
            if stacked or is_adapter(members)
            else sorted({*range(told or max(layers) + 1)} - layers)
        )
        if absent and not any(map(arguments.get, _UNEVEN)):
            lacking = pluralize(len(absent), f"layer of `{stack}` is", f"layers of `{stack}` are")
            error = CoverageError(
                f"{lacking} missing",
                where=str(faults.root),
                why=quote_names([str(layer) for layer in absent]),
                hint="check whether a pipeline stage is missing",
            )
            faults.unreadable(error)


def _require_one(
    stack: str,
    stacked: Mapping[int, str],
    layers: Collection[int],
    told: int | None,
    where: str,
) -> None:
    """Raise if the number of layers of a stack is ambiguous, or too large."""
    said = {count: f"`{name}` has {count:,}" for count, name in stacked.items()}
    high = max(layers, default=-1) + 1
    if high and (high > (told or high) or any(high > count for count in stacked)):
        said.setdefault(high, f"there is a layer {high - 1:,}")
    if told is not None and said:
        said.setdefault(told, f"the trainer's arguments specify {told:,}")
    if len(said) > 1:
        raise UnsupportedError(
            f"the number of layers of `{stack}` is ambiguous",
            where=where,
            why=quote_names(list(said.values()), quote=""),
            hint="remove the files of other saves",
        )
    if max(said, default=high) > MAX_LAYERS:
        why = quote_names(list(said.values()), quote="")
        what = f"`{stack}` has more than {MAX_LAYERS:,} layers"
        raise UnsupportedError(what, where=where, why=why)


def _told(arguments: Mapping[str, object]) -> int | None:
    """Return the number of layers in the arguments, or None (not of T5's encoder)."""
    given = (arguments.get(name) for name in ("decoder_num_layers", "num_layers"))
    return next((count for count in given if type(count) is int and 0 < count <= MAX_LAYERS), None)


def expert_counts(
    found: Iterable[Spelling], arguments: Mapping[str, object], where: str
) -> dict[tuple[str, str], int]:
    """Count the experts of each :attr:`Spelling.family` with separate experts."""
    counts: dict[tuple[str, str], int] = {}
    given = (arguments.get(name) for name in ("num_experts", "num_moe_experts"))
    told = next((count for count in given if type(count) is int and count <= MAX_EXPERTS), 0)
    for one in found:
        if one.expert is not None:
            if one.expert >= MAX_EXPERTS:
                raise UnsupportedError(
                    f"there are more than {MAX_EXPERTS:,} experts",
                    where=where,
                    why=f"expert {one.expert:,} of `{one.family[1]}`",
                )
            counts[one.family] = max(counts.get(one.family, told), one.expert + 1)
    return counts
