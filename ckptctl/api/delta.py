"""Deltas between checkpoints, in Python: the same operations as ``ckptctl delta``.

``apply_to`` changes tensors in memory, such as the weights of an inference engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, get_args

from ckptctl.conversion import convert as conversion
from ckptctl.conversion.plan import ConversionResult
from ckptctl.errors import UsageError
from ckptctl.keywords import accept_keywords
from ckptctl.option_checks import AnyPath, check_locations, check_new_location
from ckptctl.storage.publish import clean_up_if_refused
from ckptctl.verbs.deltas.apply import DeltaApplyPlan, plan_apply
from ckptctl.verbs.deltas.delta_options import (
    NON_APPLY_OPTIONS,
    DeltaApplyOptions,
    DeltaOptions,
    DeltaSquashOptions,
    DeltaVerifyOptions,
)
from ckptctl.verbs.deltas.delta_result import DeltaResult, DeltaVerification
from ckptctl.verbs.deltas.live import Check, apply_to_tensors
from ckptctl.verbs.deltas.live_tensors import LiveNames
from ckptctl.verbs.deltas.make import DeltaMaker
from ckptctl.verbs.deltas.squash import DeltaSquash
from ckptctl.verbs.deltas.verify import DeltaCheck

if TYPE_CHECKING:
    from ckptctl.storage.arithmetic import Tensor

__all__ = ["apply", "apply_to", "make", "plan", "squash", "verify"]

_MAPPING_HINTS = {
    "tensors": "pass `model.state_dict()`, or `dict(model.named_parameters())`",
    "names": "pass a dictionary from names in the delta to names in memory",
    "fused": "pass a dictionary from modules in memory to those of the delta",
    "config": "pass the content of config.json, such as `model.config.to_dict()`",
}


@accept_keywords(DeltaOptions)
def make(base: AnyPath, new: AnyPath, out: AnyPath, options: DeltaOptions) -> DeltaResult:
    """Store the difference between *base* and *new* as a delta, published atomically as *out*.

    Args:
        base: The checkpoint to start from. It is never changed.
        new: Another checkpoint of the same model. It is never changed.
        out: Destination of the delta.
        options: All other arguments.

    Raises:
        CkptError: The checkpoints are not of the same model, or nothing could be written.
    """
    (base_path,), (new_path,) = check_locations(base), check_locations(new)
    return DeltaMaker(base_path, new_path, check_new_location(out), options).run(lambda _: None)


@accept_keywords(DeltaApplyOptions, excluded=NON_APPLY_OPTIONS)
def plan(
    base: AnyPath,
    deltas: AnyPath | Sequence[AnyPath],
    dst: AnyPath,
    options: DeltaApplyOptions,
) -> DeltaApplyPlan:
    """Plan to apply deltas to a checkpoint, without reading its data or writing anything.

    Args:
        base: The checkpoint.
        deltas: One delta, or several, in order.
        dst: Destination of the result.
        options: All other arguments.

    Raises:
        CkptError: The deltas do not follow each other, or are for another model.
    """
    (base_path,) = check_locations(base)
    return plan_apply(base_path, check_locations(deltas), check_new_location(dst), options)


@accept_keywords(DeltaApplyOptions, excluded=NON_APPLY_OPTIONS)
def apply(
    base: AnyPath,
    deltas: AnyPath | Sequence[AnyPath],
    dst: AnyPath,
    options: DeltaApplyOptions,
) -> ConversionResult:
    """Apply deltas to a checkpoint, and publish the result atomically as *dst*.

    Args:
        base: The checkpoint. It is never changed.
        deltas: One delta, or several, in order.
        dst: Destination. It must not exist, unless it is a checkpoint and ``overwrite=True``.
        options: All other arguments.

    Raises:
        CkptError: The checkpoint is not the base of the first delta, a delta is damaged, or the
            conversion failed. Nothing was published, unless ``verify`` failed.
    """
    (base_path,) = check_locations(base)
    target = check_new_location(dst)
    with clean_up_if_refused(target):
        planned = plan_apply(base_path, check_locations(deltas), target, options)
        planned.check()
    return conversion.run_conversion(planned.conversion)


@accept_keywords(DeltaVerifyOptions)
def verify(deltas: AnyPath | Sequence[AnyPath], options: DeltaVerifyOptions) -> DeltaVerification:
    """Read deltas, and compare their files, and with ``base`` all tensors, with the digests.

    Args:
        deltas: One delta, or several, in order.
        options: All other arguments.

    Raises:
        CkptError: A delta is damaged, does not follow the previous one, or has another base.
    """
    return DeltaCheck(check_locations(deltas), options).run(lambda _: None)


@accept_keywords(DeltaSquashOptions)
def squash(deltas: Sequence[AnyPath], out: AnyPath, options: DeltaSquashOptions) -> DeltaResult:
    """Combine deltas that follow each other into one, published atomically as *out*.

    Args:
        deltas: The deltas, in order.
        out: Destination of the delta.
        options: All other arguments.

    Raises:
        CkptError: The deltas do not follow each other, or are damaged.
    """
    job = DeltaSquash(check_locations(deltas), check_new_location(out), options)
    return job.run(lambda _: None)


def apply_to(
    tensors: Mapping[str, Tensor],
    deltas: AnyPath | Sequence[AnyPath],
    *,
    names: Mapping[str, str] | None = None,
    fused: Mapping[str, Sequence[str]] | None = None,
    layout: str | None = None,
    config: Mapping[str, object] | None = None,
    check: Check = "changed",
) -> tuple[str, ...]:
    """Apply deltas in place to tensors in memory, on any device.

    Everything that can be refused is refused before the first tensor is changed. Only one block of
    a tensor is decoded at a time.

    Args:
        tensors: Tensors of the base, such as ``dict(model.named_parameters())``. They need the
            dtypes and shapes of the delta.
        deltas: One delta, or several, in order.
        names: Names in *tensors* of those that are called differently in the delta.
        fused: Modules that store several modules of the delta one after another, such as
            ``{"qkv_proj": ["q_proj", "k_proj", "v_proj"]}`` or vLLM's ``packed_modules_mapping``.
        layout: Layout of *tensors*, such as ``mcore``, if it is not that of the delta. It replaces
            *names* and *fused*.
        config: Content of ``config.json``, which layouts that divide heads require.
        check: Tensors whose digests are compared before and after the change: ``changed``, ``all``
            tensors of the base, or ``none``.

    Returns:
        The changed tensors, by name in the delta.

    Raises:
        CkptError: A tensor is missing or not that of the base, or a delta is damaged.
    """
    if check not in get_args(Check):
        raise UsageError(f"unknown check `{check}`", why=f"known: {', '.join(get_args(Check))}")
    if layout is not None and (names or fused):
        raise UsageError("`layout` cannot be combined with `names` or `fused`")
    if config is not None and layout is None:
        raise UsageError("`config` requires `layout`")
    optional = {"names": names, "fused": fused, "config": config}
    given = {name: value for name, value in optional.items() if value is not None}
    for name, value in {"tensors": tensors, **given}.items():
        if not isinstance(value, Mapping):
            why = f"it is of type `{type(value).__name__}`"
            raise UsageError(f"`{name}` is not a mapping", why=why, hint=_MAPPING_HINTS[name])
    if any(isinstance(parts, str) for parts in (fused or {}).values()):
        raise UsageError("a value of `fused` is a string", hint="pass a list of names of modules")
    live_names = LiveNames(names=names or {}, fused=fused or {}, layout=layout, config=config)
    return apply_to_tensors(tensors, check_locations(deltas), live_names, check=check)
