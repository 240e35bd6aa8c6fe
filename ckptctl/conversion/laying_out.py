"""Layout of an output: places of its tensors in files and on ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ckptctl import formats
from ckptctl.catalog import Catalog
from ckptctl.conversion.assets import CONFIG
from ckptctl.conversion.draft import Draft
from ckptctl.conversion.leaves import kept_strings, same_data, without_hashes
from ckptctl.errors import MappingError, UsageError, listed, spell_option
from ckptctl.formats.base import OutputRequest, OutputTensor, WritableFormat
from ckptctl.planner.axes import AxisSizes
from ckptctl.planner.balance import MAX_SHARD_BYTES, choose_shard_limit
from ckptctl.planner.mapping.tensors import LayoutChange
from ckptctl.planner.model_parallel import RankShard
from ckptctl.planner.model_parallel import split_tensor as divided
from ckptctl.tree import TreePath
from ckptctl.units import parse_bytes


def open_reference(path: str | TreePath, target: WritableFormat) -> Catalog:
    """Read the index of the checkpoint that ``--like`` names."""
    catalog = formats.open_checkpoint(path)
    if catalog.format != target.name:
        raise UsageError(
            f"{spell_option('--like')} names a checkpoint in format {catalog.format}, but the "
            f"output format is {target.name}",
            where=str(path),
        )
    for name, entry in () if target.parallel else catalog.tensors.items():
        files = sorted({extent.file for extent in entry.extents})
        if len(files) > 1:
            raise UsageError(
                "cannot reuse the sharding of the reference",
                where=catalog.path,
                why=f"`{name}` is split across {listed(files)}",
                hint="convert the reference first, and pass the result to "
                f"{spell_option('--like')}",
            )
    return catalog


def lay_out(draft: Draft) -> Draft:
    """Let the target format place all tensors in files, and select the metadata strings."""
    target, options, change, ranks = draft.target, draft.options, draft.change, draft.ranks
    shares = division(change, target.layout) if ranks > 1 else None
    metadata = kept_strings(draft.catalog, draft.tensors, target, draft.notes)
    shard_bytes = MAX_SHARD_BYTES
    if options.max_shard_size is not None:
        shard_bytes = parse_bytes(options.max_shard_size)
    elif target.sharded or target.one_file:
        # A source with several files in the same format becomes several files.
        several = draft.catalog.format == target.name and len(draft.catalog.files) > 1
        sizes = [(one.name, one.nbytes) for one in draft.tensors if one.alias_of is None]
        shard_bytes = choose_shard_limit(sizes, 0 if several else target.one_file)
    request = OutputRequest(
        name=draft.destination.path.name,
        tensors=draft.tensors,
        blobs=draft.blobs,
        max_shard_size=shard_bytes,
        mp=ranks,
        rank_boxes=(lambda tensor: shares(tensor, ranks)) if shares else None,
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
            request = replace(request, like=_files_of(draft.like, files), like_files=files)
    output = target.lay_out(request)
    if metadata and not same_data(draft.catalog, draft.mapped.values(), output):
        metadata = without_hashes(metadata, draft.notes)
        output = target.lay_out(replace(request, metadata=metadata))
    skipped = draft.notes.reasons("skipped")
    anew = [name for name in skipped if name.partition(".")[0] in output.own]
    why = f"format {target.name} stores its own values"
    draft.notes.explain("skipped", dict.fromkeys(anew, why))
    return replace(draft, output_layout=output, strings=metadata)


def _files_of(like: Catalog, files: Sequence[str]) -> dict[str, int]:
    """Map each tensor of a reference to the index of its file among *files*."""
    index = {name: position for position, name in enumerate(files)}
    stored = ((name, one.extents[0].file) for name, one in like.tensors.items() if one.extents)
    return {name: index[file] for name, file in stored}


def _require_same_keys(like: Catalog, draft: Draft) -> None:
    """Raise if the keys of the output and of the reference differ."""
    known = dict.fromkeys(tensor.name for tensor in draft.tensors)
    there = dict.fromkeys(name for name, entry in like.tensors.items() if entry.extents)
    missing = [name for name in there if name not in known]
    surplus = [name for name in known if name not in there]
    if missing or surplus:
        raise MappingError(
            "the output and the reference have different keys",
            where=str(draft.options.like),
            why="; ".join(
                f"{len(keys):,} {kind}: {listed(keys)}"
                for kind, keys in (("missing", missing), ("not in the reference", surplus))
                if keys
            ),
        )


Divide = Callable[[OutputTensor, int], Sequence[RankShard | None]]
"""Function that returns each rank's shard of a tensor, or None for ranks without one."""


def division(change: LayoutChange, layout: str | None) -> Divide | None:
    """Return a function that divides tensors among ranks, or None if no rule is known."""
    family, sizes = change.family, AxisSizes(change.sizes or {}, {})
    if family is None or layout is None:
        return None

    def shares(tensor: OutputTensor, ranks: int) -> Sequence[RankShard | None]:
        return divided(family, layout, tensor.name, tensor.shape, sizes, ranks)

    return shares
