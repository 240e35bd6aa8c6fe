"""Plain values come out as Typer, with pydantic, would have them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.core import TyperCommand
from typer.testing import CliRunner

from ckptctl.cli.app import CkptCommand


def parsed(text: str) -> Path:
    if text == "bad":
        raise ValueError("it is bad")
    if not text:
        raise typer.BadParameter("it is empty")
    return Path(text) / "x"


def even(value: int | None) -> int | None:
    if value is not None and value % 2:
        raise typer.BadParameter("it is odd")
    return value


Parsed = Annotated[Path, typer.Argument(parser=parsed)]
Even = Annotated[int | None, typer.Option(callback=even)]
Small = Annotated[int, typer.Option(min=1, max=5)]


def command(
    place: Parsed,
    more: Annotated[list[str] | None, typer.Argument()] = None,
    number: Even = None,
    small: Small = 2,
    count: int = 4,
    factor: float = 0.5,
    text: str = "t",
    name: str | None = None,
    path: Path | None = None,
    several: list[str] | None = None,
    numbers: list[int] | None = None,
    flag: bool = False,
    either: Annotated[bool | None, typer.Option("--yes/--no")] = None,
) -> None:
    print(repr(locals()))


LINES = (
    "p",
    "",
    "bad",
    "p a b --several x --several y --flag --no",
    "p --number 4 --count 007 --factor 1e-3 --text 5 --name n --path q",
    "p --number 3",
    "p --number 4.0",
    "p --count -3 --small 5",
    "p --small 9",
    "p --count 1_000",
    "p --count 123456789012345678901234567890",
    "p --factor nan",
    "p --factor .5",
    "p --factor 1_0.E-3",
    "p --numbers 1 --numbers 2",
    "p --numbers x",
    "p --yes",
)


def answer(cls: type[TyperCommand], line: str) -> tuple[int, str]:
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(cls=cls)(command)
    found = CliRunner().invoke(app, line.split(" ") if line != "-" else [])
    said = found.output.replace("{", "").replace("}", "")
    return found.exit_code, said


@pytest.mark.parametrize("line", [*LINES, "-"])
def test_alike(line: str) -> None:
    assert answer(CkptCommand, line) == answer(TyperCommand, line)


def test_both_outcomes_are_compared() -> None:
    codes = {answer(CkptCommand, line)[0] for line in LINES}
    assert codes == {0, 2}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("p --count two", "'--count': 'two' is not a whole number"),
        ("p --count ²", "'--count': '²' is not a whole number"),
        ("p --count 1e3", "'--count': '1e3' is not a whole number"),
        ("p --number 4.5", "'--number': '4.5' is not a whole number"),
        ("p --factor abc", "'--factor': 'abc' is not a number"),
        ("p --factor 1e", "'--factor': '1e' is not a number"),
        ("p --factor ...", "'--factor': '...' is not a number"),
    ],
)
def test_what_is_no_number_is_repeated(line: str, said: str) -> None:
    assert answer(TyperCommand, line)[0] == 2
    code, text = answer(CkptCommand, line)
    assert code == 2 and f"Invalid value for {said}\n" in text
