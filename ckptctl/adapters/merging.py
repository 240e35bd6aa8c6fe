"""Merge an adapter into its model: ``W + s B A``, while the model is converted.

The changed tensors are virtual files of the model's catalog, computed as they are read
(:mod:`ckptctl.numerics.kinds.lora`) in float32 and rounded once; everything else is an ordinary
conversion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from ckptctl import families, formats
from ckptctl.adapters.deltas import Delta, Deltas, as_input, deltas
from ckptctl.adapters.expert_adapters import changes, targets, with_experts_of, without
from ckptctl.adapters.peft import (
    FLOATING,
    SINGLE,
    Settings,
    check_magnitudes,
    described,
    embeddings_as_linear,
    factors_only,
    readable_factors,
    require_adapter,
    require_biases,
    require_saved,
    settings,
)
from ckptctl.catalog import Catalog, ComputedTensor, ComputeInput, TensorEntry, computed_name
from ckptctl.conversion.conversion_options import ConversionOptions, MergeOptions
from ckptctl.conversion.convert import ConversionPlan, Step, plan_with_steps
from ckptctl.conversion.destinations import is_replaceable, require_destination
from ckptctl.conversion.draft import Draft
from ckptctl.conversion.recognition.layout_change import choose_family
from ckptctl.conversion.recognition.model import (
    Model,
    ModelRequest,
    recognize_model,
    require_known_model,
)
from ckptctl.conversion.sources import locate_tensors
from ckptctl.errors import MappingError, RefusedError, UsageError, spell_option
from ckptctl.numerics.kinds.lora import LoraUpdate
from ckptctl.planner.copying.blocks import build_rearranged_file
from ckptctl.planner.layouts import Family
from ckptctl.planner.mapping.adapters import PEFT_LAYOUTS, is_adapter
from ckptctl.results import JsonField, Result
from ckptctl.storage.computed import can_overflow
from ckptctl.storage.paths import parse_path
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

ORDER = "pass the base model before the adapter: `ckptctl merge BASE ADAPTER DST`"
LARGEST = 256 << 20
"""Largest A in float32, in bytes: every thread keeps one in memory."""


@dataclass(frozen=True, slots=True)
class MergePlan(Result):
    """What a merge will do, next to the plan of the conversion.

    Attributes:
        conversion: The conversion of the merged model.
    """

    conversion: ConversionPlan
    adapter: Annotated[str, JsonField("absolute path of the adapter")]
    adapter_format: Annotated[str, JsonField("[format](formats.md) of the adapter")]
    adapter_layout: Annotated[str, JsonField("layout of the adapter")]
    merged: Annotated[int, JsonField("number of model tensors changed by low-rank factors")]
    replaced: Annotated[
        int,
        JsonField("number of model tensors replaced by tensors of the adapter (`modules_to_save`)"),
    ]
    scales: Annotated[tuple[float, ...], JsonField("distinct scales of B A, ascending")]


def plan_merge(
    base: str | TreePath, adapter: str | TreePath, dst: str | TreePath, options: MergeOptions
) -> MergePlan:
    """Plan a merge, keeping the model's format unless *options* set ``to``."""
    with families.use_converter_file(options.converter):
        asked = options.with_target_format(options.to or _same_format(base, options))
        origin = formats.existing(adapter)
        require_destination(origin, parse_path(dst), options.overwrite, is_replaceable)
        merging = Merging(origin, asked, options.scaling)
        plan = plan_with_steps(base, dst, asked, Step("merge", "model", 30, merging.apply))
    return MergePlan(
        plan,
        str(merging.adapter.path),
        merging.adapter.format,
        merging.layout,
        len({delta.key for delta in merging.found.changed}),
        len(merging.found.replaced),
        tuple(sorted(merging.scales)),
    )


def _same_format(base: str | TreePath, options: MergeOptions) -> str:
    """Return the base's format, or raise if it can only be read."""
    found = formats.get(options.from_format) if options.from_format else formats.detect(base)
    if found.name not in formats.writable():
        raise UsageError(
            f"format `{found.name}` can only be read",
            hint=f"choose an output format with {spell_option('--to')}",
        )
    return found.name


class Merging:
    """Merge of one adapter into one model.

    Attributes:
        adapter: Catalog of the adapter.
        layout: Layout of the adapter, set when it is matched.
        root: Prefix of its keys in a larger state dict, set when it is matched.
        scales: Scales of B A that were used.
        found: The changes, set when the adapter is matched.
    """

    def __init__(self, path: TreePath, options: ConversionOptions, scaling: float | None) -> None:
        self.options = options
        self.adapter = factors_only(formats.open_checkpoint(path))
        require_adapter(self.adapter, MappingError, "not a LoRA/DoRA adapter", ORDER)
        self.config = described(self.adapter)
        self.settings: Settings = settings(self.config, options.lora_alpha, scaling, carries=SINGLE)
        self.layout = ""
        self.root = ""
        self.scales: set[float] = set()
        self.found = Deltas((), {}, frozenset())

    def apply(self, draft: Draft) -> Draft:
        """Merge the adapter into the model of *draft*."""
        return draft.with_catalog(self.change(draft.model))

    def change(self, known: Model) -> Catalog:
        """Return the model's checkpoint with the changed tensors in virtual files."""
        catalog = known.catalog
        if is_adapter(catalog.tensors):
            raise MappingError(
                "this is an adapter, not a base model", where=catalog.path, hint=ORDER
            )
        held = known.tensors
        self._find_changes(known, choose_family(known, known.layout))
        weights = _grouped(self.found.changed, lambda delta: delta.key)
        scaled = _grouped(self.found.changed, lambda delta: delta.bias and delta.bias[0])
        names = [*weights, *scaled, *self.found.replaced]
        base = locate_tensors(catalog, [held[name].name for name in names]).tensors
        self._refuse_ties(set(base), known)
        tensors, computed = dict(catalog.tensors), dict(catalog.computed)
        wide = {
            key: ComputeInput(catalog.root, _in_float32(base[held[key].name], computed))
            for key in weights
        }
        made = {
            key: self._changed(base[held[key].name], wide[key], changes, computed)
            for key, changes in weights.items()
        }
        made |= {
            key: self._scaled(
                ComputeInput(catalog.root, base[held[key].name]), wide, changes, computed
            )
            for key, changes in scaled.items()
        }
        made |= {
            key: build_rearranged_file(self.adapter.root, saved)
            for key, saved in self.found.replaced.items()
        }
        for key, virtual in made.items():
            entry = base[held[key].name]
            name = computed_name(f"{entry.name}+lora")
            computed[name] = virtual
            tensors[held[key].name] = replace(
                entry,
                dtype=virtual.dtype,
                shape=virtual.shape,
                extents=(virtual.to_extent(name),),
                alias_of=None,
            )
        notes = (*catalog.notes, *(f"adapter: {note}" for note in self.adapter.notes))
        return replace(catalog, tensors=tensors, computed=computed, notes=notes)

    def _find_changes(self, known: Model, family: Family) -> None:
        """Match the adapter to the model and set *found*, *layout* and *root*.

        Raises:
            MappingError: The model is missing layers of the adapter.
            UnsupportedError: Magnitudes, biases or trained modules are missing in the adapter.
        """
        held = known.tensors
        apart = with_experts_of(self.adapter, known, family)
        if apart is not self.adapter:
            self.adapter, self.config = apart, described(apart)
            alpha, scaling = self.options.lora_alpha, self.settings.scaling
            self.settings = settings(self.config, alpha, scaling, carries=SINGLE)
        single = targets(self.adapter, self.config, self.settings, held)
        rest = without(self.adapter, single)
        self.layout = PEFT_LAYOUTS[0]
        if rest.tensors or not single:
            adapter = recognize_model(rest, known.documents, ModelRequest(family.name))
            require_known_model(adapter)
            self.layout, self.root = adapter.layout or "", adapter.root
        factors = readable_factors(self.adapter, self.root)
        if rest.tensors or not single:
            linear = embeddings_as_linear(rest).tensors
            self.found = deltas(
                family,
                (known.layout or "", self.layout),
                {name: entry.shape for name, entry in held.items()},
                {key: entry for key, entry in factors.items() if entry.name in linear},
                known.axis_sizes(family, implied=True),
                known.layer_lists(family),
                (str(known.catalog.path), str(self.adapter.path)),
            )
        check_magnitudes(
            self.settings,
            [delta.factors[1] for delta in self.found.changed if delta.magnitude],
            [delta.factors[1] for delta in self.found.changed if not delta.magnitude],
        )
        require_saved(self.config, self.found.replaced)
        biases = {delta.key.removesuffix("weight") + "bias" for delta in self.found.changed}
        require_biases(self.config, sorted((biases & held.keys()) - self.found.replaced.keys()))
        stacked = tuple(changes(single, held, factors))
        self.found = replace(self.found, changed=(*self.found.changed, *stacked))

    def _refuse_ties(self, changed: set[str], known: Model) -> None:
        """Raise if only one of two tied or shared tensors would change."""
        catalog, family = known.catalog, choose_family(known, known.layout)
        hint = f"convert the model with {spell_option('--untie')} first"
        for name, entry in catalog.tensors.items():
            if entry.alias_of is not None and {name, entry.alias_of} & changed:
                raise RefusedError(
                    f"`{name}` and `{entry.alias_of}` share memory, but the adapter changes "
                    "only one",
                    where=catalog.path,
                    hint=hint,
                )
        for tie in family.ties if known.is_tied(family) else ():
            if len({tie.tensor, tie.of} & self.found.logical) == 1:
                raise RefusedError(
                    f"`{tie.of}` and `{tie.tensor}` are tied, but the adapter changes only one",
                    where=catalog.path,
                    why="PEFT would untie them, but the configuration states that they are tied",
                    hint=hint,
                )

    def _changed(
        self,
        base: TensorEntry,
        wide: ComputeInput,
        changes: Sequence[Delta],
        computed: dict[str, ComputedTensor],
    ) -> ComputedTensor:
        _require_plain(base)
        beneath = next((delta.beneath for delta in changes if delta.beneath), None)
        base_input = as_input(self.adapter.root, beneath, computed) if beneath else wide
        factors, arguments = self._factors_of(changes, computed)
        inputs = (base_input, *(one for some in factors for one in some))
        pinned = changes[0].key in self.found.pinned
        dtype = base.dtype if pinned else self.options.dtype or base.dtype
        return ComputedTensor("lora", dtype, base.shape, inputs, arguments)

    def _scaled(
        self,
        bias: ComputeInput,
        weights: Mapping[str, ComputeInput],
        changes: Sequence[Delta],
        computed: dict[str, ComputedTensor],
    ) -> ComputedTensor:
        """Return a bias that DoRA scales like the rows of its weight."""
        _require_plain(bias.entry)
        factors, arguments = self._factors_of(changes, computed)
        inputs = [bias]
        for change, own in zip(changes, factors, strict=True):
            inputs += [weights[change.key], *own]
        dtype = self.options.dtype or bias.entry.dtype
        return ComputedTensor("dora_bias", dtype, bias.entry.shape, tuple(inputs), arguments)

    def _factors_of(
        self, changes: Sequence[Delta], computed: dict[str, ComputedTensor]
    ) -> tuple[list[list[ComputeInput]], tuple[LoraUpdate, ...]]:
        """Return the factors of each delta, and the arguments of their kind.

        Factors that need another element order are added to *computed* as virtual files.
        """
        factors: list[list[ComputeInput]] = []
        arguments: list[LoraUpdate] = []
        for delta in changes:
            rank, columns = delta.a.shape
            scale = self.settings.scale(delta.factors[0], rank)
            nbytes = 4 * rank * columns
            if nbytes > LARGEST:
                raise RefusedError(
                    f"rank {rank:,} is too high to merge in bounded memory",
                    where=f"tensor `{delta.a.parts[0].entry.name}`",
                    why=f"A has {pluralize(nbytes, 'byte')} in fp32; the limit is {LARGEST:,}",
                )
            self.scales.add(scale)
            parts = (delta.a, delta.b, delta.magnitude)
            factors.append([as_input(self.adapter.root, p, computed) for p in parts if p])
            bias_start = delta.bias[1] if delta.bias else 0
            arguments.append(LoraUpdate(delta.rows, scale, bool(delta.magnitude), bias_start))
        return factors, tuple(arguments)


def _grouped(
    changes: Sequence[Delta], key: Callable[[Delta], str | None]
) -> dict[str, list[Delta]]:
    found: dict[str, list[Delta]] = {}
    for delta in changes:
        if name := key(delta):
            found.setdefault(name, []).append(delta)
    return found


def _in_float32(entry: TensorEntry, computed: dict[str, ComputedTensor]) -> TensorEntry:
    """Return a dequantized tensor before rounding, with its virtual file added to *computed*."""
    extent, *others = entry.extents
    made = computed.get(extent.file)
    if made is None or others or not can_overflow(made):
        return entry
    wide = replace(made, dtype="float32")
    name = computed_name(f"{entry.name}+float32")
    computed[name] = wide
    nbytes = wide.to_extent(name).nbytes
    return replace(entry, dtype=wide.dtype, extents=(replace(extent, file=name, nbytes=nbytes),))


def _require_plain(entry: TensorEntry) -> None:
    if entry.dtype not in FLOATING:
        raise MappingError(
            f"cannot merge an adapter into a weight of dtype {entry.dtype}",
            where=f"tensor `{entry.name}`",
            hint=f"pass {spell_option('--dequantize bf16')} to dequantize the model",
        )
