"""Megatron-Core's distributed checkpoints, which are DCP with several naming conventions.

Megatron-LM, Megatron-Bridge, NeMo 2, verl, slime and ms-swift write them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ckptctl.catalog import Catalog
from ckptctl.errors import quote_names
from ckptctl.formats.base import (
    AS_IT_IS,
    Listing,
    OutputLayout,
    OutputRequest,
    ReadOptions,
    RecordedFacts,
    WritableFormat,
    require_folder,
)
from ckptctl.formats.dcp import ItemFormat
from ckptctl.formats.mcore.mcore_files import COMMON, MARK, evidence, inside, only_save
from ckptctl.formats.megatron.megatron_folder import POINTER
from ckptctl.formats.shared.findings import Faults
from ckptctl.formats.shared.tags import is_run
from ckptctl.tree import TreePath

FUSED = ".linear_fc1.weight"
"""Megatron-Core's name of a layer that Megatron-FSDP saves in parts."""


class McoreFormat(ItemFormat, WritableFormat):
    """The folder of one save, the run above it, or the trainer's folder around it."""

    name = "mcore"
    title = "Megatron-Core's distributed checkpoint (torch_dist): iter_NNNNNNN"
    recognized = (
        "`.metadata` next to `common.pt`; a `metadata.json` that specifies a backend; a folder "
        "of such folders, with `latest_checkpointed_iteration.txt`; NeMo 2's folder with such a "
        "`weights` folder; verl's folder with such a `dist_ckpt` folder"
    )
    marks = re.compile(
        "|".join([*map(re.escape, (COMMON, MARK, POINTER)), r"(?:weights|dist_ckpt|model|actor)\Z"])
    )
    wholeness = (
        "`metadata.json`, which is written last, exists; the chunks in `.metadata` tile every "
        "tensor; the file of every chunk exists and is long enough; no layer, expert or half of a"
        " gated layer is missing, according to names, shapes and the trainer's arguments"
    )
    tested = "Megatron-Core 0.16 (TP, PP, EP, CP), Megatron-Bridge 0.3 (adapters)"
    proof = (
        "reading: checkpoints of Megatron-Core equal the saved tensors "
        "(tests/unit/formats/test_wrappers.py); reading: checkpoints of every naming variant "
        "equal the saved tensors (tests/unit/formats/mcore/test_reading.py); writing: "
        "Megatron-Core 0.16 loads the output with other tensor-, pipeline-, expert- and "
        "context-parallel sizes, with separate and stacked layers "
        "(tests/oracle/test_mcore_written.py); writing: its distributed optimizer loads the "
        "optimizer state (tests/oracle/test_mcore_optimizer.py); adapters: modules of "
        "Megatron-Bridge 0.3 compute the same logits as PEFT "
        "(tests/oracle/test_mcore_adapters.py)"
    )
    layout = "mcore"
    self_described = True
    sharded = True
    ties = "written in full"
    stacks = True
    adapter_layouts = ("mcore-canonical", "mcore")
    nested = True
    verbatim = True
    pads = True
    training = True
    choices = frozenset({"tag"})
    specializes = frozenset({"dcp"})

    def sniff(self, listing: Listing) -> str | None:
        """See :meth:`Format.sniff`."""
        path = listing.path
        if is_run(path, POINTER, evidence):
            return f"`{POINTER}` and saves of Megatron-Core"
        here = evidence(path)
        if here is None and listing.is_folder and (within := inside(path)):
            here = f"`{within}` with {evidence(path / within)}"
        return here

    def read(self, path: TreePath, asked: ReadOptions = AS_IT_IS) -> Catalog:
        """See :meth:`Format.read`."""
        require_folder(path)
        from ckptctl.formats.mcore.mcore_reader import read

        return read(path, asked, self.name)

    def refine(self, catalog: Catalog, asked: ReadOptions) -> Catalog:
        """Join the tensors that Megatron-FSDP saves in parts, in regular DCP checkpoints."""
        if not any(FUSED in name for name in catalog.tensors):
            return catalog
        from ckptctl.formats.mcore.joining import canonical  # few checkpoints need this
        from ckptctl.formats.mcore.spelling import is_of_fsdp

        if not is_of_fsdp(catalog.tensors):
            return catalog
        faults = Faults(catalog.root, asked.partial, list(catalog.findings))
        joined = canonical(catalog, faults, {})
        new = quote_names([name for name in joined.tensors if name not in catalog.tensors])
        note = f"tensors that Megatron-FSDP saved in parts are joined and renamed: {new}"
        return replace(joined, notes=(*joined.notes, note))

    def merged_parameters(self, names: Sequence[str]) -> dict[str, str]:
        """See :meth:`Format.merged_parameters`."""
        from ckptctl.formats.mcore.spelling import whole_of

        return {name: whole for name in names if (whole := whole_of(name))}

    def recorded_facts(self, catalog: Catalog) -> RecordedFacts | None:
        """See :meth:`Format.recorded_facts`."""
        from ckptctl.facts.recorded import MegatronRecords  # most checkpoints have none

        return MegatronRecords(catalog) if catalog.extensions else None

    def only_part(self, path: TreePath) -> TreePath | None:
        """See :meth:`Format.only_part`."""
        return only_save(path)

    def lay_out(self, request: OutputRequest) -> OutputLayout:
        """See :meth:`WritableFormat.lay_out`."""
        from ckptctl.formats.mcore.mcore_writing import lay_out  # only for writing

        return lay_out(request)


FORMAT = McoreFormat()
