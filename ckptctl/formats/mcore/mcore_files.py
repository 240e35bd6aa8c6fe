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

import re
from collections.abc import Mapping

from ckptctl.errors import DamagedError, UnsupportedError, spell_option
from ckptctl.formats.megatron.megatron_folder import POINTER, folder_named
from ckptctl.formats.shared.tags import is_run, tag_folder
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.json_reader import read_json
from ckptctl.storage.paths import is_there
from ckptctl.storage.schema import find
from ckptctl.tree import TreePath

METADATA, COMMON, MARK = ".metadata", "common.pt", "metadata.json"
COMMON_STATE = "common_state"
"""The object of a save without ``common.pt`` that holds what it would: Megatron-Core 0.19."""
RUN_CONFIG = "run_config.yaml"
"""What Megatron-Bridge builds the model by."""
MAX_MARK = 1 << 16
TORCH_DIST = "torch_dist"
RELEASE = "release"
"""What the tracker file says, and how the folder is called, of weights that no run saved.

Megatron-LM and Megatron-Bridge load such a folder as iteration 0, and look for no optimizer and no
random state in it. ``0`` would not do: Megatron-LM goes on to look for these, and Bridge 0.3 takes
it for a damaged file. Source: ``read_metadata`` and ``load_checkpoint`` of both.
"""
ACTOR, CRITIC = "actor", "critic"
INSIDE = (
    "weights",
    "dist_ckpt",
    "model/dist_ckpt",
    f"{ACTOR}/dist_ckpt",
    f"{ACTOR}/model/dist_ckpt",
)
"""Where NeMo 2 and verl keep the checkpoint in the folder of a step."""
_WEIGHTS = re.compile(r".*\.safetensors|pytorch_model.*\.bin|\.metadata", re.DOTALL)
"""Matches files of a folder that is a checkpoint itself, and not a trainer's around one."""


def evidence(folder: TreePath) -> str | None:
    """Return what tells that *folder* itself is one save, or None."""
    if not folder.is_dir():
        return None
    common, finished = is_there(folder / COMMON), is_there(folder / MARK)
    if common and is_there(folder / METADATA):
        return f"`{METADATA}` and `{COMMON}`"
    if not finished:
        return None
    with source_files(folder) as files:
        backend = find(str, _said(files), "sharded_backend")
    return f"`{MARK}` of the backend `{backend}`" if backend else None


def only_save(path: TreePath) -> TreePath | None:
    """Return the save in a folder that holds what a conversion wrote there, and nothing else.

    An iteration is a run's, which goes on there.
    """
    run = is_run(path, POINTER, evidence)
    if not run or {item.name for item in path.iterdir()} != {POINTER, RELEASE}:
        return None
    return path / RELEASE


def inside(path: TreePath) -> str | None:
    """Return where in *path* a trainer's folder has the checkpoint; None: it is no such folder."""
    found = next((name for name in INSIDE if evidence(path / name)), None)
    own = found and any(_WEIGHTS.fullmatch(item.name) for item in path.iterdir())
    return None if own else found


def passed_over(path: TreePath, folder: TreePath) -> str | None:
    """Return the folder of verl's critic in *path*, where *folder* of its actor is read."""
    both = folder.is_relative_to(path / ACTOR) and inside(path / CRITIC)
    return CRITIC if both else None


def save_folder(path: TreePath, tag: str | None) -> TreePath:
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
            hint="use the previous save",
        )
    backend = find(str, read_json(files, MARK, MAX_MARK), "sharded_backend")
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
    if not is_there(files.root / METADATA):
        raise DamagedError(
            f"`{METADATA}` is missing", where=where, why=f"`{MARK}` states that it was written"
        )


def names_common(files: SourceFiles) -> bool:
    """Return whether ``metadata.json`` says that there is a ``common.pt``."""
    return find(str, _said(files), "common_backend") == "torch"


def _said(files: SourceFiles) -> Mapping[str, object] | None:
    try:
        return find(dict[str, object], read_json(files, MARK, MAX_MARK))
    except (DamagedError, UnsupportedError):
        return None
