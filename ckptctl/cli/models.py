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


COLUMNS = (tables.name("model type"), tables.prose("models"), tables.prose("layouts"))
TITLES = tables.titled("model type", "layout", "tested against", "models", "aliases", "detected by")
TENSORS = (Column(), tables.name(), Column(), tables.prose())


@command(
    "ckptctl models",
    "ckptctl models --layout torchtune",
    "ckptctl models mixtral",
    "ckptctl models llama3 --layout meta",
    "ckptctl models --json | jq '.models[].name'",
    prints="ckptctl.verbs.models:Models",
    bare=True,
)
def models(
    options: ModelsOptions, no_header: NoHeader = False, json: Json = False, quiet: Quiet = False
) -> None:
    """List the model types and their layouts, or show one.

    With NAME, shows how each layout names and stores every tensor.
    """
    from ckptctl.verbs import models as op

    output = Printer(json, quiet, header=not no_header)
    listed = op.list_models(options)
    found, whole = listed.models, options.family is not None
    output.answer(
        "models",
        listed,
        names=(name for model in found for name in _names(model)),
        rows=(row for model in found for row in _rows(model)),
        columns=() if whole else TITLES,
        human=lambda: _show(output, found[0]) if whole else _show_list(output, found),
    )


def _names(model: ModelType) -> Iterable[str]:
    keys = dict.fromkeys(row.key for table in model.tables for row in table.rows)
    return keys if model.tables else (model.family.name,)


def _rows(model: ModelType) -> Iterator[tuple[str, ...]]:
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
            yield "tensor", table.name, row.tensor, row.key, row.axes, ", ".join(_remarks(row))
        if table.same_as:
            yield "same", table.name, table.same_as
        yield from (("dropped", table.name, key, why) for key, why in table.dropped.items())
    for axis, names in family.sizes.items():
        yield "size", axis, *names
    for tie in family.ties:
        yield "tie", tie.tensor, tie.of, ",".join(tie.stored_in)


def _show_list(output: Printer, found: Sequence[ModelType]) -> None:
    from ckptctl.verbs.models import UNTRANSLATED

    rows: list[tuple[str, ...]] = []
    for model in found:
        layouts = ", ".join(model.layouts)
        layouts = layouts if model.translated else f"{UNTRANSLATED}: {layouts}"
        rows.append((model.family.name, model.family.title, layouts))
    output.table(rows, COLUMNS)
    output.hint("use `ckptctl models NAME` for the key tables of one model type")


def _show(output: Printer, model: ModelType) -> None:
    family = model.family
    output.headline(family.name, family.title)
    output.facts((f"  {label}", text) for label, text in _summary(model))
    for table in model.tables:
        output.line()
        _show_table(output, table)


def _summary(model: ModelType) -> Iterator[tuple[str, str]]:
    from ckptctl.verbs.models import UNTRANSLATED

    family = model.family
    if family.aliases:
        yield "aliases", ", ".join(family.aliases)
    if family.refines:
        yield "special case of", family.refines
    for number, text in enumerate(model.recognized):
        yield "" if number else "detected by", text
    for number, (proof, names) in enumerate(_proofs(model).items()):
        yield "" if number else "layouts", f"{', '.join(names)}: {proof}"
    if not model.translated:
        yield "", f"{UNTRANSLATED}: no layout of another program is known"
    if not model.tables:
        return
    for number, (axis, known) in enumerate(family.sizes.items()):
        said = [f"{name} ({file})" for name, file in zip(known, _FILES, strict=True) if name]
        yield "" if number else "sizes", f"{axis}  {', '.join(said)}"
    for axis in family.composite:
        yield "", f"{axis}  {_made(family, axis)}"
    for tie in family.ties:
        stored = f", but stored separately in {', '.join(tie.stored_in)}" if tie.stored_in else ""
        when = "tied" if family.tied else "if tied"
        yield when, f"{tie.tensor} is the same tensor as {tie.of}{stored}"
    for group in family.variants:
        yield "layer variants", " or ".join(group)
    if family.pinned:
        yield "never cast", ", ".join(family.pinned)


_FILES = ("config.json", "params.json")


def legend(family: Family, axes: str) -> str:
    """Explain the axis letters in *axes* for which model configs have a name."""
    from ckptctl.planner.families.declarations import split_aliases

    wholes = ((whole, part) for whole, parts in family.composite.items() for part in parts)
    within = {part: whole for whole, part in wholes if part not in family.sizes}
    letters = re.findall(r"[a-z]+", axes)
    said = []
    for axis in dict.fromkeys(within.get(letter, letter) for letter in letters):
        names = [f"is {split_aliases(family.sizes[axis][0])[0]}"] if axis in family.sizes else []
        if any(within.get(letter) == axis for letter in letters):
            names.append(_made(family, axis))
        said += [f"{axis} {' '.join(names)}"] if names else []
    return "; ".join(said)


def _made(family: Family, axis: str) -> str:
    """Format an axis as a product of its parts, such as the rotary pairs of a head."""
    parts = family.composite[axis]
    fixed = (f", {part} is {family.constants[part]}" for part in parts if part in family.constants)
    return f"= {' x '.join(parts)}{''.join(fixed)}"


def _proofs(model: ModelType) -> dict[str, list[str]]:
    """Group the layouts by the implementation that their logits were compared with."""
    found: dict[str, list[str]] = {}
    for name in model.layouts:
        proof = model.describe_proof(name)
        known = name in model.family.proofs
        found.setdefault(f"logits equal those of {proof}" if known else proof, []).append(name)
    return found


def _show_table(output: Printer, table: LayoutTable) -> None:
    title = f"layout {table.name}"
    output.line(title + (f": same as {table.same_as}" if table.same_as else ""), "bold")
    rows: list[Sequence[str]] = [
        (f"  {row.tensor}", row.key, row.axes, ", ".join(_remarks(row))) for row in table.rows
    ]
    output.table(rows, TENSORS)
    for key, why in table.dropped.items():
        output.sentence(f"  dropped: {key} ({why})")
    if table.own_keys:
        output.sentence(f"  unique keys: {', '.join(table.own_keys)}", "dim")
    elif not table.same_as:
        output.line("  no key is unique to this model type; config.json identifies it", "dim")


def _remarks(row: TableRow) -> Iterator[str]:
    if row.optional:
        yield "optional"
    if row.variant:
        yield f"{row.variant} layers"
    if row.part is not None:
        whole = " + ".join(row.parts)
        where = f"for each {row.within}" if row.within else f"along dimension {row.along}"
        yield f"part {row.part} of {whole} {where}"
    if row.plus:
        yield f"stored with offset {row.plus:+}"
    for axis in row.spread:
        yield f"one tensor for each {axis}"
