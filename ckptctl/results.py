"""Results, declared once for ``--json``, its schema and its reference page.

::

    @dataclass(frozen=True, slots=True)
    class Copied(Result):
        path: Annotated[str, JsonField("path as given")]
        nbytes: Annotated[int, JsonField("size of all files", name="bytes")]

        @property
        def whole(self) -> Annotated[bool, JsonField()]:
            "Whether nothing is missing."

Fields come first, then properties, in the order of the class unless it declares another. The schema
is built in :mod:`ckptctl.documents`.
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

_PLAIN = (str, int, float, bool, NoneType)


@dataclass(eq=False)
class JsonField:
    """Declaration of a printed field, in the ``Annotated`` type of a field or property.

    An attribute may have several declarations, with different values of *of*.

    Attributes:
        text: Description in Markdown; empty for the docstring of the property.
        name: Key in JSON; empty for the name of the attribute, or the last part of *of*.
        of: Attribute of the value to print, as in ``family.name``; empty for the value itself.
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
    """Declaration of a value whose fields are printed in its place.

    Attributes:
        names: Names of the fields to print, separated by spaces; empty for all.
    """

    names: str = ""


class Result:
    """Base class of results that ``--json`` prints. *order* names the leading fields."""

    __slots__ = ()
    _order: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, order: str = "") -> None:
        """Store the order. Dataclasses with slots call this twice, then without *order*."""
        if order:
            cls._order = tuple(order.split())

    def to_json(self) -> dict[str, object]:
        """Return the JSON object of the result (``docs/reference/json.md``)."""
        return to_json(self)


@dataclass(eq=False)
class Printed:
    """Printed field of a result.

    Attributes:
        name: Key in JSON.
        type: Type of the printed value.
        text: Description in Markdown.
        optional: Whether the key is absent if the value is None.
        get: Function that returns the value of a result.
        plain: Whether the value needs no conversion to JSON.
    """

    name: str
    type: Any
    text: str
    optional: bool
    get: Callable[[Any], Any]
    plain: bool


def schema_name(command: str) -> str:
    """Return the value of the field ``schema`` in the output of *command*.

    The number increases when a field is removed or changes its meaning.
    """
    return f"ckptctl.{command}/1"


def to_json(result: Any) -> dict[str, object]:
    """Return the JSON object of a result."""
    found: dict[str, object] = {}
    made: Any = type(result)
    for one in printed(made):
        value = one.get(result)
        if value is not None or not one.optional:
            found[one.name] = value if one.plain else _json(value)
    return found


def _json(value: Any) -> object:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping):
        return {name: _json(one) for name, one in value.items()}
    if isinstance(value, (tuple, list)):
        return [_json(one) for one in value]
    return str(value) if isinstance(value, os.PathLike) else to_json(value)


@cache
def printed(of: Any) -> tuple[Printed, ...]:
    """Return the printed fields of a class, or none if it is not a result."""
    found: dict[str, Printed] = {}
    for attribute, hint in _hints(of).items():
        if get_origin(hint) is Annotated:
            kind, *more = get_args(hint)
            text = _documented(getattr(of, attribute, None))
            every = (one for said in more for one in _printed(attribute, kind, said))
            found |= {one.name: replace(one, text=one.text or text) for one in every}
    first = [name for name in getattr(of, "_order", ()) if name in found]
    return tuple(found[name] for name in dict.fromkeys((*first, *found)))


def _documented(attribute: object) -> str:
    """Return the docstring of a property as the text of a field."""
    line = (attribute.__doc__ or "").partition("\n")[0] if isinstance(attribute, property) else ""
    return line[:1].lower() + line[1:].removesuffix(".")


def _printed(attribute: str, kind: Any, said: object) -> Iterator[Printed]:
    if isinstance(said, JsonField):
        path = f"{attribute}.{said.of}" if said.of else attribute
        kind = _type_of(kind, said.of) if said.of else kind
        get: Callable[[Any], Any] = attrgetter(path)
        if said.to:
            kind, get = get_type_hints(said.to, include_extras=True)["return"], _then(get, said.to)
        if said.optional:
            kind = Union[tuple(one for one in get_args(kind) if one is not NoneType)]  # noqa: UP007
        name = said.name or path.rpartition(".")[2]
        yield Printed(name, kind, said.text, said.optional, get, _plain(kind))
    elif isinstance(said, Inline):
        absent = NoneType in get_args(kind)
        inner = next(one for one in (*get_args(kind), kind) if one is not NoneType)
        for one in printed(inner):
            if not said.names or one.name in said.names.split():
                get = _then(attrgetter(attribute), one.get)
                yield replace(one, get=get, optional=one.optional or absent)


def _then(first: Callable[[Any], Any], second: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def both(result: Any) -> Any:
        value = first(result)
        return None if value is None else second(value)

    return both


def _hints(of: type) -> dict[str, Any]:
    """Return the types of printable attributes, those of properties last."""
    found: dict[str, Any] = {}
    for base in reversed(of.__mro__):
        # The other annotations of a class may import names for type checkers only, and the module
        # of a converter file is not in `sys.modules`.
        texts = {n: text for n, text in _texts(base).items() if str(text).startswith("Annotated[")}
        found |= _types(base, texts) if texts else {}
    fields = {
        n: hint for n, hint in found.items() if not isinstance(getattr(of, n, None), property)
    }
    return {**fields, **found}


def _types(of: type, texts: Mapping[str, Any]) -> dict[str, Any]:
    holder = type("Holder", (), {"__annotations__": texts})
    return get_type_hints(holder, vars(sys.modules[of.__module__]), include_extras=True)


def _type_of(kind: Any, path: str) -> Any:
    """Return the type of the attribute at the dotted *path* of a class."""
    for name in path.split("."):
        bases = ((base, _texts(base)) for base in kind.__mro__)
        kind = next(_types(b, {name: texts[name]})[name] for b, texts in bases if name in texts)
        while get_origin(kind) in (Annotated, ClassVar):
            kind = get_args(kind)[0]
    return kind


def _texts(of: type) -> dict[str, Any]:
    """Return the annotations of a class's fields and properties, unevaluated."""
    gets = {n: p.fget for n, p in vars(of).items() if isinstance(p, property) and p.fget}
    returned = {n: inspect.get_annotations(get).get("return") for n, get in gets.items()}
    return {**inspect.get_annotations(of), **returned}


def _plain(kind: Any) -> bool:
    origin = get_origin(kind)
    if origin is Annotated or origin is Literal or kind in _PLAIN:
        return origin is not Annotated
    args = get_args(kind)
    return type(None) in args and all(map(_plain, args))


def or_none(text: str) -> str | None:
    """Return *text*, or None if it is empty."""
    return text or None


def count(of: Any) -> int:
    """Return the number of items."""
    return len(of)


def rounded(seconds: float) -> float:
    """Round a time in seconds to milliseconds."""
    return round(seconds, 3)
