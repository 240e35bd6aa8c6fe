"""What ckptctl makes of a damaged sample."""

from __future__ import annotations

import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import torch

import ckptctl
from ckptctl import formats
from ckptctl.errors import CkptError
from ckptctl.runs.health import check_health
from ckptctl.storage.files import source_files
from ckptctl.verbs.verification.data import list_recorded_checksums
from ckptctl.verbs.verification.verify_result import Verification
from tests.checkpoints.readers import differences, flatten, raw_bytes
from tests.contract.sample_changes import DATA, Contents, Damage
from tests.contract.samples import SAMPLES

REPLACED = ("zeros", "garbage")
"""Damage that leaves nothing of a file but its size."""
ALLOWED = (3, 4, 5, 6, 9)
"""Exit codes; 6 where damaged names leave the model without a tensor."""


@dataclass(frozen=True)
class Outcome:
    """What came of it.

    Attributes:
        word: ``refused``, ``harmless`` or ``no checksum``. What may not be: ``wrong`` (another
            output), ``traceback``, ``nameless`` (an error that names nothing), ``unverified``
            (what a conversion refuses, ``verify`` takes for complete), ``unanswered`` (``verify``
            ends with an error instead of an answer), ``counted`` (what ``verify`` refuses, a run
            takes for complete), ``unnoticed`` (``verify`` says nothing of a file too many).
        by: The class of the error that found it.
        said: What was said.
    """

    word: str
    by: str = ""
    said: str = ""


class Damaged:
    """One sample, a copy of it to be damaged, and what the undamaged one becomes.

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
        catalog = None if self.sample.refused else formats.open_checkpoint(self.copy)
        # The formats `hf` and those with several folders have no training state of their own.
        has_state = catalog is None or not (
            catalog.format == "hf" or formats.list_unread_parts(catalog)
        )
        self.only: Literal["model", "all"] = "all" if has_state else "model"
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
        resolved = formats.resolve_codecs(replace(catalog, tensors=kept, blobs={}))
        prefix = Path(catalog.root).relative_to(self.base)
        proven: dict[str, list[range]] = {str(prefix / name): [] for name in catalog.files}
        with source_files(catalog.root) as files:
            for one in list_recorded_checksums(files, catalog, resolved)[0]:
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
                self.copy, target, to="torch", only=self.only, exclude=self.sample.exclude, jobs=1
            )
            return target.read_bytes()
        finally:
            target.unlink(missing_ok=True)

    def outcome(self, damage: Damage) -> Outcome:
        """Damage the copy, see what comes of it, and repair it again."""
        self._write(damage.contents)
        try:
            verified = _attempt(lambda: ckptctl.verify(self.copy, level="full", jobs=1))
            output = _attempt(self.converted)
            judged = check_health(self.copy).verdict if damage.kind in REPLACED else ""
        finally:
            self._write({name: self.files.get(name) for name in damage.contents})
        for verb, result in (("verify", verified), ("convert", output)):
            if isinstance(result, Exception) and getattr(result, "exit_code", 0) not in ALLOWED:
                return Outcome("traceback", type(result).__name__, f"{verb}: {result!r}")
        if isinstance(output, CkptError):
            if judged and self.copy.is_dir() and not isinstance(verified, Verification):
                return Outcome("unanswered", type(output).__name__, f"{verified!r}")
            if judged == "complete":
                return Outcome("counted", type(output).__name__, f"{output!r}")
            return _refused(output, verified)
        assert isinstance(output, bytes)
        if self.whole is not None and output == self.whole:
            surplus = damage.kind == "surplus" and damage.file in self.proven
            silent = isinstance(verified, Verification) and not verified.findings
            return Outcome("unnoticed" if surplus and silent else "harmless")
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
        if damage.kind in ("flip", *REPLACED) and self._without_checksum(damage, found, expected):
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
        if damage.kind in REPLACED:
            return not spans
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
    if isinstance(verified, Verification) and verified.verdict == "complete":
        return Outcome("unverified", type(error).__name__, said)
    return Outcome("refused", type(error).__name__, said)


def _leaves(content: bytes) -> dict[str, Any]:
    return flatten(torch.load(BytesIO(content), weights_only=False))


def _elements(leaves: Mapping[str, Any]) -> Counter[tuple[str, bytes]]:
    """Return the tensors, whatever their names and shapes."""
    tensors = (value for value in leaves.values() if isinstance(value, torch.Tensor))
    return Counter((str(tensor.dtype), raw_bytes(tensor)) for tensor in tensors)
