"""Write what functions and classes take into ``docs/reference/python.md``, from their docstrings.

``python docs/generate_python.py`` replaces what stands between ``<!-- generated: NAME -->`` and
``<!-- end -->``, where NAME is a public name of ``ckptctl``, or ``options``: those that conversions
and merges share; the rest is by hand.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ckptctl
from ckptctl.conversion.conversion_options import WriteOptions
from ckptctl.distributed.run.manager_options import SOURCE_OPTIONS
from ckptctl.keywords import get_python_help
from ckptctl.options import list_options

PAGE = Path(__file__).parent / "reference" / "python.md"
BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->\n)", re.DOTALL)
SECTION = re.compile(r"\n(?=(?:Args|Attributes|Keys|Returns|Yields|Raises):\n)")
ENTRY = re.compile(r"^ {4}(\**\w+): ((?:.+\n?)(?: {8,}.+\n?)*)", re.MULTILINE)
MARKUP = re.compile(r":(?P<role>\w+):`~?(?P<name>[\w.]+)`|``(?P<code>.+?)``|\bNone\b", re.DOTALL)
MAPPING = {
    "keys": "Return the names.",
    "items": "Return the names with their handles.",
    "values": "Return the handles.",
}
WIDTH = 86
SHARED = {one.name: one for one in list_options(WriteOptions)}
ALIKE = SHARED.keys() - {*SOURCE_OPTIONS}
"""Who takes these takes what a conversion does."""


def render() -> str:
    """Return the page.

    Raises:
        LookupError: It names something that is not public.
    """
    page = PAGE.read_text()
    unknown = {match[2] for match in BLOCK.finditer(page)} - {*ckptctl.__all__, "options"}
    if unknown:
        raise LookupError(f"{PAGE.name} names {', '.join(sorted(unknown))}")
    return BLOCK.sub(lambda match: f"{match[1]}\n{_described(match[2])}\n{match[3]}", page)


def _described(name: str) -> str:
    """Return signature, what the docstring says, arguments, and the methods of a class."""
    if name == "options":
        return _options()
    found: Callable[..., Any] = getattr(ckptctl, name)
    text, *sections = SECTION.split(inspect.getdoc(found) or "")
    if inspect.isclass(found):
        sections += SECTION.split(inspect.cleandoc(found.__init__.__doc__ or ""))[1:]
    of = {part.partition(":\n")[0]: part.partition(":\n")[2] for part in sections}
    parts = [_call(f"ckptctl.{name}", found), _prose(text).strip()]
    if "Args" in of:
        parts.append("".join(_arguments(found, of["Args"])).rstrip())
    if "Raises" in of:
        parts.append("".join(_raised(of["Raises"])).rstrip())
    if inspect.isclass(found):
        parts += _methods(found)
    return "\n\n".join(parts) + "\n"


def _call(name: str, found: Callable[..., Any]) -> str:
    call = f"{name}{_signature(found)}"
    lines = textwrap.wrap(call, WIDTH, subsequent_indent="    ", break_on_hyphens=False)
    return "\n".join(("```py", *lines, "```"))


def _signature(found: Callable[..., Any]) -> str:
    empty = inspect.Signature.empty
    plain = inspect.signature(found)
    parameters = [p.replace(annotation=empty) for p in _parameters(found).values()]
    kept = [one for one in parameters if one.name != "self"]
    return str(plain.replace(parameters=kept, return_annotation=empty)).replace("'", '"')


def _parameters(found: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return what a function takes, the options that conversions share as one."""
    known = dict(inspect.signature(found).parameters)
    if not known.keys() >= ALIKE:
        return known
    options = inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD)
    return {n: one for n, one in known.items() if n not in SHARED} | {"options": options}


def _options() -> str:
    rows = (
        f"| `{one.name}` | {_default(one.default)} | {_cell(get_python_help(one))} |"
        for one in SHARED.values()
    )
    return "\n".join(("| Option | Default | Meaning |", "| --- | --- | --- |", *rows)) + "\n"


def _default(value: object) -> str:
    return f"`{value!r}`".replace("'", '"')


def _arguments(found: Callable[..., Any], text: str) -> Iterator[str]:
    known = _parameters(found)
    meanings = dict(ENTRY.findall(text))
    if meanings.keys() >= ALIKE:
        meanings = {name: text for name, text in meanings.items() if name not in SHARED}
        meanings["**options"] = "See :class:`Options`."
    yield "| Argument | Default | Meaning |\n| --- | --- | --- |\n"
    for name, meaning in meanings.items():
        one = known[name.lstrip("*")]
        shown = "" if one.default is one.empty else _default(one.default)
        stars = "**" if one.kind is one.VAR_KEYWORD else ""
        yield f"| `{stars}{one.name}` | {shown} | {_cell(meaning)} |\n"


def _first_sentence(name: str, method: Callable[..., Any]) -> str:
    """Return the first sentence of a method's docstring; that of ``Mapping`` has none."""
    text = inspect.cleandoc(method.__doc__ or "")
    return MAPPING.get(name, "") if text.startswith("D.") else f"{text.partition('.')[0]}."


def _raised(text: str) -> Iterator[str]:
    for kind, meaning in ENTRY.findall(text):
        yield f"Raises `{kind}`: {_line(_prose(meaning))}\n"


def _methods(found: type) -> Iterator[str]:
    rows = [
        f"| `{name}{_signature(method)}` | {_cell(_first_sentence(name, method))} |"
        for kind in reversed(found.__mro__)
        for name, method in vars(kind).items()
        if not name.startswith("_") and inspect.isfunction(method)
        if getattr(found, name) is method
    ]
    if rows:
        yield "\n".join(("| Method | Description |", "| --- | --- |", *rows))


def _cell(text: str) -> str:
    return _line(_prose(text)).replace("|", "\\|")


def _line(text: str) -> str:
    return " ".join(text.split())


def _prose(text: str) -> str:
    """Return reStructuredText's roles and literals as Markdown."""
    return MARKUP.sub(_markdown, text)


def _markdown(found: re.Match[str]) -> str:
    last = (found["name"] or "").rpartition(".")[2]
    if last == "Options":
        return "the [options](#options)"
    if found["role"] != "meth" and last in ckptctl.__all__:
        heading = f"\n### `ckptctl.{last}`\n" in PAGE.read_text()
        return f"[`ckptctl.{last}`](#{f'ckptctl{last.lower()}' if heading else 'results'})"
    return f"`{last or found['code'] or found[0]}`"


if __name__ == "__main__":
    PAGE.write_text(render())
