"""Every way to damage the files of a sample, and what ckptctl makes of each."""

from __future__ import annotations

import re
import shutil
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import ckptctl
from ckptctl import formats
from ckptctl.errors import CkptError
from ckptctl.ops.verification import Verification
from ckptctl.ops.verify_checksums import recorded
from ckptctl.storage.files import SourceFiles
from tests.checkpoints.readers import differences, flatten, raw_bytes
from tests.contract.samples import SAMPLES, Sample

ALLOWED = (3, 4, 5)
DATA = Path(__file__).parent.parent / "data"
Contents = Mapping[str, bytes | None]


@dataclass(frozen=True)
class Damage:
    """One change to the files of a sample.

    Attributes:
        kind: ``missing``, ``cut``, ``flip``, ``swapped``, ``copied``, ``surplus`` or ``stale``.
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


@dataclass(frozen=True)
class Outcome:
    """What came of it.

    Attributes:
        word: ``refused``, ``harmless`` or ``no checksum``. What may not be: ``wrong`` (another
            output), ``traceback``, ``nameless`` (an error that names nothing), ``unverified``
            (what a conversion refuses, ``verify`` takes for whole).
        by: The class of the error that found it.
        said: What was said.
    """

    word: str
    by: str = ""
    said: str = ""


class Damaged:
    """One sample, a copy of it to be damaged, and what the whole one becomes.

    Args:
        name: A key of :data:`SAMPLES`.
        scratch: An empty directory.
    """

    def __init__(self, name: str, scratch: Path) -> None:
        self.name, self.sample, self.scratch = name, SAMPLES[name], scratch
        shutil.copytree(DATA / self.sample.folder / "ckpt", scratch / "copy")
        self.copy = self.sample.within(scratch / "copy")
        self.base = self.copy.parent if self.copy.is_file() else self.copy
        found = [self.copy] if self.copy.is_file() else sorted(self.copy.rglob("*"))
        self.files = {
            str(item.relative_to(self.base)): item.read_bytes() for item in found if item.is_file()
        }
        self.whole = None if self.sample.refused else self.converted()
        self.proven, self.tensors = self._read()

    def _read(self) -> tuple[dict[str, list[range]], dict[str, list[int]]]:
        """Return for each file the bytes with a checksum, and the middles of its tensors."""
        if self.whole is None:
            return {}, {}
        catalog = formats.open_checkpoint(self.copy)
        kept = {
            name: entry
            for name, entry in catalog.tensors.items()
            if not any(fnmatch(name, glob) for glob in self.sample.exclude)
        }
        resolved = formats.resolve(replace(catalog, tensors=kept, blobs={}))
        prefix = Path(catalog.root).relative_to(self.base)
        proven: dict[str, list[range]] = {str(prefix / name): [] for name in catalog.files}
        with SourceFiles(catalog.root) as files:
            for one in recorded(files, catalog, resolved)[0]:
                proven[str(prefix / one.file)].append(range(one.offset, one.offset + one.nbytes))
        middles: dict[str, list[int]] = defaultdict(list)
        for extent in (extent for entry in resolved.tensors.values() for extent in entry.extents):
            if extent.nbytes:
                middles[str(prefix / extent.file)].append(extent.offset + extent.nbytes // 2)
        return proven, {file: [min(found), max(found)] for file, found in middles.items()}

    def _write(self, contents: Contents) -> None:
        for name, content in contents.items():
            path = self.base / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if content is None:
                path.unlink(missing_ok=True)
            else:
                path.write_bytes(content)

    def converted(self) -> bytes:
        """Return all that a conversion of the copy writes, tensors and other leaves."""
        target = self.scratch / "out.pt"
        try:
            ckptctl.convert(
                self.copy, target, to="torch", only="all", exclude=self.sample.exclude, jobs=1
            )
            return target.read_bytes()
        finally:
            target.unlink(missing_ok=True)

    def outcome(self, damage: Damage) -> Outcome:
        """Damage the copy, see what comes of it, and make it whole again."""
        self._write(damage.contents)
        try:
            verified = _attempt(lambda: ckptctl.verify(self.copy, level="full", jobs=1))
            output = _attempt(self.converted)
        finally:
            self._write({name: self.files.get(name) for name in damage.contents})
        for verb, result in (("verify", verified), ("convert", output)):
            if isinstance(result, Exception) and getattr(result, "exit_code", 0) not in ALLOWED:
                return Outcome("traceback", type(result).__name__, f"{verb}: {result!r}")
        if isinstance(output, CkptError):
            return _refused(output, verified)
        assert isinstance(output, bytes)
        if self.whole is not None and output == self.whole:
            return Outcome("harmless")
        return self._different(damage, output, verified)

    def _different(self, damage: Damage, output: bytes, verified: object) -> Outcome:
        """Another output: right only where no checksum covers what was changed."""
        said = f"verify: {getattr(verified, 'findings', verified)!r}"[:300]
        if self.whole is None:
            return Outcome("wrong", "", said)
        found, expected = _leaves(output), _leaves(self.whole)
        wrong = differences(found, expected)
        if not wrong:
            return Outcome("harmless")
        if damage.kind == "flip" and self._without_checksum(damage, found, expected):
            unproven = isinstance(verified, Verification) and verified.structure_only_bytes
            return Outcome("no checksum" if unproven or damage.file not in self.proven else "wrong")
        return Outcome("wrong", "", f"{wrong[:3]} {said}")

    def _without_checksum(
        self, damage: Damage, found: dict[str, Any], expected: dict[str, Any]
    ) -> bool:
        """Whether nothing covers the changed byte.

        In an index it may be a part of a name or of a value, but tensors still have their elements.
        """
        spans = self.proven.get(damage.file)
        if spans is None:
            return _elements(found) == _elements(expected)
        return not any(damage.at in span for span in spans)


def _attempt(act: Callable[[], Any]) -> Any:
    try:
        return act()
    except Exception as error:
        return error


def _refused(error: CkptError, verified: object) -> Outcome:
    said = " ".join(filter(None, (error.what, error.where, error.why)))
    if not (error.where or error.why):
        return Outcome("nameless", type(error).__name__, said)
    if isinstance(verified, Verification) and verified.whole:
        return Outcome("unverified", type(error).__name__, said)
    return Outcome("refused", type(error).__name__, said)


def _leaves(content: bytes) -> dict[str, Any]:
    return flatten(torch.load(BytesIO(content), weights_only=False))


def _elements(leaves: Mapping[str, Any]) -> Counter[tuple[str, bytes]]:
    """Return the tensors, whatever their names and shapes."""
    tensors = (value for value in leaves.values() if isinstance(value, torch.Tensor))
    return Counter((str(tensor.dtype), raw_bytes(tensor)) for tensor in tensors)


def damages(damaged: Damaged, thorough: bool) -> Iterator[Damage]:
    """Yield the changes to a sample.

    Args:
        damaged: The sample.
        thorough: Every file, and many places in each; else the last file of each kind.
    """
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in damaged.files:
        kinds[_kind(name)].append(name)
    for names in kinds.values():
        for name in names if thorough else names[-1:]:
            yield from _of_one(name, damaged.files[name], damaged.tensors.get(name, []), thorough)
            yield from _stale(damaged.sample, name)
        yield from _of_several(names, damaged.files, thorough)


def _kind(name: str) -> str:
    """Return the form of a name: digits all alike, and the folders of parameters."""
    folder, _, last = name.rpartition("/")
    folder = "zero/*" if "/zero/" in f"/{folder}" else folder
    return re.sub(r"\d+", "0", f"{folder}/{last}")


def _of_one(name: str, content: bytes, tensors: Sequence[int], thorough: bool) -> Iterator[Damage]:
    yield Damage("missing", name, "", {name: None})
    for length in dict.fromkeys((0, len(content) // 2, len(content) - 1)):
        yield Damage("cut", name, f"to {length}", {name: content[:length]})
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
        places += range(size // 40, size, max(size // 20, 1) | 1)
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
        parts = 12 if thorough else 2
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
