"""The command ``report``: what it prints, where the page goes, and its exit codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file


@pytest.fixture
def source(tmp_path):
    save_file({"x": torch.arange(3.0), "y": torch.ones(2)}, tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


def test_report_prints_path_and_verdict(run, source, tmp_path):
    page = tmp_path / "out" / "page.html"
    result = run("report", source, "-o", page)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"wrote {page}: 2 tensors, complete\n"
    assert page.read_text().startswith("<!doctype html>")
    assert run("report", source, "-o", page).exit_code == 6
    assert run("report", source, "-o", page, "--overwrite", "-q").stdout == f"{page}\n"


@pytest.mark.parametrize(
    ("option", "values", "told"),
    [
        ([], torch.arange(3.0), "0 differences"),
        (["--structure"], torch.zeros(3), "the same structure; data not read"),
        (["--structure"], torch.zeros(4), "1 difference in structure; data not read"),
    ],
)
def test_report_states_if_data_was_not_compared(run, source, tmp_path, option, values, told):
    other = tmp_path / "b.safetensors"
    save_file({"x": values, "y": torch.ones(2)}, other)
    result = run("report", source, other, *option, "-o", tmp_path / "page.html")
    assert result.stdout.endswith(f": 2 tensors, complete, {told}\n")


def test_report_writes_page_to_stdout(run, source, tmp_path):
    result = run("report", source, "-o", "-")
    assert result.exit_code == 0 and result.stderr == ""
    assert result.stdout.startswith("<!doctype html>") and result.stdout.endswith("</html>\n")
    assert not (tmp_path / "-").exists()


def test_page_embeds_same_json_as_json_option(run, source, tmp_path):
    page = tmp_path / "out" / "page.html"
    result = run("report", source, "-o", page, "--json")
    text = page.read_text().partition('type="application/json">')[2].partition("</script>")[0]
    assert json.loads(text) == json.loads(result.stdout)


def test_default_page_goes_to_working_directory(run, source, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert run("report", source, "--json").exit_code == 0 and not list(Path().iterdir())
    assert run("report", source, "-o", "-", "--json").exit_code == 2
    assert run("report", source, "-q").stdout == "a.safetensors-report.html\n"
    assert run("report", source, source, "-q").stdout.startswith("a.safetensors-a.safetensors-")
    refused = run("report", source)
    assert refused.exit_code == 6 and "`--overwrite` to replace a page" in refused.stderr
    assert run("report", source, "--overwrite").exit_code == 0


@pytest.mark.parametrize("overwrite", [(), ("--overwrite",)])
def test_files_other_than_pages_are_not_replaced(run, source, tmp_path, overwrite):
    readme = tmp_path / "README.md"
    readme.write_text("mine")
    assert run("report", source, "-o", readme, *overwrite).exit_code == 6
    assert readme.read_text() == "mine"


def test_report_of_damaged_checkpoint_warns(run, data, tmp_path):
    torn, page = tmp_path / "torn", tmp_path / "page.html"
    shutil.copytree(data / "dcp" / "dcp_2d" / "ckpt", torn)
    (torn / "__3_0.distcp").unlink()
    result = run("report", torn, "-o", page)
    assert result.exit_code == 0 and "warning: damaged: " in result.stderr
    (torn / ".metadata").write_bytes(b"?")
    result = run("report", torn, "-o", page, "--overwrite")
    assert result.exit_code == 9 and "warning: unknown: " in result.stderr
    assert "malformed pickle" in page.read_text()


def test_report_of_non_checkpoint_writes_no_page(run, source, tmp_path):
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "nothing"):
        for words in ([path], [source, path]):
            assert run("report", *words, "-o", tmp_path / "page.html").exit_code == 3
    assert not (tmp_path / "page.html").exists() and not list(tmp_path.glob(".*"))


def test_report_options_change_document(run, source, tmp_path):
    other = tmp_path / "b.safetensors"
    save_file({"x": torch.zeros(3), "y": torch.ones(2)}, other)

    def document(*words):
        return json.loads(run("report", source, *words, "--json").stdout)

    plain = document()
    assert not plain["stats"] and len(plain["tensors"]) == 2 and plain["other"] is None
    assert document("--stats")["tensors"][0]["stats"]["count"] == 3
    assert document(other)["difference"]["tensors"][0]["values"]["max_abs"] == 2
    structure = document(other, "--structure")["difference"]
    assert (structure["same"], structure["evidence"]) == (None, "structure"), "no data was read"
    assert document(other, "--atol", "2")["difference"]["within"] == 1
    assert document(other, "--rtol", "2")["difference"]["tensors"]
    assert document(other, "--ignore-dtype")["difference"]["tensors"]
    assert [one["name"] for one in document("--include", "y")["tensors"]] == ["y"]
    assert document("--max-tensors", "1")["left_out"]["tensors"] == 1
    assert run("report", source, "--json", "--from", "dcp").exit_code != 0
    assert run("report", source, other, "--json", "--from-other", "dcp").exit_code != 0
    assert run("report", source, "--json", "-m", "nothing").exit_code == 2
    for option, value in (("atol", "-1"), ("weights", "some"), ("tag-other", "x"), ("rtol", "1")):
        assert run("report", source, "--json", f"--{option}", value).exit_code == 2
    note = run("report", source, "-o", tmp_path / "p.html", "--max-tensors", "1").stderr
    assert note == "note: 1 tensor is not listed on the page (see `--max-tensors`)\n"


def test_incomparable_checkpoints_fail_but_page_is_written(run, source, tmp_path):
    """The page is written, says why, and a script stops."""
    torn, page = tmp_path / "torn.safetensors", tmp_path / "page.html"
    torn.write_bytes(source.read_bytes()[:-4])
    result = run("report", source, torn, "-o", page)
    assert result.exit_code == 4 and "warning: not compared: " in result.stderr
    assert page.is_file()
    result = run("report", source, torn, "--json")
    assert result.exit_code == 4
    assert json.loads(result.stdout)["difference_error"]["code"] == "damaged"


def test_only_option_limits_comparison_to_model(run, tmp_path):
    a, b = tmp_path / "a.pt", tmp_path / "b.pt"
    for step, path in enumerate((a, b)):
        torch.save({"model": {"w": torch.ones(2)}, "step": step}, path)

    def difference(*words):
        return json.loads(run("report", a, b, *words, "--json").stdout)["difference"]

    assert not difference()["same"] and difference("--only", "model")["same"]
    assert run("report", a, "--json", "--only", "model").exit_code == 2


def test_report_errors_name_report_options(run, source, tmp_path):
    (tmp_path / "empty").mkdir()
    said = run("report", source, tmp_path / "empty", "--json").stderr
    assert "`--from-other`" in said
    said = run("report", source, source, "--json", "--tag-other", "x").stderr
    assert "`--tag-other` is not supported" in said
    assert "`--tag` is not supported" in run("report", source, "--json", "--tag", "x").stderr


def test_destination_errors_mention_report_pages(run, source, tmp_path):
    other, page = tmp_path / "make.py", tmp_path / "page.html"
    other.touch()
    result = run("report", source, "-o", other, "--overwrite")
    assert result.exit_code == 6
    assert "the destination is not a page of `ckptctl report` and" in result.stderr
    assert run("report", source, "-o", f"file://{page}").exit_code == 0
    result = run("report", source, "-o", page)
    assert "pass `--overwrite` to replace a page of `ckptctl report`" in result.stderr
    assert run("report", source, "-o", "s3://bucket/page.html").exit_code == 2


def test_report_prints_findings_and_hints_at_browser(run, reader, data, source, tmp_path):
    torn = tmp_path / "torn"
    shutil.copytree(data / "dcp" / "dcp_2d" / "ckpt", torn)
    (torn / "__3_0.distcp").unlink()
    result = run("report", torn, "-o", tmp_path / "page.html")
    assert ", damaged, " in result.stdout and "findings" in result.stdout
    assert "hint: open the page in a browser" in result.stderr
    other = tmp_path / "b.safetensors"
    save_file({"x": torch.zeros(3), "y": torch.ones(2)}, other)
    result = run("report", source, other, "-o", tmp_path / "both.html", "--stats")
    assert result.stdout.endswith(": 2 tensors, complete, 1 difference, statistics\n")
