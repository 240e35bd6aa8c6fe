"""The package as it is installed, far from any checkout: every command, what it carries, remotes.

``CKPTCTL_INSTALLED`` names the folder into which it was installed (``pip install --target``), from
which the tests have to import it, too. ``.ci/run`` does that with the wheel.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptctl
from ckptctl.cli import schema as schemas
from tests import hub_server
from tests.contract.commands import FIRST, LINES, Line, arguments, make
from tests.hub_server import Hub

CHECKOUT = Path(__file__).resolve().parents[2]
SITE = Path(os.environ.get("CKPTCTL_INSTALLED", "")).absolute()
REMOTE = """
import ckptctl, sys
ckptctl.convert(sys.argv[1], "memory://there", to="dcp", verify=True)
assert ckptctl.inspect("memory://there").parameters == 127296
assert not ckptctl.diff("memory://there", sys.argv[1]).tensors
"""
EVERYTHING = """
import importlib, pkgutil, sys
import ckptctl
for name in ckptctl.__all__:
    getattr(ckptctl, name)
for module in pkgutil.walk_packages(ckptctl.__path__, "ckptctl."):
    if not module.name.startswith("ckptctl.integrations."):  # which import the trainers
        importlib.import_module(module.name)
print(*sorted({module.__file__ for name, module in sys.modules.items()
    if name.partition(".")[0] == "ckptctl"}), sep="\\n")
"""

pytestmark = pytest.mark.skipif(
    "CKPTCTL_INSTALLED" not in os.environ, reason="about a wheel, which .ci/run makes"
)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("installed") / "places"
    folder.mkdir()
    return make(folder)


def environment(**more: str) -> dict[str, str]:
    """Return what a shell has that knows the installed package and no checkout."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return {**kept, "PYTHONPATH": str(SITE), **more}


def python(folder: Path, *words: object, **more: str) -> subprocess.CompletedProcess[str]:
    """Run Python in *folder*, from which nothing can be imported by accident."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=120,
    )


def command(folder: Path, *words: object, **more: str) -> subprocess.CompletedProcess[str]:
    return python(folder, "-m", "ckptctl", *words, **more)


def test_tests_import_installed_package() -> None:
    assert Path(ckptctl.__file__).is_relative_to(SITE)


def test_every_module_imports_from_installed_package(tmp_path: Path) -> None:
    done = python(tmp_path, "-W", "ignore", "-c", EVERYTHING)
    assert done.returncode == 0, done.stderr
    files = [Path(line) for line in done.stdout.splitlines()]
    assert len(files) >= sum(1 for file in CHECKOUT.glob("ckptctl/[!i]*/**/*.py"))
    assert not [file for file in files if not file.is_relative_to(SITE)]


def test_every_checkout_file_is_installed() -> None:
    """Pages, styles, scripts and markers are no modules, and easily left out."""

    def files(root: Path) -> set[Path]:
        found = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
        return {path for path in found if path.suffix != ".pyc"}

    families = {Path("converters") / path for path in files(CHECKOUT / "converters")}
    assert files(SITE / "ckptctl") == files(CHECKOUT / "ckptctl") | families
    beside = {path.name for path in SITE.iterdir() if not path.name.endswith(".dist-info")}
    assert beside == {"ckptctl", "bin"}


def test_foreign_converters_folder_is_not_imported(places: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "converters").mkdir()
    for name in ("__init__.py", "llama3.py"):
        (tmp_path / "converters" / name).write_text("raise SystemExit('foreign')\n")
    done = command(tmp_path, "inspect", places["hf"], "--json")
    assert json.loads(done.stdout)["model_type"] == "llama3", done.stderr


@pytest.mark.parametrize(("name", "line"), FIRST)
def test_installed_command_outputs_its_json_schema(
    name: str, line: Line, places: dict[str, Path], tmp_path: Path
) -> None:
    done = command(tmp_path, *name.split(), *arguments(line, places, tmp_path), "--json")
    assert done.returncode == line.code, done.stderr
    document = json.loads(done.stdout)
    assert document["schema"] == f"ckptctl.{name.replace(' ', '-')}/1"
    assert document["ckptctl"] == ckptctl.__version__


def test_installed_report_page_contains_styles_and_scripts(
    places: dict[str, Path], tmp_path: Path
) -> None:
    """Its style and its scripts come with the package, and are in it."""
    page = tmp_path / "page.html"
    done = command(tmp_path, "report", places["base"], places["hf"], "--structure", "-o", page)
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    assert "<style" in text and "<script" in text and "model.norm.weight" in text


def test_installed_schema_command_lists_every_schema(tmp_path: Path) -> None:
    done = command(tmp_path, "schema", "-q")
    assert done.stdout.splitlines() == list(schemas.get_documents_by_name())
    assert {*LINES, "error"} == {*done.stdout.splitlines()}
    shown = json.loads(command(tmp_path, "schema", "prune").stdout)
    assert shown["title"] == "ckptctl.prune/1"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_installed_command_generates_shell_completion(shell: str, tmp_path: Path) -> None:
    done = command(tmp_path, _CKPTCTL_COMPLETE=f"source_{shell}")
    assert done.returncode == 0 and "_CKPTCTL_COMPLETE=complete_" in done.stdout, done.stderr


def test_installed_completion_offers_model_types(tmp_path: Path) -> None:
    words = {"COMP_WORDS": "ckptctl map x -m deepseek_", "COMP_CWORD": "4"}
    done = command(tmp_path, _CKPTCTL_COMPLETE="complete_bash", **words)
    assert "deepseek_v3" in done.stdout.split()


def test_installed_script_and_module_print_version(tmp_path: Path) -> None:
    script = SITE / "bin" / "ckptctl"
    for done in (python(tmp_path, script, "--version"), command(tmp_path, "--version")):
        assert done.stdout == f"ckptctl {ckptctl.__version__}\n", done.stderr


def test_installed_commands_accept_file_url(places: dict[str, Path], tmp_path: Path) -> None:
    url = f"file://{places['hf']}"
    assert command(tmp_path, "verify", url, "--level", "full").returncode == 0
    assert command(tmp_path, "convert", url, "out.pt", "--to", "torch").returncode == 0
    assert command(tmp_path, "diff", "out.pt", url).returncode == 0


def test_installed_package_reads_remote_storage(places: dict[str, Path], tmp_path: Path) -> None:
    done = python(tmp_path, "-W", "ignore", "-c", REMOTE, places["hf"])
    assert done.returncode == 0, done.stderr


@pytest.fixture
def hub() -> Iterator[Hub]:
    found, server = hub_server.start()
    yield found
    server.shutdown()
    server.server_close()


def test_installed_commands_read_and_write_hub(
    hub: Hub, places: dict[str, Path], tmp_path: Path
) -> None:
    hub.add("org/tiny", places["hf"])
    hub.add("org/new", places["adapter"])
    home = str(tmp_path / "home")
    variables = {"HF_ENDPOINT": hub.url, "HF_HOME": home, "HF_HUB_DISABLE_XET": "1"}
    for words in (
        ("verify", "hf://org/tiny"),
        ("convert", "hf://org/tiny", "hf://org/new/dcp", "--to", "dcp", "--verify"),
        ("diff", "hf://org/new/dcp", "hf://org/tiny", "--structure"),
    ):
        done = command(tmp_path, *words, **variables)
        assert done.returncode == 0, done.stderr
    assert "dcp/.metadata" in hub.repositories["org/new"].files
