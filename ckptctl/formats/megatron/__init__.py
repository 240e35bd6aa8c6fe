"""Megatron's legacy checkpoints, ``mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`` of every rank.

Source: ``megatron/training/checkpointing.py``. The files do not record how ranks divide tensors; a
rules file defines it (:mod:`ckptctl.formats.megatron.rules`).
"""

from __future__ import annotations

import re

from ckptctl.catalog import Catalog
from ckptctl.formats.base import (
    DEFAULT_READ_OPTIONS,
    Format,
    Listing,
    ReadOptions,
    RecordedFacts,
    require_folder,
)
from ckptctl.formats.megatron.megatron_folder import POINTER_FILE, find_evidence
from ckptctl.formats.shared.tags import is_run_folder
from ckptctl.tree import TreePath


class MegatronFormat(Format):
    """Folder of one save, or its parent folder with ``latest_checkpointed_iteration.txt``."""

    name = "megatron"
    title = "Megatron-LM (legacy): mp_rank_XX/model_optim_rng.pt of every rank"
    recognized = (
        "`mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`; the parent folder of `iter_NNNNNNN` or "
        "`release`, with `latest_checkpointed_iteration.txt`"
    )
    marks = re.compile(f"{POINTER_FILE}|mp_rank_")
    wholeness = (
        "`args` in every file states the numbers of ranks, layers and experts, and all of them "
        "exist; all files are of the same iteration; files that have checksums were not copied "
        "over one another; files were not swapped, if `args` contains the number of the writing "
        "process (tools that convert checkpoints to Megatron do not record it)"
    )
    tested = (
        "Megatron-Core 0.16 (2, 4 and 8 ranks, built-in rules); Megatron-LM's own program and "
        "Transformer Engine's layers were not run"
    )
    proof = (
        "reading: with the built-in rules, on 2, 4 and 8 ranks, GPT tensors are where "
        "Megatron-Core 0.16's own sharded state dict places them (tests/oracle/test_megatron.py);"
        " reading: one rank loads these tensors strictly by name (tests/oracle/test_megatron.py);"
        " Megatron-LM's own program and Transformer Engine's layers (fused norms, grouped "
        "experts) were not run; for these, the file layout and the names follow the source code"
    )
    read_options = frozenset({"tag", "rules"})
    self_described = True

    def sniff(self, listing: Listing) -> str | None:
        """See :meth:`Format.sniff`."""
        if is_run_folder(listing.path, POINTER_FILE, find_evidence):
            return f"`{POINTER_FILE}` and saves of mp_rank_*"
        return find_evidence(listing.path)

    def read(self, path: TreePath, options: ReadOptions = DEFAULT_READ_OPTIONS) -> Catalog:
        """See :meth:`Format.read`."""
        require_folder(path)
        from ckptctl.formats.megatron.megatron_reader import read_catalog

        return read_catalog(path, options, self.name)

    def parse_recorded_facts(self, catalog: Catalog) -> RecordedFacts | None:
        """See :meth:`Format.parse_recorded_facts`."""
        if not catalog.extensions:
            return None
        from ckptctl.facts.recorded import MegatronRecords  # not for detection

        return MegatronRecords(catalog)


FORMAT = MegatronFormat()
