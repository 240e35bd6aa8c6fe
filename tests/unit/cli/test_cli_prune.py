"""The commands ``prune``, ``ls`` and ``latest``: what they print, when they ask, how they end."""

from __future__ import annotations

import json
import os
import pty
import select
import shlex
import subprocess
import time
from pathlib import Path

import pytest

from ckptctl.cli.typed_paths import format_command_line, remember_command_line
from tests.contract.test_docs import documented_fields, fields_of
from tests.program import start_program
from tests.runs import START, age, save_step, tear
from tests.unit.cli.conftest import environment, program
from tests.unit.runs.test_prune import snapshot


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (9, 10, 100):
        save_step(tmp_path / "run" / f"step-{step}")
    tear(save_step(tmp_path / "run" / "step-200"))
    (tmp_path / "run" / "latest").write_text("step-9")
    return tmp_path / "run"


def names(root: Path) -> list[str]:
    return sorted(item.name for item in root.iterdir() if item.name.startswith("step"))


def test_dry_run_in_pipe_lists_decisions_and_changes_nothing(run, reader, root):
    before = snapshot(root)
    result = run("prune", root, "--keep-last", 1, "--dry-run", "--no-header")
    assert result.exit_code == 0, result.stderr
    rows = [line.split("\t") for line in result.stdout.splitlines()]
    assert [row[:2] for row in rows[:4]] == [
        ["keep", "step-9"],
        ["remove", "step-10"],
        ["keep", "step-100"],
        ["skip", "step-200"],
    ]
    assert rows[0][3] == "named by `latest`"
    assert rows[5:] == [["would_remove", "1"], ["bytes", rows[1][2]]]
    assert snapshot(root) == before
    assert f"`ckptctl prune {root} --keep-last 1 --no-header`" in result.stderr


@pytest.mark.parametrize("flags", [["-n"], ["-ny"], ["-yn"], ["--dry-run", "-y"]])
def test_dry_run_hint_is_command_without_dry_run(flags):
    """The plan alone is not asked for again."""
    more = [] if flags == ["-n"] else ["-y"]
    remember_command_line(["prune", "a b", *flags, "--keep", "x-n"])
    said = shlex.join(["ckptctl", "prune", "a b", *more, "--keep", "x-n", "--json"])
    assert format_command_line("--json") == said


def test_prune_without_terminal_requires_yes(run, root):
    before = snapshot(root)
    result = run("prune", root, "--keep-last", 1)
    assert result.exit_code == 6
    assert "remove\tstep-10" in result.stdout
    assert f"`ckptctl prune {root} --keep-last 1 --yes`" in result.stderr
    assert snapshot(root) == before


def test_prune_with_yes_removes_unkept_checkpoints(run, root):
    result = run("prune", root, "--keep-last", 1, "--yes")
    assert result.exit_code == 0, result.stderr
    assert names(root) == ["step-100", "step-200", "step-9"]
    assert "removed\t1" in result.stdout
    again = run("prune", root, "--keep-last", 1)
    assert again.exit_code == 0, "where nothing is to be done nobody has to be asked"


def test_quiet_prune_prints_removed_paths(run, root):
    result = run("prune", root, "--keep-last", 1, "-q", "-n")
    assert (result.stdout, result.stderr) == (f"{root / 'step-10'}\n", "")
    result = run("prune", root, "--keep-last", 1, "-q", "-y")
    assert (result.stdout, result.stderr) == (f"{root / 'step-10'}\n", "")


def test_prune_json_is_documented_and_requires_yes(run, root):
    asked = run("prune", root, "--keep-last", 1, "--json")
    assert asked.exit_code == 6
    assert json.loads(asked.stderr)["error"]["code"] == "refused"
    plan = json.loads(asked.stdout)
    done = json.loads(run("prune", root, "--keep-last", 1, "--json", "--yes").stdout)
    assert (plan["dry_run"], done["dry_run"]) == (True, False)
    assert [one["action"] for one in plan["decisions"]] == ["keep", "remove", "keep", "skip"]
    assert [one["keep"] for one in plan["decisions"]] == [True, False, True, True]
    assert (done["done"], done["freed"]) == (["step-10"], plan["bytes"])
    known = documented_fields("json.md", "ckptctl.prune/1")
    found = {*fields_of(plan), *fields_of(done)}
    assert found - known == set()
    assert {name for name in known - found if "metrics" not in name and "failed" not in name} <= {
        "leftovers[]",
        "others[]",
    }


def test_prune_with_nothing_to_remove_succeeds(run, root):
    before = snapshot(root)
    for more in ((), ("--yes",)):
        result = run("prune", root, "--keep-last", 9, *more)
        assert (result.exit_code, result.stderr) == (0, "")
        assert result.stdout.splitlines()[-2:] == ["removed\t0", "freed\t0"]
        found = json.loads(run("prune", root, "--keep-last", 9, "--json", *more).stdout)
        assert (found["dry_run"], found["done"], found["freed"]) == (False, [], 0)
        assert run("prune", root, "--keep-last", 9, "-q", *more).stdout == ""
    assert snapshot(root) == before
    assert json.loads(run("prune", root, "--keep-last", 9, "--json", "-n").stdout)["dry_run"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ((), 6),
        (("--keep-last", 0), 6),
        (("--keep-every", 0), 6),
        (("--keep-within", "0d"), 6),
        (("--keep-last", "x"), 2),
        (("--keep-within", "soon"), 2),
        (("--keep-best", "bleu"), 2),
        (("--keep-best", "bleu:max"), 2),
        (("--keep", "stpe-*"), 6),
        (("--thin", "weights", "--keep-last", 1), 2),
        (("--min-age", "7", "--keep-last", 1), 2),
        (("--min-age", "7", "--keep-last", 1, "--include-incomplete"), 2),
        (("--min-age", "7d", "--keep-last", 1), 2),
    ],
)
def test_invalid_prune_arguments_are_refused(run, root, arguments, code):
    result = run("prune", root, *arguments, "--yes")
    assert result.exit_code == code, result.stderr
    assert "Traceback" not in result.stderr
    assert len(names(root)) == 4


def test_partial_removal_failure_exits_7(run, root, monkeypatch):
    from ckptctl.errors import StorageError
    from ckptctl.storage import trash

    real = trash.delete_permanently

    def refuse(path: Path) -> None:
        if path.name == "step-9" and path.exists():
            raise StorageError("cannot remove: Operation not permitted (EPERM)", where=str(path))
        real(path)

    (root / "latest").unlink()
    monkeypatch.setattr(trash, "delete_permanently", refuse)
    result = run("prune", root, "--keep-last", 1, "--yes")
    assert result.exit_code == 7
    assert "EPERM" in result.stderr
    assert ".ckptctl-trash" in result.stderr


def test_headline_shows_durations_as_typed(terminal, root):
    shown = terminal("prune", root, "--keep-within", "90s", "--keep-interval", "12h", "-n")
    assert "within 90s; one every 12h" in shown


@pytest.mark.parametrize(("answer", "code", "left"), [("y\n", 0, 3), ("n\n", 6, 4), ("\n", 6, 4)])
def test_answer_at_terminal_prompt_decides_removal(root, answer, code, left):
    shown, found = ask(answer, "prune", root, "--keep-last", 1)
    assert "Remove 1 of 4 checkpoints (" in shown
    assert "KEEP    step-9" in shown
    assert (found, len(names(root))) == (code, left)


def ask(answer: str, *arguments: object) -> tuple[str, int]:
    """Run the program on a terminal and type *answer* when it asks."""
    master, slave = pty.openpty()
    wait = start_program(arguments, [slave] * 3)
    os.close(slave)
    shown, asked = b"", False
    try:
        while select.select([master], [], [], 30)[0]:
            shown += os.read(master, 65536)
            if b"[y/N]" in shown and not asked:
                asked = bool(os.write(master, answer.encode()))
    except OSError:  # Linux says EIO once the other side is closed
        pass
    os.close(master)
    return shown.decode(), wait()


def test_ls_in_pipe_lists_steps_and_verdicts(run, root):
    rows = [line.split("\t") for line in run("ls", root, "--no-header").stdout.splitlines()]
    assert [row[0] for row in rows] == ["step-9", "step-10", "step-100", "step-200"]
    assert rows[0][1:3] == ["9", time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(START + 540))]
    assert rows[0][4:] == ["hf", "complete", "`latest`", ""]
    assert rows[3][5].startswith("damaged: ")
    assert run("ls", root, "-q").stdout.splitlines() == [str(root / row[0]) for row in rows]


def test_ls_on_terminal_lists_steps_and_ignored_entries(terminal, root):
    shown = terminal("ls", root, COLUMNS="120", NO_COLOR="1").splitlines()
    assert shown[0].split() == [
        "name",
        "step",
        "time",
        "size",
        "format",
        "verdict",
        "protected",
        "by",
    ]
    assert len(shown) == 5, "a pointer is none of the names that are not recognized"
    assert shown[3].rstrip().endswith("complete, newest")
    (root / "step-9.bak").mkdir()
    (root / "notes").mkdir()
    last = terminal("ls", root, NO_COLOR="1").splitlines()[-1]
    assert last == "ignored 2 other entries: `notes`, `step-9.bak`"


def test_ls_shows_metrics(run, terminal, root):
    for step, loss in ((9, 2.3125), (10, 0.5)):
        record = json.dumps({"metrics": {"loss": loss, "reward": step}})
        (root / f"step-{step}" / "ckptctl.run.json").write_text(record)
    rows = [line.split("\t") for line in run("ls", root).stdout.splitlines()]
    assert [row[7] for row in rows] == [
        "metrics",
        "loss 2.3125, reward 9.0",
        "loss 0.5, reward 10.0",
        "",
        "",
    ]
    assert "loss 2.3125, reward 9" in terminal("ls", root, COLUMNS="120", NO_COLOR="1")


def test_prune_hints_at_damaged_checkpoints_only_if_removable(terminal, root):
    arguments = ("prune", root, "--keep-last", "1", "-n")
    assert "pass `--include-incomplete` to remove it" in terminal(*arguments)
    assert "--include-incomplete" not in terminal(*arguments, "--keep", "step-200")


def test_ls_omits_empty_metrics_column(terminal, root):
    assert "metrics" not in terminal("ls", root, COLUMNS="120", NO_COLOR="1")


def test_ls_drops_sparse_column_before_truncating_verdict(terminal, root):
    head, *lines = terminal("ls", root, COLUMNS="80", NO_COLOR="1").splitlines()
    assert "protected by" not in head and "time" in head
    assert "damaged: the safetensors file" in lines[-1]


def test_latest_prints_answer_before_notes(terminal, root):
    answer, note = terminal("latest", root, NO_COLOR="1").splitlines()
    assert answer == str(root / "step-100") and note.startswith("note: skipped step-200")


def test_latest_prints_answer_before_notes_on_one_pipe(root):
    shown = subprocess.run(
        program("latest", root), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ).stdout.decode()
    assert shown.splitlines()[0] == str(root / "step-100")


def test_prune_mentions_include_incomplete_for_damaged_checkpoints(run, reader, root):
    asked = ("prune", root, "--keep-last", 9, "-n")
    assert "skipped 1 damaged checkpoint; pass `--include-incomplete`" in run(*asked).stderr
    assert (
        "--include-incomplete" not in run(*asked, "--include-incomplete").stderr.split("run it")[0]
    )


def test_ls_shows_symbolic_link_targets(run, root):
    save_step(root.parent / "other" / "step-300")
    (root / "step-300").symlink_to("../other/step-300")
    rows = [line.split("\t") for line in run("ls", root, "--no-header").stdout.splitlines()]
    assert rows[4][5:] == ["complete", "a symbolic link to `../other/step-300`", ""]
    found = json.loads(run("ls", root, "--json").stdout)["checkpoints"]
    assert [one["link"] for one in found] == [None] * 4 + ["../other/step-300"]
    assert [one["newest"] for one in found] == [False, False, True, False, False]


@pytest.mark.parametrize("command", ["ls", "latest"])
def test_last_checkpoint_without_step_is_noted(run, root, command):
    (root / "last.ckpt").write_bytes(b"torn")
    result = run(command, root)
    assert "note: skipped `last.ckpt`: it does not record the step" in result.stderr
    assert run(command, root, "-q").stderr == ""


def test_latest_notes_checkpoints_of_other_series(run, root):
    save_step(root / "epoch_2", START)
    result = run("latest", root)
    assert result.stdout == f"{root / 'step-100'}\n"
    assert "note: skipped epoch_2 of another series: it was written 2025-" in result.stderr


def test_thin_reports_thinned_and_freed_bytes(run, tmp_path):
    for step in (1, 2):
        (save_step(tmp_path / f"checkpoint-{step}") / "optimizer.pt").write_bytes(b"m" * 5000)
    for step in (1, 2):
        age(tmp_path / f"checkpoint-{step}", START + step)
    asked = ("prune", tmp_path, "--keep-last", 1, "--thin", "optimizer")
    assert run(*asked, "-n").stdout.splitlines()[-3:] == [
        "would_remove\t1",
        "would_thin\t1",
        "bytes\t5000",
    ]
    assert json.loads(run(*asked, "-n", "--json").stdout)["thinned"] == 1
    assert run(*asked, "-y").stdout.splitlines()[-3:] == ["removed\t1", "thinned\t1", "freed\t5000"]


def test_min_age_explains_why_incomplete_checkpoint_stays(run, root):
    age(root / "step-200", time.time() - 2 * 86400 - 60)
    asked = ("prune", root, "--keep-last", 9, "--include-incomplete", "-n")
    result = run(*asked, "--min-age", "30d")
    assert "changed 2 d ago, which is within `--min-age 30d`" in result.stdout
    assert "remove\tstep-200" in run(*asked, "--min-age", "0").stdout
    assert "remove\tstep-200" in run(*asked).stdout
    assert "within `--min-age" not in run("prune", root, "--keep-last", 9, "-n").stdout


def test_ls_json_fields_are_documented(run, root):
    found = json.loads(run("ls", root, "--json").stdout)
    (root / "step-9" / "ckptctl.run.json").write_text('{"metrics": {"loss": 0.5}}')
    (root / "notes").mkdir()
    more = json.loads(run("ls", root, "--json").stdout)
    assert more["checkpoints"][0]["metrics"] == {"loss": 0.5}
    known = documented_fields("json.md", "ckptctl.ls/1")
    assert {n.replace("metrics.loss", "metrics.*") for n in fields_of(more)} <= known
    assert {n for n in known if "[]" not in n} <= set(fields_of(found))


def test_latest_skips_damaged_checkpoint(run, root):
    result = run("latest", root)
    assert (result.exit_code, result.stdout) == (0, f"{root / 'step-100'}\n")
    assert "skipped step-200" in result.stderr
    assert run("latest", root, "-q").stderr == ""
    found = json.loads(run("latest", root, "--json").stdout)
    assert (found["step"], [one["step"] for one in found["skipped"]]) == (100, [200])
    assert set(fields_of(found)) <= documented_fields("json.md", "ckptctl.latest/1")


@pytest.mark.parametrize("command", ["ls", "latest", "prune"])
def test_folder_without_run_exits_3(run, tmp_path, command):
    more = ("--keep-last", 1) if command == "prune" else ()
    assert run(command, tmp_path / "nowhere", *more).exit_code == 3
    result = run(command, tmp_path, *more)
    assert result.exit_code == 3
    assert "step-N" in result.stderr


@pytest.mark.parametrize("command", [("ls",), ("latest",), ("prune", "--keep-last", "1", "-n")])
def test_run_commands_do_not_import_torch(root, command):
    script = (
        "import sys; from ckptctl.cli.app import app\n"
        f"try: app({[command[0], str(root), *command[1:]]!r}, prog_name='ckptctl')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([program()[0], "-c", script], env=environment(), check=True, stdout=-3)
