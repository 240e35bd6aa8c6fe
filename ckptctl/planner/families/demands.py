"""Declarations that derive required tensors and layer types from fields of config.json."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from ckptctl.planner.families.declarations import Conditions, split_aliases


class TruthyCondition:
    """Condition that a field is truthy, which excludes absent, null, false, 0 and empty values."""

    def __eq__(self, other: object) -> bool:
        return bool(other)

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return "chosen"


class FalsyCondition:
    """Condition that a field is falsy, which means absent, null, false, 0 or empty."""

    def __eq__(self, other: object) -> bool:
        return not other

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return "not chosen"


CHOSEN, UNCHOSEN = TruthyCondition(), FalsyCondition()

LAYER_INDEX = "i"
"""Index of the decoder layers that config.json counts. MTP layers have another index."""


@dataclass(frozen=True, slots=True)
class ConfigDeclaration:
    """Base class of declarations about fields of config.json.

    Attributes:
        names: Names of the attributes that contain names of config fields.
    """

    names: ClassVar[tuple[str, ...]] = ()

    def with_prefix(self, module: str) -> Self:
        """Return a copy of the declaration for fields that are nested under *module*."""
        field_values = {name: value for name in self.names if (value := getattr(self, name))}
        return replace(
            self, **{name: _add_prefix(module, value) for name, value in field_values.items()}
        )


def _add_prefix(module: str, value: Any) -> Any:
    """Prefix a field name with *module*, also as the first entry of a tuple or as a condition."""
    if isinstance(value, str):
        return value if value.isdecimal() else f"{module}.{value}"
    if isinstance(value, tuple):
        return (f"{module}.{value[0]}", *value[1:])
    return {f"{module}.{fact}": sign for fact, sign in value.items()}


@dataclass(frozen=True, slots=True)
class Demand(ConfigDeclaration):
    """A rule by which config.json requires optional tensors in the model or in some layers.

    Layers to which the rule does not apply may have the tensors too.

    Attributes:
        tensors: Names of optional tensors without indices, or words of their groups.
        when: Conditions on config.json, or empty if the rule always applies.
        kinds: Field of config.json that lists the layer types, followed by the types that need the
            tensors. Empty for all layers.
        but_last: Field with the number of last layers to exclude, or empty to exclude none.
        first: Field with the number of first layers to include, or empty to include all.
        after: Field with the number of first layers to exclude, or empty to exclude none.
        last: Field with the number of last layers to include, or empty to include all.
        numbers: Field that lists the numbers of layers to include, or empty to include all.
        start: Number of the first layer in *numbers*.
        sources: Field that lists for every layer the layer whose tensors it uses. Only layers that
            use their own tensors are included. Empty to include all.
        period: Field with a number of layers. The last layer of each such group, and layers after
            the last complete group, are excluded. Empty to exclude none.
        index: Index of the layers.

    *but_last*, *first*, *after* and *last* may also be the number itself.
    """

    names = (
        *("when", "kinds", "but_last", "first", "after", "last", "numbers", "sources"),
        "period",
    )
    tensors: tuple[str, ...]
    when: Conditions = field(default_factory=dict)
    kinds: tuple[str | int, ...] = ()
    but_last: str = ""
    first: str = ""
    after: str = ""
    last: str = ""
    numbers: str = ""
    start: int = 0
    sources: str = ""
    period: str = ""
    index: str = LAYER_INDEX

    @property
    def facts(self) -> tuple[str, ...]:
        """Fields of config.json that determine the tensors and layers."""
        counts = (name for name in self.counts if not name.isdecimal())
        names = (*self.when, *self.kinds[:1], *counts, self.numbers, self.sources)
        return tuple(str(name) for name in (*names, self.period) if name)

    @property
    def counts(self) -> tuple[str, str, str, str]:
        """Fields that contain numbers of layers, or the numbers themselves."""
        return self.but_last, self.first, self.after, self.last

    @property
    def is_by_layer(self) -> bool:
        """Whether the rule requires the tensors only in some layers."""
        lists = (self.kinds, self.numbers, self.sources, self.period)
        return any(lists) or any(self.counts)


@dataclass(frozen=True, slots=True)
class LayerKind(ConfigDeclaration):
    """A rule that determines from config.json the layers of a variant.

    A layer has the variant if all conditions hold. If a variant has several rules, only the first
    rule applies whose fields are in config.json or have a default in transformers.

    Attributes:
        variant: A variant that the family declares.
        when: Conditions on config.json. If they do not hold, no layer has the variant.
        kinds: Field that lists the layer types, followed by the layer types of the variant.
        first: Field with the number of first layers that have the variant.
        after: Field with the number of first layers that do not have it.
        numbers: Field that lists the numbers of layers that have the variant, as a list or a string
            with commas.
        start: Number of the first layer in *numbers*.
        but: Field that lists the numbers of layers that do not have it.
        every: Field with a period. Every layer whose number, counted from 1, is a multiple of the
            period has the variant.
        offset: Field with the number of the first layer, counted from 0, from which *every* counts
            instead.
        last: Field with the number of the last layer, counted from 0, that has the variant.
    """

    names = ("when", "kinds", "first", "after", "numbers", "but", "every", "offset", "last")
    variant: str
    when: Conditions = field(default_factory=dict)
    kinds: tuple[str | int, ...] = ()
    first: str = ""
    after: str = ""
    numbers: str = ""
    but: str = ""
    every: str = ""
    offset: str = ""
    last: str = ""
    start: int = 0

    @property
    def facts(self) -> tuple[str, ...]:
        """Fields of config.json that determine the layers."""
        counts = (self.first, self.after, self.numbers, self.every, self.offset, self.last)
        return tuple(str(name) for name in (*self.kinds[:1], *counts, *self.when) if name)


@dataclass(frozen=True, slots=True)
class LayerSize(ConfigDeclaration):
    """The size of a free axis that config.json states per layer.

    Attributes:
        axis: Name of the axis.
        fact: Field with the default size.
        by_layer: Field that maps layer numbers to configs with different sizes.
        listed: Field that lists the size of every layer, or empty if there is no such list.
        kinds: Field that lists the layer types, followed by the type with a different size.
        other: Field with the size in layers of that type. ``a|b`` lists several names.
        doubled: Boolean field that doubles the size in the last layers.
        last: Field with the number of last layers whose size is doubled.
    """

    names = ("fact", "by_layer", "listed", "kinds", "other", "doubled", "last")
    axis: str
    fact: str
    by_layer: str = ""
    listed: str = ""
    kinds: tuple[str, ...] = ()
    other: str = ""
    doubled: str = ""
    last: str = ""

    @property
    def facts(self) -> tuple[str, ...]:
        """Fields of config.json that determine the size."""
        names = (self.fact, *self.kinds[:1], *split_aliases(self.other), self.doubled, self.last)
        return tuple(name for name in (*names, self.by_layer, self.listed) if name)


@dataclass(frozen=True, slots=True)
class LayerWord(ConfigDeclaration):
    """A placeholder of keys for a word that depends on the kind of the layer.

    Attributes:
        name: Name of the placeholder, as in ``{name=first|second}``.
        fact: Field of config.json that lists the layer types.
        kinds: Layer types with each of the words, in their order.
        index: Index of the layers.
    """

    names = ("fact",)
    name: str
    fact: str
    kinds: tuple[tuple[str, ...], ...]
    index: str = LAYER_INDEX
