"""What params.json and config.json both say, and what only one of them has a word for.

The two files of a model state the same facts under different names. Which ones is data of the
model family, in the style of its params.json: Meta's or Mistral's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


def looked_up(values: Mapping[str, object], name: str) -> object:
    """Return what a configuration says under *name*, in which dots lead into nested objects."""
    if name in values:
        return values[name]
    head, _, tail = name.partition(".")
    inner = values.get(head)
    return looked_up(inner, tail) if tail and isinstance(inner, Mapping) else None


def spellings(name: str) -> tuple[str, ...]:
    """Return the names that ``outer.one|other`` stands for, the one to show and to write first.

    Versions of transformers call the same size by different names.
    """
    outer, dot, last = name.rpartition(".")
    return tuple(f"{outer}{dot}{one}" for one in last.split("|"))


def spelled(values: Mapping[str, object], name: str) -> str:
    """Return the first of the spellings of *name* under which *values* say something."""
    names = spellings(name)
    return next((one for one in names if looked_up(values, one) is not None), names[0])


def states(values: Mapping[str, object], name: str) -> bool:
    """Return whether a configuration says anything under *name*, be it null."""
    outer, _, last = name.rpartition(".")
    inner = looked_up(values, outer) if outer else values
    return isinstance(inner, Mapping) and last in inner


Kind = Literal["number", "count", "window", "flag"]


class Needed:
    """The default of what a file has to state."""

    def __repr__(self) -> str:
        return "NEEDED"


NEEDED = Needed()


@dataclass(frozen=True, slots=True)
class Same:
    """A fact that both files can state. Dots in a name lead into nested objects.

    Attributes:
        config: Its name in config.json; what describes the rotary frequencies is found under
            ``rope.`` whichever way it is spelled.
        params: Its name in params.json.
        kind: A positive number, a positive integer, a window (an integer or none) or a flag.
        default: What transformers takes where config.json is silent.
        absent: What params.json means where it is silent; None: config.json is silent then, too.
        back: Whether it is written to params.json as well, and not only read there.
    """

    config: str
    params: str
    kind: Kind = "number"
    default: object = NEEDED
    absent: object = None
    back: bool = True


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
    text: tuple[Same, ...] = ()
    rules: tuple[Rule, ...] = ()
    around: tuple[Same, ...] = ()
    around_rules: tuple[Rule, ...] = ()
    constant: Mapping[str, object] = field(default_factory=dict)
    silent: tuple[str, ...] = ()
    translated: bool = True

    @property
    def prefix(self) -> str:
        """Return what precedes the names of the text model in config.json."""
        return f"{self.within}." if self.within else ""


META = ParamsStyle(
    whose="Meta's",
    derived=True,
    text=(
        Same("rms_norm_eps", "norm_eps", default=1e-6, absent=1e-5),
        Same("rope_theta", "rope_theta", default=10000.0),
        Same("max_position_embeddings", "max_seq_len", "count", back=False),
    ),
    rules=(
        Rule("attention_bias", (False,), "Meta's model has no biases"),
        Rule("mlp_bias", (False,), "Meta's model has no biases"),
        Rule("hidden_act", ("silu", "swish"), "Meta's is always silu", written=False),
    ),
    silent=("max_batch_size",),
)
