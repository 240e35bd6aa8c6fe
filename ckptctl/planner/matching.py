"""Which logical tensor each key is, and whether all that a model needs are there."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from ckptctl.errors import MappingError, listed, nearest
from ckptctl.planner.layouts import Drop, Family, Layout
from ckptctl.planner.tables import Tensor

Slot: TypeAlias = tuple[str, tuple[int, ...]]
"""One logical tensor: its name, as in ``q.{i}``, and the values of its indices."""


@dataclass(slots=True)
class Matched:
    """The keys of a checkpoint, understood.

    Attributes:
        keys: For each logical tensor found the key that holds it.
        dropped: Keys without information, and why.
        unmatched: Keys that the layout does not know, in the order given.
    """

    keys: dict[Slot, str] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    unmatched: list[str] = field(default_factory=list)

    def counts(self, family: Family) -> dict[str, int]:
        """Return for each index one more than its largest value."""
        counts: dict[str, int] = {}
        for name, values in self.keys:
            for index, value in zip(family.tensors[name].indices, values, strict=True):
                counts[index] = max(counts.get(index, 0), value + 1)
        return counts


def match(layout: Layout, keys: Iterable[str]) -> Matched:
    """Return what each of *keys* is in *layout*."""
    matched = Matched()
    for key in keys:
        found = layout.table.find(key)
        if found is None:
            matched.unmatched.append(key)
            continue
        meaning, values = found
        if isinstance(meaning, Drop):
            matched.dropped[key] = meaning.reason
        else:
            matched.keys[meaning.name, tuple(values[i] for i in meaning.indices)] = key
    return matched


def key_of(layout: Layout, tensor: Tensor, values: tuple[int, ...]) -> str:
    """Return the key of a logical tensor in *layout*, which has it."""
    return layout.leaves[tensor.name].key.key(dict(zip(tensor.indices, values, strict=True)))


def slots(tensor: Tensor, counts: Mapping[str, int]) -> list[tuple[int, ...]]:
    """Return the index values of all tensors of a kind, in order."""
    found: list[tuple[int, ...]] = [()]
    for index in tensor.indices:
        found = [(*head, value) for head in found for value in range(counts.get(index, 0))]
    return found


def tied_away(family: Family, layout: str, tied: bool) -> Collection[str]:
    """Return the logical tensors that *layout* leaves out because they equal others."""
    return {tie.tensor for tie in family.ties if tied and layout not in tie.stored_in}


def missing(
    family: Family, layout: Layout, matched: Matched, counts: Mapping[str, int]
) -> list[str]:
    """Return the keys that a whole model would have and this one has not.

    An optional tensor is expected of every layer as soon as one layer has it. The list ends after
    one that nobody would read to the end.
    """
    present = {name for name, _ in matched.keys}
    limit = len(matched.keys) + 1
    counts = {index: min(count, limit) for index, count in counts.items()}
    return [
        key_of(layout, family.tensors[name], values)
        for name in layout.leaves
        if name in present or not family.tensors[name].optional
        for values in slots(family.tensors[name], counts)
        if (name, values) not in matched.keys
    ]


def require_known(family: Family, layout: Layout, matched: Matched, absent: list[str]) -> None:
    """Refuse keys that the layout does not know.

    Args:
        family: For messages.
        layout: That of the source.
        matched: What was found.
        absent: The keys that are missing: the first candidates for what was meant.

    Raises:
        MappingError: There are some; each of the first five with the nearest known key.
    """
    if not matched.unmatched:
        return
    lines = []
    for key in matched.unmatched[:5]:
        close = nearest(key, _candidates(layout, key, absent))
        lines.append(f"`{key}`" + (f" (near: `{close}`)" if close else ""))
    more = len(matched.unmatched) - len(lines)
    raise MappingError(
        f"{len(matched.unmatched):,} tensors are unknown to `{family.name}` in layout "
        f"`{layout.name}`",
        where=f"tensor `{matched.unmatched[0]}`",
        why=", ".join(lines) + (f" and {more:,} more" if more > 0 else ""),
        hint="is this another model type or layout (--model-type, --from-layout)? "
        "--exclude leaves tensors out",
    )


def _candidates(layout: Layout, key: str, absent: list[str]) -> list[str]:
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
