"""Model families, which define the tensors of a model and how each layout stores them.

This is the only module that ``converters/`` imports. A family describes each layout separately, not
pairs of layouts. Conversions in both directions and model-parallel splits follow from its tables.

Axis names mean the same in every family:

====  ==============================  ====  ====================================
axis  size                            axis  size
====  ==============================  ====  ====================================
v     vocabulary                      h     query heads
d     hidden size                     k     key/value heads
f     feed-forward size               e     head dimension, ``(p r)`` or ``(r p)``
i     layers (an index in keys)       p r   2 and e / 2: rotary pairs
x     experts                         m     feed-forward size of an expert
====  ==============================  ====  ====================================

For a given tensor, all layouts must use either ``e`` or its factors ``p`` and ``r``. ``(h p r)`` is
the order of ``rotate_half``, in which a rotary pair is ``j, j + e/2``. ``(h r p)`` is the order of
complex rotations, in which a pair is ``2j, 2j + 1`` (Su et al., "RoFormer", arXiv:2104.09864).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

from ckptctl.errors import UsageError, find_nearest, quote_names
from ckptctl.planner.families.declarations import (
    BLOCK_AXES,
    META,
    PRESENT,
    SECOND_HALF,
    SIZES,
    Companion,
    Conditions,
    Drop,
    Fill,
    MegatronStyle,
    ParamsStyle,
    Rule,
    Shift,
    Tie,
    Tiles,
    add_companions,
    split_aliases,
)
from ckptctl.planner.families.demands import (
    CHOSEN,
    UNCHOSEN,
    Demand,
    LayerKind,
    LayerSize,
    LayerWord,
)
from ckptctl.planner.families.facts import FACTS, LLAMA3_ROPE, NEEDED, Fact, get_facts
from ckptctl.planner.families.tables import Leaf, LogicalTensor, parse_tables
from ckptctl.planner.families.templates import Template, TemplateTable

__all__ = [
    "BASE",
    "BLOCK_AXES",
    "CHOSEN",
    "FACTS",
    "HF",
    "LLAMA3_ROPE",
    "MLX",
    "NEEDED",
    "PRESENT",
    "SECOND_HALF",
    "SIZES",
    "UNCHOSEN",
    "Companion",
    "Demand",
    "Drop",
    "Fact",
    "Family",
    "Fill",
    "LayerKind",
    "LayerSize",
    "LayerWord",
    "Layout",
    "LayoutTensor",
    "Leaf",
    "LogicalTensor",
    "MegatronStyle",
    "ParamsStyle",
    "Rule",
    "Shift",
    "Tie",
    "Tiles",
    "get_facts",
    "is_base_layout",
]

HF, BASE = "hf", "hf-base"
"""Layout with the names of transformers, and the same layout for models without a head.

A saved ``LlamaModel`` has ``layers.0`` instead of ``model.layers.0`` of ``LlamaForCausalLM``.
Families do not declare layouts without a head. They are derived from the corresponding layouts with
a head by removing the prefix.
"""
SAVED_LAYOUTS = (HF, "hf-v5", "hf-fresh")
"""Layouts in which transformers saves models."""
EXPERT_AXIS = "x"
LIST_LAYOUTS = "run `ckptctl models` to list the layouts of each model type"
_BASE_SUFFIX = "-base"

MLX = "mlx"
LLM_COMPRESSOR = "llm-compressor"
"""Layout in which llm-compressor stores models whose experts it separates into linear layers."""
INHERITED_LAYOUTS: Mapping[str, str] = {MLX: HF, LLM_COMPRESSOR: HF}
"""Layouts that inherit the cells of another layout unless a table of the family overrides them.

mlx-lm uses the names of transformers with a few changes (``sanitize`` in ``mlx_lm/models``). For
example, it stacks experts, and stores the kernel dimension of a convolution before the channels.
llm-compressor changes only the names of experts.
"""

_KEY_PART = re.compile(r"[^\s.,:#{}=|]+")


@dataclass(frozen=True, slots=True)
class LayoutTensor:
    """A stored tensor in a layout, which contains one or several logical tensors.

    Attributes:
        template: Template of the stored tensor's key.
        parts: Logical tensors in the stored tensor, each with its leaf, in the order of
            concatenation. Logical tensors with the same :attr:`Leaf.part` share their elements.
    """

    template: Template
    parts: tuple[tuple[LogicalTensor, Leaf], ...]

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """One leaf for each concatenated part, in the order of concatenation."""
        return tuple({leaf.part: leaf for _, leaf in self.parts}.values())

    @property
    def concat_dim(self) -> int:
        """Dimension along which the parts of the stored tensor are concatenated."""
        return self.parts[0][1].concat_dim

    def find_dim(self, axis: str) -> int | None:
        """Return the dimension whose only axis is *axis*, or None if there is no such dimension."""
        dims = (leaf.dims.index((axis,)) for leaf in self.leaves if (axis,) in leaf.dims)
        return next(dims, None)

    def __str__(self) -> str:
        return " + ".join(dict.fromkeys(str(leaf) for _, leaf in self.parts))


TensorOrDrop: TypeAlias = LayoutTensor | Drop
"""Result of looking up a key, either its stored tensor or the rule that drops it."""


@dataclass(frozen=True, eq=False)
class Layout:
    """A layout of a model family, with a lookup table for keys.

    Attributes:
        name: Name of the layout, such as ``torchtitan@0.3``.
        leaves: Leaf of each logical tensor, by the name of the logical tensor.
        stored: Stored tensors of the layout, in natural order.
        table: Lookup table from keys to stored tensors or drop rules.
    """

    name: str
    leaves: Mapping[str, Leaf]
    stored: tuple[LayoutTensor, ...]
    table: TemplateTable[TensorOrDrop]

    @cached_property
    def stored_by_name(self) -> Mapping[str, LayoutTensor]:
        """Mapping from the name of each logical tensor to the stored tensor that contains it."""
        return {tensor.name: stored for stored in self.stored for tensor, _ in stored.parts}

    @cached_property
    def spread_axes(self) -> frozenset[str]:
        """Axes that are indices of keys, so that each entry is a separate stored tensor."""
        return frozenset(axis for leaf in self.leaves.values() for axis in leaf.spread_axes)

    def iterate_matches(self, key: str) -> Iterator[tuple[TensorOrDrop, dict[str, int]]]:
        """Yield each stored tensor or drop rule that matches *key*, with the index values.

        *key* may also be the text of a template.
        """
        for stored in self.stored:
            if stored.template.text == key and stored.template.indices:
                yield stored, {}
        yield from self.table.iterate_matches(key)

    def has_same_tensors(self, other: Layout) -> bool:
        """Return whether *other* stores every tensor with the same key and axis order."""
        return self.leaves == other.leaves


@dataclass(frozen=True, eq=False)
class Family:
    """A model family.

    Attributes:
        name: The model type, as in ``llama3``.
        title: Name for display.
        layouts: Names of the layouts. Of two identical layouts, the first one is preferred.
        tables: Text tables of the tensors, as in :mod:`ckptctl.planner.families.tables`.
        like: For a layout, another layout whose cells it inherits unless the tables override them.
        prefixes: For a layout that inherits cells, prefixes of keys and their replacements. Of
            several matching prefixes, the longest one is replaced. For a layout without a head,
            keys that change by more than the removal of :attr:`wrapper_prefix`.
        architecture: Name of the model class in config.json.
        aliases: Other names that users may specify.
        drops: Rules to drop stored tensors that contain no information.
        fills: Rules for tensors that layouts require in layers in which they are not used.
        ties: Pairs of logical tensors that a model may tie.
        tied: Whether :attr:`ties` apply by default.
        constants: Axis sizes that never vary.
        composite: Axes that are products of other axes.
        sizes: Field names in config.json and params.json of each axis size or index count.
            ``a|b`` lists several names, also in other objects, as in ``a|outer.a``.
        formulas: Axes with formulas for their sizes, in addition to :attr:`sizes`. A formula is a
            sum of products and quotients of fields of config.json.
        repeated: Axes whose entries are repeated on several ranks if ranks outnumber entries.
        pinned: Tensors that are never cast, by name without indices.
        variants: Groups of alternative layer types, such as ``(("dense", "moe"),)``. Every layer
            (every index of a table that uses a variant) has exactly one variant of each group.
        demands: Optional tensors that a config requires.
        kinds: Rules that find the layers of each variant from a config.
        layer_sizes: Sizes of free axes that a config states per layer.
        layer_words: Placeholders of keys for words that depend on the kind of the layer.
        listed_mtp_count: Field with the number of MTP layers that per-layer lists in config.json
            may include after all other layers. Empty if they never do.
        free: Axes whose size may differ between tensors. They are never grouped with other axes.
        shifts: Rules for layouts that number layers of two kinds together.
        tiles: Tile embeddings that some layouts store as a grid and others as rows.
        companions: Quantization scales that are derived from the tables of the weights.
        quantized: Variants with quantized elements or their scales.
        unquantized: Matrices of layers that no program reads quantized, by name without indices.
            Routers, gates and embeddings are recognized by their axes.
        stack_schemes: Schemes of ``--quantize`` in which programs read the stacked experts of
            ``hf`` under the names of the tables.
        experts_apart: Whether quantized experts must stay separate, because no program reads them
            stacked.
        proofs: Programs with which logits were compared, by layout.
        sources: For layouts of programs that could not be run, the origin of names and axes.
        refines: The family of which this one is a special case, or None.
        shown_by: Tensors (by name without indices, or by group) that distinguish this family from
            another family whose other tensors are the same. If a checkpoint has none of them, only
            a config identifies the family. None if no distinction is needed.
        config_signs: Alternative conditions on config.json, one of which must hold. ``rope_theta``
            and ``rope_type`` are normalized for all versions of transformers.
        params_signs: Alternative conditions on params.json, one of which must hold.
        params: Format of the family's params.json.
        earlier: Names of RoPE fields that only this family had before transformers 5.
        presets: Values of config.json that params.json does not have, as pairs of conditions on
            params.json and values. Later pairs take precedence.
        megatron: Representation in Megatron-Core's configuration, or None.
        tiny: Axis sizes of the smallest model that shows every axis.
        rows: Additional logical tensors that are not in the tables.
        partial: Whether a checkpoint may have any subset of the tensors, as an adapter does, so
            that no tensor is ever missing.
    """

    name: str
    title: str
    layouts: tuple[str, ...]
    tables: tuple[str, ...]
    architecture: str
    like: Mapping[str, str] = field(default_factory=dict)
    prefixes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    drops: tuple[Drop, ...] = ()
    fills: tuple[Fill, ...] = ()
    ties: tuple[Tie, ...] = ()
    tied: bool = False
    constants: Mapping[str, int] = field(default_factory=dict)
    composite: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sizes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    formulas: tuple[tuple[str, str], ...] = ()
    repeated: tuple[str, ...] = ()
    pinned: tuple[str, ...] = ()
    variants: tuple[tuple[str, ...], ...] = ()
    demands: tuple[Demand, ...] = ()
    kinds: tuple[LayerKind, ...] = ()
    layer_sizes: tuple[LayerSize, ...] = ()
    layer_words: tuple[LayerWord, ...] = ()
    listed_mtp_count: str = ""
    free: tuple[str, ...] = ()
    shifts: tuple[Shift, ...] = ()
    tiles: tuple[Tiles, ...] = ()
    companions: tuple[Companion, ...] = ()
    quantized: tuple[str, ...] = ()
    unquantized: tuple[str, ...] = ()
    stack_schemes: tuple[str, ...] = ()
    experts_apart: bool = False
    proofs: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    refines: str | None = None
    shown_by: tuple[str, ...] | None = None
    config_signs: tuple[Conditions, ...] = ()
    params_signs: tuple[Conditions, ...] = ()
    params: ParamsStyle = META
    earlier: tuple[str, ...] = ()
    presets: tuple[tuple[Conditions, Mapping[str, object]], ...] = ()
    megatron: MegatronStyle | None = None
    tiny: Mapping[str, int] = field(default_factory=dict)
    rows: tuple[LogicalTensor, ...] = ()
    partial: bool = False
    _layout_cache: dict[str, Layout] = field(default_factory=dict, init=False, repr=False)
    _expanded_axes: dict[tuple[str, ...], tuple[str, ...]] = field(
        default_factory=dict, init=False, repr=False
    )

    @cached_property
    def tensors(self) -> Mapping[str, LogicalTensor]:
        """The logical tensors by name, in the order of the tables.

        Shared tables may have columns for layouts that this family does not have.
        """
        tensor_by_name: dict[str, LogicalTensor] = {}
        like = {**INHERITED_LAYOUTS, **self.like}
        words = frozenset(word.name for word in self.layer_words)
        parsed = (*parse_tables(self.tables, like, self.prefixes, words), *self.rows)
        tensors = add_companions(parsed, self.companions) if self.companions else parsed
        for tensor in tensors:
            leaves = {k: leaf for k, leaf in tensor.leaves.items() if k in self.layouts}
            if leaves:
                has_all = len(leaves) == len(tensor.leaves)
                tensor_by_name[tensor.name] = tensor if has_all else replace(tensor, leaves=leaves)
        return tensor_by_name

    def find_tensors(self, names: Iterable[str]) -> Iterator[LogicalTensor]:
        """Yield the logical tensors whose name without indices, or whose group, is in *names*."""
        wanted_names = set(names)
        for tensor in self.tensors.values():
            if tensor.name.partition(".")[0] in wanted_names or tensor.group in wanted_names:
                yield tensor

    @cached_property
    def per_layer_tensors(self) -> frozenset[str]:
        """Names of optional tensors that demands of the family require only in some layers."""
        demands = (demand for demand in self.demands if demand.is_by_layer)
        required_tensors = (t for demand in demands for t in self.find_tensors(demand.tensors))
        return frozenset(t.name for t in required_tensors if t.optional)

    @cached_property
    def key_parts(self) -> frozenset[str]:
        """Dot-separated components of the keys of all layouts, extracted without parsing tables."""
        endings = (scale for kind in self.companions for _, scale in kind.endings.values())
        keys = (leaf.key.text for row in self.rows for leaf in row.leaves.values())
        prefixes = (text for renames in self.prefixes.values() for text in renames.values())
        texts = (*self.tables, *(drop.key for drop in self.drops), *endings, *keys, *prefixes)
        return frozenset(_KEY_PART.findall("\n".join(texts)))

    @cached_property
    def wrapper_prefix(self) -> str:
        """Common prefix, including the dot, of all ``hf`` keys except the head's, or empty."""
        if HF not in self.layouts or not self.ties or self.partial:
            return ""
        heads = {tie.tensor for tie in self.ties}
        leaves = {name: t.leaves[HF] for name, t in self.tensors.items() if HF in t.leaves}
        inner = {
            leaf.key.text.partition(".")[0]
            for name, leaf in leaves.items()
            if name not in heads and not self.tensors[name].optional
        }
        embed = leaves.get(self.ties[0].of)
        has_wrapper = embed is not None and len(inner) == 1 and embed.key.text.count(".") > 1
        return f"{inner.pop()}." if has_wrapper else ""

    @cached_property
    def base_layouts(self) -> tuple[str, ...]:
        """Names of the layouts of models without a language model head."""
        heads = {tie.tensor for tie in self.ties}
        return tuple(
            name + _BASE_SUFFIX
            for name in (SAVED_LAYOUTS if self.wrapper_prefix else ())
            if name in self.layouts
            and all(
                tensor.name in heads or tensor.optional or key.startswith(self.wrapper_prefix)
                for tensor in self.tensors.values()
                if name in tensor.leaves
                for key in [tensor.leaves[name].key.text]
            )
        )

    @cached_property
    def expert_axes(self) -> frozenset[str]:
        """Axes whose entries are experts, also of a kind that a layout numbers after others."""
        second_kinds = (shift.index for shift in self.shifts if shift.into == EXPERT_AXIS)
        return frozenset((EXPERT_AXIS, *second_kinds))

    def list_layer_words(self, layout: str) -> list[LayerWord]:
        """List the declared words that depend on the kind of the layer in keys of *layout*."""
        if not self.layer_words:
            return []
        templates = [stored.template for stored in self.get_layout(layout).stored]
        used = {template.word_index for template in templates}
        return [word for word in self.layer_words if word.name in used]

    def list_shifts(self, layout: str) -> list[Shift]:
        """List the declared shifts of *layout*, which describe how it numbers different layers."""
        return [shift for shift in self.shifts if shift.layout == layout.removesuffix(_BASE_SUFFIX)]

    def get_skeletons(self, layout: str) -> Collection[str]:
        """Return the skeletons of all keys of *layout*, without building its lookup table."""
        if layout in self.layouts:
            return self._skeletons[layout]
        return self.get_layout(layout).table.skeletons

    @cached_property
    def _skeletons(self) -> Mapping[str, set[str]]:
        """Skeletons of the keys of each layout for whole models."""
        skeletons: dict[str, set[str]] = {name: set() for name in self.layouts}
        for tensor in self.tensors.values():
            for layout, leaf in tensor.leaves.items():
                skeletons[layout].update(leaf.key.skeletons)
        for drop in self.drops:
            if drop.layout in skeletons:
                skeletons[drop.layout].update(Template.parse(drop.key).skeletons)
        return skeletons

    def get_layout(self, name: str) -> Layout:
        """Get the layout named *name*, and build its lookup table on first use.

        Raises:
            UsageError: The family has no such layout.
        """
        if name in self._layout_cache:
            return self._layout_cache[name]
        if name not in (*self.layouts, *self.base_layouts):
            raise self._unknown_layout_error(name)
        column = name.removesuffix(_BASE_SUFFIX)
        leaves = {t.name: t.leaves[column] for t in self.tensors.values() if column in t.leaves}
        drops = [(Template.parse(d.key), d) for d in self.drops if d.layout == column]
        if column != name:
            keys = {n: self._unwrap_key(leaf.key.text, name) for n, leaf in leaves.items()}
            leaves = {n: replace(leaves[n], key=Template.parse(key)) for n, key in keys.items()}
            drops = [(Template.parse(self._unwrap_key(t.text, name)), d) for t, d in drops]
        leaves_by_key: dict[object, list[tuple[LogicalTensor, Leaf]]] = {}
        for logical, leaf in leaves.items():
            tensor = self.tensors[logical]
            leaves_by_key.setdefault((leaf.key.text, tensor.indices), []).append((tensor, leaf))
        stored = [
            LayoutTensor(parts[0][1].key, tuple(sorted(parts, key=lambda part: part[1].part or 0)))
            for parts in leaves_by_key.values()
        ]
        table_entries: list[tuple[Template, TensorOrDrop]] = [
            (item.template, item) for item in stored
        ]
        table_entries += drops
        layout = Layout(name, leaves, tuple(stored), TemplateTable(table_entries))
        self._layout_cache[name] = layout
        return layout

    def _unwrap_key(self, key: str, base_layout: str) -> str:
        """Convert *key* to *base_layout*, by default by removing the wrapper prefix."""
        renames = {self.wrapper_prefix: "", **self.prefixes.get(base_layout, {})}
        old = max((prefix for prefix in renames if key.startswith(prefix)), key=len, default="")
        return renames.get(old, "") + key.removeprefix(old)

    def _unknown_layout_error(self, name: str) -> UsageError:
        why = f"its layouts are {quote_names(self.layouts, len(self.layouts))}"
        if closest_name := find_nearest(name, self.layouts):
            hint = f"did you mean `{closest_name}`?"
        elif self.partial:
            why = f"no known program writes adapters with the keys of this layout; {why}"
            hint = "use `ckptctl merge BASE ADAPTER DST` to write the merged model in any layout"
        else:
            hint = LIST_LAYOUTS
        return UsageError(f"model type `{self.name}` has no layout `{name}`", why=why, hint=hint)

    def expand_axes(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Replace each composite axis in *axes* by its factors, outermost first."""
        expanded = self._expanded_axes.get(axes)
        if expanded is None:
            expanded = tuple(part for axis in axes for part in self.composite.get(axis, (axis,)))
            self._expanded_axes[axes] = expanded
        return expanded

    def describe_size(self, axis: str) -> str:
        """Return the config field names of the size of *axis*, formatted for messages."""
        composite = next((c for c, parts in self.composite.items() if axis in parts), axis)
        names = self.sizes.get(axis) or self.sizes.get(composite)
        if not names:
            return f"axis `{axis}`"
        config, params = (split_aliases(name)[0] for name in names)
        params_note = f" (in params.json: `{params}`)" if params not in (None, "", config) else ""
        return f"`{config}`{params_note}"


def is_base_layout(layout: str | None) -> bool:
    """Return whether *layout* is for models without a language model head."""
    return layout is not None and layout.endswith(_BASE_SUFFIX)
