"""DeepSpeed checkpoints of ZeRO stages 0 to 3 and of ``BF16_Optimizer``, read only.

Also as the HF Trainer (``checkpoint-N``), accelerate (``pytorch_model``) and Lightning
(``<name>.ckpt/checkpoint``) wrap them.
"""

from __future__ import annotations

import re
from pathlib import Path

from ckptctl.catalog import Catalog
from ckptctl.formats import hf, peft
from ckptctl.formats.base import AS_IT_IS, Format, ReadOptions, Sniff, require_folder
from ckptctl.formats.deepspeed.files import evidence
from ckptctl.formats.shared.tags import LATEST, tags


class DeepSpeedFormat(Format):
    """A folder of one file of states per rank, or the folder above it with ``latest``."""

    name = "deepspeed"
    title = "DeepSpeed: ZeRO stages 0 to 3 and BF16_Optimizer"
    recognized = (
        "a folder of `mp_rank_00_model_states.pt` or `zero_pp_rank_N_mp_rank_00_*_states.pt`, or "
        "the one above it with `latest`; with whole safetensors or an adapter beside them, as the "
        "Trainer of transformers leaves them, it is `hf` or `peft`"
    )
    marks = re.compile(rf"{LATEST}|.*_states\.pt", re.DOTALL)
    wholeness = (
        "the files say how many ranks there were, and each rank's is there, once and of this save; "
        "the partitions have the lengths that the parameters and the number of ranks give, and the "
        "parameters fill them; `latest`, where there is one, names a save that is there"
    )
    proof = (
        "what deepspeed 0.19.8 saved at stages 0 to 3 and with `BF16_Optimizer`: the fp32 copies "
        "are what its zero_to_fp32.py makes of them, module weights and buffers those of the live "
        "module, moments those that it gathers (tests/unit/formats/deepspeed/test_read.py); what "
        "it saves afresh on 1 to 4 ranks has the live engine's weights and moments "
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
        require_folder(path)
        from ckptctl.formats.deepspeed.reader import read

        return read(path, asked, self.name)


FORMAT = DeepSpeedFormat()
