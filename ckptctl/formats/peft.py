"""PEFT adapters, ``adapter_model.safetensors`` with ``adapter_config.json``.

Sources: peft's ``utils/save_and_load.py`` and ``utils/constants.py``. Older releases wrote
``adapter_model.bin``, which ckptctl can read but not write.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from ckptctl.catalog import Catalog
from ckptctl.errors import FormatError, quote_names
from ckptctl.formats.base import (
    DEFAULT_READ_OPTIONS,
    Listing,
    OutputLayout,
    OutputRequest,
    ReadOptions,
)
from ckptctl.formats.hf import HfFormat
from ckptctl.formats.sidecar_files import ADAPTER_CONFIG
from ckptctl.storage.files import source_files
from ckptctl.storage.json_reader import read_json_object
from ckptctl.tree import TreePath

CONFIG = ADAPTER_CONFIG
WEIGHTS = "adapter_model.safetensors"
BIN = "adapter_model.bin"
TORCHTUNE_FILES = ("adapter_model.pt", "adapter_0.pt")


class PeftFormat(HfFormat):
    """A PEFT adapter, stored as one weight file and ``adapter_config.json``."""

    name = "peft"
    other_names = ("lora",)
    title = "PEFT adapter: adapter_model.safetensors (or .bin, read only) with adapter_config.json"
    recognized = (
        "`adapter_model.safetensors` or `adapter_model.bin`, without a complete model in the same"
        " folder"
    )
    marks = re.compile(r"adapter_model\.")
    yields_to = frozenset({"hf"})  # torchtune writes the complete model to the same folder
    wholeness = "the file has the length that its header states; a `.bin` file is a complete zip"
    tested = "peft 0.21, torchtune 0.6.1 (logits)"
    proof = (
        "writing: with converted adapters of torchtune, peft 0.21 computes the logits of "
        "torchtune 0.6.1 (tests/oracle/test_adapters.py); merging: peft and torchtune merge "
        "them as `ckptctl merge` does (tests/oracle/test_adapters.py)"
    )
    layout = "peft"
    adapters = True
    other_layouts = False
    adapter_layouts = ("peft", "peft-v5")
    sharded = False
    ties = "written in full"
    records_ties = False
    config_files = (CONFIG,)

    def sniff(self, listing: Listing) -> str | None:
        """See :meth:`Format.sniff`."""
        name = _find_weight_file(listing.path) if listing.is_folder else listing.path.name
        return name if name and (listing.is_folder or name == WEIGHTS) else None

    def read(self, path: TreePath, options: ReadOptions = DEFAULT_READ_OPTIONS) -> Catalog:
        """See :meth:`Format.read`."""
        name = path.name if path.is_file() else _find_weight_file(path)
        if name is None:
            raise FormatError(
                "no adapter was found", where=str(path), why=f"expected {WEIGHTS} or {BIN}"
            )
        root = path if path.is_dir() else path.parent
        catalog = super().read(root / name, options)
        torchtune_files = [file for file in TORCHTUNE_FILES if (root / file).is_file()]
        notes = catalog.notes
        if torchtune_files:
            notes += (
                f"found torchtune's own {quote_names(torchtune_files)}; "
                "convert it instead, because torchtune's PEFT export is wrong for Qwen and DoRA",
            )
        documents = {**catalog.documents, **read_adapter_config(root)}
        return replace(catalog, path=path, documents=documents, notes=notes)

    def lay_out(self, request: OutputRequest) -> OutputLayout:
        """See :meth:`WritableFormat.lay_out`."""
        file_indices = dict.fromkeys((tensor.name for tensor in request.tensors), 0)
        return super().lay_out(replace(request, like=file_indices, like_files=(WEIGHTS,)))


def read_adapter_config(root: TreePath) -> dict[str, Mapping[str, object]]:
    """Map the name ``adapter_config.json`` to the parsed file in *root*.

    The result is empty if the file does not exist.
    """
    if not (root / CONFIG).is_file():
        return {}
    with source_files(root) as files:
        return {CONFIG: read_json_object(files, CONFIG)}


def _find_weight_file(path: TreePath) -> str | None:
    return next((name for name in (WEIGHTS, BIN) if (path / name).is_file()), None)


FORMAT = PeftFormat()
