"""Foreign data read by a schema: typed values, or one error that says where and why."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest

from ckptctl.errors import UnsupportedError, UsageError
from ckptctl.storage.pickles.inert import Inert
from ckptctl.storage.schema import (
    NOT_EMPTY,
    ClosedSchema,
    MismatchError,
    Natural,
    ObjectSchema,
    Schema,
    read_as,
    read_nested_or_none,
    size_between,
    value_in_range,
    wrap_malformed_errors,
)


@dataclass(frozen=True, slots=True)
class Part(Schema):
    sizes: Annotated[tuple[Natural, ...], size_between(0, 4)]


@dataclass(frozen=True, slots=True)
class Rule(ClosedSchema):
    names: Annotated[tuple[str, ...], NOT_EMPTY]
    dim: Annotated[int, value_in_range(0, 64)] | None = None
    kind: Literal["gated", 3] = 3
    parts: dict[str, Part] | None = None
    pair: tuple[int, str] = (0, "")


@dataclass(frozen=True, slots=True)
class Mesh(ObjectSchema):
    rank: int


def test_values_are_typed_and_defaults_apply() -> None:
    content = {"names": ["a"], "parts": {"w": {"sizes": [1, 2], "other": 1}}, "pair": [1, "b"]}
    assert read_as(Rule, content) == Rule(("a",), parts={"w": Part((1, 2))}, pair=(1, "b"))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"names": None}, "`rule.names` is None, expected a list"),
        ({"names": []}, "`rule.names` is a list, expected a collection that is not empty"),
        ({"names": ["a", 3]}, "`rule.names[1]` is 3, expected a string"),
        ({"nams": 1}, "`rule.nams` is unknown; did you mean `names`?"),
        ({3: 1}, "`rule.3` is unknown"),
        ({"dim": True}, "`rule.dim` is True, expected an integer or None"),
        ({"dim": 64}, "`rule.dim` is 64, expected an integer from 0 to 63 or None"),
        ({"dim": 1 << 9999}, "`rule.dim` is an integer of 10,000 bits, expected an integer"),
        ({"kind": "x" * 999}, f"`rule.kind` is '{'x' * 40}', expected 'gated' or 3"),
        ({"kind": 3.0}, "`rule.kind` is 3.0, expected 'gated' or 3"),
        ({"pair": [1]}, "`rule.pair` is a list, expected a list of 2 items"),
        ({"pair": [1, 2]}, "`rule.pair[1]` is 2, expected a string"),
        ({"parts": {"w": {}}}, "`rule.parts['w'].sizes` is missing"),
        ({"parts": {"w": {"sizes": [-1]}}}, "`rule.parts['w'].sizes[0]` is -1, expected a non-"),
        ({"parts": {"w": {"sizes": [1] * 5}}}, "`rule.parts['w'].sizes` is a list, expected 0 to"),
        ({"parts": {1: {"sizes": []}}}, "`rule.parts[1]` is 1, expected a string"),
        ({"parts": {"w": Inert("a", "B")}}, "`rule.parts['w']` is of class `B`, expected a dict"),
    ],
)
def test_mismatch_error_names_path(change: dict[str, Any], why: str) -> None:
    with pytest.raises(MismatchError) as caught:
        read_as(Rule, {"names": ["a"], **change}, "rule")
    assert str(caught.value).startswith(why)


def test_object_attributes_are_read() -> None:
    assert read_as(Mesh, Inert("m", "Mesh", state={"rank": 1})) == Mesh(1)
    assert read_as(Mesh, Inert("m", "Mesh", state=(None, {"rank": 1}))) == Mesh(1)
    unlike: list[Any] = [None, [], ({}, 3)]
    for state in unlike:
        with pytest.raises(MismatchError, match="object with attributes"):
            read_as(Mesh, Inert("m", "Mesh", state=state))


def test_find_returns_none_if_structure_differs() -> None:
    content = {"metadata": {"total_size": 3}}
    assert read_nested_or_none(int, content, "metadata", "total_size") == 3
    assert read_nested_or_none(str, content, "metadata", "total_size") is None
    assert read_nested_or_none(int, content, "metadata", "total_size", "more") is None
    assert read_nested_or_none(int, [content], "metadata") is None


def test_malformed_context_raises_single_error() -> None:
    with (
        pytest.raises(UnsupportedError, match="malformed index") as caught,
        wrap_malformed_errors("malformed index", "a.json", "copy it again"),
    ):
        read_as(Part, [])
    assert (caught.value.where, caught.value.hint) == ("a.json", "copy it again")
    assert caught.value.why == "it is a list, expected a dict"
    with pytest.raises(UsageError), wrap_malformed_errors("malformed", "a", error=UsageError):
        raise KeyError("a")


def test_shared_values_are_read_once() -> None:
    value: Any = 1
    for _ in range(4):
        value = [value] * 1000
    start = time.process_time()
    found = read_as(list[list[list[list[int]]]], value)
    assert time.process_time() - start < 1
    assert found[1] is found[0]


def test_self_referencing_value_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(MismatchError, match=r"`\[0\]\[0\]` is a list, expected an integer"):
        read_as(list[list[int]], value)
