"""Who may import whom, read from the source: the layers of the program and its light start-up.

:data:`LAYERS` has the layers, the highest first, and neighbors in one row; ``converters`` only
imports ``planner.layouts``. A layer may import any layer below it and itself, never one above and
never its neighbor. The packages in :data:`EXTENSIONS` have no layer, and ``runs`` and ``verbs`` are
one: ``test_rooms`` says what they may import. Imports inside functions and under ``TYPE_CHECKING``
count: they are dependencies as well.
"""

from __future__ import annotations

import ast

import pytest

from tests.structure import Import, imports, imports_of, trees

LAYERS: tuple[tuple[str, ...], ...] = (
    ("__main__",),
    ("cli", "integrations", "plugins", "pre_commit"),
    ("distributed", "api"),
    ("runs",),
    ("verbs",),
    ("save_load",),
    ("conversion",),
    ("shared_options", "run_options"),
    ("option_checks", "ranks"),
    ("formats",),
    ("families", "storage"),
    ("planner",),
    ("columns",),
    ("catalog", "units", "keywords"),
    ("options", "documents", "dtypes", "file_identity", "installed"),
    ("tree",),
    ("errors",),
    ("results", "verdict", "notes", "version"),
    ("__init__",),
)
EXTENSIONS = {"adapters", "facts", "fit", "numerics", "references", "remote"}
HEIGHT = {name: -depth for depth, names in enumerate(LAYERS) for name in names}
OUTSIDE_PLANNER = {"os", "pathlib", "shutil", "tempfile", "time", "datetime", "random", "torch"}
LATE = {
    "torch",
    "rich",
    "numpy",
    "safetensors",
    "huggingface_hub",
    "fsspec",
    "transformers",
    "yaml",
}
ARITHMETIC = (
    *("ckptctl.storage.arithmetic", "ckptctl.storage.compare"),
    *("ckptctl.storage.compute_device", "ckptctl.storage.computed"),
    *("ckptctl.adapters.low_rank", "ckptctl.numerics.kinds", "ckptctl.verbs.statistics"),
    "ckptctl.references.transformers_process",
)
TRAINING = ("ckptctl.distributed", "ckptctl.integrations")


def layer(module: str) -> str:
    """Return the part of ``ckptctl`` that *module* belongs to."""
    return module.split(".")[1] if "." in module else "__init__"


def ours(module: str) -> bool:
    return module.partition(".")[0] == "ckptctl"


def inverted(item: Import) -> bool:
    """Whether *item* goes upwards or sideways."""
    if not ours(item.importer) or not ours(item.imported):
        return False
    above, below = layer(item.importer), layer(item.imported)
    if EXTENSIONS & {above, below} or {above, below} == {"runs", "verbs"}:
        return False
    if above == below or above == "__init__":
        return above == "__init__" and item.early and below != "__init__"
    return HEIGHT[above] <= HEIGHT[below]


def misplaced(item: Import) -> bool:
    """Whether *item* breaks a rule about ``converters``."""
    if item.importer.startswith("converters"):
        own = item.imported.startswith("converters") and item.relative
        return not own and item.imported not in ("ckptctl.planner.layouts", "dataclasses")
    return item.imported.startswith(("converters", "ckptctl.converters"))


def impure(item: Import) -> bool:
    """Whether the planner would see files, torch or a clock."""
    return (
        item.importer.startswith("ckptctl.planner")
        and item.imported.partition(".")[0] in OUTSIDE_PLANNER
    )


FILE_SYSTEM = ("ckptctl.remote.hub_buckets", "fsspec")
"""A file system of fsspec, which only fsspec and its store import."""


def heavy(item: Import) -> bool:
    """Whether importing the module pays for a library that few commands need."""
    if (item.importer, item.imported.partition(".")[0]) == FILE_SYSTEM:
        return False
    trains = item.importer.startswith(TRAINING)
    return item.early and not trains and item.imported.partition(".")[0] in LATE


def arithmetic(item: Import) -> bool:
    """Whether torch is imported where nothing is calculated."""
    return item.imported.partition(".")[0] == "torch" and not item.importer.startswith(
        (*ARITHMETIC, *TRAINING)
    )


RULES = {
    "imports go down, from layer to layer": inverted,
    "converters import planner.layouts only, families.py alone imports them": misplaced,
    "the planner sees no files, no torch and no clock": impure,
    "heavy libraries are imported inside functions": heavy,
    "torch is for arithmetic": arithmetic,
}


@pytest.mark.parametrize("rule", RULES)
def test_imports_obey_dependency_rule(rule: str) -> None:
    broken = sorted(str(item) for item in imports() if RULES[rule](item))
    assert not broken, f"{rule}:\n  " + "\n  ".join(broken)


def test_every_module_has_a_layer() -> None:
    layers = {layer(name) for name in trees() if ours(name)}
    assert layers <= HEIGHT.keys() | EXTENSIONS, "give the new ones a layer in LAYERS"


@pytest.mark.parametrize(
    ("rule", "importer", "source"),
    [
        ("imports go down, from layer to layer", "ckptctl.storage.x", "import ckptctl.formats"),
        ("imports go down, from layer to layer", "ckptctl.storage.x", "import ckptctl.families"),
        ("imports go down, from layer to layer", "ckptctl.verbs.x", "from ckptctl import cli"),
        ("imports go down, from layer to layer", "ckptctl", "from ckptctl import api"),
        (
            "converters import planner.layouts only, families.py alone imports them",
            "converters.x",
            "from ckptctl.planner.boxes import split_rows",
        ),
        (
            "converters import planner.layouts only, families.py alone imports them",
            "converters.x",
            "from converters import llama2",
        ),
        (
            "converters import planner.layouts only, families.py alone imports them",
            "ckptctl.verbs.x",
            "def f():\n    from converters import llama2",
        ),
        ("the planner sees no files, no torch and no clock", "ckptctl.planner.x", "import os.path"),
        ("heavy libraries are imported inside functions", "ckptctl.cli.x", "import rich.console"),
        ("torch is for arithmetic", "ckptctl.formats.x", "def f():\n    import torch"),
    ],
)
def test_dependency_rule_detects_forbidden_import(rule: str, importer: str, source: str) -> None:
    items = list(imports_of(importer, ast.parse(source), trees()))
    assert [item for item in items if RULES[rule](item)]


def test_only_storage_paths_calls_path_resolve():
    """``Path.resolve`` raises ``RuntimeError`` before Python 3.13, which ``real_path`` expects.

    What formats call ``resolve`` takes a catalog.
    """
    found = [
        f"{name}:{node.lineno}"
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "resolve"
        and not node.args
    ]
    assert [one.partition(":")[0] for one in found] == ["ckptctl.storage.paths"], found
