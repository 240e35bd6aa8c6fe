"""What holds for every command: all of them, found by listing, against all that may happen to one.

Each column of the matrix is one test; what cannot take part in it says why in the table above it.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from ckptctl.cli import schema as schemas
from ckptctl.cli.app import app
from tests.contract.commands import (
    CASES,
    COMMANDS,
    FIRST,
    LINES,
    LONG,
    Line,
    arguments,
    hidden,
    validate,
)
from tests.sweeps import one_in
from tests.unit.cli.conftest import environment, program

NOTHING = "/nothing-is-here/at-all"
NO_PATH = {
    "formats": "its argument is the name of a format",
    "models": "its argument is the name of a model type",
    "schema": "its argument is the name of a command",
}
"""Commands that take no path."""


def test_test_matrix_lists_only_registered_commands() -> None:
    assert set(LINES) <= set(COMMANDS)
    assert set(NO_PATH) <= set(COMMANDS)


def test_every_command_has_json_option_and_schema() -> None:
    for info in app.registered_commands:
        assert info.callback and "json" in info.callback.__annotations__, info.name
    assert set(schemas.get_documents_by_name()) - {"error"} == set(COMMANDS)


@pytest.mark.parametrize("name", one_in(4, sorted(schemas.get_documents_by_name())))
def test_schemas_are_valid_json_schema(name: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    for closed in (False, True):
        jsonschema.Draft202012Validator.check_schema(
            schemas.require_json_document(name).build_schema(closed=closed)
        )
    found = schemas.require_json_document(name).build_schema()
    spelled = name.replace(" ", "-")
    assert found["$id"] == f"urn:ckptctl:{spelled}:1" and found["title"] == f"ckptctl.{spelled}/1"
    everything = json.dumps(found)
    assert '"additionalProperties": false' not in everything and "](" not in everything


@pytest.mark.parametrize(("name", "line"), one_in(3, CASES))
def test_json_output_validates_against_schema(
    name: str, line: Line, places: dict[str, Path], run: Callable[..., Result], tmp_path: Path
) -> None:
    result = run(name, *arguments(line, places, tmp_path), "--json")
    assert result.exit_code == line.code, result.output
    assert result.stdout or line.code
    if result.stdout:
        validate(json.loads(result.stdout), name)
    if result.stderr:
        assert line.code
        validate(json.loads(result.stderr), "error")


@pytest.mark.parametrize(("name", "line"), one_in(3, CASES))
def test_piped_output_has_no_color_or_truncation(
    name: str,
    line: Line,
    places: dict[str, Path],
    run: Callable[..., Result],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No escape characters, no cut name, whatever the environment says of color and width."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    result = run(name, *arguments(line, places, tmp_path))
    assert result.exit_code == line.code, result.output
    assert "\x1b" not in result.stdout and "…" not in result.output
    unique = len(str(tmp_path.parent)) + 40
    for whole in (LONG, str(places["place"])):
        assert result.output.count(whole[:unique]) == result.output.count(whole), result.output


@pytest.mark.parametrize(("name", "line"), one_in(3, CASES))
def test_quiet_prints_only_results_and_warnings(
    name: str, line: Line, places: dict[str, Path], run: Callable[..., Result], tmp_path: Path
) -> None:
    """Names or paths alone: no hint, no progress, no table; warnings and errors all the same."""
    result = run(name, *arguments(line, places, tmp_path), "-q")
    assert result.exit_code == line.code, result.output
    said = result.stderr.splitlines()
    assert line.code or all(one.startswith("warning: ") for one in said), result.stderr
    assert "\t" not in result.stdout and "\x1b" not in result.output


def inputs(line: Line) -> list[str]:
    """Return the words of *line* that name what has to be there."""
    return [word for word in line.text.split() if re.fullmatch(r"\{(?!out)[a-z_:]+\}", word)]


@pytest.mark.parametrize(
    ("name", "line", "number"),
    [
        pytest.param(name, line, number, id=f"{name}-{where}-{number}")
        for name, lines in LINES.items()
        for where, line in enumerate(lines)
        for number in range(len(inputs(line)))
    ],
)
def test_missing_path_exits_3_and_changes_nothing(
    name: str,
    line: Line,
    number: int,
    places: dict[str, Path],
    run: Callable[..., Result],
    tmp_path: Path,
) -> None:
    given = {str(path) for path in (*places.values(), *(tmp_path / n for n in places))}
    words = arguments(line, places, tmp_path)
    words[[n for n, word in enumerate(words) if word in given][number]] = NOTHING
    before = tree(tmp_path)
    result = run(name, *words)
    assert (result.exit_code, result.stdout) == (3, ""), result.output
    assert result.stderr.startswith("error: no such ") and f"  where: {NOTHING}\n" in result.stderr
    assert "\nhint: " in result.stderr and "Traceback" not in result.stderr
    machine = run(name, *words, "--json")
    assert (machine.exit_code, machine.stdout) == (3, "")
    document = json.loads(machine.stderr)
    validate(document, "error")
    assert document["error"]["code"] == "not-found" and document["error"]["hint"]
    assert tree(tmp_path) == before


def test_commands_without_path_inputs_are_exactly_no_path() -> None:
    without = {name for name, lines in LINES.items() if not any(map(inputs, lines))}
    assert without == set(NO_PATH)


@pytest.mark.parametrize("name", COMMANDS)
def test_unknown_option_exits_2_with_json_error(name: str, run: Callable[..., Result]) -> None:
    result = run(name, "--json", "--no-such-option")
    assert (result.exit_code, result.stdout) == (2, "")
    document = json.loads(result.stderr)
    validate(document, "error")
    assert document["error"]["code"] == "usage"
    assert document["error"]["hint"] == f"see `ckptctl {name} --help`"


@pytest.mark.parametrize("words", [["--no-such-option"], ["no-such-command"], []])
def test_usage_error_without_command_exits_2_with_json_error(
    words: list[str], run: Callable[..., Result]
) -> None:
    result = run(*words, "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    validate(json.loads(result.stderr), "error")


def test_json_after_double_dash_is_not_an_option(run: Callable[..., Result]) -> None:
    assert run("inspect", "--", "--json").stderr.startswith("error: ")


@pytest.mark.parametrize(("name", "line"), one_in(4, FIRST))
def test_closed_stdout_exits_1_without_traceback_or_leftovers(
    name: str,
    line: Line,
    places: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The reader of stdout has gone: no word about it, and nothing half-done."""
    reading, writing = os.pipe()
    os.close(reading)
    said = io.StringIO()
    words = arguments(line, places, tmp_path)
    before = hidden(tmp_path)
    with open(writing, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        monkeypatch.setattr(sys, "stderr", said)
        with pytest.raises(SystemExit) as ended:
            app([name, *words], prog_name="ckptctl")
        monkeypatch.undo()
        with pytest.raises(BrokenPipeError):
            closed.write("x")
            closed.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), closed.fileno())
    assert ended.value.code == 1
    assert "Traceback" not in said.getvalue() and "roken pipe" not in said.getvalue()
    assert hidden(tmp_path) == before


def test_schema_piped_to_head_prints_no_error(places: dict[str, Path]) -> None:
    shell = "set -o pipefail; " + " ".join(program("schema", "inspect")) + " | head -n 1"
    done = subprocess.run(
        ["bash", "-c", shell], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("{\n", "")
    assert done.returncode in (0, 1, 141)


# ------------------------------------------------------------------------------------- --dry-run

PLANNING = sorted(
    str(info.name)
    for info in app.registered_commands
    if info.callback and "dry_run" in info.callback.__annotations__
)
"""Commands that have --dry-run."""


def tree(*folders: Path) -> list[tuple[object, ...]]:
    """Return all below *folders*: names, bytes, links, modes, and when each was changed."""
    found: list[tuple[object, ...]] = []
    for path in (path for folder in folders for path in (folder, *folder.rglob("*"))):
        status = path.lstat()
        file = path.is_file() and not path.is_symlink()
        holds: object = path.read_bytes() if file else path.is_symlink() and os.readlink(path)
        found.append((str(path), status.st_mode, status.st_mtime_ns, status.st_ctime_ns, holds))
    return sorted(found, key=lambda one: str(one[0]))


def test_writing_commands_support_dry_run() -> None:
    assert {"consolidate", "convert", "merge", "prune"} <= set(PLANNING)


@pytest.mark.parametrize("mode", [(), ("--json",), ("-q",)], ids=["plain", "json", "quiet"])
@pytest.mark.parametrize(("name", "line"), one_in(3, [p for p in CASES if p.values[0] in PLANNING]))
def test_dry_run_changes_nothing(
    name: str,
    line: Line,
    mode: tuple[str, ...],
    places: dict[str, Path],
    run: Callable[..., Result],
    tmp_path: Path,
) -> None:
    """Not a byte, a name, a time or a mode: neither of sources nor of what lies beside them."""
    words = [word for word in arguments(line, places, tmp_path) if word not in ("--yes", "--json")]
    before = tree(tmp_path, places["place"])
    result = run(name, *words, *(() if "--dry-run" in words else ("--dry-run",)), *mode)
    assert result.exit_code in (0, line.code) and result.exit_code != 6, result.output
    assert tree(tmp_path, places["place"]) == before
