"""An inspection as Markdown, for a model card."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ckptctl.cli.tables import counted, files, model, short
from ckptctl.units import format_bytes, format_count

if TYPE_CHECKING:
    from ckptctl.ops.inspection.result import Inspection, TensorInfo
    from ckptctl.ops.inspection.tree import Order


def markdown(
    found: Inspection, shown: Sequence[TensorInfo], depth: int | None, sort: Order
) -> Iterator[str]:
    """Yield the lines of a list of facts and of a table of *shown*."""
    from ckptctl.ops.inspection import tree

    for name, value in (
        ("Format", found.format),
        ("Model type", model(found)),
        ("Parameters", f"{format_count(found.parameters)} ({found.parameters:,})"),
        (
            "Types",
            ", ".join(f"{short(n)} ({u.tensors:,} tensors)" for n, u in found.dtypes.items()),
        ),
        ("Size", files(found)),
    ):
        yield f"- **{name}:** {_cell(value)}"
    yield ""
    yield "| tensor | shape | dtype | copies | size |"
    yield "| --- | --- | --- | ---: | ---: |"
    for _, label, outer, branch in tree.walk(tree.build(shown, sort, depth)):
        if branch.dtype or not branch.children:
            shape = str(list(branch.shape)) if branch.dtype else counted(branch.tensors, "tensor")
            dtype = short(branch.dtype) if branch.dtype else ""
            cells = (_code(label), shape, dtype, f"{branch.copies * outer:,}")
            size = format_bytes(branch.nbytes * outer)
            yield f"| {' | '.join(cells)} | {size} |"


def _cell(text: str) -> str:
    return "".join(f"\\{c}" if c in "\\`*_{}[]<>|#" else c for c in text)


def _code(name: str) -> str:
    # Inside a table a bar ends the cell even in code, and a backtick ends the code.
    return f"`{name}`" if not {"`", "|"} & set(name) else _cell(name)
