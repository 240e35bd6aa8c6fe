"""What a model family states beside its tables: ties, drops, shifts, scales, signs, its files.

config.json and params.json state the same facts of a model under different names. Which ones is
data of the model family, in the style of its params.json: Meta's or Mistral's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, TypeAlias

from ckptctl.planner.families.facts import FACTS, Fact
from ckptctl.planner.families.tables import Leaf, Tensor
from ckptctl.planner.families.templates import Template
from ckptctl.results import JsonField


def looked_up(values: Mapping[str, object], name: str) -> object:
    """Return what a configuration says under *name*, in which dots lead into nested objects."""
    if name in values:
        return values[name]
    head, _, tail = name.partition(".")
    inner = values.get(head)
    return looked_up(inner, tail) if tail and isinstance(inner, Mapping) else None


def spellings(name: str) -> tuple[str, ...]:
    """Return the names that ``outer.one|other`` stands for, the one to show and to write first.

    Versions of transformers call the same size by different names, and keep it in different places:
    ``one|outer.one``.
    """
    first, *others = name.split("|")
    outer, dot, _ = first.rpartition(".")
    return (first, *(one if "." in one else f"{outer}{dot}{one}" for one in others))


def spelled(values: Mapping[str, object], name: str) -> str:
    """Return the first of the spellings of *name* under which *values* say something."""
    names = spellings(name)
    return next((one for one in names if looked_up(values, one) is not None), names[0])


def states(values: Mapping[str, object], name: str) -> bool:
    """Return whether a configuration says anything under *name*, be it null."""
    outer, _, last = name.rpartition(".")
    inner = looked_up(values, outer) if outer else values
    return isinstance(inner, Mapping) and last in inner


@dataclass(frozen=True, slots=True)
class Rule:
    """A fact that params.json cannot state, because it is always the same there.

    Attributes:
        config: Its name in config.json.
        allowed: The values that mean it; the first one is written.
        why: Why it is so.
        written: Whether config.json is made with it.
    """

    config: str
    allowed: tuple[object, ...]
    why: str
    written: bool = True


@dataclass(frozen=True, slots=True)
class ParamsStyle:
    """How a family's params.json is written.

    Attributes:
        whose: For messages.
        derived: Whether it gives the feed-forward size by a formula (``multiple_of`` and
            ``ffn_dim_multiplier``) and the head dimension as ``dim / n_heads``, and knows one
            scaling of rotary frequencies, ``use_scaled_rope``; else it states all of them.
        within: The object of config.json that describes the text model; empty: all of it does.
        text: Facts about the text model; their names in config.json are those inside ``within``.
        rules: The same for what params.json cannot state.
        around: Facts about the rest, by their full names.
        around_rules: The same for what params.json cannot state.
        constant: What params.json always states, by name.
        silent: What params.json may state that is no property of the model.
        translated: Whether config.json is made of params.json, and the other way round.
    """

    whose: str
    derived: bool = False
    within: str = ""
    text: tuple[Fact, ...] = ()
    rules: tuple[Rule, ...] = ()
    around: tuple[Fact, ...] = ()
    around_rules: tuple[Rule, ...] = ()
    constant: Mapping[str, object] = field(default_factory=dict)
    silent: tuple[str, ...] = ()
    translated: bool = True

    @property
    def prefix(self) -> str:
        """Return what precedes the names of the text model in config.json."""
        return f"{self.within}." if self.within else ""

    @property
    def facts(self) -> list[tuple[str, Fact]]:
        """Return the facts, each with its full name in config.json."""
        named = [(self.prefix + fact.config, fact) for fact in self.text]
        return named + [(fact.config, fact) for fact in self.around]

    @property
    def fixed(self) -> list[tuple[str, Rule]]:
        """Return the rules, each with its full name in config.json."""
        named = [(self.prefix + rule.config, rule) for rule in self.rules]
        return named + [(rule.config, rule) for rule in self.around_rules]


META = ParamsStyle(
    whose="Meta's",
    derived=True,
    text=(
        replace(FACTS["rms_norm_eps"], absent=1e-5),
        FACTS["rope_theta"],
        replace(FACTS["max_position_embeddings"], back=False),
    ),
    rules=(
        Rule("attention_bias", (False,), "Meta's model has no biases"),
        Rule("mlp_bias", (False,), "Meta's model has no biases"),
        Rule("hidden_act", ("silu", "swish"), "Meta's is always silu", written=False),
    ),
    silent=("max_batch_size",),
)


Allowed: TypeAlias = Mapping[str, tuple[object, ...]]
"""Values that a model of the family may have, by name; the first one is written."""


VOCABULARY_MULTIPLE = 128
"""What Megatron-LM and Megatron-Bridge pad a vocabulary to where nobody says otherwise."""


@dataclass(frozen=True, slots=True)
class MegatronStyle:
    """How a family's models are described to Megatron-Core.

    Fields are the words of its ``TransformerConfig``, and of the providers that Megatron-Bridge and
    NeMo make of it.

    Attributes:
        words: The facts, of those that both state, that vary between models of the family.
        fields: Fields that do not, where they are not as
            :data:`ckptctl.planner.families.facts.NEUTRAL` says.
        config: The same of config.json.
        written: What config.json is made with beside these facts.
        model_type: What config.json calls the family.
        provider: Bridge's class for models of the family; empty: it has none.
        named: What the names of the classes of Bridge and NeMo begin with that tell the family.
        copies: Fields that are another field's copy, by name.
        spec: Where Bridge's function lies that builds the layers, unless the provider says.
        pattern: The kind of all layers but every so many: ``(kind, every)``; the others attend to
            the whole text.
        local: Whether layers with a window have rotary frequencies of their own.
        prefix: What precedes the names in config.json.
        translated: Whether config.json is made of Megatron-Core's configuration.
    """

    words: tuple[Fact, ...]
    model_type: str
    fields: Allowed = field(default_factory=dict)
    config: Allowed = field(default_factory=dict)
    written: Mapping[str, object] = field(default_factory=dict)
    provider: str = ""
    named: tuple[str, ...] = ()
    copies: Mapping[str, str] = field(default_factory=dict)
    spec: str = ""
    pattern: tuple[str, int] = ("", 1)
    local: bool = False
    prefix: str = ""
    translated: bool = True


SIZES: Mapping[str, tuple[str, str]] = {
    "v": ("vocab_size", ""),
    "d": ("hidden_size", ""),
    "f": ("intermediate_size", ""),
    "h": ("num_attention_heads", ""),
    "k": ("num_key_value_heads", ""),
    "e": ("head_dim", ""),
    "i": ("num_hidden_layers", ""),
}
"""What most of transformers' configurations call the sizes of axes."""


QKV = ("q_bias", "k_bias", "v_bias")
MLP = ("w1_bias", "w2_bias", "w3_bias", "shared_w1_bias", "shared_w2_bias", "shared_w3_bias")
SWITCHES: Mapping[str, tuple[str, ...]] = {
    "attention_bias": (*QKV, "qkv_bias", "q_a_bias", "kv_a_bias"),
    "attention_out_bias": ("o_bias",),
    "enable_moe_block": ("router_scale",),
    "mlp_bias": MLP,
    "multimodal_projector_bias": ("adapter_w1_bias", "adapter_w2_bias"),
    "qk_layernorm": ("q_norm", "k_norm"),
    "qkv_bias": QKV,
    "use_bias": (*QKV, "o_bias", *MLP),
    "use_qk_norm": ("q_norm", "k_norm"),
    "use_qkv_bias": QKV,
}
"""What config.json switches on, and the optional tensors, without indices, that come with it."""


class Present:
    """The sign that a value is stated, whatever it is."""

    def __eq__(self, other: object) -> bool:
        return other is not None

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return "stated"


PRESENT = Present()

Signs: TypeAlias = Mapping[str, object]
"""Values that all have to be found; None: absent or null; :data:`PRESENT`: not so."""


def holds(signs: Signs, values: Mapping[str, object]) -> bool:
    """Return whether all of *signs* are found in *values*; a null there means absent."""
    return all(sign == looked_up(values, key) for key, sign in signs.items())


@dataclass(frozen=True, slots=True)
class Drop:
    """A stored tensor that carries no information.

    Attributes:
        layout: Where it occurs.
        key: Template of its name.
        reason: Why nothing is lost.
        zeros: Its axes, where it has to be there and to hold nothing but zeros: checked when it
            is read, made when it is written. Empty: it is left out whatever it holds.
        dtype: Element type of the zeros.
        beside: Name, without indices, of the logical tensor next to which zeros are made.
        same_as: Name of the logical tensor that it has to be the same as: checked when it is read.
    """

    layout: str
    key: str
    reason: str
    zeros: str = ""
    dtype: str = "float32"
    beside: str = ""
    same_as: str = ""


@dataclass(frozen=True, slots=True)
class Tie:
    """A logical tensor that may be the same as another one."""

    tensor: Annotated[str, JsonField("name of the omitted tensor")]
    of: Annotated[str, JsonField("name of the kept tensor")]
    stored_in: Annotated[tuple[str, ...], JsonField("layouts that store both tensors")] = ()


@dataclass(frozen=True, slots=True)
class Shift:
    """Two kinds of layers that a layout numbers together, and that have indices of their own.

    Attributes:
        layout: Where.
        index: The index of the layers that are inserted; keys that only they have show which.
        into: The index of the layers among which they are.
        place: ``after``: they follow all others. Else the name in config.json of the list of
            their numbers.
        nested: Whether each has the number of the other layer that follows it, and the others
            are counted as if there were none; *place* counts both kinds all the same.
    """

    layout: str
    index: str
    into: str
    place: str = "after"
    nested: bool = False


@dataclass(frozen=True, slots=True)
class Tiles:
    """Embeddings of tiles: two logical tensors that stand for each other.

    See :mod:`ckptctl.planner.mapping.tiles`.

    Attributes:
        grid: The one with a place for each row and column of tiles, its first two dimensions.
        rows: The one with a row for each aspect ratio.
    """

    grid: str
    rows: str

    def other(self, name: str) -> str:
        """Return the name of the one that stands for *name*; empty: that is neither."""
        return {self.grid: self.rows, self.rows: self.grid}.get(name, "")


BLOCK_AXES = ("down", "across")
"""Blocks of rows and of columns: axes that a family with companions declares as free."""


@dataclass(frozen=True, slots=True)
class Companion:
    """A kind of scale that is stored beside weights, derived instead of tabulated.

    Of a matrix whose parts take turns there is one for all, named after the first part.

    A scale stands for a block of its weight: ``[ceil(rows / 128), ceil(columns / 128)]`` of them
    for DeepSeek's fp8 (``README_WEIGHTS.md``). It may follow its weight where that keeps its
    dimensions, under another name or rank; where a layout reorders, stacks or fuses the weight, the
    blocks have no place, and mapping refuses.

    Attributes:
        endings: For each layout that knows it what the keys of weight and scale end with; the
            scales are stored as the first layout has the weights.
        suffix: What the name of the derived logical tensor ends with, as in ``q_scale``.
    """

    endings: Mapping[str, tuple[str, str]]
    suffix: str = "_scale"

    def of(self, weight: Tensor) -> Tensor | None:
        """Return the scales of *weight*; None: it has none, being no matrix of its own."""
        home = next(iter(self.endings))
        first = weight.leaves.get(home)
        if first is None or len(first.dims) != len(BLOCK_AXES):
            return None
        if first.part is not None and not (first.within and first.part == 0):
            return None
        leaves = {
            layout: Leaf(_key(leaf, *ends), tuple((axis,) for axis in BLOCK_AXES), leaf.spread)
            for layout, ends in self.endings.items()
            for leaf in [weight.leaves.get(layout)]
            if leaf and leaf.place == first.place and leaf.key.text.endswith(ends[0])
        }
        stem, dot, indices = weight.name.partition(".")
        return Tensor(
            f"{stem}{self.suffix}{dot}{indices}",
            weight.block,
            weight.indices,
            _split(weight.split, first),
            True,
            weight.variant,
            leaves,
            scales=weight.name,
        )


def with_companions(tensors: Iterable[Tensor], kinds: Iterable[Companion]) -> Iterator[Tensor]:
    """Yield *tensors*, each followed by its scales."""
    known = list(kinds)
    for tensor in tensors:
        yield tensor
        found = [kind.of(tensor) for kind in known]
        yield from (scales for scales in found if scales and scales.leaves)


def _key(leaf: Leaf, weight: str, scale: str) -> Template:
    return Template.parse(leaf.key.text.removesuffix(weight) + scale)


def _split(axis: str | None, leaf: Leaf) -> str | None:
    """Return the axis of the scales that ranks divide where they divide *axis* of the weight."""
    if axis is None or axis in leaf.spread:
        return axis
    dims = zip(BLOCK_AXES, leaf.dims, strict=True)
    return next((own for own, group in dims if axis == group[0]), None)
