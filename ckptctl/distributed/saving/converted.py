"""Saves in an exchange format, which all ranks write as DCP and rank 0 converts.

The conversion depends only on names, shapes and dtypes. To plan it in advance,
:func:`plan_converted` writes a sparse checkpoint with holes in place of the elements.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch.distributed as dist

from ckptctl.catalog import Blob, compute_row_major_strides
from ckptctl.conversion.conversion_options import ConversionOptions
from ckptctl.conversion.convert import plan_conversion, run_conversion
from ckptctl.conversion.plan import ConversionPlan
from ckptctl.distributed.group import get_rank_collectives
from ckptctl.distributed.saving.local_state import LocalState, build_local_state
from ckptctl.distributed.saving.save import save
from ckptctl.distributed.state import StateDict
from ckptctl.errors import CkptError, RefusedError, quote_names
from ckptctl.file_identity import FileIdentity
from ckptctl.formats.dcp import METADATA
from ckptctl.formats.dcp.metadata import Origin
from ckptctl.ranks.coordinator import gather_and_scatter, run_on_rank_zero
from ckptctl.runs.run_store import open_run_store
from ckptctl.save_load.saving.global_plan import GlobalPlan, make_global_plan, make_rank_local_plan
from ckptctl.save_load.saving.local_shards import (
    LocalChunk,
    LocalShards,
    PackedShards,
    TensorMeta,
    pack_shards,
)
from ckptctl.save_load.saving.save_files import lay_out_rank_files, make_tensor_metadata
from ckptctl.storage import trash
from ckptctl.storage.destinations import check_target, destination_exists_error, resolve_destination
from ckptctl.storage.paths import expand_home, parse_path
from ckptctl.storage.urls import is_hub_repository, is_url
from ckptctl.tree import TreePath

SAVE_FILE_PATTERN = re.compile(r"\.metadata|__\d+_\d+\.distcp|\.nfs.*|\.ckptctl-(writing|objects)")
_log = logging.getLogger("ckptctl")


def save_converted(
    state: StateDict,
    out: str | TreePath,
    options: ConversionOptions,
    group: dist.ProcessGroup | None = None,
) -> TreePath:
    """Save *state* on all ranks, and convert it on rank 0 as *options* request.

    Returns:
        The path of the published output.

    Raises:
        CkptError: The save or the conversion failed, on every rank.
    """
    ranks = get_rank_collectives(group)
    target = resolve_final_target(out)
    stage = target.parent / f".{target.name}.ckptctl-final"

    def prepare_stage() -> None:
        _require_free_target(target, options)
        remove_leftovers(stage, SAVE_FILE_PATTERN)

    def convert_stage() -> None:
        open_run_store(stage.parent).refresh_listing()
        plan = plan_conversion(stage, target, options)
        _log_notes(plan)
        run_conversion(plan)

    run_on_rank_zero(ranks, prepare_stage)
    try:
        save(_select_exported_state(state, options), stage, process_group=group)
        run_on_rank_zero(ranks, convert_stage)
    finally:
        if ranks.rank == 0:
            try:
                remove_leftovers(stage, SAVE_FILE_PATTERN)
            except CkptError as error:
                _log.warning("%s could not be removed: %s", stage, error)
    return target


def plan_converted(
    state: StateDict,
    out: str | TreePath,
    options: ConversionOptions,
    group: dist.ProcessGroup | None = None,
) -> ConversionPlan | None:
    """Plan :func:`save_converted` on all ranks, without writing the output.

    Returns:
        The plan on rank 0, or None on other ranks.
    """
    ranks = get_rank_collectives(group)
    plans: list[ConversionPlan] = []

    def plan_on_rank_zero(all_packed: list[PackedShards]) -> Sequence[None]:
        target = resolve_final_target(out)
        _require_free_target(target, options)
        with TemporaryDirectory(prefix="ckptctl-") as folder:
            _write_sparse_checkpoint(Path(folder), make_global_plan(all_packed), local_states[0])
            plans.append(plan_conversion(folder, target, options))
        _log_notes(plans[0])
        return [None] * len(all_packed)

    local_states: list[LocalState] = []

    def pack_local_state() -> PackedShards:
        local_states.append(build_local_state(_select_exported_state(state, options)))
        return local_states[0].packed_shards

    gather_and_scatter(ranks, pack_local_state, plan_on_rank_zero)
    return plans[0] if plans else None


def resolve_final_target(out: str | TreePath) -> TreePath:
    """Resolve the destination *out* to an absolute path or a URL.

    Raises:
        RefusedError: The destination is on the Hub.
    """
    if not is_url(out):
        return resolve_destination(expand_home(Path(out)).absolute())
    target = parse_path(out)
    if is_hub_repository(os.fspath(target)):
        raise RefusedError(
            "training cannot save to the Hub",
            where=str(target),
            hint="save to a disk or an object store, then run `ckptctl convert` to hf://",
        )
    return target


def _select_exported_state(state: StateDict, options: ConversionOptions) -> StateDict:
    """Return only the model of *state* if *options* request it, or *state* itself."""
    model_only = options.only == "model" and "model" in state
    return {"model": state["model"]} if model_only else state


def _require_free_target(target: TreePath, options: ConversionOptions) -> None:
    if options.overwrite:
        return
    if not is_url(target):
        check_target(Path(target), overwrite=False, is_checkpoint=lambda _: False)
        return
    open_run_store(target.parent).refresh_listing()
    if target.is_file() or any(target.iterdir()):
        raise destination_exists_error(target)


def remove_leftovers(folder: TreePath, pattern: re.Pattern[str]) -> None:
    """Remove a temporary folder that an earlier save left, if it exists.

    Raises:
        RefusedError: The folder contains files whose names do not match *pattern*.
    """
    store = open_run_store(folder.parent)
    store.refresh_listing()
    if not (folder.exists() if is_url(folder) else os.path.lexists(folder)):
        return
    is_folder = folder.is_dir() and not folder.is_symlink()
    names = [item.name for item in folder.iterdir()] if is_folder else [folder.name]
    if not is_folder or not all(map(pattern.fullmatch, names)):
        raise RefusedError(
            "the folder for temporary saves contains other files",
            where=str(folder),
            why=f"no save has written {quote_names(sorted(names))}",
            hint="move the folder away: a folder of this name is removed when the output is "
            "published",
        )
    if not is_url(folder):
        trash.delete_permanently(Path(folder))
        return
    with store.lock_for_deletion() as deletion:
        deletion.delete(folder.name, FileIdentity.from_stat(folder.stat()))


def _log_notes(plan: ConversionPlan) -> None:
    """Log the warnings and notes of a plan."""
    for note in (*plan.warnings, *plan.notes):
        _log.warning("%s: %s", plan.plan.target, note)


def _write_sparse_checkpoint(folder: Path, plan: GlobalPlan, state: LocalState) -> None:
    """Write a sparse checkpoint to *folder*, with holes in place of tensor elements.

    The checkpoint contains all tensors of *plan* and the non-tensor values of this rank.
    """
    tensors = {
        tensor.name: TensorMeta(tensor.dtype, tensor.shape, tensor.path, tensor.requires_grad)
        for tensor in plan.tensors
    }
    chunks = [
        LocalChunk(tensor_name, (0,) * len(tensor.shape), tensor.shape)
        for tensor_name, tensor in tensors.items()
    ]
    leaves = {name: path for name, path in state.shards.paths.items() if name not in tensors}
    digests = {name: state.shards.values[name] for name in leaves}
    shards = LocalShards(tensors, chunks, digests, leaves)
    global_plan = make_rank_local_plan(0, 1, pack_shards(shards))
    steps = [compute_row_major_strides(chunk.sizes) for chunk in chunks]
    files = lay_out_rank_files(0, shards, global_plan.shares[0], steps, state.values, lambda _: 1)
    for file in files.plan.files:
        with (folder / file.path).open("wb") as output:
            output.truncate(file.size)
            for offset, content in file.frame(lambda _: 0):
                os.pwrite(output.fileno(), content, offset)
    values = [(Blob(name, leaves[name]), item) for name, item in files.items.items()]
    metadata = make_tensor_metadata(global_plan, [files.tensors.items]).add_values(
        values, Origin("", 1)
    )
    (folder / METADATA).write_bytes(b"".join(metadata))
