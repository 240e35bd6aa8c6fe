"""Which files are a checkpoint of ``megatron.core.dist_checkpointing``, and where it lies.

``.metadata`` and ``__R_N.distcp`` as in any DCP directory, beside ``common.pt`` (what is not
sharded) and, written after everything else, ``metadata.json`` (the backend)::

    run/latest_checkpointed_iteration.txt     Megatron-LM, Megatron-Bridge, slime, ms-swift
    run/iter_0000010/.metadata, ...
    step=10-last/weights/.metadata, ...       NeMo 2, beside context/
    actor/dist_ckpt/.metadata, ...            verl, beside huggingface/
    global_step_10/actor/dist_ckpt/...        verl, where there is no critic

Source: ``megatron/core/dist_checkpointing/core.py`` and ``serialization.py``;
``megatron/training/checkpointing.py``; ``nemo/lightning/ckpt_utils.py``;
``verl/utils/megatron_utils.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ckptctl.errors import DamagedError, UnsupportedError
from ckptctl.formats.megatron.files import POINTER, folder_named
from ckptctl.formats.shared.tags import tag_folder, tags
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.json_reader import read_json
from ckptctl.storage.paths import is_there

METADATA, COMMON, MARK = ".metadata", "common.pt", "metadata.json"
RUN_CONFIG = "run_config.yaml"
"""What Megatron-Bridge builds the model by."""
MAX_MARK = 1 << 16
TORCH_DIST, ZARR = "torch_dist", "zarr"
INSIDE = ("weights", "dist_ckpt", "model/dist_ckpt", "actor/dist_ckpt", "actor/model/dist_ckpt")
"""Where NeMo 2 and verl keep the checkpoint in the folder of a step."""


def evidence(folder: Path) -> str | None:
    """Return what tells that *folder* itself is one save, or None."""
    if not folder.is_dir():
        return None
    common, finished = is_there(folder / COMMON), is_there(folder / MARK)
    if common and is_there(folder / METADATA):
        return f"`{METADATA}` and `{COMMON}`"
    backend = backend_of(folder) if finished else None
    return f"`{MARK}` of the backend `{backend}`" if backend else None


def backend_of(folder: Path) -> str | None:
    """Return the name of the backend in ``metadata.json``; None: it is none of Megatron-Core's."""
    with source_files(folder) as files:
        return _backend(said) if (said := _said(files)) is not None else None


def is_run(path: Path) -> bool:
    """Return whether *path* is a folder of saves with the file that names the latest."""
    return path.is_dir() and (path / POINTER).is_file() and bool(tags(path, evidence))


def only_save(path: Path) -> Path | None:
    """Return the save in a folder that holds one, the file that names it, and nothing else."""
    if not is_run(path):
        return None
    (first, *more) = (item for item in path.iterdir() if item.name != POINTER)
    return first if not more and evidence(first) else None


def inside(path: Path) -> str | None:
    """Return where in *path* a trainer's folder has the checkpoint; None: it is no such folder."""
    found = (name for name in INSIDE if (path / name).is_dir() and evidence(path / name))
    return next(found, None)


def save_folder(path: Path, tag: str | None) -> Path:
    """Return the folder of the save that *path* means: itself, or one inside of it."""
    if tag is None and (within := inside(path)):
        return path / within
    return path / tag_folder(path, tag, POINTER, evidence, folder_named)


def require_finished(files: SourceFiles) -> None:
    """Refuse a save that was interrupted, and one of a backend that is not read."""
    where = str(files.root)
    if not is_there(files.root / MARK):
        raise DamagedError(
            f"the save was interrupted: `{MARK}` is missing",
            where=where,
            why="Megatron writes it last",
            hint="use the save before it",
        )
    backend = _backend(read_json(files, MARK, MAX_MARK))
    if backend not in (None, TORCH_DIST):
        raise UnsupportedError(
            f"the backend `{backend}` is not read",
            where=str(files.root / MARK),
            why=f"`sharded_backend` is not `{TORCH_DIST}`",
            hint="load it with Megatron-Core before 0.14 and save it as `torch_dist`"
            if backend == ZARR
            else None,
        )
    if not is_there(files.root / METADATA):
        raise DamagedError(
            f"`{METADATA}` is missing", where=where, why=f"`{MARK}` says that it was written"
        )


def names_common(files: SourceFiles) -> bool:
    """Return whether ``metadata.json`` says that there is a ``common.pt``."""
    said = _said(files)
    return said is not None and said.get("common_backend") == "torch"


def _said(files: SourceFiles) -> Mapping[str, object] | None:
    try:
        said = read_json(files, MARK, MAX_MARK)
    except (DamagedError, UnsupportedError):
        return None
    return said if isinstance(said, dict) else None


def _backend(said: object) -> str | None:
    name = said.get("sharded_backend") if isinstance(said, dict) else None
    return name if isinstance(name, str) else None
