"""Adapters of single parameters, as of stacked experts: PEFT's ``target_parameters``.

Source: peft's ``ParamWrapper``. Of E experts A is ``[E R, in]`` and B is ``[out, R E]``: expert e
has R rows of A that follow each other, and every E-th column of B from the e-th on. The parameter
is ``[E, out, in]``, or ``[E, in, out]`` where its module says so: its shape tells.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ckptctl.catalog import Catalog, Input, TensorEntry
from ckptctl.errors import MappingError, UnsupportedError, spell_option
from ckptctl.formats.peft import CONFIG
from ckptctl.ops.adapters import TARGETS, WEIGHT, Settings, matching
from ckptctl.planner.configs.facts import Json
from ckptctl.planner.copying.views import transposed, view
from ckptctl.planner.mapping.adapters import PREFIX
from ckptctl.planner.mapping.deltas import Delta, Factor
from ckptctl.planner.strided import Strided
from ckptctl.units import counted

A, B = ".lora_A.weight", ".lora_B.weight"
_NESTED = re.compile(r"(\.base_layer)+\Z")


@dataclass(frozen=True, slots=True)
class AdaptedParameter:
    """A parameter of the model, and the factors that change it.

    Attributes:
        key: Its name in the model.
        module: What the names of its factors begin with.
        experts: How many matrices it consists of.
        swapped: Whether these are ``[out, in]``.
    """

    key: str
    module: str
    experts: int
    swapped: bool


def targets(
    adapter: Catalog, config: Json | None, known: Settings, held: Mapping[str, TensorEntry]
) -> tuple[AdaptedParameter, ...]:
    """Return the parameters of the model that factors of *adapter* are about."""
    stated = (config or {}).get(TARGETS)
    if not stated:
        return ()
    if not isinstance(stated, list) or not all(isinstance(one, str) for one in stated):
        raise UnsupportedError(f"invalid `{TARGETS}`: {stated!r}", where=CONFIG)
    modules = (name.removesuffix(A) for name in adapter.tensors if name.endswith(A))
    return tuple(one for module in modules for one in _target(module, adapter, stated, known, held))


def _target(
    module: str,
    adapter: Catalog,
    stated: Sequence[str],
    known: Settings,
    held: Mapping[str, TensorEntry],
) -> Iterator[AdaptedParameter]:
    """Yield what the factors of one module change; nothing: it is a layer like others."""
    inside = _NESTED.sub("", module).removeprefix(PREFIX)
    called = [f"{inside}.{one.rpartition('.')[2]}" for one in stated if _ends(inside, one)]
    if not called:
        return
    found = [name for name in called if name in held]
    rank = matching(known.ranks, called[0], known.rank)
    if not found and called == [inside + WEIGHT] and adapter.tensors[module + A].shape[0] == rank:
        return  # The factors of a layer, whatever the model calls that.
    if not found:
        raise MappingError(
            "the model is missing a parameter of the adapter",
            where=f"tensor `{module}{A}`",
            why=f"there is no `{called[0]}`",
            hint="if the model has per-expert weights, convert it to a layout with stacked "
            f"experts first, as in {spell_option('--to-layout hf-v5')}",
        )
    a, b = adapter.tensors[f"{module}{A}"].shape, _b(adapter, module).shape
    fits = [one for name in found for one in _fitting(name, module, held[name].shape, a, b, known)]
    if len(fits) != 1:
        raise UnsupportedError(
            f"the factors can be applied in {counted(len(fits), 'way')}, but exactly one is "
            "required",
            where=f"tensor `{module}{A}`",
            why=f"A is {list(a)}, B is {list(b)}; "
            + ", ".join(f"`{name}` is {list(held[name].shape)}" for name in found),
        )
    yield fits[0]


def _ends(inside: str, stated: str) -> bool:
    module = stated.rpartition(".")[0]
    return f".{inside}".endswith(f".{module}") if module else True


def _b(adapter: Catalog, module: str) -> TensorEntry:
    try:
        return adapter.tensors[f"{module}{B}"]
    except KeyError:
        what = f"`{module}{A}` has no matching `lora_b`"
        raise UnsupportedError(what, where=f"{module}{A}") from None


def _fitting(
    name: str,
    module: str,
    shape: tuple[int, ...],
    a: tuple[int, ...],
    b: tuple[int, ...],
    known: Settings,
) -> Iterator[AdaptedParameter]:
    """Yield the ways in which a parameter of *shape* can be changed by A and B."""
    if len(shape) not in (2, 3):
        return
    experts, rows, columns = shape if len(shape) == 3 else (1, *shape)
    rank = matching(known.ranks, name, known.rank)
    if a[0] != b[1] or a[0] % experts or rank not in (None, a[0] // experts):
        return
    if (rows, columns) == (b[0], a[1]):
        yield AdaptedParameter(name, module, experts, swapped=True)
    if (rows, columns) == (a[1], b[0]) and len(shape) == 3:
        yield AdaptedParameter(name, module, experts, swapped=False)


def without(adapter: Catalog, found: Sequence[AdaptedParameter]) -> Catalog:
    """Return an adapter without the factors of single parameters."""
    own = {f"{one.module}{suffix}" for one in found for suffix in (A, B)}
    rest = {name: entry for name, entry in adapter.tensors.items() if name not in own}
    return replace(adapter, tensors=rest)


def changes(
    found: Sequence[AdaptedParameter], held: Mapping[str, TensorEntry], factors: dict[str, Input]
) -> Iterator[Delta]:
    """Yield what becomes of each expert; the views of its factors are added to *factors*."""
    for one in found:
        a, b = factors[f"{one.module}{A}"], factors[f"{one.module}{B}"]
        rows = held[one.key].shape[-2]
        rank = a.entry.shape[0] // one.experts
        by_expert = Strided.whole(a.entry).split(0, (one.experts, rank))
        across = Strided.whole(b.entry).split(1, (rank, one.experts))
        for expert in range(one.experts):
            left = view(b.entry, across.select(2, expert))
            right = view(a.entry, by_expert.select(0, expert))
            if not one.swapped:
                left, right = transposed(right), transposed(left)
            # Patterns of ranks and alphas are about the parameter, which these end with.
            keys = [f"[{expert}].{one.key}{end}" for end in (A, B)]
            factors |= zip(keys, (replace(a, entry=right), replace(a, entry=left)), strict=True)
            start = expert * rows
            first, second = (Factor(key, 0) for key in keys)
            yield Delta(one.key, start, start + rows, rank, first, second, None)
