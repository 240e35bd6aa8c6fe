"""Rules files: how the ranks of Megatron divide tensors, which their files do not say.

A rules file is TOML. ``[[rule]]`` tables say of tensors along which dimension ranks divide them;
``[layers]`` which lists of layers pipeline stages divide, ``[experts]`` which names have the number
of an expert in them. ``core.toml`` beside this module is one.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, NamedTuple, cast

from ckptctl.catalog import Box
from ckptctl.errors import (
    MappingError,
    SourceNotFoundError,
    UsageError,
    listed,
    nearest,
    spell_option,
)
from ckptctl.storage.pickles.torch_tensors import MAX_RANK
from ckptctl.units import counted

Shape = tuple[int, ...]
FIRST, SECOND = "linear_fc1", "linear_fc2"
BUILT_IN = "megatron-core"
GATED = "gated"
NUMBER = "#"
MAX_PARTS = 1024
_RULE = ("names", "dim", "replicated", "parts", "size")
RowParts = tuple[int, ...] | int | Literal["gated"]


@dataclass(frozen=True, slots=True)
class DivisionRule:
    """How tensors are divided among tensor-parallel ranks.

    Attributes:
        names: Globs; ``*`` matches any characters.
        dim: The dimension that ranks divide; None: every rank has all of it.
        parts: Fused parts along *dim*, each divided by itself: how many equal ones, or the length
            of each on one rank; ``gated``: two where the layer is gated, else one.
        size: The argument that says how long *dim* is, all ranks together.
    """

    names: tuple[str, ...]
    dim: int | None
    parts: RowParts = 1
    size: str | None = None


@dataclass(frozen=True, slots=True)
class Rules:
    """A rules file.

    Attributes:
        where: The file.
        rules: In order.
        layers: Lists of layers that pipeline stages divide, each with the argument that says how
            long it is; an empty name: no argument does.
        experts: Find the number of an expert in a name; the number is group 1.
        experts_count: The argument that says how many experts a layer has.
    """

    where: str
    rules: tuple[DivisionRule, ...] = ()
    layers: Mapping[str, str] = field(default_factory=dict)
    experts: tuple[re.Pattern[str], ...] = ()
    experts_count: str | None = None

    def find(self, name: str) -> DivisionRule | None:
        """Return the first rule for a tensor."""
        return next((r for r in self.rules if any(fnmatchcase(name, n) for n in r.names)), None)

    def expert(self, name: str) -> re.Match[str] | None:
        """Return where *name* has the number of an expert, if it has one."""
        return next((found for one in self.experts if (found := one.search(name))), None)


def load(path: Path) -> Rules:
    """Return the rules in a file, or the built-in ones of that name."""
    if not path.is_file():
        if path.name != BUILT_IN:
            raise SourceNotFoundError(
                "the rules file does not exist",
                where=str(path),
                hint=f"pass {spell_option(f'--rules {BUILT_IN}')} for the built-in rules",
            )
        return built_in()
    return _parsed(path, str(path))


def built_in() -> Rules:
    """Return the rules for the GPT models of Megatron-Core."""
    return _parsed(Path(__file__).with_name("core.toml"), BUILT_IN)


def _parsed(path: Path, where: str) -> Rules:
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _malformed(where, f"{type(error).__name__}: {error}") from error
    _require_known(content, ("rule", "layers", "experts"), where)
    experts = _table(content.get("experts", {}), "experts", where)
    _require_known(experts, ("names", "count"), where)
    layers = _table(content.get("layers", {}), "layers", where)
    rules = content.get("rule", [])
    if not isinstance(rules, list) or not all(isinstance(item, str) for item in layers.values()):
        raise _malformed(
            where, "`[[rule]]` is not a list of tables, or a value in [layers] is not a name"
        )
    return Rules(
        where,
        tuple(_rule(_table(item, "rule", where), where) for item in rules),
        cast("Mapping[str, str]", layers),
        tuple(_number(name, where) for name in _names(experts.get("names", []), where)),
        _text(experts.get("count"), "count", where),
    )


def _rule(table: Mapping[str, object], where: str) -> DivisionRule:
    _require_known(table, _RULE, where)
    names, dim = _names(table.get("names", []), where), table.get("dim")
    replicated = table.get("replicated", False)
    if not names or type(replicated) is not bool or replicated is (dim is not None):
        raise _malformed(
            where, f"a rule must have `names` and either `dim` or `replicated = true`: {table}"
        )
    if dim is not None and not (type(dim) is int and 0 <= dim < MAX_RANK):
        raise _malformed(where, f"`dim = {dim}` of {listed(names)} is not a valid dimension")
    if replicated and ("parts" in table or "size" in table):
        raise _malformed(where, f"`parts` and `size` of {listed(names)} require `dim`")
    size = _text(table.get("size"), "size", where)
    return DivisionRule(names, dim, _parts(table.get("parts", 1), where), size)


def _parts(value: object, where: str) -> RowParts:
    if value == GATED:
        return "gated"
    if type(value) is int and 0 < value <= MAX_PARTS:
        return value
    several = isinstance(value, list) and 0 < len(value) <= MAX_PARTS
    if several and all(type(item) is int and item >= 0 for item in cast("list[object]", value)):
        return tuple(cast("list[int]", value))
    raise _malformed(where, f'`parts = {value}` must be a number, a list of lengths or "{GATED}"')


def _number(name: str, where: str) -> re.Pattern[str]:
    before, mark, after = name.partition(NUMBER)
    if not mark or not before or NUMBER in after:
        raise _malformed(
            where, f"`{name}` in [experts] must contain `{NUMBER}` once, and not at the start"
        )
    return re.compile(f"{re.escape(before)}([0-9]+){re.escape(after) or '$'}", re.ASCII)


def _names(value: object, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _malformed(where, "`names` is not a list of strings")
    return tuple(value)


def _text(value: object, key: str, where: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise _malformed(where, f"`{key}` is not an argument name")
    return value


def _table(value: object, key: str, where: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise _malformed(where, f"`{key}` is not a table")
    return value


def _require_known(table: Mapping[str, object], known: Sequence[str], where: str) -> None:
    strange = next((key for key in table if key not in known), None)
    if strange is not None:
        close = nearest(strange, known)
        raise _malformed(
            where, f"unknown key `{strange}`" + (f"; did you mean `{close}`?" if close else "")
        )


def _malformed(where: str, why: str) -> UsageError:
    return UsageError("this is not a rules file", where=where, why=why)


class Division(NamedTuple):
    """How a tensor is divided.

    Attributes:
        local: Shape on one rank.
        dim: The dimension that ranks divide; None: each has all of it.
        parts: Lengths of the fused parts along *dim* on one rank.
        ranks: How many there are.
    """

    local: Shape
    dim: int | None
    parts: Shape
    ranks: int

    @property
    def shape(self) -> Shape:
        """Return the whole shape."""
        return tuple(
            size * (self.ranks if at == self.dim else 1) for at, size in enumerate(self.local)
        )

    def pieces(self, rank: int) -> Iterator[tuple[Box, Shape]]:
        """Yield the boxes of the whole tensor that *rank* has, and where in its own they begin."""
        if self.dim is None or self.local == self.shape:
            yield Box.whole(self.local), (0,) * len(self.local)
            return
        before = 0
        for length in filter(None, self.parts):
            offset = before * self.ranks + rank * length
            sizes = tuple(length if at == self.dim else size for at, size in enumerate(self.local))
            yield Box(self._at(offset), sizes), self._at(before)
            before += length

    def _at(self, index: int) -> Shape:
        return tuple(index if at == self.dim else 0 for at in range(len(self.local)))


def partner_of(key: str) -> str:
    """Return the weight whose columns tell whether a layer is gated."""
    return key.replace(FIRST, SECOND).replace(".bias", ".weight")


def divide(
    key: str, local: Shape, rule: DivisionRule, ranks: int, second: Shape | None, *, swiglu: bool
) -> Division:
    """Return how a tensor is divided."""
    if rule.dim is None:
        return Division(local, None, (), ranks)
    if rule.dim >= len(local):
        raise _unfit(key, f"it divides dimension {rule.dim}, but the shape is {list(local)}")
    length = local[rule.dim]
    count = _halves(key, length, second, swiglu) if rule.parts == GATED else rule.parts
    if isinstance(count, tuple):
        if sum(count) != length:
            raise _unfit(key, f"the parts {list(count)} do not add up to {length}")
        return Division(local, rule.dim, count, ranks)
    assert isinstance(count, int)
    if length % count:
        raise _unfit(key, f"{length} cannot be divided into {counted(count, 'equal part')}")
    return Division(local, rule.dim, (length // count,) * count, ranks)


def _halves(key: str, rows: int, second: Sequence[int] | None, swiglu: bool) -> int:
    """Return 2 where the first layer is twice as wide as the second takes, else 1."""
    if second is None or len(second) != 2 or FIRST not in key:
        raise _unfit(
            key, f"`{partner_of(key)}`, which shows whether the layer is gated, is missing"
        )
    if rows not in (second[1], 2 * second[1]):
        raise _unfit(
            key,
            f"it has {counted(rows, 'row')}, `{partner_of(key)}` has "
            f"{counted(second[1], 'column')}",
        )
    if swiglu and rows == second[1]:
        raise _unfit(key, "the argument `swiglu` is set, but the tensor does not have two halves")
    return 1 if rows == second[1] else 2


def _unfit(key: str, why: str) -> MappingError:
    return MappingError(f"the rule for `{key}` does not match the tensor", where="--rules", why=why)
