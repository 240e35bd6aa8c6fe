"""Record of the trained models that a run has published, which marks the run as finished.

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
from ckptctl.distributed.group import get_rank_collectives
from ckptctl.distributed.saving.converted import (
    remove_leftovers,
    resolve_final_target,
    save_converted,
)
from ckptctl.distributed.state import StateDict
from ckptctl.errors import CkptError, RefusedError, quote_names, wrap_os_errors
from ckptctl.ranks.coordinator import run_on_rank_zero
from ckptctl.runs.run_store import open_run_store
from ckptctl.storage.files import source_files
from ckptctl.storage.json_reader import read_json
from ckptctl.storage.paths import parse_path
from ckptctl.storage.schema import read_nested_or_none
from ckptctl.storage.urls import is_url
from ckptctl.storage.writing import OBJECTS_NAME
from ckptctl.tree import TreePath, UrlPath
from ckptctl.verbs.verification.digest_lists import SUMS_FILE

RECORD_FILE = "ckptctl.final.json"
SCHEMA = "ckptctl.final/1"
CHECKSUM_FILES = (MANIFEST, SUMS_FILE, OBJECTS_NAME)
TAIL_BYTES = 1 << 20
"""Number of bytes at the end of a single file that are hashed.

Files of ``torch.save`` store the checksums of their records at the end.
"""
BLOCK_BYTES = 1 << 20
"""Number of bytes that are compared at a time."""
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


class FinalModels:
    """Record of the trained models that a run has published.

    Errors while writing the record are logged and never fail a save.
    """

    def __init__(self, root: TreePath, *, sync: bool) -> None:
        self._root = root
        self._sync = sync

    def list_models(self) -> list[Finished]:
        """List all models in the record, even those that no longer exist."""
        return [
            _parse_model(parse_path(path), entry) for path, entry in self._read_record().items()
        ]

    def find_model(self, out: TreePath) -> Finished | None:
        """Return the model that the run has published at *out*, or None if it changed since."""
        entry = self._read_record().get(str(out))
        if entry is None:
            return None
        open_run_store(out.parent).refresh_listing()
        with wrap_os_errors("read", out):
            is_unchanged = out.exists() and entry.get("contents") == digest_contents(out)
        return _parse_model(out, entry) if is_unchanged else None

    def record_model(self, model: Finished) -> None:
        """Record that the run has published a model, with a digest of its current files."""
        try:
            open_run_store(model.path.parent).refresh_listing()
            entry = {
                "step": model.step,
                "told": model.hooks_called,
                "contents": digest_contents(model.path),
            }
            models = {**self._read_record(), str(model.path): entry}
            content = json.dumps({"schema": SCHEMA, "models": models}, indent=2).encode()
            if not isinstance(self._root, UrlPath):
                Path(self._root).mkdir(parents=True, exist_ok=True)
            open_run_store(self._root).replace_file(RECORD_FILE, content, sync=self._sync)
        except (CkptError, OSError) as error:
            _log.error("`%s` of %s was not written: %s", RECORD_FILE, self._root, error)

    def _read_record(self) -> dict[str, Mapping[str, Any]]:
        """Return the record as a mapping from model paths, or an empty one if it is unreadable."""
        try:
            open_run_store(self._root).refresh_listing()
            if not (self._root / RECORD_FILE).is_file():
                return {}
            with source_files(self._root) as files:
                document = read_json(files, RECORD_FILE)
            models = read_nested_or_none(dict[str, Mapping[str, Any]], document, "models")
            steps = [entry.get("step") for entry in (models or {}).values()]
            if models is None or not {*map(type, steps)} <= {int, type(None)}:
                raise CkptError("it is not a record of models")
            for path in models:
                parse_path(path)  # raises for an invalid URL
        except (CkptError, OSError) as error:
            _log.warning("`%s` of %s cannot be read: %s", RECORD_FILE, self._root, error)
            return {}
        return models


def require_same_model(
    state: StateDict,
    out: str | TreePath,
    options: ConversionOptions,
    group: dist.ProcessGroup | None = None,
) -> TreePath:
    """Verify that *state*, saved with *options*, equals the model at *out*. All ranks call it.

    A copy of *state* is saved next to the model, compared with the model byte by byte, and removed.

    Raises:
        RefusedError: The models differ.
    """
    ranks, target = get_rank_collectives(group), resolve_final_target(out)
    copy_path = build_comparison_path(target)
    folder = copy_path.parent
    pattern = re.compile(rf"\.?{re.escape(target.name)}(\.ckptctl-.*)?")

    def prepare_folder() -> None:
        remove_leftovers(folder, pattern)
        if not is_url(folder):
            with wrap_os_errors("make", folder):
                Path(folder).mkdir()

    run_on_rank_zero(ranks, prepare_folder)
    try:
        save_converted(state, copy_path, options, group)
        run_on_rank_zero(ranks, lambda: _compare_models(copy_path, target))
    finally:
        if ranks.rank == 0:
            try:
                remove_leftovers(folder, pattern)
            except CkptError as error:
                _log.warning("%s could not be removed: %s", folder, error)
    _log.info("%s exists already: this run has published it", target)
    return target


def build_comparison_path(target: TreePath) -> TreePath:
    """Return the path of the temporary copy that is compared with the model at *target*."""
    return target.parent / f".{target.name}.ckptctl-again" / target.name


def _compare_models(new: TreePath, old: TreePath) -> None:
    open_run_store(new.parent).refresh_listing()
    with wrap_os_errors("compare", old):
        names = {file.relative_to(root) for root in (new, old) for file in _list_files(root)}
        differing = [
            str(name) for name in sorted(names) if not _is_same_file(new / name, old / name)
        ]
    if differing:
        raise RefusedError(
            "this run has published another model at this path",
            where=str(old),
            why=f"these files differ: {quote_names(differing)}",
            hint="save under another name, or pass `overwrite=True`",
        )


def _is_same_file(new: TreePath, old: TreePath) -> bool:
    """Return whether two files have the same contents.

    Files that list checksums count as equal, because they can differ for equal models.
    """
    if new.name in CHECKSUM_FILES:
        return True
    if not new.is_file() or not old.is_file() or new.stat().st_size != old.stat().st_size:
        return False
    with new.open("rb") as new_file, old.open("rb") as old_file:
        while content := new_file.read(BLOCK_BYTES):
            if content != old_file.read(len(content)):
                return False
    return True


def _list_files(path: TreePath) -> list[TreePath]:
    if path.is_file():
        return [path]
    return sorted(file for file in path.rglob("*") if file.is_file())


def digest_contents(path: TreePath) -> str:
    """Return a digest of the names, sizes and stored checksums of a model's files."""
    digest = hashlib.sha256()
    for file in _list_files(path):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(path)}\0{size}\0".encode("utf-8", "surrogateescape"))
        if file == path or file.name == MANIFEST:
            with file.open("rb") as stream:
                stream.seek(0 if file.name == MANIFEST else max(0, size - TAIL_BYTES))
                digest.update(stream.read())
    return digest.hexdigest()


def _parse_model(path: TreePath, entry: Mapping[str, Any]) -> Finished:
    return Finished(path, entry.get("step"), bool(entry.get("told")))
