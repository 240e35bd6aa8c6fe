"""DeepSpeed checkpoints of ZeRO stages 0 to 3 and of ``BF16_Optimizer``, read only.

Also as the HF Trainer (``checkpoint-N``), accelerate (``pytorch_model``) and Lightning
(``<name>.ckpt/checkpoint``) wrap them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from ckptctl.catalog import Catalog, TensorEntry
from ckptctl.errors import FormatError, UsageError
from ckptctl.formats import hf, peft
from ckptctl.formats.assets import documents, left_behind, side_files
from ckptctl.formats.base import AS_IT_IS, Format, ReadOptions, Sniff
from ckptctl.formats.deepspeed_files import SCRIPTS, evidence, rank_files
from ckptctl.formats.deepspeed_model import as_saved, master, optimised, without_partitions
from ckptctl.formats.deepspeed_optimizer import surroundings
from ckptctl.formats.deepspeed_replicas import Replicas, of_counters, of_models
from ckptctl.formats.deepspeed_tags import LATEST, tag_folder, tags
from ckptctl.formats.deepspeed_zero import Save, read_save
from ckptctl.formats.faults import Faults
from ckptctl.formats.torch_file import NO_CHECKSUMS, Contents
from ckptctl.formats.unknown_classes import unknown_notes
from ckptctl.storage.files import SourceFiles


class DeepSpeedFormat(Format):
    """A folder of one file of states per rank, or the folder above it with ``latest``."""

    name = "deepspeed"
    title = "DeepSpeed: ZeRO stages 0 to 3 and BF16_Optimizer"
    recognised = (
        "a folder of `mp_rank_00_model_states.pt` or `zero_pp_rank_N_mp_rank_00_*_states.pt`, or "
        "the one above it with `latest`; with whole safetensors or an adapter beside them, as the "
        "Trainer of transformers leaves them, it is `hf` or `peft`"
    )
    wholeness = (
        "the files say how many ranks there were, and each rank's is there, once and of this save; "
        "the partitions have the lengths that the parameters and the number of ranks give, and the "
        "parameters fill them; `latest`, where there is one, names a save that is there"
    )
    proof = (
        "what deepspeed 0.19.8 saved at stages 0 to 3 and with `BF16_Optimizer`: the fp32 copies "
        "are what its zero_to_fp32.py makes of them, module weights and buffers those of the live "
        "module, moments those that it gathers (tests/unit/formats/test_deepspeed.py); what it "
        "saves afresh on 1 to 4 ranks has the live engine's weights and moments "
        "(tests/oracle/trainers/test_deepspeed.py)"
    )
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
        faults = Faults()
        found = rank_files(path, folder, faults if asked.partial else None)
        with SourceFiles(path) as files:
            save = read_save(
                files, found, asked.weights != "module", faults if asked.partial else None
            )
            model = _weights(save, path, asked, faults)
            others = surroundings(save, files)
            tensors, lost = faults.usable({**model.tensors, **others.tensors})
            replicas = _replicas(save, files, tensors, asked.replicas)
            sizes = {name: files.size(name) for name in save.files}
        return Catalog(
            root=str(path),
            path=str(path),
            format=self.name,
            files=sizes,
            tensors={**tensors, **replicas.apart},
            blobs={**model.blobs, **others.blobs},
            assets=side_files(path, exclude=SCRIPTS),
            documents=documents(path),
            notes=(
                *_notes(save),
                *others.notes,
                *unknown_notes(others.blobs.values()),
                *replicas.notes(),
                *left_behind(path, exclude={folder, *SCRIPTS}),
            ),
            replicas=replicas.listed(),
            findings=tuple(faults.findings),
            lost=lost,
        )


def _notes(save: Save) -> Iterator[str]:
    if not save.model.checksums:
        yield NO_CHECKSUMS
    if save.model.groups is not None and not save.optims:
        yield "the optimizer states of all ranks are missing"


def _replicas(
    save: Save, files: SourceFiles, tensors: Mapping[str, TensorEntry], asked: bool
) -> Replicas:
    replicas = Replicas(files, asked)
    replicas.take(tensors, save.model.file, of_models(save.models, save.model))
    if save.optims and asked:
        replicas.take(tensors, save.optim.file, of_counters(save))
    return replicas


def _weights(save: Save, root: Path, asked: ReadOptions, faults: Faults) -> Contents:
    """The model as asked for; the fp32 copies where there are any and nothing is asked."""
    if save.partitioned and asked.weights == "module":
        raise UsageError(
            "stage 3 keeps no weights in `module`",
            where=str(root),
            why="its tensors are empty placeholders; the parameters are divided among ranks",
            hint="`--weights master`",
        )
    if save.optims and asked.weights != "module":
        partial = faults if asked.partial else None
        return master(save.models, optimised(save), save.partitioned, root, partial)
    if save.model.groups is not None and asked.weights != "module":
        return without_partitions(save, root, faults)
    if asked.weights == "master":
        raise UsageError(
            "stage 0 has no fp32 partitions",
            where=str(root),
            why="it keeps fp32 copies without the names of the parameters, or none",
            hint="`--weights module`",
        )
    return as_saved(save.model, root)


FORMAT = DeepSpeedFormat()
