"""``--format``: what a terminal gets in a pipe, what a pipe gets on a terminal, and JSON."""

import json
import re

import pytest

from ckptctl.cli.commands import iterate_commands
from ckptctl.cli.output import is_json_requested
from tests.runs import save_step

KEY = "model.layers.0.self_attn.q_proj.weight"
SECONDS = re.compile(r"(checked in |seconds\t)[\d.]+")
COLORS = re.compile(r"\x1b\[\d+m")
FREE = re.compile(r"(free_bytes\t)\d+|\(\S+ \S+ free\)")


@pytest.fixture
def lines(tiny_llama3_hf, tmp_path):
    save_step(tmp_path / "run" / "step-1")
    save_step(tmp_path / "run" / "step-2")
    return {
        "inspect": ["inspect", tiny_llama3_hf],
        "tensors": ["inspect", tiny_llama3_hf, "--tensors"],
        "verify": ["verify", tiny_llama3_hf],
        "ls": ["ls", tmp_path / "run"],
        "latest": ["latest", tmp_path / "run"],
        "prune": ["prune", tmp_path / "run", "--keep-last", "1", "--dry-run"],
        "diff": ["diff", tiny_llama3_hf, tiny_llama3_hf],
        "extract": ["extract", tiny_llama3_hf, "model.norm.weight"],
        "convert": ["convert", tiny_llama3_hf, tmp_path / "out", "--to", "dcp", "--dry-run"],
        "formats": ["formats"],
        "models": ["models", "--layout", "meta"],
        "map": ["map", KEY, "-m", "llama3", "--to-layout", "meta"],
        "schema": ["schema"],
    }


NAMES = [
    *("inspect", "tensors", "verify", "ls", "latest", "prune", "diff", "extract", "convert"),
    *("formats", "models", "map", "schema"),
]


def answer(shown):
    """Return what a terminal shows without notes and hints, which are on it as well."""
    plain = FREE.sub(r"\1", COLORS.sub("", shown))
    plain = SECONDS.sub(r"\1", plain).splitlines()
    return [one for one in plain if not one.startswith(("hint: ", "note: ", "dcp ", "hf "))]


@pytest.mark.parametrize("name", NAMES)
def test_table_format_in_pipe_matches_terminal(piped, terminal, lines, name):
    on_request = piped(*lines[name], "--format", "table", COLUMNS="100")
    assert on_request.returncode == 0, on_request.stderr
    assert "\x1b" not in on_request.stdout
    shown = answer(terminal(*lines[name], COLUMNS="100"))
    assert set(answer(on_request.stdout)) <= set(shown)
    assert name == "latest" or "\t" not in on_request.stdout


@pytest.mark.parametrize("name", NAMES)
def test_tsv_format_on_terminal_matches_pipe(piped, terminal, lines, name):
    rows = answer(piped(*lines[name]).stdout)
    assert answer(piped(*lines[name], "--format=tsv").stdout) == rows
    # A terminal has a tab where the pipe has one; what it shows besides goes to stderr.
    shown = terminal(*lines[name], "--format", "tsv", NO_COLOR="1")
    assert set(rows) <= set(answer(shown))


@pytest.mark.parametrize("name", NAMES)
def test_json_format_matches_json_option(piped, lines, name):
    document = json.loads(piped(*lines[name], "--format", "json").stdout)
    assert document.keys() == json.loads(piped(*lines[name], "--json").stdout).keys()


def test_table_width_in_pipe_is_columns_or_100(piped):
    for width, environment in ((100, {}), (70, {"COLUMNS": "70"}), (160, {"COLUMNS": "160"})):
        shown = piped("models", "--format=table", **environment).stdout
        assert width - 20 < max(map(len, shown.splitlines())) <= width


def test_table_in_pipe_has_color_only_on_request(piped, lines):
    asked = (*lines["inspect"], "--format=table")
    assert "\x1b[32m" in piped(*asked, "--color=always").stdout
    assert "\x1b" not in piped(*asked, FORCE_COLOR="1").stdout


def test_errors_are_json_with_json_format(piped):
    for words in (("--format", "json"), ("--format=json",)):
        failed = piped("inspect", "nowhere", *words)
        assert (failed.returncode, failed.stdout) == (3, "")
        assert json.loads(failed.stderr)["error"]["code"] == "not-found"


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (["ls", "--json"], True),
        (["ls", "--format", "json"], True),
        (["ls", "--format=json"], True),
        (["ls", "--format", "tsv"], False),
        (["extract", "json", "--format"], False),
        (["inspect", "--", "--format", "json"], False),
        ([], False),
    ],
)
def test_json_request_is_detected_before_parsing(words, asked):
    assert is_json_requested(words) == asked


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("tabel", "did you mean `table`?"),
        ("dcp", "pass `--from` or `--to` to set the format of a checkpoint"),
    ],
)
def test_unknown_output_format_is_a_usage_error(run, value, hint):
    failed = run("inspect", "x", "--format", value)
    assert failed.exit_code == 2
    assert failed.stderr == (
        f"error: unknown output format `{value}`\n"
        "  where: --format\n"
        "  why:   known: table, tsv, json\n"
        f"hint: {hint}\n"
    )


def test_every_command_but_report_has_format_option():
    without = {one.name for one in iterate_commands() if not one.has_rows}
    assert without == {"report"}  # its answer is a page


def test_output_format_does_not_leak_into_next_command(run, tiny_llama3_hf):
    plain = run("inspect", tiny_llama3_hf).stdout
    assert run("inspect", tiny_llama3_hf, "--format", "table").stdout != plain
    assert run("inspect", tiny_llama3_hf).stdout == plain
