from __future__ import annotations

from pathlib import Path

from ckptctl.storage.execution.run_files import MAX_OPEN_FILES, RunFiles
from ckptctl.storage.files import LocalFiles


def test_most_recently_used_descriptor_stays_open(tmp_path: Path) -> None:
    """A copy asks for its source, then for its target: opening this must not close that."""
    names = [str(number) for number in range(MAX_OPEN_FILES)]
    for name in ("source", *names):
        (tmp_path / name).write_text(name)
    files = LocalFiles(tmp_path)
    opened = RunFiles({}, lambda _: files, tmp_path, {})
    opened.open_source(files, "source")
    for name in names[:-1]:
        opened.open_sink(name)
    source = opened.open_source(files, "source")
    opened.open_sink(names[-1])
    view = memoryview(bytearray(6))
    source.read_into(0, [view], 6)
    assert bytes(view) == b"source" and opened.bytes_read == 6
    opened.close()
