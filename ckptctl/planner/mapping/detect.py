"""Which model type and layout a checkpoint has: by its keys, then by its configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

from ckptctl.planner.config_facts import Json, is_tied, with_rope_type
from ckptctl.planner.families.declarations import holds
from ckptctl.planner.families.templates import KeyKind, key_kinds
from ckptctl.planner.layouts import LIKE, Family, is_base
from ckptctl.planner.mapping.completeness import Expected, torn
from ckptctl.planner.mapping.matching import Matched, match, tied_away
from ckptctl.planner.model_parallel import ranks_fit
from ckptctl.units import counted

ENOUGH = 0.5
SHOWN = 5
"""So many unknown or missing keys are named."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model type and layout that a checkpoint may have.

    Attributes:
        layout: Its layout: the first of those that are alike.
        alike: Other layouts that keep every tensor under the same name in the same order.
        unmatched: Keys that it does not know, at most five.
        missing: Keys that it needs, at most five.
        matched: What the keys are in it.
        share: The part of all keys that it knows, from 0 to 1.
    """

    family: str
    layout: str
    alike: tuple[str, ...]
    evidence: tuple[str, ...]
    matched: Matched = field(repr=False)
    unmatched: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    share: float = 1.0

    @property
    def exact(self) -> bool:
        """Return whether every key is known and none is missing."""
        return not self.unmatched and not self.missing

    def __str__(self) -> str:
        return f"{self.family} in layout {self.layout} ({', '.join(self.evidence)})"


def detect(
    shapes: Mapping[str, tuple[int, ...]],
    families: Mapping[str, Family],
    config: Json | None = None,
    params: Json | None = None,
    *,
    ranks: int = 1,
    prefer: str | None = None,
    least: float = ENOUGH,
    named: bool = False,
    root: str = "",
) -> tuple[Candidate, ...]:
    """Return the model types and layouts that fit equally well.

    They are exact; or else most keys are known, and mapping will say what is wrong.

    Args:
        shapes: Shape of each tensor by key; with several *ranks* those of one rank.
        families: The model types to choose from.
        config: config.json, where there is one.
        params: params.json, where there is one.
        ranks: Number of model-parallel shards.
        prefer: The layout to name among those that are alike.
        least: The part of all keys that a layout has to know; 1: exact ones alone.
        named: Whether the user named the model type: no configuration excludes it.
        root: What stood before the keys, with its dot.
    """
    known = [None if file is None else with_rope_type(file) for file in (config, params)]
    # Most keys of a model that no table knows have words that none has: they are looked at once.
    words = frozenset[str]().union(*(family.words for family in families.values()))
    kinds = key_kinds(shapes)
    spelled = [kind for kind in kinds if kind.words <= words]
    asked = _Question(shapes, kinds, spelled, (config, params), ranks, prefer, root)
    # Only layouts that know every key are exact: the tables of most families need no parsing then.
    for share in dict.fromkeys((1.0, least)):
        candidates: list[Candidate] = []
        for family in families.values():
            evidence = () if named else _evidence(family, *known)
            if evidence is None:
                continue
            if names := _plausible(family, asked, share):
                candidates += _layouts(family, names, asked, share, evidence)
        if any(candidate.exact for candidate in candidates):
            break
    # The most keys known, of those the least missed: exact ones, where there are any.
    ranked = [(c.exact, c.share, -len(c.missing)) for c in candidates]
    best = [c for c, rank in zip(candidates, ranked, strict=True) if rank == max(ranked)]
    # Layouts may have the same keys for tensors whose axes are in another order; to find that out
    # takes every key.
    if len({one.layout for one in best}) > 1:
        fitting = [
            one
            for one in best
            if ranks_fit(families[one.family], one.layout, asked.shapes, asked.ranks)
        ]
        best = fitting or best
    best = _originals(best)
    if named:
        return tuple(best)
    described = known != [None, None]
    return tuple(_most_refined(best, families) if described else _shown(best, families))


def configured(
    families: Mapping[str, Family], config: Json | None = None, params: Json | None = None
) -> list[str]:
    """Return the model types that the configurations alone allow, the most special ones."""
    known = [None if file is None else with_rope_type(file) for file in (config, params)]
    names = [name for name, one in families.items() if _evidence(one, *known) is not None]
    general = {parent for name in names for parent in refined(families[name], families)}
    return [name for name in names if name not in general]


class _Question(NamedTuple):
    """What one call of :func:`detect` is about; see there."""

    shapes: Mapping[str, tuple[int, ...]]
    by_kind: Sequence[KeyKind]
    spelled: Sequence[KeyKind]  # of these those whose words some family has
    files: tuple[Json | None, Json | None]
    ranks: int
    prefer: str | None
    root: str


def _plausible(family: Family, asked: _Question, share: float) -> list[str]:
    """Return the layouts that may know a *share* of the keys, judged by their skeletons alone.

    The words of the keys come first: the tables of a family that lacks them are never parsed.
    """
    enough = share * len(asked.shapes)
    spelled = [kind for kind in asked.spelled if kind.words <= family.words]
    if sum(len(kind.keys) for kind in spelled) < enough:
        return []
    wrapped = {kind.skeleton.partition(".")[0] + "." for kind in spelled}
    wrapped.add(f"{asked.root.rstrip('.').rpartition('.')[2]}.")
    base = family.bases if family.wrapper not in wrapped else ()
    tables = {name: family.layout(name).table for name in (*family.layouts, *base)}
    return [
        name
        for name, table in tables.items()
        if sum(len(kind.keys) for kind in spelled if table.entries(kind.skeleton)) >= enough
    ]


def _evidence(family: Family, config: Json | None, params: Json | None) -> tuple[str, ...] | None:
    """Return what the configurations say for *family*; None: they exclude it."""
    evidence: list[str] = []
    for name, values, signs in (
        ("config.json", config, family.config_signs),
        ("params.json", params, family.params_signs),
    ):
        if values is None:
            continue
        shown = [sign for sign in signs if holds(sign, values)]
        if not shown:
            return None
        text = ", ".join(f"{k} {v}" for k, v in shown[0].items() if v is not None)
        evidence += [f"{name}: {text}"] if text else []
    return tuple(evidence)


def _layouts(
    family: Family,
    plausible: Iterable[str],
    asked: _Question,
    least: float,
    evidence: tuple[str, ...],
) -> list[Candidate]:
    """Return a candidate for each layout that knows at least a share of the keys.

    Those that take these keys for the same are one.
    """
    tied = is_tied(family, *asked.files)
    seen: list[str] = []
    found: list[Candidate] = []
    for name in sorted(plausible, key=lambda n: n != asked.prefer):
        if any(family.layout(name).same_as(family.layout(other)) for other in seen):
            continue
        seen.append(name)
        matched = match(family, family.layout(name), asked.shapes, asked.by_kind)
        share = (len(asked.shapes) - len(matched.unmatched)) / max(1, len(asked.shapes))
        if share < least or not matched.groups:
            continue
        candidate = _candidate(family, name, matched, asked, tied, share, evidence)
        if asked.ranks == 1 or ranks_fit(family, name, asked.shapes, asked.ranks):
            # Alike is what understands the same and lacks as many, whatever these are called: of
            # what is there nothing tells them apart.
            for place, old in enumerate(found):
                lacks = old.unmatched, len(old.missing)
                same = lacks == (candidate.unmatched, len(candidate.missing))
                if same and old.matched.same_as(matched):
                    alike = (*old.alike, name, *candidate.alike)
                    found[place] = replace(old, alike=alike)
                    break
            else:
                found.append(candidate)
    return found


def _candidate(
    family: Family,
    name: str,
    matched: Matched,
    asked: _Question,
    tied: bool,
    share: float,
    evidence: tuple[str, ...],
) -> Candidate:
    layout, number = family.layout(name), len(asked.shapes)
    tail = {layout.leaves[n].key.text for n in tied_away(family, name, tied) if n in layout.leaves}
    surplus = [key for key in tail if key in asked.shapes and asked.files[0] is None]
    expected = Expected(family, layout, matched, matched.counts())
    most = SHOWN + len(family.ties)
    absent = [one.key for one in islice(expected.absent(), most)]
    matched = replace(matched, absent=frozenset(absent) if len(absent) < most else None)
    headless = {tie.tensor for tie in family.ties} if is_base(name) else set()
    excused = tail | {layout.leaves[n].key.text for n in headless if n in layout.leaves}
    gone = [key for key in absent if key not in excused]
    alike = [n for n in family.layouts if n != name and layout.same_as(family.layout(n))]
    return Candidate(
        family.name,
        name,
        tuple(alike),
        (f"{number - len(matched.unmatched):,} of {counted(number, 'key')}", *evidence),
        matched,
        tuple(matched.unmatched[:SHOWN] or surplus),
        (*filter(None, [torn(family, matched)]), *gone)[:SHOWN],
        share,
    )


def _originals(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return *candidates* without families that another program spells as others are called.

    What is left are those that fit as they are published. Where one family alone fits, and does so
    both ways, nothing tells which.
    """
    fitting: dict[str, set[str]] = {}
    for one in candidates:
        fitting.setdefault(one.layout, set()).add(one.family)
    published = (LIKE.get(one.layout, "") for one in candidates)
    others = (fitting.get(layout, set()) for layout in published)
    return [one for one, names in zip(candidates, others, strict=True) if names <= {one.family}]


def _shown(candidates: list[Candidate], families: Mapping[str, Family]) -> list[Candidate]:
    """Return *candidates* without families that look like others, and of which nothing tells."""

    def is_shown(one: Candidate) -> bool:
        family = families[one.family]
        telling = family.named(family.shown_by or ())
        return family.shown_by is None or any(map(one.matched.number, telling))

    return list(filter(is_shown, candidates)) or candidates


def refined(family: Family, known: Mapping[str, Family]) -> list[str]:
    """Return the *known* families that *family* is a special case of, the nearest first."""
    names: list[str] = []
    parent = family.refines
    while parent is not None and parent in known and parent not in names:
        names.append(parent)
        parent = known[parent].refines
    return names


def _most_refined(candidates: list[Candidate], known: Mapping[str, Family]) -> list[Candidate]:
    """Return *candidates* without the families that another one of them is a special case of."""
    general = {
        (name, special.layout)
        for special in candidates
        for name in refined(known[special.family], known)
    }
    return [c for c in candidates if (c.family, c.layout) not in general]
