"""Detect model families from Megatron's records of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckptctl import formats
from ckptctl.catalog import Catalog
from ckptctl.errors import MappingError
from ckptctl.facts import MEGATRON
from ckptctl.facts.megatron import (
    EXPERT_COUNT_FIELD,
    TARGET_KEY,
    build_partial_config,
    extract_megatron_fields,
    get_class_name,
    get_expected_fields,
    get_model_section,
    is_allowed,
    iterate_megatron_facts,
    merge_records,
)
from ckptctl.facts.rope import read_megatron_rope
from ckptctl.planner.config_facts import Json, TranslatedConfig
from ckptctl.planner.families.declarations import (
    VOCABULARY_PAD_MULTIPLE,
    MegatronStyle,
    matches_conditions,
)
from ckptctl.planner.layouts import Family
from ckptctl.planner.mapping.detect import Candidate, detect_layouts


class MegatronRecords:
    """Records that Megatron-based programs saved about the model in a checkpoint."""

    def __init__(self, catalog: Catalog) -> None:
        self._record = merge_records(catalog.extensions.get(MEGATRON, {}).values())
        self._layout = formats.get_format(catalog.format).layout

    def find_candidates(
        self, known_families: Mapping[str, Family], shapes: Mapping[str, tuple[int, ...]], root: str
    ) -> list[Candidate]:
        """Return exact layout candidates for the families that the records may describe."""
        candidates: list[Candidate] = []
        for name in find_possible_families(known_families, self._record) if self._record else ():
            single_family, config = (
                {name: known_families[name]},
                build_partial_config(known_families[name], self._record),
            )
            fitting = detect_layouts(
                shapes,
                single_family,
                config,
                prefer=self._layout,
                is_user_specified=True,
                root=root,
            )
            candidates += (candidate for candidate in fitting if candidate.is_exact)
        return candidates

    def can_describe(self, family: Family) -> bool:
        """See :meth:`RecordedFacts.can_describe`."""
        return family.megatron is not None

    def contradicts_family(self, family: Family) -> bool:
        """Return whether the records contradict values that all models of *family* have."""
        return family.megatron is not None and not _is_consistent(
            family.megatron, extract_megatron_fields(self._record)
        )

    def build_config(self, family: Family) -> Json | None:
        """Build a partial config.json from the records, or return None if they state no facts."""
        config = build_partial_config(family, self._record)
        return TranslatedConfig(config) if config else None

    def confirms_padding(self, rows: int, size: int) -> bool:
        """Return whether the records confirm that *rows* is the vocabulary *size* plus padding."""
        record = self._record
        unit = self._read_count("make_vocab_size_divisible_by", VOCABULARY_PAD_MULTIPLE)
        unit *= self._read_count("tensor_model_parallel_size", 1)
        padded_size = record.get("padded_vocab_size")
        is_padded = padded_size is None and record.get("should_pad_vocab") is True
        if is_padded and record.get("vocab_size") == size:
            padded_size = -(-size // unit) * unit
        return padded_size == rows and rows - size < unit

    def _read_count(self, name: str, default: int) -> int:
        value = self._record.get(name)
        return value if type(value) is int and 0 < value <= 1 << 20 else default


def find_possible_families(families: Mapping[str, Family], record: Json) -> list[str]:
    """Return the names of the families that *record* may describe.

    Bridge and NeMo name a class, which identifies most families. Megatron-LM's arguments only
    describe the computation, which several families may share.
    """
    class_name, fields = get_class_name(record), extract_megatron_fields(record)
    match_lengths: dict[str, int] = {}
    for name, family in families.items():
        style = family.megatron
        if style is None or not (class_name or style.has_arguments):
            continue
        if not _is_consistent(style, fields):
            continue
        match_lengths[name] = max(
            (len(prefix) for prefix in style.class_prefixes if class_name.startswith(prefix)),
            default=0,
        )
    match_lengths = dict(_filter_by_layer_spec(families, match_lengths, record))
    best = max(match_lengths.values(), default=0)
    if not best and class_name:
        styles = {name: families[name].megatron for name in match_lengths}
        by_class = {
            name
            for name, style in styles.items()
            if style and style.provider.rpartition(".")[2] == class_name
        }
        match_lengths = {name: 0 for name in match_lengths if name in by_class} or match_lengths
    best_names = [name for name, length in match_lengths.items() if length == best]
    readable = [name for name in best_names if _has_valid_values(families[name], fields)]
    return _select_families_matching_config(families, readable or best_names, fields)


def _filter_by_layer_spec(
    families: Mapping[str, Family], match_lengths: Mapping[str, int], record: Json
) -> Iterator[tuple[str, int]]:
    """Yield the candidates whose layer spec fits *record*, or all if *record* states no spec."""
    spec = get_model_section(record).get("transformer_layer_spec")
    recorded_function = spec.get(TARGET_KEY) if isinstance(spec, Mapping) else None
    specs = {
        name: style.layer_spec if (style := families[name].megatron) else ""
        for name in match_lengths
    }
    function_by_family = {
        n: spec if spec.startswith("megatron.bridge.") else "" for n, spec in specs.items()
    }
    yield from (
        (name, length)
        for name, length in match_lengths.items()
        if recorded_function is None
        or function_by_family[name]
        == (recorded_function if recorded_function in function_by_family.values() else "")
    )


def _is_consistent(style: MegatronStyle, fields: Json) -> bool:
    """Return whether *fields* agree with the values that all models of the family have."""
    expected_values = get_expected_fields(style, fields).items()
    needed = [fact for fact in style.facts if fact.megatron == EXPERT_COUNT_FIELD]
    if needed and not style.has_optional_experts and fields.get(EXPERT_COUNT_FIELD, 0) is None:
        return False
    return all(
        is_allowed(allowed, fields[name]) for name, allowed in expected_values if name in fields
    )


def _has_valid_values(family: Family, fields: Json) -> bool:
    """Return whether all facts of *family* have valid values in *fields*."""
    assert family.megatron is not None
    try:
        list(iterate_megatron_facts(family.megatron, fields))
        read_megatron_rope(family.megatron, fields)
    except MappingError:
        return False
    return True


def _select_families_matching_config(
    families: Mapping[str, Family], family_names: list[str], fields: Json
) -> list[str]:
    """Select families whose config.json conditions hold.

    A family is excluded if another matching family refines it.
    """
    matching_names: list[str] = []
    for name in family_names:
        family = families[name]
        style = family.megatron
        assert style is not None
        config_values: dict[str, object] = {"model_type": style.model_type, **style.extra_config}
        config_values |= {
            fact.config: value for fact, value in iterate_megatron_facts(style, fields)
        }
        rope_type = (read_megatron_rope(style, fields) or {}).get("rope_type")
        config_values["rope_type"] = None if rope_type == "default" else rope_type
        if not family.config_signs or any(
            matches_conditions(sign, config_values) for sign in family.config_signs
        ):
            matching_names.append(name)
    refined_names = {families[name].refines for name in matching_names}
    return [name for name in matching_names if name not in refined_names]
