"""``ckptctl map KEY``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from ckptctl.cli import tables
from ckptctl.cli.commands import Json, NoHeader, Quiet, command
from ckptctl.cli.models import format_legend
from ckptctl.cli.output import Printer
from ckptctl.cli.tables import Column
from ckptctl.options import Argument
from ckptctl.shared_options import MapOptions

if TYPE_CHECKING:
    from ckptctl.planner.mapping.preview import Contribution, Range
    from ckptctl.verbs.key_map import KeyMap


COLUMNS = (tables.name_column(), Column(), Column(), Column())
TSV_COLUMNS = tables.titled_columns(
    "key", "fills", "axes", "source", "part", "source axes", "order"
)


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
    key_map = map_key(key, options)
    output.print_answer(
        "map",
        key_map,
        names=(arrival.key for arrival in key_map.route.arrivals),
        rows=_list_rows(key_map),
        columns=TSV_COLUMNS,
        human=lambda: _show_result(output, key_map),
    )
    for note in key_map.route.notes:
        output.print_note(note)


def _list_rows(key_map: KeyMap) -> Iterator[tuple[str, ...]]:
    for arrival in key_map.route.arrivals:
        for piece in arrival.pieces:
            yield (
                arrival.key,
                _format_box(piece.write),
                piece.target_axes,
                piece.key,
                _format_box(piece.read),
                piece.source_axes,
                _format_change(piece),
            )
    if key_map.route.dropped:
        yield "", "", "", key_map.route.key, "", "", f"dropped: {key_map.route.dropped}"


def _show_result(output: Printer, key_map: KeyMap) -> None:
    layouts = f"{key_map.from_layout} → {key_map.to_layout}"
    output.print_headline(key_map.route.key, key_map.model_type, layouts)
    if key_map.route.dropped:
        output.print_line(f"  dropped: {key_map.route.dropped}")
    for arrival in key_map.route.arrivals:
        output.print_line()
        shape = f"[{', '.join(map(str, arrival.shape))}]"
        each = "".join(
            f"  one per {axis}" + ("" if size.number is None else f" of {size}")
            for axis, size in arrival.each.items()
        )
        where = f"  in {arrival.variant} layers" if arrival.variant else ""
        output.print_line(f"{arrival.key}  {shape}{each}{where}")
        output.print_table([_make_human_row(piece) for piece in arrival.pieces], COLUMNS)
    pieces = [piece for arrival in key_map.route.arrivals for piece in arrival.pieces]
    legend_text = format_legend(
        key_map.family,
        " ".join(
            f"{contribution.source_axes} {contribution.target_axes}" for contribution in pieces
        ),
    )
    if legend_text:
        output.print_line()
        output.print_sentence(f"  {legend_text}", "dim")


def _make_human_row(piece: Contribution) -> tuple[str, ...]:
    axes = (
        f"{piece.source_axes} → {piece.target_axes}"
        if piece.source_axes != piece.target_axes
        else piece.source_axes
    )
    written_part = (
        ""
        if all(part.label == ":" for part in piece.write)
        else f"fills {_format_box(piece.write)}"
    )
    read_part = (
        "" if all(part.label == ":" for part in piece.read) else f"{_format_box(piece.read)} of "
    )
    return f"  {read_part}{piece.key}", written_part, axes, _format_change(piece)


def _format_change(piece: Contribution) -> str:
    order = "reordered" if piece.reordered else "same order"
    return f"{order}, offset {piece.plus:+}" if piece.plus else order


def _format_box(parts: tuple[Range, ...]) -> str:
    return f"[{', '.join(map(str, parts))}]"
