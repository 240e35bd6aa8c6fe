"""Tensors taken out of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ckptctl.api.options import AnyPath
from ckptctl.ops import option_checks as checks

if TYPE_CHECKING:
    from ckptctl.formats.base import Weights
    from ckptctl.ops.extraction.extract import Extraction


def extract(
    path: AnyPath,
    tensor: str,
    output: AnyPath | None = None,
    *,
    slice: str | None = None,
    dtype: str | None = None,
    layout: str | None = None,
    from_layout: str | None = None,
    format: str | None = None,
    weights: Weights | None = None,
    tag: str | None = None,
    rules: AnyPath | None = None,
    dequantize: str | None = None,
    model_type: str | None = None,
    converter: AnyPath | None = None,
    sizes: Mapping[str, int] | None = None,
    root: str | None = None,
    allow_overflow: bool = False,
    overwrite: bool = False,
    jobs: int | None = None,
) -> Extraction:
    """Take tensors, or slices of them, out of the checkpoint at *path*; read nothing else.

    Args:
        path: The checkpoint; it is never changed.
        tensor: A name, or a glob; a slice such as ``[0:128]`` may follow.
        output: ``.safetensors``, ``.pt`` or ``.npy``; None: write nothing, show the first values.
        slice: The slice, where it does not follow the name.
        dtype: Cast floating tensors to this dtype.
        layout: The layout whose names and axes are meant; None: the checkpoint's own.
        from_layout: Layout of the checkpoint; None: detect it.
        format: Format of the checkpoint; None: detect it.
        weights: ``master`` or ``module``, where the checkpoint holds both.
        tag: Which save, where it holds several; None: the one that its pointer names.
        rules: TOML that says how ranks divide tensors, or ``megatron-core``.
        dequantize: Turn quantised tensors into this dtype: ``bf16``, ``fp32``.
        model_type: Family; None: detect it.
        converter: Python file that defines one more family, as ``FAMILY``; it is run.
        sizes: Axis sizes that no configuration states: ``{"n_heads": 32}``.
        root: What stands before the model's names in the checkpoint; None: find it.
        allow_overflow: Write elements that became infinite, NaN or saturated; else they are
            refused.
        overwrite: Replace *output* if it is a file of tensors.
        jobs: Threads; None: its part of the cores, at most four.

    Raises:
        CkptError: Nothing was written.
    """
    from ckptctl import families
    from ckptctl.ops.extraction.extract import ExtractOptions
    from ckptctl.ops.extraction.extract import extract as run

    chosen = ExtractOptions(
        slice=slice,
        dtype=checks.floating(dtype),
        layout=layout,
        from_layout=from_layout,
        format=format,
        weights=checks.weights(weights),
        tag=tag,
        rules=checks.path(rules),
        dequantize=checks.floating(dequantize, "dequantize"),
        model_type=model_type,
        sizes=checks.sizes(sizes or {}),
        root=root,
        allow_overflow=allow_overflow,
        overwrite=overwrite,
        jobs=checks.positive("jobs", jobs) or 0,
    )
    with families.using(converter):
        return run(path, tensor, checks.output(output), chosen)
