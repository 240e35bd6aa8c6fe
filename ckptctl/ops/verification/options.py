"""What a verification is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ckptctl.formats.base import Weights
from ckptctl.ops.verification.result import Level


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """What to verify, and how much of it.

    Attributes:
        format: The format, where it cannot be detected.
        level: ``fast``, ``headers`` or ``full``.
        nan: Search floating values for NaN and Inf.
        manifest: Write the SHA-256 sums of all files when nothing is wrong.
        model_type: The family: of shards that only a family can join, and of the model that is
            compared with its table.
        model: Whether the tensors are compared with those that the model has to have.
        weights: See :class:`~ckptctl.formats.base.ReadOptions`.
        tag: Likewise.
        rules: Likewise.
        jobs: Threads; None: its part of the cores, at most four.
    """

    format: str | None = None
    level: Level = "headers"
    nan: bool = False
    manifest: bool = False
    model_type: str | None = None
    weights: Weights | None = None
    tag: str | None = None
    rules: Path | None = None
    jobs: int | None = None
    model: bool = True
