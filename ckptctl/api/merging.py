"""Adapters merged into their models: planned, and carried out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Unpack

from ckptctl.api.conversion import conversion_options
from ckptctl.api.options import AnyPath, Options
from ckptctl.ops import option_checks as checks

if TYPE_CHECKING:
    from ckptctl.ops.conversion.convert import ConversionResult
    from ckptctl.ops.merging.merge import MergePlan


def plan_merge(
    base: AnyPath,
    adapter: AnyPath,
    dst: AnyPath,
    *,
    to: str | None = None,
    scaling: float | None = None,
    **options: Unpack[Options],
) -> MergePlan:
    """Decide everything about merging an adapter into its model, without writing a byte.

    Args:
        base: The model's checkpoint.
        adapter: The adapter: PEFT's directory, torchtune's or Mistral's file, ...
        dst: Where the merged model would appear.
        to: Format to write; None: that of *base*.
        scaling: The factor of B A, where it does not follow from an adapter_config.json.
        options: See :class:`~ckptctl.api.Options`; they are those of the model.

    Raises:
        CkptError: The merge would fail or would not be safe.
    """
    from ckptctl.ops.merging.merge import plan_merge as plan

    asked = conversion_options(to or "", **options)
    return plan(base, adapter, dst, asked, checks.factor("scaling", scaling))


def merge(
    base: AnyPath,
    adapter: AnyPath,
    dst: AnyPath,
    *,
    to: str | None = None,
    scaling: float | None = None,
    progress: Callable[[int], None] | None = None,
    **options: Unpack[Options],
) -> ConversionResult:
    """Merge a LoRA or DoRA adapter into its model and publish the result as *dst*.

    Args:
        base: The model's checkpoint; it is never changed.
        adapter: The adapter: PEFT's directory, torchtune's or Mistral's file, ...
        dst: Must not exist, unless ``overwrite=True`` and it is a checkpoint.
        to: Format to write; None: that of *base*.
        scaling: The factor of B A, where it does not follow from an adapter_config.json.
        progress: Called with the bytes done since the last call, from this thread.
        options: See :class:`~ckptctl.api.Options`; they are those of the model.

    Raises:
        CkptError: Nothing was published, unless ``verify`` is what failed.
    """
    from ckptctl.ops.merging.merge import run_merge
    from ckptctl.storage.publish import sweeping

    with sweeping(dst):
        plan = plan_merge(base, adapter, dst, to=to, scaling=scaling, **options)
    return run_merge(plan, progress)
