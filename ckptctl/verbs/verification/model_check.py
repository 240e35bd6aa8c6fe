"""Check of a model for missing tensors, contradictions and doubts.

Every command that decides whether a checkpoint is complete uses this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ckptctl import formats
from ckptctl.catalog import Catalog, Finding
from ckptctl.conversion.recognition.lacking import MissingTensors, find_missing_tensors
from ckptctl.conversion.recognition.model import (
    CONFIG,
    Model,
    ModelRequest,
    WrongTypeError,
    recognize_model,
)
from ckptctl.conversion.recognition.roots import strip_wrappers
from ckptctl.errors import MappingError, MissingPackageError, UsageError, quote_names
from ckptctl.facts.agreement import (
    FILES_DISAGREE,
    TENSORS_DISAGREE,
    find_conflicting_shapes,
    find_contradictions,
    recognize_comparable,
)
from ckptctl.notes import Notes
from ckptctl.numerics.quantization.statement import SIDECAR_METHODS
from ckptctl.numerics.quantized import find_quantization_problems, is_unquantized
from ckptctl.planner.mapping.adapters import has_adapter_factors
from ckptctl.verdict import Scope, Severity

UNCOUNTED_LAYERS = (
    "no configuration states the number of layers, so missing layers at the end cannot be detected"
)


class ModelCheck(NamedTuple):
    """Result of the check of a model.

    Attributes:
        evidence: Missing tensors, contradictions and doubts.
        scope: Whether missing tensors could be detected.
        reference: Package, version and class with which tensors were compared, or None if a table
            describes the model, or nothing does.
    """

    evidence: list[Finding]
    scope: Scope
    reference: str | None = None


def check_model(model: Model, notes: Notes) -> ModelCheck:
    """Compare the tensors of a model with its model type, with its config and with each other.

    Missing tensors are also added to *notes*.
    """
    catalog, names = model.catalog, model.tensors
    try:
        missing_tensors = find_missing_tensors(model, names)
    except MissingPackageError:
        raise
    except (MappingError, UsageError) as error:
        why = ": ".join(filter(None, (error.what, error.why)))
        unknown = f"the configuration does not describe the model: {why}"
        missing_tensors = MissingTensors((), False, model, unknown)
    notes.explain("missing", missing_tensors.missing)
    findings = _check_adapter(catalog, notes)
    findings += [
        Finding("missing tensor", why, tensor=name, basis="model")
        for name, why in missing_tensors.missing.items()
    ]
    findings += [
        Finding(TENSORS_DISAGREE, why, "unknown", tensor=model.root + name, basis="model")
        for name, why in missing_tensors.shapes.items()
    ]
    findings += find_quantization_problems(catalog)
    comparable = recognize_comparable(model)
    findings += iterate_contradictions(model, comparable)
    last_ranks = None
    if "ranks" in formats.get_format(catalog.format).read_options and model.has_configuration:
        last_ranks = _find_missing_last_ranks(model)
    if shapes_finding := last_ranks or find_conflicting_shapes(comparable):
        findings.append(shapes_finding)
    if not names:
        return ModelCheck(findings, "structure")
    notes.add(*missing_tensors.notes)
    if missing_tensors.scope == "model" and not model.has_configuration:
        notes.add(UNCOUNTED_LAYERS)
    strays = () if missing_tensors.reference else model.list_unknown_keys(names)
    if strays:
        notes.add(f"keys unknown to {model.display_name}: {quote_names(strays)}")
    return ModelCheck(findings, missing_tensors.scope, missing_tensors.reference or None)


def recognize_and_check_model(catalog: Catalog, request: ModelRequest, notes: Notes) -> ModelCheck:
    """Recognize the model in *catalog* and check it, unless it contains several models."""
    catalog = strip_wrappers(catalog)
    try:
        model = recognize_model(catalog, request=request)
    except WrongTypeError:
        raise
    except MappingError as error:
        notes.add(f"{error.what}, so missing tensors cannot be detected")
        return ModelCheck(_check_adapter(catalog, notes), "structure")
    return check_model(model, notes)


def _check_adapter(catalog: Catalog, notes: Notes) -> list[Finding]:
    """Check the factors of an adapter, if *catalog* contains any."""
    if not has_adapter_factors(catalog.tensors):
        return []
    # Few checkpoints need this module, which is slow to import.
    from ckptctl.adapters.adapter_checks import check_stored_adapter

    findings, texts = check_stored_adapter(catalog)
    notes.add(*texts)
    return findings


def is_determined_by_index(catalog: Catalog, notes: Notes) -> bool:
    """Return whether the result of the model check depends only on the index.

    If the model is quantized, or the checkpoint is an adapter, the check may also read files or
    tensors, and notes may contain paths.
    """
    if has_adapter_factors(catalog.tensors):
        return False
    reads_files = not SIDECAR_METHODS.keys().isdisjoint(catalog.assets) or not is_unquantized(
        catalog
    )
    return not reads_files and not any(str(catalog.root) in note.text for note in notes)


def iterate_contradictions(model: Model, comparable: Model | None) -> Iterator[Finding]:
    """Yield findings about recorded facts of a model that config files or tensors contradict."""
    try:
        contradictions = find_contradictions(model, comparable)
    except MappingError as error:
        message = "cannot interpret the description of the model"
        severity: Severity = "unknown" if _is_config_misread(model, comparable) else "warning"
        yield Finding(message, error.summary, severity, basis="model")
        return
    for contradiction in contradictions:
        message = TENSORS_DISAGREE if contradiction.tensors_contradict_file else FILES_DISAGREE
        why = str(contradiction).replace(f"{model.catalog.root}/", "")
        yield Finding(message, why, "unknown", basis="model")


def _is_config_misread(model: Model, comparable: Model | None) -> bool:
    """Return whether config.json cannot be interpreted, although transformers loads it."""
    try:
        find_contradictions(model, comparable, (CONFIG,))
    except MappingError:
        return True
    return False


def _find_missing_last_ranks(model: Model) -> Finding | None:
    """Return a finding if the shards of the highest ranks seem to be missing."""
    # Few checkpoints need these modules, which are slow to import.
    from ckptctl.conversion.recognition.layout_change import LayoutRequest
    from ckptctl.facts.agreed_change import change_layout_checked

    try:
        change_layout_checked(model, model.tensors, LayoutRequest(None, partial=True))
    except MappingError as error:
        message = "the last ranks' shards may be missing: a shape contradicts the configuration"
        return Finding(message, f"{error.where}: {error.why}", "unknown", basis="model")
    return None
