"""Every way to damage the files of a sample."""

from __future__ import annotations

import random
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from pathlib import Path

from tests.contract.samples import Sample

DATA = Path(__file__).parent.parent / "data"
Contents = Mapping[str, bytes | None]


@dataclass(frozen=True)
class Damage:
    """One change to the files of a sample.

    Attributes:
        kind: ``missing``, ``cut``, ``zeros``, ``garbage``, ``flip``, ``swapped``, ``copied``,
            ``surplus`` or ``stale``.
        file: The file, relative to the sample.
        detail: Which of several changes of that kind.
        contents: The files that change; None: the file goes.
        at: The byte that changes.
    """

    kind: str
    file: str
    detail: str
    contents: Contents
    at: int = -1

    def __str__(self) -> str:
        return f"{self.file} {self.kind} {self.detail}".rstrip()


def damages(
    sample: Sample, files: Mapping[str, bytes], tensors: Mapping[str, list[int]], thorough: bool
) -> Iterator[Damage]:
    """Yield the changes to a sample.

    Args:
        sample: The sample.
        files: Its files.
        tensors: Places in tensors in them.
        thorough: Every file, and many places in the first and the last of each kind; else the
            last file of each kind.
    """
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in files:
        kinds[_kind(name)].append(name)
    for names in kinds.values():
        for name in names if thorough else names[-1:]:
            in_many_places = thorough and name in (names[0], names[-1])
            yield from _of_one(name, files[name], tensors.get(name, []), in_many_places)
            yield from _stale(sample, name)
        yield from _of_several(names, files, thorough)


def _kind(name: str) -> str:
    """Return the form of a name: digits all alike, and the folders of parameters."""
    folder, _, last = name.rpartition("/")
    folder = "zero/*" if "/zero/" in f"/{folder}" else folder
    return re.sub(r"\d+", "0", f"{folder}/{last}")


def _of_one(name: str, content: bytes, tensors: Sequence[int], thorough: bool) -> Iterator[Damage]:
    yield Damage("missing", name, "", {name: None})
    for length in dict.fromkeys((0, len(content) // 2, len(content) - 1)):
        yield Damage("cut", name, f"to {length}", {name: content[:length]})
    if any(content):
        yield Damage("zeros", name, "", {name: bytes(len(content))})
        yield Damage("garbage", name, "", {name: random.Random(name).randbytes(len(content))})
    for at in _places(content, tensors, thorough):
        flipped = content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :]
        yield Damage("flip", name, f"at {at}", {name: flipped}, at)


def _places(content: bytes, tensors: Sequence[int], thorough: bool) -> list[int]:
    """Return places at the ends, in the index, and in tensors."""
    size = len(content)
    if not size:
        return []
    places = [0, size // 2, size - 12, *_pickle_bytes(content, thorough)]
    places += tensors if thorough else tensors[:1]
    if thorough:
        places += range(size // 20, size, max(size // 10, 1) | 1)
    return sorted({at for at in places if 0 <= at < size})


def _pickle_bytes(content: bytes, thorough: bool) -> list[int]:
    """Return places in the index of a ``torch.save`` file, and in the zip's directory."""
    if not zipfile.is_zipfile(BytesIO(content)):
        step = max(len(content) // (16 if thorough else 4), 1)
        return list(range(step // 2, len(content), step))
    with zipfile.ZipFile(BytesIO(content)) as archive:
        found = [one for one in archive.infolist() if one.filename.endswith("data.pkl")]
        first = found[0].header_offset + 64 if found else 0
        length = found[0].file_size if found else 1
        parts = 8 if thorough else 2
        inside = [first + length * n // parts + 7 for n in range(parts)]
        return [*inside, archive.start_dir + 18]


def _of_several(names: list[str], files: Mapping[str, bytes], thorough: bool) -> Iterator[Damage]:
    """Yield files of ranks in each other's place, and a copy as a rank that there is not."""
    if "/zero/" in f"/{names[0]}":
        return  # parameters' folders are no ranks
    pairs = list(pairwise(names))
    for one, other in pairs if thorough else pairs[-1:]:
        first, second = files[one], files[other]
        yield Damage("swapped", other, f"with {Path(one).name}", {one: second, other: first})
        yield Damage("copied", other, f"over {Path(one).name}", {one: second})
        yield Damage("copied", one, f"over {Path(other).name}", {other: first})
    surplus = _next_rank(names)
    if surplus:
        what = f"as {Path(surplus).name}"
        yield Damage("surplus", names[-1], what, {surplus: files[names[-1]]})


def _next_rank(names: list[str]) -> str | None:
    """Return the name of the file of one rank more; None: names have no number for it."""
    numbers = [list(re.finditer(r"\d+", Path(name).name)) for name in names]
    differing = [
        n for n, found in enumerate(zip(*numbers, strict=False)) if len({m[0] for m in found}) > 1
    ]
    last = numbers[-1]
    if not last or (len(names) > 1 and not differing):
        return None
    match = last[differing[0] if differing else _rank_at(names[-1], last)]
    head, tail = Path(names[-1]).name[: match.start()], Path(names[-1]).name[match.end() :]
    number = max(int(found[last.index(match)][0]) for found in numbers) + 1
    return str(Path(names[-1]).with_name(f"{head}{number:0{len(match[0])}}{tail}"))


def _rank_at(name: str, numbers: list[re.Match[str]]) -> int:
    stem = Path(name).name
    for index, match in enumerate(numbers):
        if stem[: match.start()].endswith(("rank_", "_", "rank")):
            return index
    return len(numbers) - 1


def _stale(sample: Sample, name: str) -> Iterator[Damage]:
    if sample.older:
        file = DATA / sample.older / name
        if file.is_file():
            yield Damage("stale", name, "", {name: file.read_bytes()})
