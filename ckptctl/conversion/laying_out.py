"""Assignment of output tensors to files, byte offsets and ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ckptctl import formats
from ckptctl.catalog import Catalog
from ckptctl.conversion.assets import CONFIG
from ckptctl.conversion.draft import Draft
from ckptctl.conversion.leaves import remove_hashes, select_metadata, stores_same_bytes
from ckptctl.errors import MappingError, UsageError, format_option, quote_names
from ckptctl.formats.base import OutputRequest, OutputTensor, WritableFormat
from ckptctl.planner.axes import AxisSizes
from ckptctl.planner.balance import MAX_SHARD_BYTES, choose_shard_limit
from ckptctl.planner.mapping.tensors import LayoutChange
from ckptctl.planner.model_parallel import RankShard, split_tensor
from ckptctl.tree import TreePath
from ckptctl.units import parse_bytes


def open_sharding_reference(path: str | TreePath, target: WritableFormat) -> Catalog:
    """Open the checkpoint that ``--like`` names, whose sharding the output reuses."""
    catalog = formats.open_checkpoint(path)
    if catalog.format != target.name:
        raise UsageError(
            f"{format_option('--like')} names a checkpoint in format {catalog.format}, but the "
            f"output format is {target.name}",
            where=str(path),
        )
    for name, entry in () if target.parallel else catalog.tensors.items():
        files = sorted({extent.file for extent in entry.extents})
        if len(files) > 1:
            raise UsageError(
                "cannot reuse the sharding of the reference",
                where=catalog.path,
                why=f"`{name}` is split across {quote_names(files)}",
                hint="convert the reference first, and pass the result to "
                f"{format_option('--like')}",
            )
    return catalog


def plan_file_layout(draft: Draft) -> Draft:
    """Assign tensors to files in the target format, and select the metadata strings to store."""
    target, options, change, ranks = draft.target, draft.options, draft.change, draft.ranks
    split_for_ranks = build_rank_splitter(change, target.layout) if ranks > 1 else None
    metadata = select_metadata(draft.catalog, draft.tensors, target, draft.notes)
    shard_bytes = MAX_SHARD_BYTES
    if options.max_shard_size is not None:
        shard_bytes = parse_bytes(options.max_shard_size)
    elif target.sharded or target.single_file_bytes:
        # If a source in the same format has several files, the output has several files, too.
        has_several_files = draft.catalog.format == target.name and len(draft.catalog.files) > 1
        sizes = [
            (output_tensor.name, output_tensor.nbytes)
            for output_tensor in draft.tensors
            if output_tensor.alias_of is None
        ]
        shard_bytes = choose_shard_limit(
            sizes, 0 if has_several_files else target.single_file_bytes
        )
    request = OutputRequest(
        name=draft.destination.path.name,
        tensors=draft.tensors,
        blobs=draft.blobs,
        max_shard_size=shard_bytes,
        mp=ranks,
        rank_boxes=(lambda tensor: split_for_ranks(tensor, ranks)) if split_for_ranks else None,
        checksum=options.checksum,
        metadata=metadata,
        config=draft.assets.documents.get(CONFIG),
        family=change.family,
        sizes=change.sizes,
        stack_layers=options.stack_layers,
        extensions=draft.catalog.extensions,
        adapter=draft.adapter,
        layout=options.to_layout,
        notes=draft.notes,
    )
    if draft.like is not None:
        _require_same_keys(draft.like, draft)
        if not target.parallel:
            files = tuple(sorted(draft.like.files))
            request = replace(request, like=_map_tensor_files(draft.like, files), like_files=files)
    output = target.lay_out(request)
    if metadata and not stores_same_bytes(draft.catalog, draft.mapped.values(), output):
        metadata = remove_hashes(metadata, draft.notes)
        output = target.lay_out(replace(request, metadata=metadata))
    skipped = draft.notes.get_reasons("skipped")
    rewritten = [name for name in skipped if name.partition(".")[0] in output.generated_keys]
    why = f"format {target.name} stores its own values"
    draft.notes.explain("skipped", dict.fromkeys(rewritten, why))
    return replace(draft, output_layout=output, strings=metadata)


def _map_tensor_files(like: Catalog, files: Sequence[str]) -> dict[str, int]:
    """Map the name of each tensor in *like* to the index in *files* of the file that stores it."""
    index = {name: position for position, name in enumerate(files)}
    stored = (
        (name, entry.extents[0].file) for name, entry in like.tensors.items() if entry.extents
    )
    return {name: index[file] for name, file in stored}


def _require_same_keys(like: Catalog, draft: Draft) -> None:
    """Raise if the output does not have the same keys as the ``--like`` checkpoint."""
    output_keys = dict.fromkeys(tensor.name for tensor in draft.tensors)
    reference_keys = dict.fromkeys(name for name, entry in like.tensors.items() if entry.extents)
    missing = [name for name in reference_keys if name not in output_keys]
    surplus = [name for name in output_keys if name not in reference_keys]
    if missing or surplus:
        raise MappingError(
            "the output and the reference have different keys",
            where=str(draft.options.like),
            why="; ".join(
                f"{len(keys):,} {kind}: {quote_names(keys)}"
                for kind, keys in (("missing", missing), ("not in the reference", surplus))
                if keys
            ),
        )


RankSplitter = Callable[[OutputTensor, int], Sequence[RankShard | None]]
"""Function that splits a tensor across a number of ranks.

It returns the shard of each rank, or None for a rank that stores no shard.
"""


def build_rank_splitter(change: LayoutChange, layout: str | None) -> RankSplitter | None:
    """Build a function that splits the tensors of *layout* across ranks.

    Return None if the model family or the layout is unknown.
    """
    family, sizes = change.family, AxisSizes(change.sizes or {}, {})
    if family is None or layout is None:
        return None

    def divide_tensor(tensor: OutputTensor, ranks: int) -> Sequence[RankShard | None]:
        return split_tensor(family, layout, tensor.name, tensor.shape, sizes, ranks)

    return divide_tensor
