"""What a scheme of quantization consists of, and the registry of those that are known.

A module of ``schemes`` has ``SCHEMES``. All else follows from it: what ``inspect`` calls a
weight, which names a family's table is not asked about, what ``--dequantize`` computes, and what is
refused.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

from ckptctl.catalog import TensorEntry
from ckptctl.errors import DamagedError, MappingError, UnsupportedError, listed
from ckptctl.numerics.quantization import schemes as modules
from ckptctl.numerics.quantization.formulas import ScaleBlocks
from ckptctl.numerics.quantization.statement import QuantizationStatement


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """The tensors that stand for one plain tensor, and how that is computed.

    Attributes:
        key: The plain tensor's name.
        lead: The tensor of the quantized elements, whose place the plain one takes.
        inputs: The tensors that it is computed from, in the order that the kind expects.
        how: For people, as in ``fp8 blocks of 128x128``.
        kind: What computes it: a kind in ``ckptctl/numerics/kinds``.
        shape: Its shape, as the kind computes it.
        arguments: What else the kind has to know; see :class:`~ckptctl.catalog.Computed`.
        transposed: Whether the plain tensor has the last two dimensions in the other order.
        others: Tensors that belong to it as well, and that nothing is computed from.
    """

    key: str
    lead: str
    inputs: tuple[str, ...]
    how: str
    kind: str
    shape: tuple[int, ...]
    arguments: object = None
    transposed: bool = False
    others: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Return all tensors that stand for the plain one, the lead first."""
        return tuple(dict.fromkeys((*self.inputs, *self.others)))

    @property
    def scale_blocks(self) -> ScaleBlocks | None:
        """Return the blocks of rows and columns that share a scale, or None if groups do."""
        return self.arguments if isinstance(self.arguments, ScaleBlocks) else None


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors that a :class:`Form` takes for one plain tensor.

    Attributes:
        key: The plain tensor's name.
        lead: The quantized elements.
        parts: What lies beside them: tensors by role.
        statement: What the checkpoint's files say.
        values: Returns the bytes of a tensor of a few elements.
        derived: What a scheme has derived of the statement, so that it does so once.
    """

    key: str
    lead: TensorEntry
    parts: Mapping[str, TensorEntry]
    statement: QuantizationStatement
    values: Callable[[TensorEntry], bytes]
    derived: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def module(self) -> str:
        """Return the name of the layer, as configurations name it."""
        return self.key.removesuffix(".weight")

    def quantized(
        self,
        how: str,
        kind: str,
        shape: tuple[int, ...],
        roles: Sequence[str] = (),
        arguments: object = None,
        *,
        transposed: bool = False,
    ) -> QuantizedWeight:
        """Return what the group stands for; see :class:`QuantizedWeight`.

        It is computed from the quantized elements, followed by the parts in *roles* that are there.
        """
        read = [self.parts[role].name for role in roles if role in self.parts]
        others = [part.name for role, part in self.parts.items() if role not in roles]
        return QuantizedWeight(
            self.key,
            self.lead.name,
            (self.lead.name, *read),
            how,
            kind,
            shape,
            arguments,
            transposed,
            tuple(others),
        )

    def unfit(self, why: str, role: str | None = None) -> UnsupportedError:
        """Return the error that the tensors do not fit each other; *role* is the one to blame."""
        if role is None or role not in self.parts:
            parts = (self.lead, *self.parts.values())
            told = f"`{self.lead.name}` does not match its declared quantization"
        else:
            parts = (self.lead, self.parts[role])
            told = f"`{self.parts[role].name}` does not fit `{self.lead.name}`"
        shapes = " and ".join(f"{part.dtype} {list(part.shape)}" for part in parts)
        return UnsupportedError(told, where=self.lead.name, why=f"{shapes}: {why}")

    def unstated(self, key: str, why: str) -> MappingError:
        """Return the error that the configuration has to say something, and does not."""
        error = self.statement.wrong(key, why)
        error.hint = f"correct the configuration to dequantize `{self.lead.name}`"
        return error


Reason: TypeAlias = Callable[[Group], str | None]
"""Returns what the configuration, or another tensor, says that decides; None: nothing does."""


def always(_: Group) -> str:
    """Say why every quantized weight has a tensor, whatever the configuration says."""
    return "dequantization requires it"


def never(_: Group) -> None:
    """Return that nothing decides."""


@dataclass(frozen=True, slots=True)
class WeightPart:
    """A tensor that is stored next to the quantized elements.

    Attributes:
        ending: How its name ends.
        required: Says why it has to be there, or None where it may be missing.
        forbidden: Says why it cannot be there, or None where it may.
        uniform: Returns whether a weight has all of it, or None where something else decides that;
            where nothing does, all weights of a checkpoint have it alike.
        dropped: What it is, where a plain model has no use for it and no weight depends on it.
    """

    ending: str
    required: Reason = never
    forbidden: Reason = never
    uniform: Callable[[Group], bool | None] | None = None
    dropped: str = ""

    @property
    def essential(self) -> bool:
        """Return whether it has to be there whatever the configuration says."""
        return self.required is always


@dataclass(frozen=True, slots=True)
class Form:
    """How the tensors are named that stand for one plain tensor.

    All endings are put behind the same name.

    Attributes:
        lead: How the tensor of the quantized elements ends.
        dtypes: Which dtypes that has.
        parts: The tensors next to it, by role; which of them have to be there, may be missing, or
            cannot be there.
        make: Says what a group of such tensors stands for, after it has checked that they fit;
            None: that is not understood.
        plain: How the plain tensor ends.
        tells: Endings that nothing else has, each with the dtypes that it tells something of;
            none: of any. Such a tensor that is not part of a whole group is an error.
    """

    lead: str
    dtypes: tuple[str, ...]
    parts: Mapping[str, WeightPart] = field(default_factory=dict)
    make: Callable[[Group], QuantizedWeight] | None = None
    plain: str = ".weight"
    tells: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def endings(self) -> tuple[str, ...]:
        """Return all endings."""
        return (self.lead, *(part.ending for part in self.parts.values()))

    def require_parts(self, group: Group) -> None:
        """Refuse a group in which a required tensor is missing, or a forbidden one is there.

        Raises:
            DamagedError: A tensor is missing.
            UnsupportedError: The configuration rules a tensor out.
            MappingError: What the configuration says is not understood.
        """
        stem = group.lead.name.removesuffix(self.lead)
        missing: dict[str, str] = {}
        for role, part in self.parts.items():
            if role not in group.parts and (why := part.required(group)):
                missing[f"{stem}{part.ending}"] = why
        if missing:
            raise missing_error(group, missing)
        for role, part in self.parts.items():
            if role in group.parts and (why := part.forbidden(group)):
                raise group.unfit(f"{why}, so this tensor is not allowed", role)

    def teller(self, name: str, dtype: str) -> str | None:
        """Return the ending of *name* that tells that something is stored so, if it has one."""
        for ending, dtypes in self.tells.items():
            if name.endswith(ending) and (not dtypes or dtype in dtypes):
                return ending
        return None


@dataclass(frozen=True, slots=True)
class Scheme:
    """A way in which weights are quantized.

    Attributes:
        name: What people call it.
        forms: How its tensors may be named, the more special ones first.
        methods: The ``quant_method`` of a configuration that says so.
        by_names: Whether names, dtypes and shapes alone tell it, whatever a configuration says.
        in_tables: Whether families' tables have a place for its tensors.
        dropped: Tensors that a plain model has no use for: how they end, and what they are.
    """

    name: str
    forms: tuple[Form, ...] = ()
    methods: tuple[str, ...] = ()
    by_names: bool = False
    in_tables: bool = False
    dropped: Mapping[str, str] = field(default_factory=dict)

    def fits(self, statement: QuantizationStatement) -> bool:
        """Return whether a checkpoint of which that is said may be quantized so."""
        understood = any(form.make for form in self.forms)
        return understood and (self.by_names or statement.method in self.methods)


def missing_error(group: Group, missing: Mapping[str, str]) -> DamagedError:
    """Return the error that required tensors of a group are missing.

    Args:
        group: What is there.
        missing: The names of those that are not, and why they are required.
    """
    verb = "is" if len(missing) == 1 else "are"
    return DamagedError(
        f"{listed(list(missing))} {verb} missing",
        where=group.lead.name,
        why=f"`{group.lead.name}` is quantized: {'; '.join(dict.fromkeys(missing.values()))}",
    )


@cache
def schemes() -> tuple[Scheme, ...]:
    """Return all schemes, by name of their module."""
    names = sorted(module.name for module in pkgutil.iter_modules(modules.__path__))
    found = (importlib.import_module(f"{modules.__name__}.{name}") for name in names)
    every: list[Scheme] = []
    for module in found:
        every += module.SCHEMES
    return tuple(every)


def methods() -> frozenset[str]:
    """Return each ``quant_method`` that is understood."""
    understood = (one for one in schemes() if any(form.make for form in one.forms))
    return frozenset(method for one in understood for method in one.methods)
