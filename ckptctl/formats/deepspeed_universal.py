"""DeepSpeed's universal checkpoints (read-only), with one folder per parameter under ``zero``.

Source: ``deepspeed/checkpoint/ds_to_universal.py``. The parameters are complete, whatever the
original parallelism. Buffers are read from the model states, because the converter casts them to
float32.
"""

from __future__ import annotations

import re

from ckptctl.catalog import Catalog
from ckptctl.formats.base import AS_IT_IS, Format, Listing, ReadOptions, require_folder
from ckptctl.formats.deepspeed.deepspeed_files import FP32, ZERO
from ckptctl.formats.shared.tags import LATEST_UNIVERSAL, is_run, tag_folder
from ckptctl.storage.files import source_files
from ckptctl.tree import TreePath
from ckptctl.units import pluralize


def _evidence(folder: TreePath) -> str | None:
    """Return evidence that *folder* is a universal checkpoint, or None."""
    if not (folder / ZERO).is_dir() or not folder.is_dir():
        return None
    found = [item.name for item in (folder / ZERO).iterdir() if (item / f"{FP32}.pt").is_file()]
    return f"`{ZERO}` with {pluralize(len(found), 'parameter')}" if found else None


class DeepSpeedUniversalFormat(Format):
    """Output of ``ds_to_universal.py``, or its parent folder with ``latest_universal``."""

    name = "deepspeed-universal"
    title = "DeepSpeed's universal checkpoint"
    recognized = (
        "a folder `zero` with one folder per parameter that contains `fp32.pt`; the parent folder"
        " of such a checkpoint, with `latest_universal`; if the original checkpoint is in the "
        "same folder, the format is `deepspeed`"
    )
    marks = re.compile(f"{ZERO}|{LATEST_UNIVERSAL}")
    yields_to = frozenset({"deepspeed", "hf"})
    wholeness = (
        "`zero/optimizer_state.pt` and the model states exist (otherwise the conversion did not "
        "finish); every parameter in the model states has a folder with `fp32.pt`; all "
        "parameters of a group have the same kinds of moments; all shapes match the model states"
    )
    tested = "DeepSpeed 0.19.8 (ds_to_universal.py)"
    proof = (
        "reading: the output of ds_to_universal.py of deepspeed 0.19.8 equals what stock "
        "`torch.load` reads (tests/unit/formats/test_deepspeed_universal.py); reading: the "
        "output also equals the tensors read from the original ranks "
        "(tests/unit/formats/test_deepspeed_universal.py)"
    )
    choices = frozenset({"weights", "tag"})

    def sniff(self, listing: Listing) -> str | None:
        """See :meth:`Format.sniff`."""
        here = _evidence(listing.path)
        if here is None and is_run(listing.path, LATEST_UNIVERSAL, _evidence):
            here = f"`{LATEST_UNIVERSAL}`"
        return here

    def read(self, path: TreePath, asked: ReadOptions = AS_IT_IS) -> Catalog:
        """See :meth:`Format.read`."""
        from ckptctl.formats.deepspeed.deepspeed_reader import Replicas, catalog_of, of_models
        from ckptctl.formats.deepspeed.universal import UniversalSave, surroundings

        require_folder(path)
        folder = tag_folder(path, asked.tag, LATEST_UNIVERSAL, _evidence)
        with source_files(path) as files:
            save = UniversalSave.of(files, f"{folder}/" if folder else "", asked.partial)
            model = save.weights(asked)
            others = surroundings(save)
            tensors = save.faults.usable({**model.tensors, **others.tensors})
            replicas = Replicas(files, tensors, asked=asked.replicas)
            replicas.take(save.model.file, of_models(save.models, save.model))
            return catalog_of(
                self.name,
                save.faults,
                folder=folder or ZERO,
                files={name: files.size(name) for name in save.files()},
                blobs=model.blobs,
                others=others,
                replicas=replicas,
                notes=save.notes(),
            )


FORMAT = DeepSpeedUniversalFormat()
