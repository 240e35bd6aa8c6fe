"""Uploads to a repository of the Hugging Face Hub.

Each shard is uploaded as soon as it is complete (``preupload_lfs_files``). Files that the Hub has
with the same SHA-256, for example from a failed run, are not uploaded again. One commit at the end
publishes all files. All requests go through huggingface_hub, including Xet if it is installed.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptctl.errors import CkptError, RefusedError, spell_option
from ckptctl.remote.hub import LOGIN, hub_errors, look, parse
from ckptctl.storage.crc import is_digest_of
from ckptctl.tree import TreeEntry
from ckptctl.version import __version__

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd

WEIGHTS = re.compile(
    r".*\.(safetensors|bin|pt|pth|ckpt|distcp|metadata)(\.index\.json)?|ckptctl\.manifest\.json"
    r"|SHA256SUMS"
)
"""Files of a checkpoint. Other files of a repository stay when a checkpoint is replaced."""


class HubUpload:
    """An upload to a Hub repository or to a folder in it."""

    def __init__(self, url: str, *, single: str | None, overwrite: bool) -> None:
        from huggingface_hub import HfApi

        self._at = parse(url)
        self._url = str(self._at)
        self._api = HfApi(library_name="ckptctl", library_version=__version__)
        self._lock = threading.Lock()
        self._quiet = _Quiet()
        self._added: dict[str, CommitOperationAdd] = {}
        kind = "" if self._at.kind == "model" else f" --type {self._at.kind}"
        create_hint = f"create it with `hf repos create {self._at.repository}{kind}`, or {LOGIN}"
        with hub_errors(self._url, "list the repository", create_hint):
            info: Any = self._api.repo_info(
                self._at.repository, revision=self._at.revision, repo_type=self._at.kind
            )
        self._head = info.sha
        self._committed = self._asked = False
        self.resumed = 0
        names = [file.rfilename for file in info.siblings or ()]
        self._old = [name for name in names if self._is_replaced(name, single)]
        if self._old and not overwrite:
            raise RefusedError(
                "the repository already contains a checkpoint",
                where=self._url,
                why=f"`{self._old[0]}` exists",
                hint=f"choose another repository or folder, or pass {spell_option('--overwrite')} "
                "(old files stay in the history)",
            )

    def upload_file(self, name: str, path: Path) -> None:
        """See :class:`~ckptctl.tree.Upload`."""
        from huggingface_hub import CommitOperationAdd

        with hub_errors(self._url, f"upload `{name}`"), self._quiet:
            added = CommitOperationAdd(self._inner(name), str(path))
            self._api.preupload_lfs_files(
                self._at.repository,
                [added],
                repo_type=self._at.kind,
                revision=self._at.revision,
                num_threads=1,
            )
        if added._should_ignore:  # the commit would silently skip it
            raise RefusedError(
                f"the repository's .gitignore excludes `{added.path_in_repo}`",
                where=self._url,
                hint="remove the entry from .gitignore, or choose another repository or folder",
            )
        with self._lock:
            self._added[added.path_in_repo] = added

    def require_complete(self) -> None:
        """Do nothing, because the Hub verifies hashes itself."""

    def publish_files(self) -> None:
        """See :class:`~ckptctl.tree.Upload`."""
        from huggingface_hub import CommitOperationDelete

        gone = [name for name in self._old if name not in self._added]
        self._asked = True
        try:
            with hub_errors(self._url, "commit"):
                self._api.create_commit(
                    self._at.repository,
                    [*self._added.values(), *map(CommitOperationDelete, gone)],
                    commit_message="Upload a checkpoint with ckptctl",
                    repo_type=self._at.kind,
                    revision=self._at.revision,
                    parent_commit=self._head,
                )
        except CkptError:
            if not self._is_there(gone):  # it may have succeeded with its response lost
                raise
        self._committed = True

    def _is_there(self, gone: Sequence[str]) -> bool:
        """Return whether the branch has a new commit with all added files, without *gone*.

        If the repository can be listed, the outcome of the requested commit is then known.
        """
        try:
            commit, files, _ = look(replace(self._at, path=""), self._url)
        except CkptError:
            return False
        self._asked = False
        same = (n in files and _is_same(files[n], added) for n, added in self._added.items())
        return commit != self._head and files.keys().isdisjoint(gone) and all(same)

    def abandon_upload(self) -> str:
        """See :class:`~ckptctl.tree.Upload`."""
        if self._committed:
            return "the commit was made; replaced files are in the history of the repository"
        if self._asked:
            return "the commit may have been made; check the repository"
        return "nothing was committed; the next run does not upload the same files again"

    def close(self) -> None:
        """See :class:`~ckptctl.tree.Upload`."""

    def _inner(self, name: str) -> str:
        return "/".join(filter(None, (self._at.path, name)))

    def _is_replaced(self, name: str, single: str | None) -> bool:
        if single is not None:
            return name == self._inner(single)
        folder, _, last = name.rpartition("/")
        return folder == self._at.path and WEIGHTS.fullmatch(last) is not None


def _is_same(found: TreeEntry, added: CommitOperationAdd) -> bool:
    info = added.upload_info
    if found.digest == info.sha256.hex():
        return True
    if found.size != info.size or found.digest is None:
        return False
    with added.as_file() as file:
        return is_digest_of(found.digest, file.read(info.size))


class _Quiet:
    """Context manager that hides huggingface_hub's progress bars, as ours is shown already."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._shown = False

    def __enter__(self) -> None:
        bars = _bars()
        with self._lock:
            if not self._inside:
                self._shown = not bars.are_progress_bars_disabled()
                bars.disable_progress_bars()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and self._shown:
                _bars().enable_progress_bars()


def _bars() -> Any:
    from huggingface_hub import utils

    return utils  # lazy names, which type checkers cannot see
