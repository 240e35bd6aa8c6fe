"""DeepSeek's own files, ``model{rank}-mp{ranks}.safetensors``, one per model-parallel rank.

Source: DeepSeek-V3's ``inference/convert.py``. Each file has a slice of
the rows or columns of most tensors, some of the experts, and full copies of all other tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckptctl.catalog import Catalog
from ckptctl.errors import FormatError, UnsupportedError, quote_names
from ckptctl.formats import hf
from ckptctl.formats.base import (
    DEFAULT_READ_OPTIONS,
    Listing,
    OutputLayout,
    OutputRequest,
    OutputTensor,
    ReadOptions,
    WritableFormat,
)
from ckptctl.formats.hf import hf_files
from ckptctl.formats.hf.shards import read_shard
from ckptctl.formats.shared.findings import missing_files_error
from ckptctl.formats.shared.model_parallel_layout import lay_out_ranks
from ckptctl.storage.files import source_files
from ckptctl.storage.read_ahead import prefetch_heads
from ckptctl.tree import TreePath


class DeepSeekFormat(WritableFormat):
    """One ``model{rank}-mp{ranks}.safetensors`` file per model-parallel rank."""

    name = "deepseek"
    title = "DeepSeek: model{rank}-mp{ranks}.safetensors"
    recognized = "`model{rank}-mp{ranks}.safetensors`"
    marks = hf_files.DEEPSEEK_SHARD
    wholeness = (
        "file names contain the number of ranks, and every rank has its file; ranks agree on the "
        "tensors that all of them have; every expert is on the rank that it belongs to"
    )
    tested = "transformers (logits); DeepSeek's own programs were not run"
    proof = (
        "DeepSeek's own programs are not run in the tests; the ranks have the tensors that "
        "`inference/convert.py` assigns to them (tests/integration/test_deepseek_ranks.py); "
        "transformers computes the logits of a model reimplemented from DeepSeek's papers "
        "(tests/oracle/test_deepseek.py)"
    )
    layout = "deepseek"
    parallel = True
    keeps_metadata = True
    ties = "written in full"

    def sniff(self, listing: Listing) -> str | None:
        """See :meth:`Format.sniff`."""
        names = [name for name in listing.names if hf_files.DEEPSEEK_SHARD.fullmatch(name)]
        return quote_names(names) if names else None

    def read(self, path: TreePath, options: ReadOptions = DEFAULT_READ_OPTIONS) -> Catalog:
        """See :meth:`Format.read`."""
        from ckptctl.formats.shared.model_parallel_join import join_shards

        root = path if path.is_dir() else path.parent
        names = _list_shards(root)
        with source_files(root) as files:
            contents = {name: read_shard(files, name) for name in prefetch_heads(files, names)}
            shards = {name: tensors for name, (tensors, _) in contents.items()}
            catalog = join_shards(files, self.name, self.name, shards, options)
        return replace(catalog, metadata=dict(contents[names[0]][1]))

    def can_store(self, dtype: str) -> bool:
        """Return whether the safetensors format supports *dtype*."""
        return hf.FORMAT.can_store(dtype)

    def lay_out(self, request: OutputRequest) -> OutputLayout:
        """See :meth:`WritableFormat.lay_out`."""
        self.require_storable_dtypes(request.tensors)
        untied_tensors = [replace(tensor, alias_of=None) for tensor in request.tensors]

        def lay_out_shard(rank: int, tensors: Sequence[OutputTensor]) -> OutputLayout:
            builder = hf.SafetensorsLayoutBuilder({}, request.metadata)
            builder.add_file(f"model{rank}-mp{request.mp}.safetensors", tensors)
            return OutputLayout(tuple(builder.files), tuple(builder.records), builder.boxes)

        reason = "a safetensors file can only store tensors"
        return lay_out_ranks(replace(request, tensors=untied_tensors), lay_out_shard, reason)


def _list_rank_files(root: TreePath) -> list[str]:
    return sorted(
        item.name for item in root.iterdir() if hf_files.DEEPSEEK_SHARD.fullmatch(item.name)
    )


def _list_shards(root: TreePath) -> list[str]:
    """Return the names of the shard files in rank order, or raise if one is missing."""
    shard_names: dict[int, str] = {}
    totals: set[int] = set()
    for name in _list_rank_files(root):
        match = hf_files.DEEPSEEK_SHARD.fullmatch(name)
        if match:
            shard_names[int(match[1])] = name
            totals.add(int(match[2]))
    if not shard_names:
        raise FormatError(
            "no shards in DeepSeek's format were found",
            where=str(root),
            why="expected model0-mp8.safetensors, model1-mp8.safetensors, ...",
        )
    if (
        len(totals) > 1
        or max(shard_names) >= max(totals)
        or len(_list_rank_files(root)) != len(shard_names)
    ):
        raise UnsupportedError(
            "the shards belong to different models",
            where=str(root),
            why=quote_names(_list_rank_files(root)),
        )
    total = totals.pop()
    format_name = f"model{{}}-mp{total}.safetensors".format
    if error := missing_files_error(root, shard_names, range(total), format_name, "shards"):
        raise error
    return [shard_names[rank] for rank in sorted(shard_names)]


FORMAT = DeepSeekFormat()
