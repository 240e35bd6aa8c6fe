"""What Python callers of a load ask for, checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypedDict, Unpack

from ckptctl.ops import option_checks
from ckptctl.ops.loading.options import LoadOptions


class AsGiven(TypedDict, total=False):
    """Options that :class:`LoadOptions` takes as they are given; see there."""

    format: str | None
    model_type: str | None
    layout: str | None
    from_layout: str | None
    root: str | None
    tag: str | None
    trust_assets: bool
    strict: bool
    cast: bool
    allow_overflow: bool
    trusted: bool
    checksum: bool


def load_options(
    *,
    weights: Literal["master", "module"] | None,
    rules: str | Path | None,
    sizes: Mapping[str, int] | None,
    assets: str | Path | None,
    dequantize: str | None,
    jobs: int | None,
    **others: Unpack[AsGiven],
) -> LoadOptions:
    """Return the options of a load.

    Args:
        weights: See :func:`ckptctl.load`, as for all that follow.
        rules: TOML file that says how ranks divide tensors, where theirs do not.
        sizes: Axis sizes that no configuration states.
        assets: Directory with configuration.
        dequantize: Turn quantised tensors into ``bf16`` or ``fp32``.
        jobs: Threads per rank.
        **others: The rest.

    Raises:
        UsageError: A value makes no sense.
    """
    return LoadOptions(
        weights=option_checks.weights(weights),
        rules=option_checks.path(rules),
        sizes=option_checks.sizes(sizes or {}),
        assets=option_checks.path(assets),
        dequantize=option_checks.floating(dequantize, "dequantize"),
        jobs=jobs or 0,
        **others,
    )
