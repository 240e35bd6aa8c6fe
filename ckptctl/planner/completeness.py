"""Whether all that a model needs are there, and nothing that its layout does not know."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TypeAlias

from ckptctl.errors import HomelessError, MappingError, listed, nearest
from ckptctl.planner.layouts import Family, Layout
from ckptctl.planner.matching import Matched, key_of, leads, slots
from ckptctl.planner.tables import Tensor

MANY = 1000
"""So many missing keys are counted in any case."""

Kind: TypeAlias = tuple[str, tuple[str, ...]]
"""A variant, and the indices of the layers that are of it."""


def missing(
    family: Family, layout: Layout, matched: Matched, counts: Mapping[str, int]
) -> list[str]:
    """Return the keys that a whole model would have and this one has not.

    An optional tensor is expected of every layer as soon as one layer has it, one of a variant of
    the layers that are of that variant. The list ends after one that nobody would read to the end.
    """
    if family.partial:
        return []
    limit = len(matched.stored) + 1
    counts = {index: min(count, limit) for index, count in counts.items()}
    expected = _Expected(family, layout, matched, counts)
    found = (
        key
        for name in layout.leaves
        for values in expected.slots(family.tensors[name])
        for key in _absent(family.tensors[name], layout, matched, values, counts)
    )
    return list(dict.fromkeys(islice(found, 2 * limit + MANY)))


def _absent(
    tensor: Tensor,
    layout: Layout,
    matched: Matched,
    values: tuple[int, ...],
    counts: Mapping[str, int],
) -> Iterator[str]:
    found = matched.keys.get((tensor.name, values), {})
    leaf = layout.leaves[tensor.name]
    if len(found) < math.prod(counts.get(axis, 0) for axis in leaf.spread):
        for lead in leads(leaf, counts):
            if lead not in found:
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
        self._present = {name for name, _ in matched.keys}
        self._layers: dict[Kind, set[tuple[int, ...]]] = {}
        for name, values in matched.keys:
            tensor = family.tensors[name]
            if tensor.variant:
                self._layers.setdefault((tensor.variant, tensor.indices), set()).add(values)
        known = {family.tensors[name].variant for name in layout.leaves}
        for group in family.variants:
            self._complete([variant for variant in group if variant in known], family)

    def slots(self, tensor: Tensor) -> Sequence[tuple[int, ...]]:
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
    layers: dict[Kind, dict[tuple[int, ...], str]] = {}
    for (name, values), keys in matched.keys.items():
        tensor = family.tensors[name]
        if tensor.variant:
            kind = tensor.variant, tensor.indices
            layers.setdefault(kind, {}).setdefault(values, next(iter(keys.values())))
    for group in family.variants:
        seen: dict[object, str] = {}
        for (variant, indices), found in layers.items():
            for values, key in found.items() if variant in group else ():
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
