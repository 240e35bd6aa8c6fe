"""JSON Schemas that are made from the classes of results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest

from ckptctl.documents import Document, build_type_schema
from ckptctl.results import Inline, JsonField, Result


@dataclass(frozen=True)
class More:
    """Something inside."""

    x: Annotated[str | None, JsonField(optional=True)] = None


@dataclass(frozen=True)
class Small(Result):
    """Something small.

    It is `open`.
    """

    name: Annotated[Literal["a", "b"] | None, JsonField("a [name](names.md)")] = "a"
    more: Annotated[tuple[More, ...] | None, JsonField("text", optional=True)] = None
    by_key: Annotated[Mapping[str, Annotated[str, JsonField("one")]], JsonField("many")] = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Done(Result):
    """What was done."""

    small: Annotated[Small, Inline()]
    seconds: Annotated[float, JsonField()]


@dataclass(frozen=True)
class Other(Result):
    """Something else."""

    z: Annotated[tuple[int | None, ...], JsonField()]


SMALL = Document("small", f"{__name__}:Small")


def test_schema_maps_types_and_descriptions():
    found = SMALL.build_schema()
    assert found["description"] == "It is `open`."
    assert found["required"] == ["schema", "ckptctl", "name", "by_key"]
    assert found["properties"]["name"] == {
        "type": ["string", "null"],
        "description": "a name",
        "enum": ["a", "b", None],
    }
    by_key = found["properties"]["by_key"]
    assert by_key["additionalProperties"] == {"type": "string", "description": "one"}
    assert found["properties"]["more"]["items"]["properties"] == {"x": {"type": "string"}}
    assert found["additionalProperties"] is True
    assert SMALL.build_schema(closed=True)["additionalProperties"] is False
    assert build_type_schema(dict[str, bool])["additionalProperties"] == {"type": "boolean"}


@pytest.mark.parametrize(
    ("change", "valid"),
    [
        ({}, True),
        ({"name": None}, True),
        ({"name": "c"}, False),
        ({"by_key": {"x": 1}}, False),
        ({"more": [{"x": "y"}, {}]}, True),
        ({"more": [{"x": 1}]}, False),
        ({"schema": "ckptctl.small/2"}, False),
        ({"new": 1}, True),
    ],
)
def test_schema_accepts_only_valid_documents(change, valid):
    jsonschema = pytest.importorskip("jsonschema")
    body = {"schema": "ckptctl.small/1", "ckptctl": "1", "name": "a", "by_key": {}, **change}
    assert jsonschema.Draft202012Validator(SMALL.build_schema()).is_valid(body) is valid
    closed = jsonschema.Draft202012Validator(SMALL.build_schema(closed=True))
    assert closed.is_valid(body) is (valid and "new" not in change)


def test_document_with_several_forms_has_any_of_schema():
    here = __name__
    both = Document("both", f"{here}:Small | {here}:Done & {here}:Other, --else: {here}:Other")
    first, second = both.build_schema()["anyOf"]
    assert first["required"] == ["schema", "ckptctl", "name", "by_key", "z"]
    assert list(first["properties"])[2:] == ["name", "more", "by_key", "seconds", "z"]
    assert second["required"] == ["schema", "ckptctl", "z"]
    assert second["properties"]["z"]["items"] == {"type": ["integer", "null"]}
    assert [shape.option for shape in both.forms] == ["", "--else"]
