"""What is printed of a result follows from the types of its class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from ckptctl.errors import CkptError
from ckptctl.results import (
    Inline,
    JsonField,
    Result,
    count_items,
    empty_to_none,
    list_printed_fields,
    round_seconds,
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where something is."""

    path: Annotated[Path, JsonField("where")]
    rank: Annotated[int | None, JsonField(optional=True)] = None


@dataclass(frozen=True, slots=True)
class Found(Result, order="bytes state"):
    """What there is."""

    places: Annotated[
        tuple[Place, ...], JsonField(), JsonField(name="how_many", to=count_items)
    ] = ()
    nbytes: Annotated[int, JsonField("size", name="bytes")] = 0
    hidden: Unknown = None  # type: ignore[name-defined]  # noqa: F821
    why: Annotated[str, JsonField(to=empty_to_none)] = ""
    by_name: Annotated[Mapping[str, Place], JsonField()] = field(default_factory=dict)

    @property
    def state(self) -> Annotated[str, JsonField()]:
        """Return a word."""
        return "torn" if self.why else "whole"


@dataclass(frozen=True, slots=True)
class Done(Result):
    """What was done; it has another state."""

    found: Annotated[Found, Inline("bytes state why")]
    place: Annotated[Place | None, Inline()]
    seconds: Annotated[float, JsonField(to=round_seconds)]
    other: Annotated[Found, JsonField("its size", of="nbytes", name="size")]

    @property
    def state(self) -> Annotated[str, JsonField("another")]:
        """Return another word."""
        return "done"


def test_json_contains_fields_and_properties_in_order():
    found = Found((Place(Path("/a")), Place(Path("/b"), 1)), 3, by_name={"x": Place(Path("c"))})
    assert found.to_json() == {
        "bytes": 3,
        "state": "whole",
        "places": [{"path": "/a"}, {"path": "/b", "rank": 1}],
        "how_many": 2,
        "why": None,
        "by_name": {"x": {"path": "c"}},
    }
    assert list(found.to_json()) == ["bytes", "state", "places", "how_many", "why", "by_name"]


def test_property_description_is_its_docstring():
    texts = {one.name: one.text for one in list_printed_fields(Found)}
    assert (texts["state"], texts["bytes"]) == ("return a word", "size")
    assert {one.name: one.text for one in list_printed_fields(Done)}["state"] == "another"


def test_inlined_results_are_merged_into_json():
    done = Done(Found(nbytes=3), None, 0.12345, Found(nbytes=4))
    assert done.to_json() == {"bytes": 3, "state": "done", "why": None, "seconds": 0.123, "size": 4}
    assert list(done.to_json()) == ["bytes", "state", "why", "seconds", "size"]
    with_place = Done(Found(), Place(Path("/a")), 1, Found()).to_json()
    assert with_place["path"] == "/a" and "rank" not in with_place
    optional = {one.name: one.optional for one in list_printed_fields(Done)}
    assert optional["path"] and optional["rank"] and not optional["why"]


def test_error_class_of_unknown_module_becomes_json():
    code = "class Mine(CkptError):\n    code = 'mine'\n    exit_code = 5\n"
    names: dict[str, Any] = {"CkptError": CkptError, "__name__": "a.converter.file"}
    exec(code, names)
    error = names["Mine"]("it does not fit", where="x").to_json()
    assert error["code"] == "mine" and error["exit_code"] == 5 and error["where"] == "x"


def test_plain_types_have_no_printed_fields():
    assert list_printed_fields(int) == () and list_printed_fields(Path) == ()
