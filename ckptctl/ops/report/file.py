"""The file that a report is written to: published whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ckptctl import formats
from ckptctl.ops.destinations import require_destination
from ckptctl.ops.report.data import Report
from ckptctl.ops.report.page import GENERATOR, page
from ckptctl.storage.destinations import Replaceable, require_space
from ckptctl.storage.publish import staging
from ckptctl.storage.sync import write_file

Write = Callable[[Report], None]
HEAD = 1024


@contextmanager
def written(output: Path | None, sources: Sequence[str | Path], overwrite: bool) -> Iterator[Write]:
    """Hold the place of a page; what it yields writes and publishes it.

    Args:
        output: The page; None: nothing is written.
        sources: Checkpoints, which it must not lie in.
        overwrite: Whether to replace an earlier report.

    Raises:
        RefusedError: It exists, or lies inside a checkpoint.
        StorageError: It cannot be written.
    """
    if output is None:
        yield lambda _: None
        return
    target = output
    for source in sources:
        target = require_destination(formats.existing(source), output, overwrite, PAGE).path
    with staging(target, overwrite=overwrite, single_file=True, is_checkpoint=PAGE) as stage:

        def write(found: Report) -> None:
            content = page(found.to_json()).encode()
            require_space(stage.data, len(content))
            write_file(stage.data / target.name, content)
            stage.publish()

        yield write


def is_report(path: Path) -> bool:
    """Return whether *path* is a page that this module wrote, the one thing that it replaces."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return GENERATOR.encode() in file.read(HEAD)


PAGE = Replaceable(is_report, "a page of `ckptctl report`", file=True)
