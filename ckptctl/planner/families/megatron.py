"""How Megatron-Core describes a family's models: what its words and those of config.json share.

Words are those of Megatron-Core's ``TransformerConfig`` and of the providers that Megatron-Bridge
and NeMo make of it, which :mod:`ckptctl.planner.configs.megatron_words` calls *fields*.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ckptctl.planner.families.declarations import NEEDED

WordKind: TypeAlias = Literal[
    "count",
    "optional",
    "tally",
    "number",
    "factor",
    "flag",
    "not",
    "window",
    "groups",
    "method",
    "dense",
    "shared",
    "root",
]


@dataclass(frozen=True, slots=True)
class Word:
    """A fact that config.json and Megatron-Core's configuration both state.

    Attributes:
        config: Its name in config.json, the first of its spellings.
        field: Its name among Megatron-Core's fields.
        kind: ``count``: a positive integer; ``optional``: the same or none; ``tally``: the same,
            none is 0; ``number``: a positive number; ``factor``: the same, none is 1; ``flag``;
            ``not``: a flag that Megatron-Core turns round; ``window``: how many keys a token
            attends to, itself included, or none; Megatron-Core states ``(keys before it, 0)``;
            ``groups``: a count, of which none is 1; ``method``: how experts are chosen, of which
            Megatron-Core states the number of groups; ``dense``: how many layers precede those
            with experts; ``shared``: how many experts the shared one is as large as; ``root``: a
            number of which Megatron-Core states the inverse root.
        default: What transformers takes where config.json is silent.
    """

    config: str
    field: str
    kind: WordKind = "count"
    default: object = NEEDED


Allowed: TypeAlias = Mapping[str, tuple[object, ...]]
"""Values that a model of the family may have, by name; the first one is written."""


@dataclass(frozen=True, slots=True)
class MegatronStyle:
    """How a family's models are described to Megatron-Core.

    Attributes:
        words: The facts that vary between models of the family.
        fields: Fields that do not, where they are not as
            :data:`ckptctl.planner.configs.megatron_words.PLAIN` says.
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

    words: tuple[Word, ...]
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
