"""Find checkpoints of ``megatron.core.dist_checkpointing`` in the folders of trainers.

``.metadata`` and ``__R_N.distcp`` as in any DCP directory, with ``common.pt`` (unsharded values)
and ``metadata.json`` (the backend), which is written last::

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

import re
from collections.abc import Mapping

from ckptctl.errors import DamagedError, UnsupportedError, spell_option
from ckptctl.formats.megatron.megatron_folder import POINTER, folder_named
from ckptctl.formats.shared.tags import is_run, tag_folder
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.json_reader import read_json
from ckptctl.storage.paths import is_present
from ckptctl.storage.schema import find_member
from ckptctl.tree import TreePath

METADATA, COMMON, MARK = ".metadata", "common.pt", "metadata.json"
COMMON_STATE = "common_state"
"""Object with the unsharded values of saves without ``common.pt`` (Megatron-Core 0.19)."""
RUN_CONFIG = "run_config.yaml"
"""Megatron-Bridge's model configuration."""
MAX_MARK = 1 << 16
TORCH_DIST = "torch_dist"
RELEASE = "release"
"""Content of the tracker file and name of the folder for weights that no training run saved.

Megatron-LM and Megatron-Bridge load such a folder as iteration 0, without optimizer and random
state. ``0`` is not possible: Megatron-LM would require these, and Bridge 0.3 would report a damaged
file. Source: ``read_metadata`` and ``load_checkpoint`` of both.
"""
ACTOR, CRITIC = "actor", "critic"
INSIDE = (
    "weights",
    "dist_ckpt",
    "model/dist_ckpt",
    f"{ACTOR}/dist_ckpt",
    f"{ACTOR}/model/dist_ckpt",
)
"""Paths of the checkpoint in a step's folder of NeMo 2 and verl."""
_WEIGHTS = re.compile(r".*\.safetensors|pytorch_model.*\.bin|\.metadata", re.DOTALL)
"""Files that show that a folder is a checkpoint itself, not a trainer's wrapper folder."""


def evidence(folder: TreePath) -> str | None:
    """Return evidence that *folder* itself is one save, or None."""
    if not folder.is_dir():
        return None
    common, finished = is_present(folder / COMMON), is_present(folder / MARK)
    if common and is_present(folder / METADATA):
        return f"`{METADATA}` and `{COMMON}`"
    if not finished:
        return None
    with source_files(folder) as files:
        backend = find_member(str, _said(files), "sharded_backend")
    return f"`{MARK}` of the backend `{backend}`" if backend else None


def only_save(path: TreePath) -> TreePath | None:
    """Return the save in a folder with only the output of a conversion, or None.

    A folder of an iteration belongs to a training run, which will add more saves.
    """
    run = is_run(path, POINTER, evidence)
    if not run or {item.name for item in path.iterdir()} != {POINTER, RELEASE}:
        return None
    return path / RELEASE


def inside(path: TreePath) -> str | None:
    """Return the subpath of the checkpoint in a trainer's folder *path*, or None."""
    found = next((name for name in INSIDE if evidence(path / name)), None)
    own = found and any(_WEIGHTS.fullmatch(item.name) for item in path.iterdir())
    return None if own else found


def passed_over(path: TreePath, folder: TreePath) -> str | None:
    """Return the folder of verl's critic in *path* if *folder*, of its actor, is read, or None."""
    both = folder.is_relative_to(path / ACTOR) and inside(path / CRITIC)
    return CRITIC if both else None


def save_folder(path: TreePath, tag: str | None) -> TreePath:
    """Return the folder of the save for *path*, which is itself or inside it."""
    if tag is None and (within := inside(path)):
        return path / within
    return path / tag_folder(path, tag, POINTER, evidence, folder_named)


def require_finished(files: SourceFiles) -> None:
    """Raise if a save was interrupted, or if its backend is not supported."""
    where = str(files.root)
    if not is_present(files.root / MARK):
        raise DamagedError(
            f"the save was interrupted: `{MARK}` is missing",
            where=where,
            why="Megatron writes it last",
            hint="use the previous save",
        )
    backend = find_member(str, read_json(files, MARK, MAX_MARK), "sharded_backend")
    if backend not in (None, TORCH_DIST):
        megatron_fsdp = (
            f"pass {spell_option('--from dcp')} (Megatron-FSDP saves standard DCP checkpoints)"
        )
        others = {
            "zarr": "load it with Megatron-Core before 0.14 and save it as `torch_dist`",
            "fsdp_dtensor": megatron_fsdp,
        }
        raise UnsupportedError(
            f"the backend `{backend}` is not supported",
            where=str(files.root / MARK),
            why=f"`sharded_backend` is not `{TORCH_DIST}`",
            hint=others.get(backend),
        )
    if not is_present(files.root / METADATA):
        raise DamagedError(
            f"`{METADATA}` is missing", where=where, why=f"`{MARK}` states that it was written"
        )


def names_common(files: SourceFiles) -> bool:
    """Return whether ``metadata.json`` states that ``common.pt`` was written."""
    return find_member(str, _said(files), "common_backend") == "torch"


def _said(files: SourceFiles) -> Mapping[str, object] | None:
    try:
        return find_member(dict[str, object], read_json(files, MARK, MAX_MARK))
    except (DamagedError, UnsupportedError):
        return None
