"""A DCP directory with files beside its data, all of it published in one step."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist

from ckptctl.distributed.group import coordinator
from ckptctl.distributed.saving.save import save
from ckptctl.distributed.state import StateDict
from ckptctl.errors import StorageError
from ckptctl.ops.destinations import replaceable
from ckptctl.ops.ranks.coordinator import on_first
from ckptctl.storage import trash
from ckptctl.storage.destinations import destination, staging_directory
from ckptctl.storage.publish import Staging, staging
from ckptctl.storage.sync import add_file, sync_directory


def save_beside(
    state: StateDict,
    path: Path,
    files: Mapping[str, bytes],
    *,
    like: Path | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Save *state* and small files as one directory; all ranks call it.

    A checkpoint that is there is replaced in one step.

    Args:
        state: See :func:`ckptctl.save`.
        path: Where the directory will appear.
        files: Name and content of the files; rank 0's count.
        like: A directory that was made by this function from the same tensors: its data get a
            second name (hard links) where the file system can do that. None: write them.
        process_group: The ranks.

    Raises:
        CkptError: Nothing was published; on every rank.
    """
    ranks = coordinator(process_group)
    target = destination(Path(path).expanduser().absolute())
    with ExitStack() as stack:

        def make_room() -> Staging:
            room = staging(target, overwrite=True, is_checkpoint=replaceable)
            return stack.enter_context(room)

        stage = on_first(ranks, make_room)
        linked = on_first(ranks, lambda: bool(stage and like and _link(like, stage.data, files)))
        if not ranks.broadcast(linked):
            save(state, staging_directory(target) / "saved", process_group=process_group)
        on_first(ranks, lambda: _publish(stage, files))


def _link(source: Path, data: Path, files: Mapping[str, bytes]) -> bool:
    """Give the files of *source* a second name in *data*; return whether that went well."""
    try:
        for item in source.iterdir():
            if item.name not in files:
                os.link(item, data / item.name)
        sync_directory(data)
    except (OSError, StorageError):
        for item in data.iterdir():
            item.unlink()
        return False
    return True


def _publish(stage: Staging | None, files: Mapping[str, bytes]) -> None:
    assert stage
    saved = stage.root / "saved"
    if saved.is_dir():
        trash.remove(stage.data)
        try:
            saved.rename(stage.data)
        except OSError as error:
            raise StorageError.from_os_error(error, "rename", str(saved)) from error
    for name, content in files.items():
        add_file(stage.data / name, [content], sync=True)
    stage.publish()
