"""The tensors of an output: names, places, dtypes, and which of them share memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from ckptctl import dtypes
from ckptctl.catalog import Blob, Catalog, Path, TensorEntry
from ckptctl.errors import MappingError, listed
from ckptctl.formats.base import OutputTensor, WritableFormat
from ckptctl.formats.shared.structure import join
from ckptctl.ops.conversion.options import ConversionOptions
from ckptctl.ops.recognition.recognise import Recognition
from ckptctl.planner.configs.stated import tying
from ckptctl.planner.mapping.mapped import MappedTensor, View
from ckptctl.planner.mapping.tensors import Change

BY_CAST = "--dtype casts all of them to one"
BEFOREHAND = "a conversion with --dtype that keeps the layout makes them alike, then this one"


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
    read: set[str] = set()
    for item in mapped:
        copied = item.sources[0].key in read
        read.add(item.sources[0].key)
        old = entries[item.sources[0].key].path
        head, prefix = _container(old, root)
        for target in (view.key for view in item.targets):
            if change.identity and not copied:
                found[target] = old if keep_root else _inside(old, root)
            elif keep_root:
                found[target] = (*head, target.removeprefix(prefix))
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
    shapes: dict[str, tuple[int, ...]] = {}
    kinds: dict[str, str] = {}
    memories: dict[str, list[object]] = {}
    for item in mapped:
        kind = _dtype(item, entries, dtype, pinned)
        source = entries[item.sources[0].key]
        for view in item.targets:
            ends = tuple(o + s for o, s in zip(view.origin, view.sizes, strict=True))
            shapes[view.key] = tuple(map(max, shapes.get(view.key, ends), ends))
            if kinds.setdefault(view.key, kind) != kind:
                raise _mixed(view.key, kinds[view.key], kind, source.name, BY_CAST)
            memories.setdefault(view.key, []).append(_memory(item, view, source))
    first: dict[object, str] = {}
    original = {key: first.setdefault(tuple(parts), key) for key, parts in memories.items()}
    gradient = {
        view.key
        for item in mapped
        for view in item.targets
        if all(entries[source.key].requires_grad for source in item.sources)
    }
    return tuple(
        OutputTensor(
            name=key,
            dtype=kinds[key],
            shape=shape,
            path=placed[key],
            alias_of=original[key] if aliases and original[key] != key else None,
            requires_grad=key in gradient,
        )
        for key, shape in shapes.items()
    )


def _memory(item: MappedTensor, target: View, source: TensorEntry) -> object:
    """Return what is the same for targets, or parts of them, that are the same memory's copies."""
    if not len(item.sources) == len(item.targets) == 1:
        return target.key
    name = source.alias_of or source.name
    return name, item.axes, _place(item.sources[0]), _place(target)


def _place(view: View) -> tuple[object, ...]:
    return view.dims, view.origin, view.sizes, view.lead


def _dtype(
    item: MappedTensor,
    entries: Mapping[str, TensorEntry],
    dtype: str | None,
    pinned: Collection[str],
) -> str:
    """The element type that a logical tensor gets; its parts have to agree."""
    first = entries[item.sources[0].key]
    for view in item.sources:
        if entries[view.key].dtype != first.dtype:
            other = entries[view.key].dtype
            raise _mixed(item.targets[0].key, first.dtype, other, view.key, BEFOREHAND)
    kept = item.logical.partition(".")[0] in pinned
    return first.dtype if kept else cast_to(first.dtype, dtype)


def _mixed(target: str, one: str, other: str, source: str, hint: str) -> MappingError:
    return MappingError(
        f"the parts of a tensor have different dtypes: {one} and {other}",
        where=f"tensor `{source}`",
        why=f"they become one tensor, `{target}`",
        hint=hint,
    )


def unrooted(blob: Blob, root: str) -> Blob:
    """Return a leaf of the model as it is named when the model is at the top."""
    return replace(blob, name=blob.name.removeprefix(root), path=_inside(blob.path, root))


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


def _container(path: Path, root: str) -> tuple[Path, str]:
    """Return the head of *path*, which is below *root*, that lies in it, and what that spells."""
    held = ((path[:n], f"{join(path[:n])}.") for n in range(len(path) - 1, 0, -1))
    return next(((head, prefix) for head, prefix in held if root.startswith(prefix)), ((), ""))


def _inside(path: Path, root: str) -> Path:
    """Return *path* without *root*, whose last part may be a part of one name."""
    head, prefix = _container(path, root)
    first, *others = path[len(head) :]
    rest = root.removeprefix(prefix)
    return (str(first).removeprefix(rest), *others) if rest else (first, *others)


def written_in_full(options: ConversionOptions, catalog: Catalog, known: Recognition) -> bool:
    """Return whether tied tensors are written in full; `copy` is content if none are tied."""
    shared = any(entry.alias_of for entry in catalog.tensors.values())
    family = known.exact and known.model_type is not None
    return options.untie or (options.tied == "copy" and (shared or family))


def shared_memory(
    options: ConversionOptions,
    target: WritableFormat,
    known: Recognition,
    catalog: Catalog,
    mapped: Sequence[MappedTensor],
) -> tuple[bool, list[str]]:
    """Return whether tensors that share memory go on doing so, and notes on that.

    A reader of `hf` would miss one of them, unless the configuration says that they are tied.
    """
    if options.untie or options.tied == "copy":
        return False, []
    if options.tied == "drop" or target.nested or tying(known.config):
        return True, []
    names = [m.targets[0].key for m in mapped if catalog.tensors[m.sources[0].key].alias_of]
    note = f"shared tensors are written out in full: {listed(names)}"
    return False, [note] if names else []


def tied_away(tensors: Iterable[OutputTensor]) -> dict[str, str]:
    """Return the names of all but one of the tensors that share memory, and why they go."""
    return {
        tensor.name: f"it shares its memory with `{tensor.alias_of}`, which is written"
        for tensor in tensors
        if tensor.alias_of
    }
