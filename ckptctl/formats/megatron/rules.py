"""Read rules files, which define how Megatron's ranks divide tensors.

A rules file is TOML. A ``[[rule]]`` table names the dimension along which tensor-parallel ranks
divide tensors. ``[layers]`` lists the containers whose layers pipeline stages divide, and
``[experts]`` the names that contain an expert number. The file ``core.toml``
next to this module is an example.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from ckptctl.catalog import Box
from ckptctl.errors import SourceNotFoundError, UsageError, format_option
from ckptctl.storage.pickles.torch_tensors import MAX_RANK
from ckptctl.storage.schema import (
    NOT_EMPTY,
    ClosedSchema,
    MalformedError,
    MismatchError,
    Natural,
    read_as,
    size_between,
    value_in_range,
    wrap_malformed_errors,
)
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

Shape = tuple[int, ...]
FIRST_LAYER, SECOND_LAYER = "linear_fc1", "linear_fc2"
BUILT_IN_RULES_NAME = "megatron-core"
GATED = "gated"
NUMBER_MARK = "#"
MAX_PARTS = 1024
RowParts = (
    Literal["gated"]
    | Annotated[int, value_in_range(1, MAX_PARTS + 1)]
    | Annotated[tuple[Natural, ...], size_between(1, MAX_PARTS)]
)


@dataclass(frozen=True, slots=True)
class DivisionRule(ClosedSchema):
    """Division of tensors among tensor-parallel ranks, as defined by a ``[[rule]]`` table.

    Attributes:
        names: Globs for tensor names, in which ``*`` matches any characters.
        dim: Dimension that ranks divide, or None if every rank has the full tensor.
        parts: Number of equal fused tensors along *dim*, which are divided separately, or the
            length of each on one rank. ``gated`` means two in gated layers and one otherwise.
        size: Training argument with the global size of *dim*.
        replicated: Whether the table states that no dimension is divided.
    """

    names: Annotated[tuple[str, ...], NOT_EMPTY]
    dim: Annotated[int, value_in_range(0, MAX_RANK)] | None = None
    parts: RowParts = 1
    size: str | None = None
    replicated: bool = False


@dataclass(frozen=True, slots=True)
class _ExpertsTable(ClosedSchema):
    """The ``[experts]`` table.

    Attributes:
        names: Substrings of tensor names, with ``#`` for the expert number.
        count: Training argument with the number of experts.
    """

    names: tuple[str, ...] = ()
    count: str | None = None


@dataclass(frozen=True, slots=True)
class _RulesFile(ClosedSchema):
    """Content of a rules file."""

    rule: tuple[DivisionRule, ...] = ()
    layers: Mapping[str, str] = field(default_factory=dict)
    experts: _ExpertsTable = _ExpertsTable()


@dataclass(frozen=True, slots=True)
class Rules:
    """A parsed rules file.

    Attributes:
        where: Path of the file for error messages.
        rules: Rules in order of precedence.
        layers: For each container whose layers pipeline stages divide, the training argument with
            its number of layers, or an empty string.
        experts: Regular expressions for names with an expert number, which is group 1.
        experts_count: Training argument with the number of experts in a layer.
    """

    where: str
    rules: tuple[DivisionRule, ...] = ()
    layers: Mapping[str, str] = field(default_factory=dict)
    experts: tuple[re.Pattern[str], ...] = ()
    experts_count: str | None = None

    def find_rule(self, name: str) -> DivisionRule | None:
        """Return the first rule that matches the tensor *name*, or None if no rule matches."""
        return next((r for r in self.rules if any(fnmatchcase(name, n) for n in r.names)), None)

    def match_expert_number(self, name: str) -> re.Match[str] | None:
        """Match the expert number in *name* as group 1, or return None if it has none."""
        return next((match for pattern in self.experts if (match := pattern.search(name))), None)


def load_rules(path: TreePath) -> Rules:
    """Read a rules file, or return the built-in rules if *path* is their name."""
    if not path.is_file():
        if path.name != BUILT_IN_RULES_NAME:
            raise SourceNotFoundError(
                "the rules file does not exist",
                where=str(path),
                hint=f"pass {format_option(f'--rules {BUILT_IN_RULES_NAME}')} for the "
                "built-in rules",
            )
        return load_built_in_rules()
    return _parse_rules(path, str(path))


def load_built_in_rules() -> Rules:
    """Load the rules file for Megatron-Core's GPT models, which is part of ckptctl."""
    return _parse_rules(Path(__file__).with_name("core.toml"), BUILT_IN_RULES_NAME)


def _parse_rules(path: TreePath, where: str) -> Rules:
    with wrap_malformed_errors("this is not a rules file", where, error=UsageError):
        content = read_as(_RulesFile, tomllib.loads(path.read_text("utf-8")))
        for rule in content.rule:
            names = rule.names
            if rule.replicated is (rule.dim is not None):
                raise MismatchError("with either `dim` or `replicated = true`", names, "rule")
            if rule.replicated and (rule.parts != 1 or rule.size is not None):
                message = "without `parts` and `size`, which require `dim`"
                raise MismatchError(message, names, "rule")
        experts = content.experts
        numbers = tuple(map(_compile_number_pattern, experts.names))
        return Rules(where, content.rule, content.layers, numbers, experts.count)


def _compile_number_pattern(name: str) -> re.Pattern[str]:
    prefix, mark, suffix = name.partition(NUMBER_MARK)
    if not mark or not prefix or NUMBER_MARK in suffix:
        raise MismatchError(
            f"text with one `{NUMBER_MARK}`, not at its start", name, "experts.names"
        )
    return re.compile(f"{re.escape(prefix)}([0-9]+){re.escape(suffix) or '$'}", re.ASCII)


class TensorDivision(NamedTuple):
    """Division of one tensor among ranks.

    Attributes:
        local_shape: Shape on one rank.
        dim: Dimension that ranks divide, or None if every rank has the full tensor.
        part_lengths: Length along *dim* of each fused tensor on one rank.
        ranks: Number of tensor-parallel ranks.
    """

    local_shape: Shape
    dim: int | None
    part_lengths: Shape
    ranks: int

    @property
    def shape(self) -> Shape:
        """Shape of the complete tensor."""
        return tuple(
            size * (self.ranks if dim == self.dim else 1)
            for dim, size in enumerate(self.local_shape)
        )

    def iterate_pieces(self, rank: int) -> Iterator[tuple[Box, Shape]]:
        """Yield each box of *rank* in the complete tensor, with its offsets in the local tensor."""
        if self.dim is None or self.local_shape == self.shape:
            yield Box.whole(self.local_shape), (0,) * len(self.local_shape)
            return
        local_offset = 0
        for length in filter(None, self.part_lengths):
            offset = local_offset * self.ranks + rank * length
            sizes = tuple(
                length if dim == self.dim else size for dim, size in enumerate(self.local_shape)
            )
            yield Box(self._make_offsets(offset), sizes), self._make_offsets(local_offset)
            local_offset += length

    def _make_offsets(self, index: int) -> Shape:
        return tuple(index if dim == self.dim else 0 for dim in range(len(self.local_shape)))


def get_second_layer_name(key: str) -> str:
    """Return the name of the ``linear_fc2`` weight for the ``linear_fc1`` tensor *key*.

    Its number of columns shows whether the layer is gated.
    """
    return key.replace(FIRST_LAYER, SECOND_LAYER).replace(".bias", ".weight")


def divide_tensor(
    key: str,
    local: Shape,
    rule: DivisionRule,
    ranks: int,
    partner_shape: Shape | None,
    *,
    swiglu: bool,
) -> TensorDivision:
    """Compute how *rule* divides a tensor that has the shape *local* on one rank.

    Args:
        key: Name of the tensor.
        local: Shape on one rank.
        rule: Rule that matches the tensor.
        ranks: Number of tensor-parallel ranks.
        partner_shape: Shape of the weight that :func:`get_second_layer_name` names, or None.
        swiglu: Whether the arguments state that the layers are gated.

    Raises:
        MalformedError: The rule does not match the tensor.
    """
    if rule.dim is None:
        return TensorDivision(local, None, (), ranks)
    if rule.dim >= len(local):
        raise MalformedError(f"it divides dimension {rule.dim}, but the shape is {list(local)}")
    length = local[rule.dim]
    count = _count_halves(key, length, partner_shape, swiglu) if rule.parts == GATED else rule.parts
    if isinstance(count, tuple):
        if sum(count) != length:
            raise MalformedError(f"the parts {list(count)} do not add up to {length}")
        return TensorDivision(local, rule.dim, count, ranks)
    assert isinstance(count, int)
    if length % count:
        raise MalformedError(f"{length} cannot be divided into {pluralize(count, 'equal part')}")
    return TensorDivision(local, rule.dim, (length // count,) * count, ranks)


def _count_halves(key: str, rows: int, partner_shape: Sequence[int] | None, swiglu: bool) -> int:
    """Return 2 if ``linear_fc1`` has twice as many rows as ``linear_fc2`` has columns, else 1."""
    if partner_shape is None or len(partner_shape) != 2 or FIRST_LAYER not in key:
        raise MalformedError(
            f"`{get_second_layer_name(key)}`, which shows whether the layer is gated, is missing"
        )
    if rows not in (partner_shape[1], 2 * partner_shape[1]):
        raise MalformedError(
            f"it has {pluralize(rows, 'row')}, `{get_second_layer_name(key)}` has "
            f"{pluralize(partner_shape[1], 'column')}"
        )
    if swiglu and rows == partner_shape[1]:
        raise MalformedError(
            "the argument `swiglu` is set, but the tensor does not have two halves"
        )
    return 1 if rows == partner_shape[1] else 2
