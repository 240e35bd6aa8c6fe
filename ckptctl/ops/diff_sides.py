"""Opening the two checkpoints of a comparison.

What is said for both (rules, dequantising) counts where it has a meaning: one side may be a
checkpoint of ranks that needs rules, or quantised, and the other one what was made of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ckptctl import formats
from ckptctl.catalog import Catalog
from ckptctl.errors import CkptError, UsageError
from ckptctl.ops.dequantise import dequantised
from ckptctl.ops.diff_options import DiffOptions


@dataclass(frozen=True, slots=True)
class _Chosen:
    path: str | Path
    format: str | None
    model_type: str | None
    weights: Literal["master", "module"] | None
    tag: str | None

    def open(self, rules: Path | None) -> Catalog:
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
        _Chosen(a, options.format_a, kind, options.weights_a, options.tag_a),
        _Chosen(b, options.format_b, kind, options.weights_b, options.tag_b),
    )
    opened = _by_rules(chosen, options.rules) if options.rules else [c.open(None) for c in chosen]
    return _plain(opened, options.dequantize) if options.dequantize else opened


def _by_rules(chosen: Sequence[_Chosen], rules: Path) -> list[Catalog]:
    found: list[Catalog] = []
    refused: list[UsageError] = []
    for one in chosen:
        try:
            found.append(one.open(rules))
        except UsageError as error:
            refused.append(error)
            try:
                found.append(one.open(None))
            except CkptError:
                raise error from None
    if len(refused) == len(chosen):
        raise refused[0]
    return found


def _plain(opened: Sequence[Catalog], dtype: str) -> list[Catalog]:
    found: list[Catalog] = []
    refused: list[UsageError] = []
    for one in opened:
        try:
            found.append(dequantised(one, dtype))
        except UsageError as error:
            refused.append(error)
            found.append(one)
    if len(refused) == len(opened):
        raise refused[0]
    return found
