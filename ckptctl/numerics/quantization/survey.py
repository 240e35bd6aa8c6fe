"""Detect a checkpoint's quantized weights, of supported and unsupported schemes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from ckptctl.catalog import TensorEntry
from ckptctl.errors import CkptError, DamagedError, UnsupportedError
from ckptctl.numerics.quantization.statement import QUANTIZATION, QuantizationConfig

if TYPE_CHECKING:
    from ckptctl.numerics.quantization.scheme import (
        NamingPattern,
        QuantizedWeight,
        Scheme,
        TensorGroup,
    )

ValueReader = Callable[[TensorEntry], bytes]
Tensors = Mapping[str, TensorEntry]
UNQUANTIZED_ENDINGS = (".weight", ".bias")
UNQUANTIZED_DTYPES = ("bfloat16", "float16", "float32")
"""Dtypes of tensors that are unquantized if their names end in ``UNQUANTIZED_ENDINGS``."""


@dataclass(slots=True)
class QuantizationSurvey:
    """Quantized weights and other tensors of quantization schemes in a checkpoint.

    Attributes:
        weights: Supported weights, in the checkpoint's order.
        errors: Errors in weights of supported schemes, by the name of the tensor of quantized
            elements.
        unknown: Unsupported schemes by tensor name, or by ``quantization_config`` if the method is
            unknown.
        weights_without_scales: Names of quantized tensors without scales.
        scales_without_weights: Names of scales without quantized tensors.
        dropped: Descriptions, by name, of tensors that dequantized models do not need.
        lacks_all_scales: Whether the weights of the stated scheme are there, but no scales.
    """

    weights: list[QuantizedWeight] = field(default_factory=list)
    errors: dict[str, CkptError] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    weights_without_scales: list[str] = field(default_factory=list)
    scales_without_weights: list[str] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    lacks_all_scales: bool = False

    @property
    def is_fully_supported(self) -> bool:
        """Whether all quantized weights can be dequantized, i.e. are supported and complete."""
        return not (
            self.errors
            or self.unknown
            or self.weights_without_scales
            or self.scales_without_weights
        )

    @property
    def scheme_by_tensor(self) -> dict[str, str]:
        """Descriptions of the quantization scheme by tensor.

        Keys are dequantized names of weights, names of quantized tensors with errors, and keys of
        :attr:`unknown`.
        """
        error_descriptions = {
            name: "mismatched scales" if isinstance(error, UnsupportedError) else error.what
            for name, error in self.errors.items()
        }
        error_descriptions |= {
            name: "a tensor is missing"
            for name, error in self.errors.items()
            if isinstance(error, DamagedError)
        }
        return {
            **{weight.key: weight.description for weight in self.weights},
            **error_descriptions,
            **self.unknown,
        }


def looks_unquantized(tensors: Tensors) -> bool:
    """Return whether names and dtypes alone show that no tensor is quantized."""
    return all(
        n.endswith(UNQUANTIZED_ENDINGS) and e.dtype in UNQUANTIZED_DTYPES
        for n, e in tensors.items()
    )


def detect_quantized_weights(
    tensors: Tensors, quant_config: QuantizationConfig, read_values: ValueReader
) -> QuantizationSurvey:
    """Detect quantized weights and their scales among *tensors*.

    Args:
        tensors: All tensors of a checkpoint.
        quant_config: Quantization config of the checkpoint.
        read_values: Reads the bytes of a small tensor, for schemes whose parameters are stored in
            tensors.
    """
    if not quant_config.method and looks_unquantized(tensors):
        return QuantizationSurvey()
    applicable = [scheme for scheme in _load_schemes() if scheme.can_apply(quant_config)]
    # Schemes that the configuration names come first.
    applicable.sort(key=lambda scheme: quant_config.method not in scheme.methods)
    result = QuantizationSurvey()
    used_names = _add_weights(result, applicable, tensors, quant_config, read_values)
    suffixes = {
        suffix: drop_reason
        for scheme in applicable
        for suffix, drop_reason in scheme.drop_reasons.items()
    }
    drop_endings = tuple(suffixes)
    for name in tensors:
        if name not in used_names and name.endswith(drop_endings):
            result.dropped[name] = next(
                drop_text for end, drop_text in suffixes.items() if name.endswith(end)
            )
    _add_unknown_tensors(result, applicable, tensors, used_names)
    is_known_method = any(quant_config.method in scheme.methods for scheme in applicable)
    if quant_config.method and not is_known_method and not result.unknown:
        result.unknown[QUANTIZATION] = f"`{quant_config.method}`"
    return result


def _load_schemes() -> tuple[Scheme, ...]:
    from ckptctl.numerics.quantization.scheme import load_schemes  # late: for a fast start

    return load_schemes()


def _add_weights(
    result: QuantizationSurvey,
    applicable: Iterable[Scheme],
    tensors: Tensors,
    quant_config: QuantizationConfig,
    read_values: ValueReader,
) -> set[str]:
    """Add supported weights and errors to *result*, and return the names of their tensors."""
    by_dtype: dict[str, list[NamingPattern]] = {}
    for pattern in (
        pattern
        for scheme in applicable
        for pattern in scheme.naming_patterns
        if pattern.build_weight
    ):
        for dtype in pattern.dtypes:
            by_dtype.setdefault(dtype, []).append(pattern)
    from ckptctl.numerics.quantization.scheme import TensorGroup  # late: for a fast start

    used_names: set[str] = set()
    matched_groups: list[tuple[NamingPattern, TensorGroup]] = []
    for name, entry in tensors.items():
        match = _match_naming_pattern(by_dtype.get(entry.dtype, ()), name, tensors)
        if match is None or (build_weight := match[0].build_weight) is None:
            continue
        pattern, part_entries = match
        used_names.add(name)
        used_names.update(part.name for part in part_entries.values())
        for role, part in part_entries.items():
            if pattern.parts[role].drop_reason:
                result.dropped[part.name] = pattern.parts[role].drop_reason
        part_entries = {
            role: part for role, part in part_entries.items() if not pattern.parts[role].drop_reason
        }
        key = f"{name.removesuffix(pattern.lead_suffix)}{pattern.dequantized_suffix}"
        group = TensorGroup(key, entry, part_entries, quant_config, read_values)
        try:
            pattern.require_parts(group)
            result.weights.append(build_weight(group))
            matched_groups.append((pattern, group))
        except CkptError as error:
            result.errors[name] = error
    _report_incomplete_weights(result, matched_groups)
    _add_unpaired_tensors(
        result,
        {id(pattern): pattern for pattern, _ in matched_groups}.values(),
        tensors,
        used_names,
    )
    if not matched_groups and not result.errors:
        stated = [
            pattern
            for scheme in applicable
            if quant_config.method in scheme.methods
            for pattern in scheme.naming_patterns
        ]
        _add_weights_alone(result, stated, tensors, used_names)
    return used_names


def _add_weights_alone(
    result: QuantizationSurvey,
    patterns: Sequence[NamingPattern],
    tensors: Tensors,
    used_names: set[str],
) -> None:
    """Add quantized tensors to *result* if no weight of the stated scheme has its scales.

    Tensors of modules with others that may be scales of an unknown name are omitted.
    """
    modules = Counter(name.rpartition(".")[0] for name in tensors if not name.endswith(".bias"))
    for name, entry in tensors.items():
        if (
            name not in used_names
            and entry.dtype not in UNQUANTIZED_DTYPES
            and modules[name.rpartition(".")[0]] == 1
            and any(
                pattern.build_weight
                and name.endswith(pattern.lead_suffix)
                and pattern.lead_suffix
                and entry.dtype in pattern.dtypes
                for pattern in patterns
            )
        ):
            result.weights_without_scales.append(name)
            used_names.add(name)
            result.lacks_all_scales = True


def _match_naming_pattern(
    patterns: Iterable[NamingPattern], name: str, tensors: Tensors
) -> tuple[NamingPattern, Tensors] | None:
    """Return the naming pattern of the quantized tensor *name*, and its other tensors by role.

    If no pattern has all of its tensors, the one with the most is returned, or None if none match.
    """
    best_match: tuple[NamingPattern, Tensors] | None = None
    for pattern in patterns:
        if not name.endswith(pattern.lead_suffix):
            continue
        stem = name.removesuffix(pattern.lead_suffix)
        names = {role: f"{stem}{part.suffix}" for role, part in pattern.parts.items()}
        present_parts = {role: tensors[part] for role, part in names.items() if part in tensors}
        needed = {role for role, part in pattern.parts.items() if part.is_always_required}
        if needed <= present_parts.keys() and (present_parts or not pattern.parts):
            return pattern, present_parts
        if present_parts and (best_match is None or len(present_parts) > len(best_match[1])):
            best_match = pattern, present_parts
    return best_match


def _report_incomplete_weights(
    result: QuantizationSurvey, matched_groups: Sequence[tuple[NamingPattern, TensorGroup]]
) -> None:
    """Add errors for weights with a tensor missing that other weights of the pattern have."""
    from ckptctl.numerics.quantization.scheme import missing_parts_error

    checked_parts = {
        (id(pattern), role): (pattern, part)
        for pattern, _ in matched_groups
        for role, part in pattern.parts.items()
        if part.is_complete is not None
    }
    errors: dict[str, CkptError] = {}
    for (pattern_id, role), (pattern, part) in checked_parts.items():
        assert part.is_complete is not None
        completeness = [
            (group, part.is_complete(group))
            for group_pattern, group in matched_groups
            if id(group_pattern) == pattern_id
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
                name = f"{group.lead.name.removesuffix(pattern.lead_suffix)}{part.suffix}"
                why = f"other weights have this tensor, for example `{complete_example}`"
                errors[group.lead.name] = missing_parts_error(group, {name: why})
    result.errors |= errors
    result.weights = [weight for weight in result.weights if weight.lead not in errors]


def _add_unpaired_tensors(
    result: QuantizationSurvey,
    patterns: Iterable[NamingPattern],
    tensors: Tensors,
    used_names: set[str],
) -> None:
    """Add quantized tensors without scales, and scales without quantized tensors, to *result*.

    Only *patterns* of other, complete weights are checked, since names alone do not identify these
    schemes.
    """
    for pattern in (pattern for pattern in patterns if pattern.lead_suffix):
        ends = tuple(part.suffix for part in pattern.parts.values() if part.is_always_required)
        for name, entry in tensors.items():
            if name in used_names or entry.dtype in UNQUANTIZED_DTYPES:
                continue
            scale_ending = next(
                (scale_ending for scale_ending in ends if name.endswith(scale_ending)), None
            )
            if name.endswith(pattern.lead_suffix) and entry.dtype in pattern.dtypes:
                result.weights_without_scales.append(name)
                used_names.add(name)
            elif (
                scale_ending
                and f"{name.removesuffix(scale_ending)}{pattern.lead_suffix}" not in tensors
            ):
                result.scales_without_weights.append(name)
                used_names.add(name)


def _add_unknown_tensors(
    result: QuantizationSurvey,
    applicable: Collection[Scheme],
    tensors: Tensors,
    used_names: Collection[str],
) -> None:
    """Add tensors of unsupported schemes, and unpaired ones of supported schemes, to *result*."""
    patterns = [
        (scheme, pattern) for scheme in _load_schemes() for pattern in scheme.naming_patterns
    ]
    ending_dtypes = [
        (end, dtypes) for _, pattern in patterns for end, dtypes in pattern.unique_suffixes.items()
    ]
    general_endings = tuple({end for end, dtypes in ending_dtypes if not dtypes})
    patterns_by_dtype: dict[str, list[tuple[Scheme, NamingPattern]]] = {}
    identifying_dtypes = {dtype for _, dtypes in ending_dtypes for dtype in dtypes}
    for name, entry in tensors.items():
        if name in used_names or not (
            entry.dtype in identifying_dtypes or name.endswith(general_endings)
        ):
            continue
        if name in result.dropped:
            continue
        if entry.dtype not in patterns_by_dtype:
            patterns_by_dtype[entry.dtype] = [
                (scheme, pattern)
                for scheme, pattern in patterns
                if any(
                    not dtypes or entry.dtype in dtypes
                    for dtypes in pattern.unique_suffixes.values()
                )
            ]
        identified = [
            (scheme, pattern, pattern.find_unique_suffix(name, entry.dtype))
            for scheme, pattern in patterns_by_dtype[entry.dtype]
        ]
        identified = [
            (scheme, pattern, suffix)
            for scheme, pattern, suffix in identified
            if suffix is not None
        ]
        applicable_matches = [
            (pattern, suffix) for scheme, pattern, suffix in identified if scheme in applicable
        ]
        if applicable_matches:
            is_lead = any(suffix == pattern.lead_suffix for pattern, suffix in applicable_matches)
            (result.weights_without_scales if is_lead else result.scales_without_weights).append(
                name
            )
        elif identified:
            result.unknown[name] = " or ".join(
                dict.fromkeys(scheme.name for scheme, _, _ in identified)
            )


def to_dequantized_names(
    names: Collection[str], unknown_names: Collection[str] = ()
) -> Collection[str]:
    """Replace the tensor names of each quantized weight by the name of the dequantized tensor.

    *names* are returned unchanged if no tensor is to be dropped, and no name identifies a scheme
    whose tensors are missing in the families' tables (``Scheme.in_tables``). The tables of some
    families also lack other schemes, which *unknown_names*, those that no table lists, show.
    """
    if all(name.endswith(UNQUANTIZED_ENDINGS) for name in names):
        return names
    all_schemes = _load_schemes()
    dropped = tuple(suffix for scheme in all_schemes for suffix in scheme.drop_reasons)
    if not any(
        name.endswith((*dropped, *_list_identifying_suffixes(in_tables=False))) for name in names
    ) and not any(
        name.endswith(_list_identifying_suffixes(in_tables=True)) for name in unknown_names
    ):
        return names
    patterns = [pattern for scheme in all_schemes for pattern in scheme.naming_patterns]
    suffixes = {
        end: pattern
        for pattern in patterns
        for end in pattern.suffixes
        if end != pattern.dequantized_suffix
    }
    all_endings, present = tuple(suffixes), frozenset(names)
    dequantized: dict[str, None] = {}
    for name in names:
        if name.endswith(all_endings):
            dequantized[_find_dequantized_name(name, patterns, present)] = None
        elif not name.endswith(dropped):
            dequantized[name] = None
    return list(dequantized)


@cache
def _list_identifying_suffixes(*, in_tables: bool) -> tuple[str, ...]:
    """List the name suffixes that identify schemes that families' tables list, or do not."""
    patterns = (
        pattern
        for scheme in _load_schemes()
        if scheme.in_tables == in_tables
        for pattern in scheme.naming_patterns
    )
    return tuple(
        {
            end
            for pattern in patterns
            for end in pattern.unique_suffixes
            if end != pattern.dequantized_suffix
        }
    )


def _find_dequantized_name(
    name: str, patterns: Iterable[NamingPattern], present: Collection[str]
) -> str:
    for pattern in patterns:
        for suffix in sorted(pattern.suffixes, key=len, reverse=True):
            stem = name.removesuffix(suffix)
            if stem != name and f"{stem}{pattern.lead_suffix}" in present:
                return f"{stem}{pattern.dequantized_suffix}"
    return name
