"""Merge an adapter into its model: ``W + s B A``, while the model is converted.

The changed tensors are computed as they are read (:mod:`ckptctl.storage.kinds.lora`), in float32
and rounded once, so that everything else is an ordinary conversion.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ckptctl import families, formats
from ckptctl.errors import UsageError
from ckptctl.formats.base import WritableFormat
from ckptctl.ops.conversion.convert import plan_changed, run_conversion
from ckptctl.ops.conversion.options import MergeOptions
from ckptctl.ops.conversion.plan import ConversionPlan, ConversionResult
from ckptctl.ops.destinations import replaceable, require_destination
from ckptctl.ops.merging.tensors import Merging
from ckptctl.storage.paths import named
from ckptctl.storage.threads import Advance


@dataclass(frozen=True, slots=True)
class MergePlan:
    """What a merge will do.

    Attributes:
        conversion: The conversion of the merged model.
        adapter: Absolute path of the adapter.
        adapter_format: Its format.
        adapter_layout: Its layout.
        merged: Tensors of the model that are changed.
        replaced: Tensors of the model that those of the adapter replace.
        scales: The different factors of B A, ascending.
    """

    conversion: ConversionPlan
    adapter: str
    adapter_format: str
    adapter_layout: str
    merged: int
    replaced: int
    scales: tuple[float, ...]

    def to_json(self) -> dict[str, object]:
        """Return what is published beside the conversion's (``docs/reference/json.md``)."""
        return {
            "adapter": self.adapter,
            "adapter_format": self.adapter_format,
            "adapter_layout": self.adapter_layout,
            "merged": self.merged,
            "replaced": self.replaced,
            "scales": list(self.scales),
        }


def plan_merge(
    base: str | Path,
    adapter: str | Path,
    dst: str | Path,
    options: MergeOptions,
) -> MergePlan:
    """Decide everything about a merge; writes nothing.

    Args:
        base: The model's checkpoint.
        adapter: The adapter: PEFT's directory, torchtune's file, ...
        dst: Where the merged model will appear.
        options: As for a conversion; without ``to`` the model's format is kept.

    Raises:
        CkptError: One of the two is not whole or not understood, or they do not belong together.
    """
    with families.using(options.converter):
        asked = options.to_format(options.to or _same_format(base, options))
        origin = formats.existing(adapter)
        require_destination(origin, named(dst), options.overwrite, replaceable)
        merging = Merging(origin, asked, options.scaling)
        plan = plan_changed(base, dst, asked, merging.change)
    return MergePlan(
        plan,
        merging.adapter.path,
        merging.adapter.format,
        merging.layout,
        len({delta.key for delta in merging.found.changed}),
        len(merging.found.replaced),
        tuple(sorted(merging.scales)),
    )


def run_merge(plan: MergePlan, progress: Advance | None = None) -> ConversionResult:
    """Carry out *plan* and publish the merged model, whole or not at all.

    Args:
        plan: What :func:`plan_merge` returned.
        progress: Called with the bytes done since its last call, from this thread.

    Raises:
        CkptError: Nothing was published; see :func:`ckptctl.ops.conversion.convert.run_conversion`.
    """
    return run_conversion(plan.conversion, progress)


def _same_format(base: str | Path, options: MergeOptions) -> str:
    found = formats.get(options.from_format) if options.from_format else formats.detect(base)
    if not isinstance(found, WritableFormat):
        raise UsageError(f"`{found.name}` can only be read", hint="`--to` says what to write")
    return found.name
