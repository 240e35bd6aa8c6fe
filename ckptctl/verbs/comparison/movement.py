"""Distance that each layer moved between two checkpoints.

The distance is the norm of the difference of a layer's elements, relative to their norm in A. Both
are sums over the data that the comparison reads anyway, in float64. Only tensors of the model
count. A layer is named by its tensors' names up to the first number, such as ``model.layers.12``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Annotated

from ckptctl import dtypes
from ckptctl.installed import require_torch
from ckptctl.results import JsonField, Result
from ckptctl.storage.compare import sum_squares
from ckptctl.units import sort_naturally

ObserveWindow = Callable[[str, bytearray, bytearray, str, str], None]
"""Function that receives a tensor's name, elements of A and B, and their dtypes."""
_LAYER = re.compile(r"(?:.*?\.)?\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class LayerMovement(Result):
    """Distance that a layer moved."""

    name: Annotated[str, JsonField("beginning of the names of its tensors in A")]
    tensors: Annotated[int, JsonField("number of tensors")]
    norm: Annotated[float | None, JsonField("L2 norm in A; null if elements are not finite")]
    distance: Annotated[
        float | None, JsonField("L2 norm of the difference; null if elements are not finite")
    ]
    relative: Annotated[
        float | None, JsonField("`distance` / `norm`; null if undefined or not finite")
    ]


@dataclass(slots=True)
class _Sums:
    norm: float = 0.0
    difference: float = 0.0


@dataclass(slots=True)
class MovementMeter:
    """Sums of squares of the elements of each tensor, and of their differences."""

    sums_by_name: dict[str, _Sums] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_torch("the movement of layers")

    def add_window(self, name: str, a: bytearray, b: bytearray, dtype_a: str, dtype_b: str) -> None:
        """Add the elements of a window. Tensors of dtypes without numeric values do not count."""
        if dtypes.NON_NUMERIC_DTYPES & {dtype_a, dtype_b}:
            return
        sums = self.sums_by_name.setdefault(name, _Sums())
        norm, difference = sum_squares(a, b, dtype_a, dtype_b)
        sums.norm += norm
        sums.difference += difference

    def summarize_layers(self, names: Iterable[str]) -> tuple[LayerMovement, ...]:
        """Summarize the tensors *names* by layer, in natural order."""
        groups: dict[str, list[_Sums]] = {}
        for name in names:
            if name in self.sums_by_name:
                groups.setdefault(find_layer(name), []).append(self.sums_by_name[name])
        return tuple(_summarize(name, groups[name]) for name in sort_naturally(groups))


def find_layer(name: str) -> str:
    """Return the layer of a tensor: its name up to the first number, else its module."""
    match = _LAYER.match(name)
    return match[0] if match else name.rpartition(".")[0] or name


def _summarize(name: str, sums: list[_Sums]) -> LayerMovement:
    norm = math.sqrt(math.fsum(item.norm for item in sums))
    distance = math.sqrt(math.fsum(item.difference for item in sums))
    relative = distance / norm if norm else None
    if not math.isfinite(norm) or not math.isfinite(distance):
        return LayerMovement(name, len(sums), *((None,) * 3))
    return LayerMovement(name, len(sums), norm, distance, relative)
