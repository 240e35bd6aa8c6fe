"""The core imports nothing that is registered with it, and modules do not import in circles.

:data:`ROOMS` says which room a module belongs to, by the longest prefix of its name. ``rooms.txt``
lists what still breaks the two rules. The list may only shrink: what is not in it is an error, and
so is a line of it that no longer holds. Imports inside functions and under ``TYPE_CHECKING`` count.
``CKPTCTL_UPDATE_SNAPSHOTS=1`` removes the lines that no longer hold, and adds none.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.contract.test_dependencies import REPOSITORY, Import, modules, ours, read

ROOMS: Mapping[str, str] = {
    "ckptctl": "core",
    "ckptctl.planner.configs": "facts",
    "ckptctl.planner.families.facts": "facts",
    "ckptctl.planner.quantization": "numerics",
    "ckptctl.storage.arithmetic": "numerics",
    "ckptctl.storage.kinds": "numerics",
    "ckptctl.storage.low_rank": "numerics",
    "ckptctl.storage.remote": "remote",
    "ckptctl.formats": "formats",
    "ckptctl.ops": "verbs",
    "ckptctl.ops.conversion": "core",
    "ckptctl.ops.conversion.quantizing": "numerics",
    "ckptctl.ops.conversion.training": "training",
    "ckptctl.ops.conversion.upload": "remote",
    "ckptctl.ops.options": "core",
    "ckptctl.ops.destinations": "core",
    "ckptctl.ops.sources": "core",
    "ckptctl.ops.recognition": "core",
    "ckptctl.ops.recognition.agreement": "facts",
    "ckptctl.ops.recognition.quantized": "numerics",
    "ckptctl.ops.adapter_targets": "adapters",
    "ckptctl.ops.adapters": "adapters",
    "ckptctl.ops.conversion.adapter_files": "adapters",
    "ckptctl.ops.expert_adapters": "adapters",
    "ckptctl.ops.expert_stacks": "adapters",
    "ckptctl.ops.lora_extraction": "adapters",
    "ckptctl.ops.merging": "adapters",
    "ckptctl.ops.parameter_adapters": "adapters",
    "ckptctl.ops.loading": "training",
    "ckptctl.ops.ranks": "training",
    "ckptctl.ops.runs": "runs",
    "ckptctl.ops.saving": "training",
    "ckptctl.distributed": "training",
    "ckptctl.integrations": "integrations",
    "ckptctl.api": "cli",
    "ckptctl.cli": "cli",
    "ckptctl.plugins": "cli",
}
EXCEPTIONS = Path(__file__).with_name("rooms.txt")
ARROW, CIRCLE = " -> ", "circle: "


def room_of(module: str) -> str:
    """Return the room of *module*."""
    while module not in ROOMS:
        module = module.rpartition(".")[0]
    return ROOMS[module]


def leaves_core(item: Import) -> bool:
    """Whether the core imports an extension."""
    inside = ours(item.importer) and ours(item.imported) and item.importer != "ckptctl"
    return inside and room_of(item.importer) == "core" != room_of(item.imported)


def circles(imports: Iterable[Import]) -> Iterator[list[str]]:
    """Yield the largest groups of modules of which each imports each other, through others too.

    A module that imports a part of its own package does not need the package's ``__init__``.
    Source: Tarjan, "Depth-first search and linear graph algorithms" (1972), with a stack of ours.
    """
    targets: dict[str, set[str]] = {}
    for item in imports:
        if ours(item.importer) and ours(item.imported) and item.importer != item.imported:
            targets.setdefault(item.importer, set()).add(item.imported)
            targets.setdefault(item.imported, set())
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    for start in sorted(targets):
        pending: list[tuple[str, Iterator[str]]] = []
        if start not in number:
            pending.append((start, iter(())))
        while pending:
            module, rest = pending.pop()
            if module not in number:
                number[module] = lowest[module] = len(number)
                path.append(module)
                rest = iter(sorted(targets[module]))
            for target in rest:
                if target not in number:
                    pending += [(module, rest), (target, iter(()))]
                    break
                if target in path:
                    lowest[module] = min(lowest[module], lowest[target], number[target])
            else:
                if lowest[module] == number[module]:
                    place = path.index(module)
                    group = sorted(path[place:])
                    del path[place:]
                    if len(group) > 1:
                        yield group
                elif pending:
                    above = pending[-1][0]
                    lowest[above] = min(lowest[above], lowest[module])


@cache
def violations() -> frozenset[str]:
    """Return what breaks the rules today, a line each."""
    imports = read(REPOSITORY)
    outward = {f"{i.importer}{ARROW}{i.imported}" for i in imports if leaves_core(i)}
    return frozenset({*outward, *(CIRCLE + " ".join(group) for group in circles(imports))})


def exceptions() -> list[str]:
    return [line for line in EXCEPTIONS.read_text().splitlines() if line]


def unknown() -> set[str]:
    """Return what breaks the rules and is not listed; a part of a listed circle is."""
    listed = [set(line.split()) for line in exceptions() if line.startswith(CIRCLE)]
    return {
        line
        for line in violations().difference(exceptions())
        if not any(set(line.split()) <= members for members in listed)
    }


def test_nothing_new_breaks_the_rules() -> None:
    assert not unknown(), "not in rooms.txt:\n  " + "\n  ".join(sorted(unknown()))


def test_the_list_of_exceptions_only_shrinks() -> None:
    current = sorted(violations() - unknown())
    if os.environ.get("CKPTCTL_UPDATE_SNAPSHOTS"):
        EXCEPTIONS.write_text("".join(f"{line}\n" for line in current))
    ended = set(exceptions()).difference(current)
    assert not ended, "remove from rooms.txt what is no longer so:\n  " + "\n  ".join(sorted(ended))
    assert exceptions() == current


def test_every_prefix_is_that_of_a_module() -> None:
    assert set(ROOMS) <= set(modules(REPOSITORY))


@pytest.mark.parametrize(
    ("importer", "imported", "broken"),
    [
        ("ckptctl.planner.plan", "ckptctl.formats", True),
        ("ckptctl.storage.files", "ckptctl.storage.remote.urls", True),
        ("ckptctl.ops.conversion.convert", "ckptctl.planner.quantization.recipes", True),
        ("ckptctl.formats.hf", "ckptctl.planner.plan", False),
        ("ckptctl.planner.plan", "ckptctl.planner.boxes", False),
    ],
)
def test_what_leaves_the_core(importer: str, imported: str, broken: bool) -> None:
    assert leaves_core(Import(importer, imported, 1, early=False)) == broken


def test_circles_are_found() -> None:
    pairs = [("a", "b"), ("b", "c"), ("c", "a"), ("c", "d"), ("d", "e"), ("e", "d"), ("e", "f")]
    imports = [Import(f"ckptctl.{a}", f"ckptctl.{b}", 1, early=True) for a, b in pairs]
    found = [[name.removeprefix("ckptctl.") for name in group] for group in circles(imports)]
    assert sorted(found) == [["a", "b", "c"], ["d", "e"]]
