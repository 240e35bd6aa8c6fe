"""The command ``verify``: what it prints, and its exit codes."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace

import pytest
import torch

import ckptctl
from ckptctl.catalog import Box
from ckptctl.verdict import UNKNOWN_MODEL
from tests.checkpoints import save_dcp
from tests.contract.test_docs import documented_fields, fields_of


@pytest.fixture
def folder(fake, tmp_path):
    state = {f"w{i}": torch.full((4, 2), float(i)) for i in range(15)}
    fake.save(tmp_path / "c", state, aliases={"tied": "w0"})
    return tmp_path / "c"


def hollow(fake, folder):
    """Take the second half of every tensor away."""
    catalog = fake.known[folder]
    tensors = {
        name: replace(
            entry,
            extents=tuple(
                replace(e, box=Box((0, 0), (2, 2)), nbytes=e.nbytes // 2) for e in entry.extents
            ),
        )
        for name, entry in catalog.tensors.items()
    }
    fake.known[folder] = replace(catalog, tensors=tensors)


def test_verify_of_complete_checkpoint_prints_facts(run, folder):
    result = run("verify", folder)
    assert result.exit_code == 0, result.stderr
    facts = dict(line.split("\t") for line in result.stdout.splitlines())
    assert float(facts.pop("seconds")) >= 0
    assert facts == {
        "path": str(folder),
        "format": "fake",
        "level": "headers",
        "verdict": "complete",
        "scope": "structure",
        "data": "not read",
        "tensors": "16",
        "files": "1",
        "bytes": "480",
        "errors": "0",
        "unknown": "0",
        "warnings": "0",
        "note": UNKNOWN_MODEL,
    }
    assert run("verify", folder, "-q").stdout == ""


def test_verify_in_pipe_lists_every_finding(run, fake, folder):
    hollow(fake, folder)
    result = run("verify", folder, "--level", "fast")
    assert result.exit_code == 4
    lines = result.stdout.splitlines()
    rows = [line.split("\t") for line in lines if line.startswith("error\telements")]
    assert len(rows) == 16
    why = "no chunk covers this part of the tensor, which has shape [4, 2]"
    assert rows[0] == ["error", "elements are missing", "`w0` [2:4, 0:2]", why]
    assert "\x1b" not in result.output
    quiet = run("verify", folder, "-q")
    assert quiet.exit_code == 4
    assert quiet.stdout.splitlines()[0] == "`w0` [2:4, 0:2]: elements are missing"


def test_verify_on_terminal_caps_findings_at_ten(run, fake, folder, monkeypatch):
    monkeypatch.setattr("ckptctl.cli.output._is_terminal", lambda _: True)
    hollow(fake, folder)
    result = run("verify", folder, NO_COLOR="1")
    assert result.exit_code == 4
    assert "damaged: 16 errors" in result.stdout.partition("error: ")[0]
    assert result.stdout.count("error: ") == 10
    assert "and 6 more (`--json` lists all)" in result.stdout


def test_findings_of_missing_file_are_grouped(run, tmp_path, monkeypatch):
    monkeypatch.setattr("ckptctl.cli.output._is_terminal", lambda _: True)
    state = {"w": torch.ones(3), **{f"v{i}": f"text {i}" for i in range(9)}}
    (save_dcp(tmp_path / "c", state) / "__0_0.distcp").unlink()
    result = run("verify", tmp_path / "c", NO_COLOR="1")
    assert "damaged: 11 errors" in result.stdout.partition("error: ")[0]
    assert result.stdout.count("error: ") == 3
    said = "error: a value is missing (9 times)\n    where: `v0` and 8 more, __0_0.distcp\n"
    assert said in result.stdout


def test_inspect_groups_findings_as_verify_does(run, tmp_path, monkeypatch):
    monkeypatch.setattr("ckptctl.cli.output._is_terminal", lambda _: True)
    monkeypatch.setattr("ckptctl.cli.output._count_columns", lambda: 200)
    state = {f"w{i}": torch.ones(3) for i in range(9)}
    (save_dcp(tmp_path / "c", state) / "__0_0.distcp").unlink()
    verified = run("verify", tmp_path / "c", NO_COLOR="1").stdout
    inspected = run("inspect", tmp_path / "c", NO_COLOR="1").stdout
    assert "elements are missing (9 times)" in verified
    assert inspected.count("elements are missing") == 1
    (line,) = (line for line in inspected.splitlines() if "elements are missing" in line)
    assert "elements are missing (9 times): `w0`" in line and "and 8 more" in line
    assert line.count("__0_0.distcp") == 1
    found = json.loads(run("inspect", tmp_path / "c", "--json").stdout)
    assert sum("elements are missing" in one for one in found["problems"]) == 9


def test_verify_on_terminal_prints_duration(run, folder, monkeypatch):
    monkeypatch.setattr("ckptctl.cli.output._is_terminal", lambda _: True)
    assert re.search(
        r"^  checked in \d+\.\d\d s$", run("verify", folder, NO_COLOR="1").stdout, re.M
    )


def test_checkpoint_without_metadata_is_summarized_as_damaged(run, tmp_path, monkeypatch):
    monkeypatch.setattr("ckptctl.cli.output._is_terminal", lambda _: True)
    (save_dcp(tmp_path / "c", {"w": torch.ones(3)}) / ".metadata").unlink()
    result = run("verify", tmp_path / "c", "--level", "full", NO_COLOR="1")
    assert result.exit_code == 4
    assert (
        "  0 tensors · 0 files, 0 B · level full · damaged: 1 error · data not read\n"
        in result.stdout
    )


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_verify_and_inspect_report_missing_metadata(run, tmp_path, command):
    (save_dcp(tmp_path / "c", {"w": torch.ones(3)}) / ".metadata").unlink()
    result = run(command, tmp_path / "c")
    assert result.exit_code == 4
    assert "`.metadata` is missing" in result.stdout + result.stderr


def test_damage_is_red_for_truncated_and_missing_files(run, tmp_path, tiny_llama3_hf, monkeypatch):
    """`verify` and `inspect` mean the same, and so does the page of a report."""
    monkeypatch.setattr("ckptctl.cli.output._is_terminal", lambda _: True)
    source = tmp_path / "model"
    shutil.copytree(tiny_llama3_hf, source)
    shard = next(source.glob("model-00003-*"))
    for state in ("damaged", "missing"):
        os.truncate(shard, 30_000) if state == "damaged" else shard.unlink()
        for name in ("verify", "inspect"):
            shown = run(name, source, "--color=always").stdout
            assert set(re.findall(r"\x1b\[(3[123])m", shown)) == {"31"}, shown
        assert "damaged\x1b" in shown
        report = ckptctl.report(source)
        assert report.verification.verdict == "damaged"
        assert {file.path: file.state for file in report.files}[shard.name] == state


def test_verify_json_fields_are_documented(run, fake, folder):
    hollow(fake, folder)
    for options in ((), ("--level", "full", "--nan")):
        result = run("verify", folder, "--json", *options)
        assert (result.exit_code, result.stderr) == (4, "")
        found = json.loads(result.stdout)
        assert found["schema"] == "ckptctl.verify/1"
        assert (found["verdict"], found["complete"]) == ("damaged", False)
        assert set(fields_of(found)) == documented_fields("json.md", "ckptctl.verify/1")
        first = found["findings"][0]
        assert first["box"] == {"offsets": [2, 0], "sizes": [2, 2]}
        assert (found["verified_bytes"] is None) == (not options)
        assert found["files"][0]["verified"] == (0 if options else None)


def test_verify_usage_errors_set_exit_codes(run, folder, tmp_path):
    assert run("verify", folder, "--level", "deep").exit_code == 2
    assert run("verify", folder, "--manifest").exit_code == 2
    assert run("verify", tmp_path / "nothing").exit_code == 3


def test_unreadable_index_is_a_finding(run, fake, folder):
    del fake.known[folder]
    result = run("verify", folder)
    assert result.exit_code == 4
    assert "the index is unreadable" in result.stdout


def test_truncated_file_fails_only_if_data_is_read(run, folder):
    (folder / "data.raw").write_bytes(b"x")
    assert run("verify", folder, "--level", "fast").exit_code == 0  # its catalog was made before
    assert run("verify", folder, "--nan").exit_code == 4
