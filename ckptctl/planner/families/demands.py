"""What of a family's optional tensors a config.json demands, and which layers are of which kind."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from ckptctl.planner.families.declarations import Signs


class Chosen:
    """The sign that a value chooses something: it is not absent, null, false, 0 or empty."""

    def __eq__(self, other: object) -> bool:
        return bool(other)

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return "chosen"


class Unchosen:
    """The sign that a value chooses nothing."""

    def __eq__(self, other: object) -> bool:
        return not other

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return "not chosen"


CHOSEN, UNCHOSEN = Chosen(), Unchosen()


@dataclass(frozen=True, slots=True)
class Stated:
    """A declaration about facts of config.json; those of its attributes that name some."""

    names: ClassVar[tuple[str, ...]] = ()

    def within(self, module: str) -> Self:
        """Return the same of a model whose facts stand in the object *module*."""
        named = {name: value for name in self.names if (value := getattr(self, name))}
        return replace(self, **{name: _inside(module, value) for name, value in named.items()})


def _inside(module: str, value: Any) -> Any:
    """Return a name in config.json, a list's name and entries, or signs, as in *module*."""
    if isinstance(value, str):
        return f"{module}.{value}"
    if isinstance(value, tuple):
        return (f"{module}.{value[0]}", *value[1:])
    return {f"{module}.{fact}": sign for fact, sign in value.items()}


@dataclass(frozen=True, slots=True)
class Demand(Stated):
    """Optional tensors that a config.json demands, of the model or of some of its layers.

    Where only some layers have to have them, the others may have them all the same.

    Attributes:
        tensors: Their names without indices, or words that they come together with.
        when: What config.json has to say; empty: whatever it says.
        kinds: The name in config.json of the list of the layers' kinds, and the kinds that have
            them; empty: all have.
        but_last: The name of the number of last layers that do without; empty: none does.
        first: The name of the number of first layers that alone have them; empty: all have.
        after: The name of the number of first layers that do without; empty: none does.
    """

    names = ("when", "kinds", "but_last", "first", "after")
    tensors: tuple[str, ...]
    when: Signs = field(default_factory=dict)
    kinds: tuple[str | int, ...] = ()
    but_last: str = ""
    first: str = ""
    after: str = ""

    @property
    def by_layer(self) -> bool:
        """Return whether it tells layers apart."""
        return bool(self.kinds or self.but_last or self.first or self.after)


@dataclass(frozen=True, slots=True)
class LayerKind(Stated):
    """Which layers a config.json says are of a variant.

    A layer is of it where all that is named here holds. Of several for one variant, the first
    counts of which config.json, or transformers' default, states what it is about.

    Attributes:
        variant: One of those that the family declares.
        when: What config.json has to say; elsewhere no layer is of it.
        kinds: The name of the list of the layers' kinds, and the kinds that are meant.
        first: The name of the number of first layers that are of it.
        after: The name of the number of first layers that are not.
        numbers: The name of the list of the numbers of its layers.
        but: The name of the list of numbers of layers that are not of it.
        every: The name of a step: layers whose number, counted from 1, is a multiple of it.
    """

    names = ("when", "kinds", "first", "after", "numbers", "but", "every")
    variant: str
    when: Signs = field(default_factory=dict)
    kinds: tuple[str, ...] = ()
    first: str = ""
    after: str = ""
    numbers: str = ""
    but: str = ""
    every: str = ""

    @property
    def facts(self) -> tuple[str, ...]:
        """Return the names in config.json that decide."""
        names = (*self.kinds[:1], self.first, self.after, self.numbers, self.every, *self.when)
        return tuple(name for name in names if name)


@dataclass(frozen=True, slots=True)
class LayerSize(Stated):
    """The size of a free axis that config.json states for each layer.

    Attributes:
        fact: Its name in config.json.
        by_layer: The name of the object that has other values, by the number of the layer.
        kinds: The name of the list of the layers' kinds, and the kind that has a size of its own.
        other: The name of that size.
        doubled: The name of the switch that doubles it in the last layers.
        last: The name of the number of these.
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
        """Return the names in config.json that decide."""
        names = (self.fact, *self.kinds[:1], self.other, self.doubled, self.last, self.by_layer)
        return tuple(name for name in names if name)
