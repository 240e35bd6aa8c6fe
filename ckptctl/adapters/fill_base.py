"""The base of ``--fill-from``: read it, and require that it is the same model as the source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckptctl import formats
from ckptctl.adapters.fill_renaming import rename_text_model
from ckptctl.adapters.fill_selection import PREDICTED
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
from ckptctl.errors import CkptError, MappingError, spell_option
from ckptctl.facts.agreed_change import agreed_change
from ckptctl.facts.agreement import disagreements
from ckptctl.facts.contradictions import switched
from ckptctl.formats.sidecar_files import DOCUMENTS
from ckptctl.numerics.quantized import advised, dequantized, quantized
from ckptctl.planner.config_facts import Json, name_axis_size
from ckptctl.planner.layouts import Family
from ckptctl.planner.mapping.tensors import LayoutChange


def open_base(options: ConversionOptions, documents: Mapping[str, Json]) -> Model:
    """Open the base, described by *documents* if it has no config files."""
    assert options.fill_from is not None
    catalog = strip_wrappers(formats.open_checkpoint(options.fill_from))
    if options.dequantize and quantized(catalog):
        catalog = dequantized(catalog, options.dequantize)
    told = {name: one for name, one in catalog.documents.items() if name in DOCUMENTS}
    asked = None if told else options.model_type
    base = recognize_model(catalog, told or documents, ModelRequest(asked, sizes=options.sizes))
    described = (
        ModelDescription(name, str(catalog.root / name), one) for name, one in told.items()
    )
    base = replace(base, described=tuple(described))
    with advised(base):
        require_known_model(base)
    return base


def different_model_error(draft: Draft, base: Model, why: str, hint: str = "") -> MappingError:
    """Build the error for a base that is not the model of the source."""
    return MappingError(
        f"{spell_option('--fill-from')} names a different model",
        where=f"{draft.catalog.path} and {base.catalog.path}",
        why=why,
        hint=hint or "pass the base model that the source was derived from",
    )


def understand_as_base(draft: Draft, base: Model, family: Family) -> Draft:
    """Recognize the source as the base's model type, or as the text model of it."""
    known = draft.model
    if known.model_type == family.name:
        return draft
    if known.model_type is None and family.name in known.candidates:
        draft = replace(draft, model=known.as_type(family.name))
        if draft.model.candidates:
            return draft
    found = rename_text_model(draft, family)
    if found is None:
        raise different_model_error(
            draft,
            base,
            f"the source is {draft.model.display_name}, but the base is {family.name}",
            f"pass {spell_option(f'--assets {base.catalog.path}')} to use the base's "
            "configuration, if the source is the text model of the base",
        )
    found.notes.add(
        f"the source is the text model of {family.name}; its keys are renamed to those of "
        f"{family.name}"
    )
    return found


def require_same_facts(draft: Draft, base: Model, family: Family) -> None:
    """Raise if the configs differ on sizes or switches, and note other differences."""
    own = [one for one in draft.assets.described if one.name in DOCUMENTS]
    structure = {name_axis_size(family, axis) for axis in family.sizes} | switched(family).keys()
    structure |= {"tie_word_embeddings"}
    found = disagreements(family, [*own, *base.described])
    wrong = [one for one in found if one.fact in structure]
    if wrong:
        raise different_model_error(draft, base, "; ".join(map(str, wrong)))
    ignored = ("model_type", "quantization_config", *PREDICTED)
    others = [o for o in found if o.fact.rpartition(".")[2] not in ignored]
    draft.notes.add(*(f"{one}; the source's value is used" for one in others))


def map_base(base: Model, layout: str) -> LayoutChange:
    """Map the tensors of the base to *layout*."""
    try:
        return agreed_change(base, base.tensors, LayoutRequest(layout))
    except CkptError as error:
        if error.where != str(base.catalog.path):
            error.where = f"{error.where}, in {base.catalog.path}"
        raise
