"""Tested versions are stated in one place, and the newest releases are tested every week."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(REPOSITORY / "docs" / "generate_versions.py"))
PINS: dict[str, str] = SCRIPT["read_pins"]()
ALIASES = {
    "ai2-olmo": "OLMo",
    "ai2-olmo-core": "OLMo-core",
    "huggingface-hub": "huggingface_hub",
    "llmcompressor": "llm-compressor",
    "megatron-bridge": "Bridge",
    "nvidia-modelopt": "ModelOpt",
    "torch-checkpointing": "torch_checkpointing",
}
"""Other names of packages in pages and tables."""
GENERATED = {"compatibility.md", "formats.md", "models.md"}
BOUNDARIES = {
    "comparison-with-other-tools.md: torch_checkpointing 0.1.1": "its page compares releases",
    "speed.md: Bridge 0.3.1": "its numbers are of these releases",
    "speed.md: megatron-core 0.16.1": "its numbers are of these releases",
    "speed.md: torch 2.13.0": "its numbers are of these releases",
    "speed.md: torch_checkpointing 0.1.1": "its numbers are of these releases",
    "survive-preemption.md: torch 2.13": "settings that earlier releases do not have",
    "local-disk-first.md: torch 2.13": "where the behavior was seen",
    "megatron-core.md: Bridge 0.3": "its releases differ",
    "megatron-core.md: Bridge 0.3.1": "its releases differ",
    "megatron-core.md: megatron-core 0.16": "its releases differ",
    "megatron-core.md: megatron-core 0.16.1": "its releases differ",
}
"""Versions that pages name because a release behaves differently, with the reason."""


def find_named_pins(text: str) -> Iterator[tuple[str, str]]:
    """Yield each package that *text* names with its pinned version, complete or without patch."""
    for name, pin in PINS.items():
        names = "|".join(re.escape(one) for one in (name, ALIASES.get(name, name)))
        short = ".".join(pin.split(".")[:2])
        found = re.findall(
            rf"(?i)(?<![\w./-])(?:{names})(?:'s)?\s+v?({re.escape(pin)}|{re.escape(short)})(?![\w.]*\d)",
            text,
        )
        yield from ((ALIASES.get(name, name), version) for version in found)


@pytest.mark.slow
def test_pages_link_to_tested_versions() -> None:
    pages = [*(REPOSITORY / "docs").rglob("*.md"), REPOSITORY / "README.md"]
    named = {
        f"{page.name}: {name} {version}"
        for page in pages
        if page.name not in GENERATED
        for name, version in find_named_pins(page.read_text())
    }
    link = "link to docs/reference/compatibility.md#tested-versions instead"
    assert named - {*BOUNDARIES} == set(), link
    assert {*BOUNDARIES} <= named, "no page names it any more"


@pytest.mark.parametrize(
    "text", ["with torch {torch}", "Megatron-Bridge {megatron-bridge}", "of DeepSpeed {deepspeed}."]
)
def test_page_that_names_a_tested_version_is_detected(text: str) -> None:
    assert [*find_named_pins(text.format(**PINS))]
    assert not [*find_named_pins("torch 2.6, torch 2.131, verl 0.9.1 and torchtitan@0.3")]


def test_programs_that_prove_layouts_have_tested_versions() -> None:
    proofs = runpy.run_path(str(REPOSITORY / "converters" / "_proofs.py"))
    values = {*proofs["_DEFAULT_PROGRAMS"].values(), proofs["MLX_VLM"], proofs["TRANSFORMERS"]}
    names = {alias.lower(): name for name, alias in ALIASES.items()}
    stated = {}
    for value in values:
        if found := re.match(r"([\w-]+) (\d[\d.]*\d)\b", value):
            stated[names.get(found[1].lower(), found[1])] = found[2]
    stated.pop("gpt-oss")  # pinned in noxfile.py
    older = {"torchtitan"}  # an older one is pinned too
    assert {"transformers", "megatron-core", "ai2-olmo"} <= {*stated}
    for name in {*stated} - older:
        assert f"{PINS[name]}.".startswith(f"{stated[name]}."), name


def test_weekly_workflow_runs_newest_sessions_and_writes_nothing() -> None:
    text = (REPOSITORY / ".github" / "workflows" / "newest.yml").read_text()
    workflow: Any = yaml.safe_load(text)
    assert {*workflow[True]} == {"schedule", "workflow_dispatch"}  # YAML reads `on` as true
    assert workflow["permissions"] == {"contents": "read"}
    (job,) = workflow["jobs"].values()
    assert "permissions" not in job and "secrets." not in text and "GITHUB_TOKEN" not in text
    used = {step["uses"].partition("@")[0] for step in job["steps"] if "uses" in step}
    assert used == {"actions/checkout", "actions/setup-python"}
    assert {*job["strategy"]["matrix"]["session"]} == {*find_tagged_sessions("newest")}


def find_tagged_sessions(tag: str) -> Iterator[str]:
    """Yield the sessions of ``noxfile.py`` with *tag*."""
    tree = ast.parse((REPOSITORY / "noxfile.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and f"'{tag}'" in "".join(
            map(ast.unparse, node.decorator_list)
        ):
            yield node.name
