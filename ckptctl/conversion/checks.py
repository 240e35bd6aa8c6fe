"""Preflight checks of a conversion: options, source and output names, casts to float8."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ckptctl import dtypes, families, formats
from ckptctl.catalog import Catalog
from ckptctl.conversion.conversion_options import ConversionOptions
from ckptctl.errors import (
    RefusedError,
    SourceNotFoundError,
    UsageError,
    listed,
    spell_option,
)
from ckptctl.formats.base import OutputTensor, WritableFormat
from ckptctl.formats.sidecar_files import WEIGHTS
from ckptctl.options import about, among
from ckptctl.planner.layouts import is_base
from ckptctl.planner.mapping.adapters import ADAPTER_LAYOUTS
from ckptctl.planner.mapping.mapped import ComposedTensor
from ckptctl.storage.computed import can_overflow
from ckptctl.storage.execution.execution_options import MIN_THREAD_BYTES
from ckptctl.storage.paths import parse_path
from ckptctl.storage.urls import is_url
from ckptctl.tree import TreePath
from ckptctl.units import counted, format_bytes


def require_sense(asked: ConversionOptions, target: WritableFormat) -> None:
    """Raise if options conflict or do not apply to the target."""
    if asked.memory is not None:
        threads = asked.execution().threads
        least = MIN_THREAD_BYTES * threads
        if asked.execution().memory < least:
            raise UsageError(
                f"{spell_option('--memory')} must be at least {format_bytes(least)} for "
                f"{counted(threads, 'thread')}"
            )
    _require_option_of(asked, target)
    if asked.only == "all" and not target.nested:
        raise UsageError(
            f"{spell_option(f'--to {target.name}')} cannot store training state "
            f"({spell_option('--only all')}, {spell_option('--optimizer')}); use dcp, mcore or "
            "torch"
        )
    if asked.dequantize is not None and asked.dtype not in (None, asked.dequantize):
        raise UsageError(
            f"{spell_option('--dtype')} conflicts with {spell_option('--dequantize')} (they name "
            "different dtypes)"
        )
    if asked.quantize is None and (asked.quantize_also or asked.quantize_not):
        raise UsageError(
            f"{spell_option('--quantize-also')} and {spell_option('--quantize-not')} require "
            f"{spell_option('--quantize')}"
        )
    others = (None, target.layout, *target.adapter_layouts)
    if target.layout is not None and not target.other_layouts and asked.to_layout not in others:
        raise UsageError(
            f"{spell_option('--to-layout')} is not supported with "
            f"{spell_option(f'--to {target.name}')} (always layout {target.layout})"
        )
    for option, layout in (("--from-layout", asked.from_layout), ("--to-layout", asked.to_layout)):
        if layout not in (None, target.layout) and not is_base(layout):
            with about(option):
                named = [families.family(asked.model_type)] if asked.model_type else None
                known = families.layouts(named or families.families().values())
                layouts = [*dict.fromkeys([*known, *ADAPTER_LAYOUTS])]
                among(str(layout), "layout", layouts, lists="ckptctl models")


def _require_option_of(asked: ConversionOptions, target: WritableFormat) -> None:
    """Raise if an option is given that only applies to other formats."""
    unsupported = {
        "--max-shard-size": asked.max_shard_size is not None and not target.sharded,
        "--like": asked.like is not None and not target.cut_by,
        "--carry": bool(asked.carry) and target.single_file,
        "--stack-layers": asked.stack_layers and not target.stacks,
    }
    for name, wrong in unsupported.items():
        if wrong:
            single = " (single-file format)" * (target.single_file and name != "--stack-layers")
            to = spell_option(f"--to {target.name}")
            raise UsageError(f"{spell_option(name)} is not supported with {to}{single}")
    elsewhere = {
        ("--mp", "meta", "deepseek"): asked.mp > 1 and not target.parallel,
        ("--quantize", "hf"): asked.quantize is not None and target.name != "hf",
        ("--experts", "peft"): asked.experts is not None and target.name != "peft",
    }
    for (name, *known), wrong in elsewhere.items():
        if wrong:
            only = " and ".join(spell_option(f"--to {one}") for one in known)
            raise UsageError(f"{spell_option(name)} only applies to {only}")


def existing_source(src: str | TreePath, dst: str | TreePath) -> TreePath:
    """Return the source. If it is missing, hint that the arguments may be swapped."""
    try:
        return formats.existing(src)
    except SourceNotFoundError as error:
        there = parse_path(dst)
        if not is_url(there) and os.path.lexists(there) and formats.sniff(there):
            error.hint = f"pass the source before the destination (`{dst}` is a checkpoint)"
        raise


def require_fitting_name(destination: TreePath, target: WritableFormat) -> None:
    """Raise if the destination's suffix belongs to another kind of output."""
    folder, safe = destination.with_suffix(""), destination.suffix == ".safetensors"
    if target.single_file and safe:
        raise UsageError(
            f"{spell_option(f'--to {target.name}')} does not write safetensors, but the "
            "destination has that suffix",
            where=str(destination),
            hint=f"pass {spell_option('--to hf')} to write a folder of safetensors, as in "
            f"`{folder}`",
        )
    file = destination.suffix in WEIGHTS and destination.suffix != ".ckpt"  # Lightning's folders
    if target.single_file or not file or destination.is_dir():
        return
    other = "" if safe else f"pass {spell_option('--to torch')} to write a file, or "
    raise UsageError(
        f"{spell_option(f'--to {target.name}')} writes a folder, but the destination is named "
        "like a file",
        where=str(destination),
        hint=f"{other}name a folder, as in `{folder}`",
    )


def require_scaled(
    asked: ConversionOptions,
    mapped: Mapping[str, ComposedTensor],
    catalog: Catalog,
    tensors: Sequence[OutputTensor],
) -> None:
    """Raise if weights would be cast to float8 without scales."""
    if asked.allow_overflow:
        return
    narrow = {name for name, one in dtypes.BY_NAME.items() if one.floating and one.itemsize == 1}
    float8 = {one.name: one.dtype for one in tensors if one.dtype in narrow}
    cast = [
        name
        for name, composed in mapped.items()
        if name in float8 and any(_made(catalog, key, float8[name]) for key in composed.keys)
    ]
    if cast:
        raise RefusedError(
            f"{spell_option(f'--dtype {asked.dtype}')} would write "
            f"{counted(len(cast), 'float8 tensor')} without scales",
            why=f"{listed(cast)}: small weights would become 0 and large ones the maximum of "
            "the dtype; no loader supports such a model",
            hint=f"pass {spell_option('--allow-overflow')} to write them anyway",
        )


def _made(catalog: Catalog, name: str, dtype: str) -> bool:
    """Check if a tensor is cast to *dtype*, while it is copied or while it is computed."""
    source = catalog.tensors[name]
    computed = (catalog.computed.get(extent.file) for extent in source.extents)
    return source.dtype != dtype or any(can_overflow(made) for made in computed if made)
