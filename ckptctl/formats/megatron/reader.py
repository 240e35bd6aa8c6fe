"""What a checkpoint of Megatron-LM's legacy form holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ckptctl.catalog import Catalog
from ckptctl.errors import listed
from ckptctl.formats.assets import beside
from ckptctl.formats.base import ReadOptions
from ckptctl.formats.megatron.arguments import described
from ckptctl.formats.megatron.files import OPTIMIZER, POINTER, save_folder
from ckptctl.formats.megatron.grid import Grid, read_grid
from ckptctl.formats.megatron.join import Joined, join_tensors
from ckptctl.formats.megatron.rules import load
from ckptctl.formats.megatron.state import is_model
from ckptctl.formats.shared.faults import Faults
from ckptctl.formats.shared.leaves import Leaves
from ckptctl.formats.shared.unknown_classes import unknown_notes
from ckptctl.formats.torch_file import NO_CHECKSUMS
from ckptctl.storage.files import SourceFiles

_LEFT_OUT = {
    "optimizer": "its state has no names of parameters",
    "rng_state": "each rank has its own",
    "rerun_state_machine": "each rank has its own",
}


def read(path: Path, asked: ReadOptions, name: str) -> Catalog:
    """Return the catalog of the folder *path*; see :meth:`Format.read`.

    Args:
        path: The folder of one save, or the one above it.
        asked: What to read, and how.
        name: The format's.

    Raises:
        MappingError: Several ranks divide the model, and no rule says how.
    """
    folder = save_folder(path, asked.tag)
    rules = load(asked.rules) if asked.rules else None
    faults = Faults() if asked.partial else None
    with SourceFiles(path) as files:
        grid = read_grid(files, folder, faults)
        model = join_tensors(files, grid, rules, str(path / folder))
        others = _others(grid, path)
        sizes = {state.file: files.size(state.file) for state in grid.states.values()}
    own = {folder, POINTER, *(file.split("/")[0] for file in grid.files.values())}
    around = beside(path, own)
    return Catalog(
        root=str(path),
        path=str(path),
        format=name,
        files=sizes,
        tensors={**model.tensors, **others.tensors},
        blobs=others.blobs,
        assets=around.assets,
        others=around.others,
        documents=around.documents,
        arguments=described(grid.first.arguments),
        notes=(
            *_notes(grid, model, path),
            *others.notes,
            *unknown_notes(others.blobs.values()),
        ),
        replicas=model.replicas if asked.replicas else {},
        findings=tuple(faults.findings) if faults else (),
        lost=model.lost,
    )


def _others(grid: Grid, root: Path) -> Leaves:
    """Return what the first file has beside the model: the iteration, the scheduler, ..."""
    found, first = Leaves(), grid.first
    rest = {
        key: value
        for key, value in first.content.items()
        if not is_model(key) and key not in _LEFT_OUT
    }
    found.add(rest, (), first.file, str(root / first.file))
    return found


def _notes(grid: Grid, model: Joined, root: Path) -> Iterator[str]:
    first = grid.first
    if not first.checksums:
        yield NO_CHECKSUMS
    for key, reason in _LEFT_OUT.items():
        if first.content.get(key) is not None:
            yield f"not carried along: `{key}`, {reason}"
    if any((root / file).with_name(OPTIMIZER).is_file() for file in grid.files.values()):
        yield f"not carried along: `{OPTIMIZER}`, flat buffers without names of parameters"
    if any(state.extra for state in grid.states.values()):
        yield "not carried along: `_extra_state` of layers, which has no tensors of the model"
    if model.uncompared:
        names = list(dict.fromkeys(model.uncompared))
        yield f"not compared between the ranks, the lowest one's is used: {listed(names)}"
