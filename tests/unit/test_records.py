"""Our ``dataclass`` against the standard library's; what nobody calls is not made."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from ckptctl import records

HOW = [
    {},
    {"frozen": True},
    {"slots": True},
    {"frozen": True, "slots": True},
    {"frozen": True, "kw_only": True},
    {"frozen": True, "eq": False},
    {"eq": False, "repr": False},
]


class Plain:
    """Fields of every kind."""

    a: int
    b: str = "b"
    PUT: object = None
    made: list[int] = dataclasses.field(default_factory=list)
    aside: int = dataclasses.field(default=0, compare=False, repr=False)
    _: dataclasses.KW_ONLY
    late: float
    early: tuple[int, ...] = ()
    SHARED: ClassVar[int] = 3

    @property
    def twice(self) -> int:
        return 2 * self.a


class Checked:
    """Is looked at after it was made, and compares as it likes."""

    a: int = 1

    def __post_init__(self) -> None:
        if self.a < 0:
            raise ValueError(self.a)

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 7


class Empty:
    """No fields."""


class Own:
    """Methods of its own."""

    a: int = 1

    def __init__(self, a: str) -> None:
        object.__setattr__(self, "a", int(a))

    def __repr__(self) -> str:
        return "own"

    def __eq__(self, other: object) -> bool:
        return True


def made(by: Callable[..., Any], of: type, how: dict[str, bool]) -> Any:
    body = {n: v for n, v in vars(of).items() if n not in ("__dict__", "__weakref__")}
    copied = {n: copy.copy(v) if isinstance(v, dataclasses.Field) else v for n, v in body.items()}
    return by(**how)(type(of.__name__, (), copied))


def outcome(call: Callable[[Any], Any], of: Any) -> Any:
    """Return what a call returns, or what it raises and says."""
    try:
        return call(of)
    except Exception as error:
        return type(error), str(error)


CALLS: dict[str, Callable[[Any], Any]] = {
    "all": lambda c: vars_of(c(1, "x", None, [3], 4, late=0.5, early=(1,))),
    "defaults": lambda c: vars_of(c(1, late=0.5)),
    "none": lambda c: vars_of(c()),
    "one": lambda c: vars_of(c(5)),
    "negative": lambda c: vars_of(c(-5)),
    "named": lambda c: vars_of(c(a=5)),
    "too many": lambda c: c(1, 2, 3, 4, 5, 6, 7),
    "unknown": lambda c: c(1, unknown=2),
    "repr": lambda c: "object at" in repr(some(c)) or repr(some(c)),
    "equal": lambda c: some(c) == some(c),
    "unequal": lambda c: some(c) == some(c, 2),
    "strange": lambda c: some(c).__eq__(3),
    "aside": lambda c: some(c) == dataclasses.replace(some(c), aside=5),
    "hash": lambda c: hash(some(c)) == hash(some(c)),
    "hashable": lambda c: c.__hash__ is None,
    "replace": lambda c: vars_of(dataclasses.replace(some(c), a=9)),
    "new lists": lambda c: some(c).made is some(c).made,
    "set": lambda c: refused(lambda: setattr(some(c), "a", 3)),
    "set more": lambda c: refused(lambda: setattr(some(c), "more", 3)),
    "delete": lambda c: refused(lambda: delattr(some(c), "a")),
    "copied": lambda c: vars_of(copy.deepcopy(some(c))),
    "match": lambda c: c.__match_args__,
    "slots": lambda c: getattr(c, "__slots__", None),
    "fields": lambda c: [(f.name, f.type, f.kw_only, f.default) for f in dataclasses.fields(c)],
    "as dict": lambda c: dataclasses.asdict(some(c)),
}


def some(of: Any, a: Any = 1) -> Any:
    return (
        of(a=a, late=0.5) if of.__name__ == "Plain" else of() if of.__name__ == "Empty" else of(a)
    )


def refused(change: Callable[[], None]) -> bool:
    """Whether it is; with slots the standard library stumbles over its own words."""
    try:
        change()
    except (AttributeError, TypeError):
        return True
    return False


def vars_of(value: Any) -> dict[str, object]:
    return {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}


@pytest.mark.parametrize("of", [Plain, Checked, Empty, Own])
@pytest.mark.parametrize("how", HOW, ids=str)
def test_like_the_standard_library(of: type, how: dict[str, bool]):
    if how.get("kw_only") and of is Own:
        pytest.skip("its own `__init__` takes its argument by position")
    theirs, ours = made(dataclasses.dataclass, of, how), made(records.dataclass, of, how)
    for name, call in CALLS.items():
        for time in ("first", "second"):
            assert outcome(call, ours) == outcome(call, theirs), (name, how, time)


@records.dataclass(frozen=True, slots=True)
class Base:
    """Can be pickled."""

    a: int
    b: list[int] = dataclasses.field(default_factory=list)


@records.dataclass(frozen=True, slots=True)
class Derived(Base):
    """Has what its base has."""

    c: int = 3


def test_inheritance_and_pickles():
    one = Derived(1, [2])
    assert (one.a, one.b, one.c) == (1, [2], 3) and repr(one) == "Derived(a=1, b=[2], c=3)"
    assert pickle.loads(pickle.dumps(one)) == one != Derived(1, [2], 4)
    assert Base(1, [2]) != one
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'c'"):
        one.c = 4


def test_what_nobody_calls_is_not_made():
    fresh = made(records.dataclass, Plain, {"frozen": True})
    files = [inspect.unwrap(getattr(fresh, n)).__code__.co_filename for n in ("__init__", "__eq__")]
    assert files == [records.__file__] * 2
    fresh(1, late=0.5)
    files = [getattr(fresh, name).__code__.co_filename for name in ("__init__", "__eq__")]
    assert files == ["<string>", records.__file__]
