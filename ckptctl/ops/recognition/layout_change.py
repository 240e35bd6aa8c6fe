"""From the source's tensors to the target's: what is renamed, reordered, dropped or kept."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from ckptctl import families
from ckptctl.catalog import TensorEntry
from ckptctl.errors import MappingError, UsageError, listed
from ckptctl.ops.recognition.agreement import Agreement, Description, agree
from ckptctl.ops.recognition.lacking import require_one
from ckptctl.ops.recognition.recognise import Recognition
from ckptctl.planner.configs.stated import does_without, is_tied, read_lists, read_sizes
from ckptctl.planner.layouts import BASE, Family
from ckptctl.planner.mapping.mapped import MappedTensor, Zeros
from ckptctl.planner.mapping.matching import match
from ckptctl.planner.mapping.resizing import Tiling, resized
from ckptctl.planner.mapping.tensors import TensorMap, map_tensors

LARGEST = 1 << 32
"""Rows that a vocabulary may be padded to."""


@dataclass(frozen=True, slots=True)
class Change:
    """How the model changes its layout.

    Attributes:
        vocab: Size that the vocabulary was padded or cut to; None: it was kept.
        decided: Facts on which descriptions differ, and what ``--trust-assets`` took.
    """

    family: Family | None
    source_layout: str | None
    target_layout: str | None
    tensors: tuple[MappedTensor, ...]
    dropped: Mapping[str, str]
    must_equal: tuple[tuple[str, str], ...] = ()
    must_be_zero: tuple[str, ...] = ()
    zeros: tuple[Zeros, ...] = ()
    sizes: Mapping[str, int] | None = None
    tied: bool = False
    notes: tuple[str, ...] = ()
    tilings: tuple[Tiling, ...] = ()
    vocab: int | None = None
    decided: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def identity(self) -> bool:
        """Return whether every tensor keeps its name."""
        return self.source_layout == self.target_layout


@dataclass(frozen=True, slots=True)
class LayoutRequest:
    """What is asked of a change of layout.

    Attributes:
        target_layout: What the user or the target format asks for; None: keep the source's.
        source_layout: The layout that the source's format always has; None: any.
        described: Whether the target comes with a description of the model (``params.json``), for
            which the family has to be known even where no name changes.
        vocab: Size that the vocabulary is padded or cut to; None: keep it.
        whole: Names of all of the model's tensors, where those to be changed are a part of them.
        missing: Names of those that are missing and may be.
        documents: The files that describe the model, those that ``--assets`` replaces, too.
    """

    target_layout: str | None
    where: str
    source_layout: str | None = None
    described: bool = False
    untie: bool = False
    partial: bool = False
    given: Mapping[str, int] | None = None
    vocab: int | None = None
    whole: Collection[str] | None = None
    missing: Collection[str] = ()
    documents: tuple[Description, ...] = ()
    trust_assets: bool = False

    @property
    def needs_family(self) -> bool:
        """Return whether it means nothing without a family, even where no name changes."""
        return bool(self.untie or self.given or self.vocab)


def change_layout(
    known: Recognition, tensors: Mapping[str, TensorEntry], asked: LayoutRequest
) -> Change:
    """Map the model's tensors to another layout, or to the one that they have."""
    target = asked.target_layout or known.layout
    unknown = not known.candidates and target in (None, asked.source_layout or "hf")
    same = unknown or target is None or target == known.layout or target in known.alike
    if not same or (asked.described and known.candidates):
        family = chosen_family(known, target, asked.where)
    elif known.model_type and (known.exact or (known.layout and asked.needs_family)):
        family = families.family(known.model_type)
    else:
        _require_no_family(tensors, asked)
        return _unchanged(known, tensors, target, _agreement(None, known, tensors, asked))
    agreed = _agreement(family, known, tensors, asked)
    source = known.layout or ""
    written = source if same else target or source
    found = _mapped(family, (source, written), known, tensors, asked)
    ordered = _in_source_order(found.tensors, tensors) if same else found.tensors
    return Change(
        family,
        source,
        written,
        ordered,
        found.dropped,
        found.must_equal,
        found.must_be_zero,
        found.zeros,
        found.sizes,
        found.tied,
        (*agreed.notes, *(tiling.note for tiling in found.tilings)),
        found.tilings,
        asked.vocab,
        agreed.decided,
        found.left_out,
    )


def _mapped(
    family: Family,
    layouts: tuple[str, str],
    known: Recognition,
    tensors: Mapping[str, TensorEntry],
    asked: LayoutRequest,
) -> TensorMap:
    """Return how *tensors* go from the first of two *layouts* to the second."""
    found = map_tensors(
        family,
        *layouts,
        {name: entry.shape for name, entry in tensors.items()},
        read_sizes(family, known.config, known.params, asked.given, implied=_configured(known)),
        tied=is_tied(family, known.config, known.params),
        untie=asked.untie,
        partial=asked.partial,
        lists=read_lists(family, known.config),
        whole=asked.whole,
        without=does_without(family, known.config, base=known.layout == BASE),
        missing=asked.missing,
    )
    return found if asked.vocab is None else _with_vocabulary(found, family, layouts, asked.vocab)


def _require_no_family(tensors: Mapping[str, TensorEntry], asked: LayoutRequest) -> None:
    """Refuse what means nothing without a family."""
    if asked.given:
        raise UsageError(
            f"`--set {next(iter(asked.given))}` needs a known model type",
            where=asked.where,
            why="names and axes are kept: no size is needed",
        )
    if asked.vocab is not None:
        raise UsageError("`--vocab-size` needs a known model type", where=asked.where)
    if asked.untie and not any(entry.alias_of for entry in tensors.values()):
        raise UsageError(
            "`--untie` needs a known model type, or tensors that share memory", where=asked.where
        )


def _configured(known: Recognition) -> bool:
    return known.config is not None or known.params is not None


def _with_vocabulary(
    found: TensorMap, family: Family, layouts: tuple[str, str], size: int
) -> TensorMap:
    read, written = (family.layout(name) for name in layouts)
    if not 0 < size <= LARGEST:
        raise UsageError(
            "`--vocab-size` is not a size", why=f"it is {size:,}; 1 to {LARGEST:,} are possible"
        )
    tensors, zeros = resized(found.tensors, (read, written), "v", size)
    return replace(
        found,
        tensors=tuple(tensors),
        zeros=(*found.zeros, *zeros),
        sizes={**found.sizes, "v": size},
    )


def chosen_family(known: Recognition, target: str | None, where: str) -> Family:
    """Return the family for a change of names; several that say the same are as good as one."""
    if known.model_type is None and known.layout and target and _interchangeable(known, target):
        return families.family(known.candidates[0])
    require_one(known, where)
    return families.family(known.model_type or known.candidates[0])


def _interchangeable(known: Recognition, target: str) -> bool:
    found = [families.family(name) for name in known.candidates]
    first, *others = found
    return bool(others) and all(
        name in other.layouts
        and other.layout(name).same_as(first.layout(name))
        and other.tied == first.tied
        for other in others
        for name in (known.layout or "", target)
        if name in first.layouts
    )


def _agreement(
    family: Family | None,
    known: Recognition,
    tensors: Mapping[str, TensorEntry],
    asked: LayoutRequest,
) -> Agreement:
    names = tensors if asked.whole is None else asked.whole
    return agree(
        family,
        asked.documents,
        asked.given,
        asked=known.asked,
        held=(known.layout, names) if known.layout else None,
        trust_assets=asked.trust_assets,
    )


def _unchanged(
    known: Recognition,
    tensors: Mapping[str, TensorEntry],
    target: str | None,
    agreed: Agreement,
) -> Change:
    if target is not None and known.layout is None and target != "hf":
        raise MappingError(
            f"layout `{target}` needs a known model type",
            why=f"no known family has keys such as {listed(list(tensors), 2)}",
            hint="without mapping, hf, dcp and torch keep the names as they are",
        )
    mapped = tuple(MappedTensor.same(name, name, entry.shape) for name, entry in tensors.items())
    notes = agreed.notes
    if known.asked and not known.candidates:
        notes += (f"names are kept: no layout of `{known.asked}` has these keys",)
    elif strange := _strange(known, tensors):
        notes += (f"names are kept; {known.named} does not have {listed(strange)}",)
    return Change(
        None,
        known.layout,
        known.layout,
        mapped,
        {},
        notes=notes,
        decided=agreed.decided,
    )


def _strange(known: Recognition, names: Collection[str]) -> list[str]:
    """Return the names that the family does not have which fits best."""
    if known.exact or not known.pairs:
        return []
    name, layout = known.pairs[0]
    family = families.family(name)
    return list(match(family, family.layout(layout), names).unmatched)


def _in_source_order(
    mapped: tuple[MappedTensor, ...], tensors: Mapping[str, TensorEntry]
) -> tuple[MappedTensor, ...]:
    place = {name: position for position, name in enumerate(tensors)}
    return tuple(sorted(mapped, key=lambda item: place[item.sources[0].key]))
