"""Compare everything that describes a model, and apply ``--trust-assets``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from ckptctl import families
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
from ckptctl.errors import MAX_LISTED_NAMES, CkptError, MappingError, UsageError, spell_option
from ckptctl.facts import MEGATRON
from ckptctl.facts.contradictions import (
    Contradiction,
    Statement,
    contradictions,
    differences,
    exceeded,
    of_config,
    of_sizes,
    of_tensors,
    switched,
    unsaid,
)
from ckptctl.facts.layer_kinds import misfitting, misplaced, uncounted_kinds
from ckptctl.facts.params import of_params
from ckptctl.facts.tensor_facts import of_shapes
from ckptctl.notes import Notes
from ckptctl.numerics.quantized import dequantized, glanced
from ckptctl.planner.config_facts import Json, name_axis_size, with_rope_type
from ckptctl.planner.families.declarations import Signs as Sign
from ckptctl.planner.families.declarations import matches_signs
from ckptctl.planner.layouts import Family
from ckptctl.planner.mapping.detect import list_refined_families
from ckptctl.planner.mapping.matching import ModelTensors

Signs: TypeAlias = tuple[Sign, ...]

DESCRIBED_OTHERWISE = "the descriptions of the model contradict each other"
SHOWN_OTHERWISE = "the configuration and the tensors disagree"
WRONG = "with a wrong configuration, the same tensors produce different outputs"


class ContradictionError(MappingError):
    """Contradicting statements in the files that describe one model."""


def agree(
    family: Family | None,
    described: Sequence[ModelDescription],
    given: Mapping[str, int] | None = None,
    *,
    asked: str | None = None,
    tensors: ModelTensors | None = None,
    trust_assets: bool = False,
) -> Notes:
    """Compare every statement about a model with all others of the same fact.

    Notes list differences that do not change what the model computes, and the value chosen where
    ``--trust-assets`` decides.

    Args:
        family: The model's family, or None if unknown; params.json is then ignored.
        described: The files that describe the model.
        given: Sizes given by ``--set``.
        asked: The model type that the user named, or None.
        tensors: The model's tensors.
        trust_assets: Whether files of ``--assets`` take precedence.

    Raises:
        ContradictionError: Files contradict each other, or the tensors contradict them.
        MappingError: A file contains an unsupported value.
        UsageError: A file contradicts *given*.
    """
    by_file, found = _compared(family, described, given or {}, asked, tensors, trust_assets)
    undecided = [one for one in found if not (trust_assets and one.decided)]
    if undecided:
        raise _contradiction(undecided, described)
    notes = Notes()
    notes.add(*_notes(described, by_file))
    for one in found:
        others = " or ".join(str(other) for other in one.statements if other != one.decided)
        decision = f"{one.decided}, not {others}"
        notes.explain("decided", {one.fact: decision})
        notes.add(f"`{one.fact}`: {decision}")
    return notes


def _compared(
    family: Family | None,
    described: Sequence[ModelDescription],
    given: Mapping[str, int],
    asked: str | None,
    tensors: ModelTensors | None,
    trust_assets: bool = False,
) -> tuple[Sequence[Sequence[Statement]], tuple[Contradiction, ...]]:
    """Return the statements of each file in *described*, and the contradictions."""
    configs = [with_rope_type(one.content) for one in described if one.name == CONFIG]
    by_file = [[*_of_file(family, one, configs, asked)] for one in described]
    statements = [one for said in by_file for one in said]
    if family is not None and any(one.name == MEGATRON for one in described):
        statements += _beside_megatron(family, described)
    if family is not None:
        if given:
            _require_given(family, statements, given)
        if tensors is not None:
            statements += _of_tensors(family, tensors, [*statements])
    found = [*contradictions(statements)]
    decides = trust_assets and any(one.name == CONFIG and one.assets for one in described)
    for file in described:
        if file.name == CONFIG and file.complete and file.assets >= decides:
            found += exceeded(file.content, file.place)
            found += uncounted_kinds(file.content, file.place)
            if family is not None and tensors is not None:
                if family.kinds:
                    found += misplaced(family, file.content, file.place, tensors.matched)
                if family.layer_sizes:
                    found += misfitting(family, file.content, file.place, tensors)
    return by_file, tuple(found)


def contradictions_in(known: Model, files: Collection[str] = ()) -> tuple[Contradiction, ...]:
    """Return the contradictions among everything that describes a checkpoint's model.

    Every command uses this or :func:`agree`.

    Args:
        known: The model.
        files: Names of the description files to read; empty for all.

    Raises:
        MappingError: A file contains an unsupported value.
    """
    every = iterate_descriptions(known.catalog)
    described = tuple(one for one in every if not files or one.name in files)
    family, tensors = tensors_compared(known)
    return _compared(family, described, {}, known.request.model_type, tensors)[1]


def tensors_compared(known: Model) -> tuple[Family | None, ModelTensors | None]:
    """Return the family and the tensors to compare, or None if no table describes them.

    Quantized tensors that no table describes are replaced by their dequantized tensors.
    """
    if not known.exact and glanced(known.catalog).weights:
        documents = {CONFIG: known.config, "params.json": known.params}
        stated = {name: one for name, one in documents.items() if one is not None}
        try:
            plain = dequantized(known.catalog, "bfloat16")
            asked = ModelRequest(known.request.model_type, root=known.root)
            known = recognize_model(plain, stated, asked)
        except CkptError:  # other checks report the error
            return None, None
    if known.model_type is None or not known.pairs:
        return None, None
    family = families.family(known.pairs[0][0])
    layout = family.get_layout(known.pairs[0][1])
    shapes = {name: one.shape for name, one in known.tensors.items()}
    return family, ModelTensors(layout, known.match_keys(family, layout, shapes), shapes)


def disagreements(
    family: Family, described: Sequence[ModelDescription]
) -> tuple[Contradiction, ...]:
    """Return the contradictions between *described* files, of one model or of two."""
    configs = [with_rope_type(one.content) for one in described if one.name == CONFIG]
    by_file = (_of_file(family, one, configs, family.name) for one in described)
    return contradictions(said for file in by_file for said in file)


def _beside_megatron(family: Family, described: Sequence[ModelDescription]) -> Iterator[Statement]:
    """Yield the implied values of a config.json next to records of Megatron."""
    from ckptctl.facts.megatron import fixed, silent

    for file in (one for one in described if one.name == CONFIG):
        yield from silent(family, file.content, file.place)
        said = fixed(family, file.content, file.place)
        yield from (replace(one, trusted=True) for one in said) if file.assets else said


def _of_file(
    family: Family | None, file: ModelDescription, configs: Sequence[Json], asked: str | None
) -> Iterator[Statement]:
    """Yield the statements of one file."""
    said: Iterable[Statement] = ()
    if file.name == CONFIG:
        said = of_config(family, file.content, file.place)
        said = (one for one in said if file.complete or not one.default)
    elif file.name == ARGUMENTS:
        said = (Statement(name, value, file.place) for name, value in file.content.items())
    elif file.name == MEGATRON:
        from ckptctl.facts.megatron import of_megatron

        said = () if family is None else of_megatron(family, file.content, file.place)
    elif family is not None:
        writer = family if asked else _writer(family, with_rope_type(file.content), configs)
        other = Statement("model_type", f"not {family.name}", file.place)
        said = of_params(writer, file.content, file.place) if writer else (other,)
    yield from (replace(one, trusted=True) for one in said) if file.assets else said


def _writer(family: Family, params: Json, configs: Sequence[Json]) -> Family | None:
    """Return the family of *params*, which is *family* or related to it by refinement.

    Sizes that identify a release (Llama 3.2) decide first; otherwise a config.json does.
    """
    known = families.load_families()
    below = [one for one in known.values() if family.name in list_refined_families(one, known)]
    below.sort(key=lambda one: -len(list_refined_families(one, known)))
    above = [known[name] for name in list_refined_families(family, known)]
    possible = [one for one in below if any(_holds(one.config_signs, file) for file in configs)]
    orders = (
        (one for one in below if _holds(one.params_signs, params)),
        (one for one in (*possible, family) if _holds(_sizeless(one), params)),
        (one for one in (family, *above) if _holds(one.params_signs, params)),
    )
    return next((one for order in orders for one in order), None)


def _sizeless(family: Family) -> Signs:
    """Return the identifying keys of a family's params.json other than sizes."""
    sizes = {name for _, name in family.sizes.values()}
    found = ({k: v for k, v in sign.items() if k not in sizes} for sign in family.params_signs)
    return tuple(sign for sign in found if sign)


def _holds(signs: Signs, values: Json) -> bool:
    return any(matches_signs(sign, values) for sign in signs)


def _require_given(
    family: Family, statements: Sequence[Statement], given: Mapping[str, int]
) -> None:
    """Raise if a ``--set`` contradicts a file, since user values are never overruled."""
    said = [*of_sizes(family, given)]
    sources = {one.source for one in said}
    for found in contradictions([*said, *(one for one in statements if one.stated)]):
        options = [one for one in found.statements if one.source in sources]
        if options:
            other = next(one for one in found.statements if one is not options[0])
            raise UsageError(
                f"{options[0].source} contradicts {other.source}",
                why=f"it states `{found.fact}` = {other.value}",
                hint=f"use {spell_option('--set')} only for sizes that no file states",
            )


def _of_tensors(
    family: Family, tensors: ModelTensors, statements: Sequence[Statement]
) -> Iterator[Statement]:
    """Yield statements of the tensors about sizes, and about switches in *statements*."""
    rows = None
    if tensors.layout.name in PADDED_LAYOUTS:
        # late, for a fast start: most layouts have no padding
        from ckptctl.conversion.recognition.vocabulary import find_rows_with_padding

        size = next(
            (
                one.value
                for one in statements
                if one.fact == name_axis_size(family, VOCABULARY_AXIS)
            ),
            None,
        )
        rows = find_rows_with_padding(tensors, size if isinstance(size, int) else None)
    yield from of_shapes(
        family, tensors, statements, {} if rows is None else {VOCABULARY_AXIS: rows}
    )
    switches = switched(family)
    if not switches.keys().isdisjoint(one.fact for one in statements):
        yield from of_tensors(
            switches, {name.partition(".")[0] for name in tensors.matched.group_by_name}
        )


def _contradiction(
    found: Sequence[Contradiction], described: Sequence[ModelDescription]
) -> ContradictionError:
    more = f" and {len(found) - MAX_LISTED_NAMES:,} more" if len(found) > MAX_LISTED_NAMES else ""
    assets = any(file.assets for file in described)
    sources = {said.source for one in found for said in one.statements}
    if all(one.decided for one in found):
        trust, given = spell_option("--trust-assets"), spell_option("--assets")
        hint = f"pass {trust} to use the values in {given}"
    elif assets:
        hint = "correct the file that is wrong"
    else:
        trusted = spell_option("--assets DIR", "--trust-assets")
        hint = f"pass {trusted} to use the correct files in DIR"
    return ContradictionError(
        SHOWN_OTHERWISE if all(one.is_shown for one in found) else DESCRIBED_OTHERWISE,
        where=" and ".join(one.place for one in described if one.place in sources),
        why="; ".join(map(str, found[:MAX_LISTED_NAMES])) + more + f"; {WRONG}",
        hint=hint,
    )


def _notes(
    described: Sequence[ModelDescription], by_file: Sequence[Sequence[Statement]]
) -> Iterator[str]:
    """Yield notes on differences between config.json files that change no logits."""
    configs = [pair for pair in zip(described, by_file, strict=True) if pair[0].name == CONFIG]
    for file, said in configs:
        for other, theirs in configs:
            if file.assets or not other.assets:
                continue
            differ = differences(file.content, other.content)
            for fact, (one, two) in differ.items():
                yield f"`{fact}` is {one!r} in {file.place} and {two!r} in {other.place}"
            alone = unsaid(said, theirs)
            if alone:
                shown = ", ".join(
                    f"`{one.fact}` ({one.value!r})" for one in alone[:MAX_LISTED_NAMES]
                )
                more = (
                    f" and {len(alone) - MAX_LISTED_NAMES:,} more"
                    if len(alone) > MAX_LISTED_NAMES
                    else ""
                )
                yield f"{file.place} states {shown}{more}, but {other.place} does not"
