"""Results, declared once: what ``--json`` prints of a class, its schema and its reference page.

::

    @dataclass(frozen=True, slots=True)
    class Copied(Result):
        path: Annotated[str, JsonField("as it was named")]
        nbytes: Annotated[int, JsonField("size of all files", name="bytes")]

        @property
        def whole(self) -> Annotated[bool, JsonField()]:
            "Whether nothing is missing."

Fields come first, then properties, in the order of the class, unless it names another. The schema
is made in :mod:`ckptctl.documents`.
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
    """What stands in ``Annotated`` beside the type of a field, or of a property, that is printed.

    An attribute may have several, with different values of *of*.

    Attributes:
        text: What it means, in Markdown; empty: what the docstring of a property says.
        name: What JSON calls it; empty: as the attribute, or as the last part of *of*.
        of: The attribute of the value that is printed, as ``family.name``; empty: itself.
        to: Returns what is printed instead of that; its annotations say the type.
        optional: Whether the field is absent where the value is None.
    """

    text: str = ""
    _: KW_ONLY
    name: str = ""
    of: str = ""
    to: Callable[[Any], object] | None = None
    optional: bool = False


@dataclass(eq=False)
class Inline:
    """What stands there where the fields of the value are printed in place of it.

    Attributes:
        names: Those that are, with blanks between them; empty: all.
    """

    names: str = ""


class Result:
    """A base of classes that ``--json`` prints, in the order of fields that *order* begins with."""

    __slots__ = ()
    _order: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, order: str = "") -> None:
        """Keep the order; a dataclass with slots is made twice, and the second time without."""
        if order:
            cls._order = tuple(order.split())

    def to_json(self) -> dict[str, object]:
        """Return what ``--json`` prints of it (``docs/reference/json.md``)."""
        return to_json(self)


@dataclass(eq=False)
class Printed:
    """One field of the printed object.

    Attributes:
        name: What JSON calls it.
        type: The type of what is printed.
        text: What it means, in Markdown.
        optional: Whether it may be absent.
        get: Returns the value of it, of which None is left out where it is *optional*.
        plain: Whether that is JSON as it is.
    """

    name: str
    type: Any
    text: str
    optional: bool
    get: Callable[[Any], Any]
    plain: bool


def schema_name(command: str) -> str:
    """Return what ``schema`` says in what a command prints.

    Its number goes up when a field is taken away or changes its meaning.
    """
    return f"ckptctl.{command}/1"


def to_json(result: Any) -> dict[str, object]:
    """Return what ``--json`` prints of a result."""
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
    """Return the fields that are printed of a class; none: it is no result."""
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
    """Return the first line of the docstring of a property as texts of fields are written."""
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
    """Return the types of the attributes that may be printed, those of properties last."""
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
    """Return the type of what is found at *path* in an object of a class."""
    for name in path.split("."):
        bases = ((base, _texts(base)) for base in kind.__mro__)
        kind = next(_types(b, {name: texts[name]})[name] for b, texts in bases if name in texts)
        while get_origin(kind) in (Annotated, ClassVar):
            kind = get_args(kind)[0]
    return kind


def _texts(of: type) -> dict[str, Any]:
    """Return the types of the fields and of the properties of a class, as they are written."""
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
    """Return a text, or None where it is empty."""
    return text or None


def count(of: Any) -> int:
    """Return how many there are."""
    return len(of)


def rounded(seconds: float) -> float:
    """Return a time in seconds without what no clock measures."""
    return round(seconds, 3)
