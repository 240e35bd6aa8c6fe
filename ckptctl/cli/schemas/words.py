"""The words that schemas are written in, and what they mean in JSON Schema 2020-12.

A document is open: a program that knows an older version of a schema still accepts the fields that
were added since, which is what a schema number promises. :meth:`Document.schema` closes it for the
tests, which let no field go unmentioned.

Source: https://json-schema.org/draft/2020-12/schema.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

DIALECT = "https://json-schema.org/draft/2020-12/schema"
LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")


@dataclass(frozen=True, slots=True)
class Value:
    """What a field, an item or a document may be.

    Attributes:
        kind: Its type in JSON.
        text: What it means, in Markdown.
        null: Whether it may be null instead.
        optional: Whether the field may be absent.
        among: All that it may be; empty: anything of its type.
        items: What the items of an array are.
        fields: The fields of an object.
        values: What all values of an object are whose keys are data.
    """

    kind: str
    text: str = ""
    null: bool = False
    optional: bool = False
    among: tuple[str, ...] = ()
    items: Value | None = None
    fields: Mapping[str, Value] | None = None
    values: Value | None = None

    def schema(self, closed: bool = False) -> dict[str, Any]:
        """Return its JSON Schema.

        Args:
            closed: Refuse fields that are not mentioned.
        """
        found: dict[str, Any] = {"type": [self.kind, "null"] if self.null else self.kind}
        if self.text:
            found["description"] = LINK.sub(r"\1", self.text)
        if self.among:
            found["enum"] = [*self.among, *([None] if self.null else [])]
        if self.items:
            found["items"] = self.items.schema(closed)
        if self.values:
            found["additionalProperties"] = self.values.schema(closed)
        if self.fields is not None:
            found["properties"] = {n: one.schema(closed) for n, one in self.fields.items()}
            found["required"] = [n for n, one in self.fields.items() if not one.optional]
            found["additionalProperties"] = not closed
        return found


string = partial(Value, "string")
integer = partial(Value, "integer")
number = partial(Value, "number")
boolean = partial(Value, "boolean")


def array(items: Value, text: str = "", null: bool = False, optional: bool = False) -> Value:
    """Return an array, all items of which are alike."""
    return Value("array", text, null, optional, items=items)


def record(
    fields: Mapping[str, Value], text: str = "", null: bool = False, optional: bool = False
) -> Value:
    """Return an object whose keys are known."""
    return Value("object", text, null, optional, fields=fields)


def mapping(values: Value, text: str = "", null: bool = False, optional: bool = False) -> Value:
    """Return an object whose keys are data."""
    return Value("object", text, null, optional, values=values)


@dataclass(frozen=True, slots=True)
class Shape:
    """One of several forms of a document.

    Attributes:
        fields: What it holds beside the envelope.
        when: The sentence that introduces it.
        like: The document all of whose fields it has as well.
    """

    fields: Mapping[str, Value]
    when: str = ""
    like: Document | None = None

    @property
    def whole(self) -> dict[str, Value]:
        """Return all fields beside the envelope."""
        return {**(self.like.shapes[0].whole if self.like else {}), **self.fields}


@dataclass(frozen=True, slots=True)
class Document:
    """A JSON document that the program prints.

    Attributes:
        name: The command that prints it.
        shapes: Its forms; most have one.
        version: Goes up when a field is taken away or changes its meaning.
        text: What a reader has to know about the whole.
    """

    name: str
    shapes: tuple[Shape, ...]
    version: int = field(default=1, kw_only=True)
    text: str = field(default="", kw_only=True)

    @property
    def title(self) -> str:
        """Return what its field ``schema`` says."""
        return f"ckptctl.{self.name}/{self.version}"

    @property
    def id(self) -> str:
        """Return the name of its schema, which is a URN and no address."""
        return f"urn:ckptctl:{self.name}:{self.version}"

    @property
    def envelope(self) -> dict[str, Value]:
        """Return the fields that every document begins with."""
        return {
            "schema": string(f"`{self.title}`", among=(self.title,)),
            "ckptctl": string("version of the program"),
        }

    def schema(self, closed: bool = False) -> dict[str, Any]:
        """Return its JSON Schema.

        Args:
            closed: Refuse fields that are not mentioned.
        """
        found = [record({**self.envelope, **shape.whole}).schema(closed) for shape in self.shapes]
        head = {"$schema": DIALECT, "$id": self.id, "title": self.title}
        if self.text:
            head["description"] = LINK.sub(r"\1", self.text)
        return {**head, **(found[0] if len(found) == 1 else {"anyOf": found})}


def document(name: str, fields: Mapping[str, Value], text: str = "") -> Document:
    """Return a document of one form."""
    return Document(name, (Shape(fields),), text=text)
