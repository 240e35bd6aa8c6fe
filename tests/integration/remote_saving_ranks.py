"""What ranks do in tests of saves to URLs; imported by every rank."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptctl.distributed.group import TorchGroup
from ckptctl.distributed.saving import save as collective_save
from ckptctl.distributed.saving import url as save_place
from ckptctl.distributed.saving.save import save
from ckptctl.errors import CkptError
from ckptctl.storage.writing import LOCK_NAME, OBJECTS_NAME
from tests.checkpoints.dcp import distribute

ROWS = 4096


def save_when_both_are_there(
    rank: int, world: int, url: str, value: float, own: str, other: str, outcome: str
) -> None:
    """Save tensors full of *value*, at the moment at which another group does the same."""
    if rank == 0:
        Path(own).touch()
        end = time.monotonic() + 60
        while not Path(other).exists() and time.monotonic() < end:
            time.sleep(0.01)
    TorchGroup().all_gather(0)
    full = {"w": torch.full((ROWS, 8), value), "b": torch.full((9,), value)}
    state = distribute(full, (world,), "S0")
    try:
        save(state, url)
        said = "written"
    except CkptError as error:
        said = f"{error.exit_code} {error.what}"
    told = TorchGroup().all_gather(said.partition(": ")[2] or said)
    assert len(set(told)) == 1 or "written" not in told, told
    if rank == 0:
        Path(outcome).write_text(said)


def a_save_that_fails_leaves_no_lock(rank: int, world: int, folder: str) -> None:
    """Whichever rank fails, and wherever; the next save to the same URL succeeds."""
    url = f"file-like:/{folder}"
    state = distribute({"w": torch.arange(64.0).reshape(16, 4)}, (world,), "S0")
    for failing in range(world):
        for module, name in (
            (save_place.UrlTarget, "write_files"),
            (collective_save, "make_tensor_metadata"),
        ):
            if name == "make_tensor_metadata" and failing:
                continue  # of rank 0 alone
            with pytest.MonkeyPatch.context() as patch:
                if rank == failing:
                    patch.setattr(module, name, _broken)
                with pytest.raises((CkptError, ZeroDivisionError)):
                    save(state, url)
            TorchGroup().all_gather(0)
            assert LOCK_NAME not in os.listdir(folder), (failing, name)
            assert ".metadata" not in os.listdir(folder)
            TorchGroup().all_gather(0)
    seen: list[bool] = []
    original = save_place.UrlTarget.write_files
    with pytest.MonkeyPatch.context() as patch:

        def fill(*arguments: Any, **options: Any) -> None:
            seen.append(LOCK_NAME in os.listdir(folder))
            original(*arguments, **options)

        patch.setattr(save_place.UrlTarget, "write_files", fill)
        save(state, url)
    assert seen == [True], "every rank writes under the lock"
    TorchGroup().all_gather(0)
    files = [OBJECTS_NAME, ".metadata", *(f"__{n}_0.distcp" for n in range(world))]
    assert sorted(os.listdir(folder)) == files
    with pytest.raises(CkptError, match="exists"):
        save(state, url)
    TorchGroup().all_gather(0)
    assert LOCK_NAME not in os.listdir(folder)


def _broken(*_: Any, **__: Any) -> None:
    raise ZeroDivisionError


def register() -> None:
    """Have fsspec take a folder for a place behind a URL."""
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    class FileLike(LocalFileSystem):  # type: ignore[misc]
        protocol = "file-like"

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            plain = path.removeprefix("file-like://").lstrip("/")
            return str(LocalFileSystem._strip_protocol(f"/{plain}"))

    fsspec.register_implementation("file-like", FileLike, clobber=True)


register()
