"""``ckptctl models [NAME]``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ckptctl.cli import tables
from ckptctl.cli.commands import Json, NoHeader, Quiet, command
from ckptctl.cli.output import Printer
from ckptctl.cli.tables import Column
from ckptctl.shared_options import ModelsOptions

if TYPE_CHECKING:
    from ckptctl.planner.layouts import Family
    from ckptctl.verbs.models import LayoutTable, ModelType, TableRow


COLUMNS = (
    tables.name_column("model type"),
    tables.prose_column("models"),
    tables.prose_column("layouts"),
)
TSV_COLUMNS = tables.titled_columns(
    "model type", "layout", "tested against", "models", "aliases", "detected by"
)
TENSOR_COLUMNS = (Column(), tables.name_column(), Column(), tables.prose_column())


@command(
    "ckptctl models",
    "ckptctl models --layout torchtune",
    "ckptctl models mixtral",
    "ckptctl models llama3 --layout meta",
    "ckptctl models --json | jq '.models[].name'",
    prints="ckptctl.verbs.models:Models",
    runs_without_arguments=True,
)
def models(
    options: ModelsOptions, no_header: NoHeader = False, json: Json = False, quiet: Quiet = False
) -> None:
    """List the model types and their layouts, or show one.

    With NAME, shows how each layout names and stores every tensor.
    """
    from ckptctl.verbs import models as op

    output = Printer(json, quiet, header=not no_header)
    result = op.list_models(options)
    model_types, shows_one = result.models, options.family is not None
    output.print_answer(
        "models",
        result,
        names=(name for model in model_types for name in _list_names(model)),
        rows=(row for model in model_types for row in _list_rows(model)),
        columns=() if shows_one else TSV_COLUMNS,
        human=lambda: (
            _show_model(output, model_types[0]) if shows_one else _show_list(output, model_types)
        ),
    )


def _list_names(model: ModelType) -> Iterable[str]:
    keys = dict.fromkeys(row.key for table in model.tables for row in table.rows)
    return keys if model.tables else (model.family.name,)


def _list_rows(model: ModelType) -> Iterator[tuple[str, ...]]:
    family = model.family
    if not model.tables:
        yield from (
            (
                family.name,
                name,
                model.describe_proof(name),
                family.title,
                ",".join(family.aliases),
                "; ".join(model.recognized),
            )
            for name in model.layouts
        )
        return
    for table in model.tables:
        for row in table.rows:
            yield "tensor", table.name, row.tensor, row.key, row.axes, ", ".join(_list_remarks(row))
        if table.same_as:
            yield "same", table.name, table.same_as
        yield from (("dropped", table.name, key, why) for key, why in table.dropped.items())
    for axis, names in family.sizes.items():
        yield "size", axis, *names
    for tie in family.ties:
        yield "tie", tie.tensor, tie.of, ",".join(tie.stored_in)


def _show_list(output: Printer, model_types: Sequence[ModelType]) -> None:
    from ckptctl.verbs.models import UNTRANSLATED

    rows: list[tuple[str, ...]] = []
    for model in model_types:
        layouts = ", ".join(model.layouts)
        layouts = layouts if model.translated else f"{UNTRANSLATED}: {layouts}"
        rows.append((model.family.name, model.family.title, layouts))
    output.print_table(rows, COLUMNS)
    output.print_hint("use `ckptctl models NAME` for the key tables of one model type")


def _show_model(output: Printer, model: ModelType) -> None:
    family = model.family
    output.print_headline(family.name, family.title)
    output.print_facts((f"  {label}", text) for label, text in _list_facts(model))
    for table in model.tables:
        output.print_line()
        _show_table(output, table)


def _list_facts(model: ModelType) -> Iterator[tuple[str, str]]:
    from ckptctl.verbs.models import UNTRANSLATED

    family = model.family
    if family.aliases:
        yield "aliases", ", ".join(family.aliases)
    if family.refines:
        yield "special case of", family.refines
    for number, text in enumerate(model.recognized):
        yield "" if number else "detected by", text
    for number, (proof, names) in enumerate(_group_by_proof(model).items()):
        yield "" if number else "layouts", f"{', '.join(names)}: {proof}"
    if not model.translated:
        yield "", f"{UNTRANSLATED}: no layout of another program is known"
    if not model.tables:
        return
    for number, (axis, config_keys) in enumerate(family.sizes.items()):
        key_names = [
            f"{name} ({file})"
            for name, file in zip(config_keys, _CONFIG_FILES, strict=True)
            if name
        ]
        yield "" if number else "sizes", f"{axis}  {', '.join(key_names)}"
    for axis in family.composite:
        yield "", f"{axis}  {_format_composition(family, axis)}"
    for tie in family.ties:
        stored = f", but stored separately in {', '.join(tie.stored_in)}" if tie.stored_in else ""
        when = "tied" if family.tied else "if tied"
        yield when, f"{tie.tensor} is the same tensor as {tie.of}{stored}"
    for group in family.variants:
        yield "layer variants", " or ".join(group)
    if family.pinned:
        yield "never cast", ", ".join(family.pinned)


_CONFIG_FILES = ("config.json", "params.json")


def format_legend(family: Family, axes: str) -> str:
    """Explain the axis letters in *axes* for which model configs have a name."""
    from ckptctl.planner.families.declarations import split_aliases

    axis_parts = (
        (composite, part) for composite, parts in family.composite.items() for part in parts
    )
    composite_of = {part: composite for composite, part in axis_parts if part not in family.sizes}
    letters = re.findall(r"[a-z]+", axes)
    meanings = []
    for axis in dict.fromkeys(composite_of.get(letter, letter) for letter in letters):
        names = [f"is {split_aliases(family.sizes[axis][0])[0]}"] if axis in family.sizes else []
        if any(composite_of.get(letter) == axis for letter in letters):
            names.append(_format_composition(family, axis))
        meanings += [f"{axis} {' '.join(names)}"] if names else []
    return "; ".join(meanings)


def _format_composition(family: Family, axis: str) -> str:
    """Format an axis as a product of its parts, such as the rotary pairs of a head."""
    parts = family.composite[axis]
    fixed = (f", {part} is {family.constants[part]}" for part in parts if part in family.constants)
    return f"= {' x '.join(parts)}{''.join(fixed)}"


def _group_by_proof(model: ModelType) -> dict[str, list[str]]:
    """Group the layouts of *model* by the program that their logits were compared with."""
    layouts_by_proof: dict[str, list[str]] = {}
    for name in model.layouts:
        proof = model.describe_proof(name)
        has_logits_proof = name in model.family.proofs
        layouts_by_proof.setdefault(
            f"logits equal those of {proof}" if has_logits_proof else proof, []
        ).append(name)
    return layouts_by_proof


def _show_table(output: Printer, table: LayoutTable) -> None:
    title = f"layout {table.name}"
    output.print_line(title + (f": same as {table.same_as}" if table.same_as else ""), "bold")
    rows: list[Sequence[str]] = [
        (f"  {row.tensor}", row.key, row.axes, ", ".join(_list_remarks(row))) for row in table.rows
    ]
    output.print_table(rows, TENSOR_COLUMNS)
    for key, why in table.dropped.items():
        output.print_sentence(f"  dropped: {key} ({why})")
    if table.own_keys:
        output.print_sentence(f"  unique keys: {', '.join(table.own_keys)}", "dim")
    elif not table.same_as:
        output.print_line("  no key is unique to this model type; config.json identifies it", "dim")


def _list_remarks(row: TableRow) -> Iterator[str]:
    if row.optional:
        yield "optional"
    if row.variant:
        yield f"{row.variant} layers"
    if row.part is not None:
        all_parts = " + ".join(row.parts)
        where = f"for each {row.within}" if row.within else f"along dimension {row.along}"
        yield f"part {row.part} of {all_parts} {where}"
    if row.plus:
        yield f"stored with offset {row.plus:+}"
    for axis in row.spread:
        yield f"one tensor for each {axis}"
