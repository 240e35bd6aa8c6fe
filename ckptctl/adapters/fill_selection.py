"""Select the tensors of a ``--fill-from`` base that the source needs, and check their dtypes."""

from __future__ import annotations

from collections.abc import Mapping

from ckptctl.catalog import Catalog, TensorEntry
from ckptctl.conversion.contents import find_main_dtype
from ckptctl.conversion.draft import Draft
from ckptctl.conversion.recognition.model import Model
from ckptctl.errors import RefusedError, format_option, quote_names
from ckptctl.notes import Notes
from ckptctl.numerics.quantized import survey_leniently
from ckptctl.planner.config_facts import Json, find_absent_heads, has_tied_embeddings
from ckptctl.planner.families.declarations import get_nested, split_aliases
from ckptctl.planner.layouts import HF, Family
from ckptctl.planner.mapping.matching import MatchedKeys
from ckptctl.units import pluralize

MTP_LAYER_KEYS = (
    *("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules"),
    *("mtp_num_layers", "num_mtp_layers"),
)
"""Keys of config.json that state the number of MTP (multi-token prediction) layers."""


def find_unneeded_keys(
    family: Family,
    matched: MatchedKeys,
    config: Json | None,
    base_config: Json | None,
    notes: Notes,
) -> set[str]:
    """Find the base's tensors that a model with the source's config.json does not have.

    Args:
        family: The model's family.
        matched: Tensors of the base, matched to the family's tables.
        config: The source's config.json.
        base_config: The base's config.json.
        notes: Receives a note if MTP layers are skipped.
    """
    excluded = {tie.tensor for tie in family.ties if has_tied_embeddings(family, config)}
    excluded |= find_absent_heads(family, config, is_base=False)
    mtp_tensors, source_layers, base_layers = (
        _list_mtp_tensors(family),
        _count_mtp_layers(family, config),
        _count_mtp_layers(family, base_config),
    )
    excluded_keys: set[str] = set()
    mtp_keys: set[str] = set()
    for (name, values), keys in matched.keys.items():
        if name in excluded:
            excluded_keys.update(keys.values())
        elif (
            name in mtp_tensors
            and base_layers is not None
            and max(values, default=0) >= (source_layers or 0)
        ):
            mtp_keys.update(keys.values())
    if not mtp_keys:
        return excluded_keys
    notes.add(
        f"skipped {pluralize(len(mtp_keys), 'tensor')} of the base's MTP layers, because the "
        "source's "
        f"configuration states {pluralize(source_layers or 0, 'MTP layer')}"
    )
    return excluded_keys | mtp_keys | {key for key, rule in matched.dropped.items() if rule.same_as}


def _list_mtp_tensors(family: Family) -> set[str]:
    """List the names, in the family's tables, of all tensors of MTP layers."""
    mtp_indices = {shift.index for shift in family.shifts if shift.place == "after"}
    return {
        name
        for name, tensor in family.tensors.items()
        if tensor.group == "mtp" or mtp_indices & set(tensor.indices)
    }


def _count_mtp_layers(family: Family, config: Json | None) -> int | None:
    """Return the number of MTP layers, or None if the config does not state it."""
    module = split_aliases(family.sizes.get("d", ("", ""))[0])[0].rpartition(".")[0]
    prefixes = ("", f"{module}.") if module else ("",)
    values = (
        get_nested(config or {}, prefix + name) for name in MTP_LAYER_KEYS for prefix in prefixes
    )
    return next((number for number in values if type(number) is int), None)


def require_same_dtypes(
    draft: Draft,
    base: Model,
    family: Family,
    filled_entries: Mapping[str, TensorEntry],
    base_names: Mapping[str, str],
) -> None:
    """Raise if filling would mix dtypes or quantization schemes, unless ``--dtype`` casts all.

    Quantized tensors of the base must use a quantization scheme that the source also uses.

    Args:
        draft: The conversion of the source.
        base: The base of ``--fill-from``.
        family: Family of both models.
        filled_entries: Tensors of the base that fill the source, by key.
        base_names: Name of each key's tensor in the base.
    """
    where = f"{draft.catalog.path} and {base.catalog.path}"
    source_schemes, base_schemes = (
        _map_tensors_to_schemes(draft.catalog),
        _map_tensors_to_schemes(base.catalog),
    )
    known_schemes = set(source_schemes.values())
    quantized_keys = [
        key
        for key in filled_entries
        if base_schemes.get(base_names[key]) not in (None, *known_schemes)
    ]
    if quantized_keys:
        source_state = "quantized differently" if known_schemes else "not"
        raise RefusedError(
            f"the base is quantized, but the source is {source_state}",
            where=where,
            why=f"tensors to fill include `{quantized_keys[0]}` "
            f"({filled_entries[quantized_keys[0]].dtype}; "
            f"quantization: {base_schemes[base_names[quantized_keys[0]]]})",
            hint=f"pass {format_option('--dequantize bf16')} to dequantize the weights",
        )
    unquantized_keys = [
        key
        for key in filled_entries
        if base_names[key] not in base_schemes and not _is_pinned(draft, family, key)
    ]
    if unquantized_keys and known_schemes and not base_schemes:
        raise RefusedError(
            "the source is quantized, but the base is not",
            where=where,
            why=f"missing in the source: {quote_names(unquantized_keys)}",
            hint=f"pass {format_option('--dequantize bf16')} to dequantize the weights",
        )
    source_dtype = find_main_dtype(
        entry for entry in draft.model.tensors.values() if entry.name not in source_schemes
    )
    base_dtype = find_main_dtype(
        entry for entry in base.tensors.values() if entry.name not in base_schemes
    )
    mismatched = [
        key for key in unquantized_keys if filled_entries[key].dtype == base_dtype != source_dtype
    ]
    if mismatched and draft.options.dtype is None:
        raise RefusedError(
            f"the base has dtype {base_dtype}, but the source has {source_dtype}",
            where=where,
            why=f"missing in the source: {quote_names(mismatched)}",
            hint=f"pass {format_option(f'--dtype {source_dtype}')} to cast the filled tensors",
        )


def _is_pinned(draft: Draft, family: Family, key: str) -> bool:
    """Return whether a tensor is never cast, so that it may have another dtype than the source."""
    match = next(family.get_layout(draft.model.layout or HF).table.iterate_matches(key), None)
    parts = getattr(match[0], "parts", ()) if match else ()
    return any(t.name.partition(".")[0] in family.pinned for t, _ in parts)


def _map_tensors_to_schemes(catalog: Catalog) -> dict[str, str]:
    """Map each stored tensor of quantized weights to its quantization scheme."""
    survey = survey_leniently(catalog)
    parts = {name: weight.description for weight in survey.weights for name in weight.names}
    return (
        dict.fromkeys((*survey.weights_without_scales, *survey.scales_without_weights), "unknown")
        | survey.scheme_by_tensor
        | parts
    )
