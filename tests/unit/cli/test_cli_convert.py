"""What ``convert`` says and passes on; what it does is tested with the operation."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ckptctl
from ckptctl import formats
from ckptctl import option_checks as checks
from ckptctl.conversion.summary import Amount, Summary, TensorCounts
from ckptctl.errors import RefusedError, UsageError

DROPPED = {f"rope.{i}": "computed from the config" for i in range(7)}


NOT_CARRIED = {"notes.txt": "unknown kind of file"}
LEFT_OUT = {"step\x1b": "not a tensor"}
MISSING: dict[str, str] = {}


SUMMARY = Summary(
    read=Amount(11, 4 << 30),
    written=Amount(3, 3 << 30),
    dropped=7,
    left_out=0,
    missing=0,
    taken=0,
    made=0,
    fused=TensorCounts(2, 1),
    divided=TensorCounts(),
    regrouped=TensorCounts(),
    repeated=TensorCounts(),
)


class Plan:
    statement = "fake → hf · llama3 · 3 tensors"
    warnings = ()
    notes = ("tied twice",)
    tensors = 3
    summary = SUMMARY
    taken = MISSING
    base = None
    mapped = 2
    dropped = DROPPED
    left_out = LEFT_OUT
    not_carried = NOT_CARRIED
    missing = MISSING
    files = (("a.safetensors", 3 << 30), ("config.json", 12))
    nbytes = (3 << 30) + 12
    free_bytes = 400 << 30
    memory_bytes = 64 << 20
    threads = 2
    arithmetic = True
    upload = False
    quantized = MISSING
    plan = SimpleNamespace(target="/b")
    options = SimpleNamespace(resume=False, restart=False, verify=False)

    def to_json(self):
        return {"dry_run": True, "bytes": self.nbytes}


class Result:
    plan = Plan()
    nbytes = Plan.nbytes
    seconds = 2.0
    resumed_bytes = 1 << 30
    verified = True
    notes = ("no renameat2 here",)
    out_of_range = MISSING
    rounding = MISSING

    def to_json(self):
        return {**self.plan.to_json(), "dry_run": False, "verified": True}


@pytest.fixture
def calls(monkeypatch):
    """Stand in for the operation and remember how it is called."""
    found = SimpleNamespace(plan=[], run=[])

    def plan(src, dst, options):
        found.plan.append((src, dst, options))
        return Plan()

    def run(plan, progress, ranks=None):
        found.run.append(progress)
        return Result()

    module = SimpleNamespace(plan_conversion=plan, run_conversion=run)
    monkeypatch.setitem(sys.modules, "ckptctl.conversion.convert", module)
    monkeypatch.setattr("ckptctl.api.conversion.conversion", module)
    monkeypatch.setattr(formats, "list_format_names", lambda: ("dcp", "deepspeed", "hf"))
    monkeypatch.setattr(formats, "list_writable_names", lambda: ("dcp", "hf"))
    return found


def test_convert_options_reach_plan(run, calls):
    result = run(
        "convert", "a", "b", "--to", "hf", "--from", "dcp", "-m", "llama3", "--from-layout", "meta",
        "--to-layout", "hf", "--dtype", "bf16", "--include", "x*", "--include", "y",
        "--exclude", "z", "--dequantize", "bf16",
        "--only", "all", "--root", "model", "--max-shard-size", "2GiB", "--mp", "2",
        "--assets", "c", "--trust-assets", "--carry", "*.txt",
        "--overwrite", "--resume", "--no-checksum", "--jobs", "3",
        "--memory", "1MiB", "--untie", "--vocab-size", "32", "--weights", "master", "--tag", "t",
        "--rules", "r.toml", "--ranks", "4",
        "--set", "n_heads=4", "--set", "k=2",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    ((src, dst, options),) = calls.plan
    assert (src, dst) == (Path("a"), Path("b"))
    assert vars(options) == {
        "to": "hf", "from_format": "dcp", "model_type": "llama3", "from_layout": "meta",
        "to_layout": "hf", "dtype": "bfloat16", "include": ("x*", "y"), "exclude": ("z",),
            "dequantize": "bfloat16", "quantize": None, "quantize_also": (), "quantize_not": (),
        "only": "all", "root": "model", "max_shard_size": 2 << 30, "mp": 2, "assets": Path("c"),
        "trust_assets": True, "fill_from": None,
        "carry": ("*.txt",),
        "like": None, "overwrite": True, "resume": True, "restart": False,
        "verify": False, "checksum": False,
        "jobs": 3, "memory": 1 << 20, "untie": True, "vocab_size": 32,
        "weights": "master", "tag": "t", "rules": Path("r.toml"), "ranks": 4,
        "sizes": {"n_heads": 4, "k": 2}, "converter": None, "lora_alpha": None,
        "tied": None, "stack_layers": False, "experts": None,
        "allow_overflow": False, "allow_missing": False, "verify_replicas": False, "step": (),
        "device": None, "reference": None, "repack": None,
    }  # fmt: skip


def test_exclusive_convert_options_reach_plan(run, calls):
    run("convert", "a", "b", "--to", "hf", "--fill-from", "e", "--like", "d", "--verify")
    ((_, _, options),) = calls.plan
    assert (options.fill_from, options.like, options.verify) == (Path("e"), Path("d"), True)


def test_command_defaults_match_python_defaults(run, calls):
    run("convert", "a", "b", "--to", "hf")
    ckptctl.convert("a", "b", to="hf")
    command, function = (vars(options) for _, _, options in calls.plan)
    assert command | {"progress": None} == function
    assert command["max_shard_size"] is None


def test_convert_result_in_pipe_is_tab_separated(run, reader, calls):
    result = run("convert", "a", "b c", "--to", "hf")
    assert [line.split("\t") for line in result.stdout.splitlines()] == [
        ["target", "b c"],
        ["files", "2"],
        ["in", "11", str(4 << 30)],
        ["out", "3", str(3 << 30)],
        ["bytes", str(Plan.nbytes)],
        ["resumed_bytes", str(1 << 30)],
        ["seconds", "2.000"],
        ["verified", "yes"],
    ]
    assert result.stderr.splitlines() == [
        Plan.statement,
        "note: tied twice",
        "note: dropped, computed from the config: 7 names under `rope`",
        "note: skipped, not a tensor: `step\\x1b`",
        "note: no renameat2 here",
    ]


def test_quiet_convert_prints_only_target(run, calls):
    result = run("convert", "a", "b", "--to", "hf", "-q")
    assert (result.stdout, result.stderr) == ("b\n", "")
    assert calls.run == [None]


def test_json_convert_and_dry_run_print_one_document(run, calls):
    result = run("convert", "a", "b", "--to", "hf", "--json")
    assert result.stderr == ""
    assert json.loads(result.stdout) == {
        "schema": "ckptctl.convert/1",
        "ckptctl": ckptctl.__version__,
        "dry_run": False,
        "bytes": Plan.nbytes,
        "verified": True,
    }
    dry = json.loads(run("convert", "a", "b", "--to", "hf", "--json", "-n").stdout)
    assert (dry["dry_run"], dry["bytes"]) == (True, Plan.nbytes)
    assert len(calls.run) == 1


def test_dry_run_lists_plan_without_writing(run, reader, calls):
    result = run("convert", "a", "b", "--to", "hf", "--dry-run")
    assert calls.run == []
    rows = [line.split("\t") for line in result.stdout.splitlines()]
    assert ["free_bytes", str(400 << 30)] in rows
    assert ["arithmetic", "yes"] in rows
    assert ["file", "a.safetensors", str(3 << 30)] in rows
    assert ["left_out", "step\\x1b", "not a tensor"] in rows
    assert ["not_carried", "notes.txt", "unknown kind of file"] in rows
    assert [row[1] for row in rows if row[0] == "dropped"] == list(DROPPED)
    assert result.stderr.splitlines()[-1] == "hint: run it with `ckptctl convert a b --to hf`"


def test_dry_run_without_disk_space_omits_run_hint(run, reader, calls, monkeypatch):
    monkeypatch.setattr(Plan, "free_bytes", Plan.nbytes - 1)
    said = run("convert", "a", "b", "--to", "hf", "--dry-run").stderr
    assert "would be refused" in said and "run it with" not in said


def test_hints_are_omitted_without_terminal(run, calls):
    for flags in ([], ["-n"]):
        assert "hint: " not in run("convert", "a", "b", "--to", "hf", *flags).stderr


@pytest.mark.parametrize("flags", [["-n", "-q"], ["-nq"]])
def test_quiet_dry_run_prints_nothing_to_stderr(run, calls, flags):
    result = run("convert", "a", "b", "--to", "hf", *flags)
    assert result.stderr == ""
    assert calls.run == []


def test_dry_run_on_terminal_prints_summary(run, calls, monkeypatch):
    from ckptctl.cli import output

    monkeypatch.setattr(output, "_is_terminal", lambda _: True)
    result = run("convert", "a", "b", "--to", "hf", "-n", NO_COLOR="1")
    assert result.stdout == (
        "would write 2 files (3.0 GiB) to b\n"
        "  a.safetensors  3.0 GiB\n"
        "  config.json       12 B\n"
        "11 tensors, 4.0 GiB → 3 tensors, 3.0 GiB (7 dropped, 2 fused into 1, 2 renamed\n"
        "  or reordered)\n"
        "dropped (7): computed from the config\n"
        "  rope.0\n  rope.1\n  rope.2\n  rope.3\n  rope.4\n  rope.5\n  rope.6\n"
        "skipped: not a tensor\n"
        "  step\\x1b\n"
        "disk: 3.0 GiB (400.0 GiB free) · peak memory: ~64.0 MiB · threads: 2 ·\n"
        "  arithmetic with torch\n"
    )


def test_dry_run_warns_if_disk_space_is_insufficient(run, calls, monkeypatch):
    monkeypatch.setattr(Plan, "free_bytes", Plan.nbytes - 1)
    said = "warning: not enough disk space for the output; the conversion would be refused"
    assert said in run("convert", "a", "b", "--to", "hf", "-n").stderr
    monkeypatch.setattr(Plan, "upload", True)
    assert said not in run("convert", "a", "s3://b/c", "--to", "hf", "-n").stderr
    monkeypatch.setattr(Plan, "upload", False)
    monkeypatch.setattr(Plan, "free_bytes", Plan.nbytes)
    assert said not in run("convert", "a", "b", "--to", "hf", "-n").stderr


@pytest.mark.parametrize(("jobs", "least"), [(1, "64.0 KiB"), (3, "192.0 KiB")])
def test_memory_below_minimum_per_thread_is_refused(run, tiny_llama3_hf, tmp_path, jobs, least):
    command = ("convert", tiny_llama3_hf, tmp_path / "out", "--to", "dcp", "--jobs", jobs)
    result = run(*command, "--memory", 65536 * jobs - 1)
    assert result.exit_code == 2
    assert f"`--memory` must be at least {least} for {jobs} thread" in result.stderr
    assert run(*command, "--memory", 65536 * jobs).exit_code == 0


def test_convert_result_on_terminal_is_a_summary(run, calls, monkeypatch):
    from ckptctl.cli import output

    monkeypatch.setattr(output, "_is_terminal", lambda _: True)
    assert run("convert", "a", "b", "--to", "hf", NO_COLOR="1").stdout == (
        "wrote b: 2 files, 3.0 GiB in 2.00 s, 1.0 GiB/s, 1.0 GiB resumed, verified\n"
        "11 tensors, 4.0 GiB → 3 tensors, 3.0 GiB (7 dropped, 2 fused into 1)\n"
    )


def test_unchanged_counts_are_omitted(run, calls, monkeypatch):
    from ckptctl.cli import output

    monkeypatch.setattr(output, "_is_terminal", lambda _: True)
    monkeypatch.setattr(output, "_count_columns", lambda: 200)
    same = Amount(3, 3 << 30)
    unchanged = replace(SUMMARY, read=same, written=same, dropped=0, fused=TensorCounts())
    monkeypatch.setattr(Plan, "summary", unchanged)
    done = run("convert", "a", "b", "--to", "hf", NO_COLOR="1")
    assert len(done.stdout.splitlines()) == 1
    shown = run("convert", "a", "b", "--to", "hf", "-n", NO_COLOR="1").stdout
    assert "3 tensors, 3.0 GiB (2 renamed or reordered)\n" in shown
    monkeypatch.setattr(Plan, "mapped", 0)
    shown = run("convert", "a", "b", "--to", "hf", "-n", NO_COLOR="1").stdout
    assert "\n3 tensors, 3.0 GiB\n" in shown and " 0 " not in shown


def test_long_dry_run_lists_are_capped(run, calls, monkeypatch):
    from ckptctl.cli import output

    monkeypatch.setattr(output, "_is_terminal", lambda _: True)
    monkeypatch.setattr(Plan, "dropped", {f"rope.{n}": "computed" for n in range(12)})
    monkeypatch.setattr(Plan, "files", tuple((f"{n}.pt", 12) for n in range(11)))
    shown = run("convert", "a", "b", "--to", "hf", "-n", NO_COLOR="1").stdout
    assert "dropped (12): computed\n" in shown
    assert "  rope.9\n  and 2 more (`--json` lists all)\n" in shown
    assert "  9.pt  12 B\n  and 1 more (`--json` lists all)\n" in shown


def test_dry_run_in_pipe_is_labeled(run, calls):
    assert run("convert", "a", "b", "--to", "hf", "-n").stdout.startswith("dry_run\tyes\n")


@pytest.mark.parametrize(
    ("options", "by"), [([], "config.json"), (["-m", "llama3"], "--model-type")]
)
def test_statement_names_source_of_model_type(run, tiny_llama3_hf, tmp_path, options, by):
    asked = ("convert", tiny_llama3_hf, tmp_path / "out", "--to", "dcp", "-n", *options)
    assert f"· llama3 (from {by}) ·" in run(*asked).stderr


def test_statement_does_not_cite_missing_config(run, tiny_llama3_hf, tmp_path):
    copy = tmp_path / "in"
    shutil.copytree(tiny_llama3_hf, copy)
    (copy / "config.json").unlink()
    said = run("convert", copy, tmp_path / "out", "--to", "dcp", "-n").stderr
    assert "config.json" not in said.splitlines()[0]


def test_refused_plan_exits_6(run, calls, monkeypatch):
    def refuse(*_):
        raise RefusedError("`b` exists", hint="say `--overwrite`")

    monkeypatch.setattr(sys.modules["ckptctl.conversion.convert"], "plan_conversion", refuse)
    result = run("convert", "a", "b", "--to", "hf")
    assert (result.exit_code, result.stdout) == (6, "")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            ["--to", "hff"],
            "unknown format `hff` where: --to why: known: dcp, hf hint: did you mean `hf`?",
        ),
        (
            ["--to", "deepspeed"],
            "`deepspeed` can only be read where: --to why: writable formats: dcp",
        ),
        (["--to", "vLLM"], "unknown format `vLLM` where: --to why: known: dcp, hf hint: did you"),
        (["--to", "FSDP2"], "did you mean `dcp`?"),
        (["--to", "lora"], "unknown format `lora` where: --to why: known: dcp, hf"),
        (["--to", "hf", "--from", "deepsped"], "did you mean `deepspeed`?"),
        (["--to", "hf", "--dtype", "bf61"], "did you mean `bf16`?"),
        (["--to", "hf", "--dtype", "int8"], "unknown floating dtype `int8` where: --dtype"),
        (["--to", "hf", "--dequantize", "fp16"], "unknown dtype `fp16` where: --dequantize"),
        (["--to", "hf", "--max-shard-size", "5XB"], "`5XB` is not a size"),
        (["--to", "hf", "--mp", "0"], "0 is not a positive number where: --mp"),
        (["--to", "hf", "--mp", "two"], "`two` is not an integer where: --mp"),
        (["--to", "hf", "--lora-alpha", "1e"], "`1e` is not a number where: --lora-alpha"),
        (["--to", "hf", "--only", "some"], "unknown value `some` where: --only why: known: model"),
        ([], "error: missing option --to (format to write: dcp"),
    ],
)
def test_invalid_convert_options_are_usage_errors(run, calls, args, said):
    result = run("convert", "a", "b", *args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in " ".join(result.stderr.split())
    assert calls.plan == []


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("onnx", ""),
        ("Torchtitan", "did you mean `dcp`? "),
    ],
)
def test_unknown_format_error_points_to_formats_command(value, said):
    with pytest.raises(UsageError, match=f"unknown format `{value}`") as caught:
        checks.check_readable_format(value)
    count = len(checks.list_readable_formats())
    assert caught.value.hint == f"{said}`ckptctl formats` lists all {count} formats"
    assert caught.value.why is None


def test_unknown_model_type_is_a_usage_error(run, tiny_llama3_hf, tmp_path):
    result = run("convert", tiny_llama3_hf, tmp_path / "out", "--to", "hf", "-m", "lama3")
    assert result.exit_code == 2 and "unknown model type `lama3`" in result.stderr


def test_format_aliases_map_to_known_formats():
    assert set(formats.map_other_names().values()) <= set(formats.list_format_names())
    assert not set(formats.map_other_names()) & set(formats.list_format_names())


def test_set_option_supplies_sizes_missing_in_config(run, tiny_llama3_hf, tmp_path):
    made = run("convert", tiny_llama3_hf, tmp_path / "m.pt", "--to", "torch", "-q")
    assert made.exit_code == 0, made.stderr
    arguments = ("convert", tmp_path / "m.pt", tmp_path / "t.pt", "--to", "torch", "-m", "llama3")
    refused = run(*arguments, "--to-layout", "torchtune")
    assert refused.exit_code == 5 and "`--set` to set single numbers" in refused.stderr
    heads = ("--set", "num_attention_heads=4", "--set", "k=2")
    assert run(*arguments, "--to-layout", "torchtune", *heads).exit_code == 0
    state = torch.load(tmp_path / "m.pt", weights_only=True)
    tuned = torch.load(tmp_path / "t.pt", weights_only=True)
    query = state["model.layers.1.self_attn.q_proj.weight"]
    rows = query.view(4, 2, query.shape[0] // 8, -1).transpose(1, 2).reshape(query.shape)
    assert torch.equal(tuned["layers.1.attn.q_proj.weight"], rows)
    arguments = ("convert", tmp_path / "m.pt", tmp_path / "v.pt", "--to", "torch", "-m", "llama3")
    strange = run(*arguments, "--to-layout", "torchtune", "--set", "heads=4")
    assert strange.exit_code == 2 and "no size named `heads`" in strange.stderr
    idle = run("convert", tmp_path / "m.pt", tmp_path / "u.pt", "--to", "torch", "--set", "x=1")
    assert idle.exit_code == 2 and "--set" in idle.stderr


def test_model_with_missing_tensor_requires_allow_missing(run, tiny_llama3_hf, tmp_path):
    part, out = tmp_path / "part", tmp_path / "out"
    gone = "model.layers.0.mlp.up_proj.weight"
    assert run("convert", tiny_llama3_hf, part, "--to", "hf", "--exclude", gone).exit_code == 0
    assert f"1 tensor of the model is missing: `{gone}`" in run("inspect", part).stderr
    assert run("verify", part).exit_code == 4
    for command in (("convert", part, out, "--to", "dcp"), ("consolidate", part, out)):
        refused = run(*command)
        assert refused.exit_code == 4 and f"`{gone}`" in refused.stderr
        assert not out.exists()
        allowed = run(*command, "--allow-missing", "--json", "--overwrite")
        assert allowed.exit_code == 7 and list(json.loads(allowed.stdout)["missing"]) == [gone]
        assert len(formats.open_checkpoint(out).tensors) == 20
        shutil.rmtree(out)
