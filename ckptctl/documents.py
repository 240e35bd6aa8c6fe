"""JSON documents that ``--json`` prints, and their JSON Schemas.

Schemas are open: a program that uses an older schema still accepts fields that were added later, as
long as the number is the same. ``docs/reference/json.md`` is generated from the same classes.

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
from ckptctl.results import Inline, JsonField, Printed, Result, printed, schema_name
from ckptctl.tree import TreePath

DIALECT = "https://json-schema.org/draft/2020-12/schema"
LINK = re.compile(r"\[([^][]*)\]\([^()]*\)")
_SECTION = re.compile(r"[A-Z][a-z]+:\n")
TYPES: dict[object, str] = {
    **dict.fromkeys((str, Path, TreePath), "string"),
    int: "integer",
    float: "number",
    bool: "boolean",
}


@dataclass(frozen=True, slots=True)
class TracedError:
    """Error with its traceback."""

    error: Annotated[CkptError, Inline()]
    traceback: Annotated[str | None, JsonField("only with `--debug`", optional=True)] = None


@dataclass(frozen=True, slots=True)
class ErrorDocument(Result):
    """Error that a command prints.

    On stderr. Stdout is empty unless the exit code is 7, or 6 because `prune` requires `--yes`.
    """

    error: Annotated[TracedError, JsonField()]


@dataclass(frozen=True, slots=True)
class Shape:
    """One of several forms of a document.

    Attributes:
        parts: Results whose fields are combined, each with its alternatives.
        option: Option that selects the form; empty for the default form.
    """

    parts: tuple[tuple[type, ...], ...]
    option: str = ""

    @classmethod
    def of(cls, text: str) -> Shape:
        """Parse one form of :attr:`Document.prints`."""
        option, _, parts = text.rpartition(": ")
        named = (tuple(map(resolve_name, part.split(" | "))) for part in parts.split(" & "))
        return cls(tuple(named), option)

    @property
    def fields(self) -> dict[str, Printed]:
        """Fields without the envelope. A field that is absent from some results is optional."""
        found: dict[str, Printed] = {}
        for forms in self.parts:
            every = [{one.name: one for one in printed(form)} for form in forms]
            for name, one in (field for form in every for field in form.items()):
                absent = any(name not in form for form in every)
                found.setdefault(name, replace(one, optional=one.optional or absent))
        return found


@dataclass(frozen=True)
class Document:
    """JSON document that the program prints.

    Attributes:
        name: Command that prints the document.
        prints: Result classes as ``module:Class``. ``a | b`` is one of them, and ``a & b`` has the
            fields of both. Further forms follow after a comma and the option that selects them.
    """

    name: Annotated[str, JsonField("argument of `ckptctl schema`: a command or `error`")]
    prints: str

    @property
    def title(self) -> Annotated[str, JsonField(name="document")]:
        """Value of the field `schema` in the document."""
        return schema_name(self.name)

    @property
    def id(self) -> Annotated[str, JsonField()]:
        """The `$id` of the schema."""
        return f"urn:{self.title.replace('.', ':').replace('/', ':')}"

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """Forms of the document. Most have one."""
        return tuple(map(Shape.of, self.prints.split(", ")))

    @property
    def text(self) -> str:
        """Description of the document, from the second paragraph of its class docstring."""
        said = inspect.getdoc(self.shapes[0].parts[-1][0]) or ""
        paragraph = said.partition("\n\n")[2].partition("\n\n")[0]
        return "" if _SECTION.match(paragraph) else " ".join(paragraph.split())

    def described(self, shape: Shape) -> dict[str, Any]:
        """Build the schema of one form, with descriptions in Markdown."""
        envelope = {
            "schema": {"type": "string", "description": f"`{self.title}`", "enum": [self.title]},
            "ckptctl": {"type": "string", "description": "version of the program"},
        }
        found = _record(shape.fields.values())
        found["properties"] = envelope | found["properties"]
        found["required"] = [*envelope, *found["required"]]
        return found

    def schema(self, *, closed: bool = False) -> dict[str, Any]:
        """Build the JSON Schema. A *closed* one rejects unknown fields."""
        found = [_finished(self.described(shape), closed) for shape in self.shapes]
        head = {"$schema": DIALECT, "$id": self.id, "title": self.title}
        if self.text:
            head["description"] = LINK.sub(r"\1", self.text)
        return {**head, **(found[0] if len(found) == 1 else {"anyOf": found})}


@dataclass(frozen=True, slots=True)
class Documents(Result):
    """All documents.

    `ckptctl schema NAME` prints a JSON Schema instead, with or without `--json`.
    """

    schemas: Annotated[tuple[Document, ...], JsonField("sorted by name")]


def schema_of(kind: Any, text: str = "") -> dict[str, Any]:
    """Build the schema of a type, with *text* as its description."""
    if get_origin(kind) is Annotated:
        kind, said = get_args(kind)
        text = text or said.text
    union = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    null = NoneType in union
    (kind,) = (one for one in union if one is not NoneType)
    found = _schema_of(kind, get_args(kind))
    name = found.pop("type")
    if null and "enum" in found:
        found["enum"] = [*found["enum"], None]
    described = {"description": text} if text else {}
    return {"type": [name, "null"] if null else name, **described, **found}


def _schema_of(kind: Any, inner: tuple[Any, ...]) -> dict[str, Any]:
    origin = get_origin(kind)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return {"type": "string", "enum": [one.value for one in kind]}
    if origin is Literal:
        return {"type": TYPES[type(inner[0])], "enum": [*inner]}
    if origin in (tuple, list):
        return {"type": "array", "items": schema_of(inner[0])}
    if origin and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": schema_of(inner[1])}
    return {"type": TYPES[kind]} if kind in TYPES else _record(printed(kind))


def _record(fields: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {one.name: schema_of(one.type, one.text) for one in fields},
        "required": [one.name for one in fields if not one.optional],
        "additionalProperties": True,
    }


def _finished(node: Any, closed: bool) -> Any:
    """Remove links from the descriptions of a schema, and close it if asked."""
    if isinstance(node, list):
        return [_finished(one, closed) for one in node]
    if not isinstance(node, dict):
        return node
    found = {name: _finished(one, closed) for name, one in node.items()}
    if isinstance(found.get("description"), str):
        found["description"] = LINK.sub(r"\1", found["description"])
    if closed and found.get("additionalProperties") is True:
        found["additionalProperties"] = False
    return found
