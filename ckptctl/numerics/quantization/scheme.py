"""Definition and registry of quantization schemes.

Each module of ``schemes`` defines ``SCHEMES``, which determines the descriptions in ``inspect``,
the names that families' tables need not have, the computations of ``--dequantize``, and the errors.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

from ckptctl.catalog import TensorEntry
from ckptctl.errors import DamagedError, MappingError, UnsupportedError, quote_names
from ckptctl.numerics.quantization import schemes as modules
from ckptctl.numerics.quantization.formulas import ScaleBlocks
from ckptctl.numerics.quantization.statement import QuantizationConfig


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """The tensors that store one weight quantized, and how to dequantize it.

    Attributes:
        key: Name of the dequantized tensor.
        lead: Name of the tensor of quantized elements, which the dequantized tensor replaces.
        inputs: Names of the tensors from which it is computed, in the order that the kind expects.
        description: Description for messages, such as ``fp8 blocks of 128x128``.
        kind: The kind in ``ckptctl/numerics/kinds`` that computes it.
        shape: The shape that the kind computes.
        arguments: Arguments of the kind; see :class:`~ckptctl.catalog.ComputedTensor`.
        transposed: Whether the last two dimensions are swapped after the computation.
        others: Names of other tensors of the weight, which the computation does not need.
    """

    key: str
    lead: str
    inputs: tuple[str, ...]
    description: str
    kind: str
    shape: tuple[int, ...]
    arguments: object = None
    transposed: bool = False
    others: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors that store the weight, the lead first."""
        return tuple(dict.fromkeys((*self.inputs, *self.others)))

    @property
    def scale_blocks(self) -> ScaleBlocks | None:
        """Blocks of rows and columns that share a scale, or None for other scales."""
        return self.arguments if isinstance(self.arguments, ScaleBlocks) else None


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors that a :class:`NamingPattern` matches as one weight.

    Attributes:
        key: Name of the dequantized tensor.
        lead: The tensor of quantized elements.
        parts: The other tensors of the weight, by role.
        quant_config: The checkpoint's quantization config.
        read_values: Reads the bytes of a small tensor.
        cache: Cache for values that a scheme derives from *statement*.
    """

    key: str
    lead: TensorEntry
    parts: Mapping[str, TensorEntry]
    quant_config: QuantizationConfig
    read_values: Callable[[TensorEntry], bytes]
    cache: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def module(self) -> str:
        """Name of the layer, as quantization configs have it."""
        return self.key.removesuffix(".weight")

    def build_weight(
        self,
        description: str,
        kind_name: str,
        shape: tuple[int, ...],
        roles: Sequence[str] = (),
        arguments: object = None,
        *,
        transposed: bool = False,
    ) -> QuantizedWeight:
        """Build the quantized weight of the group.

        The kind's inputs are the quantized elements, then the tensors in *roles* that are present.
        See :class:`QuantizedWeight` for the other parameters.
        """
        input_names = [self.parts[role].name for role in roles if role in self.parts]
        other_names = [part.name for role, part in self.parts.items() if role not in roles]
        return QuantizedWeight(
            self.key,
            self.lead.name,
            (self.lead.name, *input_names),
            description,
            kind_name,
            shape,
            arguments,
            transposed,
            tuple(other_names),
        )

    def mismatch_error(self, why: str, role: str | None = None) -> UnsupportedError:
        """Build the error for tensors that do not match each other, naming the one with *role*."""
        if role is None or role not in self.parts:
            parts = (self.lead, *self.parts.values())
            message = f"`{self.lead.name}` does not match its declared quantization"
        else:
            parts = (self.lead, self.parts[role])
            message = f"`{self.parts[role].name}` does not fit `{self.lead.name}`"
        shapes = " and ".join(f"{part.dtype} {list(part.shape)}" for part in parts)
        return UnsupportedError(message, where=self.lead.name, why=f"{shapes}: {why}")

    def missing_setting_error(self, key: str, why: str) -> MappingError:
        """Build the error for a required but missing or invalid setting."""
        error = self.quant_config.invalid_value_error(key, why)
        error.hint = f"correct the configuration to dequantize `{self.lead.name}`"
        return error


Reason: TypeAlias = Callable[[TensorGroup], str | None]
"""Function that returns why a rule applies to a weight, or None if it does not apply."""


def always_required(_: TensorGroup) -> str:
    """Return why a tensor is required for every weight."""
    return "dequantization requires it"


def never_applies(_: TensorGroup) -> None:
    """Return None, since no reason applies."""


@dataclass(frozen=True, slots=True)
class WeightPart:
    """A tensor stored next to the quantized elements.

    Attributes:
        suffix: Suffix of the tensor's name.
        required: Returns why the tensor must be present, or None if it may be missing.
        forbidden: Returns why the tensor must be absent, or None if it is allowed.
        is_complete: Returns whether a weight has the complete tensor, or None if the config decides
            that. Without such a config, either all weights of a checkpoint have it or none.
        drop_reason: Description of the tensor if dequantized models do not need it, else empty.
    """

    suffix: str
    required: Reason = never_applies
    forbidden: Reason = never_applies
    is_complete: Callable[[TensorGroup], bool | None] | None = None
    drop_reason: str = ""

    @property
    def is_always_required(self) -> bool:
        """Whether the tensor must be present regardless of the config."""
        return self.required is always_required


@dataclass(frozen=True, slots=True)
class NamingPattern:
    """Names of the tensors that store one weight, as suffixes of a common prefix.

    Attributes:
        lead_suffix: Name suffix of the tensor of quantized elements.
        dtypes: Possible dtypes of that tensor.
        parts: The other tensors by role, which may be required, optional or forbidden.
        build_weight: Checks such tensors and builds the weight, or None if the scheme is
            unsupported.
        dequantized_suffix: Name suffix of the dequantized tensor.
        unique_suffixes: Name suffixes that identify the scheme, each with the dtypes for which that
            holds (empty for any). Such a tensor without the others of its weight is an error.
    """

    lead_suffix: str
    dtypes: tuple[str, ...]
    parts: Mapping[str, WeightPart] = field(default_factory=dict)
    build_weight: Callable[[TensorGroup], QuantizedWeight] | None = None
    dequantized_suffix: str = ".weight"
    unique_suffixes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Name suffixes of all tensors of a weight."""
        return (self.lead_suffix, *(part.suffix for part in self.parts.values()))

    def require_parts(self, group: TensorGroup) -> None:
        """Raise if a required tensor is missing, or a forbidden one is present.

        Raises:
            DamagedError: A tensor is missing.
            UnsupportedError: The config forbids a tensor.
            MappingError: The config has an unsupported value.
        """
        stem = group.lead.name.removesuffix(self.lead_suffix)
        missing: dict[str, str] = {}
        for role, part in self.parts.items():
            if role not in group.parts and (why := part.required(group)):
                missing[f"{stem}{part.suffix}"] = why
        if missing:
            raise missing_parts_error(group, missing)
        for role, part in self.parts.items():
            if role in group.parts and (why := part.forbidden(group)):
                raise group.mismatch_error(f"{why}, so this tensor is not allowed", role)

    def find_unique_suffix(self, name: str, dtype: str) -> str | None:
        """Return the suffix by which *name* identifies the scheme, or None."""
        for suffix, dtypes in self.unique_suffixes.items():
            if name.endswith(suffix) and (not dtypes or dtype in dtypes):
                return suffix
        return None


@dataclass(frozen=True, slots=True)
class Scheme:
    """A quantization scheme.

    Attributes:
        name: Name for messages.
        naming_patterns: Naming patterns of its tensors, most specific first.
        methods: Values of ``quant_method`` for this scheme.
        needs_no_config: Whether names, dtypes and shapes identify it without a config.
        in_tables: Whether families' tables include its tensors.
        drop_reasons: Name suffixes of tensors that dequantized models do not need, with the
            reasons.
    """

    name: str
    naming_patterns: tuple[NamingPattern, ...] = ()
    methods: tuple[str, ...] = ()
    needs_no_config: bool = False
    in_tables: bool = False
    drop_reasons: Mapping[str, str] = field(default_factory=dict)

    def can_apply(self, quant_config: QuantizationConfig) -> bool:
        """Return whether a checkpoint with this quantization config may use the scheme."""
        is_supported = any(pattern.build_weight for pattern in self.naming_patterns)
        return is_supported and (self.needs_no_config or quant_config.method in self.methods)


def missing_parts_error(group: TensorGroup, missing: Mapping[str, str]) -> DamagedError:
    """Build the error for missing required tensors of a weight.

    Args:
        group: The tensors that are present.
        missing: Names of the missing tensors, and why they are required.
    """
    verb = "is" if len(missing) == 1 else "are"
    return DamagedError(
        f"{quote_names(list(missing))} {verb} missing",
        where=group.lead.name,
        why=f"`{group.lead.name}` is quantized: {'; '.join(dict.fromkeys(missing.values()))}",
    )


@cache
def load_schemes() -> tuple[Scheme, ...]:
    """Load all schemes, in the order of their modules' names."""
    names = sorted(module.name for module in pkgutil.iter_modules(modules.__path__))
    loaded_modules = (importlib.import_module(f"{modules.__name__}.{name}") for name in names)
    all_schemes: list[Scheme] = []
    for module in loaded_modules:
        all_schemes += module.SCHEMES
    return tuple(all_schemes)


def list_supported_methods() -> frozenset[str]:
    """Return every supported ``quant_method``."""
    supported_schemes = (
        scheme
        for scheme in load_schemes()
        if any(pattern.build_weight for pattern in scheme.naming_patterns)
    )
    return frozenset(method for scheme in supported_schemes for method in scheme.methods)
