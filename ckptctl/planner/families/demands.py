"""What of a family's optional tensors a config.json demands."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

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
class Demand:
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

    def within(self, name: str) -> Demand:
        """Return the same of a model whose facts stand in the object *name*."""
        return replace(
            self,
            when={f"{name}.{fact}": sign for fact, sign in self.when.items()},
            kinds=(f"{name}.{self.kinds[0]}", *self.kinds[1:]) if self.kinds else (),
            but_last=f"{name}.{self.but_last}" if self.but_last else "",
            first=f"{name}.{self.first}" if self.first else "",
            after=f"{name}.{self.after}" if self.after else "",
        )
