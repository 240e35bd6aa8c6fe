"""``--quantize``: replace linear weights of an output by virtual quantized tensors.

They are computed from the unquantized tensors of the output, in its layout and dtype, after
dequantizing or merging. Those are virtual too and never stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from ckptctl.catalog import ComputedTensor, ComputeInput, computed_name
from ckptctl.conversion.draft import Draft, Quantization
from ckptctl.conversion.transfers import build_elements
from ckptctl.errors import MappingError, RefusedError, UsageError, quote_names, spell_option
from ckptctl.formats.base import OutputTensor
from ckptctl.numerics.quantization.linear_weights import (
    Role,
    Roles,
    fused,
    modules_of_experts,
    together,
)
from ckptctl.numerics.quantization.recipes import WEIGHT, Recipe, StoredPart, recipes
from ckptctl.numerics.quantized import quantized as quantized_already
from ckptctl.planner.copying.blocks import build_rearranged_file
from ckptctl.planner.layouts import BASE, HF, MLX, Family
from ckptctl.planner.mapping.mapped import ComposedTensor
from ckptctl.planner.mapping.tensors import LayoutChange
from ckptctl.units import format_bytes, pluralize

HEAD = "lm_head"
PLAIN = ("float32", "bfloat16", "float16")
"""Dtypes that can be quantized."""


def quantize(draft: Draft) -> Draft:
    """Replace the weights that ``--quantize`` selects by quantized tensors."""
    recipe = recipes()[draft.options.quantize or ""]
    chosen = _chosen(draft, recipe)
    making = _Making(draft, recipe, together([tensor.name for tensor in chosen]))
    made = {tensor.name: making.parts_of(tensor) for tensor in chosen}
    tensors = [one for tensor in draft.tensors for one in made.get(tensor.name, (tensor,))]
    parts = {part.name: name for name, some in made.items() for part in some}
    mapped = {name: one for name, one in draft.mapped.items() if name not in made}
    for part in (part for some in made.values() for part in some):
        mapped[part.name] = ComposedTensor.from_unchanged(_key(part.name), part.name, part.shape)
    found = Quantization(draft.tensors, parts)
    found = replace(found, config=recipe.config(_ignored_modules(found)))
    draft.notes.add(_note(found, recipe), *_ragged(recipe, chosen), *_stacks(chosen, draft.change))
    return replace(
        draft,
        located=making.catalog,
        mapped=mapped,
        tensors=tuple(tensors),
        quantization=found,
    )


def _note(made: Quantization, recipe: Recipe) -> str:
    names, nbytes = (
        [one.name for one in made.unquantized],
        sum(one.nbytes for one in made.unquantized),
    )
    kept = f"; skipped {pluralize(len(names), 'tensor')}, {format_bytes(nbytes)}"
    left = f"{kept} ({quote_names(names)})" if names else ""
    return f"quantized {pluralize(len(made.weights), 'weight')} to {recipe.title}{left}"


def _ignored_modules(made: Quantization) -> tuple[str, ...]:
    """List the modules that the configuration must state as not quantized.

    Stacked experts are listed by their parent module. A tied lm_head has no tensor of its own, but
    is listed too.
    """
    stacks = (one.name for one in made.unquantized if len(one.shape) > 2)
    apart = {name: name.rpartition(".")[0] for name in stacks if not name.endswith(WEIGHT)}
    named = (apart.get(one.name, one.name) for one in made.unquantized)
    found = (name for name in named if name.endswith(WEIGHT) or name in apart.values())
    tied = not any(one.name.endswith(f"{HEAD}{WEIGHT}") for one in made.original_tensors)
    return tuple(dict.fromkeys((*(n.removesuffix(WEIGHT) for n in found), *[HEAD] * tied)))


def _ragged(recipe: Recipe, chosen: Sequence[OutputTensor]) -> Iterator[str]:
    """Note if blocks would contain rows of two weights that vLLM fuses."""
    down = next((part.block[0] for part in recipe.parts if part.block and part.block[0] > 1), 1)
    rows = {tensor.name: tensor.shape[0] for tensor in chosen}
    cut = [name for group in fused(rows) for name in group[:-1] if rows[name] % down]
    if cut:
        yield (
            "vLLM cannot load this model: it fuses weights such as q/k/v and gate/up, and "
            f"{pluralize(len(cut), 'of them has', 'of them have')} a row count that is not a "
            f"multiple of {down} ({quote_names(cut)})"
        )


def _stacks(chosen: Sequence[OutputTensor], change: LayoutChange) -> Iterator[str]:
    """Note that few programs read quantized stacks of experts."""
    stacked = [tensor.name for tensor in chosen if len(tensor.shape) == 3]
    if stacked:
        told = (
            f"{quote_names(stacked)}: transformers reads stacked quantized experts only on GPUs "
            "with FP8 support, and ignores their scales where it dequantizes"
        )
        yield "; ".join((told, *_one_by_one(change.family)))


# ------------------------------------------------------------------------------ which weights


def _skip_hint() -> str:
    return f"pass {spell_option('--quantize-not GLOB')} to skip it"


def _chosen(draft: Draft, recipe: Recipe) -> Sequence[OutputTensor]:
    """Select the tensors to quantize, or raise if one of them cannot be."""
    options, there = draft.options, [tensor.name for tensor in draft.tensors]
    linear = _linear(draft)
    also = _matching(there, options.quantize_also, "--quantize-also")
    left = _matching([*linear, *also], options.quantize_not, "--quantize-not")
    wanted = (linear.keys() | also) - left
    chosen = [one for one in draft.tensors if one.name in wanted]
    if not chosen:
        raise UsageError("no tensors to quantize", where=draft.catalog.path)
    for tensor in chosen:
        _require_possible(tensor, recipe, linear.get(tensor.name, "other"), draft.change.family)
    names = {tensor.name for tensor in chosen}
    _require_whole(names, there)
    pairs = [(one.name, one.alias_of) for one in draft.tensors if one.alias_of]
    shared = dict((*pairs, *((other, name) for name, other in pairs)))
    for name in names & shared.keys():
        raise RefusedError(
            f"`{name}` shares memory with `{shared[name]}`",
            why="they would be quantized separately",
            hint=_skip_hint(),
        )
    return chosen


def _require_whole(names: set[str], there: Sequence[str]) -> None:
    """Raise if a selection splits weights that programs read quantized together."""
    read = (
        *((group, "vLLM fuses them into one weight") for group in fused(there)),
        *((group, "they belong to one module") for group in modules_of_experts(there)),
    )
    for group, why in read:
        some = names.intersection(group)
        if some and len(some) < len(group):
            raise UsageError(
                f"cannot quantize only {quote_names(sorted(some))} of {quote_names(group)}",
                why=f"{why}, so either all or none must be quantized",
                hint=f"pass {spell_option('--quantize-also')} and "
                f"{spell_option('--quantize-not')} with a glob that matches all of them",
            )


def _linear(draft: Draft) -> dict[str, Role]:
    """Map the linear weights of layers to their roles, from the family's tables."""
    change, catalog = draft.change, draft.catalog
    family = change.family
    already = quantized_already(catalog)
    if already:
        raise UsageError(
            f"{pluralize(len(already), 'tensor is', 'tensors are')} already quantized",
            where=f"tensor `{next(iter(already))}`",
            why=", ".join(dict.fromkeys(already.values())),
            hint=f"pass {spell_option('--dequantize bf16')} with {spell_option('--quantize')} to "
            "dequantize them first",
        )
    layout = change.target_layout or ""
    asked = draft.options.to_layout or layout
    if family is not None and not (_is_named_so(layout) and asked != MLX):
        raise UsageError(
            f"{spell_option('--quantize')} is not supported with layout {asked}",
            why="programs that read this layout use other quantization schemes",
        )
    if family is None or family.partial:
        adapter = family is not None and family.partial
        raise MappingError(
            f"{spell_option('--quantize')} is not supported for adapters"
            if adapter
            else "unknown model type",
            where=catalog.path,
            why="the model type determines which tensors are weights of linear layers",
            hint=""
            if adapter
            else f"set it with {spell_option('--model-type')}; `ckptctl models` lists them",
        )
    roles = Roles(family, family.get_layout(layout))
    own = {target.key for item in change.tensors for target in item.targets}
    keys = ((one, one.name.removeprefix(draft.output_root)) for one in draft.tensors)
    found = {one.name: roles.of(key, one.shape) for one, key in keys if key in own}
    return {name: role for name, role in found.items() if role != "other"}


def _matching(names: Sequence[str], globs: Sequence[str], option: str) -> set[str]:
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in names):
            raise UsageError(
                f"{spell_option(f'{option} {glob}')} matches no tensor",
                hint="use tensor names of the output",
            )
    return {name for name in names for glob in globs if fnmatchcase(name, glob)}


def _require_possible(
    tensor: OutputTensor, recipe: Recipe, role: Role, family: Family | None
) -> None:
    """Raise if the recipe cannot quantize a tensor."""
    where, shape = f"tensor `{tensor.name}`", tensor.shape
    if role in ("experts", "stacked"):
        _require_readable(tensor, recipe, role, family)
    elif len(shape) != 2 or not tensor.name.endswith(WEIGHT):
        raise UsageError(
            "the tensor is not the weight of a linear layer", where=where, hint=_skip_hint()
        )
    if tensor.dtype not in PLAIN:
        raise UsageError(
            f"cannot quantize dtype {tensor.dtype}",
            where=where,
            hint=f"pass {spell_option('--dtype bf16')} to cast it first",
        )
    if shape[-1] % recipe.columns or 0 in shape:
        raise RefusedError(
            f"{recipe.name} requires a number of columns that is a multiple of {recipe.columns}",
            where=where,
            why=f"the shape is {list(shape)}",
            hint=_skip_hint(),
        )


def _require_readable(
    tensor: OutputTensor, recipe: Recipe, role: Role, family: Family | None
) -> None:
    """Raise if no program reads stacked experts quantized in this way."""
    _, rows, columns = shape = tensor.shape
    down, across = recipe.stack or (1, 1)
    if not recipe.stack:
        why = f"programs that read {recipe.name} require per-expert weights"
    elif role == "stacked":
        why = (
            "only transformers reads stacks, and only of shape [experts, out, in] in a "
            "module `experts`"
        )
    elif rows % down or columns % across:
        why = f"transformers requires stacks of whole {down}x{across} blocks"
    else:
        return
    raise MappingError(
        "cannot quantize stacked experts",
        where=f"tensor `{tensor.name}`",
        why=f"the shape is {list(shape)}; {why}",
        hint=", or ".join((*_one_by_one(family), _skip_hint())),
    )


def _one_by_one(family: Family | None) -> Iterator[str]:
    """Yield the option that unstacks experts, if the family has a layout for it."""
    for name in family.layouts if family else ():
        if family and _is_named_so(name) and not Roles(family, family.get_layout(name)).stacks:
            yield f"pass {spell_option(f'--to-layout {name}')} to write per-expert weights"
            return


def _is_named_so(layout: str) -> bool:
    """Return whether *layout* uses transformers' names."""
    return layout in (HF, BASE) or layout.startswith(f"{HF}-")


# ------------------------------------------------------------------------- virtual tensors


def _key(name: str) -> str:
    """Return the virtual file name of the quantized tensor *name*."""
    return computed_name(f"{name}@quantized")


class _Making:
    """Builder of the virtual tensors of quantized weights.

    Attributes:
        catalog: The source with virtual tensors: quantized ones, and their unquantized inputs.
    """

    def __init__(self, draft: Draft, recipe: Recipe, groups: Mapping[str, tuple[str, ...]]) -> None:
        self._recipe = recipe
        self._groups = groups
        self._draft = draft
        self._output = {tensor.name: tensor for tensor in draft.tensors}
        self._entries = dict(draft.located.tensors)
        self._computed = dict(draft.located.computed)
        self.catalog = replace(draft.located, tensors=self._entries, computed=self._computed)
        self._known: dict[str, ComputeInput] = {}

    def parts_of(self, tensor: OutputTensor) -> list[OutputTensor]:
        """Build the tensors that *tensor* is stored as, in the order of the recipe."""
        return [self._part(tensor, part) for part in self._recipe.parts]

    def _part(self, tensor: OutputTensor, part: StoredPart) -> OutputTensor:
        shape, dtype = part.shape(tensor.shape), part.dtype or tensor.dtype
        name = part.name(tensor.name)
        if part is self._recipe.shared:
            inputs = [self._largest(self._output[one]) for one in self._groups[tensor.name]]
        else:
            inputs = [self._plain(tensor)]
            if self._recipe.shared:
                self._part(tensor, self._recipe.shared)
                key = _key(self._recipe.shared.name(tensor.name))
                inputs.append(ComputeInput(self.catalog.root, self._entries[key]))
        self._virtual(_key(name), ComputedTensor(part.kind, dtype, shape, tuple(inputs)))
        return OutputTensor(name, dtype, shape, (name,), requires_grad=False)

    def _largest(self, tensor: OutputTensor) -> ComputeInput:
        key = computed_name(f"{tensor.name}@largest")
        if key not in self._known:
            weight = (self._plain(tensor),)
            self._known[key] = self._virtual(
                key, ComputedTensor("largest", tensor.dtype, (1,), weight)
            )
        return self._known[key]

    def _plain(self, tensor: OutputTensor) -> ComputeInput:
        """Return the unquantized tensor, which is the source's own if unchanged, else virtual."""
        key = computed_name(f"{tensor.name}@plain")
        if key not in self._known:
            composed = self._draft.mapped[tensor.name]
            first = self._entries[composed.sources[0].key]
            if composed.is_rename and first.dtype == tensor.dtype:
                self._known[key] = ComputeInput(self.catalog.root, first)
            else:
                made = build_elements(self.catalog, composed, tensor.dtype, self._computed)
                self._known[key] = self._virtual(
                    key, build_rearranged_file(self.catalog.root, made)
                )
        return self._known[key]

    def _virtual(self, key: str, made: ComputedTensor) -> ComputeInput:
        entry = made.to_entry(key, (key,), key)
        self._computed[key], self._entries[key] = made, entry
        return ComputeInput(self.catalog.root, entry)
