"""Declarations of a model family about ties, drops, layer shifts, scales and configs.

config.json and params.json describe the same facts of a model under different names. A family
declares these facts in a :class:`ParamsStyle`, which describes Meta's or Mistral's params.json.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, TypeAlias

from ckptctl.planner.families.facts import FACTS, Fact
from ckptctl.planner.families.tables import Leaf, LogicalTensor
from ckptctl.planner.families.templates import Template
from ckptctl.results import JsonField


def get_nested(values: Mapping[str, object], name: str) -> object:
    """Return the value of a dotted *name* in nested objects, or None if it is missing.

    The last part may be the position of an entry of a list, counted from 0.
    """
    if name in values:
        return values[name]
    head, _, tail = name.partition(".")
    inner = values.get(head)
    if isinstance(inner, list) and tail.isdecimal():
        return inner[int(tail)] if int(tail) < len(inner) else None
    return get_nested(inner, tail) if tail and isinstance(inner, Mapping) else None


def split_aliases(name: str) -> tuple[str, ...]:
    """Split ``outer.a|b`` into alternative full names of a field, the preferred one first.

    Versions of transformers use different names for a size, and store it in different objects, as
    in ``a|outer.a``.
    """
    first, *other_names = name.split("|")
    outer, dot, _ = first.rpartition(".")
    return (
        first,
        *(
            other_name if "." in other_name else f"{outer}{dot}{other_name}"
            for other_name in other_names
        ),
    )


def choose_field_alias(values: Mapping[str, object], name: str) -> str:
    """Return the first alias in *name* that is set in *values*, or the preferred one if none is.

    If none is set, an entry that is missing from a list in *values* is preferred to other aliases.
    """
    names = split_aliases(name)
    is_set = (alias for alias in names if get_nested(values, alias) is not None)
    in_list = (
        alias
        for outer, _, last, alias in ((*alias.rpartition("."), alias) for alias in names)
        if last.isdecimal() and isinstance(get_nested(values, outer), list)
    )
    return next(is_set, next(in_list, names[0]))


def has_field(values: Mapping[str, object], name: str) -> bool:
    """Return whether a config has a field with the dotted *name*, even if it is null."""
    outer, _, last = name.rpartition(".")
    inner = get_nested(values, outer) if outer else values
    if isinstance(inner, list) and last.isdecimal():
        return int(last) < len(inner)
    return isinstance(inner, Mapping) and last in inner


@dataclass(frozen=True, slots=True)
class Rule:
    """A fact that params.json cannot state because it never varies there.

    Attributes:
        config: Name of its field in config.json.
        allowed: Accepted values of the field. The first one is written.
        why: Reason why other values are rejected, for messages.
        written: Whether the field is written to config.json.
    """

    config: str
    allowed: tuple[object, ...]
    why: str
    written: bool = True


@dataclass(frozen=True, slots=True)
class ParamsStyle:
    """Format of the params.json of a model family.

    Attributes:
        owner: Possessive name of the format's owner for messages, such as ``Meta's``.
        derived: Whether the feed-forward size follows from a formula (``multiple_of`` and
            ``ffn_dim_multiplier``), the head dimension is ``dim / n_heads``, and
            ``use_scaled_rope`` is the only RoPE scaling. Otherwise all of them are fields.
        within: Field of config.json that contains the text model's config, or empty if that is
            config.json itself.
        text: Facts about the text model. Their names in config.json are relative to ``within``.
        rules: Rules about the text model, with names relative to ``within``.
        around: Facts about other submodels, with their full names in config.json.
        around_rules: Rules about other submodels, with their full names in config.json.
        constant: Fields of params.json that have the same value in every model.
        silent: Fields of params.json that do not describe the model.
        translated: Whether config.json and params.json are converted into each other.
    """

    owner: str
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
        """Prefix of the text model's fields in config.json, including the dot, or empty."""
        return f"{self.within}." if self.within else ""

    @property
    def facts(self) -> list[tuple[str, Fact]]:
        """Full name in config.json of every fact, and the fact."""
        text_facts = [(self.prefix + fact.config, fact) for fact in self.text]
        return text_facts + [(fact.config, fact) for fact in self.around]

    @property
    def fixed_rules(self) -> list[tuple[str, Rule]]:
        """Full name in config.json of every rule, and the rule."""
        text_rules = [(self.prefix + rule.config, rule) for rule in self.rules]
        return text_rules + [(rule.config, rule) for rule in self.around_rules]


META = ParamsStyle(
    owner="Meta's",
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


AllowedValues: TypeAlias = Mapping[str, tuple[object, ...]]
"""Values of each config field that models of a family may have. The first one is written."""


VOCABULARY_PAD_MULTIPLE = 128
"""Default vocabulary padding multiple of Megatron-LM and Megatron-Bridge."""


@dataclass(frozen=True, slots=True)
class MegatronStyle:
    """Representation of a model family in Megatron-Core's configuration.

    Fields are those of ``TransformerConfig`` and of the providers that Megatron-Bridge and NeMo
    derive from it.

    Attributes:
        facts: Facts that vary between models of the family, with fields in both configurations.
        fields: Constant fields that differ from :data:`ckptctl.planner.families.facts.NEUTRAL`.
        config: Fields of config.json that have the same values in every model of the family.
        extra_config: Additional fields to write to config.json.
        model_type: The family's ``model_type`` in config.json.
        provider: Megatron-Bridge's provider class for the family, or empty if it has none.
        class_prefixes: Prefixes of class names in Megatron-Bridge and NeMo for the family.
        copies: Name of the field from which each of these fields copies its value.
        layer_spec: Import path of the Megatron-Bridge function that builds the layers, or empty if
            the provider defines it.
        layer_pattern: ``(layer type, every)``. Every *every*-th layer has full attention, or none
            if it is 0, and all other layers have the given type.
        has_local_rope: Whether sliding-window layers have separate RoPE frequencies.
        has_optional_experts: Whether models of the family may have no experts.
        config_prefix: Prefix of the names of *facts* in config.json.
        outer_facts: Names of facts in config.json that do not have *config_prefix*.
        has_arguments: Whether Megatron-LM's arguments can describe the family.
        nested_configs: Import path of the configuration class of each provider field that contains
            one, and the section of config.json with its values, or empty for all of it.
        translated: Whether config.json is derived from Megatron-Core's configuration.
    """

    facts: tuple[Fact, ...]
    model_type: str
    fields: AllowedValues = field(default_factory=dict)
    config: AllowedValues = field(default_factory=dict)
    extra_config: Mapping[str, object] = field(default_factory=dict)
    provider: str = ""
    class_prefixes: tuple[str, ...] = ()
    copies: Mapping[str, str] = field(default_factory=dict)
    layer_spec: str = ""
    layer_pattern: tuple[str, int] = ("", 1)
    has_local_rope: bool = False
    has_optional_experts: bool = False
    config_prefix: str = ""
    outer_facts: tuple[str, ...] = ()
    has_arguments: bool = True
    nested_configs: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    translated: bool = True

    def get_config_name(self, name: str) -> str:
        """Return the full name in config.json of a fact or field of the text model."""
        return name if name in self.outer_facts else self.config_prefix + name


SIZES: Mapping[str, tuple[str, str]] = {
    "v": ("vocab_size", ""),
    "d": ("hidden_size", ""),
    "f": ("intermediate_size", ""),
    "h": ("num_attention_heads", ""),
    "k": ("num_key_value_heads", ""),
    "e": ("head_dim", ""),
    "i": ("num_hidden_layers", ""),
}
"""Field names of axis sizes in config.json and params.json, as in most model types."""


QKV_BIASES = ("q_bias", "k_bias", "v_bias")
MLP_BIASES = ("w1_bias", "w2_bias", "w3_bias", "shared_w1_bias", "shared_w2_bias", "shared_w3_bias")
SWITCHES: Mapping[str, tuple[str, ...]] = {
    "attention_bias": (*QKV_BIASES, "qkv_bias", "q_a_bias", "kv_a_bias"),
    "attention_out_bias": ("o_bias",),
    "enable_moe_block": ("router_scale",),
    "mlp_bias": MLP_BIASES,
    "multimodal_projector_bias": ("adapter_w1_bias", "adapter_w2_bias"),
    "qk_layernorm": ("q_norm", "k_norm"),
    "qkv_bias": QKV_BIASES,
    "use_bias": (*QKV_BIASES, "o_bias", *MLP_BIASES),
    "use_qk_norm": ("q_norm", "k_norm"),
    "use_qkv_bias": QKV_BIASES,
}
"""Boolean fields of config.json, and the names of the optional tensors that each enables."""


class PresentCondition:
    """Condition that a field is present and not null."""

    def __eq__(self, other: object) -> bool:
        return other is not None

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return "stated"


PRESENT = PresentCondition()

Conditions: TypeAlias = Mapping[str, object]
"""Conditions on config fields, as a mapping from field names to required values.

None requires an absent or null field. :data:`PRESENT` requires any value except null.
"""


def matches_conditions(conditions: Conditions, values: Mapping[str, object]) -> bool:
    """Return whether *values* meet all *conditions*, treating null fields as absent."""
    return all(sign == get_nested(values, key) for key, sign in conditions.items())


@dataclass(frozen=True, slots=True)
class Drop:
    """Rule to drop a stored tensor that contains no information.

    Attributes:
        layout: Layout that contains the tensor.
        key: Template of the tensor's key.
        reason: Reason why no information is lost.
        zeros: Axes of a tensor that must contain only zeros. Its values are verified on read, and
            it is created on write. Empty for other tensors, which are not created.
        dtype: Dtype of the created zeros.
        next_to: Name, without indices, of the logical tensor that requires zeros in its layer.
        same_as: Name of the logical tensor that the dropped tensor must equal. This is verified on
            read. Empty if it need not equal any.
    """

    layout: str
    key: str
    reason: str
    zeros: str = ""
    dtype: str = "float32"
    next_to: str = ""
    same_as: str = ""


@dataclass(frozen=True, slots=True)
class Fill:
    """Rule for a tensor that a layout requires in layers in which the model does not use it.

    If config.json requires an optional tensor only in some layers, a layout may store it in all of
    them, alone or as a part of a fused tensor. In the other layers, it is created on write. On
    read, it is ignored, because training may have changed its values without any effect.

    Attributes:
        layout: Layout that requires the tensor.
        tensor: Name, without indices, of the optional logical tensor.
        reason: Reason why its values have no effect.
        next_to: Name, without indices, of a tensor that all layers have.
        copy_of: Name, without indices, of the logical tensor to copy in layers that have it.
        value: Value of all elements in layers without *copy_of*, an integer.
    """

    layout: str
    tensor: str
    reason: str
    next_to: str
    copy_of: str = ""
    value: int = 0


@dataclass(frozen=True, slots=True)
class Tie:
    """A logical tensor that a model may tie to another logical tensor."""

    tensor: Annotated[str, JsonField("name of the omitted tensor")]
    of: Annotated[str, JsonField("name of the kept tensor")]
    stored_in: Annotated[tuple[str, ...], JsonField("layouts that store both tensors")] = ()


AFTER, SECOND_HALF = "after", "second half"
"""Values of :attr:`Shift.place` that do not depend on a field of config.json."""


@dataclass(frozen=True, slots=True)
class Shift:
    """Two kinds of layers that a layout numbers consecutively, with one index for both kinds.

    Also two kinds of experts, whose indices are axes that the layout spreads over keys.

    Attributes:
        layout: Name of the layout.
        index: Index of the inserted layers.
        into: Index of the regular layers, among which the others are inserted.
        place: ``after`` if the inserted layers follow all regular layers. They are recognized by
            keys that only they have. ``second half`` if there are as many inserted as regular
            entries, with the same keys, and they follow all regular ones. Otherwise, the field of
            config.json that lists the numbers of the inserted layers, which also have own keys.
        nested: Whether each inserted layer has the number of the regular layer that follows it, so
            that regular layers are numbered without gaps. *place* always counts both kinds.
    """

    layout: str
    index: str
    into: str
    place: str = AFTER
    nested: bool = False

    @property
    def list_field(self) -> str:
        """Field of config.json that lists the inserted layers, or empty if there is none."""
        return "" if self.place in (AFTER, SECOND_HALF) else self.place


@dataclass(frozen=True, slots=True)
class Tiles:
    """Two logical tensors that represent the same tile embeddings, as a grid and as rows.

    See :mod:`ckptctl.planner.mapping.tiles`.

    Attributes:
        grid: Name of the tensor whose first two dimensions are rows and columns of tiles.
        rows: Name of the tensor that has one row for each aspect ratio.
    """

    grid: str
    rows: str

    def find_counterpart(self, name: str) -> str:
        """Return the name of the tensor that represents the same embeddings as *name*.

        If *name* is neither of the two tensors, return an empty string.
        """
        return {self.grid: self.rows, self.rows: self.grid}.get(name, "")


BLOCK_AXES = ("down", "across")
"""Axes of the blocks of rows and columns that have a common scale.

A family with companions must declare them as free axes.
"""


@dataclass(frozen=True, slots=True)
class Companion:
    """Quantization scales of weights, which are derived from the tables instead of listed there.

    A matrix with interleaved parts has one scale tensor, named after the first part.

    Each scale belongs to a block of its weight. DeepSeek's FP8 has ``[ceil(rows / 128),
    ceil(columns / 128)]`` scales (``README_WEIGHTS.md``). Scales are mapped with a weight that
    keeps its dimensions. If a layout reorders, stacks or fuses the weight, mapping raises an error
    because the blocks do not match.

    Attributes:
        endings: For each layout with scales, the key suffixes of a weight and of its scale. Scales
            have the dimensions of the weight in the first layout.
        suffix: Suffix of the derived logical tensor, as in ``q_scale``.
    """

    endings: Mapping[str, tuple[str, str]]
    suffix: str = "_scale"

    def derive_scales(self, weight: LogicalTensor) -> LogicalTensor | None:
        """Derive the scale tensor of *weight*, or return None if it is not a separate matrix."""
        home = next(iter(self.endings))
        home_leaf = weight.leaves.get(home)
        if home_leaf is None or len(home_leaf.dims) != len(BLOCK_AXES):
            return None
        if home_leaf.part is not None and not (home_leaf.interleave_axis and home_leaf.part == 0):
            return None
        leaves = {
            layout: Leaf(
                _build_scale_key(leaf, *ends),
                tuple((axis,) for axis in BLOCK_AXES),
                leaf.spread_axes,
            )
            for layout, ends in self.endings.items()
            for leaf in [weight.leaves.get(layout)]
            if leaf and leaf.placement == home_leaf.placement and leaf.key.text.endswith(ends[0])
        }
        stem, dot, indices = weight.name.partition(".")
        return LogicalTensor(
            f"{stem}{self.suffix}{dot}{indices}",
            weight.block,
            weight.indices,
            _find_scale_split(weight.split_axis, home_leaf),
            True,
            weight.variant,
            leaves,
            scaled_weight=weight.name,
        )


def add_companions(
    tensors: Iterable[LogicalTensor], kinds: Iterable[Companion]
) -> Iterator[LogicalTensor]:
    """Yield each of *tensors*, followed by the scale tensors that *kinds* derive from it."""
    companions = list(kinds)
    for tensor in tensors:
        yield tensor
        scale_tensors = [kind.derive_scales(tensor) for kind in companions]
        yield from (scales for scales in scale_tensors if scales and scales.leaves)


def _build_scale_key(leaf: Leaf, weight: str, scale: str) -> Template:
    return Template.parse(leaf.key.text.removesuffix(weight) + scale)


def _find_scale_split(axis: str | None, leaf: Leaf) -> str | None:
    """Return the axis along which scales are split across ranks, or None if they are replicated.

    *axis* is the axis along which their weight is split, or None.
    """
    if axis is None or axis in leaf.spread_axes:
        return axis
    dims = zip(BLOCK_AXES, leaf.dims, strict=True)
    return next((scale_axis for scale_axis, group in dims if axis == group[0]), None)
