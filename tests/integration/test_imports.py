"""What is not imported: a command that needs no arithmetic never waits for torch."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import tiny_llama
from tests.checkpoints.golden import Golden
from tests.contract.support import WRITABLE, build, place
from tests.sweeps import one_in

REPOSITORY = Path(__file__).parents[2]
HEAVY = (
    *("torch", "numpy", "pydantic", "safetensors.torch", "transformers"),
    *("huggingface_hub", "fsspec", "yaml"),
)
PROGRAM = """
import sys
from ckptctl.cli.app import app
commands = eval(sys.argv[1])
for command in commands:
    try:
        app(command, prog_name="ckptctl")
    except SystemExit as stop:
        assert not stop.code, (command, stop.code)
    loaded = [name for name in {heavy!r} if name in sys.modules]
    assert not loaded, (command, loaded)
"""

COUNTED = """
import sys
from ckptctl.__main__ import main
try:
    main()
finally:
    print(*sys.modules, file=sys.stderr)
"""


def run(*commands: list[str], heavy: tuple[str, ...] = HEAVY) -> None:
    """Run *commands* in one new process, which fails when a heavy module is loaded."""
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(heavy=heavy), repr(list(commands))],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    state, config = tiny_llama("llama3", layers=1)
    return {name: build(name, folder, state, config) for name in WRITABLE}


def test_help_and_version_import_no_heavy_modules() -> None:
    own = ("ckptctl.catalog", "ckptctl.dtypes", "ckptctl.families", "ckptctl.planner")
    light = (*HEAVY, *own, "rich", "asyncio", "concurrent.futures", "email", "tarfile", "http")
    run(["--help"], ["--version"], ["convert", "--help"], ["inspect", "--help"], heavy=light)


@pytest.mark.parametrize(
    ("most", "command"),
    one_in(
        3,
        [
            (65, "--help"),
            (33, "inspect --help"),
            (141, "inspect HF --json"),
            (165, "ls RUN --json"),
            (165, "latest RUN"),
            (143, "verify HF --level fast"),
            (143, "verify HF"),
        ],
    ),
)
def test_fast_commands_import_few_modules(
    sources: dict[str, Path], tmp_path: Path, most: int, command: str
) -> None:
    """Each module takes about half a millisecond; those named here bring many of Python's own.

    Families, of which there is one more each time that a model comes out, do not count.
    """
    shutil.copytree(sources["dcp"], tmp_path / "step-1")
    paths = {"HF": str(sources["hf"]), "RUN": str(tmp_path)}
    words = [paths.get(word, word) for word in command.split()]
    done = subprocess.run(
        [sys.executable, "-c", COUNTED, *words],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(done.stderr.split())
    assert not loaded & {*HEAVY, "rich", "asyncio", "hashlib", "logging", "email", "http"}
    own = [name for name in loaded if re.match(r"ckptctl(?!\.converters\.)\b", name)]
    assert len(own) <= most, sorted(own)


def test_ls_does_not_import_execution(sources: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(sources["dcp"], tmp_path / "step-1")
    run(["ls", str(tmp_path)], heavy=(*HEAVY, "ckptctl.storage.execution"))


def test_models_and_map_commands_do_not_import_torch() -> None:
    key = "model.layers.0.self_attn.q_proj.weight"
    asked = ["map", key, "-m", "llama3", "--to-layout", "meta"]
    run(["models"], ["models", "llama3"], [*asked, "--set", "h=8"])


def test_import_ckptctl_loads_at_most_three_modules() -> None:
    code = "import sys, ckptctl; print(*[n for n in sys.modules if n.startswith('ckptctl.')])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert len(done.stdout.split()) <= 3, done.stdout


@pytest.mark.slow
def test_inspect_and_dry_runs_do_not_import_torch(sources: dict[str, Path], tmp_path: Path) -> None:
    commands: list[list[str]] = []
    for name, path in sources.items():
        commands += [["inspect", str(path)], ["inspect", str(path), "--tensors", "--json"]]
        for target in WRITABLE:
            if sources["hf"].is_dir() and not (path.is_file() and target == "meta"):
                out = str(place(tmp_path, target, f"{name}-{target}"))
                dtype = ["--dtype", "fp32"] if target == "hf" else []
                commands.append(["convert", str(path), out, "--to", target, "-n", *dtype])
    run(*commands)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_conversions_without_arithmetic_do_not_import_torch(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    commands: list[list[str]] = []
    for name, path in sources.items():
        for target in WRITABLE:
            out = place(tmp_path, target, f"{name}-{target}")
            assets = ["--assets", str(sources["hf"])] if path.is_file() else []
            commands.append(["convert", str(path), str(out), "--to", target, "--verify", *assets])
    run(*commands)
    assert len(list(tmp_path.iterdir())) == len(commands)


@pytest.mark.slow
def test_dtype_cast_imports_torch(sources: dict[str, Path], tmp_path: Path) -> None:
    """The control: a cast does, so the others would have shown it."""
    command = ["convert", str(sources["hf"]), str(tmp_path / "out"), "--to", "hf"]
    with pytest.raises(AssertionError, match="torch"):
        run([*command, "--dtype", "fp32"])


def test_filling_zero_bias_does_not_import_torch(tmp_path: Path) -> None:
    """torchtitan's experts have a bias that Qwen 3 has not: bytes that are zero."""
    source = Golden.read("qwen3_moe").save(tmp_path / "hf")
    command = ["convert", str(source), str(tmp_path / "out"), "--to", "dcp"]
    run([*command, "--to-layout", "torchtitan@0.3", "--verify"])
