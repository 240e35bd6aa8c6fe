"""The checkpoint that ``--fill-from`` names: what it is, and what may be taken of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ckptctl import families, formats
from ckptctl.catalog import Catalog, TensorEntry
from ckptctl.errors import CkptError, RefusedError, listed, spell_option
from ckptctl.formats.sidecar_files import DOCUMENTS
from ckptctl.notes import Notes
from ckptctl.ops.conversion.contents import main_dtype
from ckptctl.ops.conversion.options import ConversionOptions
from ckptctl.ops.recognition.layout_change import LayoutRequest, change_layout
from ckptctl.ops.recognition.model import Description, Model, Request, require_one, understand
from ckptctl.ops.recognition.quantized import advised, dequantized, glanced, quantized
from ckptctl.ops.recognition.roots import unwrapped
from ckptctl.planner.configs.facts import Json, does_without, is_tied
from ckptctl.planner.families.declarations import looked_up, spellings
from ckptctl.planner.layouts import Family
from ckptctl.planner.mapping.matching import Matched
from ckptctl.planner.mapping.tensors import Change
from ckptctl.units import counted

PREDICTED = (
    *("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules"),
    *("mtp_num_layers", "num_mtp_layers"),
)
"""What configurations call the number of layers that predict further tokens."""


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The checkpoint that tensors are taken from, and what it is."""

    catalog: Catalog
    known: Model
    family: Family

    @classmethod
    def open(cls, options: ConversionOptions, documents: Mapping[str, Json]) -> BaseModel:
        """Read its index; *documents* describe the model where nothing beside it does."""
        assert options.fill_from is not None
        catalog = unwrapped(formats.open_checkpoint(options.fill_from))
        if options.dequantize and quantized(catalog):
            catalog = dequantized(catalog, options.dequantize)
        told = {name: one for name, one in catalog.documents.items() if name in DOCUMENTS}
        asked = None if told else options.model_type
        known = understand(catalog, told or documents, Request(asked, sizes=options.sizes))
        root = Path(catalog.root)
        described = (Description(name, str(root / name), one) for name, one in told.items())
        known = replace(known, described=tuple(described))
        with advised(known):
            require_one(known)
        return cls(catalog, known, families.family(known.model_type or ""))

    def change(self, layout: str) -> Change:
        """Return what its tensors are in *layout*."""
        try:
            return change_layout(self.known, self.known.tensors, LayoutRequest(layout))
        except CkptError as error:
            if error.where != self.catalog.path:
                error.where = f"{error.where}, in {self.catalog.path}"
            raise


def not_wanted(
    family: Family, there: Matched, config: Json | None, other: Json | None, notes: Notes
) -> set[str]:
    """Return the tensors of a base that a configuration does not want.

    Args:
        family: The model type.
        there: What the base has.
        config: The configuration.
        other: The base's own.
        notes: Told of the layers among them.
    """
    out = {tie.tensor for tie in family.ties if is_tied(family, config)}
    out |= does_without(family, config, base=False)
    predicting, few, many = (
        _predicting(family),
        _predicted(family, config),
        _predicted(family, other),
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
        f"skipped {counted(len(left), 'tensor')} of the base's MTP layers, because the source's "
        f"configuration states {counted(few or 0, 'MTP layer')}"
    )
    return gone | left | {key for key, rule in there.dropped.items() if rule.same_as}


def _predicting(family: Family) -> set[str]:
    """Return the logical tensors of layers that predict further tokens."""
    behind = {one.index for one in family.shifts if one.place == "after"}
    return {
        name
        for name, tensor in family.tensors.items()
        if tensor.together == "mtp" or behind & set(tensor.indices)
    }


def _predicted(family: Family, config: Json | None) -> int | None:
    """Return how many layers that predict further tokens a configuration counts."""
    module = spellings(family.sizes.get("d", ("", ""))[0])[0].rpartition(".")[0]
    prefixes = ("", f"{module}.") if module else ("",)
    found = (looked_up(config or {}, prefix + name) for name in PREDICTED for prefix in prefixes)
    return next((number for number in found if type(number) is int), None)


def require_dtypes(
    base: BaseModel,
    catalog: Catalog,
    tensors: Mapping[str, TensorEntry],
    taken: Mapping[str, TensorEntry],
    origin: Mapping[str, str],
    pinned: Callable[[str], bool],
    options: ConversionOptions,
) -> None:
    """Refuse to mix dtypes: where a base is another than the source it fills, unless both are cast.

    What is quantized has to be so in the same way.

    Args:
        base: The base.
        catalog: The source.
        tensors: Its model.
        taken: What is taken, by name in the model.
        origin: The names of these in the base.
        pinned: Whether a tensor has a dtype of its own.
        options: What is asked for.
    """
    where = f"{catalog.path} and {base.catalog.path}"
    own_parts, parts = _quantized_parts(catalog), _quantized_parts(base.catalog)
    ours = set(own_parts.values())
    scaled = [key for key in taken if parts.get(origin[key]) not in (None, *ours)]
    if scaled:
        other = "quantized differently" if ours else "not"
        raise RefusedError(
            f"the base is quantized, but the source is {other}",
            where=where,
            why=f"tensors to fill include `{scaled[0]}` ({taken[scaled[0]].dtype}; "
            f"quantization: {parts[origin[scaled[0]]]})",
            hint=f"pass {spell_option('--dequantize bf16')} to dequantize the weights",
        )
    plain = [key for key in taken if origin[key] not in parts and not pinned(key)]
    if plain and ours and not parts:
        raise RefusedError(
            "the source is quantized, but the base is not",
            where=where,
            why=f"missing in the source: {listed(plain)}",
            hint=f"pass {spell_option('--dequantize bf16')} to dequantize the weights",
        )
    own = main_dtype(one for one in tensors.values() if one.name not in own_parts)
    theirs = main_dtype(one for one in base.known.tensors.values() if one.name not in parts)
    odd = [key for key in plain if taken[key].dtype == theirs != own]
    if odd and options.dtype is None:
        raise RefusedError(
            f"the base has dtype {theirs}, but the source has {own}",
            where=where,
            why=f"missing in the source: {listed(odd)}",
            hint=f"pass {spell_option(f'--dtype {own}')} to cast the filled tensors",
        )


def _quantized_parts(catalog: Catalog) -> dict[str, str]:
    """Return the tensors that quantized ones consist of, and how these are quantized."""
    seen = glanced(catalog)
    parts = {name: one.how for one in seen.weights for name in one.names}
    return dict.fromkeys((*seen.bare, *seen.lone), "unknown") | seen.ways | parts
