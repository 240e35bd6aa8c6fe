"""Upload checkpoints to a repository on the Hugging Face Hub.

Each shard is uploaded as soon as it is complete (``preupload_lfs_files``). Files whose SHA-256
the Hub already has, for example from a failed run, are not uploaded again. One commit at the end
publishes all files. All requests go through huggingface_hub, including Xet if it is installed.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptctl.errors import CkptError, RefusedError, format_option
from ckptctl.remote.hub import (
    LOGIN_HINT,
    SILENCED_PROGRESS,
    fetch_repository_listing,
    parse_hub_url,
    translate_hub_errors,
)
from ckptctl.storage.crc import is_digest_of
from ckptctl.tree import TreeEntry
from ckptctl.version import __version__

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd

CHECKPOINT_FILE = re.compile(
    r".*\.(safetensors|bin|pt|pth|ckpt|distcp|metadata)(\.index\.json)?|ckptctl\.manifest\.json"
    r"|SHA256SUMS"
)
"""Pattern of checkpoint files. Replacing a checkpoint keeps other files of the repository."""


class HubUpload:
    """Upload of a checkpoint or file to a Hub repository or to a folder in it."""

    def __init__(self, url: str, *, single: str | None, overwrite: bool) -> None:
        from huggingface_hub import HfApi

        self._hub_url = parse_hub_url(url)
        self._url = str(self._hub_url)
        self._api = HfApi(library_name="ckptctl", library_version=__version__)
        self._lock = threading.Lock()
        self._additions: dict[str, CommitOperationAdd] = {}
        kind = "" if self._hub_url.kind == "model" else f" --type {self._hub_url.kind}"
        create_hint = (
            f"create it with `hf repos create {self._hub_url.repository}{kind}`, or {LOGIN_HINT}"
        )
        with translate_hub_errors(self._url, "list the repository", create_hint):
            info: Any = self._api.repo_info(
                self._hub_url.repository,
                revision=self._hub_url.revision,
                repo_type=self._hub_url.kind,
            )
        self._parent_commit = info.sha
        self._is_committed = self._is_commit_requested = False
        self.resumed = 0
        names = [file.rfilename for file in info.siblings or ()]
        self._replaced_names = [name for name in names if self._is_replaced(name, single)]
        if self._replaced_names and not overwrite:
            raise RefusedError(
                "the repository already contains a checkpoint",
                where=self._url,
                why=f"`{self._replaced_names[0]}` exists",
                hint=f"choose another repository or folder, or pass {format_option('--overwrite')} "
                "(old files stay in the history)",
            )

    def upload_file(self, name: str, path: Path) -> None:
        """See :class:`~ckptctl.tree.Upload`."""
        from huggingface_hub import CommitOperationAdd

        with translate_hub_errors(self._url, f"upload `{name}`"), SILENCED_PROGRESS:
            added = CommitOperationAdd(self._join_path(name), str(path))
            self._api.preupload_lfs_files(
                self._hub_url.repository,
                [added],
                repo_type=self._hub_url.kind,
                revision=self._hub_url.revision,
                num_threads=1,
            )
        if added._should_ignore:  # the commit would silently skip it
            raise RefusedError(
                f"the repository's .gitignore excludes `{added.path_in_repo}`",
                where=self._url,
                hint="remove the entry from .gitignore, or choose another repository or folder",
            )
        with self._lock:
            self._additions[added.path_in_repo] = added

    def require_complete(self) -> None:
        """Do nothing, because the Hub verifies the hashes of uploaded files."""

    def publish_files(self) -> None:
        """See :class:`~ckptctl.tree.Upload`."""
        from huggingface_hub import CommitOperationDelete

        removed_names = [name for name in self._replaced_names if name not in self._additions]
        self._is_commit_requested = True
        try:
            with translate_hub_errors(self._url, "commit"):
                self._api.create_commit(
                    self._hub_url.repository,
                    [*self._additions.values(), *map(CommitOperationDelete, removed_names)],
                    commit_message="Upload a checkpoint with ckptctl",
                    repo_type=self._hub_url.kind,
                    revision=self._hub_url.revision,
                    parent_commit=self._parent_commit,
                )
        except CkptError:
            if not self._confirm_commit(
                removed_names
            ):  # it may have succeeded with its response lost
                raise
        self._is_committed = True

    def _confirm_commit(self, removed_names: Sequence[str]) -> bool:
        """Return whether a new commit on the branch has all added files and no *removed_names*.

        Called after a failed commit request, which may have succeeded although its response was
        lost. Returns False if the repository cannot be listed.
        """
        try:
            commit, files, _ = fetch_repository_listing(replace(self._hub_url, path=""), self._url)
        except CkptError:
            return False
        self._is_commit_requested = False
        are_same = (
            n in files and _has_same_content(files[n], added)
            for n, added in self._additions.items()
        )
        return (
            commit != self._parent_commit
            and files.keys().isdisjoint(removed_names)
            and all(are_same)
        )

    def abandon_upload(self) -> str:
        """See :class:`~ckptctl.tree.Upload`."""
        if self._is_committed:
            return "the commit was made; replaced files are in the history of the repository"
        if self._is_commit_requested:
            return "the commit may have been made; check the repository"
        return "nothing was committed; the next run does not upload the same files again"

    def close(self) -> None:
        """See :class:`~ckptctl.tree.Upload`."""

    def _join_path(self, name: str) -> str:
        return "/".join(filter(None, (self._hub_url.path, name)))

    def _is_replaced(self, name: str, single: str | None) -> bool:
        if single is not None:
            return name == self._join_path(single)
        folder, _, last = name.rpartition("/")
        return folder == self._hub_url.path and CHECKPOINT_FILE.fullmatch(last) is not None


def _has_same_content(entry: TreeEntry, added: CommitOperationAdd) -> bool:
    info = added.upload_info
    if entry.digest == info.sha256.hex():
        return True
    if entry.size != info.size or entry.digest is None:
        return False
    with added.as_file() as file:
        return is_digest_of(entry.digest, file.read(info.size))
