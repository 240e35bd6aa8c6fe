"""Opening the two checkpoints of a comparison.

What is said for both (rules, dequantising) counts where it has a meaning: one side may be a
checkpoint of ranks that needs rules, or quantised, and the other one what was made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ckptctl import formats
from ckptctl.catalog import Catalog
from ckptctl.errors import CkptError, UsageError
from ckptctl.ops.comparison.options import DiffOptions, Weights
from ckptctl.ops.option_names import renaming
from ckptctl.ops.recognition.dequantise import dequantised

T = TypeVar("T")
_OPTIONS = ("from", "weights", "tag", "root", "from-layout")
_ELSEWHERE = {"from": "format", "from-layout": "layout"}


def option_names(side: str) -> dict[str, str]:
    """Return what options that are about one checkpoint are called for one of two.

    Args:
        side: ``a`` or ``b``.
    """
    return {f"--{name}": f"--{_ELSEWHERE.get(name, name)}-{side}" for name in _OPTIONS}


@dataclass(frozen=True, slots=True)
class _Chosen:
    side: str
    path: str | Path
    format: str | None
    model_type: str | None
    weights: Weights | None
    tag: str | None

    def open(self, rules: Path | None) -> Catalog:
        with renaming(option_names(self.side)):
            return formats.open_checkpoint(
                self.path,
                self.format,
                self.model_type,
                weights=self.weights,
                tag=self.tag,
                rules=rules,
            )


def open_sides(a: str | Path, b: str | Path, options: DiffOptions) -> list[Catalog]:
    """Return the indices of both checkpoints.

    Raises:
        UsageError: Something that was said has no meaning for either of them.
        CkptError: One of them is missing, not recognised, damaged or hostile.
    """
    kind = options.model_type
    chosen = (
        _Chosen("a", a, options.format_a, kind, options.weights_a, options.tag_a),
        _Chosen("b", b, options.format_b, kind, options.weights_b, options.tag_b),
    )
    opened = _by_rules(chosen, options.rules) if options.rules else [c.open(None) for c in chosen]
    return _plain(opened, options.dequantize) if options.dequantize else opened


def _by_rules(chosen: Sequence[_Chosen], rules: Path) -> list[Catalog]:
    def without(one: _Chosen, error: UsageError) -> Catalog:
        try:
            return one.open(None)
        except CkptError:
            raise error from None

    return _meant_for_some(chosen, lambda one: one.open(rules), without)


def _plain(opened: Sequence[Catalog], dtype: str) -> list[Catalog]:
    return _meant_for_some(opened, lambda one: dequantised(one, dtype), lambda one, _: one)


def _meant_for_some(
    sides: Sequence[T],
    with_it: Callable[[T], Catalog],
    without: Callable[[T, UsageError], Catalog],
) -> list[Catalog]:
    """Return what something that was said makes of each side; one of them may refuse it."""
    found: list[Catalog] = []
    refused: list[UsageError] = []
    for side in sides:
        try:
            found.append(with_it(side))
        except UsageError as error:
            refused.append(error)
            found.append(without(side, error))
    if len(refused) == len(sides):
        raise refused[0]
    return found
