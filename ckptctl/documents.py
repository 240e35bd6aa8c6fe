"""JSON documents that ``--json`` prints, and their JSON Schemas.

Schemas allow unknown fields, so a program that uses an older schema with the same version number
accepts fields that were added later. ``docs/reference/json.md`` is generated from the same classes.

Source: https://json-schema.org/draft/2020-12/schema.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from pkgutil import resolve_name
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from ckptctl.errors import CkptError
from ckptctl.results import (
    Inline,
    JsonField,
    PrintedField,
    Result,
    build_schema_name,
    list_printed_fields,
)
from ckptctl.tree import TreePath

SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"
LINK_PATTERN = re.compile(r"\[([^][]*)\]\([^()]*\)")
_SECTION = re.compile(r"[A-Z][a-z]+:\n")
JSON_TYPES: dict[object, str] = {
    **dict.fromkeys((str, Path, TreePath), "string"),
    int: "integer",
    float: "number",
    bool: "boolean",
}


@dataclass(frozen=True, slots=True)
class TracedError:
    """Error together with its Python traceback."""

    error: Annotated[CkptError, Inline()]
    traceback: Annotated[str | None, JsonField("only with `--debug`", optional=True)] = None


@dataclass(frozen=True, slots=True)
class ErrorDocument(Result):
    """Error that a command prints.

    On stderr. Stdout is empty unless the exit code is 7, or 6 because `prune` requires `--yes`.
    """

    error: Annotated[TracedError, JsonField()]


@dataclass(frozen=True, slots=True)
class DocumentForm:
    """Variant of a JSON document, such as the output with a certain option.

    Attributes:
        parts: Groups of result classes. The document combines the fields of one class per group.
        option: Option that selects this variant, or an empty string for the default.
    """

    parts: tuple[tuple[type, ...], ...]
    option: str = ""

    @classmethod
    def from_text(cls, text: str) -> DocumentForm:
        """Parse one comma-separated item of :attr:`Document.prints`."""
        option, _, parts_text = text.rpartition(": ")
        form_parts = (
            tuple(map(resolve_name, part.split(" | "))) for part in parts_text.split(" & ")
        )
        return cls(tuple(form_parts), option)

    @property
    def fields(self) -> dict[str, PrintedField]:
        """Fields by key, excluding the envelope.

        A field is optional if some of the alternative result classes do not have it.
        """
        fields: dict[str, PrintedField] = {}
        for forms in self.parts:
            form_fields = [
                {printed_field.name: printed_field for printed_field in list_printed_fields(form)}
                for form in forms
            ]
            for name, printed_field in (field for form in form_fields for field in form.items()):
                is_optional = any(name not in form for form in form_fields)
                fields.setdefault(
                    name, replace(printed_field, optional=printed_field.optional or is_optional)
                )
        return fields


@dataclass(frozen=True)
class Document:
    """JSON document that the program prints.

    Attributes:
        name: Command that prints the document.
        prints: Result classes as ``module:Class``. ``a | b`` means one of the two, and ``a & b``
            combines the fields of both. Further forms follow after commas, each with its option.
    """

    name: Annotated[str, JsonField("argument of `ckptctl schema`: a command or `error`")]
    prints: str

    @property
    def title(self) -> Annotated[str, JsonField(name="document")]:
        """Value of the field `schema` in the document."""
        return build_schema_name(self.name)

    @property
    def id(self) -> Annotated[str, JsonField()]:
        """The `$id` of the schema."""
        return f"urn:{self.title.replace('.', ':').replace('/', ':')}"

    @cached_property
    def forms(self) -> tuple[DocumentForm, ...]:
        """Variants of the document. Most documents have only one."""
        return tuple(map(DocumentForm.from_text, self.prints.split(", ")))

    @property
    def description(self) -> str:
        """Description of the document, from the second paragraph of its class docstring."""
        docstring = inspect.getdoc(self.forms[0].parts[-1][0]) or ""
        paragraph = docstring.partition("\n\n")[2].partition("\n\n")[0]
        return "" if _SECTION.match(paragraph) else " ".join(paragraph.split())

    def build_form_schema(self, form: DocumentForm) -> dict[str, Any]:
        """Build the JSON Schema of one variant, with descriptions in Markdown."""
        envelope = {
            "schema": {"type": "string", "description": f"`{self.title}`", "enum": [self.title]},
            "ckptctl": {"type": "string", "description": "version of the program"},
        }
        schema = _build_object_schema(form.fields.values())
        schema["properties"] = envelope | schema["properties"]
        schema["required"] = [*envelope, *schema["required"]]
        return schema

    def build_schema(self, *, closed: bool = False) -> dict[str, Any]:
        """Build the JSON Schema of the document.

        The schema rejects unknown fields if *closed* is true.
        """
        form_schemas = [_clean_schema(self.build_form_schema(form), closed) for form in self.forms]
        head = {"$schema": SCHEMA_DIALECT, "$id": self.id, "title": self.title}
        if self.description:
            head["description"] = LINK_PATTERN.sub(r"\1", self.description)
        return {**head, **(form_schemas[0] if len(form_schemas) == 1 else {"anyOf": form_schemas})}


@dataclass(frozen=True, slots=True)
class Documents(Result):
    """All documents.

    `ckptctl schema NAME` prints a JSON Schema instead, with or without `--json`.
    """

    schemas: Annotated[tuple[Document, ...], JsonField("sorted by name")]


def build_type_schema(kind: Any, text: str = "") -> dict[str, Any]:
    """Build the JSON Schema of the Python type *kind*, with *text* as its description."""
    if get_origin(kind) is Annotated:
        kind, json_field = get_args(kind)
        text = text or json_field.text
    union = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    is_nullable = NoneType in union
    (kind,) = (member for member in union if member is not NoneType)
    schema = _build_schema(kind, get_args(kind))
    name = schema.pop("type")
    if is_nullable and "enum" in schema:
        schema["enum"] = [*schema["enum"], None]
    description = {"description": text} if text else {}
    return {"type": [name, "null"] if is_nullable else name, **description, **schema}


def _build_schema(kind: Any, inner: tuple[Any, ...]) -> dict[str, Any]:
    origin = get_origin(kind)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return {"type": "string", "enum": [member.value for member in kind]}
    if origin is Literal:
        return {"type": JSON_TYPES[type(inner[0])], "enum": [*inner]}
    if origin in (tuple, list):
        return {"type": "array", "items": build_type_schema(inner[0])}
    if origin and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": build_type_schema(inner[1])}
    return (
        {"type": JSON_TYPES[kind]}
        if kind in JSON_TYPES
        else _build_object_schema(list_printed_fields(kind))
    )


def _build_object_schema(fields: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {field.name: build_type_schema(field.type, field.text) for field in fields},
        "required": [field.name for field in fields if not field.optional],
        "additionalProperties": True,
    }


def _clean_schema(node: Any, closed: bool) -> Any:
    """Remove Markdown links from all descriptions in a schema.

    If *closed* is true, also make the schema reject unknown fields.
    """
    if isinstance(node, list):
        return [_clean_schema(item, closed) for item in node]
    if not isinstance(node, dict):
        return node
    schema = {name: _clean_schema(item, closed) for name, item in node.items()}
    if isinstance(schema.get("description"), str):
        schema["description"] = LINK_PATTERN.sub(r"\1", schema["description"])
    if closed and schema.get("additionalProperties") is True:
        schema["additionalProperties"] = False
    return schema
