"""Tensors that are private mappings of one file of random bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch

MAPPED = 1 << 20
Shapes = Mapping[str, tuple[int, ...]]


def size_of(shapes: Shapes) -> int:
    return 2 * sum(math.prod(shape) for shape in shapes.values())


def template_for(shapes: Shapes, path: Path, times: int = 1) -> Path:
    """Write random bytes, as many as the largest tensor has, if they are not there."""
    nbytes = times * max(size_of({name: shape}) for name, shape in shapes.items())
    if not path.exists() or path.stat().st_size < nbytes:
        values = (torch.randn(1 << 20) * 0.02).bfloat16().view(torch.uint8)
        block = (values & 0xBF).numpy().tobytes()  # no byte is a NaN of float8
        path.write_bytes(block * -(-nbytes // len(block)))
    return path


def tensor(
    shape: tuple[int, ...], template: Path, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Return a tensor of bytes of *template*."""
    nbytes = math.prod(shape) * dtype.itemsize
    # 100,000 mappings would be more than a process may have.
    mapped = torch.from_file(str(template), shared=False, size=nbytes, dtype=torch.uint8)
    found = mapped.view(dtype).view(shape)
    return found if nbytes >= MAPPED else found.clone()
