"""Descriptions of known model types and of the layouts in their tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

from ckptctl import families
from ckptctl.options import require_choice
from ckptctl.planner.families.declarations import Conditions, split_aliases
from ckptctl.planner.families.tables import LogicalTensor, format_dims
from ckptctl.planner.layouts import HF, Family, Layout
from ckptctl.results import Inline, JsonField, Result, empty_to_none
from ckptctl.shared_options import ModelsOptions

MAX_SHOWN_KEYS = 3
NOT_PROVEN = "not validated by logits"
UNTRANSLATED = "copied, not translated"
"""Label of model types that have no layouts except those of Hugging Face."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """How a layout stores one logical tensor."""

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
    """Table of one layout of a model type, formatted for display."""

    name: Annotated[str, JsonField("name of the layout")]
    same_as: Annotated[
        str | None, JsonField("earlier layout that stores every tensor in the same way")
    ]
    rows: Annotated[
        tuple[TableRow, ...], JsonField("one row per logical tensor; empty with `same_as`")
    ]
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
    """Layout of a model type, and the evidence that its table is correct."""

    name: Annotated[str, JsonField("name on the command line")]
    proof: Annotated[
        str | None, JsonField("reference for the comparison of logits; null if not compared")
    ]
    sources: Annotated[
        str | None, JsonField("program that defines the layout, if its logits were not compared")
    ]


@dataclass(frozen=True, slots=True)
class SizeNames:
    """Axis size, and the names of the config fields that contain it."""

    axis: Annotated[str, JsonField("name in the tables")]
    config: Annotated[str, JsonField("name in `config.json`", to=empty_to_none)]
    params: Annotated[str, JsonField("name in `params.json`", to=empty_to_none)]


def list_size_names(sizes: Mapping[str, tuple[str, str]]) -> list[SizeNames]:
    """List, for each axis size, the config fields that contain it."""
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
        JsonField("names of axis sizes", of="sizes", to=list_size_names),
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

    def describe_proof(self, layout: str) -> str:
        """Describe the comparison of logits that checked *layout*, or else its table's source."""
        program = self.family.sources.get(layout)
        unproven = (
            f"{NOT_PROVEN}; names and axes are from the sources of {program}"
            if program
            else NOT_PROVEN
        )
        return self.family.proofs.get(layout, unproven)

    @property
    def proofs(
        self,
    ) -> Annotated[
        tuple[LayoutProof, ...],
        JsonField("known layouts; the first of two equal ones is preferred", name="layouts"),
    ]:
        """Layouts with their evidence."""
        proofs = self.family.proofs
        sources = {n: program for n, program in self.family.sources.items() if n not in proofs}
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


def list_models(options: ModelsOptions) -> Models:
    """List all model types without tables, or only the requested model type with its tables."""
    with families.use_converter_file(options.converter):
        return Models(tuple(_iterate_models(options.family, options.layout)))


def _iterate_models(name: str | None, layout: str | None) -> Iterator[ModelType]:
    if name is not None:
        family = families.family(name)
        if layout is not None:
            families.require_layout(family, layout)
        layouts = (layout,) if layout else family.layouts
        tables = tuple(_iterate_tables(family, layouts))
        yield ModelType(family, layouts, tuple(_describe_config_conditions(family)), tables)
        return
    families_by_name = families.load_families()
    if layout is not None:
        require_choice(layout, "layout", families.list_layouts(families_by_name.values()))
    for family in families_by_name.values():
        if layout is None or layout in family.layouts:
            layouts = (layout,) if layout else family.layouts
            yield ModelType(family, layouts, tuple(_describe_config_conditions(family)))


def _describe_config_conditions(family: Family) -> Iterator[str]:
    for file, alternatives in (
        ("config.json", family.config_signs),
        ("params.json", family.params_signs),
    ):
        if alternatives:
            yield f"{file}: {'; or '.join(map(_format_conditions, alternatives))}"
    if not family.config_signs and not family.params_signs:
        yield "only its keys"


def _format_conditions(signs: Conditions) -> str:
    return ", ".join(
        f"no {name}" if value is None else f"{name} {_format_value(value)}"
        for name, value in signs.items()
    )


def _format_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _iterate_tables(family: Family, chosen: tuple[str, ...]) -> Iterator[LayoutTable]:
    others = [other for other in families.load_families().values() if other.name != family.name]
    earlier_layouts: list[Layout] = []
    for name in chosen:
        layout = family.get_layout(name)
        same_layout = next(
            (other.name for other in earlier_layouts if layout.has_same_tensors(other)), None
        )
        rows = () if same_layout else tuple(_iterate_rows(family, layout))
        dropped = {drop.key: drop.reason for drop in family.drops if drop.layout == name}
        yield LayoutTable(name, same_layout, rows, _list_unique_keys(layout, others), dropped)
        earlier_layouts.append(layout)


def _list_unique_keys(layout: Layout, others: list[Family]) -> tuple[str, ...]:
    """Return up to three key templates of *layout* that no model type in *others* has."""
    words_by_template = {
        stored.template: frozenset(_split_words(stored.template.text)) for stored in layout.stored
    }
    candidates = dict(words_by_template)
    for other in others:
        shared_words = {
            template: words for template, words in candidates.items() if words <= other.key_parts
        }
        for name in other.layouts if shared_words else ():
            table = other.get_layout(name).table
            candidates = {t: w for t, w in candidates.items() if not table.list_entries(t.skeleton)}
    return tuple(template.text for template in candidates)[:MAX_SHOWN_KEYS]


def _split_words(template: str) -> Iterator[str]:
    return (part for part in template.split(".") if "{" not in part and not part.isdecimal())


def _iterate_rows(family: Family, layout: Layout) -> Iterator[TableRow]:
    parts = {
        logical.name: tuple(dict.fromkeys(_get_logical_name(other) for other, _ in stored.parts))
        for stored in layout.stored
        for logical, _ in stored.parts
    }
    for name, leaf in layout.leaves.items():
        tensor = family.tensors[name]
        yield TableRow(
            _get_logical_name(tensor),
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


def _get_logical_name(tensor: LogicalTensor) -> str:
    return tensor.name.partition(".")[0]
