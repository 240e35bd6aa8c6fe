"""Convert LoRA factors of experts between per-expert and stacked (``target_parameters``).

transformers 4, vLLM and most trainers have separate layers for each expert. transformers 5 stacks
them, and PEFT trains one A ``[E R, in]`` and one B ``[out, R E]`` for all E experts. Expert e has R
consecutive rows of A, and the columns e, e + E, e + 2 E, ... of B. The parameter is ``[E, out,
in]`` or ``[E, in, out]``, which follows from the shapes of the factors. Layers that the stack
concatenates, such as gate and up, share A, and each has its own rows of B. When per-expert factors
of such layers are joined, their ranks add up and B is block diagonal.

Sources: peft's ``ParamWrapper`` and ``utils/transformers_weight_conversion.py``, vLLM's
``lora/model_manager.py`` (``_stack_moe_lora_weights``, ``_create_merged_loras_inplace``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ckptctl import formats
from ckptctl.adapters.adapter_files import rename_peft_modules
from ckptctl.adapters.deltas import Delta, Deltas, UnfusedModel, match_stacked_adapter
from ckptctl.adapters.expert_stacks import (
    ExpertSlice,
    ExpertStack,
    get_stated_shapes,
    iterate_expert_stacks,
    map_stacked_templates,
    require_family,
)
from ckptctl.adapters.peft import (
    BASE_LAYERS,
    EXPERT_LAYER_NAMES,
    MERGEABLE_FIELDS,
    TARGET_PARAMETERS,
    WEIGHT,
    AdapterSettings,
    build_patterns,
    find_adapter_config,
    is_in_target_module,
    match_pattern,
    needs_parameter_target,
    parse_adapter_settings,
)
from ckptctl.catalog import (
    Box,
    Catalog,
    ComputedTensor,
    ComputeInput,
    Extent,
    TensorEntry,
    build_computed_name,
)
from ckptctl.conversion.draft import Draft
from ckptctl.conversion.sources import locate_tensors
from ckptctl.errors import MappingError, RefusedError, UnsupportedError, format_option, quote_names
from ckptctl.formats.peft import CONFIG
from ckptctl.planner.config_facts import Json, read_sizes
from ckptctl.planner.copying.blocks import build_view
from ckptctl.planner.layouts import EXPERT_AXIS, HF, Family
from ckptctl.planner.mapping.adapters import PEFT_PREFIX, STACKED, get_module_name, is_factor
from ckptctl.planner.mapping.matching import match_keys
from ckptctl.planner.strided import StridedTensor
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

ExpertForm = Literal["apart", "stacked"]
A, B = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, slots=True)
class AdaptedParameter:
    """Model parameter that one pair of LoRA factors changes (PEFT's ``target_parameters``).

    Attributes:
        key: Parameter name in the model.
        module: Name prefix of the LoRA factors.
        expert_count: Number of experts, i.e. of matrices in the parameter.
        is_output_first: Whether each matrix is ``[out, in]`` instead of ``[in, out]``.
    """

    key: str
    module: str
    expert_count: int
    is_output_first: bool


def find_adapted_parameters(
    adapter: Catalog,
    config: Json | None,
    adapter_settings: AdapterSettings,
    model_tensors: Mapping[str, TensorEntry],
) -> tuple[AdaptedParameter, ...]:
    """Find the model parameters that an adapter changes by ``target_parameters``."""
    target_parameters = (config or {}).get(TARGET_PARAMETERS)
    if not target_parameters:
        return ()
    if not isinstance(target_parameters, list) or not all(
        isinstance(parameter, str) for parameter in target_parameters
    ):
        raise UnsupportedError(
            f"invalid `{TARGET_PARAMETERS}`: {target_parameters!r}", where=CONFIG
        )
    modules = (name.removesuffix(A) for name in adapter.tensors if name.endswith(A))
    return tuple(
        parameter
        for module in modules
        for parameter in _match_parameter(
            module, adapter, target_parameters, adapter_settings, model_tensors
        )
    )


def _match_parameter(
    module: str,
    adapter: Catalog,
    target_parameters: Sequence[str],
    adapter_settings: AdapterSettings,
    model_tensors: Mapping[str, TensorEntry],
) -> Iterator[AdaptedParameter]:
    """Yield the parameter that the factors of *module* change, unless it is a linear layer."""
    model_module = BASE_LAYERS.sub("", module).removeprefix(PEFT_PREFIX)
    parameter_names = [
        f"{model_module}.{target.rpartition('.')[2]}"
        for target in target_parameters
        if is_in_target_module(model_module, target)
    ]
    if not parameter_names:
        return
    present_names = [name for name in parameter_names if name in model_tensors]
    if not present_names:
        ranks = [  # PEFT matches the name of the module, or of its weight if that is a target
            match_pattern(adapter_settings.rank_pattern, name, adapter_settings.rank)
            for name in (model_module, model_module + WEIGHT)
        ]
        if model_module + WEIGHT in model_tensors or adapter.tensors[module + A].shape[0] in ranks:
            return  # Factors of a linear layer, which the model may name differently.
        raise MappingError(
            "the model is missing a parameter of the adapter",
            where=f"tensor `{module}{A}`",
            why=f"there is no `{parameter_names[0]}`",
            hint="if the model has per-expert weights, convert it to a layout with stacked "
            f"experts first, as in {format_option('--to-layout hf-v5')}",
        )
    a, b = adapter.tensors[f"{module}{A}"].shape, _require_b(adapter, module).shape
    candidates = [
        target
        for name in present_names
        for target in _iterate_orientations(
            name, module, model_tensors[name].shape, a, b, adapter_settings
        )
    ]
    if len(candidates) != 1:
        raise UnsupportedError(
            f"the factors can be applied in {pluralize(len(candidates), 'way')}, but exactly "
            "one is "
            "required",
            where=f"tensor `{module}{A}`",
            why=f"A is {list(a)}, B is {list(b)}; "
            + ", ".join(f"`{name}` is {list(model_tensors[name].shape)}" for name in present_names),
        )
    yield candidates[0]


def _require_b(adapter: Catalog, module: str) -> TensorEntry:
    try:
        return adapter.tensors[f"{module}{B}"]
    except KeyError:
        message = f"`{module}{A}` has no matching `lora_b`"
        raise UnsupportedError(message, where=f"{module}{A}") from None


def _iterate_orientations(
    name: str,
    module: str,
    shape: tuple[int, ...],
    a: tuple[int, ...],
    b: tuple[int, ...],
    adapter_settings: AdapterSettings,
) -> Iterator[AdaptedParameter]:
    """Yield a parameter for each orientation of *shape* that the shapes of A and B allow."""
    if len(shape) not in (2, 3):
        return
    experts, rows, columns = shape if len(shape) == 3 else (1, *shape)
    rank = match_pattern(adapter_settings.rank_pattern, name, adapter_settings.rank)
    if a[0] != b[1] or a[0] % experts or rank not in (None, a[0] // experts):
        return
    if (rows, columns) == (b[0], a[1]):
        yield AdaptedParameter(name, module, experts, is_output_first=True)
    if (rows, columns) == (a[1], b[0]) and len(shape) == 3:
        yield AdaptedParameter(name, module, experts, is_output_first=False)


def drop_parameter_factors(adapter: Catalog, parameters: Sequence[AdaptedParameter]) -> Catalog:
    """Return a copy of the adapter catalog without the LoRA factors of *parameters*."""
    factor_names = {f"{parameter.module}{suffix}" for parameter in parameters for suffix in (A, B)}
    other_tensors = {
        name: entry for name, entry in adapter.tensors.items() if name not in factor_names
    }
    return replace(adapter, tensors=other_tensors)


def iterate_expert_deltas(
    parameters: Sequence[AdaptedParameter],
    model_tensors: Mapping[str, TensorEntry],
    factors: Mapping[str, TensorEntry],
) -> Iterator[Delta]:
    """Yield the low-rank change of each expert."""
    for parameter in parameters:
        a, b = factors[f"{parameter.module}{A}"], factors[f"{parameter.module}{B}"]
        rows = model_tensors[parameter.key].shape[-2]
        rank = a.shape[0] // parameter.expert_count
        a_by_expert = StridedTensor.from_entry(a).split(0, (parameter.expert_count, rank))
        b_by_expert = StridedTensor.from_entry(b).split(1, (rank, parameter.expert_count))
        for expert in range(parameter.expert_count):
            left_factor, right_factor = b_by_expert.select(2, expert), a_by_expert.select(0, expert)
            if not parameter.is_output_first:
                left_factor, right_factor = (
                    right_factor.permute((1, 0)),
                    left_factor.permute((1, 0)),
                )
            # Rank and alpha patterns match parameter names, so the factor names end with one.
            names = (f"[{expert}].{parameter.key}{A}", f"[{expert}].{parameter.key}{B}")
            changed = range(expert * rows, (expert + 1) * rows)
            yield Delta(parameter.key, changed, names, right_factor, left_factor)


# --------------------------------------------------------------------------------- both directions


def convert_experts(draft: Draft) -> Draft:
    """Unstack or stack the experts' factors of an adapter, as ``--experts`` requests."""
    assert draft.options.experts is not None
    documents = draft.assets.documents
    return draft.with_catalog(
        convert_expert_factors(draft.catalog, documents, draft.options.experts)
    )


def drop_model_type(draft: Draft) -> Draft:
    """Drop the model type, since no family's tables list LoRA factors of stacked experts."""
    layout = formats.get_format(draft.catalog.format).layout
    return replace(draft, model=draft.model.without_model_type(layout))


def convert_expert_factors(
    catalog: Catalog, documents: Mapping[str, Json], form: ExpertForm
) -> Catalog:
    """Return a PEFT adapter with the experts' factors unstacked or stacked, without copying data.

    Args:
        catalog: The adapter.
        documents: Config files of the adapter and its model, by name.
        form: ``apart`` for per-expert factors, or ``stacked`` for ``target_parameters``.

    Raises:
        MappingError: Config files are missing, or the model has no experts that can be stacked.
        UnsupportedError: Factors of some experts are missing, or the model has experts of two
            kinds.
        RefusedError: The adapter has no experts to convert, or the LoRA scales of the experts in a
            stack differ.
    """
    config = find_adapter_config(catalog)
    if config is None:
        raise MappingError(
            "converting the experts of an adapter requires its configuration",
            where=catalog.path,
            why=f"there is no {CONFIG}",
        )
    model = documents.get("config.json")
    family = require_family(catalog, model)
    sizes = read_sizes(family, model)
    get_shape = get_stated_shapes(family, sizes)
    expert_stacks = list(iterate_expert_stacks(catalog, family, sizes, get_shape))
    if form == "apart":
        _require_experts_of_one_kind(catalog, family)
        return _unstack_experts(
            *_rename_to_layout(catalog, config, family, STACKED, HF), expert_stacks
        )
    return _stack_experts(*_rename_to_layout(catalog, config, family, HF, STACKED), expert_stacks)


def _require_experts_of_one_kind(catalog: Catalog, family: Family) -> None:
    """Raise if *family* numbers two kinds of experts together, for which adapters have no names."""
    second_kinds = [s for s in family.shifts if s.layout == HF and s.into == EXPERT_AXIS]
    if second_kinds:
        raise UnsupportedError(
            f"adapters of single experts are not supported for `{family.name}`",
            where=catalog.path,
            why="its files number the experts of pictures after those of text, and an adapter of "
            "some of them does not show which are which",
            hint=f"keep the stacked factors (omit {format_option('--experts')}), or merge the "
            "adapter with `ckptctl merge BASE ADAPTER DST`",
        )


def _rename_to_layout(
    catalog: Catalog, config: Json, family: Family, source: str, target: str
) -> tuple[Catalog, Json]:
    """Rename the tensors outside expert stacks from layout *source* to layout *target*."""
    keys: dict[str, list[str]] = {}
    for name in catalog.tensors:
        bare_name = name.removeprefix(PEFT_PREFIX)
        key = get_module_name(name) + WEIGHT if is_factor(name) else bare_name
        keys.setdefault(key, []).append(name)
    leaves = family.get_layout(target).leaves
    matched = match_keys(family, family.get_layout(source), keys)
    names: dict[str, str] = {}
    for group in matched.groups:
        tensor, leaf = group.stored.parts[0]
        if leaf.spread_axes:
            continue
        for key, values in zip(group.keys, group.iterate_index_values(tensor.indices), strict=True):
            # Layers of several kinds may have the same name in only one of the layouts.
            pairs = [
                (part_leaf, target_leaf)
                for part, part_leaf in group.stored.parts
                if (part.name, values) not in matched.excluded
                and (target_leaf := leaves.get(part.name)) is not None
                and not target_leaf.spread_axes
            ]
            templates = {target_leaf.key: None for _, target_leaf in pairs}
            if not pairs or leaf.key in templates:
                continue
            is_same = all(part.placement == target_leaf.placement for part, target_leaf in pairs)
            if len(templates) > 1 or not is_same:
                raise MappingError(
                    f"layouts {source} and {target} store a layer of the adapter differently",
                    where=f"tensor `{keys[key][0]}`",
                    why=f"in {target}, its elements are in "
                    + quote_names([template.text for template in templates]),
                    hint="merge it into its model with `ckptctl merge BASE ADAPTER DST`",
                )
            target_leaf = pairs[0][1]
            new_name = target_leaf.key.format_key(dict(zip(tensor.indices, values, strict=True)))
            for name in keys[key]:
                suffix = name.removeprefix(PEFT_PREFIX + key.removesuffix(WEIGHT))
                names[name] = PEFT_PREFIX + (
                    new_name.removesuffix(WEIGHT) + suffix if suffix else new_name
                )
    new_names = {name: names.get(name, name) for name in catalog.tensors}
    tensors = {
        new_name: replace(catalog.tensors[old_name], name=new_name, path=(new_name,))
        for old_name, new_name in new_names.items()
    }
    return replace(catalog, tensors=tensors), rename_peft_modules(config, new_names)


def find_unstacked_parameters(
    adapter: Catalog, config: Json | None, model: UnfusedModel
) -> dict[str, ExpertStack]:
    """Find the stacks that an adapter changes, but that the model stores differently, by key."""
    if not (config or {}).get(TARGET_PARAMETERS) or not map_stacked_templates(model.family):
        return {}
    modules = {get_module_name(name).split(".base_layer")[0] for name in adapter.tensors}
    stacks = iterate_expert_stacks(adapter, model.family, model.sizes, model.find_expert_shape)
    return {
        stack.key: stack
        for stack in stacks
        if stack.key.rpartition(".")[0] in modules and stack.key not in model.shapes
    }


def match_stacked_parameters(
    parameters: Sequence[AdaptedParameter],
    stacks: Mapping[str, ExpertStack],
    factors: Mapping[str, TensorEntry],
    model: UnfusedModel,
    adapter_path: str,
) -> Iterator[Deltas]:
    """Match the factors of *stacks* to the experts of a model that stores them differently."""
    for is_transposed in (False, True):
        named = {
            f"{PEFT_PREFIX}{parameter.key}{end}": factors[f"{parameter.module}{end}"]
            for parameter in parameters
            if parameter.key in stacks
            and (parameter.is_output_first != stacks[parameter.key].is_output_first)
            is is_transposed
            for end in (A, B)
        }
        if named:
            yield match_stacked_adapter(model, named, adapter_path, is_transposed=is_transposed)


# --------------------------------------------------------------------------------- apart


def _unstack_experts(catalog: Catalog, config: Json, stacks: Sequence[ExpertStack]) -> Catalog:
    """Replace stacked factors by per-expert factors, which are views of the stacked tensors."""
    adapter_settings = parse_adapter_settings(config, supported=MERGEABLE_FIELDS)
    stack_by_key = {stack.key: stack for stack in stacks}
    parameters = find_adapted_parameters(
        catalog,
        config,
        adapter_settings,
        {key: parameter.entry for key, parameter in stack_by_key.items()},
    )
    if not parameters:
        raise RefusedError(
            "the adapter has no stacked experts",
            where=catalog.path,
            why=f"no tensors match `{TARGET_PARAMETERS}` in {CONFIG}",
        )
    names = [f"{parameter.module}{end}" for parameter in parameters for end in (A, B)]
    entries = locate_tensors(catalog, names).tensors
    tensors = dict(drop_parameter_factors(catalog, parameters).tensors)
    layer_names: dict[str, None] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for parameter in parameters:
        a, b = entries[f"{parameter.module}{A}"], entries[f"{parameter.module}{B}"]
        rank = a.shape[0] // parameter.expert_count
        alpha = adapter_settings.compute_scale(
            parameter.key, rank
        ) * adapter_settings.get_alpha_divisor(rank)
        for part in stack_by_key[parameter.key].slices:
            if (
                adapter_settings.rank_pattern
                or adapter_settings.alpha_pattern
                or (rank, alpha) != (adapter_settings.rank, adapter_settings.alpha)
            ):
                ranks[_build_expert_pattern(part)], alphas[_build_expert_pattern(part)] = (
                    rank,
                    alpha,
                )
            layer_names[part.modules[0].rpartition(".")[2]] = None
            for expert, module in enumerate(part.modules):
                for entry in _build_expert_views(
                    f"{PEFT_PREFIX}{module}", a, b, parameter.expert_count, expert, part
                ):
                    tensors[entry.name] = replace(entry, alias_of=None)
    modules = _extend_target_modules(
        config.get("target_modules"), stack_by_key[parameters[0].key], list(layer_names)
    )
    removed_patterns = {
        pattern for parameter in parameters for pattern in (parameter.key, re.escape(parameter.key))
    }
    other_parameters = adapter_settings.parameter_suffixes
    config = {
        **{key: value for key, value in config.items() if key != TARGET_PARAMETERS},
        **({TARGET_PARAMETERS: sorted(other_parameters)} if other_parameters else {}),
        "target_modules": modules,
        "rank_pattern": {
            **ranks,
            **{k: v for k, v in adapter_settings.rank_pattern.items() if k not in removed_patterns},
        },
        "alpha_pattern": {
            **alphas,
            **{
                k: v for k, v in adapter_settings.alpha_pattern.items() if k not in removed_patterns
            },
        },
    }
    return _with_adapter_config(replace(catalog, tensors=tensors), config)


def _build_expert_pattern(part: ExpertSlice) -> str:
    """Build a regex that matches one layer of all experts, with or without an expert number."""
    module, _, layer_name = part.modules[0].rpartition(".")
    parent = re.escape(module.rpartition(".")[0])
    return rf"{parent}\.(\d+\.)?{re.escape(layer_name)}"


def _build_expert_views(
    module: str, a: TensorEntry, b: TensorEntry, experts: int, expert: int, part: ExpertSlice
) -> Iterator[TensorEntry]:
    rank = a.shape[0] // experts
    yield build_view(a, StridedTensor.from_entry(a).narrow(0, expert * rank, rank), module + A)
    rows = StridedTensor.from_entry(b).narrow(0, part.start, part.rows)
    yield build_view(b, rows.split(1, (rank, experts)).select(2, expert), module + B)


def _extend_target_modules(
    target_modules: object, stack: ExpertStack, layer_names: Sequence[str]
) -> str:
    """Extend ``target_modules`` to a regex that also matches *layer_names* of all experts."""
    parent = stack.key.rpartition(".")[0].rpartition(".")[2]
    alternatives = [target_modules] if isinstance(target_modules, str) else []
    if isinstance(target_modules, list) and target_modules:
        alternatives.append(
            rf"(.*\.)?({'|'.join(re.escape(str(target)) for target in target_modules)})"
        )
    # PEFT on transformers 5 stacks the experts itself and expects names without their number.
    alternatives.append(
        rf".*\.{re.escape(parent)}\.(\d+\.)?({'|'.join(map(re.escape, layer_names))})"
    )
    return "|".join(alternatives)


# --------------------------------------------------------------------------------- stacked


def _stack_experts(catalog: Catalog, config: Json, stacks: Sequence[ExpertStack]) -> Catalog:
    """Replace the per-expert factors of each layer by factors of one stacked parameter."""
    adapter_settings = parse_adapter_settings(config, supported=MERGEABLE_FIELDS)
    if config.get("use_dora"):
        raise RefusedError(
            "PEFT does not support DoRA of stacked experts", where=f"`use_dora` in {CONFIG}"
        )
    stacks_with_factors = [
        (stack, parts) for stack in stacks if (parts := _find_complete_slices(catalog, stack))
    ]
    if not stacks_with_factors:
        raise RefusedError(
            "the adapter has no per-expert factors",
            where=catalog.path,
            why=f"no tensor such as `{PEFT_PREFIX}{stacks[0].slices[0].modules[0]}{A}` found",
        )
    modules = [
        PEFT_PREFIX + m for _, parts in stacks_with_factors for part in parts for m in part.modules
    ]
    factor_names = [f"{module}{end}" for module in modules for end in (A, B)]
    entries = locate_tensors(catalog, factor_names).tensors
    tensors = {name: entry for name, entry in catalog.tensors.items() if name not in entries}
    computed = dict(catalog.computed)
    stacks_by_module: dict[str, list[ExpertStack]] = {}
    for stack, _ in stacks_with_factors:
        stacks_by_module.setdefault(stack.key.rpartition(".")[0], []).append(stack)
    rank_and_alpha: dict[str, tuple[int, float]] = {}
    for stack, parts in stacks_with_factors:
        siblings = stacks_by_module[stack.key.rpartition(".")[0]]
        # PEFT wraps the first parameter of a module first, so its factors are nested deepest.
        depth = len(siblings) - 1 - siblings.index(stack)
        module = PEFT_PREFIX + stack.key.rpartition(".")[0] + ".base_layer" * depth
        a, b, virtual_b = _join_factors(catalog.root, module, stack, parts, entries)
        tensors |= {a.name: a, b.name: b}
        computed[b.extents[0].file] = virtual_b
        rank = a.shape[0] // stack.expert_count
        rank_and_alpha[stack.key] = (
            rank,
            _compute_stack_alpha(adapter_settings, parts, entries, rank),
        )
    catalog = replace(catalog, tensors=tensors, computed=computed)
    return _with_adapter_config(
        catalog,
        _build_stacked_config(
            config, adapter_settings, tensors, rank_and_alpha, stacks_with_factors
        ),
    )


def _find_complete_slices(catalog: Catalog, stack: ExpertStack) -> list[ExpertSlice]:
    """Return the slices of a stack that the adapter changes, or raise if experts are missing."""
    slices = []
    for part in stack.slices:
        is_present = [f"{PEFT_PREFIX}{module}{A}" in catalog.tensors for module in part.modules]
        if any(is_present) and not all(is_present):
            first_missing = part.modules[is_present.index(False)]
            raise UnsupportedError(
                f"{pluralize(is_present.count(False), 'expert has', 'experts have')} no "
                "factors in a "
                "layer",
                where=f"tensor `{PEFT_PREFIX}{first_missing}{A}`",
                why="a stack requires the factors of all its experts",
            )
        slices += [part] if all(is_present) else []
    return slices


def _join_factors(
    root: TreePath,
    module: str,
    stack: ExpertStack,
    parts: Sequence[ExpertSlice],
    entries: Mapping[str, TensorEntry],
) -> tuple[TensorEntry, TensorEntry, ComputedTensor]:
    """Build the entries of factors A and B of a stack, and the virtual file that computes B."""
    first_a = entries[f"{PEFT_PREFIX}{parts[0].modules[0]}{A}"]
    ranks = [entries[f"{PEFT_PREFIX}{part.modules[0]}{A}"].shape[0] for part in parts]
    extents: list[Extent] = []
    inputs: list[ComputeInput] = []
    first_row = 0
    for expert in range(stack.expert_count):
        for part, rank in zip(parts, ranks, strict=True):
            name = f"{PEFT_PREFIX}{part.modules[expert]}"
            a, b = entries[name + A], entries[name + B]
            shapes = (rank, stack.inputs), (part.rows, rank)
            if (a.shape, b.shape) != shapes or {a.dtype, b.dtype} != {first_a.dtype}:
                raise UnsupportedError(
                    "the factors of experts have different shapes or dtypes",
                    where=f"tensor `{name}{A}`",
                    why=f"A is {a.dtype} {list(a.shape)}, B is {b.dtype} {list(b.shape)}; "
                    f"expected {first_a.dtype} {list(shapes[0])} and {list(shapes[1])}",
                )
            for extent in a.extents:
                offsets = (extent.box.offsets[0] + first_row, *extent.box.offsets[1:])
                extents.append(replace(extent, box=Box(offsets, extent.box.sizes)))
            first_row += rank
            inputs.append(ComputeInput(root, b))
    shape = (stack.outputs, sum(ranks) * stack.expert_count)
    starts = tuple(part.start for part in parts)
    virtual_b = ComputedTensor("experts_b", first_a.dtype, shape, tuple(inputs), starts)
    file = build_computed_name(module + B)
    return (
        TensorEntry(
            module + A, first_a.dtype, (first_row, stack.inputs), tuple(extents), (module + A,)
        ),
        virtual_b.to_entry(module + B, (module + B,), file),
        virtual_b,
    )


def _compute_stack_alpha(
    adapter_settings: AdapterSettings,
    parts: Iterable[ExpertSlice],
    entries: Mapping[str, TensorEntry],
    rank: int,
) -> float:
    """Return the alpha of a stack of rank *rank*, or raise if the scales of its experts differ."""
    keys = [f"{PEFT_PREFIX}{module}{A}" for part in parts for module in part.modules]
    scales = {adapter_settings.compute_scale(key, entries[key].shape[0]): key for key in keys}
    if len(scales) > 1:
        raise RefusedError(
            "the experts of a stack have different scales",
            where=f"tensor `{next(iter(scales.values()))}`",
            why=f"their scales are {quote_names([f'{scale:g}' for scale in scales])}",
        )
    (scale,) = scales
    return scale * adapter_settings.get_alpha_divisor(rank)


def _build_stacked_config(
    config: Json,
    adapter_settings: AdapterSettings,
    tensors: Mapping[str, TensorEntry],
    rank_and_alpha: Mapping[str, tuple[int, float]],
    stacks_with_factors: Sequence[tuple[ExpertStack, list[ExpertSlice]]],
) -> dict[str, object]:
    """Build the PEFT config of an adapter with stacked experts and other modules."""
    expert_modules = {m for _, parts in stacks_with_factors for part in parts for m in part.modules}
    stacked_modules = tuple(key.rpartition(".")[0] for key in rank_and_alpha)
    factors = {get_module_name(name): name for name in tensors if name.endswith(A)}
    other_modules = [
        name for name in factors if name.split(".base_layer")[0] not in stacked_modules
    ]
    single_parameters = [name for name in other_modules if needs_parameter_target(name)]
    rank_and_alpha_by_key = {**rank_and_alpha}
    for name in single_parameters:
        rank = tensors[factors[name]].shape[0]
        rank_and_alpha_by_key[name + WEIGHT] = (
            rank,
            adapter_settings.compute_scale(factors[name], rank)
            * adapter_settings.get_alpha_divisor(rank),
        )
    pattern_fields = build_patterns(
        rank_and_alpha_by_key, (adapter_settings.rank, adapter_settings.alpha)
    )
    for field, pattern in (
        ("rank_pattern", adapter_settings.rank_pattern),
        ("alpha_pattern", adapter_settings.alpha_pattern),
    ):
        kept_entries = {
            name: value for name, value in pattern.items() if not _matches_any(name, expert_modules)
        }
        pattern_fields[field] = {**kept_entries, **pattern_fields[field]}
    return {
        **config,
        "target_modules": sorted(
            {name.rpartition(".")[2] for name in other_modules} - EXPERT_LAYER_NAMES
        ),
        TARGET_PARAMETERS: sorted(rank_and_alpha_by_key),
        **pattern_fields,
    }


def _matches_any(pattern: str, modules: Iterable[str]) -> bool:
    """Return whether a rank or alpha *pattern* of PEFT matches one of *modules*."""
    return any(re.fullmatch(rf"(.*\.)?({pattern})", module) for module in modules)


def _with_adapter_config(catalog: Catalog, config: Mapping[str, object]) -> Catalog:
    return replace(catalog, documents={**catalog.documents, CONFIG: dict(config)})
