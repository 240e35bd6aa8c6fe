"""The documentation is run: every command line, every Python block, every printed result.

Each page runs from top to bottom in a folder of its own that holds nothing but ``tests``:

* ``console``: lines that begin with ``$ `` are run as on a terminal; what follows one is what it
  prints, ``...`` standing for anything. A command fails exactly where the page shows ``error:``;
  ``ckptctl diff`` may end with 1.
* ``sh``: is run, its output is not compared. ``pip install`` and ``pytest`` are left to
  ``.ci/run``; ``pip install .`` inside a page makes that page's entry points known.
* ``python``: is run; ``print(...)  # text`` has to print that text.
* a block that an HTML comment ``<!-- file: NAME -->`` stands before is written to that file;
* ``<!-- run: ... -->`` is Python that makes this process what the reader's is, a rank of
  ``torchrun``. It makes no files.

After a change that is meant, write the printed results anew and read the diff:

    CKPTCTL_UPDATE_SNAPSHOTS=1 pytest tests/contract/test_docs.py
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import pytest
import typer
from typer.testing import CliRunner

import ckptctl
from ckptctl import errors, families, formats
from ckptctl.cli import output
from ckptctl.cli.app import app
from ckptctl.cli.output import StoppedError
from ckptctl.conversion import steps as conversion_steps
from ckptctl.conversion.conversion_options import MergeOptions
from ckptctl.options import list_options
from tests import s3_server
from tests.contract.additions import FUNCTIONS, hide_unfinished

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
PAGES = [*sorted(REPOSITORY.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
LONG = {DOCS / "how-to" / "convert-on-many-ranks.md", REPOSITORY / "CONTRIBUTING.md"}
"""Pages that start many processes."""
HOW_TO = sorted((DOCS / "how-to").glob("*.md"))
SWEPT = {page for number, page in enumerate(HOW_TO) if number % 3}
"""How-to pages whose code only the slow tests run."""
ON_A_SERVER = "how-to/save-to-a-bucket.md"
"""The page that is run against a server of S3."""
PACKAGES = {
    "zstandard": "[zstd]",
    "gguf": "[gguf]",
    "numpy": "NumPy",
    "s3fs": "[s3]",
    "gcsfs": "[gcs]",
    "adlfs": "[azure]",
    "lightning": "[lightning]",
    "transformers": "[transformers]",
    "torchtitan": "[torchtitan]",
    "torchtune": "[torchtune]",
}
"""What need not be installed: a page that uses it says how, or else is run without it."""
LEFT_TO_CI = ("pip install -c", "pytest", "git clone", "cd ckptctl", "python -m venv")
OVER_LINES = re.MULTILINE | re.DOTALL
VARYING = re.compile(
    r"\d{4}-\d\d-\d\dT[\d:]+(?=Z)|(?<=in )\d[\d.]* m?s\b|\d[\d.]* [KMGT]iB(?= free\))"
)
BLOCK = re.compile(
    r"(?:^<!-- file: (?P<file>\S+) -->\n)?^```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^```$"
    r"|^<!-- run:\n(?P<hidden>.*?)-->$",
    re.MULTILINE | re.DOTALL,
)
CACHES = (
    *(families._find_family_entry_points, families._load_family),
    *(formats.get_entry_points_by_name, formats.load_plugin_format),
    *(conversion_steps.find_step_entry_points, conversion_steps.load_added_step),
)


@dataclass
class Page:
    """A page that is being run.

    Attributes:
        folder: Where.
        patch: Undone after the page.
        namespace: What its Python blocks share.
        code: Exit code of its last command.
        updates: Console blocks as they should be, by what the page has; None: they are compared.
    """

    folder: Path
    patch: pytest.MonkeyPatch
    updates: dict[str, str] | None = None
    namespace: dict[str, object] = field(default_factory=lambda: {"__name__": "page"})
    code: int = 0

    def run(self, text: str) -> None:
        for block in BLOCK.finditer(text):
            body = block["body"] or ""
            if block["hidden"]:
                self.python(block["hidden"])
            elif block["file"]:
                path = self.folder / block["file"]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(body)
            elif block["language"] == "console":
                self.console(body)
            elif block["language"] == "sh":
                self.console("".join(f"$ {line}\n" for line in body.splitlines() if line))
            elif block["language"] == "python":
                self.python(body)

    def console(self, body: str) -> None:
        updated = body
        for command, expected in steps(body):
            printed = "".join(self.command(part) for part in chain(command))
            if self.updates is not None:
                shown = updated_output(expected, printed)
                updated = updated.replace(f"$ {command}\n{expected}", f"$ {command}\n{shown}")
                self.updates[body] = updated
                continue
            differs = self.code == 1 and command.startswith("ckptctl diff ")
            failed = self.code != 0 and not differs
            assert failed == ("error: " in expected or "Error" in expected), (
                f"$ {command}\nended with {self.code}\n{printed}"
            )
            if expected.strip():
                compare(command, expected, printed)

    def command(self, line: str) -> str:
        if line == "echo $?":
            code, self.code = self.code, 0
            return f"{code}\n"
        if line.startswith("pip install ."):
            self.install()
            return ""
        if line.startswith(LEFT_TO_CI):
            return ""
        if line.startswith("ckptctl ") and not set("|>") & set(line):
            return self.ckptctl(shlex.split(line)[1:])
        return self.shell(line)

    def ckptctl(self, arguments: list[str]) -> str:
        result = CliRunner().invoke(app, arguments, prog_name="ckptctl")
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        self.code = result.exit_code
        return result.output

    def shell(self, line: str) -> str:
        """Run *line* with ``ckptctl`` and ``python`` being this interpreter's."""
        python = shlex.quote(sys.executable)
        defined = f'ckptctl() {{ {python} -m ckptctl "$@"; }}; python() {{ {python} "$@"; }}; '
        found = subprocess.run(
            ["bash", "-c", defined + line],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
        self.code = found.returncode
        return found.stdout + found.stderr

    def python(self, body: str) -> None:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(body, "page", "exec"), self.namespace)
        expected = re.findall(r"^ *print\(.*\)  # (.*)$", body, re.MULTILINE)
        if expected and self.updates is not None:
            shown = updated_output("\n".join(expected), printed.getvalue()).splitlines()
            comments = dict(zip(expected, shown, strict=False))
            self.updates[body] = re.sub(
                r"^( *print\(.*\)  # )(.*)$",
                lambda line: f"{line[1]}{comments.get(line[2], line[2])}",
                body,
                flags=re.MULTILINE,
            )
        elif expected:
            assert len(expected) == body.count("print("), "a line is too long for its comment"
            compare("python", "\n".join(expected), printed.getvalue())

    def install(self) -> None:
        """Make the entry points of ``pyproject.toml`` known as pip would."""
        project: dict[str, Any] = tomllib.loads((self.folder / "pyproject.toml").read_text())
        name = project["project"]["name"].replace("-", "_")
        info = self.folder / f"{name}-{project['project']['version']}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
        groups = project["project"]["entry-points"].items()
        lines = (
            line
            for group, points in groups
            for line in (f"[{group}]", *(f"{key} = {value}" for key, value in points.items()))
        )
        (info / "entry_points.txt").write_text("\n".join(lines))
        self.patch.syspath_prepend(self.folder)
        for cache in CACHES:
            cache.cache_clear()


def steps(body: str) -> Iterator[tuple[str, str]]:
    """Yield each command of a console block with the lines shown below it."""
    command, shown = "", ""
    for line in body.splitlines():
        if line.startswith("$ "):
            if command:
                yield command, shown
            command, shown = line[2:], ""
        else:
            shown += f"{line}\n"
    if command:
        yield command, shown


def chain(command: str) -> list[str]:
    return [part.strip() for part in command.split(" && ")]


def compare(command: str, expected: str, printed: str) -> None:
    assert matches(expected, printed), (
        f"$ {command}\nthe page shows:\n{expected}\nit prints:\n{printed}"
    )


def matches(expected: str, printed: str) -> bool:
    pattern = re.escape(expected.strip()).replace(r"\.\.\.", ".*?")
    return re.fullmatch(pattern, printed.strip(), re.DOTALL) is not None


def updated_output(expected: str, printed: str) -> str:
    """Return what a page should show, with the omissions of *expected* where they still fit."""
    if not expected.strip() or matches(expected, printed):
        return expected
    shown, lines = expected.strip("\n").split("\n"), printed.strip("\n").split("\n")
    if "..." in shown:
        first = shown.index("...")
        last = len(shown) - 1 - shown[::-1].index("...")
        rest = len(shown) - 1 - last
        if len(lines) > first + rest:
            lines = [*lines[:first], "...", *(lines[-rest:] if rest else [])]
    omitting = [line for line in shown if "..." in line and line.strip() != "..."]
    kept = [next((old for old in omitting if matches(old, new)), new) for new in lines]
    blanks = expected[len(expected.rstrip("\n")) :]
    return "\n".join(VARYING.sub("...", line) for line in kept) + blanks


def on_a_terminal(patch: pytest.MonkeyPatch) -> None:
    """Let the program print for people, both streams in the order of its words."""
    write = output._write_line

    def flushed(stream: TextIO, text: str) -> None:
        write(stream, text)
        stream.flush()

    patch.setattr(output, "_is_terminal", lambda stream: True)
    patch.setattr(output, "_write_line", flushed)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of botocore and moto
def test_bucket_page_runs_against_s3_server(tmp_path: Path) -> None:
    patched = pytest.MonkeyPatch.context
    with patched() as patch, s3_server.serving(patch), patched() as own:
        run_page(DOCS / ON_A_SERVER, tmp_path, own)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.slow if path in LONG | SWEPT else ()) for path in PAGES],
    ids=[str(p.relative_to(REPOSITORY)) for p in PAGES],
)
def test_page_code_runs_with_shown_output(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path != DOCS / ON_A_SERVER:
        run_page(path, tmp_path, monkeypatch)


def run_page(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tests").symlink_to(REPOSITORY / "tests")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    monkeypatch.delenv("CKPTCTL_DEBUG", raising=False)
    on_a_terminal(monkeypatch)
    hide_unfinished(monkeypatch)
    text = path.read_text()
    for package, stated in PACKAGES.items():
        if stated not in text:
            monkeypatch.setitem(sys.modules, package, None)  # no import finds it
    before = set(sys.modules)
    updates: dict[str, str] | None = {} if os.environ.get("CKPTCTL_UPDATE_SNAPSHOTS") else None
    try:
        Page(tmp_path, monkeypatch, updates).run(text)
    finally:
        for name in set(sys.modules) - before:
            if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]
        monkeypatch.undo()
        for cache in CACHES:
            cache.cache_clear()
    if updates:
        for shown, printed in updates.items():
            text = text.replace(f"\n{shown}```", f"\n{printed}```")
        path.write_text(text)


@pytest.mark.parametrize("path", PAGES, ids=[str(p.relative_to(REPOSITORY)) for p in PAGES])
def test_relative_links_point_to_existing_files(path: Path) -> None:
    text = re.sub(r"```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_readme_is_short_with_one_line_commands() -> None:
    text = (REPOSITORY / "README.md").read_text()
    above, _, links = text.partition("\n## Documentation\n")
    assert links and len(above.split()) <= 900
    for line in (r"^pip install .* && ckptctl ", r"^pip install .* && pytest$"):
        assert len(re.findall(line, text, re.MULTILINE)) == 1, line


def test_pages_have_no_hidden_setup_blocks() -> None:
    hiding = [
        path.name for path in PAGES if any(b["hidden"] for b in BLOCK.finditer(path.read_text()))
    ]
    assert hiding == ["meta-to-fsdp2.md"], "show it: readers cannot follow what they do not see"


@pytest.mark.parametrize("folder", ["how-to", "tutorial"])
def test_how_to_and_tutorial_pages_have_troubleshooting_section(folder: str) -> None:
    pages = {path.name: path.read_text() for path in (DOCS / folder).glob("*.md")}
    assert not [name for name, text in pages.items() if "\n## What can go wrong\n" not in text]


def test_index_links_every_page() -> None:
    linked = re.findall(r"\]\(([^)#]+\.md)", (DOCS / "index.md").read_text())
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - {"index.md"}
    assert pages <= set(linked)


def test_site_navigation_lists_every_page_once() -> None:
    site = runpy.run_path(str(DOCS / "build_site.py"))
    known = site["pages"]()
    listed = re.findall(r"'([^']+\.md)'", str(site["navigation"]()))
    assert sorted(listed) == sorted(known.values())
    for path in known:
        text = re.sub(r"```.*?^```$", "", site["site_text"](path), flags=re.MULTILINE | re.DOTALL)
        start = Path(known[path]).parent
        for target in re.findall(r"\]\(([^)#\s:]+)[)#]", text):
            there = os.path.normpath(start / target)
            picture = there.startswith("pictures/") and (DOCS / there).exists()
            assert picture or there in known.values(), f"{path.name}: {target}"


def render(reference: str) -> str:
    """Return a page of the reference as it is generated: test_additions compares the page."""
    text: str = runpy.run_path(str(DOCS / f"generate_{reference}.py"))["render"]()
    return text


def test_command_reference_lists_every_command_and_option() -> None:
    written = render("cli")
    group: Any = typer.main.get_command(app)
    for name, command in {"": group, **group.commands}.items():
        section = written.partition(f"## ckptctl {name}".rstrip() + "\n")[2].partition("\n## ")[0]
        for parameter in command.params:
            spelled = parameter.metavar if parameter.param_type_name == "argument" else None
            for text in [spelled] if spelled else parameter.opts:
                assert f"`{text}" in section, f"{name} {text}"


def subclasses(base: type[errors.CkptError]) -> Iterator[type[errors.CkptError]]:
    yield base
    for child in base.__subclasses__():
        if child.__module__.startswith("ckptctl"):
            yield from subclasses(child)


def test_every_exit_code_is_documented() -> None:
    written = (DOCS / "reference" / "exit-codes.md").read_text()
    rows = re.findall(r"^\| (\d+) \| ([^|]*) \|", written, re.MULTILINE)
    documented = {(int(number), name) for number, cell in rows for name in cell.split(", ")}
    found = {(kind.exit_code, f"`{kind.code}`") for kind in subclasses(errors.CkptError)}
    assert (StoppedError.exit_code, "`interrupted`") in found
    assert found <= documented
    assert {number for number, _ in documented} == {code for code, _ in found} | {0, 1}


MAPPINGS = (
    *("dtypes", "quantized", "tensors", "metadata", "dropped", "left_out", "sizes"),
    "targets[].each",
    *("models[].tables[].dropped", "models[].constants", "models[].composite"),
)


def fields_of(document: object, prefix: str = "") -> Iterator[str]:
    """Yield the dotted fields of *document*; ``[]`` for items, ``*`` for keys that are data."""
    if isinstance(document, dict):
        for key, value in document.items():
            data = prefix in MAPPINGS
            name = f"{prefix}.{'*' if data else key}".lstrip(".")
            yield name
            yield from fields_of(value, name)
    elif isinstance(document, list):
        for value in document:
            yield from fields_of(value, f"{prefix}[]")


def documented_fields(page: str, heading: str, option: str = "") -> set[str]:
    """Return the documented fields of a document, or of its form that *option* selects."""
    written = (DOCS / "reference" / page).read_text()
    assert f"\n## {heading}\n" in written
    section = written.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    forms = dict(re.findall(r"^With `(--[a-z-]+)`, (.*?)(?=^With `--|\Z)", section, OVER_LINES))
    section = forms[option] if option else re.split(r"^With `--", section, flags=re.MULTILINE)[0]
    return set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE))


def document(*arguments: object) -> dict[str, object]:
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"], prog_name="ckptctl")
    found: dict[str, object] = json.loads(result.stdout or result.stderr)
    return found


def test_every_json_field_is_documented(data: Path, tmp_path: Path) -> None:
    tiny, run = data / "tiny-llama3-hf", data / "dcp/torchtitan/steps/ckpt/checkpoint"
    inspected = (document("inspect", tiny, "--stats"), document("inspect", run))
    found = {name for one in inspected for name in fields_of(one)}
    known = documented_fields("json.md", "ckptctl.inspect/1")
    assert found <= known, sorted(found - known)

    made = (
        document("convert", tiny, tmp_path / "out", "--to", "meta"),
        document("convert", data / "dcp/dcp2/ckpt", tmp_path / "hf", "--to", "hf", "--dry-run"),
    )
    found = {name for one in made for name in fields_of(one)}
    known = documented_fields("json.md", "ckptctl.convert/1")
    assert found <= known, sorted(found - known)
    absent = {"candidates[]", "decided.*", "dropped.*", "missing.*", "not_carried.*", "taken.*"}
    several = ("out_of_range.", "rounding.", "unquantized.")
    absent |= {name for name in known if name.startswith(several)}
    assert known <= found | absent, sorted(known - found)

    key, options = (
        "layers.{i}.feed_forward.experts.{x}.w1.weight",
        ("-m", "mixtral", "--set", "x=8"),
    )
    asked = (
        document("map", key, "--to-layout", "hf-v5", *options),
        document("map", "model.layers.1.mlp.experts.down_proj", "--to-layout", "hf", *options),
    )
    found = {name for one in asked for name in fields_of(one)}
    assert found == documented_fields("json.md", "ckptctl.map/1")

    shown = [document("models", name) for name in ("llama3", "phi3", "deepseek_v3")]
    found = {name for one in shown for name in fields_of(one)}
    assert found == documented_fields("json.md", "ckptctl.models/1")

    found = set(fields_of(document("formats")))
    assert found == documented_fields("json.md", "ckptctl.formats/1")

    failed = document("inspect", tmp_path / "nothing")
    found = set(fields_of(failed))
    assert found == documented_fields("json.md", "ckptctl.error/1") - {"error.traceback"}

    manifest = json.loads((tmp_path / "out" / "ckptctl.manifest.json").read_text())
    known = documented_fields("manifest.md", "ckptctl.manifest/1")
    assert set(fields_of(manifest)) <= known


def test_every_public_name_is_documented() -> None:
    written = (DOCS / "reference" / "python.md").read_text()
    others = {*ckptctl.__all__} - {*FUNCTIONS}
    missing = [name for name in others if f"`ckptctl.{name}" not in written]
    assert not missing


def test_every_python_option_is_documented() -> None:
    written = render("python")
    missing = [o.name for o in list_options(MergeOptions) if f"| `{o.name}` |" not in written]
    assert not missing


def test_every_model_type_and_layout_is_documented() -> None:
    models = render("models")
    for name, family in families.load_families().items():
        assert f"| `{name}` |" in models
        assert all(f"`{text}`" in models for text in (*family.layouts, *family.aliases))


def test_every_environment_variable_is_documented() -> None:
    written = (DOCS / "reference" / "environment.md").read_text()
    sources = "".join(path.read_text() for path in (REPOSITORY / "ckptctl").rglob("*.py"))
    names = set(re.findall(r"\"(CKPTCTL_[A-Z_]+|NO_COLOR|TERM)\"", sources))
    assert names and not [name for name in names if f"| `{name}` |" not in written]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("```console\n$ echo one\ntwo\n```\n", "it prints"),
        ("```console\n$ false\n```\n", "ended with 1"),
        ("```console\n$ ckptctl inspect nothing\n```\n", "ended with 3"),
        ("```python\nprint(1 + 1)  # 3\n```\n", "it prints"),
    ],
)
def test_page_with_wrong_output_fails(
    body: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match=message):
        Page(tmp_path, monkeypatch).run(body)
