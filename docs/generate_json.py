"""Write ``docs/reference/json.md`` from the schemas: ``python docs/generate_json.py``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptctl.cli.schema import get_documents_by_name
from ckptctl.documents import Document, DocumentForm

PAGE = Path(__file__).parent / "reference" / "json.md"
HEAD = """# JSON output

Generated from the schemas by `python docs/generate_json.py`.

`--json` prints one document on stdout. Bytes and counts are integers. New fields can appear under
the same schema number, so ignore unknown fields. Existing fields keep their meaning and are never
removed. In the tables, `[]` stands for every item of an array and `*` for a key that is data.
Fields marked `optional` can be absent.

`ckptctl schema COMMAND` prints the JSON Schema (2020-12) of a command's output. `ckptctl schema
error` prints the schema of errors, and `ckptctl schema` lists all schemas. The schemas allow
additional fields, so output of a newer version is valid under an older schema. The `$id` of a
schema and the field `schema` end with the schema number.
"""


def render() -> str:
    """Return the page."""
    every = sorted(get_documents_by_name().values(), key=lambda one: one.name == "error")
    return "\n".join([HEAD, *(line for one in every for line in _document(one, every))])


def _document(one: Document, every: Sequence[Document]) -> Iterator[str]:
    yield f"## {one.title}\n"
    if one.description:
        yield f"{one.description}\n"
    for shape in one.forms:
        like = _like(one, shape, every)
        fields = one.build_form_schema(shape)
        if like:
            known = _find_form(like, shape.option).fields
            fields["properties"] = {n: f for n, f in fields["properties"].items() if n not in known}
            anchor = like.title.replace(".", "").replace("/", "")
            colon = ", and these fields:" if fields["properties"] else "."
            option = f"With `{shape.option}`, the" if shape.option else "The"
            same = f" with `{shape.option}`" if shape.option else ""
            yield (
                f"{option} fields of [{like.title}](#{anchor}){same}, with `schema` set to "
                f"`{one.title}`{colon}\n"
            )
        elif shape.option:
            yield f"With `{shape.option}`, these fields instead:\n"
        if fields["properties"]:
            yield from ("| Field | Type | Meaning |", "| --- | --- | --- |", *_rows(fields), "")


def _like(one: Document, shape: DocumentForm, every: Sequence[Document]) -> Document | None:
    """Return the document all fields of which another one has, in the form with the same option.

    Of two documents with the same fields, the one with fewer forms is described.
    """
    for other in every:
        form = next((form for form in other.forms if form.option == shape.option), None)
        if other is one or form is None or shape.parts[: len(form.parts)] != form.parts:
            continue
        if form.parts != shape.parts or len(other.forms) < len(one.forms):
            return other
    return None


def _find_form(one: Document, option: str) -> DocumentForm:
    return next(form for form in one.forms if form.option == option)


def _rows(record: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in record["properties"].items():
        yield from _row(f"{prefix}{name}", value, optional=name not in record["required"])


def _row(path: str, value: Mapping[str, Any], *, optional: bool = False) -> Iterator[str]:
    kind = _kind(value) + (", optional" if optional else "")
    text = value.get("description")
    yield f"| `{path}` | {kind} | {text} |" if text else f"| `{path}` | {kind} | |"
    inner = value.get("items", value)
    deeper = f"{path}[]" if "items" in value else path
    if "properties" in inner:
        yield from _rows(inner, f"{deeper}.")
    elif "additionalProperties" in inner:
        yield from _row(f"{deeper}.*", inner["additionalProperties"])


def _kind(value: Mapping[str, Any]) -> str:
    kind, *null = _names(value)
    if "items" in value and "object" not in _names(value["items"]):
        inner, *may_be_null = _names(value["items"])
        plural = "arrays" if inner == "array" else f"{inner}s"
        kind = f"array of {plural}{' or null' if may_be_null else ''}"
    return f"{kind} or null" if null else kind


def _names(value: Mapping[str, Any]) -> list[str]:
    named = value["type"]
    return [named] if isinstance(named, str) else named


if __name__ == "__main__":
    PAGE.write_text(render())
