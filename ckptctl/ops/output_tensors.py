"""The tensors of an output: their names, paths, dtypes and ties."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ckptctl import dtypes
from ckptctl.catalog import Blob, Path, TensorEntry
from ckptctl.formats.base import OutputTensor
from ckptctl.formats.structure import join
from ckptctl.ops.layout_change import Change
from ckptctl.planner.mapping import MappedTensor, View


def in_checkpoint(
    tensors: Sequence[MappedTensor], root: str, keep_root: bool
) -> list[MappedTensor]:
    """Return the model's *tensors* with names as the whole checkpoints have them.

    Args:
        tensors: With names inside the model.
        root: The model's prefix in the source.
        keep_root: Whether the target has that prefix too.
    """
    if not root:
        return list(tensors)
    prefix = root if keep_root else ""
    return [
        replace(
            mapped,
            sources=tuple(_renamed(view, root) for view in mapped.sources),
            targets=tuple(_renamed(view, prefix) for view in mapped.targets),
        )
        for mapped in tensors
    ]


def paths(
    mapped: Sequence[MappedTensor],
    entries: Mapping[str, TensorEntry],
    change: Change,
    root: str,
    keep_root: bool,
) -> dict[str, Path]:
    """Return the key path of each of the model's target tensors.

    A model that keeps its names keeps its nesting; one that changes them becomes a flat state
    dict, inside the container it was found in where that is kept.
    """
    found: dict[str, Path] = {}
    for item in mapped:
        old, target = entries[item.sources[0].key].path, item.targets[0].key
        head = _container(old, root)
        if head is None:
            found[target] = (target,)
        elif change.identity:
            found[target] = old if keep_root else old[len(head) :]
        elif keep_root:
            found[target] = (*head, target.removeprefix(root))
        else:
            found[target] = (target,)
    return found


def output_tensors(
    mapped: Sequence[MappedTensor],
    entries: Mapping[str, TensorEntry],
    placed: Mapping[str, Path],
    *,
    dtype: str | None,
    pinned: Collection[str],
    aliases: bool,
) -> tuple[OutputTensor, ...]:
    """Return what is to be laid out, in order.

    Args:
        mapped: What becomes what.
        entries: The source's tensors.
        placed: Key path of each target.
        dtype: Cast floating tensors to it; None: keep.
        pinned: Logical tensors that are never cast, without indices.
        aliases: Whether tensors that share memory go on doing so.
    """
    first: dict[tuple[object, ...], str] = {}
    found: list[OutputTensor] = []
    for item in mapped:
        source, target = entries[item.sources[0].key], item.targets[0]
        kept = item.logical.partition(".")[0] in pinned
        identity = (source.alias_of or source.name, item.axes, target.dims)
        original = first.setdefault(identity, target.key)
        found.append(
            OutputTensor(
                name=target.key,
                dtype=source.dtype if kept else cast_to(source.dtype, dtype),
                shape=target.sizes,
                path=placed[target.key],
                alias_of=original if aliases and original != target.key else None,
                requires_grad=source.requires_grad,
            )
        )
    return tuple(found)


def unrooted(blob: Blob, root: str) -> Blob:
    """Return a leaf of the model as it is named when the model is at the top."""
    head = _container(blob.path, root)
    name = blob.name.removeprefix(root)
    return replace(blob, name=name, path=(name,) if head is None else blob.path[len(head) :])


def cast_to(source: str, dtype: str | None) -> str:
    """Return what ``--dtype`` makes of a tensor's dtype: only floating ones change."""
    return dtype if dtype and dtypes.BY_NAME[source].floating else source


def main_dtype(tensors: Sequence[OutputTensor]) -> str | None:
    """Return the floating dtype that has the most bytes."""
    total: dict[str, int] = {}
    for tensor in tensors:
        if dtypes.BY_NAME[tensor.dtype].floating:
            total[tensor.dtype] = total.get(tensor.dtype, 0) + tensor.nbytes
    return max(total, key=lambda name: total[name], default=None)


def _renamed(view: View, prefix: str) -> View:
    return replace(view, key=prefix + view.key)


def _container(path: Path, root: str) -> Path | None:
    """The head of *path* that spells *root*; None where *root* is only part of a name."""
    for length in range(len(path) + 1):
        if (f"{join(path[:length])}." if length else "") == root:
            return path[:length]
    return None
