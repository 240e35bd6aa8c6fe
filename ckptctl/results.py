"""Base class of results, which declares their fields for ``--json``, its schema and its docs.

::

    @dataclass(frozen=True, slots=True)
    class Copied(Result):
        path: Annotated[str, JsonField("path as given")]
        nbytes: Annotated[int, JsonField("size of all files", name="bytes")]

        @property
        def complete(self) -> Annotated[bool, JsonField()]:
            "Whether nothing is missing."

Fields come first, then properties, in the order of the class body, unless the class passes *order*.
The schema is built in :mod:`ckptctl.documents`.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import cache
from operator import attrgetter
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

_JSON_TYPES = (str, int, float, bool, NoneType)


@dataclass(eq=False)
class JsonField:
    """Declaration of a printed field, in the ``Annotated`` type of a field or property.

    An attribute can have several declarations that differ in *of*.

    Attributes:
        text: Description in Markdown. If empty, the docstring of the property is used.
        name: Key in JSON. If empty, the last component of *of* or the attribute name is used.
        of: Dotted path of an attribute of the value to print, as in ``family.name``. If empty, the
            value itself is printed.
        to: Function that converts the value; its return annotation is the printed type.
        optional: Whether the field is absent if the value is None.
    """

    text: str = ""
    _: KW_ONLY
    name: str = ""
    of: str = ""
    to: Callable[[Any], object] | None = None
    optional: bool = False


@dataclass(eq=False)
class Inline:
    """Declaration of a result whose fields are printed in the JSON object of the outer result.

    Attributes:
        names: Names of the fields to print, separated by spaces, or an empty string for all.
    """

    names: str = ""


class Result:
    """Base class of results that ``--json`` prints, whose first fields *order* names."""

    __slots__ = ()
    _order: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, order: str = "") -> None:
        """Store *order* on the class.

        A dataclass with slots calls this method again without *order*, which keeps the first value.
        """
        if order:
            cls._order = tuple(order.split())

    def to_json(self) -> dict[str, object]:
        """Return the JSON object of the result (``docs/reference/json.md``)."""
        return to_json(self)


@dataclass(eq=False)
class PrintedField:
    """Field of a result that ``--json`` prints.

    Attributes:
        name: Key in JSON.
        type: Type of the printed value.
        text: Description in Markdown.
        optional: Whether the key is absent if the value is None.
        get: Function that returns the value of the field for a result.
        is_json: Whether the value is already a JSON value, so that it need not be converted.
    """

    name: str
    type: Any
    text: str
    optional: bool
    get: Callable[[Any], Any]
    is_json: bool


def build_schema_name(command: str) -> str:
    """Return the value of the field ``schema`` in the output of *command*.

    The number increases when a field is removed or changes its meaning.
    """
    return f"ckptctl.{command.replace(' ', '-')}/1"


def to_json(result: Any) -> dict[str, object]:
    """Return the JSON object of a result."""
    fields: dict[str, object] = {}
    result_class: Any = type(result)
    for field in list_printed_fields(result_class):
        value = field.get(result)
        if value is not None or not field.optional:
            fields[field.name] = value if field.is_json else _to_json_value(value)
    return fields


def _to_json_value(value: Any) -> object:
    if isinstance(value, _JSON_TYPES):
        return value
    if isinstance(value, Mapping):
        return {name: _to_json_value(item) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_to_json_value(item) for item in value]
    return str(value) if isinstance(value, os.PathLike) else to_json(value)


@cache
def list_printed_fields(result_class: Any) -> tuple[PrintedField, ...]:
    """Return the printed fields of *result_class*, or an empty tuple if it is not a result."""
    fields: dict[str, PrintedField] = {}
    for attribute, hint in _collect_hints(result_class).items():
        if get_origin(hint) is Annotated:
            kind, *metadata = get_args(hint)
            text = _get_property_text(getattr(result_class, attribute, None))
            candidates = (
                field
                for annotation in metadata
                for field in _iterate_printed_fields(attribute, kind, annotation)
            )
            fields |= {field.name: replace(field, text=field.text or text) for field in candidates}
    leading = [name for name in getattr(result_class, "_order", ()) if name in fields]
    return tuple(fields[name] for name in dict.fromkeys((*leading, *fields)))


def _get_property_text(attribute: object) -> str:
    """Return the docstring of a property, which describes the printed field."""
    line = (attribute.__doc__ or "").partition("\n")[0] if isinstance(attribute, property) else ""
    return line[:1].lower() + line[1:].removesuffix(".")


def _iterate_printed_fields(
    attribute: str, kind: Any, annotation: object
) -> Iterator[PrintedField]:
    if isinstance(annotation, JsonField):
        path = f"{attribute}.{annotation.of}" if annotation.of else attribute
        kind = _resolve_attribute_type(kind, annotation.of) if annotation.of else kind
        get: Callable[[Any], Any] = attrgetter(path)
        if annotation.to:
            kind, get = (
                get_type_hints(annotation.to, include_extras=True)["return"],
                _compose_getters(get, annotation.to),
            )
        if annotation.optional:
            kind = Union[tuple(field for field in get_args(kind) if field is not NoneType)]  # noqa: UP007
        name = annotation.name or path.rpartition(".")[2]
        yield PrintedField(
            name, kind, annotation.text, annotation.optional, get, _is_json_type(kind)
        )
    elif isinstance(annotation, Inline):
        is_optional = NoneType in get_args(kind)
        inner_class = next(field for field in (*get_args(kind), kind) if field is not NoneType)
        for field in list_printed_fields(inner_class):
            if not annotation.names or field.name in annotation.names.split():
                get = _compose_getters(attrgetter(attribute), field.get)
                yield replace(field, get=get, optional=field.optional or is_optional)


def _compose_getters(
    first: Callable[[Any], Any], second: Callable[[Any], Any]
) -> Callable[[Any], Any]:
    def get_value(result: Any) -> Any:
        value = first(result)
        return None if value is None else second(value)

    return get_value


def _collect_hints(result_class: type) -> dict[str, Any]:
    """Return the annotated types of fields and properties by name, with properties last."""
    hints: dict[str, Any] = {}
    for base in reversed(result_class.__mro__):
        # The other annotations of a class may import names for type checkers only, and the module
        # of a converter file is not in `sys.modules`.
        texts = {
            n: text
            for n, text in _collect_annotations(base).items()
            if str(text).startswith("Annotated[")
        }
        hints |= _resolve_types(base, texts) if texts else {}
    fields = {
        n: hint
        for n, hint in hints.items()
        if not isinstance(getattr(result_class, n, None), property)
    }
    return {**fields, **hints}


def _resolve_types(owner: type, texts: Mapping[str, Any]) -> dict[str, Any]:
    holder_class = type("Holder", (), {"__annotations__": texts})
    return get_type_hints(holder_class, vars(sys.modules[owner.__module__]), include_extras=True)


def _resolve_attribute_type(kind: Any, path: str) -> Any:
    """Return the annotated type of the attribute at the dotted *path*, starting at class *kind*."""
    for name in path.split("."):
        bases = ((base, _collect_annotations(base)) for base in kind.__mro__)
        kind = next(
            _resolve_types(b, {name: texts[name]})[name] for b, texts in bases if name in texts
        )
        while get_origin(kind) in (Annotated, ClassVar):
            kind = get_args(kind)[0]
    return kind


def _collect_annotations(owner: type) -> dict[str, Any]:
    """Return the unevaluated annotations of the fields and properties of *owner*, by name."""
    getters = {n: p.fget for n, p in vars(owner).items() if isinstance(p, property) and p.fget}
    return_types = {n: inspect.get_annotations(get).get("return") for n, get in getters.items()}
    return {**inspect.get_annotations(owner), **return_types}


def _is_json_type(kind: Any) -> bool:
    origin = get_origin(kind)
    if origin is Annotated or origin is Literal or kind in _JSON_TYPES:
        return origin is not Annotated
    args = get_args(kind)
    return type(None) in args and all(map(_is_json_type, args))


def empty_to_none(text: str) -> str | None:
    """Return *text*, or None if it is empty."""
    return text or None


def count_items(items: Any) -> int:
    """Return the number of elements in *items*."""
    return len(items)


def round_seconds(seconds: float) -> float:
    """Round a duration in seconds to whole milliseconds."""
    return round(seconds, 3)
