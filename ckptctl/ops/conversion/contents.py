"""The tensors and other leaves of an output: names, places, dtypes, and which share memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ckptctl import dtypes, formats
from ckptctl.catalog import Blob, Catalog, Path, TensorEntry
from ckptctl.errors import MappingError, UnsupportedError, listed, spell_option
from ckptctl.formats.base import OutputTensor
from ckptctl.formats.shared.leaves import require_known
from ckptctl.ops.conversion.checks import require_scaled
from ckptctl.ops.conversion.leaves import (
    Parts,
    container,
    inside,
    inside_model,
    unpacked,
    unrooted,
)
from ckptctl.ops.conversion.part import Part, Task
from ckptctl.ops.conversion.training import Rest, follow
from ckptctl.ops.recognition.layout_change import with_sums, with_zeros
from ckptctl.ops.sources import located
from ckptctl.planner.configs.facts import Json, tying
from ckptctl.planner.mapping.mapped import MappedTensor, View
from ckptctl.planner.mapping.tensors import Change
from ckptctl.planner.quantization.recipes import WEIGHT, Recipe
from ckptctl.planner.quantization.statement import QUANTIZATION

HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class Quantized:
    """What of an output is quantized, and how.

    Attributes:
        recipe: How.
        plain: The tensors that the output would have without.
        parts: For each quantized tensor, and each of its scales, the plain one it stands for.
    """

    recipe: Recipe
    plain: tuple[OutputTensor, ...]
    parts: Mapping[str, str]

    def described(self, config: Json | None) -> Json:
        """Return config.json with what programs have to know of it."""
        if config is None:
            raise MappingError(
                f"{spell_option('--quantize')} requires config.json, which is missing",
                why="loaders read the quantization scheme from it",
                hint=f"pass {spell_option('--assets DIR')} to copy it from the trained model's "
                "folder",
            )
        return {**config, QUANTIZATION: self.recipe.config(self.ignored)}

    @property
    def weights(self) -> tuple[str, ...]:
        """Return the names of the plain tensors that are quantized."""
        return tuple(dict.fromkeys(self.parts.values()))

    @property
    def left(self) -> tuple[OutputTensor, ...]:
        """Return the matrices, and stacks of such, that stay as they are."""
        made = set(self.weights)
        return tuple(one for one in self.plain if one.name not in made and len(one.shape) > 1)

    @property
    def ignored(self) -> tuple[str, ...]:
        """Return the modules of these; stacked experts are parameters of one.

        A head that is tied to the embeddings is no tensor of its own, and stays as they do.
        """
        stacks = (one.name for one in self.left if len(one.shape) > 2)
        apart = {name: name.rpartition(".")[0] for name in stacks if not name.endswith(WEIGHT)}
        named = (apart.get(one.name, one.name) for one in self.left)
        found = (name for name in named if name.endswith(WEIGHT) or name in apart.values())
        tied = not any(one.name.endswith(f"{HEAD}{WEIGHT}") for one in self.plain)
        return tuple(dict.fromkeys((*(n.removesuffix(WEIGHT) for n in found), *[HEAD] * tied)))


@dataclass(frozen=True, slots=True)
class Contents:
    """What an output holds, and what it is made of.

    Attributes:
        catalog: The source, with the bytes of its tensors that are read.
        mapped: What becomes of them.
        tensors: The tensors of the output, in order.
        blobs: Its other leaves.
        must_equal: Names in the source, kept and left out, whose bytes have to be the same.
        tied: Names of tensors that are dropped because another one is the same memory.
        quantized: What is quantized on the way; None: nothing is.
    """

    catalog: Catalog
    mapped: Sequence[MappedTensor]
    tensors: tuple[OutputTensor, ...]
    blobs: Sequence[Blob]
    must_equal: tuple[tuple[str, str], ...]
    tied: Collection[str]
    quantized: Quantized | None = None


def contents(task: Task, part: Part, change: Change) -> Contents:
    """Say what becomes of the chosen part, and find its bytes, whose coverage is proven."""
    root, target, notes = task.root, task.target, task.notes
    apart = notes.reasons("skipped").keys() | part.missing.keys()
    catalog, parts = _with_values(task, apart)
    outside = dict.fromkeys(leaf for n in part.selection.rest for leaf in parts.get(n, (n,)))
    rest = follow(catalog, tuple(outside) if task.everything else (), root, change)
    homeless: list[str] = []
    for item, path in inside_model(catalog, parts, outside, root, task.everything):
        if change.identity or task.everything:
            rest.tensors.append(item)
            rest.paths[item.targets[0].key] = path
        else:
            homeless.append(item.sources[0].key)
    catalog, zeros = with_zeros(catalog, change.zeros, root, task.kept_root)
    catalog, filled = with_zeros(catalog, rest.zeros, "", "")
    rest.tensors += filled
    model = [*in_checkpoint(change.tensors, root, task.kept_root), *zeros]
    mapped = [*model, *rest.tensors]
    catalog = with_sums(catalog, mapped)
    equal = [(root + kept, root + dropped) for kept, dropped in change.must_equal]
    equal += rest.must_equal
    read = {view.key for item in mapped for view in item.sources}
    read |= {name for pair in equal for name in pair}
    read |= {root + name for name in change.must_be_zero}
    bytes_of = located(catalog, [name for name in catalog.tensors if name in read])
    catalog = replace(catalog, tensors=bytes_of.tensors)
    aliases = _shares_memory(task, catalog, model, change)
    tensors = _tensors(task, catalog, model, rest, change, aliases)
    tied = _tied_away(tensors) if task.options.tied == "drop" else {}
    notes.explain("dropped", tied)
    if tied and not target.records_ties:
        tensors = tuple(tensor for tensor in tensors if not tensor.alias_of)
    blobs = list(rest.blobs)
    for name, blob in catalog.blobs.items():
        if name in apart or name in outside or not name.startswith(root):
            continue
        if not target.nested:
            notes.explain("skipped", {name: f"{target.name} stores only tensors"})
        elif not change.identity and not task.everything:
            homeless.append(name)
        else:
            blobs.append(blob if task.everything else unrooted(blob, root))
    no_place = f"layout {change.target_layout} cannot store it"
    notes.explain("skipped", dict.fromkeys(homeless, no_place))
    return Contents(catalog, mapped, tensors, blobs, tuple(equal), tied.keys())


def _with_values(task: Task, apart: Collection[str]) -> tuple[Catalog, Parts]:
    """Read the leaves that are not tensors and that travel; refuses hostile ones."""
    catalog, target = task.catalog, task.target
    wanted = {n: blob for n, blob in catalog.blobs.items() if target.nested and n not in apart}
    read = formats.resolve(replace(catalog, tensors={}, blobs=wanted)).blobs
    catalog = replace(catalog, blobs={**catalog.blobs, **read})
    parts: Parts = {}
    if not target.verbatim:
        catalog, parts = unpacked(catalog, read)
    names = (part for name in read for part in parts.get(name, (name,)))
    leaves = (catalog.blobs[name] for name in names if name in catalog.blobs)
    require_known(leaves, verbatim=target.verbatim)
    return catalog, parts


def _tensors(
    task: Task,
    catalog: Catalog,
    model: Sequence[MappedTensor],
    rest: Rest,
    change: Change,
    aliases: bool,
) -> tuple[OutputTensor, ...]:
    entries, dtype = catalog.tensors, task.options.dtype
    placed = _paths(model, entries, change, task)
    pinned = change.family.pinned if change.family else ()
    own = output_tensors(model, entries, placed, dtype=dtype, pinned=pinned, aliases=aliases)
    require_scaled(task.options, model, catalog, own)
    others = output_tensors(
        rest.tensors, entries, rest.paths, dtype=None, pinned=(), aliases=aliases
    )
    return (*own, *others)


def in_checkpoint(
    tensors: Iterable[MappedTensor], root: str, prefix: str
) -> Iterable[MappedTensor]:
    """The model's *tensors* by their names in checkpoints: below *root*, and below *prefix*."""
    if not root and not prefix:
        return tensors
    return (
        replace(
            mapped,
            sources=tuple(replace(view, key=root + view.key) for view in mapped.sources),
            targets=tuple(replace(view, key=prefix + view.key) for view in mapped.targets),
        )
        for mapped in tensors
    )


def _paths(
    mapped: Sequence[MappedTensor],
    entries: Mapping[str, TensorEntry],
    change: Change,
    task: Task,
) -> dict[str, Path]:
    """The key path of each of the model's target tensors.

    A model that keeps its names keeps its nesting; one that changes them becomes a flat state
    dict, inside the container it was found in where that is kept.
    """
    placed: dict[str, Path] = {}
    read: set[str] = set()
    for item in mapped:
        copied = item.sources[0].key in read
        read.add(item.sources[0].key)
        entry = entries[item.sources[0].key]
        old = entry.path
        if not old:
            raise UnsupportedError(
                "this is a single tensor, not a state dict",
                where=f"{task.catalog.root}/{entry.extents[0].file}",
                why="tensors in a checkpoint must have names",
            )
        head, prefix = container(old, task.root)
        for target in (view.key for view in item.targets):
            if change.identity and not copied:
                placed[target] = old if task.everything else inside(old, task.root)
            elif task.everything:
                placed[target] = (*head, target.removeprefix(prefix))
            else:
                placed[target] = (target,)
    return placed


def output_tensors(
    mapped: Sequence[MappedTensor],
    entries: Mapping[str, TensorEntry],
    placed: Mapping[str, Path],
    *,
    dtype: str | None,
    pinned: Collection[str],
    aliases: bool,
) -> tuple[OutputTensor, ...]:
    """Return what is to be laid out, in order."""
    shapes: dict[str, tuple[int, ...]] = {}
    kinds: dict[str, str] = {}
    memories: dict[str, list[object]] = {}
    for item in mapped:
        kind = _dtype(item, entries, dtype, pinned)
        source = entries[item.sources[0].key]
        for view in item.targets:
            shapes[view.key] = tuple(map(max, shapes.get(view.key, view.ends), view.ends))
            if kinds.setdefault(view.key, kind) != kind:
                hint = f"pass {spell_option('--dtype')} to cast all of them to one dtype"
                raise _mixed(view.key, kinds[view.key], kind, source.name, hint)
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
    return name, item.axes, item.sources[0].place, target.place


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
            hint = (
                f"first convert with {spell_option('--dtype')} in the same layout, then convert "
                "the result"
            )
            raise _mixed(item.targets[0].key, first.dtype, other, view.key, hint)
    kept = item.logical.partition(".")[0] in pinned
    return first.dtype if kept else cast_to(first.dtype, dtype)


def _mixed(target: str, one: str, other: str, source: str, hint: str) -> MappingError:
    return MappingError(
        f"parts of one tensor have different dtypes: {one} and {other}",
        where=f"tensor `{source}`",
        why=f"they are merged into one tensor, `{target}`",
        hint=hint,
    )


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


def written_in_full(task: Task) -> bool:
    """Whether tied tensors are written in full; `copy` is content if none are tied."""
    shared = any(entry.alias_of for entry in task.catalog.tensors.values())
    family = task.recognition.exact and task.recognition.model_type is not None
    return task.options.untie or (task.options.tied == "copy" and (shared or family))


def _shares_memory(
    task: Task, catalog: Catalog, mapped: Sequence[MappedTensor], change: Change
) -> bool:
    """Return whether tensors that share memory go on doing so; note where they do not.

    A reader of `hf` would miss one of them, unless the configuration says that they are tied; what
    a known family ties is left out before. Factors of an adapter are trained one by one.
    """
    options, target, family = task.options, task.target, change.family
    factors = target.adapters or (family is not None and family.partial)
    if options.untie or options.tied == "copy" or factors:
        return False
    may_tie = family is None or not target.records_ties
    if options.tied == "drop" or target.nested or (may_tie and tying(task.recognition.config)):
        return True
    names = [m.targets[0].key for m in mapped if catalog.tensors[m.sources[0].key].alias_of]
    if names:
        task.notes.add(f"tensors that share memory are written as separate copies: {listed(names)}")
    return False


def _tied_away(tensors: Iterable[OutputTensor]) -> dict[str, str]:
    """Return the names of all but one of the tensors that share memory, and why they go."""
    return {
        tensor.name: f"it shares memory with `{tensor.alias_of}`, which is written"
        for tensor in tensors
        if tensor.alias_of
    }
