"""Checks for missing and unknown tensors of a model."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations, groupby, islice
from operator import itemgetter
from typing import NamedTuple

from ckptctl.errors import HomelessError, MissingTensorsError, listed, nearest, spell_option
from ckptctl.planner.families.tables import Tensor
from ckptctl.planner.families.templates import Template
from ckptctl.planner.layouts import Drop, Family, Layout
from ckptctl.planner.mapping.matching import (
    LayerKind,
    Matched,
    Slot,
    Values,
    key_of,
    leads,
    slots,
)
from ckptctl.units import counted

MANY = 1000
"""Number of missing keys that are always listed. Further ones may only be counted."""


class Absent(NamedTuple):
    """A key that a complete model would have and this one does not have.

    Attributes:
        key: The missing key.
        shown: Whether this model certainly needs it, because the tensor exists at other
            indices or has no index.
    """

    key: str
    shown: bool


class Lacking(NamedTuple):
    """The missing keys of a model.

    Attributes:
        listed: The keys, only the first ones of very many.
        number: Number of missing keys, including those that are not listed.
    """

    listed: list[Absent]
    number: int


def lacking(
    family: Family,
    layout: Layout,
    matched: Matched,
    sizes: Mapping[str, int],
    *,
    tied: bool,
    without: Collection[str] = (),
    demanded: Collection[Slot] = (),
    most: int | None = None,
) -> Lacking:
    """Find the keys that a complete model would have and this one does not have.

    If *sizes* does not contain a count, the largest number in a key is the last one.

    Args:
        family: The model type.
        layout: The layout of the keys.
        matched: The keys of the model.
        sizes: Axis sizes and numbers of layers from a config.
        tied: Whether tensors are tied.
        without: Logical tensors that this model does not have.
        demanded: Optional tensors that its config requires.
        most: Maximum number of keys to list, or None for a default limit.
    """
    # MTP layers, which follow all others, are often omitted.
    after = {shift.index for shift in family.shifts if shift.place == "after"}
    counted = {index for tensor in family.tensors.values() for index in tensor.indices} - after
    stated = {axis: sizes[axis] for axis in layout.spread & sizes.keys()}
    given = {index: sizes[index] for index in counted & sizes.keys()}
    leaves = layout.leaves
    excused = {leaves[name].key.text for name in without if name in leaves}
    for tie in family.ties if tied else ():
        pair = (tie.tensor, tie.of)
        if any((name, ()) in matched.keys for name in pair):  # one of them suffices
            excused |= {leaves[name].key.text for name in pair if name in leaves}
    counts = {**stated, **matched.counts(), **given}
    as_shown = not demanded and counts == matched.counts()
    if as_shown and matched.absent is not None and excused >= matched.absent:
        return Lacking([], 0)
    expected = Expected(family, layout, matched, counts, demanded)
    keys = [absent for absent in expected.absent(most) if absent.key not in excused]
    known = {absent.key for absent in keys}
    more = [absent for absent in expected.undelivered(demanded) if absent.key not in known]
    number = 0 if family.partial else expected.number(excused) + len(more)
    return Lacking([*keys, *more], number)


class Expected:
    """The logical tensors of a complete model, judged by those that exist.

    An optional tensor is expected in every layer if one layer has it, or another tensor of its
    group. A tensor of a variant is expected in the layers of that variant.
    """

    def __init__(
        self,
        family: Family,
        layout: Layout,
        matched: Matched,
        counts: Mapping[str, int],
        demanded: Collection[Slot] = (),
    ) -> None:
        self._family, self._layout, self._matched = family, layout, matched
        self._limit = sum(len(group.keys) for group in matched.groups) + 1
        self._stated = counts
        self._counts = {index: min(count, self._limit) for index, count in counts.items()}
        self._present = {
            tensor.name
            for group in matched.groups
            for tensor, _ in group.stored.parts
            if matched.number(tensor)
        }
        self._together = {family.tensors[name].together for name in self._present} - {""}
        self._layers = {kind: set(layers) for kind, layers in matched.layers.items()}
        self._beyond: Counter[LayerKind] = Counter()
        known = {family.tensors[name].variant for name in layout.leaves}
        for group in family.variants:
            self._complete([variant for variant in group if variant in known], demanded)

    def absent(self, most: int | None = None) -> Iterator[Absent]:
        """Yield missing keys, at most *most* or a default limit."""
        if self._family.partial:
            return
        seen: set[str] = set()
        for absent in islice(self._absent(), most or 2 * self._limit + MANY):
            if absent.key not in seen:
                seen.add(absent.key)
                yield absent

    def _absent(self) -> Iterator[Absent]:
        """Yield missing keys, those of a fused tensor once for each part."""
        for name in self._layout.leaves:
            tensor = self._family.tensors[name]
            shown = not tensor.indices or bool(self._matched.number(tensor))
            yield from (Absent(key, shown) for key in self._keys(tensor))
        for rule, keys, beside in self._zeros():
            for values in self._slots(beside):
                named = dict(zip(beside.indices, values, strict=True))
                key = Template.parse(rule.key).key(self._matched.numbering.stored(named))
                if key not in keys:
                    yield Absent(key, shown=True)

    def undelivered(self, demanded: Collection[Slot]) -> Iterator[Absent]:
        """Yield the missing keys of *demanded* tensors, once per stored tensor."""
        found: dict[str, None] = {}
        numbering = self._matched.numbering
        for name, places in groupby(sorted(demanded), key=itemgetter(0)):
            leaf, tensor = self._layout.leaves.get(name), self._family.tensors[name]
            if leaf is None or self._family.partial:
                continue
            there = self._matched.places(tensor, leaf.spread)
            of_kind = self._layers.get((tensor.variant or "", tensor.indices), ())
            for _, values in places:
                if tensor.variant and values not in of_kind:
                    continue
                for lead in leads(leaf, self._counts):
                    if (*values, *lead) not in there:
                        found[key_of(self._layout, tensor, values, lead, numbering)] = None
        yield from (Absent(key, shown=True) for key in found)

    def number(self, excused: Collection[str]) -> int:
        """Count the missing keys, without those of *excused* templates."""
        there: Counter[int] = Counter()
        for group in self._matched.groups:
            there[id(group.stored)] += len(group.keys)
        missing = 0
        for stored in self._layout.stored:
            if stored.template.text not in excused:
                each = math.prod(self._stated.get(axis, 0) for axis in stored.parts[0][1].spread)
                numbers: Counter[str | None] = Counter()
                for tensor, _ in stored.parts:
                    numbers[tensor.variant] = max(numbers[tensor.variant], self._number(tensor))
                missing += max(0, numbers.total() * each - there[id(stored)])
        for _, keys, beside in self._zeros():
            missing += self._number(beside) - len(keys)
        return missing

    def _keys(self, tensor: Tensor) -> Iterator[str]:
        """Yield the missing keys of *tensor*, none if their number is right."""
        leaf, matched = self._layout.leaves[tensor.name], self._matched
        each = math.prod(self._stated.get(axis, 0) for axis in leaf.spread)
        if matched.number(tensor) == self._number(tensor) * each:
            return
        there = matched.places(tensor, leaf.spread)
        for values in self._slots(tensor):
            for lead in leads(leaf, self._counts):
                if (*values, *lead) not in there:
                    yield key_of(self._layout, tensor, values, lead, matched.numbering)

    def _zeros(self) -> Iterator[tuple[Drop, set[str], Tensor]]:
        """Yield each rule for zeros that some layers have, their keys, and the adjacent tensor.

        All layers with that tensor need the zeros.
        """
        for rule in self._family.drops:
            dropped = self._matched.dropped.items()
            keys = {key for key, drop in dropped if drop is rule and drop.zeros}
            tensors = self._family.tensors.values()
            beside = next((t for t in tensors if t.name.partition(".")[0] == rule.beside), None)
            if keys and beside is not None and rule.layout == self._layout.name:
                yield rule, keys, beside

    def _number(self, tensor: Tensor) -> int:
        """Count the index values at which *tensor* is expected."""
        if not self._wanted(tensor):
            return 0
        if self._by_layer(tensor):
            return len(self._shown(tensor))
        if tensor.variant:
            kind = tensor.variant, tensor.indices
            return len(self._layers.get(kind, ())) + self._beyond[kind]
        return math.prod(self._stated.get(index, 0) for index in tensor.indices)

    def _slots(self, tensor: Tensor) -> Sequence[Values]:
        """List the index values at which *tensor* is expected."""
        if not self._wanted(tensor):
            return ()
        if self._by_layer(tensor):
            return sorted(self._shown(tensor))
        if tensor.variant:
            return sorted(self._layers.get((tensor.variant, tensor.indices), ()))
        return slots(tensor, self._counts)

    def _wanted(self, tensor: Tensor) -> bool:
        """Return whether *tensor* is expected at any index."""
        shown = tensor.name in self._present or tensor.together in self._together
        return shown or not tensor.optional

    def _by_layer(self, tensor: Tensor) -> bool:
        """Return whether only some layers have *tensor*, or the weight that it scales."""
        return (tensor.scales or tensor.name) in self._family.by_layer

    def _shown(self, tensor: Tensor) -> set[Values]:
        """Return the layers that have *tensor*, its weight, or another tensor of its group."""
        if tensor.scales:
            tensor = self._family.tensors[tensor.scales]
        mates = self._family.named((tensor.together,)) if tensor.together else (tensor,)
        return set().union(*(self._matched.places(mate) for mate in mates))

    def _complete(self, group: Sequence[str], demanded: Collection[Slot]) -> None:
        """Assign a variant to layers without one, by *demanded* tensors or else by frequency."""
        samples = {t.indices: t for t in self._family.tensors.values() if t.variant in group}
        for indices, sample in samples.items():
            layers = {variant: self._layers.get((variant, indices), set()) for variant in group}
            shown = max(group, key=lambda variant: len(layers[variant]))
            covered = set().union(*layers.values())
            for name, values in demanded:
                tensor = self._family.tensors[name]
                kind = tensor.variant or "", tensor.indices
                if kind[0] in group and kind[1] == indices and values not in covered:
                    self._layers.setdefault(kind, set()).add(values)
                    covered.add(values)
            looked_at = slots(sample, self._counts)
            self._layers.setdefault((shown, indices), set()).update(
                values for values in looked_at if values not in covered
            )
            stated = math.prod(self._stated.get(index, 0) for index in indices)
            self._beyond[shown, indices] += max(0, stated - len(looked_at))


def untold(
    family: Family, source: Layout, target: Layout, demanded: Collection[Slot]
) -> Iterator[str]:
    """Yield a note about *demanded* tensors that only *target* has."""
    names = [
        key_of(target, family.tensors[name], values)
        for name, values in sorted(demanded)
        if name in target.leaves and name not in source.leaves and not target.leaves[name].spread
    ]
    if names:
        yield (
            f"the configuration requires {counted(len(names), 'tensor')} that layout "
            f"`{source.name}` has no place for; not written: {listed(names)}"
        )


def begins_only(family: Family, layout: Layout, matched: Matched, absent: Collection[str]) -> bool:
    """Return whether a model has only its first tensors and layers, as if it were truncated."""
    blocks = [tensor.block for tensor in family.tensors.values() if tensor.indices]
    if not blocks:
        return False
    ends = [t for n, t in family.tensors.items() if n in layout.leaves and not t.indices]
    before = [tensor for tensor in ends if tensor.block < min(blocks)]
    after = [tensor for tensor in ends if tensor.block > max(blocks)]
    layers = matched.counts().get("i", 0)
    lacks = (next(layout.table.all(key), None) for key in absent)
    inner = [indices["i"] for _, indices in filter(None, lacks) if "i" in indices]
    return (
        bool(layers and after)
        and all(matched.number(tensor) for tensor in before if not tensor.optional)
        and not any(matched.number(tensor) for tensor in after)
        and all(number >= layers for number in inner)
    )


def torn(family: Family, matched: Matched) -> str | None:
    """Describe the first layer with tensors of two variants, or return None."""
    layers = matched.layers
    for group in family.variants:
        for one, other in combinations([kind for kind in layers if kind[0] in group], 2):
            if one[1] == other[1] and not layers[one].isdisjoint(layers[other]):
                return _contradiction(family, group, matched)
    return None


def _contradiction(family: Family, group: Sequence[str], matched: Matched) -> str | None:
    """Describe the first keys that assign a layer to two variants of *group*."""
    place = {key: number for number, key in enumerate(matched.order)}
    firsts = [(next(iter(keys.values())), slot) for slot, keys in matched.keys.items()]
    layers: dict[LayerKind, dict[Values, str]] = {}
    for key, (name, values) in sorted(firsts, key=lambda first: place[first[0]]):
        tensor = family.tensors[name]
        if tensor.variant and tensor.variant in group:
            layers.setdefault((tensor.variant, tensor.indices), {}).setdefault(values, key)
    seen: dict[object, str] = {}
    for (_, indices), found in layers.items():
        for values, key in found.items():
            if (indices, values) in seen:
                return f"`{seen[indices, values]}` and `{key}` are mutually exclusive"
            seen[indices, values] = key
    return None


def require_known(family: Family, layout: Layout, matched: Matched, absent: Sequence[str]) -> None:
    """Require that the layout knows all keys.

    Raises:
        HomelessError: It does not know some of them.
    """
    if not matched.unmatched:
        return
    lines = []
    for key in matched.unmatched[:5]:
        close = nearest(key, [other for other in near(layout, key, absent) if other != key])
        lines.append(f"`{key}`" + (f" (near: `{close}`)" if close else ""))
    more = len(matched.unmatched) - len(lines)
    alone = len(matched.unmatched) == 1
    strange = f"{counted(len(matched.unmatched), 'tensor')} {'is' if alone else 'are'} unknown"
    raise HomelessError(
        f"{strange} to `{family.name}` in layout `{layout.name}`",
        where=f"tensor `{matched.unmatched[0]}`",
        why=", ".join(lines) + (f" and {more:,} more" if more > 0 else ""),
        hint=f"set the right {spell_option('--model-type')} or {spell_option('--from-layout')}, "
        f"or omit {'it' if alone else 'one'} with "
        f"{spell_option(f'--exclude {shlex.quote(matched.unmatched[0])}')}",
        keys=matched.unmatched,
    )


def near(layout: Layout, key: str, absent: Sequence[str] = ()) -> list[str]:
    """List candidates for a misspelled *key*, both missing keys and keys with its indices."""
    numbers = [part for part in key.split(".") if part.isdigit()]
    known = []
    for leaf in layout.leaves.values():
        names = leaf.key.indices
        if len(names) <= len(numbers):
            values = zip(names, (int(n) for n in numbers), strict=False)
            known.append(leaf.key.key(dict(values)))
    return [*absent[:50], *known]


def require_whole(
    names: Sequence[str],
    number: int,
    family: Family,
    layout: Layout,
    *,
    tied: bool,
    strange: Sequence[str] = (),
    where: str | None = None,
    hint: str | None = None,
) -> None:
    """Require that no tensors are missing.

    Raises:
        MissingTensorsError: There are *names* of missing tensors.
    """
    if not names:
        return
    ends = {layout.leaves[t.tensor].key.text for t in family.ties if t.tensor in layout.leaves}
    if not tied and set(names) <= ends:
        hint = "if the embeddings are tied, set `tie_word_embeddings: true` in config.json"
    raise MissingTensorsError(
        f"the model is missing {counted(number, 'tensor')}"
        if number > 1
        else "the model is missing a tensor",
        where=where or f"tensor `{names[0]}`",
        why=f"`{family.name}` requires {listed(names, number=number)}"
        + (f", but has no {listed(strange)}" if strange else ""),
        hint=hint,
    )
