"""Megatron's legacy checkpoints: ``mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`` of every rank.

Source: ``megatron/training/checkpointing.py``. How ranks divide a tensor is written nowhere in
them; a rules file says so (:mod:`ckptctl.formats.megatron_rules`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ckptctl.catalog import Catalog
from ckptctl.errors import FormatError, listed
from ckptctl.formats.assets import documents, left_behind, side_files
from ckptctl.formats.base import AS_IT_IS, Format, ReadOptions, Sniff
from ckptctl.formats.faults import Faults
from ckptctl.formats.leaves import Leaves
from ckptctl.formats.megatron_files import OPTIMIZER, POINTER, evidence, is_run, save_folder
from ckptctl.formats.megatron_grid import Grid, read_grid
from ckptctl.formats.megatron_join import Joined, join_tensors
from ckptctl.formats.megatron_rules import load
from ckptctl.formats.megatron_state import is_model
from ckptctl.formats.torch_file import NO_CHECKSUMS
from ckptctl.formats.unknown_classes import unknown_notes
from ckptctl.storage.files import SourceFiles

_LEFT_OUT = {
    "optimizer": "its state has no names of parameters",
    "rng_state": "each rank has its own",
    "rerun_state_machine": "each rank has its own",
}


class MegatronFormat(Format):
    """A folder of one save, or the folder above it with ``latest_checkpointed_iteration.txt``."""

    name = "megatron"
    title = "Megatron-LM, legacy: mp_rank_XX/model_optim_rng.pt of every rank"
    recognised = (
        "`mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`, or `latest_checkpointed_iteration.txt` "
        "above `iter_NNNNNNN` or `release`"
    )
    wholeness = (
        "`args` in every file says how many ranks, layers and experts there are, and each is "
        "there; files of another iteration, or copied over one another, are refused; files that "
        "have changed places are noticed where `args` has the number of the process that wrote "
        "each, which tools that convert checkpoints to Megatron do not record"
    )
    proof = (
        "with the built-in rules, on 2, 4 and 8 ranks: the tensors of GPT models of Megatron-Core "
        "0.16 lie where its own sharded state dict says, and one rank loads them strictly under "
        "their names (tests/oracle/test_megatron.py); Megatron-LM's own program and Transformer "
        "Engine's layers (fused norms, grouped experts) were not run: files are laid out, and "
        "these are named, as the sources say"
    )
    choices = frozenset({"tag", "rules"})

    def sniff(self, path: Path) -> Sniff | None:
        """See :meth:`Format.sniff`."""
        if is_run(path):
            return Sniff(f"`{POINTER}` and saves of mp_rank_*")
        here = evidence(path)
        return Sniff(here) if here else None

    def read(self, path: Path, asked: ReadOptions = AS_IT_IS) -> Catalog:
        """See :meth:`Format.read`.

        Raises:
            MappingError: Several ranks divide the model, and no rule says how.
        """
        if not path.is_dir():
            raise FormatError(
                "this is one file of many", where=str(path), hint="name the folder of all ranks"
            )
        folder = save_folder(path, asked.tag)
        rules = load(asked.rules) if asked.rules else None
        faults = Faults() if asked.partial else None
        with SourceFiles(path) as files:
            grid = read_grid(files, folder, faults)
            model = join_tensors(files, grid, rules, str(path / folder))
            others = _others(grid, path)
            sizes = {state.file: files.size(state.file) for state in grid.states.values()}
        own = {folder, POINTER, *(file.split("/")[0] for file in grid.files.values())}
        return Catalog(
            root=str(path),
            path=str(path),
            format=self.name,
            files=sizes,
            tensors={**model.tensors, **others.tensors},
            blobs=others.blobs,
            assets=side_files(path, exclude=own),
            documents=documents(path),
            notes=(
                *_notes(grid, model, path),
                *others.notes,
                *unknown_notes(others.blobs.values()),
                *left_behind(path, exclude=own),
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


FORMAT = MegatronFormat()
