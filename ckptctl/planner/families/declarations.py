"""What a model family states beside its tables: ties, drops, shifts, the signs of its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ckptctl.planner.families.statements import looked_up

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
    """A logical tensor that may be the same as another one.

    Attributes:
        tensor: Name of the one that is left out where possible.
        of: Name of the one that is kept.
        stored_in: Layouts that keep both all the same.
    """

    tensor: str
    of: str
    stored_in: tuple[str, ...] = ()


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

    See :mod:`ckptctl.planner.mapping.tile_embeddings`.

    Attributes:
        grid: The one with a place for each row and column of tiles, its first two dimensions.
        rows: The one with a row for each aspect ratio.
    """

    grid: str
    rows: str

    def other(self, name: str) -> str:
        """Return the name of the one that stands for *name*; empty: that is neither."""
        return {self.grid: self.rows, self.rows: self.grid}.get(name, "")
