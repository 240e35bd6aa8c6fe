"""Record of the trained models that a run has published, which tells that it is finished.

``ckptctl.final.json`` in the run folder contains a digest of the files of each model. A model only
counts as published by the run while its files match.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ckptctl.catalog import MANIFEST
from ckptctl.conversion.conversion_options import ConversionOptions
from ckptctl.distributed.group import coordinator
from ckptctl.distributed.saving.converted import final_target, remove_left, save_converted
from ckptctl.distributed.state import StateDict
from ckptctl.errors import CkptError, RefusedError, quote_names, wrap_os_errors
from ckptctl.ranks.coordinator import on_first
from ckptctl.runs.run_store import open_run_store
from ckptctl.storage.files import source_files
from ckptctl.storage.json_reader import read_json
from ckptctl.storage.paths import parse_path
from ckptctl.storage.schema import find_member
from ckptctl.storage.urls import is_url
from ckptctl.storage.writing import OBJECTS_NAME
from ckptctl.tree import TreePath, UrlPath
from ckptctl.verbs.verification.digest_lists import SUMS

RECORD = "ckptctl.final.json"
SCHEMA = "ckptctl.final/1"
LISTS = (MANIFEST, SUMS, OBJECTS_NAME)
TAIL = 1 << 20
"""Bytes at the end of a single file. Those of torch list records with checksums there."""
BLOCK = 1 << 20
"""Bytes that are compared at a time."""
_log = logging.getLogger("ckptctl")


@dataclass(frozen=True, slots=True)
class Finished:
    """Trained model that a run has published.

    Attributes:
        path: Path or URL of the model.
        step: Step of the checkpoint that the run had saved or loaded last, or None.
        hooks_called: Whether the hooks were called for it.
    """

    path: TreePath
    step: int | None
    hooks_called: bool = False


class Finals:
    """Record of a run's trained models, whose errors never fail a save."""

    def __init__(self, root: TreePath, *, sync: bool) -> None:
        self._root = root
        self._sync = sync

    def all(self) -> list[Finished]:
        """List all models in the record, even those that no longer exist."""
        return [_finished(parse_path(path), one) for path, one in self._read().items()]

    def finished(self, out: TreePath) -> Finished | None:
        """Return the model that the run has published at *out*, or None if it changed since."""
        noted = self._read().get(str(out))
        if noted is None:
            return None
        open_run_store(out.parent).refresh_listing()
        with wrap_os_errors("read", out):
            same = out.exists() and noted.get("contents") == contents(out)
        return _finished(out, noted) if same else None

    def note(self, model: Finished) -> None:
        """Record that the run has published a model, with a digest of its current files."""
        try:
            open_run_store(model.path.parent).refresh_listing()
            own = {"step": model.step, "told": model.hooks_called, "contents": contents(model.path)}
            models = {**self._read(), str(model.path): own}
            content = json.dumps({"schema": SCHEMA, "models": models}, indent=2).encode()
            if not isinstance(self._root, UrlPath):
                Path(self._root).mkdir(parents=True, exist_ok=True)
            open_run_store(self._root).replace_file(RECORD, content, sync=self._sync)
        except (CkptError, OSError) as error:
            _log.error("`%s` of %s was not written: %s", RECORD, self._root, error)

    def _read(self) -> dict[str, Mapping[str, Any]]:
        """Return the record by model path, or an empty one if it cannot be read."""
        try:
            open_run_store(self._root).refresh_listing()
            if not (self._root / RECORD).is_file():
                return {}
            with source_files(self._root) as files:
                found = read_json(files, RECORD)
            models = find_member(dict[str, Mapping[str, Any]], found, "models")
            steps = [one.get("step") for one in (models or {}).values()]
            if models is None or not {*map(type, steps)} <= {int, type(None)}:
                raise CkptError("it is not a record of models")
            for path in models:
                parse_path(path)  # raises for an invalid URL
        except (CkptError, OSError) as error:
            _log.warning("`%s` of %s cannot be read: %s", RECORD, self._root, error)
            return {}
        return models


def require_same(
    state: StateDict,
    out: str | TreePath,
    options: ConversionOptions,
    group: dist.ProcessGroup | None = None,
) -> TreePath:
    """Verify that *state*, saved with *options*, equals the model at *out*. All ranks call it.

    It is saved next to the model, compared byte by byte, and removed.

    Raises:
        RefusedError: The models differ.
    """
    ranks, target = coordinator(group), final_target(out)
    again = beside(target)
    folder = again.parent
    known = re.compile(rf"\.?{re.escape(target.name)}(\.ckptctl-.*)?")

    def make_room() -> None:
        remove_left(folder, known)
        if not is_url(folder):
            with wrap_os_errors("make", folder):
                Path(folder).mkdir()

    on_first(ranks, make_room)
    try:
        save_converted(state, again, options, group)
        on_first(ranks, lambda: _require_equal(again, target))
    finally:
        if ranks.rank == 0:
            try:
                remove_left(folder, known)
            except CkptError as error:
                _log.warning("%s could not be removed: %s", folder, error)
    _log.info("%s exists already: this run has published it", target)
    return target


def beside(target: TreePath) -> TreePath:
    """Return the path of the temporary copy that is compared with the model at *target*."""
    return target.parent / f".{target.name}.ckptctl-again" / target.name


def _require_equal(new: TreePath, old: TreePath) -> None:
    open_run_store(new.parent).refresh_listing()
    with wrap_os_errors("compare", old):
        names = {file.relative_to(root) for root in (new, old) for file in _files(root)}
        other = [str(name) for name in sorted(names) if not _same(new / name, old / name)]
    if other:
        raise RefusedError(
            "this run has published another model at this path",
            where=str(old),
            why=f"these files differ: {quote_names(other)}",
            hint="save under another name, or pass `overwrite=True`",
        )


def _same(new: TreePath, old: TreePath) -> bool:
    """Compare two files, except lists of checksums, which also depend on how a model was made."""
    if new.name in LISTS:
        return True
    if not new.is_file() or not old.is_file() or new.stat().st_size != old.stat().st_size:
        return False
    with new.open("rb") as one, old.open("rb") as other:
        while content := one.read(BLOCK):
            if content != other.read(len(content)):
                return False
    return True


def _files(path: TreePath) -> list[TreePath]:
    if path.is_file():
        return [path]
    return sorted(one for one in path.rglob("*") if one.is_file())


def contents(path: TreePath) -> str:
    """Return a digest of the names, sizes and stored checksums of a model's files."""
    digest = hashlib.sha256()
    for file in _files(path):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(path)}\0{size}\0".encode("utf-8", "surrogateescape"))
        if file == path or file.name == MANIFEST:
            with file.open("rb") as stream:
                stream.seek(0 if file.name == MANIFEST else max(0, size - TAIL))
                digest.update(stream.read())
    return digest.hexdigest()


def _finished(path: TreePath, said: Mapping[str, Any]) -> Finished:
    return Finished(path, said.get("step"), bool(said.get("told")))
