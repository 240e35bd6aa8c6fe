"""Everything a model family in another package, or in a file of ``--converter``, is made of.

:func:`family` returns one of the known families, whose tables another may take over:
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
    ParamsStyle,
    Rule,
    Shift,
    Tie,
    Tiles,
)

Same = Fact
"""What a fact of params.json was called first."""

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
    "ParamsStyle",
    "Rule",
    "Same",
    "Shift",
    "Tie",
    "Tiles",
    "family",
]
