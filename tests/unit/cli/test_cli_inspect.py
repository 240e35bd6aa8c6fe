import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

import ckptctl
from ckptctl import formats
from ckptctl.cli.inspect import MAX_SHOWN_CANDIDATES
from ckptctl.cli.listing import format_bar, format_histogram
from ckptctl.verdict import UNKNOWN_MODEL
from tests.checkpoints import save_dcp
from tests.conftest import DATA
from tests.runs import save_step, tear
from tests.sweeps import one_in

LONG = "x" * 200
EVIL = "e\x1b[31m[bold]\u202e\nv"


@pytest.fixture
def folder(fake, tmp_path):
    layers = {
        f"layers.{i}.{name}.weight": torch.full(shape, float(i))
        for i in range(3)
        for name, shape in (("wq", (8, 4)), ("norm", (4,)))
    }
    odd = {LONG: torch.ones(2, dtype=torch.int64), EVIL: torch.zeros(1, dtype=torch.bool)}
    fake.save(tmp_path / "c", {**layers, **odd}, aliases={"tied": "layers.0.wq.weight"})
    return tmp_path / "c"


def rows(result, exit_code=0):
    assert result.exit_code == exit_code, result.stderr
    assert "\x1b" not in result.output
    return [line.split("\t") for line in result.stdout.splitlines()]


def test_inspect_in_pipe_prints_facts_and_tensor_groups(run, folder):
    found = rows(run("inspect", folder))
    split = found.index([""])
    facts = dict(found[:split])
    assert facts == {
        "path": str(folder),
        "format": "fake",
        "model_type": "unknown",
        "layout": "unknown",
        "root": "",
        "parameters": "111",
        "dtypes": "f32,i64,bool",
        "bytes": "449",
        "files": "1",
        "tensors": "9",
        "verdict": "complete",
        "scope": "structure",
        "note": UNKNOWN_MODEL,
    }
    assert found[split + 1 :] == [
        ["name", "dtype", "shape", "copies", "bytes"],
        ["e\\x1b[31m[bold]\\u202e\\nv", "bool", "[1]", "1", "1"],
        ["layers.[0-2].norm.weight", "f32", "[4]", "3", "48"],
        ["layers.[0-2].wq.weight", "f32", "[8, 4]", "3", "384"],
        ["tied", "f32", "[8, 4]", "1", "0"],
        [LONG, "i64", "[2]", "1", "16"],
    ]


def test_tensors_option_filters_and_sorts_tensors(run, folder):
    found = rows(run("inspect", folder, "--tensors", "--include", "layers.*", "--include", LONG))
    assert found[0] == ["name", "dtype", "shape", "bytes"]
    assert found[1] == ["layers.0.norm.weight", "f32", "[4]", "16"]
    assert [row[0] for row in found][-1] == LONG
    assert len(found) == 8
    by_size = rows(run("inspect", folder, "--tensors", "--sort", "size", "--no-header"))
    assert [int(row[3]) for row in by_size] == sorted((int(r[3]) for r in by_size), reverse=True)


def test_depth_option_groups_tensors(run, folder):
    found = rows(run("inspect", folder, "--depth", "1", "--include", "layers*"))
    assert found[-1] == ["layers", "6 tensors", "", "1", "432"]


def test_quiet_inspect_prints_tensor_names(run, folder):
    assert run("inspect", folder, "-q", "--include", "*norm*").stdout.split() == [
        f"layers.{i}.norm.weight" for i in range(3)
    ]


def test_json_inspect_contains_all_fields(run, folder):
    result = run("inspect", folder, "--json", "--include", "*wq*")
    assert result.stderr == ""
    found = json.loads(result.stdout)
    assert (found["schema"], found["ckptctl"]) == ("ckptctl.inspect/1", ckptctl.__version__)
    assert [t["name"] for t in found["tensors"]] == [f"layers.{i}.wq.weight" for i in range(3)]
    assert found["bytes"] == 449
    assert set(found) == {
        "schema", "ckptctl", "path", "format", "model_type", "candidates", "layout", "root",
        "parameters", "bytes", "verdict", "complete", "scope", "problems", "lacks", "dtypes",
        "files", "assets", "metadata", "notes", "quantized", "dequantizable", "tensors", "blobs",
        "values", "checkpoints", "reference",
    }  # fmt: skip


def test_stats_option_adds_statistics(run, folder):
    found = rows(
        run("inspect", folder, "--tensors", "--stats", "--include", "layers.2.*", "--no-header")
    )
    assert found == [
        ["layers.2.norm.weight", "f32", "[4]", "16", *["2", "2", "2", "0", "0", "0"], "█........."],
        [
            "layers.2.wq.weight",
            "f32",
            "[8, 4]",
            "128",
            *["2", "2", "2", "0", "0", "0"],
            "█.........",
        ],
    ]
    body = json.loads(run("inspect", folder, "--stats", "--json").stdout)
    assert all(t["stats"]["nan"] == 0 for t in body["tensors"])


def test_markdown_option_prints_table(run, folder):
    text = run("inspect", folder, "--markdown").stdout
    assert "- **Format:** fake" in text
    assert "| `layers.[0-2].wq.weight` | [8, 4] | f32 | 3 | 384 B |" in text
    assert "\x1b" not in text


def test_inspect_of_damaged_checkpoint_warns(run, fake, folder):
    catalog = fake.known[folder]
    fake.known[folder] = replace(catalog, files={"data.raw": 10})
    result = run("inspect", folder)
    assert result.exit_code == 0
    assert "verdict\tdamaged" in result.stdout
    assert "warning: damaged: a data file is truncated: " in result.stderr
    assert json.loads(run("inspect", folder, "--json").stdout)["complete"] is False


def test_inspect_of_run_lists_steps_in_order(run, fake, folder):
    fake.save(folder.parent / "step-10", {"w": torch.ones(2)})
    fake.save(folder.parent / "step-9", {"w": torch.ones(2)})
    found = rows(run("inspect", folder.parent, "--no-header"))
    assert [row[0] for row in found] == ["step-9", "step-10"], "as `ls` has it"
    assert found[0][4:6] == ["fake", "complete"]
    quiet = run("inspect", folder.parent, "-q").stdout.splitlines()
    assert quiet == [str(folder.parent / row[0]) for row in found]


def test_inspect_of_folder_lists_checkpoints_without_steps(run, fake, folder):
    fake.save(folder.parent / "d", {"w": torch.ones(2)})
    found = rows(run("inspect", folder.parent, "--no-header"))
    assert [row[0] for row in found] == [str(folder.parent / n) for n in ("c", "d")]
    assert found[1][1:] == ["fake", "8", "complete"]


def test_inspect_of_run_reports_unreadable_checkpoint(run, reader, tiny_llama3_hf, tmp_path):
    for name in ("step-1", "step-2"):
        shutil.copytree(tiny_llama3_hf, tmp_path / name)
    (tmp_path / "step-2" / "model-00002-of-00003.safetensors").unlink()
    result = run("inspect", tmp_path)
    _, whole, broken = rows(result)
    assert (whole[0], *whole[4:]) == ("step-1", "hf", "complete", "newest", "")
    assert (broken[0], broken[4]) == ("step-2", "hf")
    assert broken[5].startswith(
        "damaged, being written: `model-00002-of-00003.safetensors` is missing"
    )
    assert "warning: 1 of 2 checkpoints is not complete\n" in result.stderr
    assert (
        f"hint: `ckptctl latest {tmp_path}` prints the newest complete checkpoint" in result.stderr
    )


@pytest.mark.parametrize(
    "options",
    one_in(
        3, [["--stats"], ["--tensors"], ["--include", "w"], ["--markdown"], ["--stats", "--json"]]
    ),
)
def test_single_checkpoint_options_are_refused_for_run(run, fake, folder, options):
    fake.save(folder.parent / "step-9", {"w": torch.ones(2)})
    result = run("inspect", folder.parent, *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{options[0]}` requires one checkpoint" in result.stderr


def test_terminal_caps_list_of_model_types(run, terminal, tmp_path):
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    weights = {name.format("A"): torch.ones(4, 64), name.format("B"): torch.ones(64, 4)}
    save_file(weights, tmp_path / "adapter_model.safetensors", {"format": "pt"})
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]})
    )
    count = len(json.loads(run("inspect", tmp_path, "--json").stdout)["candidates"])
    assert count > MAX_SHOWN_CANDIDATES
    shown = terminal("inspect", tmp_path, COLUMNS="500").splitlines()
    (line,) = (line for line in shown if "model type:" in line)
    assert line.count("-lora") == MAX_SHOWN_CANDIDATES
    assert f"-lora and {count - MAX_SHOWN_CANDIDATES} more (set it with `-m NAME`)" in line


def test_unknown_format_is_a_usage_error_with_suggestion(run, fake, folder):
    result = run("inspect", folder, "--from", "fak")
    assert result.exit_code == 2
    assert result.stderr == (
        "error: unknown format `fak`\n  where: --from\n  why:   known: fake\n"
        "hint: did you mean `fake`?\n"
    )


@pytest.mark.parametrize("args", [["--depth", "0"], ["--sort", "age"], ["--depth", "x"]])
def test_invalid_inspect_options_are_usage_errors(run, folder, args):
    result = run("inspect", folder, *args)
    assert (result.exit_code, result.stdout) == (2, "")


def test_wide_terminal_shows_size_bars(terminal, tiny_llama3_hf):
    wide = terminal("inspect", tiny_llama3_hf, COLUMNS="100", NO_COLOR="1")
    bars_ = {line.split()[0]: line.split()[-1] for line in wide.splitlines() if "█" in line}
    assert bars_["model.layers.[0-1]"] == "█" * 16
    assert 1 <= len(bars_["lm_head.weight"]) < 3
    for env in ({"COLUMNS": "99"}, {"COLUMNS": "100", "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}):
        shown = terminal("inspect", tiny_llama3_hf, **env)
        assert "█" not in shown and "\\u25" not in shown


def test_share_draws_fractional_bar():
    assert [format_bar(part, 32, 2) for part in (0, 1, 2, 16, 17, 31, 32)] == [
        *("", "▏", "▏", "█", "█▏", "██", "██"),
    ]


def test_bars_scale_to_largest_value():
    assert format_histogram((0, 1, 4, 8)) == ".▂▅█"
    assert format_histogram(()) == ""


def save_quantized(path, scale_shape):
    tensors = {
        "a.weight": torch.zeros(256, 128, dtype=torch.float8_e4m3fn),
        "a.weight_scale_inv": torch.ones(scale_shape),
        "b.weight": torch.zeros(4, 4),
    }
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    return path


def test_quantized_checkpoint_is_reported_with_dequantize_hint(run, reader, terminal, tmp_path):
    folder = save_quantized(tmp_path / "fp8", (2, 1))
    found = json.loads(run("inspect", folder, "--json").stdout)
    assert found["quantized"] == {"a.weight": "fp8 with 128x128 blocks"}
    assert found["dequantizable"] is True
    plain = run("inspect", folder)
    assert "quantized\tfp8 with 128x128 blocks: 1 tensor\n" in plain.stdout
    assert "--dequantize bf16" in plain.stderr
    assert "  quantized: 1 tensor, fp8 with 128x128 blocks" in terminal("inspect", folder)


def test_mismatched_scales_get_no_dequantize_hint(run, tmp_path):
    result = run("inspect", save_quantized(tmp_path / "fp8", (3, 3)), "--json")
    found = json.loads(result.stdout)
    assert (list(found["quantized"].values()), found["dequantizable"]) == (
        ["mismatched scales"],
        False,
    )
    assert "--dequantize" not in run("inspect", tmp_path / "fp8").stderr


def test_unreadable_folder_does_not_hide_others(run, tiny_llama3_hf, tmp_path, monkeypatch):
    for name in ("locked", "model"):
        (tmp_path / "a" / name).mkdir(parents=True)
    sniff = formats.sniff_formats

    def guarded(path, **options):
        if path.name == "locked":
            raise PermissionError(13, "Permission denied", str(path))
        return sniff(tiny_llama3_hf if path.name == "model" else path, **options)

    monkeypatch.setattr(formats, "sniff_formats", guarded)
    result = run("inspect", tmp_path)
    assert result.exit_code == 3
    assert "subfolders contain `a/model`" in result.stderr


def test_unrecognized_folder_error_lists_contents(run, tmp_path):
    assert "not a recognized checkpoint" in run("inspect", tmp_path).stderr
    assert "formats match; the folder is empty" in run("inspect", tmp_path).stderr
    (tmp_path / "b10").touch()
    (tmp_path / "b9").mkdir()
    assert "formats match; the folder contains `b9/`, `b10`\n" in run("inspect", tmp_path).stderr


def test_candidate_model_types_are_listed(run, tmp_path, monkeypatch):
    from ckptctl.cli import output

    save_file({"model.norm.weight": torch.zeros(4)}, tmp_path / "x.safetensors")
    possible = ckptctl.inspect(tmp_path / "x.safetensors").candidates
    assert len(possible) > 3
    facts = dict(rows(run("inspect", tmp_path / "x.safetensors"))[:4])
    assert facts["model_type"] == ",".join(possible)
    monkeypatch.setattr(output, "_is_terminal", lambda _: True)
    shown = run("inspect", tmp_path / "x.safetensors", NO_COLOR="1", COLUMNS="300").stdout
    assert f" · one of {len(possible)} model types · " in shown
    assert f"  model type: one of {', '.join(possible)} (set it with `-m NAME`)\n" in shown


def test_values_of_non_tensors_are_shown(run, tmp_path, monkeypatch):
    leaves = {"step": 500, "lr": float("nan"), "list": [1], "text": "x" * 1000, "on": True}
    path = save_dcp(tmp_path / "dcp", {"model": {"w": torch.ones(2)}, **leaves})
    found = json.loads(run("inspect", path, "--json").stdout)
    assert found["values"] == {"step": "500", "lr": "nan", "on": "True"}
    assert ["value", "step = 500"] in rows(run("inspect", path))
    monkeypatch.setattr("ckptctl.cli.output._is_terminal", lambda _: True)
    shown = run("inspect", path, NO_COLOR="1").stdout
    assert "non-tensor values: `step` = 500, `lr` = nan, `on` = True, " in shown


def test_damaged_non_tensors_have_no_value(run, tmp_path):
    path = save_dcp(tmp_path / "dcp", {"model": {"w": torch.ones(2)}, "step": 500, "lr": 0.5})
    blob = formats.open_checkpoint(path).blobs["lr"]
    data = bytearray((path / blob.file).read_bytes())
    data[blob.offset : blob.offset + blob.nbytes] = bytes(blob.nbytes)
    (path / blob.file).write_bytes(data)
    assert json.loads(run("inspect", path, "--json").stdout)["values"] == {"step": "500"}


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--weights", "module"], 0, "module.fc1.weight\tbf16"),
        (["--weights", "master"], 0, "module.fc1.weight\tf32"),
        (["--tag", "global_step2"], 0, "module.fc1.weight\tf32"),
        (["--tag", "nowhere"], 2, "unknown tag `nowhere`"),
        (["--weights", "some"], 2, "known: master, module"),
    ],
)
def test_reader_options_select_weights_and_tag(run, options, code, said):
    result = run("inspect", DATA / "deepspeed" / "z1_bf16" / "ckpt", "--tensors", *options)
    assert result.exit_code == code, result.output
    assert said in result.output


def test_run_hint_is_valid_for_path_with_leading_dash(run, reader, fake, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fake.save(tmp_path / "-dash" / "step-1", {"w": torch.ones(2)})
    fake.save(tmp_path / "-dash" / "step-2", {"w": torch.ones(2)})
    said = run("inspect", "--", "-dash").stderr
    assert "`ckptctl latest -- -dash`" in said


def test_latest_is_hinted_only_if_it_succeeds(run, reader, tmp_path):
    """`latest` names none where none is complete, or a newer one is neither complete nor torn."""
    tear(save_step(tmp_path / "run" / "step-1"))
    assert "ckptctl latest" not in run("inspect", tmp_path / "run").stderr
    assert run("latest", tmp_path / "run").exit_code == 3
    save_step(tmp_path / "run" / "step-2")
    assert "ckptctl latest" in run("inspect", tmp_path / "run").stderr


def test_folder_without_run_is_refused_by_verify_only(run, tmp_path):
    for name in ("a", "b"):
        save_step(tmp_path / name)
    refused = run("verify", tmp_path).stderr
    assert f"hint: pass one of them; `ckptctl inspect {tmp_path}` shows" in refused
    assert run("inspect", tmp_path).exit_code == 0


def test_fit_prints_limits_of_requests(run, tmp_path):
    """Where every layer has a window, the length of a request is not limited."""
    shutil.copytree(DATA / "tiny-llama3-hf", tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    full = run("inspect", tmp_path / "m", "--fit", "1MB", "--context", "1k", "--format", "table")
    assert "fits, with 2 requests of 1,024 tokens, or one of 2,911" in full.stdout
    long = run("inspect", tmp_path / "m", "--fit", "1MB", "--context", "4k", "--format", "table")
    assert "no room for a request of 4,096 tokens, but for one of 2,911" in long.stdout
    config["layer_types"], config["sliding_window"] = ["sliding_attention"] * 2, 8
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    windows = dict(
        row for row in rows(run("inspect", tmp_path / "m", "--fit", "1MB")) if len(row) == 2
    )
    assert windows["max_context"] == "unlimited"
    (tmp_path / "m" / "config.json").unlink()
    unknown = dict(
        row for row in rows(run("inspect", tmp_path / "m", "--fit", "1MB"), 9) if len(row) == 2
    )
    assert unknown["max_context"] == "unknown"


@pytest.mark.parametrize("form", [(), ("--json",), ("--quiet",)])
def test_exit_code_of_fit_states_whether_model_fits(run, tmp_path, form):
    shutil.copytree(DATA / "tiny-llama3-hf", tmp_path / "m")
    line = ("inspect", tmp_path / "m", *form, "--fit")
    assert run(*line, "1MB", "--context", "1k").exit_code == 0
    assert run(*line, "1MB", "--context", "4k").exit_code == 1
    (tmp_path / "m" / "config.json").unlink()
    assert run(*line, "1MB", "--context", "1k").exit_code == 9
    assert run("inspect", tmp_path / "m", *form).exit_code == 0
    torch.save({"step": 1}, tmp_path / "empty.pt")
    assert run("inspect", tmp_path / "empty.pt", *form, "--fit", "1MB").exit_code == 9
