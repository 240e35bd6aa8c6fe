"""Plug-in API for model families in other packages or ``--converter`` files.

:func:`family` returns a known family, whose tables another family may reuse:
``dataclasses.replace(family("llama2"), name="mine", ...)``.
"""

from __future__ import annotations

from ckptctl.families import family
from ckptctl.planner.layouts import (
    BLOCK_AXES,
    CHOSEN,
    FACTS,
    NEEDED,
    PRESENT,
    SIZES,
    UNCHOSEN,
    Companion,
    Demand,
    Drop,
    Fact,
    Family,
    Fill,
    LayerWord,
    ParamsStyle,
    Rule,
    Shift,
    Tie,
    Tiles,
)

Same = Fact
"""Former name of :class:`Fact`, kept for existing plug-ins."""

__all__ = [
    "BLOCK_AXES",
    "CHOSEN",
    "FACTS",
    "NEEDED",
    "PRESENT",
    "SIZES",
    "UNCHOSEN",
    "Companion",
    "Demand",
    "Drop",
    "Fact",
    "Family",
    "Fill",
    "LayerWord",
    "ParamsStyle",
    "Rule",
    "Same",
    "Shift",
    "Tie",
    "Tiles",
    "family",
]
