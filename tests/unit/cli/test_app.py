"""What holds for every command: help, streams, errors, exit codes, imports."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import ckptctl
from ckptctl import errors
from ckptctl.cli import inspect as command
from ckptctl.cli.app import app
from ckptctl.verbs.inspection import inspect as op
from tests.sweeps import one_in

SNAPSHOTS = Path(__file__).parents[2] / "snapshots"
COMMANDS = sorted(str(info.name) for info in app.registered_commands)


def test_commands_are_discovered():
    assert {"convert", "inspect"} <= set(COMMANDS)


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_every_command_has_help_with_examples(run, name):
    result = run(*filter(None, [name]), "--help")
    assert result.exit_code == 0
    assert result.stderr == ""
    assert "Examples:" in result.stdout
    short = run(*filter(None, [name]), "-h").stdout
    assert (short == result.stdout) == (" --help` lists all " not in short)


@pytest.mark.parametrize("name", COMMANDS)
def test_short_help_is_not_truncated(run, name):
    line = next(line for line in run("--help").stdout.splitlines() if line.startswith(f"  {name} "))
    assert not line.endswith("...")


def test_overview_matches_help_of_typer_app(run, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        app(["--help"], prog_name="ckptctl")
    # What Typer's test runner prints is two columns wider.
    assert run("--help", COLUMNS="80").stdout.split() == capsys.readouterr().out.split()


def test_no_arguments_show_help_and_exit_2(run):
    result = run()
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Usage:" in result.stderr


def test_version_options_print_version(run):
    assert run("-V").stdout == run("--version").stdout == f"ckptctl {ckptctl.__version__}\n"


def test_unknown_command_gets_suggestion(run):
    result = run("inspct", "x")
    assert result.exit_code == 2
    assert result.stderr == ("error: unknown command `inspct`\nhint: did you mean `inspect`?\n")


@pytest.mark.parametrize("name", ["", "ls", "convert"])
def test_help_command_matches_help_option(run, name):
    words = [name] if name else []
    assert run("help", *words).stdout == run(*words, "--help").stdout != ""


def test_help_of_unknown_command_is_a_usage_error(run):
    result = run("help", "inspct")
    assert (result.exit_code, result.stdout) == (2, "") and "`inspect`" in result.stderr


def failing(monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(op, "inspect_checkpoint", fail)


FULL = errors.CoverageError(
    "chunks \x1b[31m are missing", where="tensor `a\nb`", why="rows 2:4", hint="copy them"
)


def test_error_is_printed_with_where_why_and_hint(run, monkeypatch):
    failing(monkeypatch, FULL)
    result = run("inspect", "x")
    assert result.exit_code == 4
    assert result.stdout == ""
    assert result.stderr == (
        "error: chunks \\x1b[31m are missing\n"
        "  where: tensor `a\\nb`\n"
        "  why:   rows 2:4\n"
        "hint: copy them\n"
    )


def test_error_with_json_is_printed_as_json(run, monkeypatch):
    failing(monkeypatch, FULL)
    result = run("inspect", "x", "--json")
    assert (result.exit_code, result.stdout) == (4, "")
    assert json.loads(result.stderr) == {
        "schema": "ckptctl.error/1",
        "ckptctl": ckptctl.__version__,
        "error": {
            "code": "coverage",
            "exit_code": 4,
            "message": "chunks \x1b[31m are missing",
            "where": "tensor `a\nb`",
            "why": "rows 2:4",
            "hint": "copy them",
        },
    }


@pytest.mark.parametrize("args", [["--depth", "x"], ["--nope"], ["--sort", "age"]])
def test_usage_error_with_json_is_printed_as_json(run, args):
    result = run("inspect", "x", "--json", *args)
    assert (result.exit_code, result.stdout) == (2, "")
    found = json.loads(result.stderr)["error"]
    assert (found["code"], found["exit_code"]) == ("usage", 2)


@pytest.mark.parametrize(
    "kind",
    [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, errors.CkptError)],
)
def test_every_error_class_sets_exit_code(run, monkeypatch, kind):
    error = kind.__new__(kind)
    errors.CkptError.__init__(error, "something")
    failing(monkeypatch, error)
    assert run("inspect", "x").exit_code == kind.exit_code


def test_unexpected_exception_is_reported_as_bug(run, monkeypatch):
    failing(monkeypatch, ZeroDivisionError("oh"))
    result = run("inspect", "x")
    assert result.exit_code == 70
    assert "error: ZeroDivisionError: oh" in result.stderr
    assert "this is a bug in ckptctl, please report it" in result.stderr
    assert "Traceback" not in result.stderr
    assert "Traceback" in run("--debug", "inspect", "x").stderr
    assert "Traceback" in run("inspect", "x", CKPTCTL_DEBUG="1").stderr
    machine = json.loads(run("--debug", "inspect", "x", "--json").stderr)["error"]
    assert machine["code"] == "internal"
    assert "ZeroDivisionError" in machine["traceback"]


def test_keyboard_interrupt_exits_130(run, monkeypatch):
    failing(monkeypatch, KeyboardInterrupt())
    result = run("inspect", "x")
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr == "error: interrupted\n"


def test_os_error_exits_8_and_names_path(run, monkeypatch):
    failing(monkeypatch, PermissionError(13, "Permission denied", "/x/y"))
    result = run("inspect", "x")
    assert result.exit_code == 8
    assert "Permission denied (EACCES)" in result.stderr
    assert "where: /x/y" in result.stderr


def test_typer_exit_code_is_passed_through(run, monkeypatch):
    failing(monkeypatch, typer.Exit(7))
    assert run("inspect", "x").exit_code == 7


@pytest.mark.parametrize(
    "args", one_in(2, [["--help"], ["convert", "--help"], ["inspect", "/nope"], ["formats"]])
)
def test_commands_do_not_import_heavy_modules(args):
    check = (
        "import sys\n"
        "from ckptctl.cli.app import app\n"
        f"try: app({args!r})\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'rich', 'safetensors', 'huggingface_hub', 'asyncio'}\n"
        "heavy.add('pydantic')\n"
        "print('loaded:', heavy & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60)
    assert done.stderr.endswith("loaded: set()\n"), done.stderr


def test_importing_ckptctl_loads_no_submodules():
    check = (
        "import sys; before = set(sys.modules); import ckptctl;"
        "print(sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60)
    loaded = set(eval(done.stdout))
    assert {name for name in loaded if name.startswith("ckptctl")} == {"ckptctl"}
    assert "torch" not in loaded


def test_public_names_are_importable_and_listed():
    for name in ckptctl.__all__:
        assert getattr(ckptctl, name) is not None
    assert set(ckptctl.__all__) <= set(dir(ckptctl))
    with pytest.raises(AttributeError):
        ckptctl.nothing  # noqa: B018


def test_closed_stdout_pipe_ends_quietly(tmp_path):
    from tests.unit.cli.conftest import environment, program

    process = subprocess.Popen(
        program("--help"), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) in (0, 1)
    process.stderr.close()


def test_shell_completion_lists_formats(run, fake):
    result = run(
        _CKPTCTL_COMPLETE="complete_bash", COMP_WORDS="ckptctl inspect x --from f", COMP_CWORD="4"
    )
    assert result.stdout.split() == ["fake"]


def test_command_module_is_not_shadowed_by_function():
    assert command.__name__ == "ckptctl.cli.inspect"
    assert command.inspect.run.__module__ == "ckptctl.cli.inspect"


def test_abort_at_prompt_exits_130(run, monkeypatch):
    failing(monkeypatch, typer.Abort())
    result = run("inspect", "x")
    assert (result.exit_code, result.stderr) == (130, "error: interrupted\n")


@pytest.mark.parametrize("line", ["prune '' --keep-last 1", "inspect ''", "convert x '' --to hf"])
def test_empty_path_is_a_usage_error(run, line):
    result = run(*shlex.split(line))
    assert result.exit_code == 2
    assert "the path is empty" in result.stderr
    assert ("`.` is the working directory" in result.stderr) == ("convert" not in line)
