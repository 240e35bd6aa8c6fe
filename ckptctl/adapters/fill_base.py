"""Read the ``--fill-from`` base, and check that it is the same model as the source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckptctl import formats
from ckptctl.adapters.fill_renaming import rename_text_model
from ckptctl.adapters.fill_selection import MTP_LAYER_KEYS
from ckptctl.conversion.conversion_options import ConversionOptions
from ckptctl.conversion.draft import Draft
from ckptctl.conversion.recognition.layout_change import LayoutRequest
from ckptctl.conversion.recognition.model import (
    Model,
    ModelDescription,
    ModelRequest,
    recognize_model,
    require_known_model,
)
from ckptctl.conversion.recognition.roots import strip_wrappers
from ckptctl.errors import CkptError, MappingError, format_option
from ckptctl.facts.agreed_change import change_layout_checked
from ckptctl.facts.agreement import compare_files
from ckptctl.facts.contradictions import map_switches_to_tensors
from ckptctl.formats.sidecar_files import CONFIG_FILES
from ckptctl.numerics.quantized import (
    dequantize_hint_on_error,
    dequantize_if_quantized,
    require_same_quantization,
)
from ckptctl.planner.config_facts import Json, get_size_field
from ckptctl.planner.layouts import Family
from ckptctl.planner.mapping.tensors import LayoutChange


def open_base(options: ConversionOptions, documents: Mapping[str, Json]) -> Model:
    """Open the ``--fill-from`` base, using the config files *documents* if it has none."""
    assert options.fill_from is not None
    catalog = strip_wrappers(formats.open_checkpoint(options.fill_from))
    catalog = dequantize_if_quantized(catalog, options.dequantize)
    base_documents = {
        name: content for name, content in catalog.documents.items() if name in CONFIG_FILES
    }
    model_type = None if base_documents else options.model_type
    base = recognize_model(
        catalog, base_documents or documents, ModelRequest(model_type, sizes=options.sizes)
    )
    described = (
        ModelDescription(name, str(catalog.root / name), content)
        for name, content in base_documents.items()
    )
    base = replace(base, described=tuple(described))
    with dequantize_hint_on_error(base):
        require_known_model(base)
    return base


def different_model_error(draft: Draft, base: Model, why: str, hint: str = "") -> MappingError:
    """Build the error for a base that is not the same model as the source."""
    return MappingError(
        f"{format_option('--fill-from')} names a different model",
        where=f"{draft.catalog.path} and {base.catalog.path}",
        why=why,
        hint=hint or "pass the base model that the source was derived from",
    )


def recognize_as_base_model(draft: Draft, base: Model, family: Family) -> Draft:
    """Recognize the source as the base's model type, or as the text model of that model type."""
    model = draft.model
    if model.model_type == family.name:
        return draft
    if model.model_type is None and family.name in model.candidates:
        draft = replace(draft, model=model.recognize_as(family.name))
        if draft.model.candidates:
            return draft
    renamed_draft = rename_text_model(draft, family)
    if renamed_draft is None:
        hint = f"pass {format_option('--dequantize bf16')} to dequantize it"
        require_same_quantization(draft.catalog, base.catalog, hint)
        raise different_model_error(
            draft,
            base,
            f"the source is {draft.model.display_name}, but the base is {family.name}",
            f"pass {format_option(f'--assets {base.catalog.path}')} to use the base's "
            "configuration, if the source is the text model of the base",
        )
    renamed_draft.notes.add(
        f"the source is the text model of {family.name}; its keys are renamed to those of "
        f"{family.name}"
    )
    return renamed_draft


def require_same_facts(draft: Draft, base: Model, family: Family) -> None:
    """Raise if the configs of source and base differ in sizes or switches.

    Other differences are noted on the draft.
    """
    source_files = [item for item in draft.assets.described if item.name in CONFIG_FILES]
    structural_facts = {
        get_size_field(family, axis) for axis in family.sizes
    } | map_switches_to_tensors(family).keys()
    structural_facts |= {"tie_word_embeddings"}
    contradictions = compare_files(family, [*source_files, *base.described])
    structural = [item for item in contradictions if item.fact in structural_facts]
    if structural:
        raise different_model_error(draft, base, "; ".join(map(str, structural)))
    ignored = ("model_type", "quantization_config", *MTP_LAYER_KEYS)
    notable = [
        contradiction
        for contradiction in contradictions
        if contradiction.fact.rpartition(".")[2] not in ignored
    ]
    draft.notes.add(*(f"{item}; the source's value is used" for item in notable))


def map_base_to_layout(base: Model, layout: str) -> LayoutChange:
    """Map the tensors of the base to the tensor names of *layout*."""
    try:
        return change_layout_checked(base, base.tensors, LayoutRequest(layout))
    except CkptError as error:
        if error.where != str(base.catalog.path):
            error.where = f"{error.where}, in {base.catalog.path}"
        raise
