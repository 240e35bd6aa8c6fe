"""LoRA factors of experts, per expert or stacked (PEFT's ``target_parameters``).

transformers 4, vLLM and most trainers name the layers of every expert; transformers 5 stacks them,
and PEFT trains one A ``[E R, in]`` and one B ``[out, R E]`` for all E: expert e has R consecutive
rows of A, and every E-th column of B from the e-th on. The parameter is ``[E, out, in]`` or ``[E,
in, out]``, which its shape shows. Layers that the stack concatenates, such as gate and up, share A
and have parts of a stacked B. When per-expert factors of such layers are joined, their ranks add up
and B is block diagonal.

Sources: peft's ``ParamWrapper`` and ``utils/transformers_weight_conversion.py``, vLLM's
``lora/model_manager.py`` (``_stack_moe_lora_weights``, ``_create_merged_loras_inplace``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ckptctl import formats
from ckptctl.adapters.adapter_files import under_other_names
from ckptctl.adapters.deltas import Delta
from ckptctl.adapters.expert_stacks import (
    STACKED,
    ExpertSlice,
    Stack,
    family_of,
    stack_keys,
    stacked,
    stacks,
)
from ckptctl.adapters.peft import (
    OF_EXPERTS,
    SINGLE,
    TARGETS,
    WEIGHT,
    Settings,
    as_parameter,
    described,
    matching,
    patterns,
    settings,
)
from ckptctl.catalog import (
    Box,
    Catalog,
    ComputedTensor,
    ComputeInput,
    Extent,
    TensorEntry,
    computed_name,
)
from ckptctl.conversion.draft import Draft
from ckptctl.conversion.recognition.model import Model
from ckptctl.conversion.sources import locate_tensors
from ckptctl.errors import MappingError, RefusedError, UnsupportedError, quote_names, spell_option
from ckptctl.formats.peft import CONFIG
from ckptctl.planner.config_facts import Json
from ckptctl.planner.copying.blocks import build_view
from ckptctl.planner.layouts import HF, Family
from ckptctl.planner.mapping.adapters import PEFT_PREFIX, get_module_name, is_factor
from ckptctl.planner.mapping.matching import match_keys
from ckptctl.planner.strided import StridedTensor
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

Experts = Literal["apart", "stacked"]
A, B = ".lora_A.weight", ".lora_B.weight"
_NESTED = re.compile(r"(\.base_layer)+\Z")


@dataclass(frozen=True, slots=True)
class AdaptedParameter:
    """A model parameter and the factors that change it.

    Attributes:
        key: Parameter name in the model.
        module: Prefix of the names of its factors.
        experts: Number of matrices in it.
        swapped: Whether they are ``[out, in]`` instead of ``[in, out]``.
    """

    key: str
    module: str
    experts: int
    swapped: bool


def targets(
    adapter: Catalog, config: Json | None, known: Settings, held: Mapping[str, TensorEntry]
) -> tuple[AdaptedParameter, ...]:
    """Find the model parameters that the ``target_parameters`` of an adapter change."""
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
    """Yield the parameter that a module's factors change, if it is not a regular linear layer."""
    inside = _NESTED.sub("", module).removeprefix(PEFT_PREFIX)
    called = [f"{inside}.{one.rpartition('.')[2]}" for one in stated if _ends(inside, one)]
    if not called:
        return
    found = [name for name in called if name in held]
    rank = matching(known.ranks, called[0], known.rank)
    if not found and called == [inside + WEIGHT] and adapter.tensors[module + A].shape[0] == rank:
        return  # Factors of a linear layer, which the model may name differently.
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
            f"the factors can be applied in {pluralize(len(fits), 'way')}, but exactly one is "
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
    """Yield the ways in which factors A and B can change a parameter of *shape*."""
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
    """Return the adapter without the factors of these parameters."""
    own = {f"{one.module}{suffix}" for one in found for suffix in (A, B)}
    rest = {name: entry for name, entry in adapter.tensors.items() if name not in own}
    return replace(adapter, tensors=rest)


def changes(
    found: Sequence[AdaptedParameter],
    held: Mapping[str, TensorEntry],
    factors: Mapping[str, TensorEntry],
) -> Iterator[Delta]:
    """Yield the low-rank change of each expert."""
    for one in found:
        a, b = factors[f"{one.module}{A}"], factors[f"{one.module}{B}"]
        rows = held[one.key].shape[-2]
        rank = a.shape[0] // one.experts
        by_expert = StridedTensor.from_entry(a).split(0, (one.experts, rank))
        across = StridedTensor.from_entry(b).split(1, (rank, one.experts))
        for expert in range(one.experts):
            left, right = across.select(2, expert), by_expert.select(0, expert)
            if not one.swapped:
                left, right = right.permute((1, 0)), left.permute((1, 0))
            # Rank and alpha patterns match parameter names, so the factor names end with one.
            names = (f"[{expert}].{one.key}{A}", f"[{expert}].{one.key}{B}")
            changed = range(expert * rows, (expert + 1) * rows)
            yield Delta(one.key, changed, names, right, left)


# --------------------------------------------------------------------------------- both ways


def convert_experts(draft: Draft) -> Draft:
    """Unstack or stack an adapter's experts, as ``--experts`` says."""
    assert draft.options.experts is not None
    documents = draft.assets.documents
    return draft.with_catalog(with_experts(draft.catalog, documents, draft.options.experts))


def keep_stacks(draft: Draft) -> Draft:
    """Name stacked experts as the output format does, since no table describes them."""
    layout = formats.get(draft.catalog.format).layout
    return replace(draft, model=draft.model.without_model_type(layout))


def with_experts(catalog: Catalog, documents: Mapping[str, Json], how: Experts) -> Catalog:
    """Return a PEFT adapter with its experts unstacked or stacked, without copying data.

    Args:
        catalog: The adapter.
        documents: Config files of its model.
        how: ``apart`` for per-expert factors, ``stacked`` for ``target_parameters``.

    Raises:
        MappingError: Config files are missing, or the model has no experts that can be stacked.
        UnsupportedError: Factors of some experts are missing.
        RefusedError: The adapter is in this form already, or experts of a stack differ in scale.
    """
    config = described(catalog)
    if config is None:
        raise MappingError(
            "converting the experts of an adapter requires its configuration",
            where=catalog.path,
            why=f"there is no {CONFIG}",
        )
    model = documents.get("config.json")
    found = list(stacks(catalog, model))
    family = family_of(catalog, model)
    if how == "apart":
        return _apart(*_renamed(catalog, config, family, STACKED, HF), found)
    return _together(*_renamed(catalog, config, family, HF, STACKED), found)


def _renamed(
    catalog: Catalog, config: Json, family: Family, source: str, target: str
) -> tuple[Catalog, Json]:
    """Rename tensors that are in no stack to the names of layout *target*."""
    keys = {
        get_module_name(name) + WEIGHT if is_factor(name) else name.removeprefix(PEFT_PREFIX): name
        for name in catalog.tensors
    }
    leaves = family.get_layout(target).leaves
    names: dict[str, str] = {}
    for group in match_keys(family, family.get_layout(source), keys).groups:
        tensor, leaf = group.stored.parts[0]
        other = leaves.get(tensor.name)
        if leaf.spread_axes or other is None or other.spread_axes or leaf.key == other.key:
            continue
        if leaf.placement != other.placement:
            raise MappingError(
                f"layouts {source} and {target} store a layer of the adapter differently",
                where=f"tensor `{keys[group.keys[0]]}`",
                hint=f"convert its model to layout {source} first, with "
                f"{spell_option(f'--to-layout {source}')}",
            )
        for key, values in zip(group.keys, group.iterate_values(tensor.indices), strict=True):
            new = other.key.format_key(dict(zip(tensor.indices, values, strict=True)))
            end = keys[key].removeprefix(PEFT_PREFIX + key.removesuffix(WEIGHT))
            names[keys[key]] = PEFT_PREFIX + (new.removesuffix(WEIGHT) + end if end else new)
    views = {name: names.get(name, name) for name in catalog.tensors}
    tensors = {
        new: replace(catalog.tensors[old], name=new, path=(new,)) for old, new in views.items()
    }
    return replace(catalog, tensors=tensors), under_other_names(config, views)


def with_experts_of(adapter: Catalog, known: Model, family: Family) -> Catalog:
    """Unstack the adapter's experts if the model stores them per expert."""
    config = (described(adapter) or {}).get(TARGETS)
    if not config or not stacked(family) or stack_keys(family, known.tensors):
        return adapter
    modules = {get_module_name(name).split(".base_layer")[0] for name in adapter.tensors}
    if all(one.key.rpartition(".")[0] not in modules for one in stacks(adapter, known.config)):
        return adapter
    return with_experts(adapter, {"config.json": known.config or {}}, "apart")


# --------------------------------------------------------------------------------- apart


def _apart(catalog: Catalog, config: Json, stacks: Sequence[Stack]) -> Catalog:
    """Give each expert its own factors, which are views of the stack's."""
    known = settings(config, carries=SINGLE)
    by_key = {stack.key: stack for stack in stacks}
    found = targets(catalog, config, known, {key: one.entry for key, one in by_key.items()})
    if not found:
        raise RefusedError(
            "the adapter has no stacked experts",
            where=catalog.path,
            why=f"no tensors match `{TARGETS}` in {CONFIG}",
        )
    names = [f"{one.module}{end}" for one in found for end in (A, B)]
    held = locate_tensors(catalog, names).tensors
    tensors = dict(without(catalog, found).tensors)
    kinds: dict[str, None] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for one in found:
        a, b = held[f"{one.module}{A}"], held[f"{one.module}{B}"]
        rank = a.shape[0] // one.experts
        alpha = known.scale(one.key, rank) * known.divisor(rank)
        for part in by_key[one.key].parts:
            if known.ranks or known.alphas or (rank, alpha) != (known.rank, known.alpha):
                ranks[_every(part)], alphas[_every(part)] = rank, alpha
            kinds[part.modules[0].rpartition(".")[2]] = None
            for expert, module in enumerate(part.modules):
                for entry in _of_expert(f"{PEFT_PREFIX}{module}", a, b, one.experts, expert, part):
                    tensors[entry.name] = replace(entry, alias_of=None)
    modules = _expression(config.get("target_modules"), by_key[found[0].key], list(kinds))
    gone = {spelled for one in found for spelled in (one.key, re.escape(one.key))}
    rest = known.parameters
    config = {
        **{key: value for key, value in config.items() if key != TARGETS},
        **({TARGETS: sorted(rest)} if rest else {}),
        "target_modules": modules,
        "rank_pattern": {**ranks, **{k: v for k, v in known.ranks.items() if k not in gone}},
        "alpha_pattern": {**alphas, **{k: v for k, v in known.alphas.items() if k not in gone}},
    }
    return _described(replace(catalog, tensors=tensors), config)


def _every(part: ExpertSlice) -> str:
    """Build a regex for a layer of all experts, with and without the expert number."""
    module, _, kind = part.modules[0].rpartition(".")
    parent = re.escape(module.rpartition(".")[0])
    return rf"{parent}\.(\d+\.)?{re.escape(kind)}"


def _of_expert(
    module: str, a: TensorEntry, b: TensorEntry, experts: int, expert: int, part: ExpertSlice
) -> Iterator[TensorEntry]:
    rank = a.shape[0] // experts
    yield build_view(a, StridedTensor.from_entry(a).narrow(0, expert * rank, rank), module + A)
    rows = StridedTensor.from_entry(b).narrow(0, part.start, part.rows)
    yield build_view(b, rows.split(1, (rank, experts)).select(2, expert), module + B)


def _expression(stated: object, stack: Stack, kinds: Sequence[str]) -> str:
    """Build a ``target_modules`` regex that matches *stated* and the experts' layers *kinds*."""
    parent = stack.key.rpartition(".")[0].rpartition(".")[2]
    ways = [stated] if isinstance(stated, str) else []
    if isinstance(stated, list) and stated:
        ways.append(rf"(.*\.)?({'|'.join(re.escape(str(one)) for one in stated)})")
    # PEFT on transformers 5, which stacks them itself, looks for names without the number.
    ways.append(rf".*\.{re.escape(parent)}\.(\d+\.)?({'|'.join(map(re.escape, kinds))})")
    return "|".join(ways)


# --------------------------------------------------------------------------------- stacked


def _together(catalog: Catalog, config: Json, stacks: Sequence[Stack]) -> Catalog:
    """Join the per-expert factors of each layer to those of one stacked parameter."""
    known = settings(config, carries=SINGLE)
    if config.get("use_dora"):
        raise RefusedError(
            "PEFT does not support DoRA of stacked experts", where=f"`use_dora` in {CONFIG}"
        )
    found = [(stack, parts) for stack in stacks if (parts := _present(catalog, stack))]
    if not found:
        raise RefusedError(
            "the adapter has no per-expert factors",
            where=catalog.path,
            why=f"no tensor such as `{PEFT_PREFIX}{stacks[0].parts[0].modules[0]}{A}` found",
        )
    modules = [PEFT_PREFIX + m for _, parts in found for part in parts for m in part.modules]
    own = [f"{module}{end}" for module in modules for end in (A, B)]
    held = locate_tensors(catalog, own).tensors
    tensors = {name: one for name, one in catalog.tensors.items() if name not in held}
    computed = dict(catalog.computed)
    in_module: dict[str, list[Stack]] = {}
    for stack, _ in found:
        in_module.setdefault(stack.key.rpartition(".")[0], []).append(stack)
    strengths: dict[str, tuple[int, float]] = {}
    for stack, parts in found:
        siblings = in_module[stack.key.rpartition(".")[0]]
        # PEFT wraps the first parameter of a module first, so its factors are nested deepest.
        depth = len(siblings) - 1 - siblings.index(stack)
        module = PEFT_PREFIX + stack.key.rpartition(".")[0] + ".base_layer" * depth
        a, b, virtual = _joined(catalog.root, module, stack, parts, held)
        tensors |= {a.name: a, b.name: b}
        computed[b.extents[0].file] = virtual
        rank = a.shape[0] // stack.experts
        strengths[stack.key] = rank, _strength(known, parts, held, rank)
    catalog = replace(catalog, tensors=tensors, computed=computed)
    return _described(catalog, _stacked_config(config, known, tensors, strengths, found))


def _present(catalog: Catalog, stack: Stack) -> list[ExpertSlice]:
    """Return the slices of a stack that the adapter has factors for, for all experts."""
    found = []
    for part in stack.parts:
        there = [f"{PEFT_PREFIX}{module}{A}" in catalog.tensors for module in part.modules]
        if any(there) and not all(there):
            lacking = part.modules[there.index(False)]
            raise UnsupportedError(
                f"{pluralize(there.count(False), 'expert has', 'experts have')} no factors in a "
                "layer",
                where=f"tensor `{PEFT_PREFIX}{lacking}{A}`",
                why="a stack requires the factors of all its experts",
            )
        found += [part] if all(there) else []
    return found


def _joined(
    root: TreePath,
    module: str,
    stack: Stack,
    parts: Sequence[ExpertSlice],
    held: Mapping[str, TensorEntry],
) -> tuple[TensorEntry, TensorEntry, ComputedTensor]:
    """Return A and B of a stack, and the virtual file that computes B."""
    first = held[f"{PEFT_PREFIX}{parts[0].modules[0]}{A}"]
    ranks = [held[f"{PEFT_PREFIX}{part.modules[0]}{A}"].shape[0] for part in parts]
    extents: list[Extent] = []
    inputs: list[ComputeInput] = []
    at = 0
    for expert in range(stack.experts):
        for part, rank in zip(parts, ranks, strict=True):
            name = f"{PEFT_PREFIX}{part.modules[expert]}"
            a, b = held[name + A], held[name + B]
            shapes = (rank, stack.inputs), (part.rows, rank)
            if (a.shape, b.shape) != shapes or {a.dtype, b.dtype} != {first.dtype}:
                raise UnsupportedError(
                    "the factors of experts have different shapes or dtypes",
                    where=f"tensor `{name}{A}`",
                    why=f"A is {a.dtype} {list(a.shape)}, B is {b.dtype} {list(b.shape)}; "
                    f"expected {first.dtype} {list(shapes[0])} and {list(shapes[1])}",
                )
            for extent in a.extents:
                offsets = (extent.box.offsets[0] + at, *extent.box.offsets[1:])
                extents.append(replace(extent, box=Box(offsets, extent.box.sizes)))
            at += rank
            inputs.append(ComputeInput(root, b))
    shape = (stack.outputs, sum(ranks) * stack.experts)
    starts = tuple(part.start for part in parts)
    virtual = ComputedTensor("experts_b", first.dtype, shape, tuple(inputs), starts)
    file = computed_name(module + B)
    return (
        TensorEntry(module + A, first.dtype, (at, stack.inputs), tuple(extents), (module + A,)),
        virtual.to_entry(module + B, (module + B,), file),
        virtual,
    )


def _strength(
    known: Settings, parts: Iterable[ExpertSlice], held: Mapping[str, TensorEntry], rank: int
) -> float:
    """Return the alpha of a stack of *rank*, or raise if its experts differ in scale."""
    keys = [f"{PEFT_PREFIX}{module}{A}" for part in parts for module in part.modules]
    scales = {known.scale(key, held[key].shape[0]): key for key in keys}
    if len(scales) > 1:
        raise RefusedError(
            "the experts of a stack have different scales",
            where=f"tensor `{next(iter(scales.values()))}`",
            why=f"their scales are {quote_names([f'{scale:g}' for scale in scales])}",
        )
    (scale,) = scales
    return scale * known.divisor(rank)


def _stacked_config(
    config: Json,
    known: Settings,
    tensors: Mapping[str, TensorEntry],
    strengths: Mapping[str, tuple[int, float]],
    found: Sequence[tuple[Stack, list[ExpertSlice]]],
) -> dict[str, object]:
    """Build the PEFT config for stacked experts and the other adapted modules."""
    experts = {m for _, parts in found for part in parts for m in part.modules}
    stacked = tuple(key.rpartition(".")[0] for key in strengths)
    factors = {get_module_name(name): name for name in tensors if name.endswith(A)}
    others = [name for name in factors if name.split(".base_layer")[0] not in stacked]
    single = [name for name in others if as_parameter(name)]
    of_all = {**strengths}
    for name in single:
        rank = tensors[factors[name]].shape[0]
        of_all[name + WEIGHT] = rank, known.scale(factors[name], rank) * known.divisor(rank)
    odd = patterns(of_all, (known.rank, known.alpha))
    for field, stated in (("rank_pattern", known.ranks), ("alpha_pattern", known.alphas)):
        kept = {name: value for name, value in stated.items() if not _of(name, experts)}
        odd[field] = {**kept, **odd[field]}
    return {
        **config,
        "target_modules": sorted({name.rpartition(".")[2] for name in others} - OF_EXPERTS),
        TARGETS: sorted(of_all),
        **odd,
    }


def _of(pattern: str, modules: Iterable[str]) -> bool:
    """Return whether a rank or alpha pattern is for one of *modules*."""
    return any(re.fullmatch(rf"(.*\.)?({pattern})", module) for module in modules)


def _described(catalog: Catalog, config: Mapping[str, object]) -> Catalog:
    return replace(catalog, documents={**catalog.documents, CONFIG: dict(config)})
