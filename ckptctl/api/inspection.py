"""What a checkpoint holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptctl.api.options import AnyPath
from ckptctl.ops import option_checks as checks

if TYPE_CHECKING:
    from ckptctl.formats.base import Weights
    from ckptctl.ops.inspection.result import Inspection


def inspect(
    path: AnyPath,
    *,
    format: str | None = None,
    stats: bool = False,
    model_type: str | None = None,
    converter: AnyPath | None = None,
    rules: AnyPath | None = None,
    weights: Weights | None = None,
    tag: str | None = None,
) -> Inspection:
    """Say what the checkpoint at *path* holds and whether it is whole.

    Args:
        path: A directory or a file; a folder of checkpoints lists its members.
        format: Its format; None: detect it.
        stats: Read the data too and add statistics of every tensor; imports torch.
        model_type: Model family; None: detect it.
        converter: Python file that defines one more family, as ``FAMILY``; it is run.
        rules: See :class:`~ckptctl.api.Options`.
        weights: ``master`` or ``module``, where the checkpoint holds both.
        tag: Which save, where it holds several; None: the one that its pointer names.

    Raises:
        CkptError: It is missing, not recognised, or its index is damaged.
    """
    from ckptctl import families
    from ckptctl.ops.inspection.inspect import inspect as run

    with families.using(converter):
        return run(
            path,
            format,
            stats,
            model_type=model_type,
            rules=checks.path(rules),
            weights=checks.weights(weights),
            tag=tag,
        )
