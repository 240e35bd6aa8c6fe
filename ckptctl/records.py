"""``dataclass`` as the standard library's, whose methods are made when they are first called.

The standard library compiles up to seven methods for each class while its module is imported,
whether or not anybody will call them. That took a third of the time of ``ckptctl inspect``.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn


def _dataclass(
    cls: Any = None,
    /,
    *,
    eq: bool = True,
    frozen: bool = False,
    init: bool = True,
    kw_only: bool = False,
    repr: bool = True,
    slots: bool = False,
) -> Any:
    """Make a class a dataclass; the parameters are those of the standard library."""
    if cls is None:
        more = {"init": init, "kw_only": kw_only, "repr": repr, "slots": slots}
        return partial(_dataclass, eq=eq, frozen=frozen, **more)
    asked = {"__init__": init, "__repr__": repr, "__eq__": eq, "__hash__": eq and frozen}
    # A class with an `__eq__` of its own has None as its `__hash__`.
    missing = [name for name, given in asked.items() if given and not vars(cls).get(name)]
    made: Any = dataclasses.dataclass(
        init=False, repr=False, eq=False, kw_only=kw_only, slots=slots
    )(cls)
    for name in missing:
        setattr(made, name, _made_when_called(made, name, frozen))
    if eq and not frozen and not vars(cls).get("__hash__"):
        made.__hash__ = None
    if frozen:
        made.__setattr__ = made.__delattr__ = _refuse
    if frozen and slots:
        made.__getstate__, made.__setstate__ = _state, _set_state
    return made


if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:
    dataclass = _dataclass


def _made_when_called(cls: Any, name: str, frozen: bool) -> Callable[..., Any]:
    def make() -> Callable[..., Any]:
        made: Callable[..., Any] = _init(cls, frozen) if name == "__init__" else _method(cls, name)
        made.__qualname__ = method.__qualname__
        setattr(cls, name, made)
        return made

    def method(self: object, *args: object, **given: object) -> object:
        return make()(self, *args, **given)

    method.__name__, method.__qualname__ = name, f"{cls.__qualname__}.{name}"
    method.make = make  # type: ignore[attr-defined]
    return method


def signature(of: Any) -> inspect.Signature:
    """Return what a function takes, or a class."""
    getattr(of.__init__, "make", lambda: None)()
    return inspect.signature(of)


def _init(cls: Any, frozen: bool) -> Any:
    """Make ``__init__``, of a frozen class in a third of the time of the standard library."""
    names: dict[str, Any] = {
        "_records_put": object.__setattr__,
        "_records_absent": dataclasses.MISSING,
    }
    given, keywords, lines = ["self"], ["*"], []
    for one in dataclasses.fields(cls):
        name = value = one.name
        default = ""
        if one.default is not dataclasses.MISSING:
            names[f"_records_{name}"], default = one.default, f"=_records_{name}"
        elif one.default_factory is not dataclasses.MISSING:
            names[f"_records_{name}"], default = one.default_factory, "=_records_absent"
            value = f"_records_{name}() if {name} is _records_absent else {name}"
        (keywords if one.kw_only else given).append(name + default)
        lines.append(
            f"_records_put(self, {name!r}, {value})" if frozen else f"self.{name} = {value}"
        )
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    parameters = ", ".join(given + (keywords if keywords[1:] else []))
    exec(f"def __init__({parameters}):\n  " + "\n  ".join(lines or ["pass"]), names)
    return names["__init__"]


def _method(cls: Any, name: str) -> Any:
    """Return a method that the standard library makes of the same fields."""
    twin = dataclasses.make_dataclass(
        cls.__name__,
        [(one.name, one.type, one) for one in dataclasses.fields(cls)],
        namespace={"__doc__": cls.__doc__},
        init=False,
        repr=name == "__repr__",
        eq=name == "__eq__",
        unsafe_hash=name == "__hash__",
    )
    return vars(twin)[name]


def _refuse(self: object, name: str, *value: object) -> NoReturn:  # noqa: ARG001
    verb = "assign to" if value else "delete"
    raise dataclasses.FrozenInstanceError(f"cannot {verb} field {name!r}")


def _state(self: Any) -> list[object]:
    return [getattr(self, one.name) for one in dataclasses.fields(self)]


def _set_state(self: Any, state: list[object]) -> None:
    for one, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, one.name, value)
