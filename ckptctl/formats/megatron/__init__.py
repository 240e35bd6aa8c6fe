"""Megatron's legacy checkpoints: ``mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`` of every rank.

Source: ``megatron/training/checkpointing.py``. How ranks divide a tensor is written nowhere in
them; a rules file says so (:mod:`ckptctl.formats.megatron.rules`).
"""

from __future__ import annotations

import re
from pathlib import Path

from ckptctl.catalog import Catalog
from ckptctl.formats.base import AS_IT_IS, Format, ReadOptions, Sniff, require_folder
from ckptctl.formats.megatron.files import POINTER, evidence, is_run


class MegatronFormat(Format):
    """A folder of one save, or the folder above it with ``latest_checkpointed_iteration.txt``."""

    name = "megatron"
    title = "Megatron-LM, legacy: mp_rank_XX/model_optim_rng.pt of every rank"
    recognized = (
        "`mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`, or `latest_checkpointed_iteration.txt` "
        "above `iter_NNNNNNN` or `release`"
    )
    marks = re.compile(f"{POINTER}|mp_rank_")
    wholeness = (
        "`args` in every file says how many ranks, layers and experts there are, and each is "
        "there; files of another iteration are refused, and, where they have checksums, files "
        "copied over one another; files that have changed places are noticed where `args` has the "
        "number of the process that wrote each, which tools that convert checkpoints to Megatron "
        "do not record"
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
        """See :meth:`Format.read`."""
        require_folder(path)
        from ckptctl.formats.megatron.reader import read

        return read(path, asked, self.name)


FORMAT = MegatronFormat()
