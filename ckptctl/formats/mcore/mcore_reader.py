"""Read a Megatron-Core checkpoint, with canonical tensor names and the records of the trainer.

Trainers record the model configuration next to it::

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

The class that a configuration builds is the ``fn_or_cls`` of its metadata. Only arguments that were
passed explicitly are recorded. Nothing is imported or called.

Sources: ``megatron/bridge/training/utils/checkpoint_utils.py``; ``nemo/lightning/io/mixin.py``
(``io_dump``); ``fiddle/_src/experimental/serialization.py`` (0.3.1);
``verl/utils/megatron_utils.py``; ms-swift's ``megatron/arguments``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckptctl.catalog import Blob, Catalog, Finding
from ckptctl.errors import DamagedError, UnsupportedError
from ckptctl.facts import MEGATRON
from ckptctl.facts.megatron import TARGET_KEY
from ckptctl.facts.megatron_adapter import to_peft_config
from ckptctl.formats.base import ReadOptions
from ckptctl.formats.dcp.dcp_reader import catalog_of, read_metadata, with_leaves
from ckptctl.formats.mcore.factors import in_order
from ckptctl.formats.mcore.joining import canonical
from ckptctl.formats.mcore.mcore_files import (
    ACTOR,
    COMMON,
    COMMON_STATE,
    MARK,
    METADATA,
    RUN_CONFIG,
    names_common,
    passed_over,
    require_finished,
    save_folder,
)
from ckptctl.formats.mcore.objects import canonical_objects, object_name
from ckptctl.formats.peft import adapter_config
from ckptctl.formats.shared.findings import UNUSABLE, Faults, of_error
from ckptctl.formats.shared.leaves import require_harmless
from ckptctl.formats.shared.stored_leaves import NO_CHECKSUMS, Leaves, leaves_in
from ckptctl.formats.sidecar_files import ADAPTER, CONFIGURATION, documents
from ckptctl.planner.config_facts import Json
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.json_reader import read_json
from ckptctl.storage.paths import is_present
from ckptctl.storage.pickles.inert import Inert
from ckptctl.storage.schema import find_member, malformed_errors, read_as
from ckptctl.storage.yaml_text import MAX_TEXT_LENGTH, parse_yaml
from ckptctl.storage.zips.zip_reader import KEEPING_TABLE, read_archive
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

ARGUMENTS = "args"
OWN = (COMMON, MARK, RUN_CONFIG, ADAPTER)
MAX_VALUES = 1 << 19
"""Limit for unsharded values; usually, these are a few thousand in less than a megabyte."""


def read(path: TreePath, asked: ReadOptions, name: str) -> Catalog:
    """Read the catalog of the folder *path* (see :meth:`Format.read`)."""
    folder = save_folder(path, asked.tag)
    with source_files(folder) as files:
        require_finished(files)
        faults = Faults(folder, asked.partial)
        leaves, origin = read_metadata(files, METADATA)
        catalog = catalog_of(files, leaves, name, faults)
        inside = catalog.blobs.get(object_name(COMMON_STATE, (), ()))
        common = _common(files, faults) if inside is None else _common_state(files, inside, faults)
        place = COMMON if inside is None else COMMON_STATE
        require_harmless(common.blobs.values(), str(folder / place))
        arguments = trainer_arguments(common.blobs)
        catalog = canonical(catalog, faults, arguments)
        around = folder.parent / CONFIGURATION  # verl's
        described = documents(around) if around.is_dir() else {}
        others = {file: why for file, why in catalog.others.items() if file not in OWN}
        blobs = {n: blob for n, blob in catalog.blobs.items() if blob is not inside}
        catalog = replace(catalog, blobs=canonical_objects(blobs), others=others)
        catalog = replace(catalog, save_id=origin.save_id, world=origin.world)
        if inside is not None or is_present(folder / COMMON):
            file = COMMON if inside is None else inside.file or ""
            catalog = with_leaves(files, catalog, file, common)
        recorded = records(folder, {place: arguments}, faults)
        catalog = in_order(catalog, recorded)
    other = passed_over(path, folder)
    others_findings = tuple(_other_findings(folder, path, other, asked, name)) if other else ()
    note = (
        f"the checkpoint contains two models; this is the actor. Pass `{other}` for the other one"
    )
    documented: dict[str, Json] = {**described, **catalog.documents}
    if stated := to_peft_config(recorded.get(RUN_CONFIG, {})):
        documented[ADAPTER] = {**adapter_config(folder).get(ADAPTER, {}), **stated}
    return replace(
        catalog,
        extensions={MEGATRON: recorded} if recorded else {},
        documents=documented,
        findings=(*faults.findings, *others_findings),
        notes=(*catalog.notes, *((note,) * bool(other))),
    )


def _other_findings(
    folder: TreePath, path: TreePath, other: str, asked: ReadOptions, name: str
) -> Iterator[Finding]:
    """Raise, or yield findings, for problems of the *other* model of the step *path*.

    A step is complete only if both models are. The tensors are read from *folder*, which can be
    used separately.
    """
    home = save_folder(path / other, None)
    try:
        found = read(path / other, ReadOptions(partial=asked.partial), name).findings
    except UNUSABLE as error:
        if not asked.partial:
            error.hint = f"pass `{path / ACTOR}` to read only the actor"
            raise
        found = (of_error(error, home),)
    for one in found:
        place = os.path.relpath(home / (one.file or ""), folder)
        why = f"`{one.tensor}`: {one.why}" if one.tensor else one.why
        yield replace(one, file=place, tensor=None, why=why)


def _common(files: SourceFiles, faults: Faults) -> Leaves:
    """Read the unsharded values, with inert records for objects of Megatron's classes."""
    if not is_present(files.root / COMMON):
        if names_common(files):
            why = f"{MARK} states that Megatron wrote it"
            error = DamagedError(f"`{COMMON}` is missing", where=str(files.root), why=why)
            faults.unreadable(error, COMMON)
        return Leaves()
    return faults.read(COMMON, lambda name: _leaves(files, (name, 0, None))) or Leaves()


def _common_state(files: SourceFiles, blob: Blob, faults: Faults) -> Leaves:
    """Read the unsharded values from an object, which is a list of one dictionary."""
    try:
        return _leaves(files, (blob.file or "", blob.offset, blob.nbytes), blob.name)
    except UNUSABLE as error:
        faults.unreadable(error, tensor=blob.name)
        return Leaves()


def _leaves(
    files: SourceFiles, at: tuple[str, int, int | None], listed: str | None = None
) -> Leaves:
    """Read the dictionary at a place, or the list of one called *listed* that contains it.

    Raises:
        UnsupportedError: It is not a dictionary, or it is too large to be Megatron's.
    """
    where = str(files.root / at[0])
    archive = read_archive(files, *at, unknown="inert", table=KEEPING_TABLE, max_values=MAX_VALUES)
    what = f"`{listed or at[0]}` does not have the form that Megatron-Core writes"
    with malformed_errors(what, where):
        root = archive.root if listed is None else read_as(tuple[object], archive.root)[0]
        content = read_as(dict[object, object], root)
    found = leaves_in(content, at[0])
    found.notes[:0] = () if archive.checksums or listed else (NO_CHECKSUMS,)
    return found


def trainer_arguments(blobs: Mapping[str, Blob]) -> dict[str, object]:
    """Return Megatron's training arguments in ``common.pt``."""
    record = blobs[ARGUMENTS].value if ARGUMENTS in blobs else None
    state = record.state if isinstance(record, Inert) else record
    if isinstance(state, dict):
        return {key: value for key, value in state.items() if isinstance(key, str)}
    below = ((blob.path, blob.value) for blob in blobs.values())
    named = (pair for pair in below if pair[0][:1] == (ARGUMENTS,) and len(pair[0]) == 2)
    return {str(path[1]): value for path, value in named}


ABOVE, IO = "../", "io.json"
LARGEST_JSON = 4 << 20
"""Limit in bytes for JSON files; ``io.json`` contains every object that NeMo created."""
FILES = (
    RUN_CONFIG,
    "args.json",
    f"{ABOVE}args.json",
    f"{ABOVE}transformer_config.json",
    f"{ABOVE}context/model.yaml",
    f"{ABOVE}context/{IO}",
)
"""Paths relative to the checkpoint; the last is only read without the one before it."""
DEEPEST, MOST = 64, 100_000
"""Limits for nested levels and values, as references can repeat values or form cycles."""
_STEP = re.compile(r"(?:Attr\(name|Key\(key)='(.*)'\)", re.DOTALL)
_ITSELF = "fn_or_cls"


def records(
    folder: TreePath, arguments: Mapping[str, Mapping[str, object]], faults: Faults
) -> dict[str, Mapping[str, object]]:
    """Read the trainer's records of the model in *folder*, by file.

    *arguments* are those of the trainer, also by file.
    """
    found = {name: told for name, told in arguments.items() if told}
    for name in FILES:
        file = folder.parent / name.removeprefix(ABOVE) if name.startswith(ABOVE) else folder / name
        if is_present(file) and not (file.name == IO and FILES[-2] in found):
            record = faults.read(file.name, _reader(file.parent))
            if record:
                found[name] = record
    return found


def _reader(home: TreePath) -> Callable[[str], Mapping[str, object]]:
    def read(name: str) -> Mapping[str, object]:
        with source_files(home) as files:
            where = str(home / name)
            if name.endswith(".json"):
                content = read_json(files, name, LARGEST_JSON, constants=True)
                if isinstance(content, dict):
                    return model_in(content, where) if name == IO else content
                raise UnsupportedError("this JSON is not a configuration", where=where)
            size = files.size(name)
            if size > MAX_TEXT_LENGTH:
                raise UnsupportedError(
                    "this YAML file is too large for a configuration",
                    where=where,
                    why=f"it has {pluralize(size, 'byte')}; the limit is {MAX_TEXT_LENGTH:,}",
                )
            return parse_yaml(files.read(name, 0, size).decode(errors="replace"), where)

    return read


def model_in(document: Mapping[str, object], where: str) -> dict[str, object]:
    """Return the model configuration in NeMo 2's ``io.json``, or an empty dict.

    Raises:
        UnsupportedError: The document is not a configuration.
    """
    reader = _Reader(find_member(dict[str, object], document, "objects") or {})
    try:
        items = dict(reader.items(reader.followed(document.get("root"))))
        model = reader.value(items.get("model"), 0)
    except (LookupError, TypeError, ValueError) as error:
        raise UnsupportedError(
            "this JSON is not a configuration", where=where, why=str(error)[:200]
        ) from error
    return model if isinstance(model, dict) else {}


class _Reader:
    """Converter of serialized objects to plain values."""

    def __init__(self, objects: Mapping[str, object]) -> None:
        self._objects, self._seen = objects, 0

    def followed(self, node: object) -> object:
        """Resolve *node* if it is a reference."""
        refers = isinstance(node, dict) and node.get("type") == "ref"
        return self._objects[str(node["key"])] if refers else node  # type: ignore[index]

    def items(self, node: object) -> Iterator[tuple[str, object]]:
        """Yield the children of an object by name, or by position for a list."""
        for step, part in find_member(list[Any], node, "items") or ():
            named = _STEP.fullmatch(str(step))
            yield (named[1] if named else str(step)), part

    def value(self, node: object, depth: int) -> object:
        """Convert *node* to a plain value."""
        self._seen += 1
        if depth > DEEPEST or self._seen > MOST:
            raise ValueError("it contains more than a model configuration, or refers to itself")
        node = self.followed(node)
        if not isinstance(node, dict):
            return node
        if node.get("type") == "leaf":
            return node.get("value")
        if node.get("type") == "pyref":
            return {TARGET_KEY: _named(node)}
        inside = {name: self.value(part, depth + 1) for name, part in self.items(node)}
        kind = _named(node.get("type"))
        if kind in ("builtins.list", "builtins.tuple"):
            return list(inside.values())
        made = dict(self.items(self.followed(node.get("metadata")))).get(_ITSELF)
        return inside if made is None else {TARGET_KEY: _named(made), **inside}


def _named(node: object) -> str:
    """Return the qualified name of a class or function."""
    return f"{node.get('module')}.{node.get('name')}" if isinstance(node, dict) else ""
