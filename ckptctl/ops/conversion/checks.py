"""Which options of a conversion make sense together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckptctl import dtypes
from ckptctl.catalog import TensorEntry, is_computed
from ckptctl.errors import RefusedError, UsageError, listed
from ckptctl.formats.base import GB, OutputTensor, WritableFormat
from ckptctl.ops.conversion.options import ConversionOptions
from ckptctl.planner.mapping.mapped import MappedTensor
from ckptctl.storage.execution.options import LEAST
from ckptctl.units import format_bytes


def require_sense(asked: ConversionOptions, target: WritableFormat) -> None:
    """Refuse options that contradict each other or have no meaning for the target.

    Raises:
        UsageError: Naming the option.
    """
    threads = asked.execution().threads
    least = LEAST * threads
    those = f"{threads} threads need" if threads > 1 else "1 thread needs"
    problems = {
        f"--memory is less than the {format_bytes(least)} that {those}": (
            asked.memory is not None and asked.memory < least
        ),
        "--mp goes with --to meta and --to deepseek": asked.mp > 1 and not target.parallel,
        f"--max-shard-size has no meaning for --to {target.name}": (
            asked.max_shard_size != 5 * GB and not target.sharded
        ),
        f"--like has no meaning for --to {target.name}": (
            asked.like is not None and not target.cut_by
        ),
        "--trust-assets goes with --assets": asked.trust_assets and asked.assets is None,
        f"--carry has no meaning for --to {target.name}, which is one file": (
            bool(asked.carry) and target.single_file
        ),
        "--like and --mp both say how many shards": asked.like is not None and asked.mp > 1,
        "--like and --max-shard-size both say how to cut files": (
            asked.like is not None and asked.max_shard_size != 5 * GB
        ),
        "--only all, or --optimizer, needs a target that holds more than a model: dcp or torch": (
            asked.only == "all" and not target.nested
        ),
        "--verify compares checksums, which --no-checksum leaves out": (
            asked.verify and not asked.checksum
        ),
        "--dtype and --dequantize name different dtypes": (
            asked.dequantize is not None and asked.dtype not in (None, asked.dequantize)
        ),
        "--untie keeps what --tied drop leaves out": asked.untie and asked.tied == "drop",
        "--dequantize needs all of the source, and --allow-missing does without": (
            asked.dequantize is not None and asked.allow_missing
        ),
        "--dequantize takes bf16 or fp32": (asked.dequantize not in (None, "bfloat16", "float32")),
        f"--to {target.name} always has layout {target.layout}": (
            target.layout is not None
            and not target.other_layouts
            and asked.to_layout not in (None, target.layout)
        ),
    }
    found = next((problem for problem, holds in problems.items() if holds), None)
    if found:
        raise UsageError(found)


def require_scaled(
    asked: ConversionOptions,
    mapped: Sequence[MappedTensor],
    entries: Mapping[str, TensorEntry],
    tensors: Sequence[OutputTensor],
) -> None:
    """Refuse to cast weights to float8: without scales most of them leave its range.

    Args:
        asked: The options.
        mapped: What becomes what.
        entries: The source's tensors, located.
        tensors: The output's.

    Raises:
        RefusedError: A tensor that is none becomes float8, and `--allow-overflow` is not given.
    """
    if asked.allow_overflow:
        return
    float8 = {one.name: one.dtype for one in tensors if _is_float8(one.dtype)}
    cast = [
        view.key
        for item in mapped
        for view in item.targets
        if view.key in float8 and _made(entries[item.sources[0].key], float8[view.key])
    ]
    if cast:
        raise RefusedError(
            f"--dtype {asked.dtype} would write {len(cast):,} float8 tensors without scales",
            why=f"{listed(cast)}: no loader reads such a model; small weights become 0, large "
            "ones the largest number of the dtype",
            hint="`--allow-overflow` writes them nevertheless",
        )


def _is_float8(dtype: str) -> bool:
    return dtypes.BY_NAME[dtype].floating and dtypes.itemsize(dtype) == 1


def _made(source: TensorEntry, dtype: str) -> bool:
    """Return whether *source* is cast to *dtype*, here or where it is computed."""
    return source.dtype != dtype or any(is_computed(extent.file) for extent in source.extents)
