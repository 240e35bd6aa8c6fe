"""Whether all that a model needs are there, and nothing that its layout does not know."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, islice

from ckptctl.errors import HomelessError, MappingError, listed, nearest
from ckptctl.planner.families.tables import Tensor
from ckptctl.planner.layouts import Family, Layout
from ckptctl.planner.mapping.matching import LayerKind, Matched, Values, key_of, leads, slots

MANY = 1000
"""So many missing keys are counted in any case."""


def missing(
    family: Family, layout: Layout, matched: Matched, counts: Mapping[str, int]
) -> list[str]:
    """Return the keys that a whole model would have and this one has not.

    An optional tensor is expected of every layer as soon as one layer has it, one of a variant of
    the layers that are of that variant. The list ends after one that nobody would read to the end.
    """
    return list(absent(family, layout, matched, counts))


def absent(
    family: Family, layout: Layout, matched: Matched, counts: Mapping[str, int]
) -> Iterator[str]:
    """Yield what :func:`missing` returns."""
    if family.partial:
        return
    limit = sum(len(group.keys) for group in matched.groups) + 1
    counts = {index: min(count, limit) for index, count in counts.items()}
    expected = _Expected(family, layout, matched, counts)
    found = (
        key
        for name in layout.leaves
        for key in _absent(family.tensors[name], layout, matched, expected, counts)
    )
    seen: set[str] = set()
    for key in islice(found, 2 * limit + MANY):
        if key not in seen:
            seen.add(key)
            yield key


def _absent(
    tensor: Tensor,
    layout: Layout,
    matched: Matched,
    expected: _Expected,
    counts: Mapping[str, int],
) -> Iterator[str]:
    """Yield the keys of *tensor* that are not there: where their number is right, none is."""
    leaf = layout.leaves[tensor.name]
    each = math.prod(counts.get(axis, 0) for axis in leaf.spread)
    if matched.number(tensor) == expected.number(tensor) * each:
        return
    there = matched.places(tensor, leaf.spread)
    for values in expected.slots(tensor):
        for lead in leads(leaf, counts):
            if (*values, *lead) not in there:
                yield key_of(layout, tensor, values, lead, matched.numbering)


class _Expected:
    """Which logical tensors a whole model has, judged by those that are there.

    Args:
        family: The model type.
        layout: That of the source.
        matched: What was found.
        counts: How many there are of each index.
    """

    def __init__(
        self, family: Family, layout: Layout, matched: Matched, counts: Mapping[str, int]
    ) -> None:
        self._counts = counts
        self._present = {
            tensor.name
            for group in matched.groups
            for tensor, _ in group.stored.parts
            if matched.number(tensor)
        }
        self._layers = {kind: set(layers) for kind, layers in matched.layers.items()}
        known = {family.tensors[name].variant for name in layout.leaves}
        for group in family.variants:
            self._complete([variant for variant in group if variant in known], family)

    def number(self, tensor: Tensor) -> int:
        """Return at how many index values *tensor* has to be."""
        if tensor.variant or (tensor.optional and tensor.name not in self._present):
            return len(self.slots(tensor))
        return math.prod(self._counts.get(index, 0) for index in tensor.indices)

    def slots(self, tensor: Tensor) -> Sequence[Values]:
        """Return the index values at which *tensor* has to be."""
        if tensor.optional and tensor.name not in self._present:
            return ()
        if tensor.variant:
            return sorted(self._layers.get((tensor.variant, tensor.indices), ()))
        return slots(tensor, self._counts)

    def _complete(self, group: Sequence[str], family: Family) -> None:
        """Expect the most frequent variant where a layer has none of a group."""
        samples = {t.indices: t for t in family.tensors.values() if t.variant in group}
        for indices, sample in samples.items():
            layers = {variant: self._layers.get((variant, indices), set()) for variant in group}
            shown = max(group, key=lambda variant: len(layers[variant]))
            covered = set().union(*layers.values())
            self._layers.setdefault((shown, indices), set()).update(
                values for values in slots(sample, self._counts) if values not in covered
            )


def torn(family: Family, matched: Matched) -> str | None:
    """Return what is wrong with layers that have tensors of two variants; None: nothing."""
    layers = matched.layers
    for group in family.variants:
        for one, other in combinations([kind for kind in layers if kind[0] in group], 2):
            if one[1] == other[1] and not layers[one].isdisjoint(layers[other]):
                return _contradiction(family, group, matched)
    return None


def _contradiction(family: Family, group: Sequence[str], matched: Matched) -> str | None:
    """Return which keys show that a layer is of two variants of *group*, the first such ones."""
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
                return f"`{seen[indices, values]}` and `{key}` exclude each other"
            seen[indices, values] = key
    return None


def require_known(family: Family, layout: Layout, matched: Matched, absent: list[str]) -> None:
    """Refuse keys that the layout does not know.

    Args:
        family: For messages.
        layout: That of the source.
        matched: What was found.
        absent: The keys that are missing: the first candidates for what was meant.

    Raises:
        HomelessError: There are some; each of the first five with the nearest known key.
    """
    if not matched.unmatched:
        return
    lines = []
    for key in matched.unmatched[:5]:
        close = nearest(key, [other for other in near(layout, key, absent) if other != key])
        lines.append(f"`{key}`" + (f" (near: `{close}`)" if close else ""))
    more = len(matched.unmatched) - len(lines)
    raise HomelessError(
        f"{len(matched.unmatched):,} tensors are unknown to `{family.name}` in layout "
        f"`{layout.name}`",
        where=f"tensor `{matched.unmatched[0]}`",
        why=", ".join(lines) + (f" and {more:,} more" if more > 0 else ""),
        hint="is this another model type or layout (--model-type, --from-layout)? "
        "--exclude leaves tensors out",
        keys=matched.unmatched,
    )


def near(layout: Layout, key: str, absent: Sequence[str] = ()) -> list[str]:
    """Return keys that *key* may have been meant to be: those missing, those of its indices."""
    numbers = [part for part in key.split(".") if part.isdigit()]
    known = []
    for leaf in layout.leaves.values():
        names = leaf.key.indices
        if len(names) <= len(numbers):
            values = zip(names, (int(n) for n in numbers), strict=False)
            known.append(leaf.key.key(dict(values)))
    return [*absent[:50], *known]


def require_whole(family: Family, layout: Layout, absent: list[str], tied: bool) -> None:
    """Refuse a model of which something is missing.

    Raises:
        MappingError: *absent* is not empty.
    """
    if not absent:
        return
    ends = {layout.leaves[t.tensor].key.text for t in family.ties if t.tensor in layout.leaves}
    hint = "the checkpoint is incomplete; --include or --exclude convert a part on purpose"
    if not tied and set(absent) <= ends:
        hint = "are the embeddings tied? Then config.json has to say `tie_word_embeddings: true`"
    raise MappingError(
        f"{len(absent):,} tensors that `{family.name}` needs are missing",
        where=f"tensor `{absent[0]}`",
        why=f"missing: {listed(absent)}",
        hint=hint,
    )
