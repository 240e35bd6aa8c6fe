"""Megatron-Core's distributed checkpoints, which are DCP with several naming conventions.

Megatron-LM, Megatron-Bridge, NeMo 2, verl, slime and ms-swift write such checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ckptctl.catalog import Catalog
from ckptctl.formats.base import (
    DEFAULT_READ_OPTIONS,
    Listing,
    OutputLayout,
    OutputRequest,
    ReadOptions,
    RecordedFacts,
    WritableFormat,
    require_folder,
)
from ckptctl.formats.dcp import ItemFormat
from ckptctl.formats.mcore.mcore_files import (
    COMMON,
    METADATA_JSON,
    find_converted_save,
    find_evidence,
    find_wrapped_checkpoint,
)
from ckptctl.formats.megatron.megatron_folder import POINTER_FILE
from ckptctl.formats.shared.tags import is_run_folder
from ckptctl.tree import TreePath

FUSED_LAYER = ".linear_fc1.weight"
"""Suffix of Megatron-Core's fused gate and up weight, which Megatron-FSDP saves as two tensors."""
FSDP_SETTINGS = "optimizer.param_to_group_meta."
"""Prefix of the settings of each parameter in Megatron-FSDP's optimizer state."""


class McoreFormat(ItemFormat, WritableFormat):
    """Folder of one save, run folder that contains it, or trainer's folder that wraps it."""

    name = "mcore"
    title = "Megatron-Core's distributed checkpoint (torch_dist): iter_NNNNNNN"
    recognized = (
        "`.metadata` next to `common.pt`; a `metadata.json` that specifies a backend; a folder "
        "of such folders, with `latest_checkpointed_iteration.txt`; NeMo 2's folder with such a "
        "`weights` folder; verl's folder with such a `dist_ckpt` folder"
    )
    marks = re.compile(
        "|".join(
            [
                *map(re.escape, (COMMON, METADATA_JSON, POINTER_FILE)),
                r"(?:weights|dist_ckpt|model|actor)\Z",
            ]
        )
    )
    wholeness = (
        "`metadata.json`, which is written last, exists; the chunks in `.metadata` tile every "
        "tensor; the file of every chunk exists and is long enough; no layer, expert or half of a"
        " gated layer is missing, according to names, shapes and the trainer's arguments"
    )
    tested = "Megatron-Core 0.16, 0.19 (TP, PP, EP, CP), Megatron-Bridge 0.3 (adapters)"
    proof = (
        "reading: checkpoints of Megatron-Core equal the saved tensors "
        "(tests/unit/formats/test_wrappers.py); reading: checkpoints of every naming variant "
        "equal the saved tensors (tests/unit/formats/mcore/test_reading.py); writing: "
        "Megatron-Core 0.16 loads the output with other tensor-, pipeline-, expert- and "
        "context-parallel sizes, with separate and stacked layers "
        "(tests/oracle/test_mcore_written.py); writing: its distributed optimizer loads the "
        "optimizer state (tests/oracle/test_mcore_optimizer.py); reading: Megatron-Core 0.19 "
        "trains on from optimizer state that it saved by ranges "
        "(tests/oracle/test_mcore_buckets.py), and from that of Megatron-FSDP "
        "(tests/oracle/test_mcore_fsdp.py); adapters: modules of "
        "Megatron-Bridge 0.3 compute the same logits as PEFT "
        "(tests/oracle/test_mcore_adapters.py)"
    )
    layout = "mcore"
    self_described = True
    sharded = True
    ties = "written in full"
    stacks_layers = True
    adapter_layouts = ("mcore-canonical", "mcore")
    nested = True
    verbatim = True
    pads_vocabulary = True
    training = True
    read_options = frozenset({"tag"})
    specializes = frozenset({"dcp"})

    def sniff(self, listing: Listing) -> str | None:
        """See :meth:`Format.sniff`."""
        path = listing.path
        if is_run_folder(path, POINTER_FILE, find_evidence):
            return f"`{POINTER_FILE}` and saves of Megatron-Core"
        found_evidence = find_evidence(path)
        if (
            found_evidence is None
            and listing.is_folder
            and (subpath := find_wrapped_checkpoint(path))
        ):
            found_evidence = f"`{subpath}` with {find_evidence(path / subpath)}"
        return found_evidence

    def read(self, path: TreePath, options: ReadOptions = DEFAULT_READ_OPTIONS) -> Catalog:
        """See :meth:`Format.read`."""
        require_folder(path)
        from ckptctl.formats.mcore.mcore_reader import read_catalog

        return read_catalog(path, options, self.name)

    def refine(self, catalog: Catalog, options: ReadOptions) -> Catalog:
        """Join the tensors that Megatron-FSDP saves in parts in DCP checkpoints.

        Its optimizer state gets the names of Megatron-Core's distributed optimizer.
        """
        has_optimizer = any(name.startswith(FSDP_SETTINGS) for name in catalog.blobs)
        if not has_optimizer and not any(FUSED_LAYER in name for name in catalog.tensors):
            return catalog
        from ckptctl.formats.mcore.fsdp import refine_catalog  # few checkpoints need this

        return refine_catalog(catalog, options)

    def map_merged_parameters(self, names: Sequence[str]) -> dict[str, str]:
        """See :meth:`Format.map_merged_parameters`."""
        from ckptctl.formats.mcore.spelling import find_parameter_name

        return {name: merged for name in names if (merged := find_parameter_name(name))}

    def parse_recorded_facts(self, catalog: Catalog) -> RecordedFacts | None:
        """See :meth:`Format.parse_recorded_facts`."""
        if not catalog.extensions:
            return None
        from ckptctl.facts.recorded import MegatronRecords  # most checkpoints have none

        return MegatronRecords(catalog)

    def find_inner_checkpoint(self, path: TreePath) -> TreePath | None:
        """See :meth:`Format.find_inner_checkpoint`."""
        return find_converted_save(path)

    def lay_out(self, request: OutputRequest) -> OutputLayout:
        """See :meth:`WritableFormat.lay_out`."""
        from ckptctl.formats.mcore.mcore_writing import lay_out_checkpoint  # only for writing

        return lay_out_checkpoint(request)


FORMAT = McoreFormat()
