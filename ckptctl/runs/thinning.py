"""Removal of optimizer state from a checkpoint, whose weights are kept.

Files that contain only optimizer state are removed. The formats ``dcp`` and ``torch`` can store it
in the same files as the weights. Such a checkpoint is rewritten without it and replaced atomically.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckptctl import formats
from ckptctl.catalog import Catalog
from ckptctl.catalog import Path as KeyPath
from ckptctl.conversion.conversion_options import ConversionOptions
from ckptctl.errors import CkptError, RefusedError, quote_names, wrap_os_errors
from ckptctl.formats.dcp.dcp_reader import COMPANION_FILE
from ckptctl.formats.shared.stored_leaves import read_leaves
from ckptctl.formats.sidecar_files import RUN_FILE
from ckptctl.runs.entries import ADDED_FILES, RunEntry
from ckptctl.runs.health import Checkpoint
from ckptctl.storage import file_system, trash
from ckptctl.storage.file_system import sync_directory, write_file
from ckptctl.storage.files import source_files
from ckptctl.storage.two_phase_delete import TwoPhaseDelete
from ckptctl.verbs.verification.digest_lists import LIST_ALGORITHMS
from ckptctl.verbs.verification.digest_lists import remove_listed_files as lines_without

if TYPE_CHECKING:
    from ckptctl.conversion.draft import Draft

REWRITABLE_FORMATS = ("dcp", "torch")
OUTDATED_FILES = ADDED_FILES - {RUN_FILE}
"""Names of files that a rewritten checkpoint omits, because they describe the old checkpoint."""
_CONTAINERS = re.compile(r"opt(im(izer)?s?)?(_states?)?(_\d+)?", re.ASCII)
_STATE_KEYS = frozenset({"state", "states", "param_groups"})
"""Top-level keys of an optimizer's state dict (``torch/optim/optimizer.py``)."""
_STATE_SLOTS = frozenset(
    {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col"}
    | {"exp_inf", "exp_avg_diff", "momentum_buffer", "square_avg", "acc_delta", "grad_avg", "sum"}
    | {"state1", "state2", "m", "v", "mu", "nu"}
)
"""Names of per-parameter state in optimizers of torch, Adafactor, bitsandbytes and JAX."""
_AMBIGUOUS_SLOTS = frozenset({"step", "sum", "m", "v", "mu", "nu"})
"""Names of per-parameter optimizer state that also occur in model parameter names."""
_MAX_DEPTH = 3
"""Maximum number of name components before ``state`` or ``param_groups``, as in
``optimizers.0.state``."""
SHOWN_NAMES = 3
_OPTIMIZER_FILES = re.compile(
    r"optimizer(_\d+)?(\.(pt|pth|bin|safetensors))?|optim_world_size_\d+_rank_\d+\.pt", re.ASCII
)


@dataclass(frozen=True, slots=True)
class ThinningPlan:
    """Files and tensors of optimizer state that thinning removes from a checkpoint.

    Attributes:
        files: Files and folders that contain only optimizer state. If empty, the checkpoint is
            rewritten.
        freed: Approximate number of bytes to free.
        dropped: Names of the tensors that a rewritten checkpoint omits.
    """

    entry: RunEntry
    format: str
    files: tuple[Path, ...]
    freed: int
    dropped: tuple[str, ...] = ()


def plan_thinning(checkpoint: Checkpoint) -> ThinningPlan | str:
    """Plan the removal of optimizer state, or return the reason why nothing can be removed."""
    path, name = checkpoint.path, checkpoint.format or ""
    try:
        catalogs = [formats.open_checkpoint(part, name) for part in _list_model_parts(checkpoint)]
    except CkptError as error:
        return f"its optimizer state cannot be identified: {error.what}"
    tensors_with_roots = [
        (tensor, _find_optimizer_roots(catalog))
        for catalog in catalogs
        for tensor in catalog.tensors.values()
    ]
    optimizer_tensors = [
        tensor
        for tensor, optimizer_roots in tensors_with_roots
        if _get_first_word(tensor.path) in optimizer_roots
    ]
    if len(optimizer_tensors) == len(tensors_with_roots):
        return "it contains no weights"
    files = tuple(_iterate_optimizer_files(checkpoint, catalogs))
    if files:
        removed_items = (item for file in files for item in (file, *_iterate_below(file)))
        nbytes = sum(item.lstat().st_size for item in removed_items if item.is_file())
        return ThinningPlan(checkpoint.entry, name, files, nbytes)
    freed = sum(tensor.nbytes for tensor in optimizer_tensors)
    if not freed:
        kept_tensors = (
            tensor
            for tensor, optimizer_roots in tensors_with_roots
            if _get_first_word(tensor.path) not in optimizer_roots
        )
        named_like_optimizer = [
            tensor.name for tensor in kept_tensors if _is_named_like_optimizer(tensor.path)
        ]
        if not named_like_optimizer:
            return "it contains no optimizer state"
        names = quote_names(named_like_optimizer, SHOWN_NAMES)
        return f"{names} may be weights that are only named like optimizer state"
    if name in REWRITABLE_FORMATS and checkpoint.parts == (path,):
        return ThinningPlan(
            checkpoint.entry, name, (), freed, tuple(tensor.name for tensor in optimizer_tensors)
        )
    return f"optimizer state cannot be removed from format `{name}`"


def run_thinning(thinning: ThinningPlan, deletion: TwoPhaseDelete) -> None:
    """Remove the optimizer state that *thinning* lists. Removed files are moved to the trash."""
    if not thinning.files:
        _rewrite_checkpoint(thinning, deletion)
        return
    _remove_digests(Path(thinning.entry.path), thinning.files, deletion)
    for path in thinning.files:
        deletion.remove_path(path, f"{thinning.entry.path.name}-{path.name}")


def _remove_digests(folder: Path, files: Sequence[Path], deletion: TwoPhaseDelete) -> None:
    """Remove the lines of *files* from checksum lists in *folder*, so that the lists stay valid."""
    removed_names = [str(path.relative_to(folder)) for path in files]

    def is_removed(file: str) -> bool:
        return any(file == name or file.startswith(f"{name}/") for name in removed_names)

    for name in LIST_ALGORITHMS:
        path = folder / name
        if not path.is_file() or path.is_symlink():
            continue
        with wrap_os_errors("change", path):
            text = os.fsdecode(path.read_bytes())
            remaining = lines_without(text, is_removed)
            if remaining != text:
                _replace_checksum_list(
                    path, remaining, deletion.clear_trash_path(f"{folder.name}-{name}")
                )


def _replace_checksum_list(path: Path, text: str, temporary_path: Path) -> None:
    status = path.stat()
    write_file(temporary_path, os.fsencode(text))
    os.utime(temporary_path, ns=(status.st_atime_ns, status.st_mtime_ns))
    temporary_path.chmod(status.st_mode & 0o7777)
    temporary_path.replace(path)
    sync_directory(path.parent)


def _rewrite_checkpoint(thinning: ThinningPlan, deletion: TwoPhaseDelete) -> None:
    """Write a copy of the checkpoint without optimizer state, and replace the checkpoint by it."""
    # Imported late, because only thinning converts.
    from ckptctl.conversion.convert import Step, plan_with_steps, run_conversion

    entry = thinning.entry
    staging_folder = deletion.clear_trash_path(f"{entry.path.name}-thin")
    target = staging_folder / entry.path.name
    with wrap_os_errors("rewrite", entry.path):
        staging_folder.mkdir()
        options = ConversionOptions(to=thinning.format, from_format=thinning.format, only="all")

        def drop_optimizer(draft: Draft) -> Draft:
            return draft.with_catalog(drop_optimizer_state(draft.catalog))

        step = Step("drop optimizer", "model", 30, drop_optimizer)
        plan = plan_with_steps(entry.path, target, options, step)
        run_conversion(plan)
        if entry.path.is_dir():
            _copy_remaining_files(Path(entry.path), target, plan.source)
        _set_times(target, entry.time)
    entry.require_unchanged()
    try:
        with wrap_os_errors("replace", entry.path):
            file_system.rename_atomically(target, Path(entry.path), file_system.EXCHANGE)
            sync_directory(deletion.root)
    except file_system.UnsupportedRenameError:
        raise RefusedError(
            "this file system cannot replace a checkpoint in one step", where=str(entry.path)
        ) from None
    trash.delete_permanently(staging_folder)


def drop_optimizer_state(catalog: Catalog) -> Catalog:
    """Return *catalog* without optimizer state and without the values in companion files.

    Companion files are copied unchanged, so they need no catalog entries.
    """
    companion_names, optimizer_roots = (
        _list_companion_names(catalog),
        _find_optimizer_roots(catalog),
    )

    def is_kept(name: str, path: KeyPath) -> bool:
        return name not in companion_names and _get_first_word(path) not in optimizer_roots

    return replace(
        catalog,
        tensors={n: t for n, t in catalog.tensors.items() if is_kept(n, t.path)},
        blobs={n: b for n, b in catalog.blobs.items() if is_kept(n, b.path)},
    )


def _list_companion_names(catalog: Catalog) -> set[str]:
    """Return the names of values in companion files that trainers add to a DCP directory."""
    names: set[str] = set()
    with source_files(catalog.root) as files:
        for name in (COMPANION_FILE,) if catalog.format == "dcp" else ():
            if name in catalog.files:
                contents = read_leaves(files, name)
                names |= {*contents.tensors, *contents.blobs}
    return names


def _find_optimizer_roots(catalog: Catalog) -> frozenset[str]:
    """Return the first name components below which all entries are optimizer state.

    A component alone proves nothing, since models have modules called ``opt`` and ``optim``. Below
    these, the names of all tensors must look like optimizer state. Below ``optimizer``, one such
    name is enough.
    """
    tensors = [
        _split_words(leaf.path)
        for leaf in catalog.tensors.values()
        if _is_named_like_optimizer(leaf.path)
    ]
    blobs = [
        _split_words(leaf.path)
        for leaf in catalog.blobs.values()
        if _is_named_like_optimizer(leaf.path)
    ]
    evident = {head for head, *rest in (*tensors, *blobs) if _is_optimizer_leaf(head, rest)}
    others = {
        head
        for head, *rest in tensors
        if not (_is_named_optimizer(head) or _is_likely_optimizer_leaf(rest))
    }
    return frozenset(evident - others)


def _is_optimizer_leaf(head: str, rest: Sequence[str]) -> bool:
    """Return whether the name *head* + *rest* (components) can only belong to optimizer state."""
    is_clear_slot = (
        rest[-1:]
        and rest[-1] in _STATE_SLOTS
        and (_is_named_optimizer(head) or rest[-1] not in _AMBIGUOUS_SLOTS)
    )
    groups = {"param_groups"} | (_STATE_KEYS if _is_named_optimizer(head) else set())
    return bool(is_clear_slot) or not groups.isdisjoint(rest[:_MAX_DEPTH])


def _is_likely_optimizer_leaf(rest: Sequence[str]) -> bool:
    """Return whether the components *rest* look like the end of an optimizer state's name."""
    return not _STATE_KEYS.isdisjoint(rest[:_MAX_DEPTH]) or (
        bool(rest) and rest[-1] in _STATE_SLOTS
    )


def _is_named_optimizer(head: str) -> bool:
    return head.startswith("optimizer")


def _is_named_like_optimizer(path: KeyPath) -> bool:
    return _CONTAINERS.fullmatch(_get_first_word(path)) is not None


def _get_first_word(path: KeyPath) -> str:
    return _split_words(path)[0] if path and isinstance(path[0], str) else ""


def _split_words(path: KeyPath) -> list[str]:
    return [word for part in path for word in str(part).split(".")]


def _list_model_parts(checkpoint: Checkpoint) -> list[Path]:
    return [Path(part) for part in checkpoint.parts if not _OPTIMIZER_FILES.fullmatch(part.name)]


def _iterate_optimizer_files(checkpoint: Checkpoint, catalogs: list[Catalog]) -> Iterator[Path]:
    """Yield files that contain only optimizer state, except files that *catalogs* also use."""
    if not checkpoint.path.is_dir():
        return
    used_files = {Path(catalog.root) / name for catalog in catalogs for name in catalog.files}
    folders = dict.fromkeys((Path(checkpoint.path), *_list_model_parts(checkpoint)))
    for item in (item for folder in folders for item in sorted(folder.iterdir())):
        is_used = any(path.is_relative_to(item) for path in used_files)
        if _OPTIMIZER_FILES.fullmatch(item.name) and not item.is_symlink() and not is_used:
            yield item


def _copy_remaining_files(source: Path, target: Path, catalog: Catalog) -> None:
    """Link or copy all files of *source* that were not rewritten to *target*."""
    rewritten = catalog.files.keys() - {COMPANION_FILE}
    for item in sorted(_iterate_below(source)):
        name = item.relative_to(source)
        destination = target / name
        if str(name) in rewritten or item.name in OUTDATED_FILES or os.path.lexists(destination):
            continue
        if item.is_dir() and not item.is_symlink():
            destination.mkdir()
        else:
            _link_or_copy(item, destination)
    sync_directory(target)


def _link_or_copy(item: Path, destination: Path) -> None:
    try:
        os.link(item, destination, follow_symlinks=False)
    except OSError:
        shutil.copy2(item, destination, follow_symlinks=False)
        if not destination.is_symlink():
            with destination.open("rb") as file:
                os.fsync(file.fileno())


def _set_times(target: Path, time: float) -> None:
    """Set the modification time of *target* and of all files below it to *time* (epoch seconds)."""
    for item in (target, *_iterate_below(target)):
        os.utime(item, (time, time), follow_symlinks=False)


def _iterate_below(folder: Path) -> Iterator[Path]:
    """Yield all files and folders below *folder*, without following links.

    Yield nothing if *folder* is a file.
    """
    folders = [folder] if folder.is_dir() else []
    while folders:
        for item in folders.pop().iterdir():
            yield item
            if item.is_dir() and not item.is_symlink():
                folders.append(item)
