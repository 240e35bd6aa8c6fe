"""What trainers record of the model beside Megatron-Core's checkpoint.

::

    iter_0000010/run_config.yaml              Megatron-Bridge
    iter_0000010/args.json, or above it       ms-swift
    step=10-last/context/model.yaml, io.json  NeMo 2, beside weights/
    actor/transformer_config.json             verl, beside dist_ckpt/

NeMo 2's ``io.json`` is Fiddle's JSON of a ``TrainerContext``, read as data::

    {"root": {"type": "ref", "key": "trainer_context_1"},
     "objects": {"llama3_config8_b_1": {
        "type": {"type": "pyref", "module": "fiddle._src.config", "name": "Config"},
        "items": [["Attr(name='num_layers')", {"type": "leaf", "value": 2}], ...],
        "metadata": {"type": "ref", "key": "buildable_traverser_metadata_1"}}, ...}}

What a configuration builds is the ``fn_or_cls`` of its metadata. Only arguments that were given are
there. Nothing is imported or called.

Sources: ``megatron/bridge/training/utils/checkpoint_utils.py``; ``nemo/lightning/io/mixin.py``
(``io_dump``); ``fiddle/_src/experimental/serialization.py`` (0.3.1);
``verl/utils/megatron_utils.py``; ms-swift's ``megatron/arguments``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ckptctl.errors import UnsupportedError
from ckptctl.formats.mcore.files import RUN_CONFIG
from ckptctl.formats.shared.findings import Faults
from ckptctl.planner.configs.megatron import TARGET
from ckptctl.storage.files import source_files
from ckptctl.storage.json_reader import read_json
from ckptctl.storage.paths import is_there
from ckptctl.storage.schema import find
from ckptctl.storage.yaml_text import LARGEST, parsed
from ckptctl.units import counted

ABOVE, IO = "../", "io.json"
LARGEST_JSON = 4 << 20
"""So many bytes of JSON are read: ``io.json`` has each object that NeMo made."""
FILES = (
    RUN_CONFIG,
    "args.json",
    f"{ABOVE}args.json",
    f"{ABOVE}transformer_config.json",
    f"{ABOVE}context/model.yaml",
    f"{ABOVE}context/{IO}",
)
"""As seen from the checkpoint; the last one says less than the one before it."""
DEEPEST, MOST = 64, 100_000
"""Levels and values of a model's configuration; references may repeat values, or go round."""
_STEP = re.compile(r"(?:Attr\(name|Key\(key)='(.*)'\)", re.DOTALL)
_ITSELF = "fn_or_cls"


def records(
    folder: Path, arguments: Mapping[str, Mapping[str, object]], faults: Faults
) -> dict[str, Mapping[str, object]]:
    """Return what is recorded of the model whose checkpoint is *folder*, by file.

    *arguments* are the trainer's, likewise.
    """
    found = {name: told for name, told in arguments.items() if told}
    for name in FILES:
        file = folder.parent / name.removeprefix(ABOVE) if name.startswith(ABOVE) else folder / name
        if is_there(file) and not (file.name == IO and FILES[-2] in found):
            record = faults.read(file.name, _reader(file.parent))
            if record:
                found[name] = record
    return found


def _reader(home: Path) -> Callable[[str], Mapping[str, object]]:
    def read(name: str) -> Mapping[str, object]:
        with source_files(home) as files:
            where = str(home / name)
            if name.endswith(".json"):
                content = read_json(files, name, LARGEST_JSON, constants=True)
                if isinstance(content, dict):
                    return model_in(content, where) if name == IO else content
                raise UnsupportedError("this JSON is not a configuration", where=where)
            size = files.size(name)
            if size > LARGEST:
                raise UnsupportedError(
                    "this YAML file is too large for a configuration",
                    where=where,
                    why=f"it has {counted(size, 'byte')}; the limit is {LARGEST:,}",
                )
            return parsed(files.read(name, 0, size).decode(errors="replace"), where)

    return read


def model_in(document: Mapping[str, object], where: str) -> dict[str, object]:
    """Return the configuration of the model, as ``model.yaml`` has it; empty: there is none.

    Raises:
        UnsupportedError: It is no configuration.
    """
    reader = _Reader(find(dict[str, object], document, "objects") or {})
    try:
        items = dict(reader.items(reader.followed(document.get("root"))))
        model = reader.value(items.get("model"), 0)
    except (LookupError, TypeError, ValueError) as error:
        raise UnsupportedError(
            "this JSON is not a configuration", where=where, why=str(error)[:200]
        ) from error
    return model if isinstance(model, dict) else {}


class _Reader:
    """Makes plain values of what the document says of objects."""

    def __init__(self, objects: Mapping[str, object]) -> None:
        self._objects, self._seen = objects, 0

    def followed(self, node: object) -> object:
        """Return what *node* refers to, or itself."""
        refers = isinstance(node, dict) and node.get("type") == "ref"
        return self._objects[str(node["key"])] if refers else node  # type: ignore[index]

    def items(self, node: object) -> Iterator[tuple[str, object]]:
        """Yield the parts of an object by their names; those of a list by their places."""
        for step, part in find(list[Any], node, "items") or ():
            named = _STEP.fullmatch(str(step))
            yield (named[1] if named else str(step)), part

    def value(self, node: object, depth: int) -> object:
        """Return what *node* is."""
        self._seen += 1
        if depth > DEEPEST or self._seen > MOST:
            raise ValueError("it contains more than a model configuration, or refers to itself")
        node = self.followed(node)
        if not isinstance(node, dict):
            return node
        if node.get("type") == "leaf":
            return node.get("value")
        if node.get("type") == "pyref":
            return {TARGET: _named(node)}
        inside = {name: self.value(part, depth + 1) for name, part in self.items(node)}
        kind = _named(node.get("type"))
        if kind in ("builtins.list", "builtins.tuple"):
            return list(inside.values())
        made = dict(self.items(self.followed(node.get("metadata")))).get(_ITSELF)
        return inside if made is None else {TARGET: _named(made), **inside}


def _named(node: object) -> str:
    """Return the name of a class or function."""
    return f"{node.get('module')}.{node.get('name')}" if isinstance(node, dict) else ""
