"""``--repack``: store quantized weights in another format without requantizing.

The source is dequantized only in the plan: its model is recognized and mapped by the names of
unquantized weights, and then each weight is replaced by its stored parts. The dequantized tensors
are never computed.

In MXFP4, the target layout may split or merge experts and reorder rows, because the bytes and
scales of a row stay together.

Sources: the converters and compressors of compressed-tensors 0.20; ``modeling/moe/gpt_oss.py`` of
llm-compressor; ``Mxfp4Config`` and ``integrations/mxfp4.py`` of transformers;
``convert_hf_quant_config_format`` in ModelOpt's ``torch/export/convert_hf_config.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from ckptctl import families
from ckptctl.catalog import (
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
from ckptctl.numerics.packed_columns import arrange_packed_columns, find_column_dim
from ckptctl.numerics.quantization.formulas import Fp4Groups, IntegerGroups, ScaleBlocks
from ckptctl.numerics.quantization.recipes import (
    FP4,
    FP8,
    MX_GROUP_SIZE,
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
from ckptctl.numerics.quantization.schemes.mxfp4 import SWAPPED_ENDING
from ckptctl.numerics.quantized import (
    dequantize_catalog,
    read_quantization_config,
    survey_catalog,
)
from ckptctl.numerics.quantizing import list_ignored_modules
from ckptctl.planner.layouts import HF, LLM_COMPRESSOR, LayoutTensor
from ckptctl.planner.mapping.logical import build_placeholder
from ckptctl.planner.mapping.mapped import ComposedTensor, SourceTensor
from ckptctl.planner.strided import StridedTensor
from ckptctl.units import pluralize

COMPRESSED_TENSORS, MXFP4 = "compressed-tensors", "mxfp4"
"""Values of ``--repack``, which are values of ``quant_method``."""
BLOCKS, SCALES = SWAPPED_ENDING, "_scales"
INPUT_SCALE = ".input_scale"
CACHE_SCALES = {".k_proj": ".k_scale", ".v_proj": ".v_scale"}
"""Suffixes of the modules in which ModelOpt stores scales of the KV cache, and of these scales.

compressed-tensors stores the scales in the parent of these modules.
"""
PLANNED_DTYPE = "bfloat16"
"""Dtype of the dequantized weights in the plan, which nothing reads."""


Source: TypeAlias = ComputedTensor | TensorEntry


def _build_key(name: str) -> str:
    """Return the key of a tensor that repacked tensors are composed of."""
    return build_computed_name(f"{name}@repacked")


@dataclass(frozen=True, slots=True)
class _RepackedPart:
    """Stored tensor of a repacked weight.

    Attributes:
        name: Name of the tensor in the output.
        dtype: Name of its torch dtype.
        sources: Keys and values of the tensors from which it is composed: stored ones, or virtual
            files that compute them.
        tensor: Elements of the tensor, with placeholders numbered like *sources*.
    """

    name: str
    dtype: str
    sources: tuple[tuple[str, Source], ...]
    tensor: StridedTensor

    @classmethod
    def from_source(cls, name: str, source: Source) -> _RepackedPart:
        """Build a part that has all elements of *source* in their order."""
        tensor = build_placeholder(0, source.shape)
        return cls(name, source.dtype, ((_build_key(name), source),), tensor)

    def as_vector(self) -> _RepackedPart:
        """Return the same elements in one dimension."""
        return replace(self, tensor=self.tensor.merge(0, len(self.tensor.shape)))

    def as_column(self) -> _RepackedPart:
        """Return the same elements as a matrix with one column."""
        return replace(self, tensor=self.as_vector().tensor.merge(1, 0))


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
        _require_repackable(weight, options.repack or "")
    modules = [
        weight.key.removesuffix(WEIGHT)
        for weight in survey.weights
        if _get_scheme(weight).startswith("ModelOpt")
    ]
    used = {f"{module}{INPUT_SCALE}" for module in modules}
    if _read_cache_settings(draft):
        used |= {name for module in modules for name in _list_cache_scales(module)}
    unsupported = [name for name in survey.dropped if name not in used]
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
    if any(_get_scheme(weight) == "ModelOpt NVFP4" for weight in survey.weights):
        note += "; global scales are stored as their reciprocals, rounded to fp32"
    return draft.with_catalog(replace(dequantized, notes=(*catalog.notes, note)))


def choose_layout(draft: Draft) -> Draft:
    """Choose the layout with per-expert weights, unless ``--to-layout`` names one.

    Only families whose tables have quantized stacks need it. Other stacks are not repacked.
    """
    options, model = draft.options, draft.model
    if options.repack != COMPRESSED_TENSORS or options.to_layout or model.model_type is None:
        return draft
    family = families.family(model.model_type)
    if draft.layout != HF or LLM_COMPRESSOR not in family.layouts or not family.quantized:
        return draft
    draft.notes.add(
        f"experts are stored one by one (layout {LLM_COMPRESSOR}), because "
        f"{COMPRESSED_TENSORS} has no format for stacks"
    )
    return replace(draft, options=replace(options, to_layout=LLM_COMPRESSOR))


# ---------------------------------------------------------------------------------- schemes


def _get_scheme(weight: QuantizedWeight) -> str:
    """Return the name of a scheme that can be repacked, or an empty string."""
    form, description = weight.arguments, weight.description
    if weight.kind in ("int_groups", "int_rows"):
        return "AWQ" if weight.kind == "int_rows" else "GPTQ"
    if weight.kind == "mxfp4":
        return "MXFP4"
    if isinstance(form, Fp4Groups) and not form.divided and len(weight.inputs) == 3:
        return "ModelOpt NVFP4"
    if weight.kind == "block_fp8" and description.startswith("ModelOpt FP8"):
        return "ModelOpt FP8"
    return ""


def _require_repackable(weight: QuantizedWeight, target: str) -> None:
    """Raise if *target* cannot store *weight* without changing its values."""
    form, why = weight.arguments, ""
    is_packed = weight.description.startswith(COMPRESSED_TENSORS)
    if weight.kind == "mxfp4" if target == MXFP4 else is_packed:
        raise UsageError(
            f"the checkpoint already has the format {target}",
            where=f"tensor `{weight.lead}`",
            hint=f"omit {format_option('--repack')}",
        )
    if target == MXFP4:
        if not (is_packed and _is_mxfp4(weight)):
            why = f"only MXFP4 of {COMPRESSED_TENSORS} has the same numbers and scales"
    elif not _get_scheme(weight):
        why = f"only {', '.join(_SUPPORTED_SCHEMES)} can be repacked"
    elif weight.kind != "mxfp4" and len(weight.shape) != 2:
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


# ------------------------------------------------------------------------------- stored parts


def repack(draft: Draft) -> Draft:
    """Replace the weights that :func:`prepare_repacking` dequantized by repacked tensors."""
    entries, computed = dict(draft.located.tensors), dict(draft.located.computed)
    mapped = dict(draft.mapped)
    repacked: list[_RepackedWeight] = []
    parts: dict[str, str] = {}
    tensors: list[OutputTensor] = []
    for tensor in draft.tensors:
        weights = _find_quantized_weights(draft, tensor)
        if not weights:
            tensors.append(tensor)
            continue
        del mapped[tensor.name]
        repacked_weight = _repack_weight(draft, tensor, weights)
        repacked.append(repacked_weight)
        for part in repacked_weight.parts:
            for key, source in part.sources:
                if isinstance(source, ComputedTensor):
                    computed[key], entries[key] = source, source.to_entry(key, (key,), key)
                else:
                    entries[key] = replace(source, name=key, path=(key,), alias_of=None)
            read = tuple(SourceTensor(key, source.shape, part.name) for key, source in part.sources)
            mapped[part.name] = ComposedTensor(part.name, part.tensor, read)
            parts[part.name] = tensor.name
            tensors.append(OutputTensor(part.name, part.dtype, part.tensor.shape, (part.name,)))
    if not repacked:
        raise UsageError(
            f"no weights to {format_option('--repack')}",
            where=draft.catalog.path,
            why="no quantized weight is selected",
        )
    quantization = Quantization(draft.tensors, parts, is_lossless=True)
    config = _make_config_builder(draft, repacked)
    quantization = replace(quantization, config=config(list_ignored_modules(quantization)))
    located = replace(draft.located, tensors=entries, computed=computed)
    return replace(
        draft, located=located, mapped=mapped, tensors=tuple(tensors), quantization=quantization
    )


def _find_quantized_weights(draft: Draft, tensor: OutputTensor) -> list[ComputedTensor]:
    """Return the virtual file of each source of *tensor*, or an empty list if none was quantized.

    Raises:
        MappingError: The target layout rearranges a weight that must stay as it is, or combines it
            with other tensors.
    """
    composed, located = draft.mapped[tensor.name], draft.located
    files = [
        {extent.file for extent in located.tensors[source.key].extents}
        for source in composed.sources
    ]
    weights = [
        located.computed[file]
        for names in files
        for file in names
        if file in located.computed and located.computed[file].kind in (*_REPACKERS, "mxfp4")
    ]
    if not weights:
        return []
    is_movable = all(map(_is_mxfp4, weights)) and len(weights) == len(files)
    is_unchanged = composed.is_rename and tensor.name.endswith(WEIGHT)
    if tensor.alias_of or not (is_movable or is_unchanged):
        raise _rearranged_error(draft, tensor)
    return weights


def _rearranged_error(draft: Draft, tensor: OutputTensor) -> MappingError:
    return MappingError(
        "cannot repack a weight that the target layout rearranges",
        where=f"tensor `{tensor.name}`",
        why=f"it is composed of {quote_names(list(draft.mapped[tensor.name].keys))}",
        hint=f"use the layout of the source, or pass {format_option('--dequantize bf16')}",
    )


def _repack_weight(
    draft: Draft, tensor: OutputTensor, weights: Sequence[ComputedTensor]
) -> _RepackedWeight:
    first = weights[0]
    if _is_mxfp4(first):
        return _repack_mxfp4(draft, tensor, weights)
    repacked_weight = _REPACKERS[first.kind](tensor, first)
    if first.kind not in _INPUT_SETTINGS:
        return repacked_weight
    module = first.inputs[0].entry.name.removesuffix(WEIGHT)
    target_module = tensor.name.removesuffix(WEIGHT)
    parts, inputs = list(repacked_weight.parts), repacked_weight.inputs
    if (name := module + INPUT_SCALE) in draft.source.tensors:
        scale, inputs = _read_scale(draft, name), _INPUT_SETTINGS[first.kind]
        if first.kind == "fp4_groups":
            source = _build_reciprocal(scale)
            parts.append(_RepackedPart.from_source(f"{target_module}.input_global_scale", source))
        else:
            part = _RepackedPart.from_source(target_module + INPUT_SCALE, scale.entry)
            parts.append(part.as_vector())
    for name, suffix in _list_cache_scales(module).items():
        if name in draft.source.tensors:
            if not target_module.endswith(suffix):
                raise _rearranged_error(draft, tensor)
            target_name = target_module.removesuffix(suffix) + CACHE_SCALES[suffix]
            part = _RepackedPart.from_source(target_name, _read_scale(draft, name).entry)
            parts.append(part.as_vector())
    return replace(repacked_weight, parts=tuple(parts), inputs=inputs)


def _list_cache_scales(module: str) -> dict[str, str]:
    """Map the name of each scale of the KV cache that ModelOpt stores in *module* to a suffix.

    The suffix is that of the module in :data:`CACHE_SCALES`.
    """
    return {
        module + scale: suffix for suffix, scale in CACHE_SCALES.items() if module.endswith(suffix)
    }


def _read_scale(draft: Draft, name: str) -> ComputeInput:
    source = locate_tensors(draft.source, [name])
    return ComputeInput(source.root, source.tensors[name])


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
    scale_inputs = (scales, zero) if form.symmetric else (scales,)
    sources = {
        PACKED: ComputedTensor(kind, "int32", packed_shape, (words, *order), form),
        SCALE: ComputedTensor(
            "repacked_scales", scales.entry.dtype, (rows, groups), scale_inputs, form
        ),
        SHAPE: ComputedTensor("to_weight_shape", "int64", (2,), (), (rows, columns)),
    }
    if not form.symmetric:
        shape = (-(-rows * form.bits // WORD_BITS), groups)
        zeros = ComputedTensor("repacked_zeros", "int32", shape, (zero, scales), form)
        sources[".weight_zero_point"] = zeros
    settings = build_weight_settings("int", form.bits, "group", form.group)
    settings["symmetric"] = form.symmetric
    parts = tuple(_build_parts(tensor, sources))
    return _RepackedWeight(parts, "pack-quantized", settings, has_one_group=groups == 1)


def _build_parts(tensor: OutputTensor, sources: Mapping[str, Source]) -> Iterator[_RepackedPart]:
    """Yield the stored tensors of the weight *tensor*, whose names end in the keys of *sources*."""
    module = tensor.name.removesuffix(WEIGHT)
    for suffix, source in sources.items():
        yield _RepackedPart.from_source(module + suffix, source)


def _repack_nvfp4(tensor: OutputTensor, weight: ComputedTensor) -> _RepackedWeight:
    """Repack ModelOpt's NVFP4, which only renames tensors and inverts the global scale."""
    packed, scale, global_scale = weight.inputs
    sources: dict[str, Source] = {
        PACKED: packed.entry,
        SCALE: scale.entry,
        ".weight_global_scale": _build_reciprocal(global_scale),
    }
    parts = tuple(_build_parts(tensor, sources))
    return _RepackedWeight(parts, "nvfp4-pack-quantized", _NVFP4_WEIGHTS)


def _build_reciprocal(scale: ComputeInput) -> ComputedTensor:
    return ComputedTensor("reciprocal", "float32", (1,), (scale,))


def _repack_fp8(tensor: OutputTensor, weight: ComputedTensor) -> _RepackedWeight:
    """Repack ModelOpt's FP8, which only changes the shapes of scales.

    Weights with one scale per row have no static scales of activations, because programs quantize
    each token dynamically (``FP8_PER_CHANNEL_PER_TOKEN``).
    """
    form, (elements, scale) = weight.arguments, weight.inputs
    assert isinstance(form, ScaleBlocks)
    numbers, scales = _build_parts(tensor, {WEIGHT: elements.entry, SCALE: scale.entry})
    if form.rows == 1 and weight.shape[0] > 1:
        parts = (numbers, scales.as_column())
        return _RepackedWeight(parts, "float-quantized", _FP8_ROWS, _FP8_TOKENS)
    return _RepackedWeight((numbers, scales.as_vector()), "float-quantized", _FP8_TENSOR)


def _is_mxfp4(weight: ComputedTensor | QuantizedWeight) -> bool:
    """Return whether a weight is MXFP4, of gpt-oss or of compressed-tensors."""
    is_packed = weight.kind == "fp4_groups" and weight.arguments == Fp4Groups(MX_GROUP_SIZE)
    return weight.kind == "mxfp4" or (is_packed and len(weight.inputs) == 2)


def _repack_mxfp4(
    draft: Draft, tensor: OutputTensor, weights: Sequence[ComputedTensor]
) -> _RepackedWeight:
    """Repack MXFP4, whose bytes and scales follow the rows of the weights."""
    composed, columns = draft.mapped[tensor.name], weights[0].shape[-1]
    source_dims = [
        len(weight.shape) - (2 if weight.inputs[0].entry.name.endswith(BLOCKS) else 1)
        for weight in weights
    ]
    dim = find_column_dim(composed, source_dims)
    if dim is None or any(source.offset for source in composed.sources):
        raise _rearranged_error(draft, tensor)
    name, is_stacked = tensor.name, draft.options.repack == MXFP4
    if not is_stacked and not (name.endswith(WEIGHT) and len(tensor.shape) == 2):
        raise MappingError(
            "cannot repack stacked experts",
            where=f"tensor `{name}`",
            why=f"the shape is {list(tensor.shape)}, and programs require one tensor per expert",
            hint=f"pass {format_option(f'--to-layout {LLM_COMPRESSOR}')}",
        )
    if is_stacked and not _has_mxfp4_tensors(draft, name):
        raise MappingError(
            f"the target layout has no tensors `{BLOCKS}` and `{SCALES}` for this weight",
            where=f"tensor `{name}`",
            why="programs read MXFP4 of this format only for experts of gpt-oss",
            hint=f"use {format_option('--dequantize')} instead of {format_option('--repack')}",
        )
    module = name if is_stacked else name.removesuffix(WEIGHT)
    parts = []
    for place, suffix in enumerate((BLOCKS, SCALES) if is_stacked else (PACKED, SCALE)):
        read = [weight.inputs[place] for weight in weights]
        sources = tuple(
            (_build_key(item.entry.name), _check_powers(item) if place else item.entry)
            for item in read
        )
        shapes = [item.entry.shape for item in read]
        arranged = arrange_packed_columns(composed, dim, source_dims, shapes)
        if suffix == BLOCKS:
            sizes = (columns // MX_GROUP_SIZE, MX_GROUP_SIZE // 2)
            arranged = arranged.split(len(arranged.shape) - 1, sizes)
        parts.append(_RepackedPart(module + suffix, FP4, sources, arranged))
    return _RepackedWeight(tuple(parts), "mxfp4-pack-quantized", _MXFP4_WEIGHTS)


def _check_powers(scales: ComputeInput) -> ComputedTensor:
    return ComputedTensor("checked_powers", "uint8", scales.entry.shape, (scales,))


def _has_mxfp4_tensors(draft: Draft, name: str) -> bool:
    """Return whether the tables list the tensors that store the weight *name* in MXFP4."""
    family, layout = draft.change.family, draft.change.target_layout
    if family is None or layout is None:
        return False
    table, key = family.get_layout(layout).table, name.removeprefix(draft.output_root)
    matches = [table.find_match(key + suffix) for suffix in (BLOCKS, SCALES)]
    return all(match and isinstance(match[0], LayoutTensor) for match in matches)


_FLOAT32 = "float32"
_NVFP4_WEIGHTS = build_weight_settings("float", 4, "tensor_group", NVFP4_GROUP_SIZE, FP8)
_NVFP4_INPUTS = {**_NVFP4_WEIGHTS, "dynamic": "local", "observer": "static_minmax"}
_MXFP4_WEIGHTS = build_weight_settings("float", 4, "group", MX_GROUP_SIZE, "uint8")
_FP8_ROWS = build_weight_settings("float", 8, "channel", scale=_FLOAT32)
_FP8_TOKENS = build_weight_settings("float", 8, "token")
_FP8_TENSOR = build_weight_settings("float", 8, "tensor", scale=_FLOAT32)
_FP8_STATIC = {**_FP8_TENSOR, "dynamic": False}
_INPUT_SETTINGS: Mapping[str, Json] = {"fp4_groups": _NVFP4_INPUTS, "block_fp8": _FP8_STATIC}
"""Settings of activations with static scales, by the kind that would dequantize the weight."""
_REPACKERS: Mapping[str, Callable[[OutputTensor, ComputedTensor], _RepackedWeight]] = {
    "int_groups": _repack_integers,
    "int_rows": _repack_integers,
    "fp4_groups": _repack_nvfp4,
    "block_fp8": _repack_fp8,
}
"""How to repack a weight that keeps its place, by the kind that would dequantize it."""
_SUPPORTED_SCHEMES = ("AWQ", "GPTQ", "ModelOpt NVFP4", "ModelOpt FP8", "MXFP4 of gpt-oss")


# ------------------------------------------------------------------------------------- config


def _read_cache_settings(draft: Draft) -> Json | None:
    """Return the settings of the KV cache for compressed-tensors, or None if it is not quantized.

    Raises:
        MappingError: compressed-tensors has no such format of the KV cache.
    """
    assets_configs = read_assets_quantization_configs(draft.options.assets)
    config = read_quantization_config(draft.source, assets_configs)
    if not config.method.startswith("modelopt"):
        return None
    settings = config.weight_settings
    stated = settings.get("kv_cache_quant_algo", settings.get("kv_cache_scheme"))
    if stated is None:
        return None
    is_fp8 = (
        (stated.get("num_bits"), stated.get("type"), stated.get("dynamic", False))
        == (8, "float", False)
        if isinstance(stated, Mapping)
        else stated == "FP8"
    )
    if not is_fp8:
        raise MappingError(
            f"cannot repack a KV cache in {stated!r}",
            where=config.where,
            why=f"only FP8 with static scales has the same meaning in {COMPRESSED_TENSORS}",
            hint=f"use {format_option('--dequantize')} instead of {format_option('--repack')}",
        )
    return _FP8_STATIC


def _make_config_builder(
    draft: Draft, weights: Sequence[_RepackedWeight]
) -> Callable[[Sequence[str]], dict[str, object]]:
    """Return the builder of the quantization config, or raise if the weights need several."""
    if draft.options.repack == MXFP4:
        return lambda ignored: {"quant_method": MXFP4, "modules_to_not_convert": list(ignored)}
    if all(weight.has_one_group for weight in weights):
        weights = [
            replace(weight, weights={**weight.weights, "strategy": "channel", "group_size": None})
            for weight in weights
        ]
    first = weights[0]
    if any((weight.weights, weight.inputs) != (first.weights, first.inputs) for weight in weights):
        raise MappingError(
            "the weights have different group sizes or activations",
            where=draft.catalog.path,
            why="one quantization config must describe all of them",
            hint=f"use {format_option('--dequantize')} instead of {format_option('--repack')}",
        )
    return make_config_builder(
        first.layout, first.weights, first.inputs, _read_cache_settings(draft)
    )
