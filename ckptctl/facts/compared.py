"""List the facts of config.json that are compared with tensors or with each other."""

from __future__ import annotations

from collections.abc import Iterator

from ckptctl.facts.contradictions import LIMITED_FACTS, map_switches_to_tensors
from ckptctl.facts.layer_kinds import PER_LAYER_LISTS
from ckptctl.planner.config_facts import SUBMODEL_KEYS, list_formula_fields
from ckptctl.planner.families.declarations import split_aliases
from ckptctl.planner.layouts import Family


def list_compared_sizes(family: Family) -> Iterator[str]:
    """Yield the names of facts that follow from tensor shapes and from the number of tensors."""
    for config_names, _ in family.sizes.values():
        yield from (name for name in split_aliases(config_names) if name)
    for _, formula in family.formulas:
        yield from list_formula_fields(formula)
    for size in family.layer_sizes:
        yield from size.facts


def list_compared_layer_facts(family: Family) -> Iterator[str]:
    """Yield the names of facts that determine which tensors a layer contains."""
    for layer_kind in family.kinds:
        yield from (*layer_kind.facts, *filter(None, (layer_kind.but,)))
    for demand in family.demands:
        yield from demand.facts
    yield from map_switches_to_tensors(family)
    yield from (
        f"{module}{name}" for module in _list_module_prefixes() for name in ("tie_word_embeddings",)
    )


def list_compared_counts() -> Iterator[str]:
    """Yield the names of counts that limit each other in models of every family."""
    for module in _list_module_prefixes():
        yield from (module + name for name in sorted({*LIMITED_FACTS, *PER_LAYER_LISTS}))


def _list_module_prefixes() -> tuple[str, ...]:
    return ("", *(f"{name}." for name in SUBMODEL_KEYS))
