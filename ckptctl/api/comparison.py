"""How two checkpoints differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from ckptctl.api.options import AnyPath
from ckptctl.ops import option_checks as checks

if TYPE_CHECKING:
    from ckptctl.formats.base import Weights
    from ckptctl.ops.comparison.result import Difference


def diff(
    a: AnyPath,
    b: AnyPath,
    *,
    structure: bool = False,
    atol: float | None = None,
    rtol: float | None = None,
    ignore_dtype: bool = False,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    only: Literal["model", "all"] = "all",
    checksums: bool = True,
    format_a: str | None = None,
    format_b: str | None = None,
    layout_a: str | None = None,
    layout_b: str | None = None,
    weights_a: Weights | None = None,
    weights_b: Weights | None = None,
    tag_a: str | None = None,
    tag_b: str | None = None,
    root_a: str | None = None,
    root_b: str | None = None,
    rules: AnyPath | None = None,
    dequantize: str | None = None,
    model_type: str | None = None,
    converter: AnyPath | None = None,
    sizes: Mapping[str, int] | None = None,
    jobs: int | None = None,
) -> Difference:
    """Say how the checkpoints *a* and *b* differ, across formats and layouts.

    Elements are equal when their bits are, NaN included; with a tolerance also when
    ``|a - b| <= atol + rtol * |b|``. torch is imported only where numbers have to be compared.

    Args:
        a: The first checkpoint; the result has its names.
        b: The second one.
        structure: Compare names, shapes and dtypes alone.
        atol: Absolute tolerance.
        rtol: Tolerance relative to *b*.
        ignore_dtype: Take equal numbers of another dtype for the same.
        include: Globs of names in *a*: only these.
        exclude: Globs of names in *a*: not these.
        only: ``model``, or ``all`` that they hold.
        checksums: Believe recorded checksums that are equal.
        format_a: Format of *a*; None: detect it.
        format_b: Format of *b*; None: detect it.
        layout_a: Layout of *a*; None: detect it.
        layout_b: Layout of *b*; None: detect it.
        weights_a: ``master`` or ``module``, where *a* holds both; None: what its format prefers.
        weights_b: Likewise of *b*.
        tag_a: Which save, where *a* holds several; None: the one that its pointer names.
        tag_b: Likewise of *b*.
        root_a: What stands before the model's names in *a*; None: find it.
        root_b: Likewise in *b*.
        rules: TOML that says how ranks divide tensors, or ``megatron-core``, for whichever of the
            two does not say so itself.
        dequantize: Turn the quantised tensors of either into this dtype: ``bf16``, ``fp32``.
        model_type: Family of both; None: detect it.
        converter: Python file that defines one more family, as ``FAMILY``; it is run.
        sizes: Axis sizes that no configuration states: ``{"n_heads": 32}``.
        jobs: Threads; None: its part of the cores, at most four.

    Raises:
        CkptError: One is missing, not recognised or damaged, or named layouts do not fit.
    """
    from ckptctl import families
    from ckptctl.ops.comparison.diff import DiffOptions
    from ckptctl.ops.comparison.diff import diff as run

    chosen = DiffOptions(
        structure=structure,
        tolerance=checks.tolerance(atol, rtol),
        ignore_dtype=ignore_dtype,
        include=checks.globs(include),
        exclude=checks.globs(exclude),
        only=checks.only(only),
        checksums=checksums,
        format_a=format_a,
        format_b=format_b,
        layout_a=layout_a,
        layout_b=layout_b,
        weights_a=checks.weights(weights_a),
        weights_b=checks.weights(weights_b),
        tag_a=tag_a,
        tag_b=tag_b,
        root_a=root_a,
        root_b=root_b,
        rules=checks.path(rules),
        dequantize=checks.floating(dequantize, "dequantize"),
        model_type=model_type,
        sizes=checks.sizes(sizes or {}),
        jobs=checks.positive("jobs", jobs) or 0,
    )
    with families.using(converter):
        return run(a, b, chosen)
