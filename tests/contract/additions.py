"""Formats, families, commands and modules of the program, with everything that each still needs.

``test_additions`` lists the needs. Other contract tests take only what needs nothing more, so that
one test fails for an addition that is not finished.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

import ckptctl
from ckptctl import families, formats, shared_options
from ckptctl.cli import schema
from ckptctl.cli.schema import get_documents_by_name
from ckptctl.formats.base import WritableFormat
from tests.checkpoints.golden import FOLDER, Golden, family_of, names
from tests.contract.commands import COMMANDS, LINES, SCENES
from tests.contract.samples import has_checkpoint
from tests.contract.support import INNER, READ, holds_llama
from tests.structure import modules, trees

REPOSITORY = Path(__file__).parents[2]
REFERENCE = REPOSITORY / "docs" / "reference"
PLUGINS = "ckptctl.plugins"
TEST = re.compile(r"tests/[\w/]+\.py")
TEXTS = ("recognized", "wholeness", "tested", "proof")
PEERS = {
    "DeepSpeed's": "deepspeed 0.19.8",
    "Lightning": "Lightning 2.6.6",
    "Megatron-Core": "Megatron-Core",
    "accelerate": "accelerate 1.15.0",
    "bytecheckpoint": "bytecheckpoint 0.0.2",
    "deepspeed": "deepspeed 0.19.8",
    "gguf": "gguf.dequantize",
    "llama-models": "llama_models",
    "mistral-inference": "mistral_inference",
    "peft": "peft",
    "safetensors": "safetensors",
    "torch": "torch 2.13.0",
    "torch_checkpointing": "torch_checkpointing 0.1.1",
    "torchsnapshot": "torchsnapshot 0.1.0",
    "torchtitan": "torchtitan 0.3.0",
    "torchtune": "torchtune",
    "transformers": "transformers",
    "verl": "verl 0.9.1",
}
"""Programs that proofs name, each with what shows in a test, or in the list of samples, that it was
used."""
FUNCTIONS = {name.replace("-", "_") for name in COMMANDS}
"""Names of the functions of commands in Python."""
NOT_IN_PYTHON = {
    "browse": "it is interactive; `inspect` returns the same data",
    "delta apply": "`ckptctl.delta.apply` is the function",
    "delta make": "`ckptctl.delta.make` is the function",
    "delta squash": "`ckptctl.delta.squash` is the function",
    "delta verify": "`ckptctl.delta.verify` is the function",
    "formats": "that name is the package's; a format is an object with attributes in Python",
    "schema": "it describes what commands print",
}


def format_needs(name: str) -> Iterator[str]:
    """List what the format called *name* lacks, each with its place."""
    known = formats.get_format(name)
    module = type(known).__module__
    place = modules(REPOSITORY)[module].relative_to(REPOSITORY)
    texts = [text for text in TEXTS if not vars(type(known)).get(text)]
    if isinstance(known, WritableFormat) and not known.ties:
        texts.append("ties")
    if texts:
        yield f"{place}: the texts {_quoted(texts)} of its class"
    if "proof" not in texts and not (TEST.search(known.proof) and peers_of(known.proof)):
        yield f"{place}: a test and the program of another project in `proof` (`PEERS`)"
    if isinstance(known, WritableFormat) and holds_llama(name) and name not in {*READ, *INNER}:
        yield "tests/checkpoints/readers.py: a reader in `READERS` that does not use ckptctl"
    elif not has_checkpoint(name):
        yield "tests/contract/samples.py: a checkpoint in `SAMPLES` or `BUILT`"
    if isinstance(known, WritableFormat) and name not in re.split(
        ", | or ", shared_options.FORMATS
    ):
        yield "ckptctl/shared_options.py: its name in `FORMATS`, the help of `--to`"
    if f"<!-- generated: {name} -->" not in (REFERENCE / "formats.md").read_text():
        section = f"## `{name}`\n\n<!-- generated: {name} -->\n<!-- end -->"
        yield f"docs/reference/formats.md: a section with the lines\n{_indented(section)}"


def peers_of(proof: str) -> set[str]:
    """Return the programs of :data:`PEERS` that a proof names."""
    return {peer for peer in PEERS if re.search(rf"(?<![\w.-]){re.escape(peer)}(?![\w/-])", proof)}


def family_needs(name: str) -> Iterator[str]:
    """List what the family called *name* lacks, each with its place."""
    found = families.family(name)
    place = f"converters/{name}.py"
    texts = [text for text in ("title", "architecture", "tiny") if not getattr(found, text)]
    if texts:
        yield f"{place}: {_quoted(texts)}"
    golden = (Golden.read(one) for one in names() if family_of(one) == name)
    digests = {layout for one in golden for layout in one.digests}
    if lacking := sorted({*found.layouts} - digests):
        folder = FOLDER.relative_to(REPOSITORY)
        yield (
            f"{folder}: digests of {_quoted(lacking)}. Add a tiny model to tests/oracle/tiny, and "
            "run `python -m tests.oracle.make_golden`"
        )
        yield "ckptctl/planner/config_defaults.py: run `python -m tests.oracle.make_defaults`"


def command_needs(name: str) -> Iterator[str]:
    """List what the command called *name* lacks, each with its place."""
    function = name.replace("-", "_")
    if name not in LINES:
        yield "tests/contract/commands.py: command lines in `LINES`, at least one that succeeds"
    if not any(f"{line} ".startswith(f"{name} ") for line in SCENES.values()):
        yield "tests/contract/commands.py: a command line in `SCENES`"
    if name not in NOT_IN_PYTHON:
        if function not in ckptctl.__all__:
            yield (
                f"ckptctl/__init__.py: a function `{function}` of ckptctl/api, or a reason in "
                "`NOT_IN_PYTHON` of tests/contract/additions.py"
            )
        if f"<!-- generated: {function} -->" not in (REFERENCE / "python.md").read_text():
            block = f"<!-- generated: {function} -->\n<!-- end -->"
            yield f"docs/reference/python.md: the lines\n{_indented(block)}"
    skill = (REPOSITORY / "docs" / "SKILL.md").read_text()
    if not re.search(rf"`{name}`|ckptctl {name}\b", skill):
        yield "docs/SKILL.md: a line that names it"


def module_needs(name: str) -> Iterator[str]:
    """List imports from ``ckptctl.plugins`` in a module, each with its replacement."""
    for node in ast.walk(trees()[name]):
        if isinstance(node, ast.Import) and any(one.name.startswith(PLUGINS) for one in node.names):
            yield f"the modules that define the names, instead of `{ast.unparse(node)}`"
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(PLUGINS):
            assert node.module
            sources = _sources(node.module)
            found = defaultdict(list)
            for alias in node.names:
                module, spelled = sources.get(alias.name, (node.module, alias.name))
                found[module].append(spelled)
            lines = (f"from {one} import {', '.join(found[one])}" for one in sorted(found))
            text = _indented("\n".join(lines))
            yield f"the modules that define the names, instead of `{node.module}`:\n{text}"


def _sources(plugins: str) -> dict[str, tuple[str, str]]:
    """Return where the names of a module of ``ckptctl.plugins`` come from, as they are imported."""
    nodes = (node for node in trees()[plugins].body if isinstance(node, ast.ImportFrom))
    return {
        alias.asname or alias.name: (str(node.module), ast.unparse(alias))
        for node in nodes
        for alias in node.names
    }


def _quoted(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())


NEEDS: Mapping[str, tuple[Collection[str], Callable[[str], Iterator[str]]]] = {
    "format": (formats.list_format_names(), format_needs),
    "model type": (families.list_built_in_types(), family_needs),
    "command": (COMMANDS, command_needs),
    "module": (modules(REPOSITORY), module_needs),
}
"""Names of each kind of addition, and the function that lists what one needs."""


@cache
def finished(kind: str) -> tuple[str, ...]:
    """Return the names of a kind of addition that need nothing more."""
    names, list_needs = NEEDS[kind]
    return tuple(name for name in names if not any(list_needs(name)))


def hide_unfinished(patch: pytest.MonkeyPatch) -> None:
    """Let the program know only formats, model types and commands that need nothing more."""
    known, shown, model_types = (
        formats.load_builtin_formats(),
        get_documents_by_name(),
        finished("model type"),
    )
    hidden = {*COMMANDS} - {*finished("command")}
    patch.setattr(formats, "load_builtin_formats", lambda: {name: known[name] for name in FORMATS})
    patch.setattr(families, "list_built_in_types", lambda: model_types)
    patch.setattr(
        schema, "get_documents_by_name", lambda: {n: shown[n] for n in shown if n not in hidden}
    )


FORMATS = finished("format")
