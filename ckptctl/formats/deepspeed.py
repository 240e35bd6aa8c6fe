"""DeepSpeed checkpoints of ZeRO stages 0 to 3 and of ``BF16_Optimizer``, read only.

Also as the HF Trainer (``checkpoint-N``), accelerate (``pytorch_model``) and Lightning
(``<name>.ckpt/checkpoint``) wrap them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ckptctl.catalog import Catalog
from ckptctl.errors import FormatError, UsageError
from ckptctl.formats import hf, peft
from ckptctl.formats.assets import documents, left_behind, side_files
from ckptctl.formats.base import AS_IT_IS, Format, ReadOptions, Sniff
from ckptctl.formats.deepspeed_files import (
    SCRIPTS,
    evidence,
    rank_files,
)
from ckptctl.formats.deepspeed_model import as_saved, master, optimised
from ckptctl.formats.deepspeed_optimizer import surroundings
from ckptctl.formats.deepspeed_tags import LATEST, tag_folder, tags
from ckptctl.formats.deepspeed_zero import Save, read_save
from ckptctl.formats.torch_file import NO_CHECKSUMS, Contents
from ckptctl.storage.files import SourceFiles


class DeepSpeedFormat(Format):
    """A folder of one file of states per rank, or the folder above it with ``latest``."""

    name = "deepspeed"
    title = "DeepSpeed: ZeRO stages 0 to 3 and BF16_Optimizer, read only"
    choices = frozenset({"weights", "tag"})

    def sniff(self, path: Path) -> Sniff | None:
        """See :meth:`Format.sniff`.

        Where the HF Trainer has written whole weights or an adapter beside it, it is that format.
        """
        if not path.is_dir() or hf.FORMAT.sniff(path) or peft.FORMAT.sniff(path):
            return None
        if (path / LATEST).is_file():
            found = tags(path, evidence)
            return Sniff(f"`{LATEST}`, {evidence(path / found[-1])}") if found else None
        here = evidence(path)
        return Sniff(here) if here else None

    def read(self, path: Path, asked: ReadOptions = AS_IT_IS) -> Catalog:
        """See :meth:`Format.read`."""
        if not path.is_dir():
            raise FormatError(
                "this is a file", where=str(path), why="expected the folder of all ranks"
            )
        folder = tag_folder(path, asked.tag, LATEST, evidence)
        found = rank_files(path, folder)
        with SourceFiles(path) as files:
            save = read_save(files, found, partitions=asked.weights != "module")
            model = _weights(save, path, asked)
            others = surroundings(save, files)
            sizes = {name: files.size(name) for name in (*found.models, *found.optims)}
        return Catalog(
            root=str(path),
            path=str(path),
            format=self.name,
            files=sizes,
            tensors={**model.tensors, **others.tensors},
            blobs={**model.blobs, **others.blobs},
            assets=side_files(path, exclude=SCRIPTS),
            documents=documents(path),
            notes=(
                *_notes(save),
                *others.notes,
                *left_behind(path, exclude={folder, *SCRIPTS}),
            ),
        )


def _notes(save: Save) -> Iterator[str]:
    if not save.models[0].checksums:
        yield NO_CHECKSUMS
    if save.models[0].groups is not None and not save.optims:
        yield "the optimizer states of all ranks are missing"


def _weights(save: Save, root: Path, asked: ReadOptions) -> Contents:
    """The model as asked for; the fp32 copies where there are any and nothing is asked."""
    if save.stage == 3 and asked.weights == "module":
        raise UsageError(
            "stage 3 keeps no weights in `module`",
            where=str(root),
            why="its tensors are empty placeholders; the parameters are divided among ranks",
            hint="`--weights master`",
        )
    if save.optims and asked.weights != "module":
        return master(save.models, optimised(save), save.stage == 3, root)
    if asked.weights == "master":
        raise UsageError(
            "stage 0 has no fp32 partitions",
            where=str(root),
            why="it keeps fp32 copies without the names of the parameters, or none",
            hint="`--weights module`",
        )
    return as_saved(save.models[0], root)


FORMAT = DeepSpeedFormat()
