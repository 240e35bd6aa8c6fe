"""``--quantize``: replace linear weights of an output by virtual quantized tensors.

The quantized tensors are computed from the unquantized tensors of the output, in its layout and
dtype, after dequantizing or merging. The unquantized tensors are virtual too and never stored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from ckptctl.catalog import ComputedTensor, ComputeInput, build_computed_name
from ckptctl.conversion.draft import Draft, Quantization
from ckptctl.conversion.transfers import build_target_tensor
from ckptctl.errors import MappingError, RefusedError, UsageError, format_option, quote_names
from ckptctl.formats.base import OutputTensor
from ckptctl.numerics.quantization.linear_weights import (
    EXPERT_LAYERS_BY_STACK,
    Role,
    TensorRoles,
    find_expert_stack_groups,
    find_fused_groups,
    map_fused_groups,
)
from ckptctl.numerics.quantization.recipes import WEIGHT, Recipe, StoredPart, get_recipes_by_name
from ckptctl.numerics.quantized import find_quantized_tensors
from ckptctl.planner.copying.blocks import build_rearranged_file, build_view
from ckptctl.planner.layouts import BASE, HF, LLM_COMPRESSOR, MLX, Family
from ckptctl.planner.mapping.mapped import ComposedTensor
from ckptctl.planner.mapping.tensors import LayoutChange
from ckptctl.planner.strided import StridedTensor
from ckptctl.units import format_bytes, pluralize

HEAD_MODULE = "lm_head"
QUANTIZABLE_DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes of weights that ``--quantize`` can quantize."""


def quantize(draft: Draft) -> Draft:
    """Replace the weights that ``--quantize`` selects by virtual quantized tensors."""
    recipe = get_recipes_by_name()[draft.options.quantize or ""]
    roles = _map_linear_weights_to_roles(draft, recipe)
    selected = _select_tensors(draft, recipe, roles)
    slices = {
        tensor.name: list(_split_experts(tensor, roles.get(tensor.name, "other")))
        for tensor in selected
        if _is_split_into_experts(tensor, recipe, roles.get(tensor.name, "other"))
    }
    builder = _QuantizedTensorBuilder(draft, recipe, selected, slices)
    parts_by_name = {tensor.name: builder.build_parts(tensor) for tensor in selected}
    tensors = [
        output_tensor
        for tensor in draft.tensors
        for output_tensor in parts_by_name.get(tensor.name, (tensor,))
    ]
    parts = {
        part.name: name for name, stored_parts in parts_by_name.items() for part in stored_parts
    }
    mapped = {
        name: output_tensor
        for name, output_tensor in draft.mapped.items()
        if name not in parts_by_name
    }
    for part in (part for stored_parts in parts_by_name.values() for part in stored_parts):
        mapped[part.name] = ComposedTensor.from_unchanged(
            _build_quantized_key(part.name), part.name, part.shape
        )
    family = draft.change.family
    is_separated = bool(slices) and family is not None and LLM_COMPRESSOR in family.layouts
    quantization = Quantization(
        draft.tensors, parts, layout=LLM_COMPRESSOR if is_separated else None
    )
    quantization = replace(
        quantization, config=recipe.build_config(list_ignored_modules(quantization))
    )
    unsplit = [tensor for tensor in selected if tensor.name not in slices]
    experts = [part.tensor for stack_slices in slices.values() for part in stack_slices]
    draft.notes.add(
        _build_summary_note(quantization, recipe),
        *_note_misaligned_fusion(recipe, [*unsplit, *experts]),
        *_note_stacked_experts(unsplit, draft.change, recipe),
        *_note_split_experts(slices, recipe),
    )
    return replace(
        draft,
        located=builder.catalog,
        mapped=mapped,
        tensors=tuple(tensors),
        quantization=quantization,
    )


def _build_summary_note(quantization: Quantization, recipe: Recipe) -> str:
    names, nbytes = (
        [tensor.name for tensor in quantization.unquantized],
        sum(tensor.nbytes for tensor in quantization.unquantized),
    )
    skipped_counts = f"; skipped {pluralize(len(names), 'tensor')}, {format_bytes(nbytes)}"
    skipped_text = f"{skipped_counts} ({quote_names(names)})" if names else ""
    return (
        f"quantized {pluralize(len(quantization.weights), 'weight')} to "
        f"{recipe.title}{skipped_text}"
    )


def list_ignored_modules(quantization: Quantization) -> tuple[str, ...]:
    """List the unquantized modules that the quantization config must declare.

    Stacked experts are listed by their parent module. A tied lm_head has no tensor of its own, but
    is listed too.
    """
    stacks = (tensor.name for tensor in quantization.unquantized if len(tensor.shape) > 2)
    stack_modules = {name: name.rpartition(".")[0] for name in stacks if not name.endswith(WEIGHT)}
    module_names = (
        stack_modules.get(tensor.name, tensor.name) for tensor in quantization.unquantized
    )
    listed_names = (
        name for name in module_names if name.endswith(WEIGHT) or name in stack_modules.values()
    )
    is_tied = not any(
        tensor.name.endswith(f"{HEAD_MODULE}{WEIGHT}") for tensor in quantization.original_tensors
    )
    return tuple(
        dict.fromkeys((*(n.removesuffix(WEIGHT) for n in listed_names), *[HEAD_MODULE] * is_tied))
    )


def _note_misaligned_fusion(recipe: Recipe, selected: Sequence[OutputTensor]) -> Iterator[str]:
    """Yield a note if a scale block would span two weights that vLLM fuses."""
    block_rows = next(
        (part.block[0] for part in recipe.parts if part.block and part.block[0] > 1), 1
    )
    rows = {tensor.name: tensor.shape[-2] for tensor in selected}
    misaligned = [
        name for group in find_fused_groups(rows) for name in group[:-1] if rows[name] % block_rows
    ]
    if misaligned:
        yield (
            "vLLM cannot load this model: it fuses weights such as q/k/v and gate/up, and "
            f"{pluralize(len(misaligned), 'of them has', 'of them have')} a row count that is "
            "not a "
            f"multiple of {block_rows} ({quote_names(misaligned)})"
        )


def _note_stacked_experts(
    selected: Sequence[OutputTensor], change: LayoutChange, recipe: Recipe
) -> Iterator[str]:
    """Yield a note that few programs read quantized stacks of experts, if any are selected."""
    stacked = [tensor.name for tensor in selected if len(tensor.shape) == 3]
    if stacked:
        note = f"{quote_names(stacked)}: " + (
            "transformers reads stacked quantized experts only on GPUs with FP8 support, and "
            "ignores their scales where it dequantizes"
            if recipe.stack_multiples
            else "vLLM reads these stacks of quantized experts, but transformers does not"
        )
        yield "; ".join((note, *_unstack_hints(change.family, recipe, is_named=False)))


def _note_split_experts(
    slices: Mapping[str, Sequence[_ExpertSlice]], recipe: Recipe
) -> Iterator[str]:
    """Yield a note if stacks of experts are stored with one tensor per expert."""
    if slices:
        count = sum(map(len, slices.values()))
        reason = (
            "vLLM reads them by expert, and transformers does not read stacks [experts, in, out]"
            if recipe.stack_multiples
            else "programs that read this scheme require per-expert weights"
        )
        yield (
            f"split {pluralize(len(slices), 'stack')} of experts into "
            f"{pluralize(count, 'weight')}, because {reason}"
        )


# ------------------------------------------------------------------------------ which weights


def _skip_hint() -> str:
    return f"pass {format_option('--quantize-not GLOB')} to skip it"


def _select_tensors(
    draft: Draft, recipe: Recipe, linear_roles: Mapping[str, Role]
) -> Sequence[OutputTensor]:
    """Select the tensors to quantize, or raise if *recipe* does not support one of them.

    *linear_roles* maps the names of linear weights to their roles.
    """
    options, names_in_output = draft.options, [tensor.name for tensor in draft.tensors]
    added_names = _match_globs(names_in_output, options.quantize_also, "--quantize-also")
    excluded_names = _match_globs(
        [*linear_roles, *added_names], options.quantize_not, "--quantize-not"
    )
    selected_names = (linear_roles.keys() | added_names) - excluded_names
    selected = [candidate for candidate in draft.tensors if candidate.name in selected_names]
    if not selected:
        raise UsageError(
            "no tensors to quantize",
            where=draft.catalog.path,
            why="" if linear_roles else "the model has no linear layers that programs quantize",
        )
    for tensor in selected:
        _require_quantizable(tensor, recipe, linear_roles.get(tensor.name, "other"), draft.change)
    names = {tensor.name for tensor in selected}
    _require_complete_groups(names, names_in_output)
    _require_all_split(draft, recipe, linear_roles, names)
    pairs = [
        (candidate.name, candidate.alias_of) for candidate in draft.tensors if candidate.alias_of
    ]
    shared = dict((*pairs, *((alias, name) for name, alias in pairs)))
    for name in names & shared.keys():
        raise RefusedError(
            f"`{name}` shares memory with `{shared[name]}`",
            why="they would be quantized separately",
            hint=_skip_hint(),
        )
    return selected


def _require_all_split(
    draft: Draft, recipe: Recipe, linear_roles: Mapping[str, Role], selected: Collection[str]
) -> None:
    """Raise if stacks of experts are split in some layers, but left as they are in others."""
    split_names = {
        tensor.name
        for tensor in draft.tensors
        if tensor.name in linear_roles
        and _is_split_into_experts(tensor, recipe, linear_roles[tensor.name])
    }
    left = sorted(split_names.difference(selected))
    if left and not split_names.isdisjoint(selected):
        layout = format_option(f"--to-layout {LLM_COMPRESSOR}")
        family = draft.change.family
        is_separable = family is not None and LLM_COMPRESSOR in family.layouts
        raise UsageError(
            "cannot quantize only some stacks of experts",
            where=f"tensor `{left[0]}`",
            why="quantization stores one weight per expert, and no layout has both",
            hint=f"pass {layout} to separate all experts"
            if is_separable and recipe.is_compressed_tensors
            else f"pass {format_option('--quantize-not')} with a glob that matches all or none",
        )


def _require_complete_groups(names: set[str], available_names: Sequence[str]) -> None:
    """Raise if *names* include only some of the weights that must be quantized together."""
    groups_with_reason = (
        *(
            (group, "vLLM fuses them into one weight")
            for group in find_fused_groups(available_names)
        ),
        *(
            (group, "they belong to one module")
            for group in find_expert_stack_groups(available_names)
        ),
    )
    for group, why in groups_with_reason:
        selected_names = names.intersection(group)
        if selected_names and len(selected_names) < len(group):
            raise UsageError(
                f"cannot quantize only {quote_names(sorted(selected_names))} of "
                f"{quote_names(group)}",
                why=f"{why}, so either all or none must be quantized",
                hint=f"pass {format_option('--quantize-also')} and "
                f"{format_option('--quantize-not')} with a glob that matches all of them",
            )


def _map_linear_weights_to_roles(draft: Draft, recipe: Recipe) -> dict[str, Role]:
    """Map the name of each linear weight to its role in the family's tables."""
    change, catalog = draft.change, draft.catalog
    family = change.family
    quantized_names = find_quantized_tensors(catalog)
    if quantized_names:
        raise UsageError(
            f"{pluralize(len(quantized_names), 'tensor is', 'tensors are')} already quantized",
            where=f"tensor `{next(iter(quantized_names))}`",
            why=", ".join(dict.fromkeys(quantized_names.values())),
            hint=f"pass {format_option('--dequantize bf16')} with {format_option('--quantize')} to "
            "dequantize them first",
        )
    layout = change.target_layout or ""
    requested_layout = draft.options.to_layout or layout
    if family is not None and (requested_layout == MLX or not _is_readable(layout, recipe)):
        is_other_scheme = layout == LLM_COMPRESSOR
        option = format_option(f"--quantize {recipe.name}" if is_other_scheme else "--quantize")
        hint = f"pass a scheme of compressed-tensors, as in {format_option('--quantize int8')}"
        raise UsageError(
            f"{option} is not supported with layout {requested_layout}",
            why="programs that read this layout use other quantization schemes",
            hint=hint if is_other_scheme else None,
        )
    if family is None or family.partial:
        adapter = family is not None and family.partial
        raise MappingError(
            f"{format_option('--quantize')} is not supported for adapters"
            if adapter
            else "unknown model type",
            where=catalog.path,
            why="the model type determines which tensors are weights of linear layers",
            hint=""
            if adapter
            else f"set it with {format_option('--model-type')}; `ckptctl models` lists them",
        )
    roles = TensorRoles(family, family.get_layout(layout))
    output_keys = {target.key for item in change.tensors for target in item.targets}
    keys = ((tensor, tensor.name.removeprefix(draft.output_root)) for tensor in draft.tensors)
    role_by_name = {
        tensor.name: roles.get_role(key, tensor.shape) for tensor, key in keys if key in output_keys
    }
    return {name: role for name, role in role_by_name.items() if role != "other"}


def _match_globs(names: Sequence[str], globs: Sequence[str], option: str) -> set[str]:
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in names):
            raise UsageError(
                f"{format_option(f'{option} {glob}')} matches no tensor",
                hint="use names of the output before quantization"
                + (f", for example `{names[0]}`" if names else ""),
            )
    return {name for name in names for glob in globs if fnmatchcase(name, glob)}


def _require_quantizable(
    tensor: OutputTensor, recipe: Recipe, role: Role, change: LayoutChange
) -> None:
    """Raise if *recipe* does not support the dtype, shape or role of a tensor."""
    where, shape = f"tensor `{tensor.name}`", tensor.shape
    if role in ("experts", "transposed", "stacked"):
        _require_readable_stack(tensor, recipe, role, change)
    elif len(shape) != 2 or not tensor.name.endswith(WEIGHT):
        raise UsageError(
            "the tensor is not the weight of a linear layer", where=where, hint=_skip_hint()
        )
    if tensor.dtype not in QUANTIZABLE_DTYPES:
        raise UsageError(
            f"cannot quantize dtype {tensor.dtype}",
            where=where,
            hint=f"pass {format_option('--dtype bf16')} to cast it first",
        )
    columns = shape[-2 if role == "transposed" else -1]
    if columns % recipe.column_multiple or 0 in shape:
        raise RefusedError(
            f"{recipe.name} requires a number of columns that is a multiple of "
            f"{recipe.column_multiple}",
            where=where,
            why=f"the shape is {list(shape)}",
            hint=_skip_hint(),
        )


def _require_readable_stack(
    tensor: OutputTensor, recipe: Recipe, role: Role, change: LayoutChange
) -> None:
    """Raise if no program can read the stacked experts in *tensor* quantized by *recipe*."""
    family = change.family
    _, rows, columns = shape = tensor.shape
    block_rows, block_columns = recipe.stack_multiples or (1, 1)
    is_split = _is_split_into_experts(tensor, recipe, role)
    is_named = is_split and change.target_layout in (HF, BASE)
    unstack_hints = [*_unstack_hints(family, recipe, is_named=is_named)]
    if is_split and not unstack_hints:
        return  # no layout of transformers has per-expert weights
    is_read = role == "stacked" and family is not None and recipe.name in family.stack_schemes
    if is_split or not (recipe.stack_multiples or is_read):
        why = f"programs that read {recipe.name} require per-expert weights"
    elif role != "experts" and not is_read:
        why = (
            f"{recipe.name} supports only stacks that transformers reads: of shape "
            "[experts, out, in] in a module `experts`"
        )
    elif rows % block_rows or columns % block_columns:
        why = f"transformers requires stacks of whole {block_rows}x{block_columns} blocks"
    else:
        return
    raise MappingError(
        "cannot quantize stacked experts",
        where=f"tensor `{tensor.name}`",
        why=f"the shape is {list(shape)}; {why}",
        hint=", or ".join((*unstack_hints, _skip_hint())),
    )


def _unstack_hints(family: Family | None, recipe: Recipe, *, is_named: bool) -> Iterator[str]:
    """Yield a hint on the option that unstacks experts, if the family has such a layout.

    *is_named* states whether split stacks get the names of :data:`LLM_COMPRESSOR` anyway.
    """
    for name in family.layouts if family else ():
        if (
            family
            and _is_readable(name, recipe)
            and not (is_named and name == LLM_COMPRESSOR)
            and not TensorRoles(family, family.get_layout(name)).has_stacked_experts
        ):
            yield f"pass {format_option(f'--to-layout {name}')} to write per-expert weights"
            return
    is_separable = family is not None and LLM_COMPRESSOR in family.layouts
    if is_separable and not (is_named or recipe.is_compressed_tensors):
        options = format_option(f"--to-layout {LLM_COMPRESSOR}", "--quantize fp8-channel")
        yield f"pass {options} to write per-expert weights"


def _is_readable(layout: str, recipe: Recipe) -> bool:
    """Return whether programs that read *layout* read weights that *recipe* quantizes."""
    has_transformers_names = layout in (HF, BASE) or layout.startswith(f"{HF}-")
    return has_transformers_names or (layout == LLM_COMPRESSOR and recipe.is_compressed_tensors)


# ------------------------------------------------------------------------- stacked experts


@dataclass(frozen=True, slots=True)
class _ExpertSlice:
    """Weight of one linear layer of one expert in a stack.

    Attributes:
        tensor: The weight, under its per-expert name.
        stack: The stack that contains it, ``[experts, rows, columns]``.
        expert: Index of the expert.
        first_row: Output feature of the expert's matrix with which the weight begins.
        is_transposed: Whether the stack is ``[experts, columns, rows]`` instead.
    """

    tensor: OutputTensor
    stack: OutputTensor
    expert: int
    first_row: int
    is_transposed: bool


def _is_split_into_experts(tensor: OutputTensor, recipe: Recipe, role: Role) -> bool:
    """Return whether quantization stores one tensor per expert of the stack *tensor*.

    No program reads stacks ``[experts, in, out]`` with scales. Stacks with names of their own are
    never split.
    """
    is_stack = len(tensor.shape) == 3 and role != "stacked"
    return is_stack and (not recipe.stack_multiples or role == "transposed")


def _split_experts(stack: OutputTensor, role: Role) -> Iterator[_ExpertSlice]:
    """Yield the weights in a stack, with the names that llm-compressor and vLLM use."""
    module, _, name = stack.name.rpartition(".")
    layers = EXPERT_LAYERS_BY_STACK[name]
    is_transposed = role == "transposed"
    experts, rows, columns = stack.shape
    if is_transposed:
        rows, columns = columns, rows
    layer_rows = rows // len(layers)
    for expert in range(experts):
        for number, layer in enumerate(layers):
            weight_name = f"{module}.{expert}.{layer}{WEIGHT}"
            shape = (layer_rows, columns)
            tensor = OutputTensor(weight_name, stack.dtype, shape, (weight_name,))
            yield _ExpertSlice(tensor, stack, expert, number * layer_rows, is_transposed)


# ------------------------------------------------------------------------- virtual tensors


def _build_quantized_key(name: str) -> str:
    """Return the name of the virtual file that computes the quantized tensor *name*."""
    return build_computed_name(f"{name}@quantized")


class _QuantizedTensorBuilder:
    """Builder of the virtual tensors of quantized weights.

    Attributes:
        catalog: The source, with virtual tensors for quantized weights and their unquantized
            inputs.
    """

    def __init__(
        self,
        draft: Draft,
        recipe: Recipe,
        selected: Sequence[OutputTensor],
        slices: Mapping[str, Sequence[_ExpertSlice]],
    ) -> None:
        self._recipe = recipe
        self._slices_by_stack = slices
        self._slices = {part.tensor.name: part for parts in slices.values() for part in parts}
        weights = [tensor.name for tensor in selected if tensor.name not in slices]
        self._groups = map_fused_groups([*weights, *self._slices])
        self._draft = draft
        self._output = {tensor.name: tensor for tensor in draft.tensors} | {
            name: part.tensor for name, part in self._slices.items()
        }
        self._entries = dict(draft.located.tensors)
        self._computed = dict(draft.located.computed)
        self.catalog = replace(draft.located, tensors=self._entries, computed=self._computed)
        self._inputs: dict[str, ComputeInput] = {}

    def build_parts(self, tensor: OutputTensor) -> list[OutputTensor]:
        """Build the stored tensors of the quantized *tensor*, in the order of the recipe."""
        slices = self._slices_by_stack.get(tensor.name)
        weights = [part.tensor for part in slices] if slices else [tensor]
        return [self._build_part(weight, part) for weight in weights for part in self._recipe.parts]

    def _build_part(self, tensor: OutputTensor, part: StoredPart) -> OutputTensor:
        shape, dtype = part.compute_stored_shape(tensor.shape), part.dtype or tensor.dtype
        name = part.build_stored_name(tensor.name)
        if part is self._recipe.shared_part:
            inputs = [
                self._build_largest_input(self._output[name_in_group])
                for name_in_group in self._groups[tensor.name]
            ]
        else:
            inputs = [self._build_unquantized_input(tensor)]
            if self._recipe.shared_part:
                self._build_part(tensor, self._recipe.shared_part)
                key = _build_quantized_key(self._recipe.shared_part.build_stored_name(tensor.name))
                inputs.append(ComputeInput(self.catalog.root, self._entries[key]))
        self._add_virtual(
            _build_quantized_key(name), ComputedTensor(part.kind, dtype, shape, tuple(inputs))
        )
        return OutputTensor(name, dtype, shape, (name,), requires_grad=False)

    def _build_largest_input(self, tensor: OutputTensor) -> ComputeInput:
        key = build_computed_name(f"{tensor.name}@largest")
        if key not in self._inputs:
            weight = (self._build_unquantized_input(tensor),)
            self._inputs[key] = self._add_virtual(
                key, ComputedTensor("largest", tensor.dtype, (1,), weight)
            )
        return self._inputs[key]

    def _build_unquantized_input(self, tensor: OutputTensor) -> ComputeInput:
        """Return the input for an unquantized tensor.

        The input is virtual, unless the source stores the tensor unchanged.
        """
        key = build_computed_name(f"{tensor.name}@plain")
        if key not in self._inputs and tensor.name in self._slices:
            part = self._slices[tensor.name]
            stack = self._build_unquantized_input(part.stack)
            matrix = StridedTensor.from_entry(stack.entry).select(0, part.expert)
            if part.is_transposed:
                matrix = matrix.permute((1, 0))
            rows = matrix.narrow(0, part.first_row, tensor.shape[0])
            if part.is_transposed:
                rearranged = build_rearranged_file(stack.root, rows)
                self._inputs[key] = self._add_virtual(key, rearranged)
            else:
                self._inputs[key] = ComputeInput(stack.root, build_view(stack.entry, rows, key))
        elif key not in self._inputs:
            composed = self._draft.mapped[tensor.name]
            source_entry = self._entries[composed.sources[0].key]
            if composed.is_rename and source_entry.dtype == tensor.dtype:
                self._inputs[key] = ComputeInput(self.catalog.root, source_entry)
            else:
                rearranged_tensor = build_target_tensor(
                    self.catalog, composed, tensor.dtype, self._computed
                )
                self._inputs[key] = self._add_virtual(
                    key, build_rearranged_file(self.catalog.root, rearranged_tensor)
                )
        return self._inputs[key]

    def _add_virtual(self, key: str, virtual_file: ComputedTensor) -> ComputeInput:
        entry = virtual_file.to_entry(key, (key,), key)
        self._computed[key], self._entries[key] = virtual_file, entry
        return ComputeInput(self.catalog.root, entry)
