"""Conversions: planned, and carried out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Unpack

from ckptctl.api.options import AnyPath, Options
from ckptctl.errors import UsageError, nearest
from ckptctl.ops import option_checks as checks
from ckptctl.units import parse_bytes

if TYPE_CHECKING:
    from ckptctl.ops.conversion.convert import ConversionOptions, ConversionPlan, ConversionResult


def plan_conversion(
    src: AnyPath, dst: AnyPath, *, to: str, **options: Unpack[Options]
) -> ConversionPlan:
    """Decide everything about a conversion without writing a byte.

    Args:
        src: The checkpoint.
        dst: Where the result would appear.
        to: Format to write: ``hf``, ``dcp``, ...; ``ckptctl formats`` lists them.
        options: See :class:`~ckptctl.api.Options`.

    Raises:
        CkptError: The conversion would fail or would not be safe.
    """
    from ckptctl.ops.conversion.convert import plan_conversion as plan

    return plan(src, dst, conversion_options(to, **options))


def convert(
    src: AnyPath,
    dst: AnyPath,
    *,
    to: str,
    progress: Callable[[int], None] | None = None,
    **options: Unpack[Options],
) -> ConversionResult:
    """Convert *src* and publish the result as *dst*, whole or not at all.

    Args:
        src: The checkpoint; it is never changed.
        dst: Must not exist, unless ``overwrite=True`` and it is a checkpoint.
        to: Format to write: ``hf``, ``dcp``, ...; ``ckptctl formats`` lists them.
        progress: Called with the bytes done since the last call, from this thread.
        options: See :class:`~ckptctl.api.Options`.

    Raises:
        CkptError: Nothing was published, unless ``verify`` is what failed; the source is unchanged.
    """
    from ckptctl.ops.conversion.convert import run_conversion
    from ckptctl.storage.publish import sweeping

    with sweeping(dst):
        plan = plan_conversion(src, dst, to=to, **options)
    return run_conversion(plan, progress)


def conversion_options(to: str, **options: Unpack[Options]) -> ConversionOptions:
    """Return *options* checked and in the form that the operation takes.

    Raises:
        UsageError: One of them makes no sense.
    """
    from ckptctl.ops.conversion.convert import ConversionOptions

    for name in options.keys() - Options.__annotations__.keys():
        close = nearest(name, list(Options.__annotations__))
        raise UsageError(
            f"unknown option `{name}`", hint=f"did you mean `{close}`?" if close else None
        )
    memory = options.get("memory")
    return ConversionOptions(
        to=to,
        from_format=options.get("from_format"),
        weights=checks.weights(options.get("weights")),
        tag=options.get("tag"),
        rules=checks.path(options.get("rules")),
        model_type=options.get("model_type"),
        converter=checks.path(options.get("converter")),
        sizes=checks.sizes(options.get("sizes", {})),
        from_layout=options.get("from_layout"),
        to_layout=options.get("to_layout"),
        dtype=checks.floating(options.get("dtype")),
        dequantize=checks.floating(options.get("dequantize"), "dequantize"),
        include=checks.globs(options.get("include", ())),
        exclude=checks.globs(options.get("exclude", ())),
        only=checks.only(options.get("only", "model")),
        root=options.get("root"),
        max_shard_size=parse_bytes(options.get("max_shard_size", "5GB")),
        mp=checks.positive("mp", options.get("mp", 1)) or 1,
        assets=checks.path(options.get("assets")),
        trust_assets=options.get("trust_assets", False),
        carry=checks.globs(options.get("carry", ())),
        like=checks.path(options.get("like")),
        overwrite=options.get("overwrite", False),
        resume=options.get("resume", False),
        verify=options.get("verify", False),
        checksum=options.get("checksum", True),
        jobs=checks.positive("jobs", options.get("jobs")),
        memory=None if memory is None else parse_bytes(memory),
        untie=options.get("untie", False),
        tied=checks.tied(options.get("tied")),
        allow_overflow=options.get("allow_overflow", False),
        allow_missing=options.get("allow_missing", False),
        verify_replicas=options.get("verify_replicas", False),
        vocab_size=options.get("vocab_size"),
        lora_alpha=checks.factor("lora_alpha", options.get("lora_alpha")),
    )
