"""Optional tensors that a config.json requires, and the types of layers that it declares."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from ckptctl.planner.families.declarations import Conditions


class TruthyCondition:
    """A condition that truthy values meet (not absent, null, false, 0 or empty)."""

    def __eq__(self, other: object) -> bool:
        return bool(other)

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return "chosen"


class FalsyCondition:
    """A condition that falsy values meet (absent, null, false, 0 or empty)."""

    def __eq__(self, other: object) -> bool:
        return not other

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return "not chosen"


CHOSEN, UNCHOSEN = TruthyCondition(), FalsyCondition()


@dataclass(frozen=True, slots=True)
class ConfigDeclaration:
    """Base of declarations about fields of config.json.

    Attributes:
        names: Attributes that contain names of such fields.
    """

    names: ClassVar[tuple[str, ...]] = ()

    def with_prefix(self, module: str) -> Self:
        """Return the declaration for a model whose fields are in the object *module*."""
        field_values = {name: value for name in self.names if (value := getattr(self, name))}
        return replace(
            self, **{name: _add_prefix(module, value) for name, value in field_values.items()}
        )


def _add_prefix(module: str, value: Any) -> Any:
    """Add the prefix *module* to a field name, to the first entry of a tuple, or to conditions."""
    if isinstance(value, str):
        return f"{module}.{value}"
    if isinstance(value, tuple):
        return (f"{module}.{value[0]}", *value[1:])
    return {f"{module}.{fact}": sign for fact, sign in value.items()}


@dataclass(frozen=True, slots=True)
class Demand(ConfigDeclaration):
    """Optional tensors that a config.json requires, of the model or of some layers.

    If only some layers need them, other layers may have them too.

    Attributes:
        tensors: Names without indices, or the words of groups of optional tensors.
        when: Required values in config.json, or empty for no condition.
        kinds: Field of config.json that lists the layer types, followed by the types that need the
            tensors. Empty for all layers.
        but_last: Field with the number of last layers without them, or empty for none.
        first: Field with the number of first layers to which they are restricted, or empty for all.
        after: Field with the number of first layers without them, or empty for none.
    """

    names = ("when", "kinds", "but_last", "first", "after")
    tensors: tuple[str, ...]
    when: Conditions = field(default_factory=dict)
    kinds: tuple[str | int, ...] = ()
    but_last: str = ""
    first: str = ""
    after: str = ""

    @property
    def is_by_layer(self) -> bool:
        """Whether it applies to only some of the layers."""
        return bool(self.kinds or self.but_last or self.first or self.after)


@dataclass(frozen=True, slots=True)
class LayerKind(ConfigDeclaration):
    """A rule that finds the layers of a variant from config.json.

    A layer has the variant if all conditions hold. If a variant has several rules, the first one
    applies whose fields are in config.json or have a default in transformers.

    Attributes:
        variant: A variant that the family declares.
        when: Required values in config.json. Otherwise no layer has the variant.
        kinds: Field that lists the layer types, followed by the types of the variant.
        first: Field with the number of first layers that have the variant.
        after: Field with the number of first layers that do not have it.
        numbers: Field that lists the numbers of its layers.
        but: Field that lists the numbers of layers that do not have it.
        every: Field with a step. Layers whose number, counted from 1, is a multiple have it.
    """

    names = ("when", "kinds", "first", "after", "numbers", "but", "every")
    variant: str
    when: Conditions = field(default_factory=dict)
    kinds: tuple[str, ...] = ()
    first: str = ""
    after: str = ""
    numbers: str = ""
    but: str = ""
    every: str = ""

    @property
    def facts(self) -> tuple[str, ...]:
        """Fields of config.json that determine the layers."""
        names = (*self.kinds[:1], self.first, self.after, self.numbers, self.every, *self.when)
        return tuple(name for name in names if name)


@dataclass(frozen=True, slots=True)
class LayerSize(ConfigDeclaration):
    """The size of a free axis that config.json states per layer.

    Attributes:
        axis: The axis.
        fact: Field with the size.
        by_layer: Field with an object of different sizes, by layer number.
        kinds: Field that lists the layer types, followed by the type with a different size.
        other: Field with the different size.
        doubled: Switch that doubles the size in the last layers.
        last: Field with the number of last layers whose size is doubled.
    """

    names = ("fact", "by_layer", "kinds", "other", "doubled", "last")
    axis: str
    fact: str
    by_layer: str = ""
    kinds: tuple[str, ...] = ()
    other: str = ""
    doubled: str = ""
    last: str = ""

    @property
    def facts(self) -> tuple[str, ...]:
        """Fields of config.json that determine the size."""
        names = (self.fact, *self.kinds[:1], self.other, self.doubled, self.last, self.by_layer)
        return tuple(name for name in names if name)
