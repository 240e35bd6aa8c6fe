"""Restore PEFT's order of the columns of B in adapters of stacked experts that unsloth trained.

PEFT reads B ``[out, R E]`` with the expert index fastest: expert e has the columns e, e + E, ... .
unsloth before unsloth-zoo's change 1269 of 2026-09-17 trained B with R consecutive columns for each
expert, under the same names and in the same shapes. Since change 1232, its ``adapter_config.json``
states the order: ``lora_B_layout`` is ``grouped_by_expert`` or ``rank_major``, and
``unsloth_fused_expert_lora`` repeats it for each parameter, with the number of experts.

Source: ``temporary_patches/moe_utils.py`` in unsloth-zoo, and the tests of its marker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ckptctl.adapters.peft import BASE_LAYERS, TARGET_PARAMETERS, find_adapter_config
from ckptctl.catalog import Box, Catalog, TensorEntry
from ckptctl.conversion.sources import locate_tensors
from ckptctl.errors import MappingError, UnsupportedError, quote_names
from ckptctl.formats.peft import CONFIG
from ckptctl.planner.config_facts import Json
from ckptctl.planner.copying.blocks import build_view
from ckptctl.planner.strided import StridedTensor
from ckptctl.units import pluralize

LAYOUT_KEY, DETAILS_KEY = "lora_B_layout", "unsloth_fused_expert_lora"
GROUPED, RANK_MAJOR = "grouped_by_expert", "rank_major"
B = ".lora_B.weight"


def restore_column_order(catalog: Catalog) -> Catalog:
    """Reorder the columns of B to PEFT's order if the adapter's config states unsloth's order.

    Raises:
        UnsupportedError: The stated order is unknown, or differs between parameters.
        MappingError: The number of experts is unknown.
    """
    config = find_adapter_config(catalog) or {}
    if LAYOUT_KEY not in config and DETAILS_KEY not in config:
        return catalog
    details = list(_iterate_details(config))
    stated = (config.get(LAYOUT_KEY), *(value.get(LAYOUT_KEY) for value in details))
    layouts = {str(layout) for layout in stated if layout is not None}
    if layouts <= {RANK_MAJOR}:
        return catalog
    if layouts != {GROUPED}:
        raise UnsupportedError(
            f"unsupported `{LAYOUT_KEY}`: {quote_names(sorted(layouts))}",
            where=CONFIG,
            why=f"only {GROUPED} or {RANK_MAJOR} for all parameters is supported",
        )
    names = list(_list_stacked_factors(catalog, config))
    tensors = dict(catalog.tensors)
    for name, entry in locate_tensors(catalog, names).tensors.items():
        tensors[name] = _reorder_columns(entry, _count_experts(entry, config, details))
    kept = {key: value for key, value in config.items() if key != DETAILS_KEY}
    documents = {**catalog.documents, CONFIG: {**kept, LAYOUT_KEY: RANK_MAJOR}}
    note = (
        f"reordered the columns of {pluralize(len(names), 'factor')} B of stacked experts, which "
        f"are grouped by expert (`{LAYOUT_KEY}`), to PEFT's order"
    )
    notes = (*catalog.notes, note)
    return replace(catalog, tensors=tensors, documents=documents, notes=notes)


def _reorder_columns(entry: TensorEntry, experts: int) -> TensorEntry:
    """Return a view of B whose columns are in PEFT's order, with extents for each rank index."""
    rank = entry.shape[1] // experts
    columns = StridedTensor.from_entry(entry).split(1, (experts, rank))
    extents = [
        replace(
            extent,
            box=Box((extent.box.offsets[0], first + extent.box.offsets[1]), extent.box.sizes),
        )
        for index, first in enumerate(range(0, entry.shape[1], experts))
        for extent in build_view(entry, columns.select(2, index)).extents
    ]
    return replace(entry, extents=tuple(extents), alias_of=None)


def _iterate_details(config: Json) -> Iterator[Json]:
    """Yield the statements on single parameters."""
    details = config.get(DETAILS_KEY)
    parameters = details.get("parameters") if isinstance(details, Mapping) else None
    if isinstance(details, Mapping) and details.get("lora_A_layout", GROUPED) != GROUPED:
        raise UnsupportedError(
            f"unsupported `lora_A_layout`: {details['lora_A_layout']!r}", where=CONFIG
        )
    for value in parameters.values() if isinstance(parameters, Mapping) else ():
        if isinstance(value, Mapping):
            yield value


def _list_stacked_factors(catalog: Catalog, config: Json) -> Iterator[str]:
    """Yield the names of the factors B of the modules in ``target_parameters``."""
    targets = config.get(TARGET_PARAMETERS)
    modules = (
        {str(target).rpartition(".")[0] for target in targets}
        if isinstance(targets, list)
        else set()
    )
    for name, entry in catalog.tensors.items():
        module = BASE_LAYERS.sub("", name.removesuffix(B))
        is_target = any(f".{module}".endswith(f".{path}") for path in modules if path)
        if name.endswith(B) and is_target and len(entry.shape) == 2:
            yield name


def _count_experts(entry: TensorEntry, config: Json, details: list[Json]) -> int:
    """Return the number of experts of the factor B in *entry*."""
    counts = {value["num_experts"] for value in details if "num_experts" in value}
    rank = config.get("r")
    if not counts and isinstance(rank, int) and rank > 0 and not config.get("rank_pattern"):
        counts = {entry.shape[1] // rank}
    (count,) = counts if len(counts) == 1 else (None,)
    if not isinstance(count, int) or count < 1 or entry.shape[1] % count:
        raise MappingError(
            "the number of experts is unknown",
            where=f"tensor `{entry.name}`",
            why=f"{CONFIG} states {count!r}, and B has {pluralize(entry.shape[1], 'column')}",
            hint=f"set `num_experts` of each parameter in `{DETAILS_KEY}` of {CONFIG}",
        )
    return count
