"""Preflight checks of a conversion's options, source path, destination name and float8 casts."""

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
    format_option,
    quote_names,
)
from ckptctl.formats.base import OutputTensor, WritableFormat
from ckptctl.formats.sidecar_files import WEIGHT_SUFFIXES
from ckptctl.options import name_option_in_errors, require_choice
from ckptctl.planner.layouts import is_base_layout
from ckptctl.planner.mapping.adapters import ADAPTER_LAYOUTS
from ckptctl.planner.mapping.mapped import ComposedTensor
from ckptctl.storage.compute_device import list_compute_devices
from ckptctl.storage.computed import can_overflow
from ckptctl.storage.execution.execution_options import MIN_THREAD_BYTES
from ckptctl.storage.paths import parse_path
from ckptctl.storage.urls import is_url
from ckptctl.tree import TreePath
from ckptctl.units import format_bytes, pluralize


def require_valid_options(options: ConversionOptions, target: WritableFormat) -> None:
    """Raise if options conflict with each other or do not apply to the target format."""
    if options.memory is not None:
        threads = options.to_execution_options().threads
        min_bytes = MIN_THREAD_BYTES * threads
        if options.to_execution_options().memory < min_bytes:
            raise UsageError(
                f"{format_option('--memory')} must be at least {format_bytes(min_bytes)} for "
                f"{pluralize(threads, 'thread')}"
            )
    _require_supported_options(options, target)
    if options.only == "all" and not target.nested:
        raise UsageError(
            f"{format_option(f'--to {target.name}')} cannot store training state "
            f"({format_option('--only all')}, {format_option('--optimizer')}); use dcp, mcore or "
            "torch"
        )
    if options.dequantize is not None and options.dtype not in (None, options.dequantize):
        raise UsageError(
            f"{format_option('--dtype')} conflicts with {format_option('--dequantize')} (they name "
            "different dtypes)"
        )
    list_compute_devices(options.device)
    if options.quantize is None and (options.quantize_also or options.quantize_not):
        raise UsageError(
            f"{format_option('--quantize-also')} and {format_option('--quantize-not')} require "
            f"{format_option('--quantize')}"
        )
    allowed_layouts = (None, target.layout, *target.adapter_layouts)
    if (
        target.layout is not None
        and not target.other_layouts
        and options.to_layout not in allowed_layouts
    ):
        raise UsageError(
            f"{format_option('--to-layout')} is not supported with "
            f"{format_option(f'--to {target.name}')} (always layout {target.layout})"
        )
    for option, layout in (
        ("--from-layout", options.from_layout),
        ("--to-layout", options.to_layout),
    ):
        if layout not in (None, target.layout) and not is_base_layout(layout):
            with name_option_in_errors(option):
                named = [families.family(options.model_type)] if options.model_type else None
                layout_names = families.list_layouts(named or families.load_families().values())
                layouts = [*dict.fromkeys([*layout_names, *ADAPTER_LAYOUTS])]
                require_choice(str(layout), "layout", layouts, list_command="ckptctl models")


def _require_supported_options(options: ConversionOptions, target: WritableFormat) -> None:
    """Raise if an option is set that only applies to formats other than *target*."""
    unsupported = {
        "--max-shard-size": options.max_shard_size is not None and not target.sharded,
        "--like": options.like is not None and not target.sharding_options,
        "--carry": bool(options.carry) and target.single_file,
        "--stack-layers": options.stack_layers and not target.stacks_layers,
    }
    for name, is_unsupported in unsupported.items():
        if is_unsupported:
            single = " (single-file format)" * (target.single_file and name != "--stack-layers")
            to = format_option(f"--to {target.name}")
            raise UsageError(f"{format_option(name)} is not supported with {to}{single}")
    format_specific = {
        ("--mp", "meta", "deepseek"): options.mp > 1 and not target.parallel,
        ("--quantize", "hf"): options.quantize is not None and target.name != "hf",
        ("--repack", "hf"): options.repack is not None and target.name != "hf",
        ("--experts", "peft"): options.experts is not None and target.name != "peft",
    }
    for (name, *target_names), is_unsupported in format_specific.items():
        if is_unsupported:
            only = " and ".join(
                format_option(f"--to {target_name}") for target_name in target_names
            )
            raise UsageError(f"{format_option(name)} only applies to {only}")


def require_existing_source(src: str | TreePath, dst: str | TreePath) -> TreePath:
    """Return the path of the source, or raise if it is missing.

    The error hints that SRC and DST may be swapped if *dst* is a checkpoint.
    """
    try:
        return formats.to_existing_path(src)
    except SourceNotFoundError as error:
        destination = parse_path(dst)
        if (
            not is_url(destination)
            and os.path.lexists(destination)
            and formats.sniff_formats(destination)
        ):
            error.hint = f"pass the source before the destination (`{dst}` is a checkpoint)"
        raise


def require_matching_suffix(destination: TreePath, target: WritableFormat) -> None:
    """Raise if the suffix of *destination* does not match *target*.

    An example is the suffix ``.pt`` for a format whose checkpoints are folders.
    """
    folder, is_safetensors = destination.with_suffix(""), destination.suffix == ".safetensors"
    if target.single_file and is_safetensors:
        raise UsageError(
            f"{format_option(f'--to {target.name}')} does not write safetensors, but the "
            "destination has that suffix",
            where=str(destination),
            hint=f"pass {format_option('--to hf')} to write a folder of safetensors, as in "
            f"`{folder}`",
        )
    file = (
        destination.suffix in WEIGHT_SUFFIXES and destination.suffix != ".ckpt"
    )  # Lightning's folders
    if target.single_file or not file or destination.is_dir():
        return
    torch_hint = (
        "" if is_safetensors else f"pass {format_option('--to torch')} to write a file, or "
    )
    raise UsageError(
        f"{format_option(f'--to {target.name}')} writes a folder, but the destination is named "
        "like a file",
        where=str(destination),
        hint=f"{torch_hint}name a folder, as in `{folder}`",
    )


def refuse_unscaled_float8(
    options: ConversionOptions,
    mapped: Mapping[str, ComposedTensor],
    catalog: Catalog,
    tensors: Sequence[OutputTensor],
) -> None:
    """Raise if weights would be cast to float8 without scales.

    The option ``--allow-overflow`` disables this check.
    """
    if options.allow_overflow:
        return
    narrow = {
        name for name, tensor in dtypes.BY_NAME.items() if tensor.floating and tensor.itemsize == 1
    }
    float8 = {tensor.name: tensor.dtype for tensor in tensors if tensor.dtype in narrow}
    cast = [
        name
        for name, composed in mapped.items()
        if name in float8 and any(_is_cast(catalog, key, float8[name]) for key in composed.keys)
    ]
    if cast:
        raise RefusedError(
            f"{format_option(f'--dtype {options.dtype}')} would write "
            f"{pluralize(len(cast), 'float8 tensor')} without scales",
            why=f"{quote_names(cast)}: small weights would become 0 and large ones the maximum of "
            "the dtype; no loader supports such a model",
            hint=f"pass {format_option('--allow-overflow')} to write them anyway",
        )


def _is_cast(catalog: Catalog, name: str, dtype: str) -> bool:
    """Check if the source tensor *name* is cast to *dtype* while it is copied or computed."""
    source = catalog.tensors[name]
    computed = (catalog.computed.get(extent.file) for extent in source.extents)
    return source.dtype != dtype or any(can_overflow(virtual) for virtual in computed if virtual)
