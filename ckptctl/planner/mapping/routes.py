"""Where one key of a layout goes in another one, by the tables alone: no checkpoint is needed."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckptctl.errors import MappingError, listed
from ckptctl.planner.families.tables import Leaf, Tensor
from ckptctl.planner.layouts import Drop, Family, Stored
from ckptctl.planner.mapping.arrivals import Arrival, Arrivals, Values
from ckptctl.planner.mapping.completeness import near
from ckptctl.planner.mapping.formulas import Extents
from ckptctl.planner.mapping.numbering import KeyNumbers


@dataclass(slots=True)
class Route:
    """What becomes of one key.

    Attributes:
        key: As asked.
        template: The key template that it matches.
        arrivals: The target tensors that it is, or is a part of.
        dropped: Why it is left out; empty: it is not.
        notes: What else one should know.
    """

    key: str
    template: str = ""
    arrivals: list[Arrival] = field(default_factory=list)
    dropped: str = ""
    notes: list[str] = field(default_factory=list)


def route(
    family: Family,
    source_layout: str,
    target_layout: str,
    key: str,
    sizes: Mapping[str, int],
    *,
    tied: bool | None = None,
    lists: Mapping[str, Sequence[int]] | None = None,
) -> Route:
    """Return where *key* goes.

    Args:
        family: The model type.
        source_layout: The layout that *key* is of.
        target_layout: Where it goes to.
        key: The name of a tensor, or a template with indices such as ``{i}``.
        sizes: What is known of axis sizes.
        tied: Whether tied tensors are one; None: as the family does.
        lists: Lists of layer numbers that the configuration states.

    Raises:
        MappingError: The layout has no such key, the other one has no place for it, or layers
            are numbered by sizes that are not known.
        UsageError: The family has no such layout.
    """
    tied = family.tied if tied is None else tied
    return _Router(family, source_layout, target_layout, sizes, tied, lists or {}).route(key)


class _Router:
    def __init__(
        self,
        family: Family,
        source: str,
        target: str,
        sizes: Mapping[str, int],
        tied: bool,
        lists: Mapping[str, Sequence[int]],
    ) -> None:
        self.family, self.extents = family, Extents(family, sizes)
        self.source, self.target = family.layout(source), family.layout(target)
        self.tied, self.ties = tied, family.ties if tied else ()
        self.numbers = KeyNumbers(family, sizes, lists)
        self.found = Route("")

    def route(self, key: str) -> Route:
        self.found = Route(key)
        meaning, values = self._meaning(key)
        if isinstance(meaning, Drop):
            self.found.template, self.found.dropped = meaning.key, meaning.reason
            if meaning.zeros:
                self.found.notes.append("refused where it holds anything but zeros")
            return self.found
        self.found.template = meaning.template.text
        kinds = {tensor.variant for tensor, _ in meaning.parts}
        for tensor, leaf in meaning.parts:
            self._follow(tensor, leaf, values, tensor.variant if len(kinds) > 1 else None)
        if self.found.arrivals:
            self.found.dropped = ""
        return self.found

    # ------------------------------------------------------------------ what the key stands for

    def _meaning(self, key: str) -> tuple[Stored | Drop, Values]:
        for stored in self.source.stored:
            if stored.template.text == key and stored.template.indices:
                return stored, {index: f"{{{index}}}" for index in stored.template.indices}
        layout, numbers = self.source.name, [int(n) for n in key.split(".") if n.isdecimal()]
        numbering = self.numbers.numbering(layout, numbers)
        meanings = list(self.source.table.all(key))
        for meaning, found in meanings:
            if numbering is not None:
                values = numbering.logical(found)
                if values is not None:
                    return meaning, values
            elif not self.numbers.inserted(layout) & found.keys():
                self._presume()
                return meaning, found
        raise self.numbers.unknown(layout) if meanings else self._unknown(key)

    def _presume(self) -> None:
        self.found.notes.append(
            f"taken for one of the first {self.family.called('i')} layers; "
            "layers of another kind are numbered among or after them: --set or --config tells them"
        )

    def _unknown(self, key: str) -> MappingError:
        close = difflib.get_close_matches(key, near(self.source, key), n=3, cutoff=0.5)
        others = [
            name
            for name in self.family.layouts
            if next(self.family.layout(name).table.all(key), None) is not None
        ]
        return MappingError(
            f"layout `{self.source.name}` of `{self.family.name}` has no key `{key}`",
            why=f"nearest are {listed(close)}" if close else None,
            hint=f"it is a key of layout {' and '.join(f'`{name}`' for name in others)}"
            if others
            else f"`ckptctl models {self.family.name} --layout {self.source.name}` lists them",
        )

    # -------------------------------------------------------------------------- where it arrives

    def _follow(self, tensor: Tensor, leaf: Leaf, values: Values, variant: str | None) -> None:
        """Note where a logical tensor goes that the key holds."""
        if self._tied_away(tensor):
            return
        other = self._other_tiles(tensor)
        there, at = self.target.leaves, self.target.name
        if tensor.name not in there and other is None:
            raise self._homeless(tensor)
        if tensor.name not in there and other is not None:
            self.found.arrivals.append(self._arrivals().tile_by_tile(tensor, leaf, other))
            return
        twins = (t.tensor for t in self.ties if t.of == tensor.name and at in t.stored_in)
        for name in (tensor.name, *(twin for twin in twins if twin in there)):
            found = self._arrivals().of(self.family.tensors[name], leaf, values, variant)
            if all(arrival.key != found.key for arrival in self.found.arrivals):
                self.found.arrivals.append(found)

    def _tied_away(self, tensor: Tensor) -> bool:
        """Whether another tensor stands for *tensor*: note which."""
        for tie in self.ties:
            if tensor.name == tie.tensor and tie.of in self.source.leaves:
                kept = self.source.leaves[tie.of].key.text
                self.found.dropped = f"tied: the same as `{kept}`"
                if self.target.name in tie.stored_in and tensor.name in self.target.leaves:
                    there = self.target.leaves[tensor.name].key.text
                    self.found.notes.append(f"`{there}` is made of `{kept}`")
                return True
        return False

    def _arrivals(self) -> Arrivals:
        return Arrivals(
            self.family,
            self.source,
            self.target,
            self.tied,
            self.extents,
            self.numbers,
            self.found.key,
            self.found.template,
        )

    def _homeless(self, tensor: Tensor) -> MappingError:
        return MappingError(
            f"layout `{self.target.name}` of `{self.family.name}` has no place for "
            f"`{self.found.key}`",
            why=f"a model that has `{tensor.name.partition('.')[0]}` cannot be expressed there",
            hint="keep its layout",
        )

    def _other_tiles(self, tensor: Tensor) -> Tensor | None:
        """Return the tensor that stands for embeddings of tiles in the target."""
        others = (tiles.other(tensor.name) for tiles in self.family.tiles)
        return next((self.family.tensors[n] for n in others if n in self.target.leaves), None)
