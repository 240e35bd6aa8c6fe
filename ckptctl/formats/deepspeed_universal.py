"""DeepSpeed's universal checkpoints, read only: one folder per parameter under ``zero``.

Source: ``deepspeed/checkpoint/ds_to_universal.py``. Parameters are whole there, whatever divided
them. Buffers come from the model states: the converter makes all of them float32.
"""

from __future__ import annotations

from pathlib import Path

from ckptctl.catalog import Catalog
from ckptctl.errors import FormatError
from ckptctl.formats import deepspeed, hf
from ckptctl.formats.assets import documents, left_behind, side_files
from ckptctl.formats.base import AS_IT_IS, Format, ReadOptions, Sniff
from ckptctl.formats.deepspeed_files import SCRIPTS
from ckptctl.formats.deepspeed_parameters import FP32, ZERO, UniversalSave
from ckptctl.formats.deepspeed_tags import LATEST_UNIVERSAL, tag_folder, tags
from ckptctl.storage.files import SourceFiles


def evidence(folder: Path) -> str | None:
    """Return what tells that *folder* is a universal checkpoint, or None."""
    if not (folder / ZERO).is_dir() or not folder.is_dir():
        return None
    found = [item.name for item in (folder / ZERO).iterdir() if (item / f"{FP32}.pt").is_file()]
    return f"`{ZERO}` with {len(found)} parameters" if found else None


class DeepSpeedUniversalFormat(Format):
    """What ``ds_to_universal.py`` wrote, or the folder above it with ``latest_universal``."""

    name = "deepspeed-universal"
    title = "DeepSpeed's universal checkpoint, read only"
    choices = frozenset({"weights", "tag"})

    def sniff(self, path: Path) -> Sniff | None:
        """See :meth:`Format.sniff`.

        Where the checkpoint that was converted is still there, too, the folder is ``deepspeed``.
        """
        if not path.is_dir() or hf.FORMAT.sniff(path) or deepspeed.FORMAT.sniff(path):
            return None
        here = evidence(path)
        if here is None and (path / LATEST_UNIVERSAL).is_file() and tags(path, evidence):
            here = f"`{LATEST_UNIVERSAL}`"
        return Sniff(here) if here else None

    def read(self, path: Path, asked: ReadOptions = AS_IT_IS) -> Catalog:
        """See :meth:`Format.read`."""
        if not path.is_dir():
            raise FormatError("this is a file", where=str(path), why="expected the whole folder")
        folder = tag_folder(path, asked.tag, LATEST_UNIVERSAL, evidence)
        with SourceFiles(path) as files:
            save = UniversalSave.of(files, f"{folder}/" if folder else "")
            model = save.weights(asked)
            others = save.surroundings()
            sizes = {name: files.size(name) for name in save.files()}
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
                *save.notes(),
                *others.notes,
                *left_behind(path, exclude={folder or ZERO, *SCRIPTS}),
            ),
        )


FORMAT = DeepSpeedUniversalFormat()
