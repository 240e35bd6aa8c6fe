"""Which model type Megatron's records tell, of those that have a checkpoint's keys."""

from __future__ import annotations

from collections.abc import Mapping

from ckptctl import formats
from ckptctl.catalog import Catalog
from ckptctl.planner.configs.facts import Json, Translated
from ckptctl.planner.configs.megatron import merged, stated
from ckptctl.planner.configs.megatron_families import denies, possible
from ckptctl.planner.layouts import Family
from ckptctl.planner.mapping.detect import Candidate, detect


def described(
    catalog: Catalog, known: Mapping[str, Family], shapes: Mapping[str, tuple[int, ...]], root: str
) -> list[Candidate]:
    """Return the families that the records describe, as far as the keys are exactly theirs."""
    record, prefer = merged(catalog.records.values()), formats.get(catalog.format).layout
    found: list[Candidate] = []
    for name in possible(known, record) if record else ():
        one, told = {name: known[name]}, stated(known[name], record)
        fitting = detect(shapes, one, told, prefer=prefer, named=True, root=root)
        found += (c for c in fitting if c.exact)
    return found


def contradicted(catalog: Catalog, family: Family) -> bool:
    """Return whether the records describe no model of *family*."""
    return denies(family, merged(catalog.records.values()))


def configuration(catalog: Catalog, family: Family) -> Json | None:
    """Return the config.json that the records state."""
    found = stated(family, merged(catalog.records.values()))
    return Translated(found) if found else None
