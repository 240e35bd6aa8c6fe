"""How Megatron-Core describes a family's models: what its words and those of config.json share.

Words are those of Megatron-Core's ``TransformerConfig`` and of the providers that Megatron-Bridge
and NeMo make of it, which :mod:`ckptctl.planner.configs.megatron_words` calls *fields*.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from ckptctl.planner.families.facts import Fact

Allowed: TypeAlias = Mapping[str, tuple[object, ...]]
"""Values that a model of the family may have, by name; the first one is written."""


@dataclass(frozen=True, slots=True)
class MegatronStyle:
    """How a family's models are described to Megatron-Core.

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
