"""Say which model families are known, and what their tables say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ckptctl import families
from ckptctl.errors import UsageError, nearest
from ckptctl.planner.families.declarations import Signs, spellings
from ckptctl.planner.families.tables import Leaf, Tensor, show_dims
from ckptctl.planner.layouts import Family, Layout

SHOWN_KEYS = 3
NOT_PROVEN = "not proven by logits"


@dataclass(frozen=True, slots=True)
class Row:
    """How a layout stores a logical tensor.

    Attributes:
        tensor: Its logical name.
        key: Template of the stored tensor's name.
        axes: The order of its axes there.
        part: Its place among *parts*; None: it is stored by itself.
        parts: Names of the logical tensors that are concatenated in the stored one.
        along: The dimension along which they are.
        spread: Axes of which each entry is a stored tensor of its own.
        split: The axis that model-parallel ranks divide; None: they all have it whole.
        optional: Whether a model may do without it.
        variant: The variant of layers that has it; None: all have.
    """

    tensor: str
    key: str
    axes: str
    part: int | None
    parts: tuple[str, ...]
    along: int
    spread: tuple[str, ...]
    split: str | None
    optional: bool
    variant: str | None

    def to_json(self) -> dict[str, object]:
        """Return the published object (``docs/reference/json.md``)."""
        return {
            "tensor": self.tensor,
            "key": self.key,
            "axes": self.axes,
            "part": self.part,
            "parts": list(self.parts),
            "along": self.along,
            "spread": list(self.spread),
            "split": self.split,
            "optional": self.optional,
            "variant": self.variant,
        }


@dataclass(frozen=True, slots=True)
class LayoutTable:
    """One layout of a family, as people read it.

    Attributes:
        name: As in ``torchtitan@0.3``.
        same_as: An earlier layout that keeps every tensor alike; its rows are not repeated.
        rows: One per logical tensor.
        own_keys: Key templates that no other family has, at most three.
        dropped: Key templates of tensors without information, and why nothing is lost.
    """

    name: str
    same_as: str | None
    rows: tuple[Row, ...]
    own_keys: tuple[str, ...]
    dropped: Mapping[str, str]

    def to_json(self) -> dict[str, object]:
        """Return the published object (``docs/reference/json.md``)."""
        return {
            "name": self.name,
            "same_as": self.same_as,
            "rows": [row.to_json() for row in self.rows],
            "own_keys": list(self.own_keys),
            "dropped": dict(self.dropped),
        }


@dataclass(frozen=True, slots=True)
class Model:
    """A family.

    Attributes:
        family: Its tables.
        layouts: Those of its layouts that were asked for.
        recognised: How a configuration shows it, in words; the keys come after that.
        tables: What each layout keeps; empty in a list of families.
    """

    family: Family
    layouts: tuple[str, ...]
    recognised: tuple[str, ...]
    tables: tuple[LayoutTable, ...] = field(default=())

    def proof(self, layout: str) -> str:
        """Return with what the logits of *layout* were compared."""
        return self.family.proofs.get(layout, NOT_PROVEN)

    def to_json(self) -> dict[str, object]:
        """Return the published object (``docs/reference/json.md``)."""
        family = self.family
        document: dict[str, object] = {
            "name": family.name,
            "title": family.title,
            "aliases": list(family.aliases),
            "architecture": family.architecture,
            "refines": family.refines,
            "recognised": list(self.recognised),
            "layouts": [{"name": name, "proof": family.proofs.get(name)} for name in self.layouts],
        }
        return document | (self._details() if self.tables else {})

    def _details(self) -> dict[str, object]:
        family = self.family
        return {
            "tables": [table.to_json() for table in self.tables],
            "ties": [
                {"tensor": tie.tensor, "of": tie.of, "stored_in": list(tie.stored_in)}
                for tie in family.ties
            ],
            "tied": family.tied,
            "variants": [list(group) for group in family.variants],
            "sizes": [
                {"axis": axis, "config": config or None, "params": params or None}
                for axis, names in family.sizes.items()
                for config, params in [(spellings(names[0])[0], spellings(names[1])[0])]
            ],
            "constants": dict(family.constants),
            "composite": {axis: list(parts) for axis, parts in family.composite.items()},
            "pinned": list(family.pinned),
        }


def models(name: str | None = None, layout: str | None = None) -> tuple[Model, ...]:
    """All families, none of whose tables is parsed; or one of them with its tables."""
    if name is not None:
        family = families.family(name)
        if layout is not None:
            family.layout(layout)
        chosen = (layout,) if layout else family.layouts
        tables = tuple(_tables(family, chosen))
        return (Model(family, chosen, tuple(_recognised(family)), tables),)
    known = families.families()
    if layout is not None:
        _require_layout(layout, known)
    return tuple(
        Model(family, (layout,) if layout else family.layouts, tuple(_recognised(family)))
        for family in known.values()
        if layout is None or layout in family.layouts
    )


def _require_layout(layout: str, known: Mapping[str, Family]) -> None:
    names = sorted({name for family in known.values() for name in family.layouts})
    if layout not in names:
        close = nearest(layout, names)
        raise UsageError(
            f"unknown layout `{layout}`",
            why=f"known: {', '.join(names)}",
            hint=f"did you mean `{close}`?" if close else None,
        )


def _recognised(family: Family) -> Iterator[str]:
    for file, alternatives in (
        ("config.json", family.config_signs),
        ("params.json", family.params_signs),
    ):
        if alternatives:
            yield f"{file}: {'; or '.join(map(_said, alternatives))}"
    if not family.config_signs and not family.params_signs:
        yield "its keys alone"


def _said(signs: Signs) -> str:
    return ", ".join(
        f"no {name}" if value is None else f"{name} {_value(value)}"
        for name, value in signs.items()
    )


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _tables(family: Family, chosen: tuple[str, ...]) -> Iterator[LayoutTable]:
    others = [other for other in families.families().values() if other.name != family.name]
    earlier: list[Layout] = []
    for name in chosen:
        layout = family.layout(name)
        twin = next((other.name for other in earlier if layout.same_as(other)), None)
        rows = () if twin else tuple(_rows(family, layout))
        dropped = {drop.key: drop.reason for drop in family.drops if drop.layout == name}
        yield LayoutTable(name, twin, rows, _own_keys(layout, others), dropped)
        earlier.append(layout)


def _own_keys(layout: Layout, others: list[Family]) -> tuple[str, ...]:
    """Return key templates that tell the family from all others; at most three."""
    spelled = {stored.template: frozenset(_words(stored.template.text)) for stored in layout.stored}
    own = dict(spelled)
    for other in others:
        spoken = {template: words for template, words in own.items() if words <= other.words}
        for name in other.layouts if spoken else ():
            table = other.layout(name).table
            own = {t: w for t, w in own.items() if not table.knows(t.skeleton)}
    return tuple(template.text for template in own)[:SHOWN_KEYS]


def _words(template: str) -> Iterator[str]:
    return (part for part in template.split(".") if "{" not in part and not part.isdecimal())


def _rows(family: Family, layout: Layout) -> Iterator[Row]:
    parts = {
        logical.name: tuple(dict.fromkeys(_plain(other) for other, _ in stored.parts))
        for stored in layout.stored
        for logical, _ in stored.parts
    }
    for name, leaf in layout.leaves.items():
        yield _row(family.tensors[name], leaf, parts[name])


def _row(tensor: Tensor, leaf: Leaf, parts: tuple[str, ...]) -> Row:
    return Row(
        _plain(tensor),
        leaf.key.text,
        show_dims(leaf.dims),
        leaf.part,
        parts if leaf.part is not None else (),
        leaf.along,
        leaf.spread,
        tensor.split,
        tensor.optional,
        tensor.variant,
    )


def _plain(tensor: Tensor) -> str:
    return tensor.name.partition(".")[0]
