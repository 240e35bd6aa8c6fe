"""Meta's format, one ``consolidated.NN.pth`` file per model-parallel rank and ``params.json``.

Sources: ``llama_models/checkpoint.py`` and ``fairscale/nn/model_parallel/layers.py`` for the shards
of each rank. The files do not record the dimension along which a tensor is sharded, so the model
family declares it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ckptctl.catalog import Catalog
from ckptctl.errors import FormatError, UnsupportedError
from ckptctl.formats import torch_file
from ckptctl.formats.base import (
    DEFAULT_READ_OPTIONS,
    Listing,
    OutputLayout,
    OutputRequest,
    OutputTensor,
    ReadOptions,
    WritableFormat,
)
from ckptctl.formats.mistral import has_mistral_params
from ckptctl.formats.shared.findings import missing_files_error
from ckptctl.formats.shared.model_parallel_layout import lay_out_ranks
from ckptctl.storage.files import source_files
from ckptctl.storage.read_ahead import prefetch_zips
from ckptctl.tree import TreePath

LAYOUT = "meta"
_SHARD = torch_file.META_SHARD


class MetaFormat(WritableFormat):
    """One ``consolidated.NN.pth`` file per model-parallel rank, with ``params.json``."""

    name = "meta"
    other_names = ("llama",)
    title = "Meta: consolidated.NN.pth with params.json"
    recognized = "`consolidated.NN.pth`, unless `params.json` is Mistral's"
    marks = re.compile("consolidated")
    wholeness = (
        "file numbers start at 00 and have no gap; all files contain the same tensors and agree "
        "on those that are not divided; the joined shapes match `params.json`, which reveals "
        "missing last files"
    )
    tested = "llama-models 0.3.0, transformers (logits)"
    proof = (
        "writing: llama-models 0.3.0 joins the output (tests/oracle/test_meta_shards.py); "
        "reading: shards divided by llama-models are read (tests/oracle/test_meta_shards.py); "
        "transformers computes the same logits as a model with Meta's names and axes, also from "
        "shards (tests/oracle/test_logits.py)"
    )
    layout = LAYOUT
    has_params_json = True
    ties = "stored once per file if config.json ties them, otherwise written in full"
    parallel = True

    def sniff(self, listing: Listing) -> str | None:
        """See :meth:`Format.sniff`."""
        path = listing.path
        folder = path if path.is_dir() else path.parent
        if path.is_file() and not _SHARD.fullmatch(path.name):
            return None
        if has_mistral_params(folder):
            return None
        shards = count_shards(folder)
        return f"{shards} consolidated.*.pth" if shards else None

    def read(self, path: TreePath, options: ReadOptions = DEFAULT_READ_OPTIONS) -> Catalog:
        """See :meth:`Format.read`."""
        from ckptctl.formats.shared.model_parallel_join import join_shards
        from ckptctl.formats.shared.stored_leaves import read_leaves

        root = path if path.is_dir() else path.parent
        if path.is_file() and not _SHARD.fullmatch(path.name):
            raise _no_shards_error(path)
        names = _list_shards(root)
        with source_files(root) as files:
            leaves_by_name = {
                name: read_leaves(files, name) for name in prefetch_zips(files, names)
            }
            shards = {name: contents.tensors for name, contents in leaves_by_name.items()}
            catalog = join_shards(files, self.name, LAYOUT, shards, options)
        shard_notes = dict.fromkeys(
            note for contents in leaves_by_name.values() for note in contents.notes
        )
        return replace(
            catalog, blobs=leaves_by_name[names[0]].blobs, notes=(*catalog.notes, *shard_notes)
        )

    def lay_out(self, request: OutputRequest) -> OutputLayout:
        """See :meth:`WritableFormat.lay_out`."""

        def lay_out_shard(rank: int, tensors: Sequence[OutputTensor]) -> OutputLayout:
            name = f"consolidated.{rank:02d}.pth"
            return torch_file.FORMAT.lay_out(replace(request, name=name, tensors=tensors, blobs=()))

        return lay_out_ranks(request, lay_out_shard, "Meta's files can only store tensors")


def count_shards(root: TreePath) -> int:
    """Return the number of shard files in *root*, which is the number of model-parallel ranks."""
    return sum(1 for item in root.glob("consolidated*.pth") if _SHARD.fullmatch(item.name))


def _list_shards(root: TreePath) -> list[str]:
    """Return the names of the shard files in rank order, or raise if one is missing."""
    shard_names: dict[int, str] = {}
    for name in sorted(item.name for item in root.iterdir()):
        match = _SHARD.fullmatch(name)
        rank = int(match[1] or 0) if match else None
        if rank in shard_names:
            raise UnsupportedError(
                f"two files contain the shard of rank {rank}",
                where=str(root),
                why=f"`{shard_names[rank]}` and `{name}`",
            )
        if rank is not None:
            shard_names[rank] = name
    if not shard_names:
        raise _no_shards_error(root)
    required = range(max(shard_names) + 1)
    if error := missing_files_error(
        root, shard_names, required, "consolidated.{:02d}.pth".format, "shards"
    ):
        raise error
    return [shard_names[rank] for rank in sorted(shard_names)]


def _no_shards_error(path: TreePath) -> FormatError:
    return FormatError(
        "no shards in Meta's format were found",
        where=str(path),
        why="expected consolidated.00.pth, consolidated.01.pth, ... and params.json",
    )


FORMAT = MetaFormat()
