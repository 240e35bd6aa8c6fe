"""Ways to damage a directory of ranks' files, and what may come of it."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import torch

import ckptctl
from ckptctl.errors import CkptError
from tests.checkpoints.readers import differences, flatten

ALLOWED = (3, 4, 5, 9)


def converted(
    source: Path, scratch: Path, to: str = "torch", **options: object
) -> dict[str, object]:
    """Convert *source* and return what stock readers find in the result, under flat names."""
    from safetensors.torch import load_file

    target = scratch / ("out.pt" if to == "torch" else "out")
    ckptctl.convert(source, target, to=to, **options)  # type: ignore[arg-type]
    try:
        if to == "torch":
            return flatten(torch.load(target, weights_only=False, map_location="cpu"))
        return dict(load_file(target / "model.safetensors"))
    finally:
        shutil.rmtree(target) if target.is_dir() else target.unlink()


def refused_or_right(
    source: Path, scratch: Path, expected: Mapping[str, torch.Tensor], what: str
) -> CkptError | None:
    """Expect an error of the right class, or exactly the expected tensors."""
    try:
        found = converted(source, scratch, only="all")
    except CkptError as error:
        assert error.exit_code in ALLOWED, (what, error.to_json())
        return error
    wrong = [
        name for name in expected if differences({name: found.get(name)}, {name: expected[name]})
    ]
    assert not wrong, (what, wrong[:3])
    return None


def damaged(source: Path, scratch: Path) -> Iterator[tuple[str, Path]]:
    """Yield copies of *source*, each damaged once: cut, flipped, swapped, duplicated, emptied."""
    files = sorted(item.name for item in source.iterdir() if item.is_file())
    for name in files:
        data = (source / name).read_bytes()
        yield from _with(source, scratch, f"{name} missing", {name: None})
        for length in (0, 1, len(data) // 2, len(data) - 1):
            yield from _with(source, scratch, f"{name} cut to {length}", {name: data[:length]})
        for at in _index_bytes(source / name):
            flipped = data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :]
            yield from _with(source, scratch, f"{name} flipped at {at}", {name: flipped})
    for one, other in pairwise(files):
        first, second = ((source / name).read_bytes() for name in (one, other))
        yield from _with(source, scratch, f"{one} is {other}", {one: second})
        yield from _with(source, scratch, f"{other} is {one}", {other: first})
        yield from _with(source, scratch, f"{one} <-> {other}", {one: second, other: first})


def _with(
    source: Path, scratch: Path, what: str, contents: Mapping[str, bytes | None]
) -> Iterator[tuple[str, Path]]:
    copy = scratch / "damaged"
    shutil.copytree(source, copy)
    for name, content in contents.items():
        (copy / name).unlink()
        if content is not None:
            (copy / name).write_bytes(content)
    yield what, copy
    shutil.rmtree(copy)


def _index_bytes(path: Path) -> list[int]:
    """A few positions in the part of a file that says what is in it."""
    size = path.stat().st_size
    if not zipfile.is_zipfile(path):
        return list(range(0, size, max(size // 6, 1)))
    with zipfile.ZipFile(path) as archive:
        info = next(i for i in archive.infolist() if i.filename.endswith("data.pkl"))
        first, directory = info.header_offset + 64, archive.start_dir
    pickle = range(first, first + info.file_size, max(info.file_size // 6, 1))
    return [*pickle, *range(directory, size, max((size - directory) // 6, 1))]
