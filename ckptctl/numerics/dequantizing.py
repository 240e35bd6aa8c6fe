"""Dequantize a source (``--dequantize``), or require that weights keep their scales.

Dequantized tensors are computed as they are read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ckptctl import dtypes
from ckptctl.catalog import Catalog, TensorEntry
from ckptctl.conversion.assets import CONFIG, Assets, find_assets_folder
from ckptctl.conversion.draft import Draft
from ckptctl.conversion.laying_out import RankSplitter, build_rank_splitter
from ckptctl.errors import (
    DamagedError,
    MappingError,
    RefusedError,
    UnsupportedError,
    UsageError,
    format_option,
    quote_names,
)
from ckptctl.formats.base import OutputTensor
from ckptctl.formats.sidecar_files import (
    QUANTIZATION_CONFIGS,
    read_config_files,
    scan_sidecar_files,
)
from ckptctl.numerics.quantization.schemes.fp8 import FP8
from ckptctl.numerics.quantization.statement import QuantizationConfig, strip_quantization_config
from ckptctl.numerics.quantization.survey import QuantizationSurvey
from ckptctl.numerics.quantized import (
    can_tell_missing_tensors,
    dequantize_catalog,
    find_quantized_tensors,
    is_unquantized,
    list_quantized_weights,
    read_folder_quantization_configs,
    read_quantization_config,
    require_paired_scales,
    survey_leniently,
)
from ckptctl.planner.layouts import HF, LLM_COMPRESSOR
from ckptctl.planner.model_parallel import RankShard
from ckptctl.tree import TreePath
from ckptctl.units import pluralize


def dequantize(draft: Draft) -> Draft:
    """Dequantize the source if ``--dequantize`` is set.

    With ``--fill-from``, an unquantized source is not an error.
    """
    options, catalog = draft.options, draft.catalog
    draft = replace(draft, assets=strip_quantization_configs(draft.assets))
    if options.dequantize is None or (options.fill_from and not find_quantized_tensors(catalog)):
        return draft
    assets_configs = read_assets_quantization_configs(options.assets)
    return draft.with_catalog(dequantize_catalog(catalog, options.dequantize, assets_configs))


def read_assets_quantization_configs(directory: str | TreePath | None) -> list[QuantizationConfig]:
    """Read the quantization configs in the folder of ``--assets``.

    The list is empty if *directory* is None, i.e. if the option is not set.
    """
    if directory is None:
        return []
    root = find_assets_folder(directory)
    names = scan_sidecar_files(root, read_configs=False).assets
    return list(
        read_folder_quantization_configs(root, read_config_files(root).get(CONFIG, {}), names)
    )


def strip_quantization_configs(assets: Assets) -> Assets:
    """Return a copy of *assets* with all quantization configs removed."""
    described = tuple(
        replace(file, content=strip_quantization_config(file.content)) for file in assets.described
    )
    config = assets.documents.get(CONFIG, {})
    sizes = {name: size for name, size in assets.sizes.items() if name not in QUANTIZATION_CONFIGS}
    if strip_quantization_config(config) == config:
        return replace(assets, sizes=sizes, described=described)
    documents = {**assets.documents, CONFIG: strip_quantization_config(config)}
    changed = assets.changed | {CONFIG}
    return replace(assets, sizes=sizes, documents=documents, changed=changed, described=described)


# ------------------------------------------------------------------------- weights and scales


def keep_separate_experts(draft: Draft) -> Draft:
    """Keep the layout of a quantized source with separate experts, unless options set another.

    The layout of the output format has stacks, which could not store the scales.
    """
    options, layout = draft.options, draft.model.layout
    if layout != LLM_COMPRESSOR or options.to_layout or draft.layout != HF:
        return draft
    if options.dequantize or options.repack:
        return draft
    if not find_quantized_tensors(draft.catalog):
        return draft
    return replace(draft, options=replace(options, to_layout=layout))


def check_scales_kept(draft: Draft) -> Draft:
    """Raise if the conversion would separate quantized weights from their scales."""
    names = {draft.model.root + name for name in draft.selection.tensors}
    renamed = not draft.change.keeps_names
    mismatches = require_scales_kept(
        draft.catalog,
        names,
        renamed=renamed,
        dtype=draft.options.dtype,
        allow_missing=draft.options.allow_missing,
    )
    draft.notes.add(*(error.summary for error in mismatches), kind="warning")
    return draft


def require_scales_kept(
    catalog: Catalog,
    selected: Collection[str],
    *,
    renamed: bool,
    dtype: str | None,
    allow_missing: bool = False,
) -> list[UnsupportedError]:
    """Raise if a conversion would separate quantized weights from their scales, or miss some.

    If all tensors are copied under their own names, only missing tensors are errors, and none are
    with *allow_missing*. Errors in weights whose tensors do not fit each other are then returned.
    """
    selected_names = set(selected)
    is_copy = not renamed and dtype is None and catalog.tensors.keys() <= selected_names
    if (is_copy and allow_missing) or is_unquantized(catalog):
        return []
    survey = survey_leniently(catalog)
    for error in survey.errors.values():
        if isinstance(error, DamagedError) or (isinstance(error, UnsupportedError) and not is_copy):
            raise error
    selected_weights = [weight for weight in survey.weights if weight.lead in selected_names]
    without_scales = [
        weight.lead for weight in selected_weights if not selected_names.issuperset(weight.names)
    ]
    if without_scales:
        raise MappingError(
            f"{pluralize(len(without_scales), 'quantized tensor')} would be written without scales",
            where=f"tensor `{without_scales[0]}`",
            why=f"their scales are not selected: {quote_names(without_scales)}",
            hint=f"select both ({format_option('--include')}, {format_option('--exclude')}), "
            "or pass "
            f"{format_option('--dequantize bf16')} to dequantize them",
        )
    if dtype is not None:
        require_quantized_uncast(catalog, selected, dtype, survey)
    if can_tell_missing_tensors(survey, read_quantization_config(catalog).method):
        selected_tensors = {
            name: entry for name, entry in catalog.tensors.items() if name in selected_names
        }
        require_paired_scales(replace(catalog, tensors=selected_tensors))
    return [error for error in survey.errors.values() if isinstance(error, UnsupportedError)]


def require_quantized_uncast(
    catalog: Catalog,
    selected: Collection[str],
    dtype: str,
    survey: QuantizationSurvey | None = None,
) -> None:
    """Raise if a cast to *dtype* would change *selected* quantized weights, or their scales."""
    names = {name for name in selected if _is_changed_by_cast(catalog.tensors[name], dtype)}
    float8_names = {name for name in names if catalog.tensors[name].dtype == FP8}
    quantized_weights = (survey or survey_leniently(catalog)).weights if names else []
    cast_names = [
        weight.lead
        for weight in quantized_weights
        if not (names if weight.lead in selected else float8_names).isdisjoint(weight.names)
    ]
    if cast_names:
        raise UsageError(
            f"{format_option('--dtype')} cannot cast quantized tensors or their scales "
            f"({len(cast_names):,} found)",
            where=f"tensor `{cast_names[0]}`",
            why="scales would be ignored, rounded, or of a dtype that loaders do not expect; "
            f"quantized tensors: {quote_names(cast_names)}",
            hint=f"pass {format_option('--dequantize bf16')} to dequantize them",
        )


def _is_changed_by_cast(entry: TensorEntry, dtype: str) -> bool:
    return dtypes.BY_NAME[entry.dtype].floating and entry.dtype != dtype


# ------------------------------------------------------------------------------------- blocks

Block = tuple[int, int]


def check_blocks_intact(draft: Draft) -> Draft:
    """Raise if sharding over ranks would split a scale block of a float8 weight."""
    ranks = draft.ranks
    divide = build_rank_splitter(draft.change, draft.target.layout) if ranks > 1 else None
    if divide is None:
        return draft
    documents = {**draft.located.documents, **draft.assets.documents}
    by_name = {tensor.name: tensor for tensor in draft.tensors}
    targets = {key: name for name, composed in draft.mapped.items() for key in composed.keys}
    blocks = {
        tensor: weight.scale_blocks
        for weight in list_quantized_weights(replace(draft.located, documents=documents))
        if weight.scale_blocks and (tensor := by_name.get(targets.get(weight.lead, "")))
    }
    split_tensors = {
        tensor: block
        for tensor, block in blocks.items()
        if _splits_a_block(divide(tensor, ranks), tensor.shape, block)
    }
    if not split_tensors:
        return draft
    first_tensor, block = next(iter(split_tensors.items()))
    possible_ranks = next(
        count for count in range(ranks - 1, 0, -1) if _keeps_blocks(split_tensors, divide, count)
    )
    raise RefusedError(
        f"{pluralize(ranks, 'rank')} would split float8 weights inside blocks of "
        f"{block[0]}x{block[1]}",
        where=f"tensor `{first_tensor.name}` {list(first_tensor.shape)}",
        why=f"{quote_names([tensor.name for tensor in split_tensors])}: a block has one "
        "scale, so part of a "
        "block would be read with the scale of another rank",
        hint=f"pass {format_option(f'--mp {possible_ranks}')} to keep blocks intact, or "
        f"{format_option('--dequantize bf16')} to write unquantized weights",
    )


def _splits_a_block(
    shares: Sequence[RankShard | None], shape: tuple[int, ...], block: Block
) -> bool:
    """Return whether a rank's shard of a *shape* matrix starts or ends inside a scale block."""
    return any(
        offset % block_size or ((offset + size) % block_size and offset + size != full_size)
        for share in shares
        if share is not None
        for piece in share.pieces
        for offset, size, full_size, block_size in zip(
            piece.box.offsets[-2:], piece.box.sizes[-2:], shape[-2:], block, strict=True
        )
    )


def _keeps_blocks(
    blocks_by_tensor: Mapping[OutputTensor, Block], divide: RankSplitter, ranks: int
) -> bool:
    try:
        return not any(
            _splits_a_block(divide(tensor, ranks), tensor.shape, block)
            for tensor, block in blocks_by_tensor.items()
        )
    except MappingError:
        return False
