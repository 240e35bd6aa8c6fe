"""Model families as data: which tensors a model has, and how each layout keeps them.

This is the only module that ``converters/`` imports. A family says nothing about any pair of
layouts: conversions, their inverses and the model-parallel split all follow from its tables.

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

A tensor writes either ``e`` or its parts, the same in all layouts. ``(h p r)`` is the order of
``rotate_half`` (a pair is ``j, j + e/2``), ``(h r p)`` the order of complex rotations (a pair is
``2j, 2j + 1``); see Su et al., "RoFormer", arXiv:2104.09864.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

from ckptctl.errors import UsageError, listed, nearest
from ckptctl.planner.families.declarations import (
    BLOCK_AXES,
    META,
    PRESENT,
    SIZES,
    Companion,
    Drop,
    MegatronStyle,
    ParamsStyle,
    Rule,
    Shift,
    Signs,
    Tie,
    Tiles,
    spellings,
    with_companions,
)
from ckptctl.planner.families.demands import CHOSEN, UNCHOSEN, Demand, LayerKind, LayerSize
from ckptctl.planner.families.facts import FACTS, LLAMA3_ROPE, NEEDED, Fact, facts_called
from ckptctl.planner.families.tables import Leaf, Tensor, parse_tables
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
    "SIZES",
    "UNCHOSEN",
    "Companion",
    "Demand",
    "Drop",
    "Fact",
    "Family",
    "LayerKind",
    "LayerSize",
    "Layout",
    "Leaf",
    "MegatronStyle",
    "ParamsStyle",
    "Rule",
    "Shift",
    "Stored",
    "Tensor",
    "Tie",
    "Tiles",
    "facts_called",
    "is_base",
]

HF, BASE = "hf", "hf-base"
"""Transformers' names, and those without what classes with a head put before them.

What is saved of ``LlamaModel`` has ``layers.0`` where ``LlamaForCausalLM`` has ``model.layers.0``.
No family says so: it follows from the names in ``hf``, and likewise for what transformers 5 saves
otherwise than it was published.
"""
SAVED = (HF, "hf-v5", "hf-fresh")
"""Layouts that transformers saves models in."""
LIST_LAYOUTS = "run `ckptctl models` to list the layouts of each model type"
_BASE = "-base"

MLX = "mlx"
LIKE: Mapping[str, str] = {MLX: HF}
"""Layouts that keep another one's tensors in every family whose tables do not say otherwise.

mlx-lm takes over transformers' names and changes what its models want otherwise (``sanitize`` in
``mlx_lm/models``): experts are stacked, the taps of convolutions stand before the channels.
"""

_WORD = re.compile(r"[^\s.,:#{}=|]+")


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as a layout stores it: one logical tensor, or several.

    Attributes:
        template: Its key.
        parts: The logical tensors in it, in order; those of the same :attr:`Leaf.part` are one.
    """

    template: Template
    parts: tuple[tuple[Tensor, Leaf], ...]

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """Return what is concatenated in it, in order; of rows that are the same part, one."""
        return tuple({leaf.part: leaf for _, leaf in self.parts}.values())

    @property
    def along(self) -> int:
        """Return the dimension along which the parts are concatenated."""
        return self.parts[0][1].along

    def dim_of(self, axis: str) -> int | None:
        """Return the dimension that *axis* has to itself, or None."""
        dims = (leaf.dims.index((axis,)) for leaf in self.leaves if (axis,) in leaf.dims)
        return next(dims, None)

    def __str__(self) -> str:
        return " + ".join(dict.fromkeys(str(leaf) for _, leaf in self.parts))


Meaning: TypeAlias = Stored | Drop


@dataclass(frozen=True, eq=False)
class Layout:
    """One column of a family, ready to be matched.

    Attributes:
        name: As in ``torchtitan@0.3``.
        leaves: By name of the logical tensor.
        stored: What is stored, in natural order.
        table: Finds what a key stands for.
    """

    name: str
    leaves: Mapping[str, Leaf]
    stored: tuple[Stored, ...]
    table: TemplateTable[Meaning]

    @cached_property
    def holders(self) -> Mapping[str, Stored]:
        """Return what is stored of each logical tensor, by its name."""
        return {tensor.name: stored for stored in self.stored for tensor, _ in stored.parts}

    @cached_property
    def spread(self) -> frozenset[str]:
        """Return the axes that it spreads over keys."""
        return frozenset(axis for leaf in self.leaves.values() for axis in leaf.spread)

    def meanings(self, key: str) -> Iterator[tuple[Meaning, dict[str, int]]]:
        """Yield everything that *key*, or a template with ``{i}``, may stand for, with indices."""
        for stored in self.stored:
            if stored.template.text == key and stored.template.indices:
                yield stored, {}
        yield from self.table.all(key)

    def same_as(self, other: Layout) -> bool:
        """Return whether both keep every tensor under the same name in the same order."""
        return self.leaves == other.leaves


@dataclass(frozen=True, eq=False)
class Family:
    """A model family.

    Attributes:
        name: The model type, as in ``llama3``.
        title: For people.
        layouts: Names of its layouts; of two that are alike the first one is preferred.
        tables: See :mod:`ckptctl.planner.families.tables`.
        like: For a layout the one that it equals wherever the tables do not say otherwise;
            empty: none.
        architecture: Class name in config.json.
        aliases: Other names a user may give.
        drops: Stored tensors without information.
        ties: Tensors that may be one.
        tied: Whether they are one unless a configuration says otherwise.
        constants: Axis sizes that never vary.
        composite: Axes that are made of others.
        sizes: For each axis, or index for its count, the names in config.json and params.json;
            ``one|other``: it has had several, in other places, too: ``one|outer.one``.
        formulas: Axes, and what config.json states of their size beside :attr:`sizes`: sums of
            products and quotients of names there.
        repeated: Axes of which whole entries are repeated where there are fewer than ranks.
        pinned: Tensors that are never cast, by name without indices.
        variants: Alternatives of which every layer (every index of a table that names one of
            them) has exactly one: ``(("dense", "moe"),)``.
        demands: Optional tensors that a configuration demands.
        kinds: Which layers a configuration says are of which variant.
        layer_sizes: What a configuration says of the sizes of free axes.
        free: Axes whose size may differ from tensor to tensor, each a dimension of its own.
        shifts: Layers of different kinds that a layout numbers together.
        tiles: Embeddings that layouts store in two ways.
        companions: Kinds of scales that are stored beside weights.
        quantized: Variants that hold quantized elements or their scales.
        unquantized: Matrices of layers that programs never read quantized, by name without
            indices; that of routers, gates and embeddings follows from their axes.
        experts_apart: Whether no program reads quantized experts of it that are stacked.
        proofs: For each layout whose logits were compared, with what.
        sources: For layouts of programs that could not be run, whose sources their names and axes
            are.
        refines: The family that this one is a special case of.
        shown_by: Where its other tensors are those of another family: tensors, by name without
            indices or by the word of optional ones, that show which of the two it is. If none of
            these are there, a configuration alone does; None: it needs no showing.
        config_signs: Alternatives, one of which must hold of a config.json; ``rope_theta`` and
            ``rope_type`` are found in either spelling of transformers.
        params_signs: The same for params.json.
        params: How its params.json is written.
        earlier: What versions of transformers before 5 called rotary facts in this family alone.
        presets: What config.json says beyond params.json: pairs of signs (of params.json) and
            values; later ones win.
        megatron: How Megatron-Core describes it; None: it does not.
        tiny: Axis sizes of the smallest model that shows every axis.
        rows: Logical tensors that are not written as tables but given as they are.
        partial: Whether it holds any part of what the tables say, as an adapter does: nothing is
            ever missing.
    """

    name: str
    title: str
    layouts: tuple[str, ...]
    tables: tuple[str, ...]
    architecture: str
    like: Mapping[str, str] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    drops: tuple[Drop, ...] = ()
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
    free: tuple[str, ...] = ()
    shifts: tuple[Shift, ...] = ()
    tiles: tuple[Tiles, ...] = ()
    companions: tuple[Companion, ...] = ()
    quantized: tuple[str, ...] = ()
    unquantized: tuple[str, ...] = ()
    experts_apart: bool = False
    proofs: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    refines: str | None = None
    shown_by: tuple[str, ...] | None = None
    config_signs: tuple[Signs, ...] = ()
    params_signs: tuple[Signs, ...] = ()
    params: ParamsStyle = META
    earlier: tuple[str, ...] = ()
    presets: tuple[tuple[Signs, Mapping[str, object]], ...] = ()
    megatron: MegatronStyle | None = None
    tiny: Mapping[str, int] = field(default_factory=dict)
    rows: tuple[Tensor, ...] = ()
    partial: bool = False
    _compiled: dict[str, Layout] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """Return the logical tensors by name, in their natural order.

        Tables of another family may have columns of layouts that this one does not have.
        """
        found: dict[str, Tensor] = {}
        parsed = (*parse_tables(self.tables, {**LIKE, **self.like}), *self.rows)
        tensors = with_companions(parsed, self.companions) if self.companions else parsed
        for tensor in tensors:
            leaves = {k: leaf for k, leaf in tensor.leaves.items() if k in self.layouts}
            if leaves:
                found[tensor.name] = replace(tensor, leaves=leaves)
        return found

    def named(self, names: Iterable[str]) -> Iterator[Tensor]:
        """Yield the tensors called one of *names*, without indices, or that share such a word."""
        wanted = set(names)
        for tensor in self.tensors.values():
            if tensor.name.partition(".")[0] in wanted or tensor.together in wanted:
                yield tensor

    @cached_property
    def by_layer(self) -> frozenset[str]:
        """Return the tensors that some layers have and others do without, by name."""
        demands = (demand for demand in self.demands if demand.by_layer)
        named = (t for demand in demands for t in self.named(demand.tensors))
        return frozenset(t.name for t in named if t.optional)

    @cached_property
    def words(self) -> frozenset[str]:
        """Return the parts that keys of any layout are made of, without parsing the tables."""
        endings = (scale for kind in self.companions for _, scale in kind.endings.values())
        keys = (leaf.key.text for row in self.rows for leaf in row.leaves.values())
        texts = (*self.tables, *(drop.key for drop in self.drops), *endings, *keys)
        return frozenset(_WORD.findall("\n".join(texts)))

    @cached_property
    def wrapper(self) -> str:
        """Return what names in ``hf`` begin with, the head's apart, dot included; or nothing."""
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
        alone = embed is not None and len(inner) == 1 and embed.key.text.count(".") > 1
        return f"{inner.pop()}." if alone else ""

    @cached_property
    def bases(self) -> tuple[str, ...]:
        """Return the layouts of models without their head."""
        heads = {tie.tensor for tie in self.ties}
        return tuple(
            name + _BASE
            for name in (SAVED if self.wrapper else ())
            if name in self.layouts
            and all(
                tensor.name in heads or tensor.optional or key.startswith(self.wrapper)
                for tensor in self.tensors.values()
                if name in tensor.leaves
                for key in [tensor.leaves[name].key.text]
            )
        )

    def shifts_in(self, layout: str) -> list[Shift]:
        """Return which layers *layout* numbers together."""
        return [shift for shift in self.shifts if shift.layout == layout.removesuffix(_BASE)]

    def layout(self, name: str) -> Layout:
        """Return the layout called *name*.

        Raises:
            UsageError: The family has no such layout.
        """
        if name not in (*self.layouts, *self.bases):
            raise self._unknown(name)
        if name in self._compiled:
            return self._compiled[name]
        column = name.removesuffix(_BASE)
        leaves = {t.name: t.leaves[column] for t in self.tensors.values() if column in t.leaves}
        drops = [(Template.parse(d.key), d) for d in self.drops if d.layout == column]
        if column != name:
            keys = {n: leaf.key.text.removeprefix(self.wrapper) for n, leaf in leaves.items()}
            leaves = {n: replace(leaves[n], key=Template.parse(key)) for n, key in keys.items()}
            drops = [(Template.parse(t.text.removeprefix(self.wrapper)), d) for t, d in drops]
        together: dict[object, list[tuple[Tensor, Leaf]]] = {}
        for logical, leaf in leaves.items():
            tensor = self.tensors[logical]
            together.setdefault((leaf.key.text, tensor.indices), []).append((tensor, leaf))
        stored = [
            Stored(parts[0][1].key, tuple(sorted(parts, key=lambda part: part[1].part or 0)))
            for parts in together.values()
        ]
        entries: list[tuple[Template, Meaning]] = [(item.template, item) for item in stored]
        entries += drops
        layout = Layout(name, leaves, tuple(stored), TemplateTable(entries))
        self._compiled[name] = layout
        return layout

    def _unknown(self, name: str) -> UsageError:
        why = f"its layouts are {listed(self.layouts, len(self.layouts))}"
        if close := nearest(name, self.layouts):
            hint = f"did you mean `{close}`?"
        elif self.partial:
            why = f"no known program writes adapters with the keys of this layout; {why}"
            hint = "use `ckptctl merge BASE ADAPTER DST` to write the merged model in any layout"
        else:
            hint = LIST_LAYOUTS
        return UsageError(f"model type `{self.name}` has no layout `{name}`", why=why, hint=hint)

    def expand(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Return *axes* with composite ones replaced by what they are made of."""
        return tuple(part for axis in axes for part in self.composite.get(axis, (axis,)))

    def called(self, axis: str) -> str:
        """Return how an error message names the size of *axis*."""
        whole = next((c for c, parts in self.composite.items() if axis in parts), axis)
        names = self.sizes.get(axis) or self.sizes.get(whole)
        if not names:
            return f"axis `{axis}`"
        config, params = (spellings(name)[0] for name in names)
        other = f" (in params.json: `{params}`)" if params not in (None, "", config) else ""
        return f"`{config}`{other}"


def is_base(layout: str | None) -> bool:
    """Return whether a layout is that of a model without its head."""
    return layout is not None and layout.endswith(_BASE)
