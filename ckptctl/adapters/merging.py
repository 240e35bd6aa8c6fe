"""Merge an adapter into its model: ``W + s B A``, while the model is converted.

The changed tensors are virtual files in the model's catalog, which are computed in float32 and
rounded once when they are read (see :mod:`ckptctl.numerics.kinds.lora`). Otherwise, a merge is an
ordinary conversion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from ckptctl import families, formats
from ckptctl.adapters.adapter_checks import (
    iterate_config_problems,
    iterate_pair_problems,
    iterate_selection_problems,
    map_factor_modules,
    parse_selection,
)
from ckptctl.adapters.deltas import (
    Delta,
    Deltas,
    UnfusedModel,
    join_deltas,
    make_compute_input,
    match_adapter,
)
from ckptctl.adapters.expert_adapters import (
    drop_parameter_factors,
    find_adapted_parameters,
    find_unstacked_parameters,
    iterate_expert_deltas,
    match_stacked_parameters,
)
from ckptctl.adapters.grouped_factors import normalize_factors
from ckptctl.adapters.peft import (
    FLOAT_DTYPES,
    MERGEABLE_FIELDS,
    AdapterSettings,
    convert_embedding_factors,
    find_adapter_config,
    list_unknown_fields,
    locate_factors,
    parse_adapter_settings,
    require_adapter,
    require_biases,
    select_factors,
)
from ckptctl.catalog import Catalog, ComputedTensor, ComputeInput, TensorEntry, build_computed_name
from ckptctl.conversion.conversion_options import ConversionOptions, MergeOptions
from ckptctl.conversion.convert import ConversionPlan, Step, plan_with_steps
from ckptctl.conversion.destinations import (
    is_replaceable,
    require_destination,
    require_writable_format,
)
from ckptctl.conversion.draft import Draft
from ckptctl.conversion.recognition.layout_change import choose_family
from ckptctl.conversion.recognition.model import (
    Model,
    ModelRequest,
    recognize_model,
    require_known_model,
)
from ckptctl.conversion.sources import locate_tensors
from ckptctl.errors import (
    MappingError,
    RefusedError,
    UnsupportedError,
    format_option,
    quote_names,
)
from ckptctl.formats.peft import CONFIG
from ckptctl.numerics.kinds.lora import LoraUpdate
from ckptctl.planner.copying.blocks import build_rearranged_file
from ckptctl.planner.layouts import Family
from ckptctl.planner.mapping.adapters import (
    PEFT_LAYOUTS,
    derive_adapter_family,
    has_adapter_factors,
    list_adaptable_modules,
)
from ckptctl.results import JsonField, Result
from ckptctl.storage.computed import can_overflow
from ckptctl.storage.paths import parse_path
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

ARGUMENT_ORDER_HINT = "pass the base model before the adapter: `ckptctl merge BASE ADAPTER DST`"
MAX_FACTOR_BYTES = 256 << 20
"""Size limit of factor A in float32, in bytes, since every thread keeps one A in memory."""


@dataclass(frozen=True, slots=True)
class MergePlan(Result):
    """Plan of a merge, including the plan of the conversion.

    Attributes:
        conversion: The conversion of the merged model.
    """

    conversion: ConversionPlan
    adapter: Annotated[str, JsonField("absolute path of the adapter")]
    adapter_format: Annotated[str, JsonField("[format](formats.md) of the adapter")]
    adapter_layout: Annotated[str, JsonField("layout of the adapter")]
    merged: Annotated[int, JsonField("number of model tensors changed by low-rank factors")]
    replaced: Annotated[
        int,
        JsonField("number of model tensors replaced by tensors of the adapter (`modules_to_save`)"),
    ]
    scales: Annotated[tuple[float, ...], JsonField("distinct scales of B A, ascending")]


def plan_merge(
    base: str | TreePath, adapter: str | TreePath, dst: str | TreePath, options: MergeOptions
) -> MergePlan:
    """Plan a merge, keeping the model's format unless *options* set ``to``."""
    with families.use_converter_file(options.converter):
        conversion_options = options.with_target_format(
            options.to or require_writable_format(base, options.from_format)
        )
        adapter_path = formats.to_existing_path(adapter)
        require_destination(adapter_path, parse_path(dst), options.overwrite, is_replaceable)
        adapter_merge = AdapterMerge(adapter_path, conversion_options, options.scaling)
        # The base model has no alpha.
        model_options = replace(conversion_options, lora_alpha=None)
        plan = plan_with_steps(
            base, dst, model_options, Step("merge", "model", 30, adapter_merge.merge_into)
        )
    return MergePlan(
        plan,
        str(adapter_merge.adapter.path),
        adapter_merge.adapter.format,
        adapter_merge.layout,
        len({delta.key for delta in adapter_merge.matched.changed}),
        len(adapter_merge.matched.replaced),
        tuple(sorted(adapter_merge.scales)),
    )


class AdapterMerge:
    """Merge of one adapter into one model.

    Attributes:
        adapter: Catalog of the adapter.
        layout: Layout of the adapter, set when it is matched.
        root: Key prefix of the adapter in a larger state dict, set when it is matched.
        notes: Notes about the adapter.
        selection: Modules that the PEFT config selects, or None if unknown.
        modules: Modules whose factors PEFT would load, each with the name of a factor.
        scales: The distinct scales of B A, filled during the merge.
        matched: The changes, set when the adapter is matched.
    """

    def __init__(self, path: TreePath, options: ConversionOptions, scaling: float | None) -> None:
        self.options = options
        stored = formats.open_checkpoint(path)
        self.adapter = select_factors(normalize_factors(stored))
        require_adapter(self.adapter, MappingError, "not a LoRA/DoRA adapter", ARGUMENT_ORDER_HINT)
        self.config = find_adapter_config(self.adapter)
        self.settings: AdapterSettings = parse_adapter_settings(
            self.config, options.lora_alpha, scaling, supported=MERGEABLE_FIELDS
        )
        self.notes = [*self.adapter.notes]
        if unknown_fields := list_unknown_fields(self.config):
            self.notes.append(f"ignored fields of {CONFIG}: {quote_names(unknown_fields)}")
        self.selection = parse_selection(self.config, self.notes)
        self.modules = map_factor_modules(self.adapter, self.config, stored.tensors)
        for problem in (
            *iterate_pair_problems(self.adapter),
            *iterate_config_problems(self.adapter, self.config, self.settings),
            *iterate_selection_problems(self.selection, self.modules, self.notes),
        ):
            raise problem.error
        self.layout = ""
        self.root = ""
        self.scales: set[float] = set()
        self.matched = Deltas((), {}, frozenset())

    def merge_into(self, draft: Draft) -> Draft:
        """Merge the adapter into the model of *draft*."""
        return draft.with_catalog(self.merge_into_model(draft.model))

    def merge_into_model(self, model: Model) -> Catalog:
        """Return the model's catalog with the changed tensors replaced by virtual files."""
        catalog = model.catalog
        if has_adapter_factors(catalog.tensors):
            raise MappingError(
                "this is an adapter, not a base model", where=catalog.path, hint=ARGUMENT_ORDER_HINT
            )
        model_tensors = model.tensors
        self._match_adapter(model, choose_family(model, model.layout))
        weights = _group_deltas(self.matched.changed, lambda delta: delta.key)
        scaled_biases = _group_deltas(
            self.matched.changed, lambda delta: delta.bias and delta.bias[0]
        )
        names = [*weights, *scaled_biases, *self.matched.replaced]
        base_entries = locate_tensors(catalog, [model_tensors[name].name for name in names]).tensors
        self._require_untied(set(base_entries), model)
        tensors, computed = dict(catalog.tensors), dict(catalog.computed)
        float32_weights = {
            key: ComputeInput(
                catalog.root, _add_float32_file(base_entries[model_tensors[key].name], computed)
            )
            for key in weights
        }
        virtual_files = {
            key: self._build_merged_weight(
                base_entries[model_tensors[key].name], float32_weights[key], changes, computed
            )
            for key, changes in weights.items()
        }
        virtual_files |= {
            key: self._build_scaled_bias(
                ComputeInput(catalog.root, base_entries[model_tensors[key].name]),
                float32_weights,
                changes,
                computed,
            )
            for key, changes in scaled_biases.items()
        }
        virtual_files |= {
            key: build_rearranged_file(self.adapter.root, saved)
            for key, saved in self.matched.replaced.items()
        }
        for key, virtual in virtual_files.items():
            entry = base_entries[model_tensors[key].name]
            name = build_computed_name(f"{entry.name}+lora")
            computed[name] = virtual
            tensors[model_tensors[key].name] = replace(
                entry,
                dtype=virtual.dtype,
                shape=virtual.shape,
                extents=(virtual.to_extent(name),),
                alias_of=None,
            )
        notes = (*catalog.notes, *(f"adapter: {note}" for note in self.notes))
        return replace(catalog, tensors=tensors, computed=computed, notes=notes)

    def _match_adapter(self, model: Model, family: Family) -> None:
        """Match the adapter to the model and set *matched*, *layout* and *root*.

        Raises:
            MappingError: The model is missing layers of the adapter.
            UnsupportedError: The adapter is missing magnitudes, biases or fully trained modules.
        """
        model_tensors = model.tensors
        unfused = UnfusedModel.map(
            family,
            model.layout or "",
            str(model.catalog.path),
            {name: entry.shape for name, entry in model_tensors.items()},
            model.get_axis_sizes(family, implied=True),
            model.get_layer_lists(family),
        )
        stacks = find_unstacked_parameters(self.adapter, self.config, unfused)
        parameters = find_adapted_parameters(
            self.adapter,
            self.config,
            self.settings,
            {**model_tensors, **{key: stack.entry for key, stack in stacks.items()}},
        )
        linear_factors = drop_parameter_factors(self.adapter, parameters)
        self.layout = PEFT_LAYOUTS[0]
        if linear_factors.tensors or not parameters:
            if not derive_adapter_family(family).layouts:
                raise UnsupportedError(
                    f"adapters of `{family.name}` are not supported",
                    where=self.adapter.path,
                    why="it numbers layers of two kinds together, and adapters may have only some",
                    hint="merge it with PEFT's `merge_and_unload`",
                )
            adapter = recognize_model(linear_factors, model.documents, ModelRequest(family.name))
            require_known_model(adapter)
            self.layout, self.root = adapter.layout or "", adapter.root
        factors, path = locate_factors(self.adapter, self.root), str(self.adapter.path)
        matched: list[Deltas] = []
        if linear_factors.tensors or not parameters:
            linear_names = convert_embedding_factors(linear_factors).tensors
            linear = {key: entry for key, entry in factors.items() if entry.name in linear_names}
            matched.append(match_adapter(unfused, self.layout, linear, path))
            self._note_missing_factors(list_adaptable_modules(family, self.layout, unfused.tensors))
        matched += match_stacked_parameters(parameters, stacks, factors, unfused, path)
        self.matched = join_deltas(matched)
        biases = {delta.key.removesuffix("weight") + "bias" for delta in self.matched.changed}
        require_biases(
            self.config, sorted((biases & model_tensors.keys()) - self.matched.replaced.keys())
        )
        stored = [parameter for parameter in parameters if parameter.key not in stacks]
        expert_deltas = tuple(iterate_expert_deltas(stored, model_tensors, factors))
        self.matched = replace(self.matched, changed=(*self.matched.changed, *expert_deltas))

    def _note_missing_factors(self, model_modules: Sequence[str]) -> None:
        """Add a note if the adapter has no factors for some of *model_modules* that it selects."""
        selection = self.selection
        # If other names have factors, the adapter was trained under other names.
        if selection is None or not self.modules.keys() <= set(model_modules):
            return
        missing = [
            module
            for module in model_modules
            if module not in self.modules and selection.has_module(module)
        ]
        if missing:
            self.notes.append(
                f"{CONFIG} selects {pluralize(len(missing), 'layer')} without factors, which "
                f"{'keeps its weight' if len(missing) == 1 else 'keep their weights'}: "
                f"{quote_names(missing)}"
            )

    def _require_untied(self, changed_names: set[str], model: Model) -> None:
        """Raise if the merge would change only one of two tensors that are tied or share memory."""
        catalog, family = model.catalog, choose_family(model, model.layout)
        hint = f"convert the model with {format_option('--untie')} first"
        for name, entry in catalog.tensors.items():
            if entry.alias_of is not None and {name, entry.alias_of} & changed_names:
                raise RefusedError(
                    f"`{name}` and `{entry.alias_of}` share memory, but the adapter changes "
                    "only one",
                    where=catalog.path,
                    hint=hint,
                )
        for tie in family.ties if model.is_tied(family) else ():
            if len({tie.tensor, tie.of} & self.matched.logical_names) == 1:
                raise RefusedError(
                    f"`{tie.of}` and `{tie.tensor}` are tied, but the adapter changes only one",
                    where=catalog.path,
                    why="PEFT would untie them, but the configuration states that they are tied",
                    hint=hint,
                )

    def _build_merged_weight(
        self,
        base: TensorEntry,
        float32_weight: ComputeInput,
        deltas_of_weight: Sequence[Delta],
        computed: dict[str, ComputedTensor],
    ) -> ComputedTensor:
        _require_float(base)
        base_copy = next(
            (delta.base_tensor for delta in deltas_of_weight if delta.base_tensor), None
        )
        base_input = (
            make_compute_input(self.adapter.root, base_copy, computed)
            if base_copy
            else float32_weight
        )
        factors, arguments = self._build_factor_inputs(deltas_of_weight, computed)
        inputs = (base_input, *(factor for factor_group in factors for factor in factor_group))
        pinned = deltas_of_weight[0].key in self.matched.pinned
        dtype = base.dtype if pinned else self.options.dtype or base.dtype
        return ComputedTensor("lora", dtype, base.shape, inputs, arguments)

    def _build_scaled_bias(
        self,
        bias: ComputeInput,
        weights: Mapping[str, ComputeInput],
        deltas_of_bias: Sequence[Delta],
        computed: dict[str, ComputedTensor],
    ) -> ComputedTensor:
        """Build the virtual tensor of a bias that DoRA scales like the rows of its weight."""
        _require_float(bias.entry)
        factors, arguments = self._build_factor_inputs(deltas_of_bias, computed)
        inputs = [bias]
        for change, factor_inputs in zip(deltas_of_bias, factors, strict=True):
            inputs += [weights[change.key], *factor_inputs]
        dtype = self.options.dtype or bias.entry.dtype
        return ComputedTensor("dora_bias", dtype, bias.entry.shape, tuple(inputs), arguments)

    def _build_factor_inputs(
        self, weight_deltas: Sequence[Delta], computed: dict[str, ComputedTensor]
    ) -> tuple[list[list[ComputeInput]], tuple[LoraUpdate, ...]]:
        """Return the input tensors of each delta, and the kind's argument for each delta.

        Factors that need another element order are added to *computed* as virtual files.
        """
        factors: list[list[ComputeInput]] = []
        arguments: list[LoraUpdate] = []
        for delta in weight_deltas:
            rank, columns = delta.a.shape
            scale = self.settings.compute_scale(delta.factors[0], rank)
            nbytes = 4 * rank * columns
            if nbytes > MAX_FACTOR_BYTES:
                raise RefusedError(
                    f"rank {rank:,} is too high to merge in bounded memory",
                    where=f"tensor `{delta.a.parts[0].entry.name}`",
                    why=f"A has {pluralize(nbytes, 'byte')} in fp32; the limit is "
                    f"{MAX_FACTOR_BYTES:,}",
                )
            self.scales.add(scale)
            parts = (delta.a, delta.b, delta.magnitude)
            factors.append(
                [make_compute_input(self.adapter.root, part, computed) for part in parts if part]
            )
            bias_start = delta.bias[1] if delta.bias else 0
            arguments.append(LoraUpdate(delta.rows, scale, bool(delta.magnitude), bias_start))
        return factors, tuple(arguments)


def _group_deltas(
    all_deltas: Sequence[Delta], key: Callable[[Delta], str | None]
) -> dict[str, list[Delta]]:
    groups: dict[str, list[Delta]] = {}
    for delta in all_deltas:
        if name := key(delta):
            groups.setdefault(name, []).append(delta)
    return groups


def _add_float32_file(entry: TensorEntry, computed: dict[str, ComputedTensor]) -> TensorEntry:
    """Return a dequantized tensor in float32, i.e. unrounded, and add its file to *computed*.

    The entry is returned unchanged if the tensor is stored, or cannot overflow.
    """
    extent, *more_extents = entry.extents
    virtual_file = computed.get(extent.file)
    if virtual_file is None or more_extents or not can_overflow(virtual_file):
        return entry
    float32_file = replace(virtual_file, dtype="float32")
    name = build_computed_name(f"{entry.name}+float32")
    computed[name] = float32_file
    nbytes = float32_file.to_extent(name).nbytes
    return replace(
        entry, dtype=float32_file.dtype, extents=(replace(extent, file=name, nbytes=nbytes),)
    )


def _require_float(entry: TensorEntry) -> None:
    if entry.dtype not in FLOAT_DTYPES:
        raise MappingError(
            f"cannot merge an adapter into a weight of dtype {entry.dtype}",
            where=f"tensor `{entry.name}`",
            hint=f"pass {format_option('--dequantize bf16')} to dequantize the model",
        )
