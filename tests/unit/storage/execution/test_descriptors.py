from __future__ import annotations

import os
from pathlib import Path

from ckptctl.storage.execution.tile_reader import MAX_OPEN, Descriptors
from ckptctl.storage.files import LocalFiles


def test_what_was_asked_for_last_stays_open(tmp_path: Path) -> None:
    """A copy asks for its source, then for its target: opening this must not close that."""
    names = [str(number) for number in range(MAX_OPEN)]
    for name in ("source", *names):
        (tmp_path / name).write_text(name)
    descriptors, files = Descriptors(tmp_path), LocalFiles(tmp_path)
    descriptors.source(files, "source")
    for name in names[:-1]:
        descriptors.target(name)
    source = descriptors.source(files, "source")
    descriptors.target(names[-1])
    assert os.pread(source, 6, 0) == b"source"
    descriptors.close()
