"""The command ``schema``."""

from __future__ import annotations

import json


def test_schema_of_one_command_is_printed(run):
    result = run("schema", "inspect")
    found = json.loads(result.stdout)
    assert (result.exit_code, result.stderr) == (0, "")
    assert found["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert found["$id"] == "urn:ckptctl:inspect:1"
    assert found["properties"]["schema"]["enum"] == ["ckptctl.inspect/1"]
    assert run("schema", "inspect", "--json").stdout == result.stdout


def test_all_schemas_are_listed(run):
    rows = [line.split("\t") for line in run("schema", "--no-header").stdout.splitlines()]
    assert ["error", "ckptctl.error/1", "urn:ckptctl:error:1"] in rows
    assert run("schema", "-q").stdout.splitlines() == [row[0] for row in rows]
    listed = json.loads(run("schema", "--json").stdout)["schemas"]
    assert [list(one.values()) for one in listed] == rows


def test_unknown_schema_gets_suggestion(run):
    result = run("schema", "inspekt")
    assert result.exit_code == 2 and "hint: did you mean `inspect`?" in result.stderr
