"""Survey of a checkpoint's quantized weights, supported and unsupported."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from ckptctl.catalog import TensorEntry
from ckptctl.errors import CkptError, DamagedError, UnsupportedError
from ckptctl.numerics.quantization.statement import QUANTIZATION, QuantizationStatement

if TYPE_CHECKING:
    from ckptctl.numerics.quantization.scheme import (
        NamingForm,
        QuantizedWeight,
        Scheme,
        TensorGroup,
    )

Values = Callable[[TensorEntry], bytes]
Tensors = Mapping[str, TensorEntry]
UNQUANTIZED_ENDINGS = (".weight", ".bias")
UNQUANTIZED_DTYPES = ("bfloat16", "float16", "float32")
"""A tensor with such a name suffix and dtype never identifies a scheme."""


@dataclass(slots=True)
class QuantizationSurvey:
    """Quantized weights and other tensors of quantization schemes in a checkpoint.

    Attributes:
        weights: Supported weights, in the checkpoint's order.
        errors: Errors that schemes found, by the name of the tensor of quantized elements.
        unknown: Names of tensors of unsupported schemes, mapped to the schemes.
        weights_without_scales: Names of quantized tensors without scales.
        scales_without_weights: Names of scales without quantized tensors.
        dropped: Names of tensors that dequantized models do not need, mapped to descriptions.
    """

    weights: list[QuantizedWeight] = field(default_factory=list)
    errors: dict[str, CkptError] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    weights_without_scales: list[str] = field(default_factory=list)
    scales_without_weights: list[str] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)

    @property
    def is_fully_supported(self) -> bool:
        """Whether all quantized tensors are supported and complete."""
        return not (
            self.errors
            or self.unknown
            or self.weights_without_scales
            or self.scales_without_weights
        )

    @property
    def scheme_by_tensor(self) -> dict[str, str]:
        """Descriptions of how tensors are quantized, by dequantized name."""
        unfit = {
            name: "mismatched scales" if isinstance(error, UnsupportedError) else error.what
            for name, error in self.errors.items()
        }
        unfit |= {
            name: "a tensor is missing"
            for name, error in self.errors.items()
            if isinstance(error, DamagedError)
        }
        return {
            **{weight.key: weight.description for weight in self.weights},
            **unfit,
            **self.unknown,
        }


def looks_unquantized(tensors: Tensors) -> bool:
    """Return whether no tensor has a name or dtype of a quantization scheme."""
    return all(
        n.endswith(UNQUANTIZED_ENDINGS) and e.dtype in UNQUANTIZED_DTYPES
        for n, e in tensors.items()
    )


def detect_quantized(
    tensors: Tensors, statement: QuantizationStatement, read_values: Values
) -> QuantizationSurvey:
    """Detect quantized weights and their scales among *tensors*.

    Args:
        tensors: All tensors of a checkpoint.
        statement: Quantization config of the checkpoint.
        read_values: Reads the bytes of a small tensor, for schemes that shapes do not determine.
    """
    if not statement.method and looks_unquantized(tensors):
        return QuantizationSurvey()
    applicable = [scheme for scheme in _load_schemes() if scheme.can_apply(statement)]
    applicable.sort(key=lambda scheme: statement.method not in scheme.methods)
    result = QuantizationSurvey()
    used = _add_weights(result, applicable, tensors, statement, read_values)
    endings = {
        ending: drop_reason
        for scheme in applicable
        for ending, drop_reason in scheme.drop_reasons.items()
    }
    drop_endings = tuple(endings)
    for name in tensors:
        if name not in used and name.endswith(drop_endings):
            result.dropped[name] = next(
                drop_text for end, drop_text in endings.items() if name.endswith(end)
            )
    _add_unknown(result, applicable, tensors, used)
    is_known_method = any(statement.method in scheme.methods for scheme in applicable)
    if statement.method and not is_known_method and not result.unknown:
        result.unknown[QUANTIZATION] = f"`{statement.method}`"
    return result


def _load_schemes() -> tuple[Scheme, ...]:
    from ckptctl.numerics.quantization.scheme import load_schemes  # late: for a fast start

    return load_schemes()


def _add_weights(
    result: QuantizationSurvey,
    applicable: Iterable[Scheme],
    tensors: Tensors,
    statement: QuantizationStatement,
    read_values: Values,
) -> set[str]:
    """Add supported weights and errors, and return the names of their tensors."""
    by_dtype: dict[str, list[NamingForm]] = {}
    for form in (form for scheme in applicable for form in scheme.forms if form.build_weight):
        for dtype in form.dtypes:
            by_dtype.setdefault(dtype, []).append(form)
    from ckptctl.numerics.quantization.scheme import TensorGroup  # late: for a fast start

    used: set[str] = set()
    matched_groups: list[tuple[NamingForm, TensorGroup]] = []
    for name, entry in tensors.items():
        found_form = _match_form(by_dtype.get(entry.dtype, ()), name, tensors)
        if found_form is None or (build_weight := found_form[0].build_weight) is None:
            continue
        form, parts = found_form
        used.add(name)
        used.update(part.name for part in parts.values())
        for role, part in parts.items():
            if form.parts[role].drop_reason:
                result.dropped[part.name] = form.parts[role].drop_reason
        parts = {role: part for role, part in parts.items() if not form.parts[role].drop_reason}
        key = f"{name.removesuffix(form.lead_ending)}{form.dequantized_ending}"
        group = TensorGroup(key, entry, parts, statement, read_values)
        try:
            form.require_parts(group)
            result.weights.append(build_weight(group))
            matched_groups.append((form, group))
        except CkptError as error:
            result.errors[name] = error
    _require_uniform(result, matched_groups)
    _add_unpaired(result, {id(form): form for form, _ in matched_groups}.values(), tensors, used)
    return used


def _match_form(
    forms: Iterable[NamingForm], name: str, tensors: Tensors
) -> tuple[NamingForm, Tensors] | None:
    """Return the naming pattern of the quantized tensor *name*, and its other tensors by role.

    If no pattern is complete, the one with the most tensors is returned, or None if there are none.
    """
    best_match: tuple[NamingForm, Tensors] | None = None
    for form in forms:
        if not name.endswith(form.lead_ending):
            continue
        stem = name.removesuffix(form.lead_ending)
        names = {role: f"{stem}{part.ending}" for role, part in form.parts.items()}
        present_parts = {role: tensors[part] for role, part in names.items() if part in tensors}
        needed = {role for role, part in form.parts.items() if part.is_always_required}
        if needed <= present_parts.keys() and (present_parts or not form.parts):
            return form, present_parts
        if present_parts and (best_match is None or len(present_parts) > len(best_match[1])):
            best_match = form, present_parts
    return best_match


def _require_uniform(
    result: QuantizationSurvey, matched_groups: Sequence[tuple[NamingForm, TensorGroup]]
) -> None:
    """Report weights without a tensor that other weights of the same naming pattern have."""
    from ckptctl.numerics.quantization.scheme import missing_parts_error

    places = {
        (id(form), role): (form, part)
        for form, _ in matched_groups
        for role, part in form.parts.items()
        if part.is_complete is not None
    }
    errors: dict[str, CkptError] = {}
    for (form_id, role), (form, part) in places.items():
        assert part.is_complete is not None
        completeness = [
            (group, part.is_complete(group))
            for group_form, group in matched_groups
            if id(group_form) == form_id
        ]
        complete_example = next(
            (group.parts[role].name for group, is_complete in completeness if is_complete), None
        )
        for group in (
            group
            for group, is_complete in completeness
            if complete_example and is_complete is False
        ):
            if role in group.parts:
                why = f"other weights have one element per block, such as `{complete_example}`"
                errors[group.lead.name] = group.mismatch_error(why, role)
            else:
                name = f"{group.lead.name.removesuffix(form.lead_ending)}{part.ending}"
                why = f"other weights have this tensor, for example `{complete_example}`"
                errors[group.lead.name] = missing_parts_error(group, {name: why})
    result.errors |= errors
    result.weights = [weight for weight in result.weights if weight.lead not in errors]


def _add_unpaired(
    result: QuantizationSurvey, forms: Iterable[NamingForm], tensors: Tensors, used: set[str]
) -> None:
    """Add unpaired quantized tensors and scales with naming patterns that other weights have.

    Without such weights, their names do not identify the scheme.
    """
    for form in (form for form in forms if form.lead_ending):
        ends = tuple(part.ending for part in form.parts.values() if part.is_always_required)
        for name, entry in tensors.items():
            if name in used or entry.dtype in UNQUANTIZED_DTYPES:
                continue
            scale_ending = next(
                (scale_ending for scale_ending in ends if name.endswith(scale_ending)), None
            )
            if name.endswith(form.lead_ending) and entry.dtype in form.dtypes:
                result.weights_without_scales.append(name)
                used.add(name)
            elif (
                scale_ending
                and f"{name.removesuffix(scale_ending)}{form.lead_ending}" not in tensors
            ):
                result.scales_without_weights.append(name)
                used.add(name)


def _add_unknown(
    result: QuantizationSurvey,
    applicable: Collection[Scheme],
    tensors: Tensors,
    used: Collection[str],
) -> None:
    """Add tensors that look quantized but belong to no supported weight."""
    forms = [(scheme, form) for scheme in _load_schemes() for form in scheme.forms]
    ending_dtypes = [
        (end, dtypes) for _, form in forms for end, dtypes in form.unique_endings.items()
    ]
    general_endings = tuple({end for end, dtypes in ending_dtypes if not dtypes})
    of_dtype = {dtype for _, dtypes in ending_dtypes for dtype in dtypes}
    for name, entry in tensors.items():
        if name in used or not (entry.dtype in of_dtype or name.endswith(general_endings)):
            continue
        if name in result.dropped:
            continue
        identified = [
            (scheme, form, form.find_unique_ending(name, entry.dtype)) for scheme, form in forms
        ]
        identified = [ending_dtypes for ending_dtypes in identified if ending_dtypes[2] is not None]
        applicable_matches = [
            (form, ending) for scheme, form, ending in identified if scheme in applicable
        ]
        if applicable_matches:
            is_lead = any(ending == form.lead_ending for form, ending in applicable_matches)
            (result.weights_without_scales if is_lead else result.scales_without_weights).append(
                name
            )
        elif identified:
            result.unknown[name] = " or ".join(
                dict.fromkeys(scheme.name for scheme, _, _ in identified)
            )


def to_dequantized_names(names: Collection[str]) -> Collection[str]:
    """Replace the names of each quantized weight's tensors by its dequantized name.

    *names* are returned unchanged if none belongs to a scheme outside the families' tables.
    """
    if all(name.endswith(UNQUANTIZED_ENDINGS) for name in names):
        return names
    all_schemes = _load_schemes()
    dropped = tuple(ending for scheme in all_schemes for ending in scheme.drop_reasons)
    if not any(name.endswith((*dropped, *_list_identifying_endings())) for name in names):
        return names
    forms = [form for scheme in all_schemes for form in scheme.forms]
    endings = {
        end: form for form in forms for end in form.endings if end != form.dequantized_ending
    }
    all_endings, present = tuple(endings), frozenset(names)
    dequantized: dict[str, None] = {}
    for name in names:
        if name.endswith(all_endings):
            dequantized[_find_dequantized_name(name, forms, present)] = None
        elif not name.endswith(dropped):
            dequantized[name] = None
    return list(dequantized)


@cache
def _list_identifying_endings() -> tuple[str, ...]:
    """Return the name suffixes that identify schemes outside the families' tables."""
    forms = (form for scheme in _load_schemes() if not scheme.in_tables for form in scheme.forms)
    return tuple(
        {end for form in forms for end in form.unique_endings if end != form.dequantized_ending}
    )


def _find_dequantized_name(name: str, forms: Iterable[NamingForm], present: Collection[str]) -> str:
    for form in forms:
        for ending in sorted(form.endings, key=len, reverse=True):
            stem = name.removesuffix(ending)
            if stem != name and f"{stem}{form.lead_ending}" in present:
                return f"{stem}{form.dequantized_ending}"
    return name
