"""Detection of the model type and layout of a checkpoint from its keys, shapes and configs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from ckptctl.planner.config_facts import Json, add_rope_fields, has_tied_embeddings
from ckptctl.planner.families.declarations import matches_conditions
from ckptctl.planner.families.templates import KeyKind, group_keys_by_kind
from ckptctl.planner.layouts import INHERITED_LAYOUTS, Family, is_base_layout
from ckptctl.planner.mapping.completeness import ExpectedTensors, describe_variant_conflict
from ckptctl.planner.mapping.matching import MatchedKeys, find_omitted_ties, match_keys
from ckptctl.planner.model_parallel import fits_ranks
from ckptctl.units import pluralize

MIN_KNOWN_SHARE = 0.5
MAX_NAMED_KEYS = 5
"""Maximum number of unknown or missing keys that a candidate lists."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model type and layout that a checkpoint may have.

    Attributes:
        family: Name of the model type.
        layout: Name of the layout. Of several identical layouts, the first or the preferred one.
        alike: Names of identical layouts, which store all tensors with equal keys and axis order.
        evidence: Number of known keys and matching config fields, formatted for messages.
        unmatched: Unknown keys, at most five.
        missing: Missing keys, at most five.
        matched: The keys of the checkpoint in this layout.
        share: Fraction of the checkpoint's keys that the layout knows, from 0 to 1.
    """

    family: str
    layout: str
    alike: tuple[str, ...]
    evidence: tuple[str, ...]
    matched: MatchedKeys = field(repr=False)
    unmatched: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    share: float = 1.0

    @property
    def is_exact(self) -> bool:
        """Whether every key is known and none is missing."""
        return not self.unmatched and not self.missing

    def __str__(self) -> str:
        return f"{self.family} in layout {self.layout} ({', '.join(self.evidence)})"


def detect_layouts(
    shapes: Mapping[str, tuple[int, ...]],
    families: Mapping[str, Family],
    config: Json | None = None,
    params: Json | None = None,
    *,
    ranks: int = 1,
    prefer: str | None = None,
    min_share: float = MIN_KNOWN_SHARE,
    is_user_specified: bool = False,
    root: str = "",
) -> tuple[Candidate, ...]:
    """Detect the model types and layouts that match best, or several if they match equally well.

    If no layout matches exactly, the candidates are the layouts that know the most keys. Mapping
    then reports an error.

    Args:
        shapes: Shape of each tensor by key. With several *ranks*, the shapes on one rank.
        families: The model types to choose from.
        config: config.json, or None.
        params: params.json, or None.
        ranks: Number of model-parallel shards.
        prefer: Layout to prefer among identical layouts, or None.
        min_share: Minimum fraction of the keys that a layout must know. 1 requires exact matches.
        is_user_specified: Whether the user specified the model type, so that configs cannot
            exclude it.
        root: Prefix that was removed from the keys, with its dot.
    """
    evidence_by_name = (
        dict.fromkeys(families, ())
        if is_user_specified
        else _find_families_by_configs(families, config, params)
    )
    # Keys of an unknown model mostly have parts that no table has, so they are filtered only once.
    # Only the tables of families that the configs do not exclude are searched for parts.
    words = _collect_key_parts(tuple(families[name] for name in evidence_by_name))
    kinds = group_keys_by_kind(shapes)
    known_kinds = [kind for kind in kinds if kind.words <= words]
    arguments = _DetectionArguments(
        shapes, kinds, known_kinds, (config, params), ranks, prefer, root
    )
    # Layouts that know every key come before all others, so that the tables of most families are
    # not parsed.
    for share in dict.fromkeys((1.0, min_share)):
        candidates: list[Candidate] = []
        for family_name, evidence in evidence_by_name.items():
            family = families[family_name]
            if names := _list_plausible_layouts(family, arguments, share):
                candidates += _list_candidates(family, names, arguments, share, evidence)
        if candidates:
            break
    # Most known keys first, then fewest missing ones. Exact candidates come before all others.
    ranked = [(c.is_exact, c.share, -len(c.missing)) for c in candidates]
    best = [c for c, rank in zip(candidates, ranked, strict=True) if rank == max(ranked)]
    # Layouts may have the same keys but different axis orders. That check needs all shapes.
    if len({item.layout for item in best}) > 1:
        fitting = [
            item
            for item in best
            if fits_ranks(families[item.family], item.layout, arguments.shapes, arguments.ranks)
        ]
        best = fitting or best
    best = _exclude_inherited(best)
    if is_user_specified:
        return tuple(best)
    select = _exclude_unproven if config is None and params is None else _exclude_refined
    return tuple(select(best, families))


@lru_cache(maxsize=8)
def _collect_key_parts(families: tuple[Family, ...]) -> frozenset[str]:
    """Collect the dot-separated components of the keys of all *families*."""
    return frozenset[str]().union(*(family.key_parts for family in families))


def list_families_matching_configs(
    families: Mapping[str, Family], config: Json | None = None, params: Json | None = None
) -> list[str]:
    """List the model types that match the configs, except types that another match refines."""
    names = _find_families_by_configs(families, config, params)
    refined_names = {
        parent for name in names for parent in list_ancestor_families(families[name], families)
    }
    return [name for name in names if name not in refined_names]


def _find_families_by_configs(
    families: Mapping[str, Family], config: Json | None, params: Json | None
) -> dict[str, tuple[str, ...]]:
    """Map the families that the configs do not exclude to the config fields that match."""
    configs = [None if file is None else add_rope_fields(file) for file in (config, params)]
    evidence_by_name = {name: _find_evidence(family, *configs) for name, family in families.items()}
    return {n: evidence for n, evidence in evidence_by_name.items() if evidence is not None}


class _DetectionArguments(NamedTuple):
    """Arguments of one call of :func:`detect_layouts`."""

    shapes: Mapping[str, tuple[int, ...]]
    by_kind: Sequence[KeyKind]
    known_kinds: Sequence[KeyKind]  # those whose words are in a possible family
    files: tuple[Json | None, Json | None]
    ranks: int
    prefer: str | None
    root: str


def _list_plausible_layouts(
    family: Family, arguments: _DetectionArguments, share: float
) -> list[str]:
    """List the layouts that may know at least a fraction *share* of the keys.

    Only key skeletons are compared. The words in keys are compared first, so that the tables of
    families without these words are never parsed.
    """
    min_keys = share * len(arguments.shapes)
    known_kinds = [kind for kind in arguments.known_kinds if kind.words <= family.key_parts]
    if sum(len(kind.keys) for kind in known_kinds) < min_keys:
        return []
    prefixes = {kind.skeleton.partition(".")[0] + "." for kind in known_kinds}
    prefixes.add(f"{arguments.root.rstrip('.').rpartition('.')[2]}.")
    base_layouts = family.base_layouts if family.wrapper_prefix not in prefixes else ()
    skeletons = {name: family.get_skeletons(name) for name in (*family.layouts, *base_layouts)}
    return [
        name
        for name, known in skeletons.items()
        if sum(len(kind.keys) for kind in known_kinds if kind.skeleton in known) >= min_keys
    ]


def _find_evidence(
    family: Family, config: Json | None, params: Json | None
) -> tuple[str, ...] | None:
    """List the config fields that match *family*, or return None if a config excludes it."""
    evidence: list[str] = []
    for name, values, alternatives in (
        ("config.json", config, family.config_signs),
        ("params.json", params, family.params_signs),
    ):
        if values is None:
            continue
        matching_conditions = [
            conditions for conditions in alternatives if matches_conditions(conditions, values)
        ]
        if not matching_conditions:
            return None
        text = ", ".join(f"{k} {v}" for k, v in matching_conditions[0].items() if v is not None)
        evidence += [f"{name}: {text}"] if text else []
    return tuple(evidence)


def _list_candidates(
    family: Family,
    plausible: Iterable[str],
    arguments: _DetectionArguments,
    min_share: float,
    evidence: tuple[str, ...],
) -> list[Candidate]:
    """List a candidate for each layout that knows at least a fraction *min_share* of the keys.

    Layouts that map these keys to the same tensors are merged into one candidate.
    """
    tied = has_tied_embeddings(family, *arguments.files)
    distinct_layouts: list[str] = []
    candidates: list[Candidate] = []
    for name in sorted(plausible, key=lambda n: n != arguments.prefer):
        if any(
            family.get_layout(name).has_same_tensors(family.get_layout(earlier_name))
            for earlier_name in distinct_layouts
        ):
            continue
        distinct_layouts.append(name)
        matched = match_keys(family, family.get_layout(name), arguments.shapes, arguments.by_kind)
        share = (len(arguments.shapes) - len(matched.unmatched)) / max(1, len(arguments.shapes))
        if share < min_share or not matched.groups:
            continue
        candidate = _build_candidate(family, name, matched, arguments, tied, share, evidence)
        if arguments.ranks == 1 or fits_ranks(family, name, arguments.shapes, arguments.ranks):
            # Layouts are alike if they match the same keys and miss equally many, whatever the
            # missing ones are called, because no existing tensor distinguishes them.
            for place, old in enumerate(candidates):
                old_defects = old.unmatched, len(old.missing)
                has_same_defects = old_defects == (candidate.unmatched, len(candidate.missing))
                if has_same_defects and old.matched.has_same_matches(matched):
                    same_layouts = (*old.alike, name, *candidate.alike)
                    candidates[place] = replace(old, alike=same_layouts)
                    break
            else:
                candidates.append(candidate)
    return candidates


def _build_candidate(
    family: Family,
    name: str,
    matched: MatchedKeys,
    arguments: _DetectionArguments,
    tied: bool,
    share: float,
    evidence: tuple[str, ...],
) -> Candidate:
    layout, number = family.get_layout(name), len(arguments.shapes)
    tied_keys = {
        layout.leaves[n].key.text
        for n in find_omitted_ties(family, name, tied)
        if n in layout.leaves
    }
    untied_keys = [
        key for key in tied_keys if key in arguments.shapes and arguments.files[0] is None
    ]
    expected = ExpectedTensors(family, layout, matched, matched.count_indices())
    max_keys = MAX_NAMED_KEYS + len(family.ties)
    missing_keys = [missing.key for missing in islice(expected.iterate_missing(), max_keys)]
    matched = replace(
        matched, absent=frozenset(missing_keys) if len(missing_keys) < max_keys else None
    )
    head_tensors = {tie.tensor for tie in family.ties} if is_base_layout(name) else set()
    excused = tied_keys | {layout.leaves[n].key.text for n in head_tensors if n in layout.leaves}
    required_keys = [key for key in missing_keys if key not in excused]
    same_layouts = [
        n for n in family.layouts if n != name and layout.has_same_tensors(family.get_layout(n))
    ]
    return Candidate(
        family.name,
        name,
        tuple(same_layouts),
        (f"{number - len(matched.unmatched):,} of {pluralize(number, 'key')}", *evidence),
        matched,
        tuple(matched.unmatched[:MAX_NAMED_KEYS] or untied_keys),
        (*filter(None, [describe_variant_conflict(family, matched)]), *required_keys)[
            :MAX_NAMED_KEYS
        ],
        share,
    )


def _exclude_inherited(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Exclude inherited layouts if another family matches with the original layout.

    The original layout, in which models are published, is more likely. If one family matches with
    both layouts, both candidates remain.
    """
    families_by_layout: dict[str, set[str]] = {}
    for candidate in candidates:
        families_by_layout.setdefault(candidate.layout, set()).add(candidate.family)
    published = (INHERITED_LAYOUTS.get(candidate.layout, "") for candidate in candidates)
    other_families = (families_by_layout.get(layout, set()) for layout in published)
    return [
        candidate
        for candidate, names in zip(candidates, other_families, strict=True)
        if names <= {candidate.family}
    ]


def _exclude_unproven(
    candidates: list[Candidate], families: Mapping[str, Family]
) -> list[Candidate]:
    """Exclude families without a distinguishing tensor in the checkpoint, unless none has one."""

    def is_proven(candidate: Candidate) -> bool:
        family = families[candidate.family]
        proving_tensors = family.find_tensors(family.shown_by or ())
        return family.shown_by is None or any(map(candidate.matched.count_keys, proving_tensors))

    return list(filter(is_proven, candidates)) or candidates


def list_ancestor_families(family: Family, known_families: Mapping[str, Family]) -> list[str]:
    """List all families that *family* refines directly or indirectly, nearest first."""
    names: list[str] = []
    parent = family.refines
    while parent is not None and parent in known_families and parent not in names:
        names.append(parent)
        parent = known_families[parent].refines
    return names


def _exclude_refined(
    candidates: list[Candidate], known_families: Mapping[str, Family]
) -> list[Candidate]:
    """Exclude candidates whose family is refined by the family of another candidate."""
    refined_candidates = {
        (name, special.layout)
        for special in candidates
        for name in list_ancestor_families(known_families[special.family], known_families)
    }
    return [c for c in candidates if (c.family, c.layout) not in refined_candidates]
