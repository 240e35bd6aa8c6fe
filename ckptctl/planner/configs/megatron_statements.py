"""What Megatron's record of a model says, statement by statement; the model type from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ckptctl.errors import MappingError
from ckptctl.planner.configs.contradictions import Statement, of_config
from ckptctl.planner.configs.facts import Json, number
from ckptctl.planner.configs.megatron import (
    TARGET,
    class_of,
    fields_of,
    model_of,
    rope_of,
    words_of,
)
from ckptctl.planner.configs.megatron_words import ARGUMENTS, PLAIN, ROUTING, TURNED
from ckptctl.planner.families.declarations import NEEDED, holds, looked_up
from ckptctl.planner.families.megatron import MegatronStyle
from ckptctl.planner.layouts import Family

EXPERTS, FURTHER = "num_moe_experts", "mtp_num_layers"


def of_megatron(family: Family, record: Json, source: str) -> Iterator[Statement]:
    """Yield what *record* says of a model of *family*, in the words of config.json."""
    style = family.megatron
    if style is None:
        return
    fields = fields_of(record)
    called = {field: name for name, field in (*ARGUMENTS.items(), *TURNED.items())}
    for word, value in words_of(style, fields):
        if word.field == FURTHER and not value:
            continue  # trained without them, which no other layer's result depends on
        said = called[word.field] if called.get(word.field) in model_of(record) else word.field
        bounded = word.kind == "window" and value is not None
        stored = f"{fields[word.field]}" if bounded else ""
        yield Statement(style.prefix + word.config, value, source, said=said, stored=stored)
    for word in style.words:  # None is said of models without experts
        if word.field == EXPERTS and fields.get(EXPERTS, 0) is None:
            yield Statement(
                style.prefix + word.config, 0, source, said=called.get(EXPERTS, EXPERTS)
            )
    rope = rope_of(style, fields) or {}
    yield from (Statement(f"{style.prefix}rope.{n}", v, source) for n, v in rope.items())
    bases = fields.get("rotary_base")
    if style.local and isinstance(bases, (list, tuple)) and len(bases) == 2:
        local = number(bases[0], "rotary_base")
        yield Statement(style.prefix + "rope_local_base_freq", local, source, said="rotary_base")
    always = f"every model of `{family.name}`"
    for name, allowed in expected(style, fields).items():
        if name in fields:
            value = fields[name]
            fits = allows(allowed, value)
            yield Statement(name, allowed[0] if fits else value, source)
            yield Statement(name, allowed[0], always, stated=False)


def stated(family: Family, record: Json) -> dict[str, object]:
    """Return the config.json that *record* states, as far as it does."""
    style = family.megatron
    if style is None:
        return {}
    fields = fields_of(record)
    told = {word.config: value for word, value in words_of(style, fields)}
    rope = rope_of(style, fields)
    told |= {} if rope is None or rope["rope_type"] == "default" else {"rope_scaling": rope}
    inner = {style.prefix.rstrip("."): told} if style.prefix else told
    return {"model_type": style.model_type, **inner}


def silent(family: Family, config: Json, source: str) -> Iterator[Statement]:
    """Yield what config.json means by not stating a fact that Megatron's programs record."""
    style = family.megatron
    if style is None:
        return
    named = {one.fact for one in of_config(family, config, source) if one.stated}
    for word in style.words:
        fact = style.prefix + word.config
        if word.default is not NEEDED and fact not in named:
            yield Statement(fact, word.default, source, stated=False)


def fixed(family: Family, config: Json, source: str) -> Iterator[Statement]:
    """Yield what config.json says that no model which Megatron-Core runs as *family* does."""
    style = family.megatron
    known = {} if style is None else {style.prefix + n: v for n, v in style.config.items()}
    for fact, allowed in known.items():
        value = looked_up(config, fact)
        if value is not None and not allows(allowed, value):
            yield Statement(fact, value, source)
            yield Statement(fact, allowed[0], f"Megatron-Core's models of `{family.name}`")


def allows(allowed: Iterable[object], value: object) -> bool:
    """Return whether *value* is one of *allowed*; true is not 1, a list is a tuple."""
    value = tuple(value) if isinstance(value, list) else value
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed)


def expected(style: MegatronStyle, fields: Json) -> dict[str, tuple[object, ...]]:
    """Return what the fields are that do not vary between models of a family."""
    routed = any(word.field == EXPERTS for word in style.words)
    routing = ROUTING if routed or fields.get(EXPERTS) is not None else {}
    own = {word.field for word in style.words}
    known = {**PLAIN, **routing, **style.fields}
    return {name: allowed for name, allowed in known.items() if name not in own}


def possible(families: Mapping[str, Family], record: Json) -> list[str]:
    """Return the model types that *record* may describe.

    Bridge and NeMo name a class, which tells most families; Megatron-LM's arguments tell what the
    model computes, and several families may compute the same.
    """
    named, fields = class_of(record), fields_of(record)
    told: dict[str, int] = {}
    for name, family in families.items():
        style = family.megatron
        if style is None or not _fits(style, fields):
            continue
        told[name] = max((len(one) for one in style.named if named.startswith(one)), default=0)
    told = dict(_by_layers(families, told, record))
    best = max(told.values(), default=0)
    if not best and named:
        by_class = {n for n in told if _provider(families[n]) == named}
        told = {name: 0 for name in told if name in by_class} or told
    found = [name for name, length in told.items() if length == best]
    readable = [name for name in found if _readable(families[name], fields)]
    return _signed(families, readable or found, fields)


def denies(family: Family, record: Json) -> bool:
    """Return whether *record* contradicts what is the same in all models of *family*."""
    return family.megatron is not None and not _fits(family.megatron, fields_of(record))


def _provider(family: Family) -> str:
    return family.megatron.provider.rpartition(".")[2] if family.megatron else ""


def _by_layers(
    families: Mapping[str, Family], told: Mapping[str, int], record: Json
) -> Iterator[tuple[str, int]]:
    """Yield what of *told* the function allows that builds the layers, where Bridge states one."""
    spec = model_of(record).get("transformer_layer_spec")
    named = spec.get(TARGET) if isinstance(spec, Mapping) else None
    own = {name: _own_layers(families[name]) for name in told}
    yield from (
        (name, length)
        for name, length in told.items()
        if named is None or own[name] == (named if named in own.values() else "")
    )


def _own_layers(family: Family) -> str:
    spec = family.megatron.spec if family.megatron else ""
    return spec if spec.startswith("megatron.bridge.") else ""


def _fits(style: MegatronStyle, fields: Json) -> bool:
    """Whether no field contradicts what is the same in all models of a family."""
    known = expected(style, fields).items()
    needed = [word for word in style.words if word.field == EXPERTS]
    if needed and fields.get(EXPERTS, 0) is None:
        return False
    return all(allows(allowed, fields[name]) for name, allowed in known if name in fields)


def _readable(family: Family, fields: Json) -> bool:
    """Whether the words of *family* have values in *fields* that they may have."""
    assert family.megatron is not None
    try:
        list(words_of(family.megatron, fields))
        rope_of(family.megatron, fields)
    except MappingError:
        return False
    return True


def _signed(families: Mapping[str, Family], names: list[str], fields: Json) -> list[str]:
    """Return those of *names* whose signs in config.json hold, and of these the special ones."""
    kept: list[str] = []
    for name in names:
        family = families[name]
        style = family.megatron
        assert style is not None
        told: dict[str, object] = {"model_type": style.model_type}
        for word, value in words_of(style, fields):
            told[word.config] = value
        kind = (rope_of(style, fields) or {}).get("rope_type")
        told["rope_type"] = None if kind == "default" else kind
        if not family.config_signs or any(holds(sign, told) for sign in family.config_signs):
            kept.append(name)
    general = {families[name].refines for name in kept}
    return [name for name in kept if name not in general]
