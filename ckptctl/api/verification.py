"""Whether a checkpoint is whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptctl.api.options import AnyPath
from ckptctl.ops import option_checks as checks

if TYPE_CHECKING:
    from ckptctl.formats.base import Weights
    from ckptctl.ops.verification.result import Level, Verification


def verify(
    path: AnyPath,
    *,
    level: Level = "headers",
    nan: bool = False,
    manifest: bool = False,
    format: str | None = None,
    model_type: str | None = None,
    weights: Weights | None = None,
    tag: str | None = None,
    rules: AnyPath | None = None,
    jobs: int | None = None,
) -> Verification:
    """Say whether the checkpoint at *path* is whole, and list everything that is wrong with it.

    Args:
        path: A directory or a file; it is never changed.
        level: ``fast`` reads the index, ``headers`` also what each item says of itself, ``full``
            also every byte that a checksum covers.
        nan: Search floating values for NaN and Inf; imports torch.
        manifest: Add ``SHA256SUMS`` when nothing is wrong; goes with ``full``.
        format: Its format; None: detect it.
        model_type: Model family; None: detect it.
        weights: ``master`` or ``module``, where the checkpoint holds both.
        tag: Which of several saves in it; None: the one that its pointer names.
        rules: See :class:`~ckptctl.api.Options`.
        jobs: Threads; None: its part of the cores, at most four.

    Raises:
        CkptError: It does not exist or is not recognised. What is damaged is a finding.
    """
    from ckptctl.ops.verification.options import VerifyOptions
    from ckptctl.ops.verification.verify import verify as run

    chosen = VerifyOptions(
        format=format,
        level=level,
        nan=nan,
        manifest=manifest,
        model_type=model_type,
        weights=checks.weights(weights),
        tag=tag,
        rules=checks.path(rules),
        jobs=checks.positive("jobs", jobs),
    )
    return run(path, chosen)
