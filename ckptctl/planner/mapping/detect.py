"""Detection of the model type and layout of a checkpoint, by its keys and its config."""

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
"""Maximum number of unknown or missing keys to name."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model type and layout that a checkpoint may have.

    Attributes:
        family: Name of the model type.
        layout: The layout, the first one of identical layouts.
        alike: Other layouts that store every tensor with the same key and axis order.
        evidence: Numbers of keys and config fields that support it, for messages.
        unmatched: Unknown keys, at most five.
        missing: Missing keys, at most five.
        matched: The keys of the checkpoint in this layout.
        share: Fraction of all keys that are known, from 0 to 1.
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
        """Whether every key is known and none is missing."""
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
    """Detect the model types and layouts that match best, several if they match equally well.

    If none is exact, candidates know most keys, and mapping will report the error.

    Args:
        shapes: Shape of each tensor by key, those of one rank if there are several *ranks*.
        families: The model types to choose from.
        config: config.json, or None.
        params: params.json, or None.
        ranks: Number of model-parallel shards.
        prefer: The preferred layout among identical ones.
        least: Fraction of all keys that a layout must know, 1 for exact matches only.
        named: Whether the user specified the model type, which configs do not exclude.
        root: Prefix that was removed from the keys, with its dot.
    """
    known = [None if file is None else with_rope_type(file) for file in (config, params)]
    # Keys of an unknown model mostly have parts that no table has, so they are filtered only once.
    words = frozenset[str]().union(*(family.words for family in families.values()))
    kinds = key_kinds(shapes)
    spelled = [kind for kind in kinds if kind.words <= words]
    asked = _Question(shapes, kinds, spelled, (config, params), ranks, prefer, root)
    # Only layouts that know every key are exact. Then the tables of most families are not parsed.
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
    # Most known keys first, then fewest missing ones. Exact candidates come before all others.
    ranked = [(c.exact, c.share, -len(c.missing)) for c in candidates]
    best = [c for c, rank in zip(candidates, ranked, strict=True) if rank == max(ranked)]
    # Layouts may have the same keys but different axis orders. That check needs all shapes.
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
    select = _shown if known == [None, None] else _most_refined
    return tuple(select(best, families))


def configured(
    families: Mapping[str, Family], config: Json | None = None, params: Json | None = None
) -> list[str]:
    """List the model types that match the configs, without those that others of them refine."""
    known = [None if file is None else with_rope_type(file) for file in (config, params)]
    names = [name for name, one in families.items() if _evidence(one, *known) is not None]
    general = {parent for name in names for parent in refined(families[name], families)}
    return [name for name in names if name not in general]


class _Question(NamedTuple):
    """Arguments of one call of :func:`detect`."""

    shapes: Mapping[str, tuple[int, ...]]
    by_kind: Sequence[KeyKind]
    spelled: Sequence[KeyKind]  # those whose words are in any family
    files: tuple[Json | None, Json | None]
    ranks: int
    prefer: str | None
    root: str


def _plausible(family: Family, asked: _Question, share: float) -> list[str]:
    """List the layouts that may know a *share* of the keys, judged only by key skeletons.

    Words of keys are compared first, so that the tables of other families are never parsed.
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
    """List the config fields that match *family*, or return None if a config excludes it."""
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
    """List a candidate for each layout that knows at least a fraction *least* of the keys.

    Layouts that give these keys the same meanings are merged into one candidate.
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
            # Layouts are alike if they match the same keys and miss equally many, whatever the
            # missing ones are called, because no existing tensor distinguishes them.
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
    """Exclude candidates whose layout inherits names that another family has in its own layout.

    The remaining ones match as they are published. If one family matches in both layouts, the
    result is ambiguous.
    """
    fitting: dict[str, set[str]] = {}
    for one in candidates:
        fitting.setdefault(one.layout, set()).add(one.family)
    published = (LIKE.get(one.layout, "") for one in candidates)
    others = (fitting.get(layout, set()) for layout in published)
    return [one for one, names in zip(candidates, others, strict=True) if names <= {one.family}]


def _shown(candidates: list[Candidate], families: Mapping[str, Family]) -> list[Candidate]:
    """Exclude families that no tensor distinguishes from others, unless none remains."""

    def is_shown(one: Candidate) -> bool:
        family = families[one.family]
        telling = family.named(family.shown_by or ())
        return family.shown_by is None or any(map(one.matched.number, telling))

    return list(filter(is_shown, candidates)) or candidates


def refined(family: Family, known: Mapping[str, Family]) -> list[str]:
    """List the *known* families that *family* refines, the nearest first."""
    names: list[str] = []
    parent = family.refines
    while parent is not None and parent in known and parent not in names:
        names.append(parent)
        parent = known[parent].refines
    return names


def _most_refined(candidates: list[Candidate], known: Mapping[str, Family]) -> list[Candidate]:
    """Exclude families that another candidate refines."""
    general = {
        (name, special.layout)
        for special in candidates
        for name in refined(known[special.family], known)
    }
    return [c for c in candidates if (c.family, c.layout) not in general]
