"""Write ``docs/reference/json.md`` from the schemas: ``python docs/generate_json.py``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from ckptctl.cli import schemas
from ckptctl.cli.schemas.words import Document, Shape, Value

PAGE = Path(__file__).parent / "reference" / "json.md"
HEAD = """# JSON output

Generated from the schemas by `python docs/generate_json.py`.

`--json` prints one document on stdout. Bytes and counts are integers. Fields are added within a
schema number, never removed or given another meaning: ignore those that you do not know. In the
tables, `[]` stands for every item of an array, `*` for a key that is data, and what is `optional`
may be absent.

`ckptctl schema COMMAND` prints the JSON Schema (2020-12) of what a command prints, `ckptctl schema
error` that of errors, `ckptctl schema` the list of them. The schemas allow fields that they do not
name, so that what a newer version prints is valid under an older one's schema; their `$id` and the
field `schema` end with the schema number.
"""


def render() -> str:
    """Return the page."""
    documents = sorted(schemas.documents().values(), key=lambda one: one.name == "error")
    return "\n".join([HEAD, *(line for one in documents for line in _document(one))])


def _document(one: Document) -> Iterator[str]:
    yield f"## {one.title}\n"
    if one.text:
        yield f"{one.text}\n"
    for shape in one.shapes:
        if sentence := _introduction(one, shape):
            yield f"{sentence}\n"
        fields = shape.fields if shape.when else {**one.envelope, **shape.fields}
        if shape.fields:
            yield from ("| field | type | |", "| --- | --- | --- |", *_rows(fields), "")


def _introduction(one: Document, shape: Shape) -> str:
    if shape.like is None:
        return f"{shape.when} these instead:" if shape.when else ""
    anchor = shape.like.title.replace(".", "").replace("/", "")
    start = f"{shape.when}, the" if shape.when else "The"
    same = f"{start} fields of [{shape.like.title}](#{anchor}), `schema` being `{one.title}`"
    return f"{same}, and these:" if shape.fields else f"{same}."


def _rows(fields: Mapping[str, Value], prefix: str = "") -> Iterator[str]:
    for name, value in fields.items():
        yield from _row(f"{prefix}{name}", value)


def _row(path: str, value: Value) -> Iterator[str]:
    kind = _kind(value) + (", optional" if value.optional else "")
    yield f"| `{path}` | {kind} | {value.text} |" if value.text else f"| `{path}` | {kind} | |"
    inner = value.items or value
    deeper = f"{path}[]" if value.items else path
    if inner.fields is not None:
        yield from _rows(inner.fields, f"{deeper}.")
    elif inner.values is not None:
        yield from _row(f"{deeper}.*", inner.values)


def _kind(value: Value) -> str:
    kind = value.kind
    if value.items and value.items.kind != "object":
        inner = "arrays" if value.items.items else f"{value.items.kind}s"
        kind = f"array of {inner}{' or null' if value.items.null else ''}"
    return f"{kind} or null" if value.null else kind


if __name__ == "__main__":
    PAGE.write_text(render())
