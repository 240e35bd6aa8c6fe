"""Detect model families from Megatron's records of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckptctl import formats
from ckptctl.catalog import Catalog
from ckptctl.errors import MappingError
from ckptctl.facts import MEGATRON
from ckptctl.facts.megatron import (
    EXPERTS,
    TARGET,
    allows,
    class_of,
    expected,
    fields_of,
    merged,
    model_of,
    read,
    stated,
)
from ckptctl.facts.rope import rope_of_megatron
from ckptctl.planner.config_facts import Json, TranslatedConfig
from ckptctl.planner.families.declarations import (
    VOCABULARY_PAD_MULTIPLE,
    MegatronStyle,
    matches_signs,
)
from ckptctl.planner.layouts import Family
from ckptctl.planner.mapping.detect import Candidate, detect_layouts


class Records:
    """Megatron's records of the model in a checkpoint."""

    def __init__(self, catalog: Catalog) -> None:
        self._record = merged(catalog.extensions.get(MEGATRON, {}).values())
        self._layout = formats.get(catalog.format).layout

    def candidates(
        self, known: Mapping[str, Family], shapes: Mapping[str, tuple[int, ...]], root: str
    ) -> list[Candidate]:
        """Return the recorded families whose keys match exactly."""
        found: list[Candidate] = []
        for name in possible(known, self._record) if self._record else ():
            one, told = {name: known[name]}, stated(known[name], self._record)
            fitting = detect_layouts(
                shapes, one, told, prefer=self._layout, is_user_specified=True, root=root
            )
            found += (c for c in fitting if c.is_exact)
        return found

    def contradict(self, family: Family) -> bool:
        """Return whether the records cannot describe a model of *family*."""
        return family.megatron is not None and not _fits(family.megatron, fields_of(self._record))

    def configuration(self, family: Family) -> Json | None:
        """Build config.json from the records, or return None if they state nothing."""
        found = stated(family, self._record)
        return TranslatedConfig(found) if found else None

    def state_padding(self, rows: int, size: int) -> bool:
        """Return whether the records confirm that *rows* are *size* entries plus padding."""
        told = self._record
        unit = self._count("make_vocab_size_divisible_by", VOCABULARY_PAD_MULTIPLE)
        unit *= self._count("tensor_model_parallel_size", 1)
        padded = told.get("padded_vocab_size")
        pads = padded is None and told.get("should_pad_vocab") is True
        if pads and told.get("vocab_size") == size:
            padded = -(-size // unit) * unit
        return padded == rows and rows - size < unit

    def _count(self, name: str, default: int) -> int:
        found = self._record.get(name)
        return found if type(found) is int and 0 < found <= 1 << 20 else default


def possible(families: Mapping[str, Family], record: Json) -> list[str]:
    """Return the families that *record* may describe.

    Bridge and NeMo name a class, which identifies most families. Megatron-LM's arguments only
    describe the computation, which several families may share.
    """
    named, fields = class_of(record), fields_of(record)
    told: dict[str, int] = {}
    for name, family in families.items():
        style = family.megatron
        if style is None or not _fits(style, fields):
            continue
        told[name] = max(
            (len(one) for one in style.class_prefixes if named.startswith(one)), default=0
        )
    told = dict(_by_layers(families, told, record))
    best = max(told.values(), default=0)
    if not best and named:
        styles = {name: families[name].megatron for name in told}
        by_class = {
            name
            for name, style in styles.items()
            if style and style.provider.rpartition(".")[2] == named
        }
        told = {name: 0 for name in told if name in by_class} or told
    found = [name for name, length in told.items() if length == best]
    readable = [name for name in found if _readable(families[name], fields)]
    return _signed(families, readable or found, fields)


def _by_layers(
    families: Mapping[str, Family], told: Mapping[str, int], record: Json
) -> Iterator[tuple[str, int]]:
    """Yield the candidates that fit the layer-spec function, if Bridge records one."""
    spec = model_of(record).get("transformer_layer_spec")
    named = spec.get(TARGET) if isinstance(spec, Mapping) else None
    specs = {name: style.layer_spec if (style := families[name].megatron) else "" for name in told}
    own = {n: spec if spec.startswith("megatron.bridge.") else "" for n, spec in specs.items()}
    yield from (
        (name, length)
        for name, length in told.items()
        if named is None or own[name] == (named if named in own.values() else "")
    )


def _fits(style: MegatronStyle, fields: Json) -> bool:
    """Return whether no field contradicts a value that all models of the family have."""
    known = expected(style, fields).items()
    needed = [fact for fact in style.facts if fact.megatron == EXPERTS]
    if needed and fields.get(EXPERTS, 0) is None:
        return False
    return all(allows(allowed, fields[name]) for name, allowed in known if name in fields)


def _readable(family: Family, fields: Json) -> bool:
    """Return whether all facts of *family* have valid values in *fields*."""
    assert family.megatron is not None
    try:
        list(read(family.megatron, fields))
        rope_of_megatron(family.megatron, fields)
    except MappingError:
        return False
    return True


def _signed(families: Mapping[str, Family], names: list[str], fields: Json) -> list[str]:
    """Return the families whose config.json signs match, without those refined by another."""
    kept: list[str] = []
    for name in names:
        family = families[name]
        style = family.megatron
        assert style is not None
        told: dict[str, object] = {"model_type": style.model_type}
        told |= {fact.config: value for fact, value in read(style, fields)}
        kind = (rope_of_megatron(style, fields) or {}).get("rope_type")
        told["rope_type"] = None if kind == "default" else kind
        if not family.config_signs or any(
            matches_signs(sign, told) for sign in family.config_signs
        ):
            kept.append(name)
    general = {families[name].refines for name in kept}
    return [name for name in kept if name not in general]
