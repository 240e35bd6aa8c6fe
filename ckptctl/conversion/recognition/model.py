"""Recognition of the model in a checkpoint, with its prefix, family and layout."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

from ckptctl import families, formats
from ckptctl.catalog import Blob, Catalog, Path, TensorEntry
from ckptctl.conversion.recognition.roots import (
    ModelLeaves,
    has_all_weights,
    list_container_prefixes,
    list_possible_roots,
    list_subtree_prefixes,
    parse_root,
    select_model,
)
from ckptctl.errors import (
    MAX_ALTERNATIVES,
    MappingError,
    UnmappedTensorError,
    find_nearest,
    format_alternatives,
    format_model_types,
    format_option,
    quote_names,
)
from ckptctl.formats.base import RecordedFacts
from ckptctl.formats.sidecar_files import CONFIG_FILES
from ckptctl.options import require_choice
from ckptctl.planner.config_facts import (
    SUBMODEL_KEYS,
    Json,
    TranslatedConfig,
    has_tied_embeddings,
    read_layer_lists,
    read_sizes,
)
from ckptctl.planner.families.facts import MODEL_ARGUMENT_KEYS
from ckptctl.planner.layouts import HF, Family, Layout, is_base_layout
from ckptctl.planner.mapping.adapters import has_adapter_factors
from ckptctl.planner.mapping.detect import (
    Candidate,
    detect_layouts,
    list_ancestor_families,
    list_families_matching_configs,
)
from ckptctl.planner.mapping.matching import MatchedKeys, match_keys
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

Candidates: TypeAlias = Sequence[Candidate]
MAX_SHOWN_CANDIDATES = 12


NO_REFERENCE, DEFAULT_REFERENCE = "none", "default"
CONFIG, ARGUMENTS = "config.json", "arguments"
HYPER_PARAMETERS = "hyper_parameters"
CONFIG_HOLDERS = ("config", "model_config", "model", "model_args", "cfg")
"""Keys in Lightning's ``hyper_parameters`` that may contain the model's configuration."""
VOCABULARY_AXIS = "v"
"""Name of the axis that indexes the rows of the vocabulary."""
PADDED_LAYOUTS = ("mcore", "mcore-local")
"""Layouts of Megatron-Core, which pads the vocabulary."""


class WrongTypeError(MappingError):
    """The model type that the user names contradicts config.json."""


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """File or stored value that describes the model.

    Attributes:
        name: ``config.json``, ``params.json``, ``arguments`` (with config.json's keys) or
            ``megatron`` (with Megatron's keys).
        place: Text that identifies the file or value in messages.
        content: Parsed JSON object.
        assets: Whether the file is in the folder that ``--assets`` names.
        complete: Whether a missing key means that transformers' default applies, as in config.json.
            False for training arguments, which may omit other values.
    """

    name: str
    place: str
    content: Json
    assets: bool = False
    complete: bool = True


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """Properties of the model that the user sets, or None to detect them.

    Attributes:
        model_type: Name of the family.
        layout: Name of the layout of the model's tensors.
        root: Prefix of the model's tensor names in the checkpoint.
        sizes: Axis sizes and numbers of layers, by name.
        reference: Name of the reference that determines the tensors of a model without a table,
            ``default`` for one that is installed, or ``none``.
    """

    model_type: str | None = None
    layout: str | None = None
    root: str | None = None
    sizes: Mapping[str, int] | None = None
    reference: str = NO_REFERENCE


DETECT_ALL = ModelRequest()


@dataclass(frozen=True)
class Model:
    """Model recognized in a checkpoint. Costly properties are computed on first use.

    Attributes:
        catalog: Catalog of the checkpoint.
        request: Properties of the model that the user set.
        documents: Parsed config.json and params.json, by file name.
        described: All descriptions of the model, which must agree for a change of layout.
        model_type: Name of the family, or None unless exactly one family matches.
        candidates: Names of all families that match.
        layout: Name of the layout, or None unless exactly one layout of a known family matches.
        alike: Other layouts that have the same tensor names and axis orders as *layout*.
        evidence: Description of each candidate, for messages.
        root: Prefix of the model's tensor names in the checkpoint, ending with a dot, or an empty
            string if the names have no prefix.
        exact: Whether every key of the model is known to the family and no key is missing.
        config: Parsed config.json, or facts recorded elsewhere under the same keys, or None.
        params: Parsed params.json, or None.
        inner_models: If no family matches at *root*, the prefixes of models elsewhere in the
            checkpoint, with the families that match there.
        pairs: Matching pairs of family and layout; equivalent layouts are listed once.
        matched: Matched keys of the model, by layout.
        contradicted_families: Families that would match if recorded facts did not contradict them.
        dequantized_pairs: If there are no *pairs*, the pairs of family and layout that match if
            quantized tensors are replaced by the weights that they store. ``select_tensors`` adds
            them.
    """

    catalog: Catalog = field(repr=False, compare=False)
    request: ModelRequest
    documents: Mapping[str, Json] = field(repr=False, compare=False)
    model_type: str | None = None
    candidates: tuple[str, ...] = ()
    layout: str | None = None
    alike: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    root: str = ""
    exact: bool = False
    config: Json | None = None
    params: Json | None = None
    inner_models: tuple[tuple[str, tuple[str, ...]], ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()
    matched: Mapping[Layout, MatchedKeys] = field(default_factory=dict, repr=False, compare=False)
    contradicted_families: tuple[str, ...] = ()
    dequantized_pairs: tuple[tuple[str, str], ...] = ()
    described: tuple[ModelDescription, ...] = field(default=(), repr=False, compare=False)

    @cached_property
    def selection(self) -> ModelLeaves:
        """Tensors and other values of the model, and the names of leaves outside the model."""
        return select_model(self.catalog, self.root)

    @cached_property
    def is_adapter(self) -> bool:
        """Whether the checkpoint is an adapter, which contains low-rank factors."""
        return has_adapter_factors(self.catalog.tensors)

    @property
    def tensors(self) -> Mapping[str, TensorEntry]:
        """Tensors of the model, by name without the prefix *root*."""
        return self.selection.tensors

    def is_tied(self, family: Family) -> bool:
        """Check if the tensors that models of *family* can tie are tied in this model."""
        return has_tied_embeddings(family, self.config, self.params)

    def get_axis_sizes(self, family: Family, *, implied: bool) -> dict[str, int]:
        """Return the axis sizes that files or the user state, by axis name.

        If *implied* is true, sizes that follow from other sizes are included.
        """
        return read_sizes(
            family, self.config, self.params, self.request.sizes, include_defaults=implied
        )

    def get_layer_lists(self, family: Family) -> dict[str, list[int]]:
        """Return the lists of layer numbers that the configuration states, by name."""
        return read_layer_lists(family, self.config)

    def recognize_as(self, model_type: str) -> Model:
        """Recognize the model again, as if the user had passed *model_type*."""
        request = replace(self.request, model_type=model_type)
        return replace(
            recognize_model(self.catalog, self.documents, request), described=self.described
        )

    def match_keys(self, family: Family, layout: Layout, keys: Collection[str]) -> MatchedKeys:
        """Match *keys* to *layout*.

        If *keys* are the keys of the model, the stored match is returned.
        """
        matched = self.matched.get(layout)
        if matched is not None and list(matched.order) == list(keys):
            return matched
        return match_keys(family, layout, keys)

    def list_unknown_keys(self, keys: Collection[str]) -> Sequence[str]:
        """List the elements of *keys* that are unknown to the family that matches best."""
        if self.exact or not self.pairs:
            return ()
        name, layout = self.pairs[0]
        family = families.family(name)
        return self.match_keys(family, family.get_layout(layout), keys).unmatched

    def has_stated_padding(self, rows: int, size: int) -> bool:
        """Check if recorded facts confirm that a vocabulary of *size* was padded to *rows* rows."""
        records = formats.parse_recorded_facts(self.catalog)
        return records is not None and records.confirms_padding(rows, size)

    def without_model_type(self, layout: str | None) -> Model:
        """Return a copy whose model type is unknown and whose tensor names follow *layout*."""
        return replace(self, model_type=None, candidates=(), layout=layout, pairs=(), matched={})

    @property
    def has_configuration(self) -> bool:
        """Whether a file describes the model."""
        return self.config is not None or self.params is not None

    @property
    def has_table(self) -> bool:
        """Whether a table describes the model.

        A family that matches only some tensors does not describe a model for which config.json
        states a model type that the family does not have.
        """
        if self.exact or self.request.model_type or not self.pairs or not self.config:
            return bool(self.pairs)
        matching = {name: families.family(name) for name, _ in self.pairs}
        return bool(list_families_matching_configs(matching, self.config, self.params))

    @property
    def dequantized_layouts(self) -> tuple[str, ...]:
        """Layouts of the *dequantized_pairs*."""
        return tuple(layout for _, layout in self.dequantized_pairs)

    @property
    def display_name(self) -> str:
        """Text that identifies the model type in messages."""
        names = self.candidates or tuple(dict.fromkeys(name for name, _ in self.dequantized_pairs))
        return self.model_type or format_model_types(names) or "unknown model"


def recognize_model(
    catalog: Catalog,
    documents: Mapping[str, Json] | None = None,
    request: ModelRequest = DETECT_ALL,
) -> Model:
    """Recognize the model in *catalog* by names, shapes and configuration."""
    documents = catalog.documents if documents is None else documents
    config, params = documents.get("config.json"), documents.get("params.json")
    families_by_name = _list_possible_families(catalog, request, config)
    if is_adapter := has_adapter_factors(catalog.tensors):
        families_by_name = families.build_adapter_families(families_by_name.values())
        if request.model_type:  # the adapter family has another name
            request = replace(request, model_type=next(iter(families_by_name), None))
    model_type, layout, root = request.model_type, request.layout, request.root
    if layout is not None and not is_base_layout(layout):
        require_choice(layout, "layout", families.list_layouts(families_by_name.values()))
    recorded_facts = formats.parse_recorded_facts(catalog)
    facts_for_detection = None if config or params or model_type else recorded_facts
    prefixes = [parse_root(catalog, root)] if root is not None else list_possible_roots(catalog)
    container_roots = list_container_prefixes(catalog)
    # Roots are ordered by likelihood. After an exact match, only containers are tried, to detect
    # ambiguity.
    candidates_by_root: dict[str, Candidates] = {}
    contradicted_candidates: list[Candidate] = []
    for prefix in prefixes:
        if prefix not in container_roots and any(
            map(_has_exact_candidate, candidates_by_root.values())
        ):
            break
        candidates_by_root[prefix], contradicted = _detect_candidates(
            catalog, prefix, families_by_name, documents, request, facts_for_detection
        )
        contradicted_candidates += contradicted
    best_root = prefixes[0]
    if len(candidates_by_root) > 1:
        best_root = max(
            candidates_by_root, key=lambda prefix: _rank_candidates(candidates_by_root[prefix])
        )
        _require_single_root(best_root, candidates_by_root, container_roots, catalog.path)
    inner_models = (
        {}
        if root is not None or candidates_by_root[best_root]
        else _find_inner_models(catalog, families_by_name, candidates_by_root)
    )
    if len(inner_models) == 1 and has_all_weights(catalog, next(iter(inner_models))):
        best_root = next(iter(inner_models))
    root_candidates = tuple({**candidates_by_root, **inner_models}[best_root])
    candidates = _select_layout(root_candidates, layout, catalog.path)
    names = _list_families(candidates)
    layouts = list(dict.fromkeys(c.layout for c in candidates))
    # Layouts that match an adapter exactly differ only in tensors that it does not modify.
    is_any_layout_correct = _has_exact_candidate(root_candidates) and is_adapter
    if layout is None and layouts and (len(layouts) == 1 or is_any_layout_correct):
        layout = layouts[0]
    family_name = names[0] if len(names) == 1 else model_type if names else None
    if recorded_facts and config is None and params is None and names:
        config = _build_common_config(recorded_facts, [families_by_name[name] for name in names])
    recognized = Model(
        catalog,
        request,
        documents,
        model_type=family_name,
        candidates=names,
        layout=layout,
        alike=candidates[0].alike if candidates else (),
        evidence=tuple(map(str, candidates)),
        root=best_root,
        exact=_has_exact_candidate(root_candidates),
        config=config,
        params=params,
        inner_models=()
        if candidates
        else tuple((p, _list_families(c)) for p, c in inner_models.items()),
        pairs=tuple((c.family, c.layout) for c in candidates),
        matched={families_by_name[c.family].get_layout(c.layout): c.matched for c in candidates},
        contradicted_families=_list_families(contradicted_candidates),
    )
    if model_type is None and config is None:
        return _add_tied_families(recognized, families_by_name)
    return recognized


def _build_common_config(
    records: RecordedFacts, possible_families: Sequence[Family]
) -> Json | None:
    """Build a config.json with the facts that *records* state for all *possible_families*."""
    first, *others = (records.build_config(family) or {} for family in possible_families)
    common = {
        name: value
        for name, value in first.items()
        if all(name in config and config[name] == value for config in others)
    }
    return TranslatedConfig(common) if common else None


def _list_possible_families(
    catalog: Catalog, request: ModelRequest, config: Json | None
) -> Mapping[str, Family]:
    """Return the requested family, or all families if none is requested, by name.

    Raise if *config* contradicts the requested family.
    """
    if not request.model_type:
        return families.load_families()
    family = families.family(request.model_type)
    if family.name in families.list_built_in_types() and config is not None:
        _require_matching_type(family, request.model_type, config, catalog.path)
    return {family.name: family}


def _detect_candidates(
    catalog: Catalog,
    prefix: str,
    families_by_name: Mapping[str, Family],
    documents: Mapping[str, Json],
    request: ModelRequest,
    records: RecordedFacts | None,
) -> tuple[Candidates, list[Candidate]]:
    """Detect the families and layouts that match the tensors whose names start with *prefix*.

    Returns:
        Candidates that match, and candidates that only the trainer's *records* contradict.
    """
    format = formats.get_format(catalog.format)
    shapes = {name: entry.shape for name, entry in select_model(catalog, prefix).tensors.items()}
    fitting: Candidates = ()
    if records:
        fitting = records.find_candidates(families_by_name, shapes, prefix)
    fitting = fitting or detect_layouts(
        shapes,
        families_by_name,
        documents.get("config.json"),
        documents.get("params.json"),
        prefer=request.layout or format.layout,
        is_user_specified=bool(request.model_type),
        root=prefix,
    )
    contradicted = [
        candidate
        for candidate in fitting
        if records and records.contradicts_family(families_by_name[candidate.family])
    ]
    fitting = [candidate for candidate in fitting if candidate not in contradicted]
    if records and contradicted and not request.model_type:
        # Records that exclude every family with these keys that they can describe do not confirm
        # the others, which cannot be compared with them.
        describable = [c for c in fitting if records.can_describe(families_by_name[c.family])]
        contradicted += [] if describable else fitting
        fitting = fitting if describable else []
    if not request.layout and not format.other_layouts:
        fitting = [c for c in fitting if format.layout in (c.layout, *c.alike)] or fitting
    return fitting, contradicted


def _select_layout(candidates: Candidates, layout: str | None, path: TreePath) -> list[Candidate]:
    """Select the candidates that have the layout *layout*, or all candidates if it is None.

    Raises:
        MappingError: No candidate has that layout.
    """
    selected = [c for c in candidates if layout in (None, c.layout, *c.alike)]
    if layout is not None and not selected:
        matches = " or ".join(map(str, candidates))
        raise MappingError(
            f"the tensors are not in layout `{layout}`",
            where=path,
            why=f"their keys match {matches}"
            if matches
            else "no known model type has these keys in that layout",
        )
    return selected


def iterate_descriptions(
    catalog: Catalog, folders_by_document: Mapping[str, TreePath] | None = None
) -> Iterator[ModelDescription]:
    """Yield all descriptions of the model in a checkpoint, including trainer arguments.

    Lightning stores the arguments of a module as ``hyper_parameters``, which may contain a complete
    config.json or only some of its keys.

    Args:
        catalog: Catalog of the checkpoint.
        folders_by_document: Folder that each document was read from, by file name, or None.
    """
    for name, content in catalog.documents.items():
        if name in CONFIG_FILES:
            home = (folders_by_document or {}).get(name, catalog.root)
            yield ModelDescription(name, str(home / name), content)
    for place, facts in catalog.stated.items():
        yield ModelDescription(ARGUMENTS, place, facts)
    for name, records in catalog.extensions.items():
        for file, record in records.items():
            yield ModelDescription(name, f"{file} in {catalog.path}", record)
    hyper_parameters = [
        blob for blob in catalog.blobs.values() if blob.path[:1] == (HYPER_PARAMETERS,)
    ]
    for holder in ((), *((name,) for name in CONFIG_HOLDERS)) if hyper_parameters else ():
        path = (HYPER_PARAMETERS, *holder)
        place, values = (
            f"`{'.'.join(path)}` in {catalog.path}",
            _nest_leaf_values(hyper_parameters, path),
        )
        if isinstance(values.get("model_type"), str):
            yield ModelDescription(CONFIG, place, values, complete=False)
        elif known_values := {
            name: value
            for name, value in values.items()
            if name in MODEL_ARGUMENT_KEYS and isinstance(value, (bool, int, float, str))
        }:
            yield ModelDescription(ARGUMENTS, place, known_values)


def _nest_leaf_values(blobs: Iterable[Blob], path: Path) -> Json:
    """Build a nested dictionary from the non-tensor values whose key paths start with *path*."""
    values: dict[str, Any] = {}
    for blob in blobs:
        keys = [key for key in blob.path[len(path) :] if isinstance(key, str)]
        if keys and blob.path == (*path, *keys):
            inner = values
            for key in keys[:-1]:
                inner = inner.setdefault(key, {})
            inner[keys[-1]] = blob.value
    return values


def _require_matching_type(family: Family, given_name: str, config: Json, where: TreePath) -> None:
    """Raise if config.json names a known model type that differs from the user's *given_name*.

    Model types are equivalent if they are the same or share an ancestor (:attr:`Family.refines`),
    if their hf layouts store the same tensors, or if the type of a submodel in config.json matches.
    """
    config_sections = [
        config,
        *(section for name in SUBMODEL_KEYS if isinstance(section := config.get(name), Mapping)),
    ]
    families_by_name = families.load_families()
    related_names = {family.name, *list_ancestor_families(family, families_by_name)}
    for part in config_sections:
        for name in list_families_matching_configs(families_by_name, part):
            other_family = families_by_name[name]
            related = {
                name,
                *list_ancestor_families(other_family, families_by_name),
            } & related_names
            both_have_hf_layout = HF in family.layouts and HF in other_family.layouts
            if related or (
                both_have_hf_layout
                and family.get_layout(HF).has_same_tensors(other_family.get_layout(HF))
            ):
                return
    stated_types = list_families_matching_configs(families_by_name, config)
    if not stated_types:
        return
    raise WrongTypeError(
        f"{format_option(f'--model-type {given_name}')} contradicts config.json",
        where=where,
        why=f"config.json has `model_type` `{config.get('model_type')}`, which belongs to "
        f"{format_model_types(tuple(stated_types))}",
        hint=f"omit {format_option('--model-type')}",
    )


def _has_exact_candidate(fitting: Candidates) -> bool:
    return any(candidate.is_exact for candidate in fitting)


def _rank_candidates(fitting: Candidates) -> tuple[bool, float]:
    return _has_exact_candidate(fitting), max((c.share for c in fitting), default=0.0)


def _list_families(fitting: Candidates) -> tuple[str, ...]:
    return tuple(dict.fromkeys(candidate.family for candidate in fitting))


def _find_inner_models(
    catalog: Catalog, families_by_name: Mapping[str, Family], tried: Mapping[str, Candidates]
) -> dict[str, Candidates]:
    """Find prefixes in *catalog* whose tensors exactly match a family.

    Return the matching candidates by prefix. *tried* contains the results for known prefixes.
    """
    models: dict[str, Candidates] = {}
    for prefix in list_subtree_prefixes(catalog):
        if prefix in tried or any(prefix.startswith(outer) for outer in models):
            continue
        shapes = {
            name: entry.shape for name, entry in select_model(catalog, prefix).tensors.items()
        }
        fitting = detect_layouts(shapes, families_by_name, min_share=1.0, root=prefix)
        if _has_exact_candidate(fitting):
            models[prefix] = fitting
    return models


def _add_tied_families(model: Model, families_by_name: Mapping[str, Family]) -> Model:
    """Add families that tie two tensors, if the checksums recorded for these tensors are equal.

    Meta's files of Llama 3.2 store the embedding twice, and params.json does not state that the
    tensors are tied.
    """
    family = families_by_name.get(model.model_type or "")
    if family is None or family.tied or model.layout is None or not model.exact:
        return model
    leaves = family.get_layout(model.layout).leaves
    pairs = [
        (leaves[tie.tensor].key.text, leaves[tie.of].key.text)
        for tie in family.ties
        if tie.tensor in leaves and tie.of in leaves
    ]
    if not any(_have_same_checksums(model.tensors, *pair) for pair in pairs):
        return model
    tied = [
        name
        for name, tied_family in families_by_name.items()
        if tied_family.tied and tied_family.refines == family.name
    ]
    why = "because its tied tensors have the same recorded checksums"
    evidence = (f"{name}, {why}" for name in tied)
    return replace(
        model,
        model_type=None if tied else model.model_type,
        candidates=(*model.candidates, *tied),
        evidence=(*model.evidence, *evidence),
    )


def _have_same_checksums(
    tensors: Mapping[str, TensorEntry], first_name: str, second_name: str
) -> bool:
    """Check if two tensors have the same boxes, each with the same recorded checksum."""
    crcs = [
        [(extent.box, extent.crc32) for extent in tensors[name].extents]
        for name in (first_name, second_name)
        if name in tensors
    ]
    return len(crcs) == 2 and crcs[0] == crcs[1] and all(crc is not None for _, crc in crcs[0])


def _require_single_root(
    best_root: str, tried: Mapping[str, Candidates], container_roots: Sequence[str], where: TreePath
) -> None:
    best = _rank_candidates(tried[best_root])
    equally_ranked_roots = [
        prefix
        for prefix in tried
        if prefix in container_roots and _rank_candidates(tried[prefix]) == best
    ]
    equal_roots = [
        p
        for p in equally_ranked_roots
        if not any(q != p and q.startswith(p) for q in equally_ranked_roots)
    ]
    if best_root in equal_roots and len(equal_roots) > 1:
        shown = " or ".join(f"`{prefix.rstrip('.')}`" for prefix in equal_roots)
        raise MappingError(
            f"the model could be under {shown}",
            where=where,
            why="both match equally well",
            hint=f"choose one with {_format_root_option(equal_roots[0])}",
        )


def require_single_model(model: Model) -> None:
    """Raise if a checkpoint contains several models that match the same family.

    An example is a checkpoint of a teacher and a student.
    """
    families_by_model = [set(names) for _, names in model.inner_models]
    if any(a & b for n, a in enumerate(families_by_model) for b in families_by_model[:n]):
        first = model.inner_models[0][0].rstrip(".")
        raise MappingError(
            f"the checkpoint contains {pluralize(len(model.inner_models), 'model')}",
            where=model.catalog.path,
            why=describe_model_locations(model),
            hint=f"pass {format_option(f'--root {first}')} to select the first, or "
            f"{format_option('--root .')} to select all with their prefixes",
        )


def describe_model_locations(model: Model) -> str:
    """List the prefixes of the models in a checkpoint as text for messages."""
    parts = [
        f"`{prefix.rstrip('.')}` ({format_model_types(names)})"
        for prefix, names in model.inner_models
    ]
    return f"there is a model under {format_alternatives(parts, 'and')}"


def require_known_model(model: Model) -> None:
    """Raise MappingError unless exactly one family and one layout match."""
    if not model.candidates:
        raise UnmappedTensorError(
            "unknown model type",
            where=model.catalog.path,
            why=describe_model_locations(model) if model.inner_models else _explain_mismatch(model),
            hint=f"{build_unknown_model_hint(model)}, or use format hf, dcp or torch to copy "
            "keys unchanged",
        )
    if model.model_type is None or model.layout is None:
        matches = format_alternatives(model.evidence, "and")
        if len(model.evidence) > MAX_ALTERNATIVES:
            described = (
                "tensors and configuration" if model.config or model.params else "the tensors"
            )
            matches = f"{described} match {quote_names(model.candidates, MAX_SHOWN_CANDIDATES)}"
        option = _format_deciding_option(model)
        hint = (
            f"pass {format_option('--assets DIR')} with the trained model's config.json, "
            "which also "
            f"states the axis sizes, or choose with {option}"
        )
        if model.config or model.params:
            assets_hint = f"pass another config.json with {format_option('--assets DIR')}"
            hint = f"choose with {option}, or {assets_hint}"
        raise MappingError(
            "the model type or layout is ambiguous",
            where=model.catalog.path,
            why=matches,
            hint=hint,
        )


def _format_root_option(prefix: str) -> str:
    return format_option(f"--root {prefix.rstrip('.') or '.'}")


def build_unknown_model_hint(model: Model) -> str:
    """Build the error hint for a model that no family matches."""
    if model.contradicted_families:
        return (
            f"pass {format_option(f'--model-type {model.contradicted_families[0]}')} to list the "
            "contradicting facts"
        )
    if model.inner_models:
        return f"set its prefix with {_format_root_option(model.inner_models[0][0])}"
    if model.request.root is not None:
        return f"omit {_format_root_option(model.root)} to search the entire checkpoint"
    if model.request.model_type:
        return f"set its prefix with {format_option('--root PREFIX')}"
    return (
        f"set it with {format_option('--model-type NAME')}, or its prefix with "
        f"{format_option('--root PREFIX')}"
    )


def _format_deciding_option(model: Model) -> str:
    """Format the option that selects one of the matching families or layouts, for a hint.

    The possible values are listed if there are only a few.
    """
    names = model.candidates
    layouts = dict.fromkeys(layout for _, layout in model.pairs)
    if len(names) == 1 and len(layouts) > 1:
        return format_alternatives(
            [f"{format_option(f'--from-layout {layout}')}" for layout in layouts]
        )
    if len(names) > MAX_ALTERNATIVES:
        return format_option("--model-type")
    return format_alternatives([f"{format_option(f'--model-type {name}')}" for name in names])


def _explain_mismatch(model: Model) -> str:
    """Explain why no family matches the tensors, as text for an error."""
    if model.request.model_type:
        return f"no layout of `{model.request.model_type}` has these keys"
    if model.contradicted_families:
        fitting = quote_names(model.contradicted_families, MAX_SHOWN_CANDIDATES)
        return f"Megatron's records contradict every model type that has these keys: {fitting}"
    stated_type = (model.config or {}).get("model_type")
    signs = (sign for family in families.load_families().values() for sign in family.config_signs)
    model_types = [str(sign["model_type"]) for sign in signs if "model_type" in sign]
    if not isinstance(stated_type, str) or stated_type in model_types:
        return "no known model type has these keys"
    close = find_nearest(stated_type, model_types)
    suggestion = f" (did you mean `{close}`?)" if close else ""
    return f"config.json has the unknown `model_type` `{stated_type}`{suggestion}"
