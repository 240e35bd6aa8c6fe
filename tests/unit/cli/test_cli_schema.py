"""The command ``schema``, and what the words of schemas mean in JSON Schema."""

from __future__ import annotations

import json

import pytest

from ckptctl.cli.schemas.words import Document, Shape, array, document, mapping, record, string

SMALL = document(
    "small",
    {
        "name": string("a [name](names.md)", null=True, among=("a", "b")),
        "more": array(record({"x": string(optional=True)}), "text", optional=True),
        "by_key": mapping(string("one"), "many"),
    },
)


def test_one_is_printed(run):
    result = run("schema", "inspect")
    found = json.loads(result.stdout)
    assert (result.exit_code, result.stderr) == (0, "")
    assert found["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert found["$id"] == "urn:ckptctl:inspect:1"
    assert found["properties"]["schema"]["enum"] == ["ckptctl.inspect/1"]
    assert run("schema", "inspect", "--json").stdout == result.stdout


def test_all_are_listed(run):
    rows = [line.split("\t") for line in run("schema").stdout.splitlines()]
    assert ["error", "ckptctl.error/1", "urn:ckptctl:error:1"] in rows
    assert run("schema", "-q").stdout.split() == [row[0] for row in rows]
    listed = json.loads(run("schema", "--json").stdout)["schemas"]
    assert [list(one.values()) for one in listed] == rows


def test_an_unknown_one(run):
    result = run("schema", "inspekt")
    assert result.exit_code == 2 and "hint: did you mean `inspect`?" in result.stderr


def test_words():
    found = SMALL.schema()
    assert found["required"] == ["schema", "ckptctl", "name", "by_key"]
    assert found["properties"]["name"] == {
        "type": ["string", "null"],
        "description": "a name",
        "enum": ["a", "b", None],
    }
    assert found["properties"]["by_key"]["additionalProperties"]["type"] == "string"
    assert found["additionalProperties"] is True
    assert SMALL.schema(closed=True)["additionalProperties"] is False


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
def test_words_in_another_program(change, valid):
    jsonschema = pytest.importorskip("jsonschema")
    body = {"schema": "ckptctl.small/1", "ckptctl": "1", "name": "a", "by_key": {}, **change}
    assert jsonschema.Draft202012Validator(SMALL.schema()).is_valid(body) is valid
    closed = jsonschema.Draft202012Validator(SMALL.schema(closed=True))
    assert closed.is_valid(body) is (valid and "new" not in change)


def test_several_shapes():
    both = Document("both", (Shape({"y": string()}, like=SMALL), Shape({"z": string()}, "Else")))
    first, second = both.schema()["anyOf"]
    assert first["required"] == ["schema", "ckptctl", "name", "by_key", "y"]
    assert second["required"] == ["schema", "ckptctl", "z"]
