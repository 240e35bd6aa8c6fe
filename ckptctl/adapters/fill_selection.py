"""Tensors of a ``--fill-from`` base that the source needs, and checks of their dtypes."""

from __future__ import annotations

from collections.abc import Mapping

from ckptctl.catalog import Catalog, TensorEntry
from ckptctl.conversion.contents import find_main_dtype
from ckptctl.conversion.draft import Draft
from ckptctl.conversion.recognition.model import Model
from ckptctl.errors import RefusedError, quote_names, spell_option
from ckptctl.notes import Notes
from ckptctl.numerics.quantized import glanced
from ckptctl.planner.config_facts import Json, has_tied_embeddings, list_absent_heads
from ckptctl.planner.families.declarations import get_nested, split_aliases
from ckptctl.planner.layouts import HF, Family
from ckptctl.planner.mapping.matching import MatchedKeys
from ckptctl.units import pluralize

PREDICTED = (
    *("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules"),
    *("mtp_num_layers", "num_mtp_layers"),
)
"""Names of the number of MTP (multi-token prediction) layers in config.json."""


def find_unneeded_keys(
    family: Family, there: MatchedKeys, config: Json | None, other: Json | None, notes: Notes
) -> set[str]:
    """Find keys of the base that the source's configuration excludes.

    Args:
        family: The model's family.
        there: Tensors of the base, matched to the family's tables.
        config: The source's config.json.
        other: The base's config.json.
        notes: Receives a note if MTP layers are skipped.
    """
    out = {tie.tensor for tie in family.ties if has_tied_embeddings(family, config)}
    out |= list_absent_heads(family, config, is_base=False)
    predicting, few, many = (
        _predicting_tensors(family),
        _predicting_layers(family, config),
        _predicting_layers(family, other),
    )
    gone: set[str] = set()
    left: set[str] = set()
    for (name, values), keys in there.keys.items():
        if name in out:
            gone.update(keys.values())
        elif name in predicting and many is not None and max(values, default=0) >= (few or 0):
            left.update(keys.values())
    if not left:
        return gone
    notes.add(
        f"skipped {pluralize(len(left), 'tensor')} of the base's MTP layers, because the source's "
        f"configuration states {pluralize(few or 0, 'MTP layer')}"
    )
    return gone | left | {key for key, rule in there.dropped.items() if rule.same_as}


def _predicting_tensors(family: Family) -> set[str]:
    """Return the logical names of tensors of MTP layers."""
    behind = {one.index for one in family.shifts if one.place == "after"}
    return {
        name
        for name, tensor in family.tensors.items()
        if tensor.group == "mtp" or behind & set(tensor.indices)
    }


def _predicting_layers(family: Family, config: Json | None) -> int | None:
    """Return the number of MTP layers that a configuration states, or None."""
    module = split_aliases(family.sizes.get("d", ("", ""))[0])[0].rpartition(".")[0]
    prefixes = ("", f"{module}.") if module else ("",)
    found = (get_nested(config or {}, prefix + name) for name in PREDICTED for prefix in prefixes)
    return next((number for number in found if type(number) is int), None)


def require_same_dtypes(
    draft: Draft,
    base: Model,
    family: Family,
    taken: Mapping[str, TensorEntry],
    sources: Mapping[str, str],
) -> None:
    """Raise if filling would mix dtypes or quantization schemes, unless ``--dtype`` casts all.

    Quantized tensors must use a scheme that the source uses.
    """
    where = f"{draft.catalog.path} and {base.catalog.path}"
    own_parts, parts = _quantized_parts(draft.catalog), _quantized_parts(base.catalog)
    ours = set(own_parts.values())
    scaled = [key for key in taken if parts.get(sources[key]) not in (None, *ours)]
    if scaled:
        other = "quantized differently" if ours else "not"
        raise RefusedError(
            f"the base is quantized, but the source is {other}",
            where=where,
            why=f"tensors to fill include `{scaled[0]}` ({taken[scaled[0]].dtype}; "
            f"quantization: {parts[sources[scaled[0]]]})",
            hint=f"pass {spell_option('--dequantize bf16')} to dequantize the weights",
        )
    plain = [
        key for key in taken if sources[key] not in parts and not _is_pinned(draft, family, key)
    ]
    if plain and ours and not parts:
        raise RefusedError(
            "the source is quantized, but the base is not",
            where=where,
            why=f"missing in the source: {quote_names(plain)}",
            hint=f"pass {spell_option('--dequantize bf16')} to dequantize the weights",
        )
    own = find_main_dtype(one for one in draft.model.tensors.values() if one.name not in own_parts)
    theirs = find_main_dtype(one for one in base.tensors.values() if one.name not in parts)
    odd = [key for key in plain if taken[key].dtype == theirs != own]
    if odd and draft.options.dtype is None:
        raise RefusedError(
            f"the base has dtype {theirs}, but the source has {own}",
            where=where,
            why=f"missing in the source: {quote_names(odd)}",
            hint=f"pass {spell_option(f'--dtype {own}')} to cast the filled tensors",
        )


def _is_pinned(draft: Draft, family: Family, key: str) -> bool:
    """Return whether a tensor is never cast, so its dtype may differ."""
    found = next(family.get_layout(draft.model.layout or HF).table.iterate_meanings(key), None)
    parts = getattr(found[0], "parts", ()) if found else ()
    return any(t.name.partition(".")[0] in family.pinned for t, _ in parts)


def _quantized_parts(catalog: Catalog) -> dict[str, str]:
    """Map each stored tensor of quantized weights to its quantization scheme."""
    seen = glanced(catalog)
    parts = {name: one.how for one in seen.weights for name in one.names}
    return dict.fromkeys((*seen.bare, *seen.lone), "unknown") | seen.ways | parts
