"""The modules that other packages build on have everything, and the pages use nothing else."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"
PAGES = {
    "add-a-model-family.md": "ckptctl.plugins.families",
    "add-a-format.md": "ckptctl.plugins.formats",
    "add-a-step.md": "ckptctl.plugins.steps",
}


@pytest.mark.parametrize("page", PAGES)
def test_plugin_examples_import_only_plugin_module(page: str) -> None:
    plug_in = re.search(r"```python\n(.*?)```", (HOW_TO / page).read_text(), re.DOTALL)
    assert plug_in
    tree = ast.parse(plug_in[1])
    used = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name for name in used if name and name.startswith("ckptctl")} == {PAGES[page]}


@pytest.mark.parametrize("module", PAGES.values())
def test_published_classes_and_functions_have_docstrings(module: str) -> None:
    published = importlib.import_module(module)
    values = [getattr(published, name) for name in published.__all__]
    explained = [value for value in values if inspect.isclass(value) or inspect.isfunction(value)]
    assert explained and all(value.__doc__ for value in explained)


def test_classes_in_format_annotations_are_published() -> None:
    """Classes of ours in the annotations of the published ones."""
    published = importlib.import_module("ckptctl.plugins.formats")
    classes = [getattr(published, name) for name in ("Format", "WritableFormat", "OutputLayout")]
    classes += [published.OutputRequest, published.ReadOptions, published.Listing]
    texts = [
        str(annotation)
        for found in classes
        for member in (found, *vars(found).values())
        for annotation in getattr(member, "__annotations__", {}).values()
    ]
    words = set(re.findall(r"\b[A-Z][A-Za-z]+", " ".join(texts)))
    outside = {"ClassVar", "Callable", "Sequence", "Mapping", "Path", "Pattern", "None", "KeyPath"}
    outside |= {"Any", "NoReturn"}
    assert words - outside <= set(published.__all__)
