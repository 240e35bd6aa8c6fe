"""``ckptctl map KEY``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from ckptctl.cli import tables
from ckptctl.cli.commands import Json, NoHeader, Quiet, command
from ckptctl.cli.models import legend
from ckptctl.cli.output import Printer
from ckptctl.cli.tables import Column
from ckptctl.options import Argument
from ckptctl.shared_options import MapOptions

if TYPE_CHECKING:
    from ckptctl.planner.mapping.preview import Contribution, Range
    from ckptctl.verbs.key_map import KeyMap


COLUMNS = (tables.name(), Column(), Column(), Column())
TITLES = tables.titled("key", "fills", "axes", "source", "part", "source axes", "order")


@command(
    "ckptctl map model.layers.0.self_attn.q_proj.weight -m llama3 --to-layout meta",
    "ckptctl map model.layers.0.self_attn.q_proj.weight --config llama-3-8b --to-layout meta",
    "ckptctl map model.layers.0.self_attn.qkv_proj.weight -m phi3 --to-layout torchtune",
    "ckptctl map layers.3.feed_forward.experts.5.w1.weight -m mixtral --to-layout hf-v5",
    "ckptctl map output.weight -m llama3_2 --from-layout meta --to-layout hf",
    "ckptctl map lm_head.weight -m llama3 --from-layout hf --to-layout meta --set v=128256",
    prints="ckptctl.verbs.key_map:KeyMap",
)
def map_(
    key: Annotated[str, Argument("Key of a tensor, or a template with {i}.", metavar="KEY")],
    options: MapOptions,
    no_header: NoHeader = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show where a key goes in another layout.

    Also shows the other sources of the target tensor. Reads the tables of the model type, but no
    checkpoint. Without sizes, positions are formulas of axis names.
    """
    from ckptctl.verbs.key_map import map_key

    output = Printer(json, quiet, header=not no_header)
    found = map_key(key, options)
    output.answer(
        "map",
        found,
        names=(arrival.key for arrival in found.route.arrivals),
        rows=_rows(found),
        columns=TITLES,
        human=lambda: _show(output, found),
    )
    for note in found.route.notes:
        output.note(note)


def _rows(found: KeyMap) -> Iterator[tuple[str, ...]]:
    for arrival in found.route.arrivals:
        for piece in arrival.pieces:
            yield (
                arrival.key,
                _box(piece.write),
                piece.target_axes,
                piece.key,
                _box(piece.read),
                piece.source_axes,
                _change(piece),
            )
    if found.route.dropped:
        yield "", "", "", found.route.key, "", "", f"dropped: {found.route.dropped}"


def _show(output: Printer, found: KeyMap) -> None:
    layouts = f"{found.from_layout} → {found.to_layout}"
    output.headline(found.route.key, found.model_type, layouts)
    if found.route.dropped:
        output.line(f"  dropped: {found.route.dropped}")
    for arrival in found.route.arrivals:
        output.line()
        shape = f"[{', '.join(map(str, arrival.shape))}]"
        each = "".join(
            f"  one per {axis}" + ("" if size.number is None else f" of {size}")
            for axis, size in arrival.each.items()
        )
        where = f"  in {arrival.variant} layers" if arrival.variant else ""
        output.line(f"{arrival.key}  {shape}{each}{where}")
        output.table([_human(piece) for piece in arrival.pieces], COLUMNS)
    pieces = [piece for arrival in found.route.arrivals for piece in arrival.pieces]
    said = legend(found.family, " ".join(f"{one.source_axes} {one.target_axes}" for one in pieces))
    if said:
        output.line()
        output.sentence(f"  {said}", "dim")


def _human(piece: Contribution) -> tuple[str, ...]:
    axes = (
        f"{piece.source_axes} → {piece.target_axes}"
        if piece.source_axes != piece.target_axes
        else piece.source_axes
    )
    into = "" if all(part.label == ":" for part in piece.write) else f"fills {_box(piece.write)}"
    of = "" if all(part.label == ":" for part in piece.read) else f"{_box(piece.read)} of "
    return f"  {of}{piece.key}", into, axes, _change(piece)


def _change(piece: Contribution) -> str:
    order = "reordered" if piece.reordered else "same order"
    return f"{order}, offset {piece.plus:+}" if piece.plus else order


def _box(parts: tuple[Range, ...]) -> str:
    return f"[{', '.join(map(str, parts))}]"
