"""Definition and registry of quantization schemes.

Each module of ``schemes`` defines ``SCHEMES``, from which follow the descriptions that ``inspect``
shows, the tensor names that families' tables need not list, how ``--dequantize`` computes weights,
and which errors are raised.
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
    """Stored tensors of one quantized weight, and how to dequantize it.

    Attributes:
        key: Name of the dequantized tensor.
        lead: Name of the tensor of quantized elements, which the dequantized tensor replaces.
        inputs: Names of the tensors that the computation reads, in the order that *kind* expects.
        description: Description for messages, such as ``fp8 blocks of 128x128``.
        kind: Name of the kind in ``ckptctl/numerics/kinds`` that computes the dequantized tensor.
        shape: Shape of the computed tensor, before *transposed* applies.
        arguments: Arguments of the kind; see :class:`~ckptctl.catalog.ComputedTensor`.
        transposed: Whether the last two dimensions are swapped after the computation.
        others: Names of the weight's other tensors, which the computation does not read.
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
        """Names of all stored tensors of the weight, with the quantized elements first."""
        return tuple(dict.fromkeys((*self.inputs, *self.others)))

    @property
    def scale_blocks(self) -> ScaleBlocks | None:
        """Size of the blocks that share a scale, or None if scales are not for such blocks."""
        return self.arguments if isinstance(self.arguments, ScaleBlocks) else None


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors that a :class:`NamingPattern` matches as one weight.

    Attributes:
        key: Name of the dequantized tensor.
        lead: The tensor of quantized elements.
        parts: The other tensors of the weight, such as scales, by role.
        quant_config: The checkpoint's quantization config.
        read_values: Reads the bytes of a small tensor.
        cache: Cache for values that a scheme derives from *quant_config*.
    """

    key: str
    lead: TensorEntry
    parts: Mapping[str, TensorEntry]
    quant_config: QuantizationConfig
    read_values: Callable[[TensorEntry], bytes]
    cache: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def module(self) -> str:
        """Name of the module that the weight belongs to, as quantization configs state it."""
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

        The inputs of the kind are the quantized elements, then the existing tensors with *roles*.
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
        """Build the error for mismatched tensors of a weight.

        The error names the tensor with *role*, or the quantized elements if none has that role.
        """
        if role is None or role not in self.parts:
            parts = (self.lead, *self.parts.values())
            message = f"`{self.lead.name}` does not match its declared quantization"
        else:
            parts = (self.lead, self.parts[role])
            message = f"`{self.parts[role].name}` does not fit `{self.lead.name}`"
        shapes = " and ".join(f"{part.dtype} {list(part.shape)}" for part in parts)
        return UnsupportedError(message, where=self.lead.name, why=f"{shapes}: {why}")

    def missing_setting_error(self, key: str, why: str) -> MappingError:
        """Build the error for a required config setting that is missing or invalid."""
        error = self.quant_config.invalid_value_error(key, why)
        error.hint = f"correct the configuration to dequantize `{self.lead.name}`"
        return error


Reason: TypeAlias = Callable[[TensorGroup], str | None]
"""Function that returns why a rule applies to a weight, or None if the rule does not apply."""


def always_required(_: TensorGroup) -> str:
    """Return the reason for a tensor that the scheme requires for every weight."""
    return "dequantization requires it"


def never_applies(_: TensorGroup) -> None:
    """Return None, for a tensor that is never required or never forbidden."""


@dataclass(frozen=True, slots=True)
class WeightPart:
    """A tensor stored next to the quantized elements.

    Attributes:
        suffix: Suffix of the tensor's name.
        required: Returns why the tensor must be present, or None if it may be missing.
        forbidden: Returns why the tensor must be absent, or None if it is allowed.
        is_complete: Returns whether a weight has the complete tensor, or None if the config decides
            that. If no config decides, either all weights of a checkpoint have it or none.
        drop_reason: Description of the tensor if dequantized models do not need it, else an empty
            string.
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
    """Naming pattern of the tensors of one weight, as suffixes of a common prefix.

    Attributes:
        lead_suffix: Name suffix of the tensor of quantized elements.
        dtypes: Possible dtypes of that tensor.
        parts: The other tensors by role, which may be required, optional or forbidden.
        build_weight: Checks the tensors of a weight and builds a :class:`QuantizedWeight`, or None
            if the scheme is unsupported.
        dequantized_suffix: Name suffix of the dequantized tensor.
        unique_suffixes: Name suffixes that identify the scheme, each with the dtypes for which it
            does so (empty for any dtype). A tensor with such a suffix is an error if other tensors
            of its weight are missing.
    """

    lead_suffix: str
    dtypes: tuple[str, ...]
    parts: Mapping[str, WeightPart] = field(default_factory=dict)
    build_weight: Callable[[TensorGroup], QuantizedWeight] | None = None
    dequantized_suffix: str = ".weight"
    unique_suffixes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Name suffixes of all tensors of a weight, required or not."""
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
        """Return the suffix of *name* that identifies the scheme, or None if it has none."""
        for suffix, dtypes in self.unique_suffixes.items():
            if name.endswith(suffix) and (not dtypes or dtype in dtypes):
                return suffix
        return None


@dataclass(frozen=True, slots=True)
class Scheme:
    """Quantization scheme, such as GPTQ or block-wise FP8.

    Attributes:
        name: Name for messages.
        naming_patterns: Naming patterns of its tensors, most specific first.
        methods: Values of ``quant_method`` that select this scheme.
        needs_no_config: Whether tensor names, dtypes and shapes identify the scheme if the
            checkpoint has no quantization config.
        in_tables: Whether families' tables list the scheme's tensors.
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
        """Return whether a checkpoint with *quant_config* may contain weights of the scheme."""
        is_supported = any(pattern.build_weight for pattern in self.naming_patterns)
        return is_supported and (self.needs_no_config or quant_config.method in self.methods)


def missing_parts_error(group: TensorGroup, missing: Mapping[str, str]) -> DamagedError:
    """Build the error for missing required tensors of a weight.

    Args:
        group: The tensors that are present.
        missing: Why each missing tensor is required, by tensor name.
    """
    verb = "is" if len(missing) == 1 else "are"
    return DamagedError(
        f"{quote_names(list(missing))} {verb} missing",
        where=group.lead.name,
        why=f"`{group.lead.name}` is quantized: {'; '.join(dict.fromkeys(missing.values()))}",
    )


@cache
def load_schemes() -> tuple[Scheme, ...]:
    """Load the schemes of all modules in ``schemes``, ordered by module name."""
    names = sorted(module.name for module in pkgutil.iter_modules(modules.__path__))
    loaded_modules = (importlib.import_module(f"{modules.__name__}.{name}") for name in names)
    all_schemes: list[Scheme] = []
    for module in loaded_modules:
        all_schemes += module.SCHEMES
    return tuple(all_schemes)


def list_supported_methods() -> frozenset[str]:
    """Return the values of ``quant_method`` that at least one scheme supports."""
    supported_schemes = (
        scheme
        for scheme in load_schemes()
        if any(pattern.build_weight for pattern in scheme.naming_patterns)
    )
    return frozenset(method for scheme in supported_schemes for method in scheme.methods)
