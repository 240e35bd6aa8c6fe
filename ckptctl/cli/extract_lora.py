"""``ckptctl extract-lora BASE TUNED OUT``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from ckptctl.cli import tables
from ckptctl.cli.commands import Json, Quiet, command
from ckptctl.cli.output import Printer, Row, told
from ckptctl.cli.progress import progress
from ckptctl.errors import quote_names
from ckptctl.option_checks import check_location, check_new_location
from ckptctl.options import Argument
from ckptctl.tree import TreePath
from ckptctl.units import format_bytes, format_seconds, pluralize
from ckptctl.verbs.lora_extraction.lora_options import LoraExtractionOptions

if TYPE_CHECKING:
    from ckptctl.verbs.lora_extraction.lora_result import LoraExtraction


@command(
    "ckptctl extract-lora llama-3-8b tuned adapter --rank 16",
    "ckptctl extract-lora llama-3-8b tuned adapter --energy 0.95 --dtype bf16",
    "ckptctl extract-lora base-dcp tuned-hf adapter --rank 64 --others save",
    prints="ckptctl.verbs.lora_extraction.lora_result:LoraExtraction",
)
def extract_lora(
    base: Annotated[
        TreePath, Argument("Checkpoint of the base model.", metavar="BASE", check=check_location)
    ],
    tuned: Annotated[
        TreePath,
        Argument("Checkpoint of the fine-tuned model.", metavar="TUNED", check=check_location),
    ],
    out: Annotated[
        TreePath,
        Argument("Destination folder of the adapter.", metavar="OUT", check=check_new_location),
    ],
    options: LoraExtractionOptions,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Create a LoRA adapter from a base and a tuned model.

    The change of each linear layer is decomposed by SVD, one layer at a time. The approximation
    error of each layer is reported. BASE and TUNED may have different formats and layouts.
    """
    from ckptctl.verbs.lora_extraction.extract_lora import LoraExtractor

    output = Printer(json, quiet)
    extraction = LoraExtractor(base, tuned, out, options)
    output.statement(extraction.statement)
    nbytes = extraction.nbytes
    with progress(output, "comparing", nbytes, "syncing", lambda: "loading torch") as advance:
        found = extraction.run(advance or (lambda _: None))
    for note in found.notes:
        output.note(note)
    for line in told("skipped", found.left_out):
        output.note(line)
    output.answer(
        "extract-lora",
        found,
        names=(out,),
        rows=_rows(found),
        human=lambda: _show(output, found, out),
    )


def _rows(found: LoraExtraction) -> Iterator[Row]:
    yield "output", found.output
    yield "bytes", found.nbytes
    yield "unchanged", found.unchanged
    for layer in found.layers:
        yield "layer", layer.name, layer.rank, f"{layer.error:.3g}", f"{layer.change:.3g}"
    yield from (("saved", name) for name in found.saved)
    yield from (("left_out", name, why) for name, why in found.left_out.items())


def _show(output: Printer, found: LoraExtraction, out: TreePath) -> None:
    layers = sorted(found.layers, key=lambda layer: -layer.error)
    output.line(
        f"wrote {out}: {pluralize(len(layers), 'layer')}, {format_bytes(found.nbytes)} in "
        f"{format_seconds(found.seconds)}"
        + (f"; {pluralize(found.unchanged, 'tensor')} unchanged" if found.unchanged else ""),
        "bold",
    )
    if found.saved:
        count = pluralize(len(found.saved), "tensor")
        output.sentence(f"{count} stored in full: {quote_names(found.saved, tables.SHOWN)}")
    titles = ("rank", "error", "change")
    output.first_rows(
        layers,
        lambda one: (f"  {one.name}", one.rank, f"{one.error:.2g}", f"{one.change:.2g}"),
        (tables.name("  largest errors first"), *map(tables.number, titles)),
    )
