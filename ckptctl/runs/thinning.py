"""Removal of optimizer state from a checkpoint; the weights stay.

Files that contain only optimizer state are removed. If it is stored together with the weights, in
``dcp`` and ``torch``, the rest is rewritten and replaces the checkpoint atomically.
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
from ckptctl.runs.entries import ADDED, RunEntry
from ckptctl.runs.health import Checkpoint
from ckptctl.storage import file_system, trash
from ckptctl.storage.file_system import sync_directory, write_file
from ckptctl.storage.files import source_files
from ckptctl.storage.two_phase_delete import TwoPhaseDelete
from ckptctl.verbs.verification.digest_lists import LISTS
from ckptctl.verbs.verification.digest_lists import without as lines_without

if TYPE_CHECKING:
    from ckptctl.conversion.draft import Draft

REWRITTEN = ("dcp", "torch")
OUTDATED = ADDED - {RUN_FILE}
"""Files that are outdated in a rewritten checkpoint."""
_CONTAINERS = re.compile(r"opt(im(izer)?s?)?(_states?)?(_\d+)?", re.ASCII)
_STATE = frozenset({"state", "states", "param_groups"})
"""Keys of an optimizer's state dict (``torch/optim/optimizer.py``)."""
_SLOTS = frozenset(
    {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col"}
    | {"exp_inf", "exp_avg_diff", "momentum_buffer", "square_avg", "acc_delta", "grad_avg", "sum"}
    | {"state1", "state2", "m", "v", "mu", "nu"}
)
"""State of a parameter in optimizers of torch, Adafactor, bitsandbytes and JAX."""
_VAGUE = frozenset({"step", "sum", "m", "v", "mu", "nu"})
"""Those that are also names of parts of models."""
_NEAR = 3
"""Maximum depth at which the state dict starts below its container: ``optimizers.0.state``."""
SHOWN = 3
_FILES = re.compile(
    r"optimizer(_\d+)?(\.(pt|pth|bin|safetensors))?|optim_world_size_\d+_rank_\d+\.pt", re.ASCII
)


@dataclass(frozen=True, slots=True)
class Thinning:
    """Files and tensors of the optimizer to remove from a checkpoint.

    Attributes:
        files: Files and folders of only the optimizer; if empty, the checkpoint is rewritten.
        freed: Approximate number of bytes to free.
        dropped: Names of the tensors and values that are not rewritten.
    """

    entry: RunEntry
    format: str
    files: tuple[Path, ...]
    freed: int
    dropped: tuple[str, ...] = ()


def plan_thinning(found: Checkpoint) -> Thinning | str:
    """Plan to remove optimizer state, or return the reason why there is none to remove."""
    path, name = found.path, found.format or ""
    try:
        catalogs = [formats.open_checkpoint(part, name) for part in _models(found)]
    except CkptError as error:
        return f"its optimizer state cannot be identified: {error.what}"
    held = [(tensor, _optimizers(one)) for one in catalogs for tensor in one.tensors.values()]
    out = [tensor for tensor, known in held if _head(tensor.path) in known]
    if len(out) == len(held):
        return "it contains no weights"
    files = tuple(_own_files(found, catalogs))
    if files:
        below = (item for file in files for item in (file, *_below(file)))
        nbytes = sum(item.lstat().st_size for item in below if item.is_file())
        return Thinning(found.entry, name, files, nbytes)
    freed = sum(tensor.nbytes for tensor in out)
    if not freed:
        kept = (tensor for tensor, known in held if _head(tensor.path) not in known)
        named = [tensor.name for tensor in kept if _named_so(tensor.path)]
        if not named:
            return "it contains no optimizer state"
        names = quote_names(named, SHOWN)
        return f"{names} may be weights that are only named like optimizer state"
    if name in REWRITTEN and found.parts == (path,):
        return Thinning(found.entry, name, (), freed, tuple(tensor.name for tensor in out))
    return f"optimizer state cannot be removed from format `{name}`"


def run_thinning(thinning: Thinning, deletion: TwoPhaseDelete) -> None:
    """Execute *thinning* and move removed files to the trash."""
    if not thinning.files:
        _rewrite(thinning, deletion)
        return
    _strike_out(Path(thinning.entry.path), thinning.files, deletion)
    for path in thinning.files:
        deletion.remove_path(path, f"{thinning.entry.path.name}-{path.name}")


def _strike_out(folder: Path, files: Sequence[Path], deletion: TwoPhaseDelete) -> None:
    """Remove the lines about *files* from checksum lists, so that the others stay valid."""
    gone = [str(path.relative_to(folder)) for path in files]

    def goes(file: str) -> bool:
        return any(file == name or file.startswith(f"{name}/") for name in gone)

    for name in LISTS:
        path = folder / name
        if not path.is_file() or path.is_symlink():
            continue
        with wrap_os_errors("change", path):
            text = os.fsdecode(path.read_bytes())
            left = lines_without(text, goes)
            if left != text:
                _replace(path, left, deletion.free_name(f"{folder.name}-{name}"))


def _replace(path: Path, text: str, room: Path) -> None:
    status = path.stat()
    write_file(room, os.fsencode(text))
    os.utime(room, ns=(status.st_atime_ns, status.st_mtime_ns))
    room.chmod(status.st_mode & 0o7777)
    room.replace(path)
    sync_directory(path.parent)


def _rewrite(thinning: Thinning, deletion: TwoPhaseDelete) -> None:
    """Rewrite the checkpoint without optimizer state and exchange it with the old one."""
    # Only thinning converts.
    from ckptctl.conversion.convert import Step, plan_with_steps, run_conversion

    entry = thinning.entry
    room = deletion.free_name(f"{entry.path.name}-thin")
    target = room / entry.path.name
    with wrap_os_errors("rewrite", entry.path):
        room.mkdir()
        options = ConversionOptions(to=thinning.format, from_format=thinning.format, only="all")

        def drop_optimizer(draft: Draft) -> Draft:
            return draft.with_catalog(without(draft.catalog))

        step = Step("drop optimizer", "model", 30, drop_optimizer)
        plan = plan_with_steps(entry.path, target, options, step)
        run_conversion(plan)
        if entry.path.is_dir():
            _carry(Path(entry.path), target, plan.source)
        _keep_time(target, entry.time)
    entry.require_unchanged()
    try:
        with wrap_os_errors("replace", entry.path):
            file_system.rename_atomically(target, Path(entry.path), file_system.EXCHANGE)
            sync_directory(deletion.root)
    except file_system.UnsupportedRenameError:
        raise RefusedError(
            "this file system cannot replace a checkpoint in one step", where=str(entry.path)
        ) from None
    trash.remove_path(room)


def without(catalog: Catalog) -> Catalog:
    """Return *catalog* without optimizer state and without files that are kept as they are."""
    beside, optimizers = _beside(catalog), _optimizers(catalog)

    def stays(name: str, path: KeyPath) -> bool:
        return name not in beside and _head(path) not in optimizers

    return replace(
        catalog,
        tensors={n: t for n, t in catalog.tensors.items() if stays(n, t.path)},
        blobs={n: b for n, b in catalog.blobs.items() if stays(n, b.path)},
    )


def _beside(catalog: Catalog) -> set[str]:
    """Return the names of values in companion files that trainers add to a DCP directory."""
    found: set[str] = set()
    with source_files(catalog.root) as files:
        for name in (COMPANION_FILE,) if catalog.format == "dcp" else ():
            if name in catalog.files:
                contents = read_leaves(files, name)
                found |= {*contents.tensors, *contents.blobs}
    return found


def _optimizers(catalog: Catalog) -> frozenset[str]:
    """Return the first words of names that contain optimizer state.

    The word is not enough, since parts of models are called ``opt`` and ``optim``. Below these,
    every tensor must look like optimizer state; below ``optimizer``, one is enough.
    """
    tensors = [_words(one.path) for one in catalog.tensors.values() if _named_so(one.path)]
    blobs = [_words(one.path) for one in catalog.blobs.values() if _named_so(one.path)]
    evident = {head for head, *rest in (*tensors, *blobs) if _evident(head, rest)}
    others = {head for head, *rest in tensors if not (_says_so(head) or _likely(rest))}
    return frozenset(evident - others)


def _evident(head: str, rest: Sequence[str]) -> bool:
    """Return whether only an optimizer has a leaf of this name."""
    clear = rest[-1:] and rest[-1] in _SLOTS and (_says_so(head) or rest[-1] not in _VAGUE)
    groups = {"param_groups"} | (_STATE if _says_so(head) else set())
    return bool(clear) or not groups.isdisjoint(rest[:_NEAR])


def _likely(rest: Sequence[str]) -> bool:
    """Return whether an optimizer may have a leaf of this name."""
    return not _STATE.isdisjoint(rest[:_NEAR]) or (bool(rest) and rest[-1] in _SLOTS)


def _says_so(head: str) -> bool:
    return head.startswith("optimizer")


def _named_so(path: KeyPath) -> bool:
    return _CONTAINERS.fullmatch(_head(path)) is not None


def _head(path: KeyPath) -> str:
    return _words(path)[0] if path and isinstance(path[0], str) else ""


def _words(path: KeyPath) -> list[str]:
    return [word for part in path for word in str(part).split(".")]


def _models(found: Checkpoint) -> list[Path]:
    return [Path(part) for part in found.parts if not _FILES.fullmatch(part.name)]


def _own_files(found: Checkpoint, catalogs: list[Catalog]) -> Iterator[Path]:
    """Yield files that contain only optimizer state and that no catalog of weights uses."""
    if not found.path.is_dir():
        return
    used = {Path(catalog.root) / name for catalog in catalogs for name in catalog.files}
    folders = dict.fromkeys((Path(found.path), *_models(found)))
    for item in (item for folder in folders for item in sorted(folder.iterdir())):
        inside = any(path.is_relative_to(item) for path in used)
        if _FILES.fullmatch(item.name) and not item.is_symlink() and not inside:
            yield item


def _carry(source: Path, target: Path, catalog: Catalog) -> None:
    """Link or copy the remaining files of *source* to *target*."""
    rewritten = catalog.files.keys() - {COMPANION_FILE}
    for item in sorted(_below(source)):
        name = item.relative_to(source)
        there = target / name
        if str(name) in rewritten or item.name in OUTDATED or os.path.lexists(there):
            continue
        if item.is_dir() and not item.is_symlink():
            there.mkdir()
        else:
            _copy(item, there)
    sync_directory(target)


def _copy(item: Path, there: Path) -> None:
    try:
        os.link(item, there, follow_symlinks=False)
    except OSError:
        shutil.copy2(item, there, follow_symlinks=False)
        if not there.is_symlink():
            with there.open("rb") as file:
                os.fsync(file.fileno())


def _keep_time(target: Path, time: float) -> None:
    """Set the modification time of new files to that of the files that they replace."""
    for item in (target, *_below(target)):
        os.utime(item, (time, time), follow_symlinks=False)


def _below(folder: Path) -> Iterator[Path]:
    """Yield everything below a folder without following links, or nothing for a file."""
    waiting = [folder] if folder.is_dir() else []
    while waiting:
        for item in waiting.pop().iterdir():
            yield item
            if item.is_dir() and not item.is_symlink():
                waiting.append(item)
