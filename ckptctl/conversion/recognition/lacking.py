"""Detection of tensors that are missing from a model.

The family's table and the model's configuration determine which tensors a model requires. Without a
table, a reference determines them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from ckptctl import families
from ckptctl.conversion.recognition.model import CONFIG, NO_REFERENCE, Model
from ckptctl.errors import MissingTensorsError, format_option, quote_names
from ckptctl.numerics.quantization.survey import to_dequantized_names
from ckptctl.numerics.quantized import is_unquantized, survey_leniently
from ckptctl.planner.config_demands import find_required_tensors
from ckptctl.planner.config_facts import find_absent_heads, read_formula_sizes
from ckptctl.planner.layouts import Family, is_base_layout
from ckptctl.planner.mapping.adapters import has_adapter_factors
from ckptctl.planner.mapping.completeness import (
    ALWAYS_LISTED,
    MissingKeys,
    find_missing_keys,
    is_truncated,
    require_no_missing_tensors,
)
from ckptctl.planner.mapping.detect import detect_layouts
from ckptctl.planner.mapping.matching import MatchedKeys
from ckptctl.tree import TreePath
from ckptctl.units import pluralize
from ckptctl.verdict import STRUCTURE_COMPLETE, UNKNOWN_MODEL, Scope

UNKNOWN_ADAPTER = (
    f"{STRUCTURE_COMPLETE}no table defines which tensors an adapter must have, so missing "
    "tensors cannot be detected"
)
FEW_FAMILIES = 4
TRANSFORMERS = "hf"
"""Prefix of the names of transformers' layouts."""


@dataclass(frozen=True, slots=True)
class MissingTensors:
    """Result of the search for missing tensors of a model.

    Attributes:
        names: Names of missing tensors in the model, limited to the first ones if many are missing.
        certain: Whether *names* are certainly missing, because a configuration or the user states
            the model type, or because the checkpoint has most tensors of that type and no others.
            If false, the checkpoint may contain only some layers, or a different model.
        model: Recognized model.
        unknown: Reason why missing tensors cannot be determined, or an empty string.
        unexpected_names: Names of tensors that a model of this type does not have.
        more: Number of further missing tensors that *names* does not include.
        only_end_missing: Whether only the last layers of the model are missing, as in a checkpoint
            of the first pipeline stage.
        reference: Package, version and class that determine the tensors of a model without a table,
            or an empty string.
        shapes: Description of each shape that differs from the reference, by tensor name.
    """

    names: tuple[str, ...]
    certain: bool
    model: Model
    unknown: str = ""
    unexpected_names: tuple[str, ...] = ()
    more: int = 0
    only_end_missing: bool = False
    reference: str = ""
    shapes: Mapping[str, str] = field(default_factory=dict)

    @property
    def missing(self) -> dict[str, str]:
        """Reason for each tensor that is certainly missing, by tensor name in the checkpoint."""
        names = self.names if self.certain else ()
        model_type = self.model.model_type
        requirer = f"`{model_type}`" if model_type else "all matching model types"
        requirer = self.reference or requirer
        why = f"required by {requirer}"
        return {self.model.root + name: why for name in names}

    @property
    def scope(self) -> Scope:
        """Scope of the completeness check.

        Either all tensors of the model were checked, or only the structure of the checkpoint.
        """
        has_table = (self.model.pairs or self.reference) and not self.unknown
        return "model" if has_table and (self.certain or not self.names) else "structure"

    @property
    def doubts(self) -> tuple[str, ...]:
        """Notes on why the missing tensors could not be determined or fully listed."""
        if self.unknown or not (self.model.pairs or self.reference):
            return (self.unknown or UNKNOWN_MODEL,)
        if self.names and self.certain and self.more:
            hidden_count = pluralize(
                self.more, "more missing tensor is", "more missing tensors are"
            )
            return (f"{hidden_count} not listed",)
        if not self.names or self.certain:
            return ()
        missing = quote_names(self.names, 1, total=len(self.names) + self.more)
        return (
            f"this is a part of {self.model.display_name} or a different model; missing: {missing}",
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the source of the required tensors, on doubts and on unexpected tensors."""
        if not self.reference:
            return self.doubts
        source = f"checked against {self.reference}"
        unexpected = f"tensors that {self.reference} does not have: "
        listed = [unexpected + quote_names(self.unexpected_names)] if self.unexpected_names else []
        return (source, *self.doubts, *listed)

    def keep_only(self, names: Collection[str]) -> MissingTensors:
        """Return a copy whose missing tensors are limited to those in *names*."""
        kept_names = tuple(name for name in self.names if name in names)
        return replace(self, names=kept_names, more=self.more if kept_names == self.names else 0)

    def require_complete(self, where: str, base: str | TreePath | None = None) -> None:
        """Raise an error that names *where* if tensors are certainly missing.

        *base* is the checkpoint of ``--fill-from``, or None if this option is not set.
        """
        if self.names and self.certain:
            hint = (
                f"pass {format_option('--allow-missing')} to write what is there, "
                f"{format_option('--include')} or {format_option('--exclude')} to select a "
                "part, or "
                f"{format_option('--fill-from')} to take the rest from a base"
            )
            if base is not None:
                hint = (
                    f"pass a complete base to {format_option('--fill-from')} (`{base}` is also "
                    f"missing them), or replace it by {format_option('--allow-missing')} to write "
                    "what is there"
                )
            if self.only_end_missing:
                hint = (
                    "this looks like the first pipeline stage; to join all stages, convert each "
                    f"with {format_option('--to hf', '--allow-missing')}, put the files into one "
                    "folder as `model-00001-of-0000N.safetensors`, ..., and convert that folder"
                )
            if self.reference:
                number = len(self.names) + self.more
                raise MissingTensorsError(
                    f"the model is missing {pluralize(number, 'tensor')}"
                    if number > 1
                    else "the model is missing a tensor",
                    where=where,
                    why=f"{self.reference} requires {quote_names(self.names, total=number)}",
                    hint=hint,
                )
            name, layout = self.model.pairs[0]
            family = families.family(name)
            require_no_missing_tensors(
                self.names,
                len(self.names) + self.more,
                family,
                family.get_layout(layout),
                tied=self.model.is_tied(family),
                unknown_keys=self.unexpected_names,
                where=where,
                hint=hint,
            )


def find_missing_tensors(
    model: Model, names: Collection[str], target: str | None = None
) -> MissingTensors:
    """Find the tensors that every matching family requires and that are missing.

    If no table describes the model, compare its tensors with the reference that the user selected.

    *names* are the tensors that exist. A model without an output head is complete in transformers'
    layouts, but incomplete if *target* is another layout.

    Raises:
        MappingError: A size in the configuration is not a valid size.
        UsageError: A size given by the user is unknown, or contradicts a file.
    """
    if not names or has_adapter_factors(names):
        return MissingTensors((), False, model, UNKNOWN_ADAPTER if names else "")
    stored_model, stored_names = model, names
    if not model.exact:
        model, names = _recognize_dequantized(model, names)
    needs_reference = model.request.reference != NO_REFERENCE and not model.has_table
    if needs_reference and CONFIG in model.documents:
        compared = _compare_with_reference(stored_model, stored_names)
        if compared is not None and (compared.reference or not model.pairs):
            return compared
    allows_no_head = target in (None, model.layout) or str(target).startswith(TRANSFORMERS)
    uses_base_layout = is_base_layout(model.layout)
    if (
        model.exact
        and not model.has_configuration
        and not model.request.sizes
        and (allows_no_head or not uses_base_layout)
    ):
        return MissingTensors((), False, model)
    common_names: dict[str, None] | None = None
    fewest_names: dict[str, None] = {}
    hidden_counts: list[int] = []
    totals: list[int] = []
    # Long lists are not needed if many families match.
    limit = ALWAYS_LISTED if len(model.pairs) > FEW_FAMILIES else None
    certain, only_end_missing, unexpected_names = True, True, tuple[str, ...]()
    for name, layout in model.pairs:
        family = families.family(name)
        matched = model.match_keys(family, family.get_layout(layout), names)
        computed = read_formula_sizes(family, model.config)
        spread_axes = family.get_layout(layout).spread_axes
        sizes = {axis: size for axis, size in computed.items() if axis in spread_axes}
        sizes |= model.get_axis_sizes(family, implied=False)
        missing_keys = find_missing_keys(
            family,
            family.get_layout(layout),
            matched,
            sizes,
            tied=model.is_tied(family),
            absent_tensors=find_absent_heads(family, model.config, is_base=uses_base_layout)
            if allows_no_head
            else (),
            required=find_required_tensors(family, model.config, matched),
            max_keys=limit,
        )
        keys = dict.fromkeys(absent.key for absent in missing_keys.keys)
        hidden_counts.append(missing_keys.total - len(keys))
        totals.append(missing_keys.total)
        fewest_names = keys if missing_keys.total == min(totals) else fewest_names
        unexpected_names = unexpected_names or tuple(matched.unmatched)
        common_names = (
            keys if common_names is None else {key: None for key in common_names if key in keys}
        )
        if common_names:  # otherwise the answers are not used
            certain = certain and _is_certain(family, matched, model, missing_keys)
            only_end_missing = only_end_missing and is_truncated(
                family, family.get_layout(layout), matched, keys
            )
    hidden_count = min(hidden_counts, default=0)
    if limit and hidden_count > 0:  # truncated lists have fewer keys in common
        hidden_count = min(totals) - len(common_names or ())
    if not common_names and min(totals, default=0):
        # Every family lacks tensors, but not the same ones.
        common_names, certain, hidden_count = fewest_names, False, min(totals) - len(fewest_names)
    names = tuple(common_names or ())
    return MissingTensors(
        names,
        certain,
        model,
        unexpected_names=unexpected_names,
        more=hidden_count,
        only_end_missing=only_end_missing,
    )


def _compare_with_reference(model: Model, names: Collection[str]) -> MissingTensors | None:
    """Compare *names* and their shapes with a reference, or return None if none knows the model.

    Tensors of quantized weights are compared as the weights that dequantization would produce.
    """
    # Few models need one.
    from ckptctl.conversion.recognition.references import compare_with_reference, select_reference

    reference = select_reference(model.request.reference)
    if reference is None:
        return None
    config = model.documents[CONFIG]
    tensors, root = model.tensors, model.root
    shapes = {name: tensors[name].shape if name in tensors else None for name in names}
    unsupported = ""
    if not is_unquantized(model.catalog):
        survey = survey_leniently(model.catalog)
        for weight in survey.weights:
            for name in weight.names:
                shapes.pop(name.removeprefix(root), None)
            shapes[weight.key.removeprefix(root)] = None
        for name in survey.dropped:
            shapes.pop(name.removeprefix(root), None)
        unsupported = next(iter(survey.unknown.values()), "")
    if unsupported:
        unknown = f"{UNKNOWN_MODEL} (the quantization {unsupported} is not supported)"
        return MissingTensors((), False, model, unknown)
    result = compare_with_reference(reference, config, shapes)
    reason = result.failure
    if "quantization_config" in config and (result.unexpected_names or result.shapes):
        reason = f"{result.source} does not have the names of the quantized tensors"
    if reason:
        return MissingTensors((), False, model, f"{UNKNOWN_MODEL} ({reason})")
    if not result.source:
        return None
    return MissingTensors(
        result.missing_names,
        True,
        model,
        unexpected_names=result.unexpected_names,
        more=result.more,
        reference=result.source,
        shapes=result.shapes,
    )


def _recognize_dequantized(model: Model, names: Collection[str]) -> tuple[Model, Collection[str]]:
    """Recognize the model that dequantization would produce, and return it with its tensor names.

    Models are returned unchanged unless no table describes their quantization scheme.
    """
    unquantized_names = to_dequantized_names(names, model.list_unknown_keys(names))
    if unquantized_names is names:
        return model, names
    model_type = model.request.model_type
    types = [model_type] if model_type else families.list_model_types()
    fitting = detect_layouts(
        dict.fromkeys(unquantized_names, ()),
        {name: families.family(name) for name in types},
        model.config,
        model.params,
        is_user_specified=bool(model_type),
        root=model.root,
    )
    pairs = tuple((candidate.family, candidate.layout) for candidate in fitting)
    return replace(
        model, pairs=pairs, exact=any(candidate.is_exact for candidate in fitting)
    ), unquantized_names


def _is_certain(
    family: Family, matched: MatchedKeys, model: Model, missing_keys: MissingKeys
) -> bool:
    """Check if a checkpoint with missing tensors certainly contains a model of *family*."""
    config = model.config or {}
    if matched.unmatched:
        architectures = config.get("architectures")
        is_named = isinstance(architectures, list) and family.architecture in architectures
        return is_named and "quantization_config" not in config
    if model.request.model_type or model.has_configuration:
        return True
    # Require layers and tensors outside of layers: a head alone is not a model.
    tensors = family.tensors.values()
    stored_kinds = {bool(tensor.indices) for tensor in tensors if matched.count_keys(tensor)}
    return (
        missing_keys.total <= sum(len(group.keys) for group in matched.groups)
        and stored_kinds == {bool(tensor.indices) for tensor in tensors}
        and all(absent.is_certain for absent in missing_keys.keys)
    )
