"""Rooms of the program, imports between its modules, and figures about the structure of its code.

``python -m tests.structure`` prints the picture of the rooms and the figures. With
``CKPTCTL_UPDATE_SNAPSHOTS=1`` it also writes them into ``architecture.md`` and ``structure.md`` of
``docs/contributing``. ``tests/contract/test_rooms.py`` checks both.
"""

from __future__ import annotations

import ast
import gc
import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
CONTRIBUTING = REPOSITORY / "docs" / "contributing"
PICTURE = CONTRIBUTING / "architecture.md"
FIGURES = CONTRIBUTING / "structure.md"
BLOCK = re.compile(r"(<!-- generated: \w+ -->\n\n).*?(\n<!-- end -->\n)", re.DOTALL)
ROW = re.compile(r"^\| ([^|]+?) \| ([\d,]+) \|$", re.MULTILINE)
ROOMS = {
    "shared": ("ckptctl",),
    "planner": ("ckptctl.planner", "ckptctl.numerics.quantization"),
    "storage": ("ckptctl.storage",),
    "conversion": (
        *("ckptctl.conversion", "ckptctl.families", "ckptctl.option_checks", "ckptctl.ranks"),
        *("ckptctl.shared_options", "ckptctl.numerics.quantized", "ckptctl.formats.__init__"),
        *("ckptctl.formats.base", "ckptctl.formats.checksums", "ckptctl.formats.foreign"),
        *("ckptctl.formats.sidecar_files", "ckptctl.formats.shared.findings"),
        *("ckptctl.formats.shared.leaves", "ckptctl.formats.shared.stored_leaves"),
        "ckptctl.formats.shared.tags",
    ),
    "formats": ("ckptctl.formats",),
    "numerics": ("ckptctl.numerics",),
    "adapters": ("ckptctl.adapters",),
    "facts": ("ckptctl.facts", "ckptctl.references"),
    "fit": ("ckptctl.fit",),
    "remote": ("ckptctl.remote",),
    "converters": ("converters",),
    "verbs": ("ckptctl.verbs",),
    "runs": ("ckptctl.runs", "ckptctl.run_options"),
    "training": ("ckptctl.save_load", "ckptctl.distributed"),
    "cli": (
        *("ckptctl.__init__", "ckptctl.__main__", "ckptctl.api", "ckptctl.cli"),
        *("ckptctl.plugins", "ckptctl.pre_commit"),
    ),
    "integrations": ("ckptctl.integrations",),
}
"""The modules of each room, with all that is inside them; the longest name that fits applies."""

LEVELS = (
    ("shared", "planner", "storage", "conversion"),
    ("formats", "numerics", "adapters", "facts", "fit", "remote", "converters"),
    ("verbs", "runs", "training"),
    ("cli", "integrations"),
)
"""The rooms, the core first. A module imports nothing of a later level."""

TITLES = ("core", "extensions", "operations", "front ends")
"""Names of the levels."""

LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
PLACES = {module: room for room, modules in ROOMS.items() for module in modules}
MOST_PARAMETERS = 8
MOST_LINES = 60
PROSE = {
    *("absent", "advice", "doubts", "dropped", "explanation", "findings", "hint", "hints"),
    *("lacking", "lacks", "left_out", "missing", "note", "notes", "problem", "problems", "reason"),
    *("reasons", "refused", "remark", "remarks", "said", "skipped", "text", "told", "uncompared"),
    *("unexpected", "unknown", "unread", "unsupported", "unusable", "warning", "warnings", "why"),
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Import:
    """One imported module.

    Attributes:
        importer: Dotted name of the module that imports.
        imported: Dotted name of the imported module.
        line: Line of the statement.
        early: Whether importing *importer* executes the statement.
        relative: Whether it is ``from . import``.
        inside: Whether the statement is inside a function.
    """

    importer: str
    imported: str
    line: int
    early: bool
    relative: bool = False
    inside: bool = False

    def __str__(self) -> str:
        when = "" if self.early else " (late)"
        return f"{self.importer}:{self.line} imports {self.imported}{when}"


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules(root: Path) -> dict[str, Path]:
    files = (file for name in ("ckptctl", "converters") for file in (root / name).rglob("*.py"))
    return {module_name(file, root): file for file in sorted(files)}


@cache
def parse_module(path: Path) -> ast.Module:
    """Parse a module once: several tests look through all of them."""
    return ast.parse(path.read_text())


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a module."""
    return tuple(ast.walk(parse_module(path)))


@cache
def trees() -> Mapping[str, ast.Module]:
    """Parse every module of the program.

    Without the garbage collector, which would walk the trees again and again, this takes half the
    time.
    """
    gc.disable()
    found = {name: parse_module(path) for name, path in modules(REPOSITORY).items()}
    gc.freeze()
    gc.enable()
    return found


def imported_from(name: str, node: ast.ImportFrom) -> str:
    """Return the absolute name of the module in ``from ... import``.

    Families import each other relatively, because a wheel has them elsewhere; nobody else does.
    """
    if name.startswith("converters.") and node.level == 1 and not node.module:
        return "converters"
    assert node.level == 0 and node.module, f"{name}:{node.lineno}: a relative import"
    return node.module


def imports_of(name: str, tree: ast.Module, known: Collection[str]) -> Iterator[Import]:
    """Yield the imports of module *name*; ``from a import b`` is ``a.b`` if that is a module."""
    stack: list[tuple[ast.AST, bool, bool]] = [(tree, True, False)]
    while stack:
        node, early, inside = stack.pop()
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(name, alias.name, node.lineno, early, inside=inside)
        elif isinstance(node, ast.ImportFrom):
            source = imported_from(name, node)
            for alias in node.names:
                whole = f"{source}.{alias.name}"
                imported = whole if whole in known else source
                yield Import(name, imported, node.lineno, early, bool(node.level), inside)
        early &= not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
        inside |= isinstance(node, Function)
        stack += [(child, early and not inside, inside) for child in _blocks(node)]


def _blocks(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements directly inside *node*, and the clauses that contain others."""
    clauses = ast.stmt | ast.excepthandler | ast.match_case
    return (child for child in ast.iter_child_nodes(node) if isinstance(child, clauses))


@cache
def imports() -> tuple[Import, ...]:
    """Return all imports of all modules, including those inside functions.

    Those of ``ckptctl.plugins``, which is for other packages, are left to ``test_additions``.
    """
    known = trees()
    items = (item for name, tree in known.items() for item in imports_of(name, tree, known))
    return tuple(item for item in items if not item.imported.startswith("ckptctl.plugins."))


def own(items: Iterable[Import]) -> Iterator[Import]:
    """Yield imports of other modules of the program."""
    return (i for i in items if i.imported in trees() and i.imported != i.importer)


def edges(items: Iterable[Import]) -> dict[str, set[str]]:
    """Return the modules that each module imports."""
    found = defaultdict(set)
    for item in items:
        found[item.importer].add(item.imported)
    return found


def circles(graph: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or through others.

    A group is sorted. It is the set of modules that *graph* leads to from a module and back.
    """
    reached = {module: _reachable(graph, module) for module in graph}
    groups = {
        tuple(sorted(other for other in found if module in reached.get(other, ())))
        for module, found in reached.items()
        if module in found
    }
    return [list(group) for group in sorted(groups)]


def _reachable(graph: Mapping[str, Collection[str]], start: str) -> set[str]:
    found: set[str] = set()
    stack = list(graph.get(start, ()))
    while stack:
        module = stack.pop()
        if module not in found:
            found.add(module)
            stack += graph.get(module, ())
    return found


def room(module: str) -> str:
    """Return the room of *module*."""
    if f"{module}.__init__" in PLACES:
        return PLACES[f"{module}.__init__"]
    while module not in PLACES:
        module = module.rpartition(".")[0]
    return PLACES[module]


def violations(items: Iterable[Import]) -> set[tuple[str, str]]:
    """Return importer and imported module of *items* that lead from a room to a later level."""
    return {
        (i.importer, i.imported) for i in items if LEVEL[room(i.importer)] < LEVEL[room(i.imported)]
    }


def figures() -> dict[str, int]:
    """Count what a reader has to keep in mind. Less is better, in every row."""
    sources = [path.read_text() for path in modules(REPOSITORY).values()]
    functions = [node for node in _statements() if isinstance(node, Function)]
    words = Counter(word for text in sources for word in re.findall(r"[A-Za-z_]\w*", text))
    graph = edges(own(imports()))
    importers = Counter(
        imported for found in graph.values() for imported in found if imported.startswith("ckptctl")
    )
    loops = circles(graph)
    late = {(i.importer, i.imported) for i in own(imports()) if i.inside}
    classes = [node for node in _statements() if isinstance(node, ast.ClassDef)]
    errors = error_names(classes)
    return {
        "lines of `ckptctl` and `converters`": sum(text.count("\n") for text in sources),
        "modules of `ckptctl`": sum(name.startswith("ckptctl") for name in trees()),
        "modules with one importer": sum(count == 1 for count in importers.values()),
        "imports of own modules inside functions": len(late),
        "circles of imports": len(loops),
        "modules in circles": sum(map(len, loops)),
        "most own modules imported by one module": max(map(len, graph.values())),
        "functions with more than 8 parameters": sum(
            parameters(node) > MOST_PARAMETERS for node in functions
        ),
        "functions over 60 lines": sum(lines(node) > MOST_LINES for node in functions),
        "private functions named at one other place": sum(
            bool(re.match("_[^_]", node.name)) and words[node.name] == 2 for node in functions
        ),
        "exceptions to the directions": len(violations(own(imports()))),
        "fields that carry prose": sum(
            carries_prose(field) for node in classes for field in node.body
        ),
        "`require_*` functions": sum(
            node.name.lstrip("_").startswith("require_") for node in functions
        ),
        "helpers that only build an error": sum(builds_error(node, errors) for node in functions),
    }


@cache
def _statements() -> tuple[ast.AST, ...]:
    found: list[ast.AST] = list(trees().values())
    for node in found:
        found += _blocks(node)
    return tuple(found)


def parameters(function: Function) -> int:
    """Count the parameters of *function*, without ``self`` and ``cls``."""
    args = function.args
    names = [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def lines(node: Function) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def carries_prose(node: ast.stmt) -> bool:
    """Check whether *node* declares text or findings, one or several, under a name of a note."""
    return (
        isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and node.target.id in PROSE
        and bool(re.search(r"\b(str|Finding)\b", ast.unparse(node.annotation)))
    )


def error_names(classes: Collection[ast.ClassDef]) -> set[str]:
    """Return the names of exceptions, those that *classes* define included."""
    found = {"Exception", "OSError", "ValueError"}
    while True:
        derived = {c.name for c in classes if found & {ast.unparse(base) for base in c.bases}}
        if derived <= found:
            return found
        found |= derived


def builds_error(function: Function, errors: Collection[str]) -> bool:
    """Check whether *function* returns an exception for its caller to raise."""
    return function.returns is not None and ast.unparse(function.returns) in errors


def draw_rooms() -> str:
    """Draw the levels with the sizes of their rooms, in the language of Mermaid.

    Dotted arrows are imports against the directions.
    """
    sizes: dict[str, list[int]] = defaultdict(list)
    for name, path in modules(REPOSITORY).items():
        sizes[room(name)].append(path.read_text().count("\n"))
    lines = ["```mermaid", "flowchart TD"]
    for title, rooms in reversed(tuple(zip(TITLES, LEVELS, strict=True))):
        lines.append(f'  {title.split()[0]}["`**{title}**')
        lines += (f"  {one}: {len(sizes[one])} modules, {sum(sizes[one]):,} lines" for one in rooms)
        lines[-1] += '`"]'
    names = [title.split()[0] for title in TITLES]
    lines.append("  " + " --> ".join(reversed(names)))
    against = violations(own(imports()))
    levels = Counter((LEVEL[room(importer)], LEVEL[room(other)]) for importer, other in against)
    for (low, high), count in sorted(levels.items()):
        lines.append(f'  {names[low]} -. "{count} exceptions" .-> {names[high]}')
    return "\n".join((*lines, "```\n"))


def render(counts: Mapping[str, int]) -> str:
    """Return *counts* as the table of the page."""
    rows = "".join(f"| {name} | {count:,} |\n" for name, count in counts.items())
    return f"| figure | count |\n| --- | ---: |\n{rows}"


def read_block(page: Path) -> str:
    """Return the generated block of *page*."""
    block = BLOCK.search(page.read_text())
    assert block, f"{page.name} has no generated block"
    return block[0][len(block[1]) : -len(block[2])]


def write_block(page: Path, text: str) -> None:
    """Replace the generated block of *page*."""
    page.write_text(BLOCK.sub(lambda block: f"{block[1]}{text}{block[2]}", page.read_text()))


def stated() -> dict[str, int]:
    """Return the figures that the page states."""
    rows = ROW.findall(read_block(FIGURES))
    return {name: int(count.replace(",", "")) for name, count in rows}


def main() -> None:
    texts = {PICTURE: draw_rooms(), FIGURES: render(figures())}
    for page, text in texts.items():
        print(text, end="")
        if os.environ.get("CKPTCTL_UPDATE_SNAPSHOTS"):
            write_block(page, text)


if __name__ == "__main__":
    main()
