"""What the shells offer, through the scripts that the program itself prints."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptctl import formats
from ckptctl.cli import completion
from tests.sweeps import one_in
from tests.unit.cli.conftest import REPOSITORY, environment

NAMES = (
    "model.layers.0.q",
    "model.layers.0.k",
    "opt:state:exp_avg.w",
    "opt:state:exp_avg_sq.w",
    "a/b/c.weight",
    "x=1.w",
)
BASH = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 ))
_ckptctl_completion ckptctl
printf '%s\\n' "${COMPREPLY[@]}"
"""


def write(path: Path, names: tuple[str, ...]) -> Path:
    entries = {
        name: {"dtype": "U8", "shape": [1], "data_offsets": [n, n + 1]}
        for n, name in enumerate(names)
    }
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(len(names)))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a checkpoint, the program and its scripts."""
    folder = tmp_path_factory.mktemp("completion")
    write(folder / "odd.safetensors", NAMES)
    program = folder / "ckptctl"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ckptctl "$@"\n')
    program.chmod(0o755)
    for shell in ("bash", "zsh", "fish"):
        env = environment(_CKPTCTL_COMPLETE=f"source_{shell}")
        done = subprocess.run([program], env=env, capture_output=True, text=True, timeout=60)
        (folder / f"script.{shell}").write_text(done.stdout)
    return folder


def shell_environment(folder: Path) -> dict[str, str]:
    env = environment()
    return {**env, "PATH": f"{folder}:{env['PATH']}", "PYTHONPATH": str(REPOSITORY)}


@pytest.mark.parametrize(
    ("words", "offered"),
    one_in(
        3,
        [
            # bash takes words apart at colons and equals signs, and replaces the last part alone.
            ("extract odd.safetensors opt : state : exp_", ["exp_avg.w", "exp_avg_sq.w"]),
            ("extract odd.safetensors a/b/", ["a/b/c.weight"]),
            ("inspect odd.safetensors --from = dc", ["dcp", "dcp-rank-local"]),
        ],
    ),
)
def test_bash_completion_offers_names(folder: Path, words: str, offered: list[str]) -> None:
    done = subprocess.run(
        ["bash", "-c", BASH, "bash", "script.bash", "ckptctl", *words.split()],
        cwd=folder,
        env=shell_environment(folder),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout.split(), done.stderr) == (offered, "")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["delta", ""], ["make", "apply", "verify", "squash"]),
        (["delta", "m"], ["make"]),
        (["delta", "make", "--comp"], ["--compression"]),
    ],
)
def test_bash_completion_offers_second_words_of_commands(
    folder: Path, words: list[str], offered: list[str]
) -> None:
    done = subprocess.run(
        ["bash", "-c", BASH, "bash", "script.bash", "ckptctl", *words],
        cwd=folder,
        env=shell_environment(folder),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout.split(), done.stderr) == (offered, "")


def test_fish_completion_offers_tensor_names(folder: Path) -> None:
    if not shutil.which("fish"):
        pytest.skip("there is no fish")
    line = "ckptctl extract odd.safetensors opt:state:exp"
    done = subprocess.run(
        ["fish", "-c", f"source script.fish; complete -C '{line}'"],
        cwd=folder,
        env=shell_environment(folder),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout.split(), done.stderr) == ([*NAMES[2:4]], "")


def test_zsh_completion_offers_tensor_names(folder: Path) -> None:
    if not shutil.which("zsh"):
        pytest.skip("there is no zsh")
    code = (
        "autoload -Uz compinit; compinit -u -D; source script.zsh; "
        "_arguments() { print -r -- $@ }; "
        "words=(ckptctl extract odd.safetensors opt:); CURRENT=4; _ckptctl_completion"
    )
    done = subprocess.run(
        ["zsh", "-f", "-c", code],
        cwd=folder,
        env=shell_environment(folder),
        capture_output=True,
        text=True,
        timeout=60,
    )
    # zsh takes a colon that is not escaped for the one between a word and its description.
    words = " ".join(f'"{name}"' for name in NAMES[2:4]).replace(":", r"\\:")
    assert (done.stdout, done.stderr) == (f"*: :(({words}))\n", "")


def test_powershell_completion_offers_names(
    run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    script = run(_CKPTCTL_COMPLETE="source_powershell").stdout
    assert "Register-ArgumentCompleter -Native -CommandName ckptctl" in script
    for line, offered in (
        ("ckptctl conv", ["convert"]),
        ("ckptctl convert a b --to dc", ["dcp"]),
        ("ckptctl extract odd.safetensors opt:state:exp", [*NAMES[2:4]]),
    ):
        env = {
            "_CKPTCTL_COMPLETE": "complete_powershell",
            "_TYPER_COMPLETE_ARGS": line,
            "_TYPER_COMPLETE_WORD_TO_COMPLETE": line.split()[-1],
        }
        lines = run(**env).stdout.splitlines()
        assert [text.partition(":::")[0] for text in lines] == offered


def test_powershell_accepts_completion_script(run, tmp_path: Path) -> None:
    if not shutil.which("pwsh"):
        pytest.skip("there is no PowerShell")
    script = tmp_path / "script.ps1"
    script.write_text(run(_CKPTCTL_COMPLETE="source_powershell").stdout)
    parse = f"[scriptblock]::Create((Get-Content -Raw '{script}')) | Out-Null"
    subprocess.run(["pwsh", "-NoProfile", "-Command", parse], check=True, timeout=60)


def test_install_completion_registers_with_bash(folder: Path, tmp_path: Path) -> None:
    """What the option installs is what a new shell reads, and the shell takes it for a script."""
    env = {**shell_environment(folder), "HOME": str(tmp_path)}
    code = "ckptctl --install-completion; bash -n ~/.bashrc && . ~/.bashrc && complete -p ckptctl"
    done = subprocess.run(
        ["bash", "-c", code], env=env, cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert "_ckptctl_completion ckptctl" in done.stdout.splitlines()[-1], done.stderr


Ask = Callable[..., list[str]]


@pytest.fixture
def ask(run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    monkeypatch.chdir(folder)

    def call(*words: str) -> list[str]:
        env = {"_CKPTCTL_COMPLETE": "complete_bash", "COMP_CWORD": str(len(words))}
        result = run(COMP_WORDS="\n".join(("ckptctl", *words)), **env)
        assert result.stderr == ""
        offered: list[str] = result.stdout.splitlines()
        return offered

    return call


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("extract", "odd.safetensors", "model.layers.0."), [*NAMES[:2]]),
        (("extract", "odd.safetensors", "opt", ":"), ["state:exp_avg.w", "state:exp_avg_sq.w"]),
        (("extract", "odd.safetensors", "x", "=", "1"), ["1.w"]),
        (("extract", "odd.safetensors", "'opt:state:exp_avg_"), ["opt:state:exp_avg_sq.w"]),
        (("inspect", "odd.safetensors", "--include", "model."), [*NAMES[:2]]),
        (("convert", "odd.safetensors", "out", "--exclude", "a/"), ["a/b/c.weight"]),
        (("diff", "odd.safetensors", "b", "--include", "a/"), ["a/b/c.weight"]),
        (("extract", "odd.safetensors", "--layout", "hf", "model."), []),
        (("extract", "nothing", "model."), []),
        (("extract", "script.bash", "model."), []),
        (("extract", "hf://org/name", "model."), []),
        (("inspect", "x", "--model-type", "llama3_2"), ["llama3_2"]),
        (("map", "x", "-m", "llama3", "--to-layout", "torchtitan@0.3"), ["torchtitan@0.3"]),
        (("convert", "a", "b", "--to", "dc"), ["dcp"]),
        (("models", "llama3_2"), ["llama3_2"]),
        (("convert", "a", "b", "--only", ""), ["model", "all"]),
        (("diff", "a", "b", "--only", "m"), ["model"]),
        (("report", "a", "b", "--only", "m"), ["model"]),
        (("diff", "a", "b", "--weights-a", "ma"), ["master"]),
        (("diff", "a", "b", "--weights-b", "mo"), ["module"]),
        (("report", "a", "b", "--weights-other", "mo"), ["module"]),
        (("inspect", "a", "--weights", "mo"), ["module"]),
        (("inspect", "a", "--sort", "s"), ["size"]),
        (("consolidate", "a", "b", "--tied", "d"), ["drop"]),
        (("diff", "a", "b", "--format-b", "deepspeed-"), ["deepspeed-universal"]),
        (("diff", "a", "b", "-m", "llama3", "--layout-a", "torchtu"), ["torchtune"]),
        (("diff", "a", "b", "-m", "llama3", "--layout-b", "torchtu"), ["torchtune"]),
        (("formats", "deepspeed-"), ["deepspeed-universal"]),
        (("schema", "ins"), ["inspect"]),
        (("ver",), ["verify"]),
        (("conv",), ["convert"]),
        (("no-such-command", "x"), []),
    ],
)
def test_completion_offers_matching_values(
    ask: Ask, words: tuple[str, ...], offered: list[str]
) -> None:
    assert ask(*words) == offered


def test_completion_offers_only_layouts_of_model_type(ask: Ask) -> None:
    mine = ask("convert", "a", "b", "-m", "mixtral", "--to-layout", "")
    assert "hf" in mine and len(mine) < len(ask("convert", "a", "b", "--to-layout", ""))


def test_completion_errors_are_silent(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        print("nobody is to see this")
        raise ZeroDivisionError

    monkeypatch.setattr(formats, "open_checkpoint", fail)
    assert ask("extract", "odd.safetensors", "model.") == []


def test_slow_completion_is_abandoned(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(*_: object) -> None:
        try:
            time.sleep(30)
            pytest.fail("nobody waits that long")
        except Exception:
            pytest.fail("no handler of errors is to catch it")

    monkeypatch.setattr(completion, "TIME_LIMIT_SECONDS", 0.05)
    monkeypatch.setattr(formats, "open_checkpoint", wait)
    assert ask("extract", "odd.safetensors", "model.") == []


def test_completing_thousand_tensors_is_little_work(folder: Path) -> None:
    """The process as a shell starts it."""
    names = tuple(f"model.layers.{n // 10}.part.{n % 10}.weight" for n in range(1000))
    write(folder / "many.safetensors", names)
    code = (
        "import sys\nfrom tests import effort\nfrom ckptctl.cli.app import main\n"
        "with effort.counted() as counted:\n"
        "  try: main()\n  except SystemExit: pass\n"
        "print(counted.lines, {'torch', 'rich'} & set(sys.modules), file=sys.stderr)"
    )
    env = environment(
        _CKPTCTL_COMPLETE="complete_bash",
        COMP_WORDS="ckptctl\nextract\nmany.safetensors\nmodel.",
        COMP_CWORD="3",
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines, heavy = done.stderr.split()
    assert done.stdout.split() == list(names) and heavy == "set()"
    assert int(lines) < 2_000_000
