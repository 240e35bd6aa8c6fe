"""DeepSpeed checkpoints of ZeRO stages 0 to 3 and of ``BF16_Optimizer`` (read-only).

This includes the wrapper folders of the HF Trainer (``checkpoint-N``), accelerate
(``pytorch_model``) and Lightning (``<name>.ckpt/checkpoint``).
"""

from __future__ import annotations

import re

from ckptctl.catalog import Catalog
from ckptctl.formats.base import DEFAULT_READ_OPTIONS, Format, Listing, ReadOptions, require_folder
from ckptctl.formats.deepspeed.deepspeed_files import find_evidence
from ckptctl.formats.shared.tags import LATEST, list_tags
from ckptctl.tree import TreePath


class DeepSpeedFormat(Format):
    """A folder of per-rank state files, or its parent folder, which contains ``latest``."""

    name = "deepspeed"
    other_names = ("zero",)
    title = "DeepSpeed: ZeRO stages 0 to 3 and BF16_Optimizer"
    recognized = (
        "a folder with `mp_rank_00_model_states.pt` or `zero_pp_rank_N_mp_rank_00_*_states.pt`; "
        "the parent folder of such folders, with `latest`; if complete safetensors or an adapter "
        "are in the same folder (as the transformers Trainer saves them), the format is `hf` or "
        "`peft`"
    )
    marks = re.compile(rf"{LATEST}|.*_states\.pt", re.DOTALL)
    yields_to = frozenset({"hf", "peft"})  # the HF Trainer writes them to the same folder
    wholeness = (
        "the files record the number of ranks, and every rank has one file of this save; "
        "partition lengths match the parameters and the number of ranks; the parameters fill the "
        "partitions; if `latest` exists, it points to an existing save"
    )
    tested = "DeepSpeed 0.19.8 (1-4 ranks, ZeRO stages 0-3, BF16_Optimizer)"
    proof = (
        "reading: fp32 copies of deepspeed 0.19.8 (stages 0 to 3 and `BF16_Optimizer`) equal the "
        "output of its zero_to_fp32.py (tests/unit/formats/deepspeed/test_read.py); reading: "
        "module weights and buffers equal those of the live module, and moments equal those that "
        "deepspeed gathers (tests/unit/formats/deepspeed/test_read.py); reading: checkpoints "
        "saved on 1 to 4 ranks equal the live engine's weights and moments "
        "(tests/oracle/trainers/test_deepspeed.py)"
    )
    read_options = frozenset({"weights", "tag"})

    def sniff(self, listing: Listing) -> str | None:
        """See :meth:`Format.sniff`."""
        path = listing.path
        if (path / LATEST).is_file():
            saves = list_tags(path, find_evidence)
            return f"`{LATEST}`, {find_evidence(path / saves[-1])}" if saves else None
        return find_evidence(path)

    def read(self, path: TreePath, options: ReadOptions = DEFAULT_READ_OPTIONS) -> Catalog:
        """See :meth:`Format.read`."""
        require_folder(path)
        from ckptctl.formats.deepspeed.deepspeed_reader import read_catalog

        return read_catalog(path, options, self.name)


FORMAT = DeepSpeedFormat()
