"""Find checkpoints of ``megatron.core.dist_checkpointing`` in the folders of trainers.

``.metadata`` and ``__R_N.distcp`` as in any DCP directory, with ``common.pt`` (unsharded values)
and ``metadata.json`` (the backend), which is written last::

    run/latest_checkpointed_iteration.txt     Megatron-LM, Megatron-Bridge, slime, ms-swift
    run/iter_0000010/.metadata, ...
    step=10-last/weights/.metadata, ...       NeMo 2, next to context/
    actor/dist_ckpt/.metadata, ...            verl, next to huggingface/
    global_step_10/actor/dist_ckpt/...        verl, where there is no critic

Source: ``megatron/core/dist_checkpointing/core.py`` and ``serialization.py``;
``megatron/training/checkpointing.py``; ``nemo/lightning/ckpt_utils.py``;
``verl/utils/megatron_utils.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ckptctl.errors import DamagedError, UnsupportedError, format_option
from ckptctl.formats.megatron.megatron_folder import POINTER_FILE, format_folder_name
from ckptctl.formats.shared.tags import find_tag_folder, is_run_folder
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.json_reader import read_json
from ckptctl.storage.paths import is_present
from ckptctl.storage.schema import read_nested_or_none
from ckptctl.tree import TreePath

METADATA, COMMON, METADATA_JSON = ".metadata", "common.pt", "metadata.json"
COMMON_STATE = "common_state"
"""Key of the object that replaces ``common.pt`` in saves of Megatron-Core 0.19."""
RUN_CONFIG = "run_config.yaml"
"""File name of Megatron-Bridge's configuration of a training run and its model."""
PARENT_PREFIX, NEMO_CONFIG_FILE = "../", "io.json"
RECORD_FILES = (
    RUN_CONFIG,
    "args.json",
    f"{PARENT_PREFIX}args.json",
    f"{PARENT_PREFIX}transformer_config.json",
    f"{PARENT_PREFIX}context/model.yaml",
    f"{PARENT_PREFIX}context/{NEMO_CONFIG_FILE}",
)
"""Paths of configuration files, relative to the checkpoint.

The last file is only read if the second to last is missing.
"""
MAX_METADATA_JSON_BYTES = 1 << 16
TORCH_DIST = "torch_dist"
RELEASE = "release"
"""Content of the tracker file and name of the folder for weights that no training run saved.

Megatron-LM and Megatron-Bridge load such a folder as iteration 0, without optimizer and random
state. ``0`` is not possible: Megatron-LM would require these, and Bridge 0.3 would report a damaged
file. Source: ``read_metadata`` and ``load_checkpoint`` of both.
"""
ACTOR, CRITIC = "actor", "critic"
WRAPPED_PATHS = (
    "weights",
    "dist_ckpt",
    "model/dist_ckpt",
    f"{ACTOR}/dist_ckpt",
    f"{ACTOR}/model/dist_ckpt",
)
"""Paths of the checkpoint, relative to the folder that NeMo 2 or verl creates for a step."""
_WEIGHT_FILES = re.compile(r".*\.safetensors|pytorch_model.*\.bin|\.metadata", re.DOTALL)
"""Pattern of files that show that a folder is itself a checkpoint, not a wrapper folder."""


def find_evidence(folder: TreePath) -> str | None:
    """Return the files that show that *folder* is itself one save, or None."""
    if not folder.is_dir():
        return None
    common, finished = is_present(folder / COMMON), is_present(folder / METADATA_JSON)
    if common and is_present(folder / METADATA):
        return f"`{METADATA}` and `{COMMON}`"
    if not finished:
        return None
    with source_files(folder) as files:
        backend = read_nested_or_none(str, _read_metadata_json(files), "sharded_backend")
    return f"`{METADATA_JSON}` of the backend `{backend}`" if backend else None


def find_converted_save(path: TreePath) -> TreePath | None:
    """Return the folder ``release`` if *path* contains only it and the tracker file, or None.

    A conversion writes such a folder. A training run writes an ``iter_`` folder for each save.
    """
    run = is_run_folder(path, POINTER_FILE, find_evidence)
    if not run or {item.name for item in path.iterdir()} != {POINTER_FILE, RELEASE}:
        return None
    return path / RELEASE


def find_wrapped_checkpoint(path: TreePath) -> str | None:
    """Return the path of the checkpoint relative to the wrapper folder *path*.

    Returns None if *path* is not a wrapper folder, or is itself a checkpoint.
    """
    subpath = next((name for name in WRAPPED_PATHS if find_evidence(path / name)), None)
    is_checkpoint = subpath and any(_WEIGHT_FILES.fullmatch(item.name) for item in path.iterdir())
    return None if is_checkpoint else subpath


def find_skipped_critic(path: TreePath, folder: TreePath) -> str | None:
    """Return the critic folder if *path* is a verl step and *folder* its actor, or None."""
    has_critic = folder.is_relative_to(path / ACTOR) and find_wrapped_checkpoint(path / CRITIC)
    return CRITIC if has_critic else None


def find_save_folder(path: TreePath, tag: str | None) -> TreePath:
    """Return the save folder at *path*, which is *path* itself or a subfolder, such as *tag*."""
    if tag is None and (subpath := find_wrapped_checkpoint(path)):
        return path / subpath
    return path / find_tag_folder(path, tag, POINTER_FILE, find_evidence, format_folder_name)


def require_finished_save(files: SourceFiles) -> None:
    """Raise if the save was interrupted, or if ``metadata.json`` names an unsupported backend."""
    where = str(files.root)
    if not is_present(files.root / METADATA_JSON):
        raise DamagedError(
            f"the save was interrupted: `{METADATA_JSON}` is missing",
            where=where,
            why="Megatron writes it last",
            hint="use the previous save",
        )
    backend = read_nested_or_none(
        str, read_json(files, METADATA_JSON, MAX_METADATA_JSON_BYTES), "sharded_backend"
    )
    if backend not in (None, TORCH_DIST):
        megatron_fsdp = (
            f"pass {format_option('--from dcp')} (Megatron-FSDP saves standard DCP checkpoints)"
        )
        hints = {
            "zarr": "load it with Megatron-Core before 0.14 and save it as `torch_dist`",
            "fsdp_dtensor": megatron_fsdp,
        }
        raise UnsupportedError(
            f"the backend `{backend}` is not supported",
            where=str(files.root / METADATA_JSON),
            why=f"`sharded_backend` is not `{TORCH_DIST}`",
            hint=hints.get(backend),
        )
    if not is_present(files.root / METADATA):
        raise DamagedError(
            f"`{METADATA}` is missing",
            where=where,
            why=f"`{METADATA_JSON}` states that it was written",
        )


def is_common_recorded(files: SourceFiles) -> bool:
    """Return whether ``metadata.json`` states that ``common.pt`` was written."""
    return read_nested_or_none(str, _read_metadata_json(files), "common_backend") == "torch"


def _read_metadata_json(files: SourceFiles) -> Mapping[str, object] | None:
    try:
        return read_nested_or_none(
            dict[str, object], read_json(files, METADATA_JSON, MAX_METADATA_JSON_BYTES)
        )
    except (DamagedError, UnsupportedError):
        return None
