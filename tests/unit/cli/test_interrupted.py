"""What Ctrl-C leaves of a conversion: gone on with, or thrown away only where that is said."""

from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ckptctl.cli.app import app
from ckptctl.cli.output import Printer
from ckptctl.storage.execution.execution_options import ExecutionOptions
from ckptctl.storage.publish import Staging


def stop(*_: object) -> None:
    raise KeyboardInterrupt


def interrupted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Stop a conversion of *folder*/tiny before it is published; return all that it prints."""
    often = partial(ExecutionOptions, journal_every=1)
    monkeypatch.setattr("ckptctl.storage.execution.execution_options.ExecutionOptions", often)
    with monkeypatch.context() as patch:
        patch.setattr(Staging, "publish", stop)
        patch.chdir(folder)
        result = CliRunner().invoke(app, ["convert", "tiny", "out", "--to", "dcp", "--jobs", "1"])
    assert result.exit_code == 130, result.output
    return result.output


@pytest.fixture
def left(tiny_llama3_hf, tmp_path, monkeypatch):
    """Return the staging directory of a conversion that was interrupted."""
    (tmp_path / "tiny").symlink_to(tiny_llama3_hf)
    said = interrupted(tmp_path, monkeypatch)
    assert "error: interrupted\n" in said and "KiB are written and kept\n" in said
    assert "hint: resume with `ckptctl convert tiny out --to dcp --jobs 1 --resume`" in said
    monkeypatch.chdir(tmp_path)
    return tmp_path / ".out.ckptctl-staging"


def tree(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_interrupted_convert_resumes_to_same_output(run, left):
    done = run("convert", "tiny", "out", "--to", "dcp", "--resume")
    assert done.exit_code == 0, done.stderr
    assert not left.exists() and "resumed_bytes\t0" not in done.stdout
    run("convert", "tiny", "whole", "--to", "dcp")
    assert {path.name: one for path, one in tree(Path("out")).items()} == {
        path.name: one for path, one in tree(Path("whole")).items()
    }


@pytest.mark.parametrize(
    "options",
    [
        ("--to", "dcp"),
        ("--to", "dcp", "--dtype", "fp32"),
        ("--to", "hf"),
        ("--to", "hf", "--resume"),
        ("--to", "dcp", "--no-checksum", "--resume"),
    ],
)
def test_interrupted_convert_is_discarded_only_with_restart(run, left, options):
    before = tree(left)
    refused = run("convert", "tiny", "out", *options)
    assert refused.exit_code == 6 and "KiB, last written 0." in refused.stderr
    assert "`ckptctl convert tiny out" in refused.stderr or "`--restart`" in refused.stderr
    assert tree(left) == before
    planned = run("convert", "tiny", "out", *options, "-n")
    assert ("would be refused" in planned.stderr) is ("--resume" not in options)
    assert tree(left) == before
    words = [one for one in options if one != "--resume"]
    assert run("convert", "tiny", "out", *words, "--restart").exit_code == 0
    assert not left.exists()


@pytest.mark.parametrize("answer", ["y", "n"])
def test_terminal_prompt_offers_to_discard_partial_output(run, left, answer, monkeypatch):
    monkeypatch.setattr(Printer, "can_prompt", True)
    result = CliRunner().invoke(app, ["convert", "tiny", "out", "--to", "hf"], input=f"{answer}\n")
    assert "Discard the partial output and start over? [y/N]" in result.stderr
    assert (result.exit_code, left.exists()) == ((0, False) if answer == "y" else (6, True))


def test_interrupt_before_first_write_leaves_nothing(run, tiny_llama3_hf, tmp_path, monkeypatch):
    monkeypatch.setattr("ckptctl.storage.execution.worker.Worker.execute_unit", stop)
    result = run("convert", tiny_llama3_hf, tmp_path / "out", "--to", "dcp")
    assert (result.exit_code, "kept" in result.stderr) == (130, False)
    assert not list(tmp_path.iterdir())


def test_report_does_not_discard_partial_convert(run, left):
    """What has no --restart of its own leaves the work of a conversion for the same name."""
    before = tree(left)
    refused = run("report", "tiny", "-o", "out")
    assert refused.exit_code == 6 and "`convert --restart` to discard" in refused.stderr
    assert {**tree(left), left / "lock": b""} == {**before, left / "lock": b""}
