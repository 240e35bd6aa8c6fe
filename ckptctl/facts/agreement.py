"""Compare all files, options and tensors that describe a model, and apply ``--trust-assets``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from ckptctl import families
from ckptctl.catalog import Finding
from ckptctl.conversion.recognition.model import (
    ARGUMENTS,
    CONFIG,
    PADDED_LAYOUTS,
    VOCABULARY_AXIS,
    Model,
    ModelDescription,
    ModelRequest,
    iterate_descriptions,
    recognize_model,
)
from ckptctl.errors import MAX_LISTED_NAMES, CkptError, MappingError, UsageError, format_option
from ckptctl.facts import MEGATRON
from ckptctl.facts.contradictions import (
    Contradiction,
    Statement,
    compare_logit_neutral_keys,
    find_contradicting_facts,
    find_exceeded_limits,
    find_switch_statements,
    list_unmatched_statements,
    map_switches_to_tensors,
    read_config_statements,
    read_size_statements,
)
from ckptctl.facts.layer_kinds import (
    find_kind_mismatches,
    find_size_mismatches,
    find_wrong_list_lengths,
)
from ckptctl.facts.params import read_params_statements
from ckptctl.facts.tensor_facts import find_contradicting_sizes, find_shape_conflict
from ckptctl.notes import Notes
from ckptctl.numerics.quantized import dequantize_catalog, survey_leniently
from ckptctl.planner.config_facts import Json, add_rope_fields, get_size_field
from ckptctl.planner.families.declarations import Conditions as Sign
from ckptctl.planner.families.declarations import matches_conditions
from ckptctl.planner.layouts import Family
from ckptctl.planner.mapping.detect import list_ancestor_families
from ckptctl.planner.mapping.matching import ModelTensors
from ckptctl.verdict import Severity

ConfigConditions: TypeAlias = tuple[Sign, ...]

FILES_DISAGREE = "the descriptions of the model contradict each other"
TENSORS_DISAGREE = "the configuration and the tensors disagree"
SHAPES_DISAGREE = "the shapes of the tensors contradict each other"
WRONG_CONFIG_RISK = "with a wrong configuration, the same tensors produce different outputs"


class ContradictionError(MappingError):
    """Error for files that describe one model and contradict each other or the tensors."""


def compare_statements(
    family: Family | None,
    described: Sequence[ModelDescription],
    given_sizes: Mapping[str, int] | None = None,
    *,
    model_type: str | None = None,
    tensors: ModelTensors | None = None,
    trust_assets: bool = False,
) -> Notes:
    """Compare all statements about the facts of a model, and raise if any contradict.

    The returned notes list differences that do not change the logits, and the values that
    ``--trust-assets`` selected.

    Args:
        family: The model's family, or None if it is unknown, in which case params.json is ignored.
        described: The files that describe the model.
        given_sizes: Sizes given by ``--set``.
        model_type: Value of ``--model-type``, or None if it is not set.
        tensors: The model's tensors, or None to compare only files.
        trust_assets: Whether files of ``--assets`` take precedence.

    Raises:
        ContradictionError: Files contradict each other, or the tensors contradict them.
        MappingError: A file contains an unsupported value.
        UsageError: A file contradicts *given_sizes*.
    """
    by_file, contradictions_found = _find_contradictions(
        family, described, given_sizes or {}, model_type, tensors, trust_assets
    )
    undecided = [
        contradiction
        for contradiction in contradictions_found
        if not (trust_assets and contradiction.trusted_statement)
    ]
    if undecided:
        raise _contradiction_error(undecided, described)
    notes = Notes()
    notes.add(*_note_differences(described, by_file))
    for contradiction in contradictions_found:
        other_values = " or ".join(
            str(statement)
            for statement in contradiction.statements
            if statement != contradiction.trusted_statement
        )
        decision = f"{contradiction.trusted_statement}, not {other_values}"
        notes.explain("decided", {contradiction.fact: decision})
        notes.add(f"`{contradiction.fact}`: {decision}")
    return notes


def _find_contradictions(
    family: Family | None,
    described: Sequence[ModelDescription],
    given_sizes: Mapping[str, int],
    model_type: str | None,
    tensors: ModelTensors | None,
    trust_assets: bool = False,
) -> tuple[Sequence[Sequence[Statement]], tuple[Contradiction, ...]]:
    """Return the statements of each file in *described*, and all contradictions."""
    configs = [add_rope_fields(item.content) for item in described if item.name == CONFIG]
    by_file = [[*_read_statements(family, item, configs, model_type)] for item in described]
    statements = [item for file_statements in by_file for item in file_statements]
    if family is not None and any(item.name == MEGATRON for item in described):
        statements += _iterate_statements_for_megatron(family, described)
    if family is not None:
        if given_sizes:
            _require_set_sizes_agree(family, statements, given_sizes)
        if tensors is not None:
            statements += _read_tensor_statements(family, tensors, [*statements])
    contradictions_found = [*find_contradicting_facts(statements)]
    assets_decide = trust_assets and any(item.name == CONFIG and item.assets for item in described)
    for file in described:
        if file.name == CONFIG and file.complete and file.assets >= assets_decide:
            contradictions_found += find_exceeded_limits(file.content, file.place)
            contradictions_found += find_wrong_list_lengths(file.content, file.place, family)
            if family is not None and tensors is not None:
                if family.kinds:
                    contradictions_found += find_kind_mismatches(
                        family, file.content, file.place, tensors.matched
                    )
                if family.layer_sizes:
                    contradictions_found += find_size_mismatches(
                        family, file.content, file.place, tensors
                    )
    return by_file, tuple(contradictions_found)


def find_contradictions(
    model: Model, comparable: Model | None, files: Collection[str] = ()
) -> tuple[Contradiction, ...]:
    """Return all contradictions among the files, options and tensors that describe a model.

    Every command uses this or :func:`compare_statements`.

    Args:
        model: The model.
        comparable: Result of :func:`recognize_comparable`.
        files: Names of the files to compare, or empty to compare all files that describe the model.

    Raises:
        MappingError: A file contains an unsupported value.
    """
    descriptions = iterate_descriptions(model.catalog)
    described = tuple(file for file in descriptions if not files or file.name in files)
    family, tensors = find_comparable_tensors(comparable)
    return _find_contradictions(family, described, {}, model.request.model_type, tensors)[1]


def find_comparable_tensors(
    comparable: Model | None, names: Collection[str] | None = None
) -> tuple[Family | None, ModelTensors | None]:
    """Return the family and the tensors to compare, or None for both if no family matches them.

    Args:
        comparable: Result of :func:`recognize_comparable`.
        names: Names of the tensors with shapes to compare, or None for all tensors.
    """
    if comparable is None or comparable.model_type is None or not comparable.pairs:
        return None, None
    return _match_pair(comparable, *comparable.pairs[0], names)


def find_conflicting_shapes(
    comparable: Model | None, names: Collection[str] | None = None
) -> Finding | None:
    """Return why shapes of a model's tensors fit no family that has the names, or None.

    The finding is a warning if the model has tensors that the families do not have, since other
    tensors may then have other shapes, too, as in the draft models of EAGLE-3.

    Args:
        comparable: Result of :func:`recognize_comparable`.
        names: Names of the tensors with shapes to compare, or None for all tensors.
    """
    if comparable is None:
        return None
    conflict = None
    for name, layout in comparable.pairs:
        conflict = find_shape_conflict(*_match_pair(comparable, name, layout, names))
        if conflict is None:
            return None
    if conflict is None:
        return None
    severity: Severity = (
        "warning" if comparable.list_unknown_keys(comparable.tensors) else "unknown"
    )
    return Finding(SHAPES_DISAGREE, f"{conflict.where}: {conflict.why}", severity, basis="model")


def _match_pair(
    model: Model, name: str, layout_name: str, names: Collection[str] | None
) -> tuple[Family, ModelTensors]:
    family = families.family(name)
    layout = family.get_layout(layout_name)
    shapes = {key: item.shape for key, item in model.tensors.items()}
    matched = model.match_keys(family, layout, shapes)
    if names is not None:
        shapes = {key: shape for key, shape in shapes.items() if key in names}
    return family, ModelTensors(layout, matched, shapes)


def recognize_comparable(model: Model) -> Model | None:
    """Recognize the model after dequantization if no table has the names of quantized tensors.

    The result is None if the tensors cannot be dequantized.
    """
    if not model.exact and survey_leniently(model.catalog).weights:
        documents = {CONFIG: model.config, "params.json": model.params}
        stated_documents = {name: item for name, item in documents.items() if item is not None}
        try:
            dequantized_catalog = dequantize_catalog(model.catalog, "bfloat16")
            request = ModelRequest(model.request.model_type, root=model.root)
            return recognize_model(dequantized_catalog, stated_documents, request)
        except CkptError:  # other checks report the error
            return None
    return model


def compare_files(
    family: Family, described: Sequence[ModelDescription]
) -> tuple[Contradiction, ...]:
    """Return the contradictions between files, which may describe one model or two models."""
    configs = [add_rope_fields(item.content) for item in described if item.name == CONFIG]
    by_file = (_read_statements(family, item, configs, family.name) for item in described)
    return find_contradicting_facts(statement for file in by_file for statement in file)


def _iterate_statements_for_megatron(
    family: Family, described: Sequence[ModelDescription]
) -> Iterator[Statement]:
    """Yield statements of config.json files that only matter if Megatron records exist."""
    from ckptctl.facts.megatron import find_family_mismatches, iterate_default_statements

    for file in (item for item in described if item.name == CONFIG):
        yield from iterate_default_statements(family, file.content, file.place)
        statements = find_family_mismatches(family, file.content, file.place)
        yield from (
            (replace(item, trusted=True) for item in statements) if file.assets else statements
        )


def _read_statements(
    family: Family | None, file: ModelDescription, configs: Sequence[Json], model_type: str | None
) -> Iterator[Statement]:
    """Yield the statements of a config.json, params.json, Megatron record or argument list."""
    statements: Iterable[Statement] = ()
    if file.name == CONFIG:
        statements = read_config_statements(family, file.content, file.place)
        statements = (
            statement for statement in statements if file.complete or not statement.default_owner
        )
    elif file.name == ARGUMENTS:
        statements = (Statement(name, value, file.place) for name, value in file.content.items())
    elif file.name == MEGATRON:
        from ckptctl.facts.megatron import read_megatron_statements

        statements = read_megatron_statements(family, file.content, file.place)
    elif family is not None:
        writer = (
            family
            if model_type
            else _find_params_family(family, add_rope_fields(file.content), configs)
        )
        mismatch = Statement("model_type", f"not {family.name}", file.place)
        statements = (
            read_params_statements(writer, file.content, file.place) if writer else (mismatch,)
        )
    yield from (
        (replace(statement, trusted=True) for statement in statements)
        if file.assets
        else statements
    )


def _find_params_family(family: Family, params: Json, configs: Sequence[Json]) -> Family | None:
    """Return the family of a params.json, which is *family* or related to it by refinement.

    Sizes in *params* that identify a release, such as Llama 3.2, take precedence over *configs*.
    """
    known_families = families.load_families()
    refinements = [
        candidate
        for candidate in known_families.values()
        if family.name in list_ancestor_families(candidate, known_families)
    ]
    refinements.sort(key=lambda candidate: -len(list_ancestor_families(candidate, known_families)))
    refined_families = [
        known_families[name] for name in list_ancestor_families(family, known_families)
    ]
    possible = [
        candidate
        for candidate in refinements
        if any(_matches_any_condition(candidate.config_signs, file) for file in configs)
    ]
    orders = (
        (
            candidate
            for candidate in refinements
            if _matches_any_condition(candidate.params_signs, params)
        ),
        (
            candidate
            for candidate in (*possible, family)
            if _matches_any_condition(_drop_size_conditions(candidate), params)
        ),
        (
            candidate
            for candidate in (family, *refined_families)
            if _matches_any_condition(candidate.params_signs, params)
        ),
    )
    return next((candidate for order in orders for candidate in order), None)


def _drop_size_conditions(family: Family) -> ConfigConditions:
    """Return the conditions on a family's params.json, without the conditions on sizes."""
    sizes = {name for _, name in family.sizes.values()}
    remaining = (
        {k: v for k, v in condition.items() if k not in sizes} for condition in family.params_signs
    )
    return tuple(condition for condition in remaining if condition)


def _matches_any_condition(conditions: ConfigConditions, values: Json) -> bool:
    return any(matches_conditions(condition, values) for condition in conditions)


def _require_set_sizes_agree(
    family: Family, statements: Sequence[Statement], given_sizes: Mapping[str, int]
) -> None:
    """Raise if a size from ``--set`` contradicts a file."""
    given_statements = [*read_size_statements(family, given_sizes)]
    sources = {statement.source for statement in given_statements}
    for contradiction in find_contradicting_facts(
        [*given_statements, *(statement for statement in statements if statement.is_explicit)]
    ):
        options = [
            statement for statement in contradiction.statements if statement.source in sources
        ]
        if options:
            contradicting = next(
                statement for statement in contradiction.statements if statement is not options[0]
            )
            raise UsageError(
                f"{options[0].source} contradicts {contradicting.source}",
                why=f"it states `{contradiction.fact}` = {contradicting.value}",
                hint=f"use {format_option('--set')} only for sizes that no file states",
            )


def _read_tensor_statements(
    family: Family, tensors: ModelTensors, statements: Sequence[Statement]
) -> Iterator[Statement]:
    """Yield the facts that the tensors show: sizes, and switches that *statements* mention."""
    rows = None
    if tensors.layout.name in PADDED_LAYOUTS:
        # late, for a fast start: most layouts have no padding
        from ckptctl.conversion.recognition.vocabulary import count_rows_with_padding

        size = next(
            (
                statement.value
                for statement in statements
                if statement.fact == get_size_field(family, VOCABULARY_AXIS)
            ),
            None,
        )
        rows = count_rows_with_padding(tensors, size if isinstance(size, int) else None)
    yield from find_contradicting_sizes(
        family, tensors, statements, {} if rows is None else {VOCABULARY_AXIS: rows}
    )
    switches = map_switches_to_tensors(family)
    if not switches.keys().isdisjoint(statement.fact for statement in statements):
        yield from find_switch_statements(
            switches, {name.partition(".")[0] for name in tensors.matched.group_by_name}
        )


def _contradiction_error(
    contradictions_found: Sequence[Contradiction], described: Sequence[ModelDescription]
) -> ContradictionError:
    remaining = (
        f" and {len(contradictions_found) - MAX_LISTED_NAMES:,} more"
        if len(contradictions_found) > MAX_LISTED_NAMES
        else ""
    )
    assets = any(file.assets for file in described)
    sources = {statement.source for item in contradictions_found for statement in item.statements}
    if all(item.trusted_statement for item in contradictions_found):
        trust_option, assets_option = format_option("--trust-assets"), format_option("--assets")
        hint = f"pass {trust_option} to use the values in {assets_option}"
    elif assets:
        hint = "correct the file that is wrong"
    else:
        options = format_option("--assets DIR", "--trust-assets")
        hint = f"pass {options} to use the correct files in DIR"
    return ContradictionError(
        TENSORS_DISAGREE
        if all(item.tensors_contradict_file for item in contradictions_found)
        else FILES_DISAGREE,
        where=" and ".join(item.place for item in described if item.place in sources),
        why="; ".join(map(str, contradictions_found[:MAX_LISTED_NAMES]))
        + remaining
        + f"; {WRONG_CONFIG_RISK}",
        hint=hint,
    )


def _note_differences(
    described: Sequence[ModelDescription], by_file: Sequence[Sequence[Statement]]
) -> Iterator[str]:
    """Yield notes on differences between config.json files that do not affect logits."""
    configs = [pair for pair in zip(described, by_file, strict=True) if pair[0].name == CONFIG]
    for file, statements in configs:
        for other_file, other_statements in configs:
            if file.assets or not other_file.assets:
                continue
            differ = compare_logit_neutral_keys(file.content, other_file.content)
            for fact, (first_value, second_value) in differ.items():
                yield (
                    f"`{fact}` is {first_value!r} in {file.place} and {second_value!r} in "
                    f"{other_file.place}"
                )
            unmatched = list_unmatched_statements(statements, other_statements)
            if unmatched:
                shown = ", ".join(
                    f"`{first_value.fact}` ({first_value.value!r})"
                    for first_value in unmatched[:MAX_LISTED_NAMES]
                )
                remaining = (
                    f" and {len(unmatched) - MAX_LISTED_NAMES:,} more"
                    if len(unmatched) > MAX_LISTED_NAMES
                    else ""
                )
                yield f"{file.place} states {shown}{remaining}, but {other_file.place} does not"
