"""What Typer is spared comes out as it would without."""

from __future__ import annotations

from typing import Annotated

import pytest
import typer
from typer.core import TyperCommand
from typer.testing import CliRunner

from ckptctl.cli.commands import CkptCommand


def command(
    place: Annotated[str, typer.Argument()],
    more: Annotated[str | None, typer.Argument()] = None,
    number: Annotated[str | None, typer.Option(envvar="TEST_NUMBER")] = None,
    text: str = "t",
    several: list[str] | None = None,
    flag: Annotated[bool, typer.Option("-f", "--flag", envvar="TEST_FLAG")] = False,
    needed: Annotated[str, typer.Option()] = ...,  # type: ignore[assignment]
) -> None:
    print(repr(locals()))


LINES = (
    "p --needed n",
    "p q --needed n --several x --several y --flag",
    "p --needed n --number 4 -f",
    "--needed=n p -- --flag",
    "p",
    "--needed n",
    "p q r --needed n",
    "p --needed n --nothing",
    "p --needed n --number",
)


def answer(cls: type[TyperCommand], line: str, env: dict[str, str]) -> tuple[int, str]:
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(cls=cls)(command)
    found = CliRunner().invoke(app, line.split(" "), env=env)
    return found.exit_code, found.output.replace("{", "").replace("}", "").replace(" <str>", "")


@pytest.mark.parametrize("env", [{}, {"TEST_NUMBER": "7", "TEST_FLAG": "1"}, {"TEST_FLAG": "0"}])
@pytest.mark.parametrize("line", LINES)
def test_plain_command_matches_typer_command(line: str, env: dict[str, str]) -> None:
    code, text = answer(CkptCommand, line, env)
    assert (code, text) == answer(TyperCommand, line, env)


def test_compared_lines_include_success_and_usage_error() -> None:
    assert {answer(CkptCommand, line, {})[0] for line in LINES} == {0, 2}
