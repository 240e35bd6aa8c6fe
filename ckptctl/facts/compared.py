"""Facts of config.json that are compared with tensors or with each other, by family."""

from __future__ import annotations

from collections.abc import Iterator

from ckptctl.facts.contradictions import LIMITED, switched
from ckptctl.facts.layer_kinds import LISTS
from ckptctl.planner.config_facts import SUBMODEL_KEYS, list_formula_fields
from ckptctl.planner.families.declarations import split_aliases
from ckptctl.planner.layouts import Family


def sizes_compared(family: Family) -> Iterator[str]:
    """Yield the facts whose values tensor shapes and counts show."""
    for stated, _ in family.sizes.values():
        yield from (name for name in split_aliases(stated) if name)
    for _, formula in family.formulas:
        yield from list_formula_fields(formula)
    for size in family.layer_sizes:
        yield from size.facts


def layers_compared(family: Family) -> Iterator[str]:
    """Yield the facts that determine the tensors of a model and the layers they are in."""
    for kind in family.kinds:
        yield from (*kind.facts, *filter(None, (kind.but,)))
    for demand in family.demands:
        named = (*demand.when, *demand.kinds[:1], demand.first, demand.after, demand.but_last)
        yield from (str(name) for name in named if name)
    yield from switched(family)
    yield from (f"{module}{name}" for module in _modules() for name in ("tie_word_embeddings",))


def counts_compared() -> Iterator[str]:
    """Yield the facts that limit each other, in all families."""
    for module in _modules():
        yield from (module + name for name in sorted({*LIMITED, *LISTS}))


def _modules() -> tuple[str, ...]:
    return ("", *(f"{name}." for name in SUBMODEL_KEYS))
