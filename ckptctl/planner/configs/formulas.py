"""Sizes that config.json states as a formula of several facts: sums of products and quotients.

``len(name)`` is the number of entries of a list.

``qk_nope_head_dim + qk_rope_head_dim`` is the size of one head of queries.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_WORD = re.compile(r"len\([\w.]+\)|[\w.]+|[-*/+]")


def names_in(formula: str) -> tuple[str, ...]:
    """Return the facts that *formula* is made of."""
    words = (word for word in _WORD.findall(formula) if word not in "-+*/" and not word.isdecimal())
    return tuple(dict.fromkeys(words))


def facts_in(formula: str) -> tuple[str, ...]:
    """Return the names in config.json that *formula* mentions."""
    return tuple(name.removeprefix("len(").removesuffix(")") for name in names_in(formula))


def value_of_formula(formula: str, values: Mapping[str, int]) -> int | None:
    """Return what *formula* comes to; None: *values* do not say it."""
    total = 0
    for term in formula.replace(" - ", " + -1 * ").split(" + "):
        product, operator = 1, "*"
        for word in _WORD.findall(term.removeprefix("-1 * ")):
            if word in "*/":
                operator = word
                continue
            factor = int(word) if word.isdecimal() else values.get(word)
            if factor is None or (operator == "/" and (not factor or product % factor)):
                return None
            product = product // factor if operator == "/" else product * factor
        total += -product if term.startswith("-1 * ") else product
    return total
