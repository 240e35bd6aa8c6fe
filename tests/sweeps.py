"""Sweeps over many cases of one kind, of which some run every time and the others with the slow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(every: int, cases: Iterable[Any]) -> list[Any]:
    """Return *cases* for ``parametrize``, all slow but the first of each *every*.

    Args:
        every: Not a divisor of the number of kinds in a row, so that each kind has its turn.
        cases: Values of one parameter, or tuples of several; those that are slow stay so.
    """
    return [case if number % every == 0 else _slow(case) for number, case in enumerate(cases)]


def _slow(case: Any) -> Any:
    if hasattr(case, "marks") and hasattr(case, "values"):
        return pytest.param(*case.values, marks=[*case.marks, pytest.mark.slow], id=case.id)
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
