"""DeepSpeed's universal checkpoints, which have one folder per parameter in ``zero/``.

Source: ``deepspeed/checkpoint/ds_to_universal.py``. Parameters are stored unsharded,
independent of the original parallelism. Buffers are read from the model states, because the
converter casts them to float32.
"""

from __future__ import annotations

import re

from ckptctl.catalog import Catalog
from ckptctl.formats.base import DEFAULT_READ_OPTIONS, Format, Listing, ReadOptions, require_folder
from ckptctl.formats.deepspeed.deepspeed_files import FP32, ZERO
from ckptctl.formats.shared.tags import LATEST_UNIVERSAL, find_tag_folder, is_run_folder
from ckptctl.storage.files import source_files
from ckptctl.tree import TreePath
from ckptctl.units import pluralize


def _find_evidence(folder: TreePath) -> str | None:
    """Describe why *folder* is a universal checkpoint, or return None if it is not."""
    if not (folder / ZERO).is_dir() or not folder.is_dir():
        return None
    parameters = [
        item.name for item in (folder / ZERO).iterdir() if (item / f"{FP32}.pt").is_file()
    ]
    return f"`{ZERO}` with {pluralize(len(parameters), 'parameter')}" if parameters else None


class DeepSpeedUniversalFormat(Format):
    """An output folder of ``ds_to_universal.py``, or its parent with ``latest_universal``."""

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
    read_options = frozenset({"weights", "tag"})

    def sniff(self, listing: Listing) -> str | None:
        """See :meth:`Format.sniff`."""
        evidence = _find_evidence(listing.path)
        if evidence is None and is_run_folder(listing.path, LATEST_UNIVERSAL, _find_evidence):
            evidence = f"`{LATEST_UNIVERSAL}`"
        return evidence

    def read(self, path: TreePath, options: ReadOptions = DEFAULT_READ_OPTIONS) -> Catalog:
        """See :meth:`Format.read`."""
        from ckptctl.formats.deepspeed.deepspeed_reader import (
            ReplicaCollector,
            build_catalog,
            iterate_model_copies,
        )
        from ckptctl.formats.deepspeed.universal import UniversalSave, extract_training_state

        require_folder(path)
        folder = find_tag_folder(path, options.tag, LATEST_UNIVERSAL, _find_evidence)
        with source_files(path) as files:
            save = UniversalSave.open_save(files, f"{folder}/" if folder else "", options.partial)
            model = save.read_weights(options)
            state = extract_training_state(save)
            tensors = save.faults.drop_unusable_boxes({**model.tensors, **state.tensors})
            replicas = ReplicaCollector(files, tensors, list_replicas=options.replicas)
            replicas.add_copies(save.model.file, iterate_model_copies(save.models, save.model))
            return build_catalog(
                self.name,
                save.faults,
                folder=folder or ZERO,
                files={name: files.size(name) for name in save.list_files()},
                blobs=model.blobs,
                state=state,
                replicas=replicas,
                notes=save.list_notes(),
            )


FORMAT = DeepSpeedUniversalFormat()
