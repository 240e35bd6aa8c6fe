"""What the hand-written part of the reference says is what the code has."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import yaml

import ckptctl
from ckptctl.errors import CkptError
from ckptctl.facts.fact_names import IGNORED_KEYS, LOGIT_NEUTRAL_KEYS
from ckptctl.planner.families.declarations import SWITCHES
from tests.contract.additions import FUNCTIONS

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
RESULT = re.compile(r"^\| `ckptctl\.(\w+)` \| (.*) \|$", re.MULTILINE)
READ = re.compile(r"(?:environ(?:\.get\(|\[)|getenv\()\"([A-Z][A-Z_]+)\"")
SHELLS = {"COMP_WORDS", "COMP_CWORD"}
OLD = {"HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"}


def test_python_reference_is_generated_for_every_callable() -> None:
    written = (DOCS / "reference" / "python.md").read_text()
    results = {name for name, _ in RESULT.findall(written)}
    by_hand = {"__version__", "CkptError", "SaveFuture"} | results
    generated = set(re.findall(r"<!-- generated: (\w+) -->", written))
    others = set(ckptctl.__all__) - {*FUNCTIONS}
    assert generated - {*FUNCTIONS} == others - by_hand | {"options"}


def test_documented_result_fields_exist() -> None:
    written = (DOCS / "reference" / "python.md").read_text()
    rows = RESULT.findall(written)
    assert len(rows) > 10
    for name, text in rows:
        kind = getattr(ckptctl, name)
        known = {field.name for field in dataclasses.fields(kind)} | set(dir(kind))
        own = re.sub(r"\([^()]*\)", "", text.replace("()", "").replace("for `bytes`", ""))
        named = re.findall(r"`(\w+)`", own)
        assert set(named) <= known, f"{name}: {sorted(set(named) - known)}"


def test_every_environment_variable_read_is_documented() -> None:
    from ckptctl.storage import threads
    from ckptctl.verbs import doctor

    written = (DOCS / "reference" / "environment.md").read_text()
    sources = "".join(path.read_text() for path in (REPOSITORY / "ckptctl").rglob("*.py"))
    read = (
        {*READ.findall(sources), *threads.LAUNCHER_VARIABLES, *doctor.TOKEN_VARIABLES}
        - SHELLS
        - OLD
    )
    assert {"WORLD_SIZE", "NO_COLOR", "HF_HOME"} <= read
    assert not [name for name in sorted(read) if f"`{name}`" not in written]


def test_index_titles_match_page_titles() -> None:
    listed = re.findall(r"^\* \[(.*?)\]\((.+?\.md)\)", (DOCS / "index.md").read_text(), re.M)
    titles = {page: (DOCS / page).read_text().partition("\n")[0] for _, page in listed}
    assert titles == {page: f"# {text}" for text, page in listed}


def test_safety_page_lists_compared_config_keys() -> None:
    page = (DOCS / "explanation" / "safety.md").read_text()
    _, _, section = page.partition("## One model, described once\n")
    section = section.partition("\n## ")[0]
    for about, keys in IGNORED_KEYS.items():
        assert f"| {about} | {', '.join(f'`{key}`' for key in keys)} |" in section
    for names in (LOGIT_NEUTRAL_KEYS, SWITCHES):
        assert ", ".join(f"`{name}`" for name in names) in " ".join(section.split())


def test_skill_is_short_and_lists_every_exit_code() -> None:
    """The limits of the front matter are those of the Agent Skills specification."""
    text = (DOCS / "SKILL.md").read_text()
    _, front, body = text.split("---\n", 2)
    said = yaml.safe_load(front)
    assert said.keys() == {"name", "description"} and said["name"] == "ckptctl"
    assert len(said["description"]) <= 1024 and len(text.splitlines()) <= 150
    kinds = [CkptError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", body, re.M)}
    assert codes == {0, 1, *(kind.exit_code for kind in kinds if kind.exit_code < 100)}


@pytest.mark.parametrize("page", ["training-managers", "safety"])
def test_tests_cited_in_docs_exist(page: str) -> None:
    text = (DOCS / "explanation" / f"{page}.md").read_text()
    named = re.findall(r"`(tests/[\w/.]+)(?:::(\w+))?`", text)
    assert len(named) > 12
    for path, test in named:
        assert f"def {test}" in (DOCS.parent / path).read_text(), (path, test)
