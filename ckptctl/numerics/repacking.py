"""``--repack``: store quantized weights in another format without requantizing.

The source is dequantized only in the plan: its model is recognized and mapped by the names of
unquantized weights, and then each weight is replaced by its stored parts. The dequantized tensors
are never computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ckptctl.catalog import (
    Catalog,
    ComputedTensor,
    ComputeInput,
    TensorEntry,
    build_computed_name,
)
from ckptctl.conversion.draft import Draft, Quantization
from ckptctl.conversion.sources import locate_tensors
from ckptctl.errors import MappingError, UsageError, format_option, quote_names
from ckptctl.formats.base import OutputTensor
from ckptctl.numerics.dequantizing import (
    read_assets_quantization_configs,
    strip_quantization_configs,
)
from ckptctl.numerics.quantization.formulas import Fp4Groups, IntegerGroups
from ckptctl.numerics.quantization.recipes import (
    FP8,
    NVFP4_GROUP_SIZE,
    PACKED,
    SCALE,
    SHAPE,
    WEIGHT,
    WORD_BITS,
    Json,
    build_weight_settings,
    make_config_builder,
)
from ckptctl.numerics.quantization.scheme import QuantizedWeight
from ckptctl.numerics.quantized import dequantize_catalog, survey_catalog
from ckptctl.numerics.quantizing import list_ignored_modules
from ckptctl.planner.mapping.mapped import ComposedTensor
from ckptctl.units import pluralize

INPUT_SCALE = ".input_scale"
PLANNED_DTYPE = "bfloat16"
"""Dtype of the dequantized weights in the plan, which nothing reads."""


@dataclass(frozen=True, slots=True)
class _RepackedPart:
    """Stored tensor of a repacked weight.

    Attributes:
        suffix: Suffix that replaces ``.weight``.
        source: The virtual file that computes the tensor, or the stored tensor that it equals.
    """

    suffix: str
    source: ComputedTensor | TensorEntry


@dataclass(frozen=True, slots=True)
class _RepackedWeight:
    """A repacked weight: its stored tensors, and its settings in the quantization config.

    Attributes:
        parts: Stored tensors.
        layout: Name of the storage format in compressed-tensors.
        weights: Quantization settings of the weight.
        inputs: Quantization settings of the activations, or None if they are not quantized.
        has_one_group: Whether each row has a single scale.
    """

    parts: tuple[_RepackedPart, ...]
    layout: str
    weights: Json
    inputs: Json | None = None
    has_one_group: bool = False


def prepare_repacking(draft: Draft) -> Draft:
    """Dequantize the source in the plan, or raise if a weight cannot be repacked."""
    catalog, options = draft.catalog, draft.options
    assets_configs = read_assets_quantization_configs(options.assets)
    survey = survey_catalog(catalog, assets_configs)
    dequantized = dequantize_catalog(catalog, PLANNED_DTYPE, assets_configs)
    for weight in survey.weights:
        _require_repackable(weight)
    modules = {weight.key.removesuffix(WEIGHT) for weight in survey.weights if _is_nvfp4(weight)}
    unsupported = [
        name
        for name in survey.dropped
        if not (name.endswith(INPUT_SCALE) and name.removesuffix(INPUT_SCALE) in modules)
    ]
    if unsupported:
        raise MappingError(
            f"cannot repack {quote_names(unsupported)}",
            where=catalog.path,
            why=", ".join(dict.fromkeys(survey.dropped[name] for name in unsupported)),
            hint=f"use {format_option('--dequantize')}, which drops them",
        )
    draft = replace(draft, assets=strip_quantization_configs(draft.assets))
    schemes = ", ".join(dict.fromkeys(weight.description for weight in survey.weights))
    note = f"repacked {pluralize(len(survey.weights), 'weight')} as {options.repack} ({schemes})"
    if modules:
        note += "; global scales are stored as their reciprocals, rounded to fp32"
    return draft.with_catalog(replace(dequantized, notes=(*catalog.notes, note)))


def _is_nvfp4(weight: QuantizedWeight) -> bool:
    form = weight.arguments
    return isinstance(form, Fp4Groups) and not form.divided and len(weight.inputs) == 3


def _require_repackable(weight: QuantizedWeight) -> None:
    """Raise if compressed-tensors cannot store *weight* without changing its values."""
    form, why = weight.arguments, ""
    if weight.description.startswith("compressed-tensors"):
        raise UsageError(
            "the checkpoint already has the format compressed-tensors",
            where=f"tensor `{weight.lead}`",
            hint=f"omit {format_option('--repack')}",
        )
    if weight.kind not in _REPACKERS or (weight.kind == "fp4_groups" and not _is_nvfp4(weight)):
        why = f"only {', '.join(_SUPPORTED_SCHEMES)} can be repacked"
    elif len(weight.shape) != 2:
        why = f"the shape is {list(weight.shape)}, and programs require one tensor per expert"
    elif isinstance(form, IntegerGroups):
        columns = weight.shape[0] if weight.transposed else weight.shape[1]
        if columns % form.group or columns * form.bits % WORD_BITS:
            why = (
                f"groups of {form.group} and words of {WORD_BITS // form.bits} numbers do not "
                f"divide {pluralize(columns, 'column')}"
            )
    elif isinstance(form, Fp4Groups) and form.group != NVFP4_GROUP_SIZE:
        why = f"its groups have {form.group} columns instead of {NVFP4_GROUP_SIZE}"
    if why:
        raise MappingError(
            f"cannot repack {weight.description}",
            where=f"tensor `{weight.lead}`",
            why=why,
            hint=f"use {format_option('--dequantize')} instead of {format_option('--repack')}",
        )


def repack(draft: Draft) -> Draft:
    """Replace the weights that :func:`prepare_repacking` dequantized by repacked tensors."""
    entries, computed = dict(draft.located.tensors), dict(draft.located.computed)
    mapped = dict(draft.mapped)
    repacked: dict[str, _RepackedWeight] = {}
    parts: dict[str, str] = {}
    tensors: list[OutputTensor] = []
    for tensor in draft.tensors:
        weight = _find_quantized_weight(draft, tensor)
        if weight is None:
            tensors.append(tensor)
            continue
        del mapped[tensor.name]
        module = tensor.name.removesuffix(WEIGHT)
        repacked_weight = repacked[tensor.name] = _repack_weight(draft, tensor, weight)
        for part in repacked_weight.parts:
            name = module + part.suffix
            key, source = build_computed_name(f"{name}@repacked"), part.source
            if isinstance(source, ComputedTensor):
                computed[key], entries[key] = source, source.to_entry(key, (key,), key)
            else:
                entries[key] = replace(source, name=key, path=(key,), alias_of=None)
            mapped[name] = ComposedTensor.from_unchanged(key, name, source.shape)
            parts[name] = tensor.name
            tensors.append(OutputTensor(name, source.dtype, source.shape, (name,)))
    quantization = Quantization(draft.tensors, parts, is_lossless=True)
    config = _build_config(list(repacked.values()), draft.catalog)
    quantization = replace(quantization, config=config(list_ignored_modules(quantization)))
    located = replace(draft.located, tensors=entries, computed=computed)
    return replace(
        draft, located=located, mapped=mapped, tensors=tuple(tensors), quantization=quantization
    )


def _find_quantized_weight(draft: Draft, tensor: OutputTensor) -> ComputedTensor | None:
    """Return the virtual file of a dequantized *tensor*, or None if it was not quantized."""
    composed, located = draft.mapped[tensor.name], draft.located
    files = {key: extent.file for key in composed.keys for extent in located.tensors[key].extents}
    quantized = {key: file for key, file in files.items() if file in located.computed}
    if not quantized:
        return None
    if not composed.is_rename or not tensor.name.endswith(WEIGHT) or tensor.alias_of:
        raise MappingError(
            "cannot repack a weight that the target layout rearranges",
            where=f"tensor `{tensor.name}`",
            why=f"it is composed of {quote_names(list(quantized))}",
            hint=f"use the layout of the source, or pass {format_option('--dequantize bf16')}",
        )
    return located.computed[next(iter(quantized.values()))]


def _repack_weight(draft: Draft, tensor: OutputTensor, weight: ComputedTensor) -> _RepackedWeight:
    repacked_weight = _REPACKERS[weight.kind](tensor, weight)
    if weight.kind != "fp4_groups":
        return repacked_weight
    lead = weight.inputs[0].entry.name
    name = lead.removesuffix(WEIGHT) + INPUT_SCALE
    if name not in draft.source.tensors:
        return repacked_weight
    source = locate_tensors(draft.source, [name])
    scale = ComputeInput(source.root, source.tensors[name])
    part = _RepackedPart(".input_global_scale", _build_reciprocal(scale))
    parts = (*repacked_weight.parts, part)
    return replace(repacked_weight, parts=parts, inputs=_NVFP4_INPUTS)


def _repack_integers(tensor: OutputTensor, weight: ComputedTensor) -> _RepackedWeight:
    """Repack GPTQ's or AWQ's integers."""
    form = weight.arguments
    assert isinstance(form, IntegerGroups)
    words, scales, *optional_inputs = weight.inputs
    optional = dict(zip(form.optional, optional_inputs, strict=True))
    order = [optional["order"]] if "order" in optional else []
    zero, (rows, columns) = optional["zero"], tensor.shape
    groups = scales.entry.shape[0]
    kind = "repacked_gptq" if form.transposed else "repacked_awq"
    packed_shape = (rows, columns * form.bits // WORD_BITS)
    packed = ComputedTensor(kind, "int32", packed_shape, (words, *order), form)
    scale_inputs = (scales, zero) if form.symmetric else (scales,)
    parts = [
        _RepackedPart(PACKED, packed),
        _RepackedPart(
            SCALE,
            ComputedTensor(
                "repacked_scales", scales.entry.dtype, (rows, groups), scale_inputs, form
            ),
        ),
        _RepackedPart(SHAPE, ComputedTensor("to_weight_shape", "int64", (2,), (), (rows, columns))),
    ]
    if not form.symmetric:
        shape = (-(-rows * form.bits // WORD_BITS), groups)
        zeros = ComputedTensor("repacked_zeros", "int32", shape, (zero, scales), form)
        parts.append(_RepackedPart(".weight_zero_point", zeros))
    settings = build_weight_settings("int", form.bits, "group", form.group)
    settings["symmetric"] = form.symmetric
    return _RepackedWeight(tuple(parts), "pack-quantized", settings, has_one_group=groups == 1)


def _repack_nvfp4(_: OutputTensor, weight: ComputedTensor) -> _RepackedWeight:
    """Repack ModelOpt's NVFP4, which only renames tensors and inverts the global scale."""
    packed, scale, global_scale = weight.inputs
    parts = (
        _RepackedPart(PACKED, packed.entry),
        _RepackedPart(SCALE, scale.entry),
        _RepackedPart(".weight_global_scale", _build_reciprocal(global_scale)),
    )
    return _RepackedWeight(parts, "nvfp4-pack-quantized", _NVFP4_WEIGHTS)


def _build_reciprocal(scale: ComputeInput) -> ComputedTensor:
    return ComputedTensor("reciprocal", "float32", (1,), (scale,))


_NVFP4_WEIGHTS = build_weight_settings("float", 4, "tensor_group", NVFP4_GROUP_SIZE, FP8)
_NVFP4_INPUTS = {**_NVFP4_WEIGHTS, "dynamic": "local", "observer": "static_minmax"}
_REPACKERS: Mapping[str, Callable[[OutputTensor, ComputedTensor], _RepackedWeight]] = {
    "int_groups": _repack_integers,
    "int_rows": _repack_integers,
    "fp4_groups": _repack_nvfp4,
}
"""How to repack a weight, by the kind that would dequantize it."""
_SUPPORTED_SCHEMES = ("AWQ", "GPTQ", "ModelOpt NVFP4")


def _build_config(
    weights: Sequence[_RepackedWeight], catalog: Catalog
) -> Callable[[Sequence[str]], dict[str, object]]:
    """Return the builder of the quantization config, or raise if the weights need several."""
    if all(weight.has_one_group for weight in weights):
        weights = [
            replace(weight, weights={**weight.weights, "strategy": "channel", "group_size": None})
            for weight in weights
        ]
    first = weights[0]
    if any((weight.weights, weight.inputs) != (first.weights, first.inputs) for weight in weights):
        raise MappingError(
            "the weights have different group sizes or activations",
            where=catalog.path,
            why="one quantization config must describe all of them",
            hint=f"use {format_option('--dequantize')} instead of {format_option('--repack')}",
        )
    return make_config_builder(first.layout, first.weights, first.inputs)
