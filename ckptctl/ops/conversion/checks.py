"""Which options of a conversion make sense together."""

from __future__ import annotations

from ckptctl.errors import UsageError
from ckptctl.formats.base import GB, WritableFormat
from ckptctl.ops.conversion.options import ConversionOptions
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
