"""Command lines that make no sense: what is said of each, and that its hint helps."""

import json
from typing import get_args

import pytest
import torch
from safetensors.torch import save_file

from ckptctl.cli.app import app, build_program
from ckptctl.cli.views.usage_errors import COMMAND_SYNONYMS, OPTION_SYNONYMS, OUTPUT_OPTIONS
from ckptctl.options import Panel
from tests.checkpoints import save_meta, tiny_llama
from tests.runs import save_step

COMMANDS = sorted(str(info.name) for info in app.registered_commands)


@pytest.mark.parametrize(
    ("line", "what", "hint"),
    [
        ("list x", "unknown command `list`", "did you mean `ls`?"),
        ("verfy x", "unknown command `verfy`", "did you mean `verify`?"),
        ("qwerty", "unknown command `qwerty`", "see `ckptctl --help`"),
        ("convert a b --to hf --force", "unknown option `--force`", "`--overwrite`?"),
        ("convert a b --to hf --bf16", "unknown option `--bf16`", "`--dtype bf16`?"),
        ("convert a b --to hf --dytpe bf16", "unknown option `--dytpe`", "`--dtype`?"),
        ("convert a -o b --to hf", "unknown option `-o`", "`ckptctl convert SRC DST`"),
        ("verify x --workers 3", "unknown option `--workers`", "did you mean `--jobs`?"),
        ("verify x --zzz", "unknown option `--zzz`", "`ckptctl verify --help`"),
        ("verify x --debug", "unknown option `--debug`", "`ckptctl --debug verify x`"),
        ("--zzz", "unknown option `--zzz`", "`ckptctl --help`"),
        ("--nan verify x", "unknown option `--nan`", "`ckptctl verify --nan x`"),
        (
            "convert a --to hf",
            "missing argument DST (destination path or URL)",
            "`ckptctl convert llama-3-8b out-dcp --to",
        ),
        (
            "convert a b",
            "missing option --to (format to write: dcp, deepseek, hf, mcore, meta, mistral, "
            "peft or torch)",
            "`ckptctl convert llama-3-8b out-dcp --to dcp`",
        ),
        ("inspect x --depth", "--depth requires a value", "step-2000 --depth 2 --sort size`"),
        ("convert a b --mp", "--mp requires a value", "`ckptctl convert out-dcp out-meta --to"),
        ("convert a b --jobs", "--jobs requires a value", "`ckptctl convert --help`"),
        ("--timeout", "--timeout requires a value", "`ckptctl --help`"),
        ("convert a b --dry-run=yes", "--dry-run does not take a value", "use only `--dry-run`"),
        ("inspect a b c", "too many arguments: `b c`", "`ckptctl inspect --help`"),
    ],
)
def test_invalid_command_line_is_an_error_with_hint(run, line, what, hint):
    result = run(*line.split())
    assert (result.exit_code, result.stdout) == (2, "")
    first, *more = result.stderr.splitlines()
    assert first == f"error: {what}"
    assert more[-1].startswith("hint: ") and hint in more[-1]
    found = json.loads(run(*line.split()[:1], "--json", *line.split()[1:]).stderr)["error"]
    assert found["message"] == what or line.startswith("--")


def test_names_of_other_programs_map_to_existing_ones():
    assert set(COMMAND_SYNONYMS.values()) <= set(COMMANDS)
    assert not set(COMMAND_SYNONYMS) & set(COMMANDS)
    commands = __import__("typer").main.get_command(build_program()).commands
    every = {name for one in commands.values() for p in one.params for name in p.opts}
    assert {option.split()[0] for option in OPTION_SYNONYMS.values()} <= every
    converting = {name for p in commands["convert"].params for name in p.opts}
    assert not (set(OPTION_SYNONYMS) | set(OUTPUT_OPTIONS)) & converting


@pytest.mark.parametrize("name", ["inspect", "latest", "ls"])
def test_missing_path_defaults_to_working_directory(run, name, tmp_path, monkeypatch):
    save_step(tmp_path / "step-1")
    monkeypatch.chdir(tmp_path)
    for words in ((), ("--json",), ("-q",)):
        assert run(name, *words).stdout == run(name, ".", *words).stdout != ""


def test_convert_help_groups_options_into_panels(run):
    shown = run("convert", "--help").stdout
    titles = [*get_args(Panel), "Examples"]
    places = [shown.index(f"{title}:\n") for title in titles]
    assert places == sorted(places) and "\nOptions:" not in shown
    assert "\nCommon:\n  --to FORMAT " in shown
    assert "\nOptions:\n" in run("ls", "--help").stdout


def test_help_is_as_wide_as_terminal(piped):
    shown = [piped("convert", "-h", COLUMNS=str(width)).stdout for width in (60, 150)]
    narrow, wide = (max(map(len, one.partition("Examples:")[0].splitlines())) for one in shown)
    assert 50 < narrow <= 60 and 100 < wide <= 150


def test_unknown_layout_is_reported_before_paths(run, tmp_path):
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine").touch()
    for options in ((), ("-m", "llama3")):
        for option in ("--from-layout", "--to-layout"):
            said = run("convert", tmp_path, taken, "--to", "dcp", option, "torchtun", *options)
            assert said.exit_code == 2 and "error: unknown layout `torchtun`" in said.stderr
            assert f"where: {option}\n" in said.stderr and "`torchtune`?" in said.stderr


def test_meta_shards_with_prefix_get_hint_to_remove_it(run, tmp_path):
    """Naming the model type would not help: the hint says what does."""
    state, config = tiny_llama("llama3")
    save_meta(tmp_path / "meta", state, config, mp=2)
    for file in (tmp_path / "meta").glob("*.pth"):
        torch.save({f"model.{key}": one for key, one in torch.load(file).items()}, file)
    for options in ((), ("-m", "llama3"), ("-m", "mixtral")):
        said = run("convert", tmp_path / "meta", tmp_path / "out", "--to", "hf", *options)
        assert said.exit_code == 5
        assert "hint: save the shards without the prefix `model.`" in said.stderr


def test_wrong_root_gets_hint_to_omit_or_correct_it(run, tmp_path):
    state, _ = tiny_llama("llama3")
    inside = {f"student.{key}": one for key, one in state.items()} | {"other.w": torch.ones(1)}
    save_file(inside, tmp_path / "model.safetensors")
    target = (tmp_path / "model.safetensors", tmp_path / "out.pt", "--to", "torch")
    layout = ("--to-layout", "meta", "-m", "llama3", "--set", "num_attention_heads=4")
    wrong = run("convert", *target, *layout, "--root", "other")
    assert "hint: omit `--root other` to search the entire checkpoint" in wrong.stderr
    cured = run("convert", *target, *layout)
    assert "set its prefix with `--root student`" in cured.stderr
    assert run("convert", *target, *layout, "--root", "student").exit_code != 2


def test_shard_size_without_unit_is_questioned(run, tiny_llama3_hf, tmp_path):
    target = ("convert", tiny_llama3_hf, tmp_path / "out", "--to", "hf", "--max-shard-size")
    for small in ("5", "512", " 1000000"):
        refused = run(*target, small)
        assert refused.exit_code == 2 and not list(tmp_path.iterdir())
        assert f"did you mean `{small.strip()}GB`?" in refused.stderr
    assert run(*target, "2000000").exit_code == 0
    assert run(*target, "20000B", "--overwrite").exit_code == 0
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3


def test_swapped_source_and_destination_are_detected(run, tiny_llama3_hf, tmp_path):
    refused = run("convert", tmp_path / "out", tiny_llama3_hf, "--to", "dcp")
    assert refused.exit_code == 3 and f"where: {tmp_path / 'out'}" in refused.stderr
    assert f"`{tiny_llama3_hf}` is a checkpoint)" in refused.stderr
    empty = run("convert", tmp_path / "nothing", tmp_path, "--to", "dcp")
    assert empty.exit_code == 3 and "is a checkpoint" not in empty.stderr


def test_folder_named_like_file_is_refused(run, tiny_llama3_hf, tmp_path):
    for name in ("zz.pt", "model.safetensors", "x.pth", "pytorch_model.bin"):
        for to in ("hf", "dcp", "meta"):
            refused = run("convert", tiny_llama3_hf, tmp_path / name, "--to", to)
            assert refused.exit_code == 2 and "is named like a file" in refused.stderr
            hint = f"name a folder, as in `{tmp_path / name.partition('.')[0]}`"
            assert hint in refused.stderr
            torch = "pass `--to torch` to write a file" in refused.stderr
            assert torch == (name != "model.safetensors")  # which would be no safetensors
    refused = run("convert", tiny_llama3_hf, tmp_path / "model.safetensors", "--to", "torch")
    assert refused.exit_code == 2 and "has that suffix" in refused.stderr
    assert (
        f"pass `--to hf` to write a folder of safetensors, as in `{tmp_path / 'model'}`"
        in refused.stderr
    )
    assert not list(tmp_path.iterdir())
    for name, to in (("zz.pt", "torch"), ("step=1.ckpt", "dcp"), ("v1.5", "hf")):
        assert run("convert", tiny_llama3_hf, tmp_path / name, "--to", to).exit_code == 0


def test_axis_letters_are_explained(terminal):
    key = "model.layers.0.self_attn.q_proj.weight"
    shown = terminal("map", key, "-m", "llama3", "--to-layout", "meta", NO_COLOR="1")
    said = "h is num_attention_heads; e is head_dim = r x p, p is 2; d is hidden_size"
    assert shown.endswith(f"\n\n  {said}\n")
    assert "e  = r x p, p is 2" in terminal("models", "llama3", "--layout", "meta", NO_COLOR="1")


@pytest.mark.parametrize(
    ("line", "what", "hint"),
    [
        ("convert hf out --to gguf", "writing GGUF is not supported", "`convert_hf_to_gguf.py`"),
        ("convert hf hf --to dcp", "source and destination are the same", "choose a new path"),
        ("convert hf {here} --to dcp", "the source is inside the dest", "choose a new path"),
        (
            "convert hf out --to dcp --max-shard-size 5 GB",
            "too many arguments: `GB`",
            "quote arguments",
        ),
        (
            "convert hf out --to hf --from dcp",
            "this is not a DCP checkpoint",
            "omit the format to detect",
        ),
        ("inspect dcp/__0_0.distcp", "is one file of a checkpoint", "pass its folder, `"),
        ("inspect dcp/.metadata", "is one file of a checkpoint", "pass its folder, `"),
    ],
)
def test_common_mistake_gets_specific_hint(
    run, tiny_llama3_hf, tmp_path, monkeypatch, line, what, hint
):
    (tmp_path / "hf").symlink_to(tiny_llama3_hf)
    save_step(tmp_path / "dcp")
    (tmp_path / "dcp" / ".metadata").touch()
    (tmp_path / "dcp" / "__0_0.distcp").write_bytes(b"PK")
    monkeypatch.chdir(tmp_path)
    said = run(*line.format(here=tiny_llama3_hf.parent).split())
    assert said.exit_code in (2, 3, 6) and what in said.stderr
    assert hint in said.stderr.rpartition("hint: ")[2]


def test_single_tensor_is_printed_in_singular(run, tiny_llama3_hf, tmp_path):
    chosen = ("--include", "lm_head*", "-n")
    said = run("convert", tiny_llama3_hf, tmp_path / "out", "--to", "hf", *chosen).stderr
    assert " · 1 tensor, " in said
