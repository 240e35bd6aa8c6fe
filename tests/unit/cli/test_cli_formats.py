import json
import subprocess
import sys

import pytest

import ckptctl
from ckptctl import formats
from ckptctl.errors import UsageError
from ckptctl.formats.base import GB
from ckptctl.verbs.known_formats import list_known_formats
from tests.contract.support import WRITABLE
from tests.fakes import FakeFormat


def document(result):
    assert result.exit_code == 0, result.stderr
    return {one["name"]: one for one in json.loads(result.stdout)["formats"]}


def test_formats_lists_all_and_marks_writable(run):
    found = document(run("formats", "--json"))
    assert list(found) == list(formats.list_format_names())
    assert [name for name, one in found.items() if one["written"]] == list(
        formats.list_writable_names()
    )
    assert run("formats", "-q").stdout.split() == list(formats.list_format_names())


def test_formats_in_pipe_prints_row_per_format(run):
    rows = [line.split("\t") for line in run("formats", "--no-header").stdout.splitlines()]
    assert [row[0] for row in rows] == list(formats.list_format_names())
    assert {row[0]: row[1:3] for row in rows}["torch"] == ["read, written", "any"]
    assert {row[0]: row[1:3] for row in rows}["deepspeed"] == ["read only", "any"]


def test_single_format_shows_options_and_details(run):
    found = document(run("formats", "deepspeed", "--json"))["deepspeed"]
    assert [one["option"] for one in found["choices"]] == [
        "--tag NAME",
        "--weights master|module",
    ]
    rows = [line.split("\t") for line in run("formats", "deepspeed").stdout.splitlines()]
    assert ["format", "deepspeed"] in rows
    assert [row[0] for row in rows].count("options") == 2
    assert "written as" not in [row[0] for row in rows]
    assert run("formats", "hf", "-q").stdout == "hf\n"


def test_unknown_format_gets_suggestion(run):
    result = run("formats", "deepsped")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "did you mean `deepspeed`?" in result.stderr


@pytest.mark.parametrize("name", ["HF", "safetensors", "HuggingFace"])
def test_aliases_and_capitals_get_suggestion(run, name):
    result = run("formats", name)
    assert result.exit_code == 2 and "did you mean `hf`?" in result.stderr


@pytest.mark.parametrize("name", WRITABLE)
def test_described_write_behavior_matches_convert(run, tmp_path, tiny_llama3_hf, name):
    """What options do and refuse is what the format says."""
    said = document(run("formats", name, "--json"))[name]["written"]
    source = tiny_llama3_hf
    done = ckptctl.convert(source, tmp_path / "out", to=name)
    assert done.target.is_dir() == said["directory"]
    carried = done.target.is_dir() and (done.target / "tokenizer.json").exists()
    assert carried == said["side_files"]
    whole = ckptctl.convert if said["leaves"] else refused
    whole(source, tmp_path / "all", to=name, only="all")
    for option, value in (("max_shard_size", 10**5), ("mp", 2)):
        if f"--{option.replace('_', '-')}" in said["cut_by"]:
            cut = ckptctl.convert(source, tmp_path / option, to=name, **{option: value})
            assert len(cut.plan.files) > len(done.plan.files)
        else:
            refused(source, tmp_path / option, to=name, **{option: value})


def refused(*args, **options):
    with pytest.raises(UsageError):
        ckptctl.plan_conversion(*args, **options)


def test_peft_adapter_rejects_max_shard_size(tmp_path, tiny_llama3_hf):
    with pytest.raises(UsageError, match="`max_shard_size` is not supported with `to='peft'`"):
        ckptctl.plan_conversion(tiny_llama3_hf, tmp_path / "o", to="peft", max_shard_size=GB)


class Acme(FakeFormat):
    name = "acme"
    title = "one file of Acme's"


class Point:
    """What stands for the entry point of an installed package."""

    name = "acme"

    class dist:
        name = "acme-checkpoints"

    def __init__(self, found):
        self.load = lambda: found


@pytest.fixture
def installed(monkeypatch):
    def install(**points):
        monkeypatch.setattr(formats, "get_entry_points_by_name", lambda: points)
        formats.load_plugin_format.cache_clear()

    yield install
    formats.load_plugin_format.cache_clear()


def test_plugin_formats_are_marked_with_package(run, installed, terminal):
    installed(acme=Point(Acme()))
    found = document(run("formats", "--json"))
    assert list(found)[-1] == "acme" and found["acme"]["package"] == "acme-checkpoints"
    assert {one["package"] for name, one in found.items() if name != "acme"} == {None}
    assert run("formats").stdout.endswith("one file of Acme's (added by acme-checkpoints)\n")
    assert ["tested against", "not stated"] in [
        line.split("\t") for line in run("formats", "acme").stdout.splitlines()
    ]


def test_plugin_formats_can_be_selected(run, installed, tmp_path):
    installed(acme=Point(Acme()))
    assert run("inspect", tmp_path, "--from", "acme").exit_code == 4
    refused = run("inspect", tmp_path, "--from", "acne")
    assert refused.exit_code == 2 and "did you mean `acme`?" in refused.stderr


@pytest.mark.parametrize("found", [object(), FakeFormat()])
def test_broken_format_plugin_is_named(run, installed, found):
    installed(acme=Point(found))
    result = run("formats")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "cannot load format `acme`" in result.stderr and "acme-checkpoints" in result.stderr


def test_built_in_formats_override_plugins(run, installed):
    installed(hf=Point(object()))
    assert document(run("formats", "--json"))["hf"]["package"] is None


def test_unimportable_format_module_is_named(run, monkeypatch, tmp_path):
    (tmp_path / "broken.py").write_text("FORMAT = Missing()\n")
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(tmp_path)])
    caches = (formats._import_modules, formats.load_builtin_formats)
    for cached in caches:
        cached.cache_clear()
    try:
        result = run("formats")
    finally:
        for cached in caches:
            cached.cache_clear()
    assert (result.exit_code, result.stdout) == (2, "")
    assert "cannot load module `ckptctl.formats.broken`" in result.stderr
    assert "NameError: name 'Missing' is not defined" in result.stderr


def test_formats_fit_terminal_width(terminal):
    shown = terminal("formats", COLUMNS="80", NO_COLOR="1").splitlines()
    assert max(map(len, shown)) <= 80 and shown[0].startswith("format ")
    assert [line.split()[0] for line in shown[1:-1]] == list(formats.list_format_names())
    one = terminal("formats", "dcp", COLUMNS="80", NO_COLOR="1")
    assert one.count("detected by") == one.count("  written as ") == 1
    assert max(map(len, one.splitlines())) <= 80


def test_formats_does_not_import_torch():
    code = (
        f"import sys; from {list_known_formats.__module__} import "
        f"{list_known_formats.__name__} as formats; "
        "formats();"
        "assert not {'torch', 'numpy', 'safetensors'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
