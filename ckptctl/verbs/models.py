"""Known model types and their tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

from ckptctl import families
from ckptctl.options import require_choice
from ckptctl.planner.families.declarations import Signs, split_aliases
from ckptctl.planner.families.tables import LogicalTensor, format_dims
from ckptctl.planner.layouts import HF, Family, Layout
from ckptctl.results import Inline, JsonField, Result, empty_to_none
from ckptctl.shared_options import ModelsOptions

SHOWN_KEYS = 3
NOT_PROVEN = "not validated by logits"
CARRIED = "copied, not translated"
"""Label of model types that only have Hugging Face's layouts."""


@dataclass(frozen=True, slots=True)
class Row:
    """Storage of a logical tensor in a layout."""

    tensor: Annotated[str, JsonField("logical name")]
    key: Annotated[str, JsonField("template of the stored key")]
    axes: Annotated[str, JsonField("axis order, in einops notation")]
    part: Annotated[int | None, JsonField("position in a concatenated tensor")]
    parts: Annotated[tuple[str, ...], JsonField("parts of the concatenated tensor")]
    along: Annotated[int, JsonField("dimension of the concatenation")]
    within: Annotated[
        str, JsonField("axis that the concatenation repeats over; empty for a single concatenation")
    ]
    plus: Annotated[int, JsonField("offset added to each stored element")]
    spread: Annotated[
        tuple[str, ...], JsonField("axes with a separate stored tensor for each entry")
    ]
    split: Annotated[str | None, JsonField("axis that is split across model-parallel ranks")]
    optional: Annotated[bool, JsonField("whether the tensor is optional")]
    variant: Annotated[str | None, JsonField("kind of layers with this tensor; null for all")]


@dataclass(frozen=True, slots=True)
class LayoutTable:
    """One layout of a model type, in readable form."""

    name: Annotated[str, JsonField("name of the layout")]
    same_as: Annotated[
        str | None, JsonField("earlier layout that stores every tensor in the same way")
    ]
    rows: Annotated[tuple[Row, ...], JsonField("one row per logical tensor; empty with `same_as`")]
    own_keys: Annotated[
        tuple[str, ...], JsonField("up to three key templates unique to this family")
    ]
    dropped: Annotated[
        Mapping[
            str, Annotated[str, JsonField("reason why these tensors can be dropped without loss")]
        ],
        JsonField("key templates of redundant tensors"),
    ]


@dataclass(frozen=True, slots=True)
class LayoutProof:
    """Evidence for a layout."""

    name: Annotated[str, JsonField("name on the command line")]
    proof: Annotated[
        str | None, JsonField("reference for the comparison of logits; null if not compared")
    ]
    sources: Annotated[
        str | None, JsonField("program that defines the layout, if its logits were not compared")
    ]


@dataclass(frozen=True, slots=True)
class SizeNames:
    """Names of an axis size in configurations."""

    axis: Annotated[str, JsonField("name in the tables")]
    config: Annotated[str, JsonField("name in `config.json`", to=empty_to_none)]
    params: Annotated[str, JsonField("name in `params.json`", to=empty_to_none)]


def size_names(sizes: Mapping[str, tuple[str, str]]) -> list[SizeNames]:
    """Return the preferred names of axis sizes in configurations."""
    return [
        SizeNames(axis, split_aliases(config)[0], split_aliases(params)[0])
        for axis, (config, params) in sizes.items()
    ]


@dataclass(frozen=True, slots=True)
class Tables(Result, order="tables ties tied variants sizes constants composite pinned"):
    """Contents of a model type's tables."""

    family: Annotated[
        Family,
        JsonField("tensors that can be tied", of="ties"),
        JsonField("whether they are tied by default", of="tied"),
        JsonField("alternative kinds of layers; each layer is one of them", of="variants"),
        JsonField("names of axis sizes", of="sizes", to=size_names),
        JsonField("fixed axis sizes", of="constants"),
        JsonField("axes composed of other axes", of="composite"),
        JsonField("tensors that are never cast", of="pinned"),
    ]
    tables: Annotated[tuple[LayoutTable, ...], JsonField("one table per layout")]


@dataclass(frozen=True, slots=True)
class ModelType(
    Result, order="name title aliases architecture refines recognized layouts translated"
):
    """Known model type.

    Attributes:
        layouts: Requested layouts.
        tables: Tables of the layouts; empty in a list of model types.
    """

    family: Annotated[
        Family,
        JsonField("name of the [model type](models.md)", of="name"),
        JsonField("human-readable description", of="title"),
        JsonField("other names that `--model-type` accepts", of="aliases"),
        JsonField("class name in `config.json`", of="architecture"),
        JsonField("family that this one specializes, or null", of="refines"),
    ]
    layouts: tuple[str, ...]
    recognized: Annotated[
        tuple[str, ...], JsonField("configuration values that identify it, as text")
    ]
    tables: tuple[LayoutTable, ...] = ()

    def proof(self, layout: str) -> str:
        """Describe the comparison of logits for *layout*, or else the source of its table."""
        read = self.family.sources.get(layout)
        less = (
            f"{NOT_PROVEN}; names and axes are from the sources of {read}" if read else NOT_PROVEN
        )
        return self.family.proofs.get(layout, less)

    @property
    def proofs(
        self,
    ) -> Annotated[
        tuple[LayoutProof, ...],
        JsonField("known layouts; the first of two equal ones is preferred", name="layouts"),
    ]:
        """Layouts with their evidence."""
        proofs = self.family.proofs
        sources = {n: one for n, one in self.family.sources.items() if n not in proofs}
        return tuple(LayoutProof(n, proofs.get(n), sources.get(n)) for n in self.layouts)

    @property
    def translated(
        self,
    ) -> Annotated[
        bool,
        JsonField(
            "whether a layout of another program is known; if false, keys are copied unchanged"
        ),
    ]:
        """Whether the model type has layouts beyond Hugging Face's."""
        return any(name != HF and not name.startswith(f"{HF}-") for name in self.family.layouts)

    @property
    def details(self) -> Annotated[Tables | None, Inline()]:
        """Contents of the tables, or None if they were not requested."""
        return Tables(self.family, self.tables) if self.tables else None


@dataclass(frozen=True, slots=True)
class Models(Result):
    """All model types, or one.

    The fields from `tables` on are present only if a model type was given.
    """

    models: Annotated[tuple[ModelType, ...], JsonField("sorted by name")]


def models(options: ModelsOptions) -> Models:
    """List all model types without parsing tables, or one of them with its tables."""
    with families.use_converter_file(options.converter):
        return Models(tuple(_models(options.family, options.layout)))


def _models(name: str | None, layout: str | None) -> Iterator[ModelType]:
    if name is not None:
        family = families.family(name)
        if layout is not None:
            families.require_layout(family, layout)
        chosen = (layout,) if layout else family.layouts
        tables = tuple(_tables(family, chosen))
        yield ModelType(family, chosen, tuple(_recognized(family)), tables)
        return
    known = families.load_families()
    if layout is not None:
        require_choice(layout, "layout", families.list_layouts(known.values()))
    for family in known.values():
        if layout is None or layout in family.layouts:
            chosen = (layout,) if layout else family.layouts
            yield ModelType(family, chosen, tuple(_recognized(family)))


def _recognized(family: Family) -> Iterator[str]:
    for file, alternatives in (
        ("config.json", family.config_signs),
        ("params.json", family.params_signs),
    ):
        if alternatives:
            yield f"{file}: {'; or '.join(map(_said, alternatives))}"
    if not family.config_signs and not family.params_signs:
        yield "only its keys"


def _said(signs: Signs) -> str:
    return ", ".join(
        f"no {name}" if value is None else f"{name} {_value(value)}"
        for name, value in signs.items()
    )


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _tables(family: Family, chosen: tuple[str, ...]) -> Iterator[LayoutTable]:
    others = [other for other in families.load_families().values() if other.name != family.name]
    earlier: list[Layout] = []
    for name in chosen:
        layout = family.get_layout(name)
        twin = next((other.name for other in earlier if layout.has_same_tensors(other)), None)
        rows = () if twin else tuple(_rows(family, layout))
        dropped = {drop.key: drop.reason for drop in family.drops if drop.layout == name}
        yield LayoutTable(name, twin, rows, _own_keys(layout, others), dropped)
        earlier.append(layout)


def _own_keys(layout: Layout, others: list[Family]) -> tuple[str, ...]:
    """Return up to three key templates that no other model type has."""
    spelled = {stored.template: frozenset(_words(stored.template.text)) for stored in layout.stored}
    own = dict(spelled)
    for other in others:
        spoken = {template: words for template, words in own.items() if words <= other.key_parts}
        for name in other.layouts if spoken else ():
            table = other.get_layout(name).table
            own = {t: w for t, w in own.items() if not table.list_entries(t.skeleton)}
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
        tensor = family.tensors[name]
        yield Row(
            _plain(tensor),
            leaf.key.text,
            format_dims(leaf.dims),
            leaf.part,
            parts[name] if leaf.part is not None else (),
            leaf.concat_dim,
            leaf.interleave_axis,
            leaf.offset,
            leaf.spread_axes,
            tensor.split_axis,
            tensor.optional,
            tensor.variant,
        )


def _plain(tensor: LogicalTensor) -> str:
    return tensor.name.partition(".")[0]
