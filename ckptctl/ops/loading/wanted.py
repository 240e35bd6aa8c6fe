"""What a process wants of a checkpoint: boxes of tensors in its memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ckptctl.catalog import Box


class Target(NamedTuple):
    """A box of a tensor in memory.

    Attributes:
        box: The part of the global tensor.
        memory: What the plan calls its memory.
        steps: Elements between neighbours along each dimension.
    """

    box: Box
    memory: str
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor that is to be filled.

    Attributes:
        dtype: torch's name.
        shape: Global shape.
        targets: The boxes that this process holds.
    """

    dtype: str
    shape: tuple[int, ...]
    targets: tuple[Target, ...]
