"""Read a Megatron-Core checkpoint, with canonical tensor names and the records of the trainer.

Trainers record the model configuration next to the checkpoint::

    iter_0000010/run_config.yaml              Megatron-Bridge
    iter_0000010/args.json, or above it       ms-swift
    step=10-last/context/model.yaml, io.json  NeMo 2, next to weights/
    actor/transformer_config.json             verl, next to dist_ckpt/

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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckptctl.catalog import INCONSISTENT_INDEX, Blob, Catalog, Finding
from ckptctl.errors import CoverageError, DamagedError, UnsupportedError
from ckptctl.facts import MEGATRON
from ckptctl.facts.megatron import TARGET_KEY, merge_records
from ckptctl.facts.megatron_adapter import to_peft_config
from ckptctl.formats.base import ReadOptions
from ckptctl.formats.dcp.dcp_reader import add_leaves, build_catalog, read_metadata
from ckptctl.formats.mcore.buckets import map_buckets
from ckptctl.formats.mcore.factors import restore_row_order
from ckptctl.formats.mcore.joining import join_canonical
from ckptctl.formats.mcore.mcore_files import (
    ACTOR,
    COMMON,
    COMMON_STATE,
    METADATA,
    METADATA_JSON,
    NEMO_CONFIG_FILE,
    PARENT_PREFIX,
    RECORD_FILES,
    RUN_CONFIG,
    find_save_folder,
    find_skipped_critic,
    is_common_recorded,
    require_finished_save,
)
from ckptctl.formats.mcore.objects import (
    EXTRA_STATE,
    find_missing_objects,
    format_object_name,
    to_canonical_objects,
)
from ckptctl.formats.mcore.spelling import read_attention_kinds
from ckptctl.formats.peft import read_adapter_config
from ckptctl.formats.shared.findings import UNUSABLE_ERRORS, FaultCollector, finding_from_error
from ckptctl.formats.shared.leaves import require_harmless_values
from ckptctl.formats.shared.stored_leaves import NO_CHECKSUMS, Leaves, extract_leaves
from ckptctl.formats.sidecar_files import ADAPTER_CONFIG, HF_CONFIG_FOLDER, read_config_files
from ckptctl.planner.config_facts import Json
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.json_reader import read_json
from ckptctl.storage.paths import is_present
from ckptctl.storage.pickles.inert import Inert
from ckptctl.storage.schema import read_as, read_nested_or_none, wrap_malformed_errors
from ckptctl.storage.yaml_text import MAX_TEXT_LENGTH, parse_yaml
from ckptctl.storage.zips.zip_reader import TABLE_WITH_UNREAD_TENSORS, read_archive
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

ARGUMENTS = "args"
MCORE_FILES = (COMMON, METADATA_JSON, RUN_CONFIG, ADAPTER_CONFIG)
MAX_VALUES = 1 << 19
"""Maximum number of unsharded values. A checkpoint usually has a few thousand."""


def read_catalog(path: TreePath, options: ReadOptions, name: str) -> Catalog:
    """Read the catalog of the folder *path* (see :meth:`Format.read`)."""
    folder = find_save_folder(path, options.tag)
    with source_files(folder) as files:
        require_finished_save(files)
        faults = FaultCollector(folder, options.partial)
        leaves, origin, notes = read_metadata(files, METADATA)
        notes += tuple(_check_objects(leaves, faults))
        catalog = build_catalog(files, leaves, name, faults, notes)
        common_object = catalog.blobs.get(format_object_name(COMMON_STATE, (), ()))
        common = (
            _read_common(files, faults)
            if common_object is None
            else _read_common_object(files, common_object, faults)
        )
        place = COMMON if common_object is None else COMMON_STATE
        require_harmless_values(common.blobs.values(), str(folder / place))
        arguments = extract_trainer_arguments(common.blobs)
        records = read_records(folder, {place: arguments}, faults)
        kinds = read_attention_kinds(merge_records(records.values()))
        catalog = join_canonical(catalog, faults, arguments, kinds)
        hf_folder = folder.parent / HF_CONFIG_FOLDER  # verl's
        hf_documents = read_config_files(hf_folder) if hf_folder.is_dir() else {}
        other_files = {file: why for file, why in catalog.others.items() if file not in MCORE_FILES}
        blobs = {n: blob for n, blob in catalog.blobs.items() if blob is not common_object}
        catalog = replace(catalog, blobs=to_canonical_objects(blobs), others=other_files)
        catalog = replace(catalog, save_id=origin.save_id, world=origin.world)
        if common_object is not None or is_present(folder / COMMON):
            file = COMMON if common_object is None else common_object.file or ""
            catalog = add_leaves(files, catalog, file, common)
        catalog = restore_row_order(catalog, records)
        catalog, settings, settings_file = map_buckets(
            catalog, files, merge_records(records.values()), faults
        )
        if settings_file:
            catalog = add_leaves(files, catalog, settings_file, settings)
    critic = find_skipped_critic(path, folder)
    critic_findings = (
        tuple(_check_other_model(folder, path, critic, options, name)) if critic else ()
    )
    note = (
        f"the checkpoint contains two models; this is the actor. Pass `{critic}` for the other one"
    )
    documents: dict[str, Json] = {**hf_documents, **catalog.documents}
    if adapter_settings := to_peft_config(records.get(RUN_CONFIG, {})):
        documents[ADAPTER_CONFIG] = {
            **read_adapter_config(folder).get(ADAPTER_CONFIG, {}),
            **adapter_settings,
        }
    return replace(
        catalog,
        extensions={MEGATRON: records} if records else {},
        documents=documents,
        findings=(*faults.findings, *critic_findings),
        notes=(*catalog.notes, *((note,) * bool(critic))),
    )


def _check_objects(names: Iterable[str], faults: FaultCollector) -> Iterator[str]:
    """Add or raise an error for each key of *names* with missing objects, or yield a note.

    Missing extra state only results in a note, because it is not part of the weights, and models
    with different kinds of layers may lack it.
    """
    for key, why in find_missing_objects(names):
        if key.endswith(EXTRA_STATE):
            yield f"{INCONSISTENT_INDEX}: {why}"
        else:
            error = CoverageError(
                f"a part of `{key}` is missing",
                where=str(faults.root / METADATA),
                why=why,
                hint="use another checkpoint (a rank never saved its part of this one)",
            )
            faults.add_or_raise(error, tensor=key)


def _check_other_model(
    folder: TreePath, path: TreePath, subfolder: str, options: ReadOptions, name: str
) -> Iterator[Finding]:
    """Check the model in *subfolder* of the step *path*, and yield its findings.

    A step is only complete if both of its models are. An unusable model is an error, or a finding
    if the read is partial. File names in findings are relative to *folder*.
    """
    home = find_save_folder(path / subfolder, None)
    try:
        findings = read_catalog(
            path / subfolder, ReadOptions(partial=options.partial), name
        ).findings
    except UNUSABLE_ERRORS as error:
        if not options.partial:
            error.hint = f"pass `{path / ACTOR}` to read only the actor"
            raise
        findings = (finding_from_error(error, home),)
    for finding in findings:
        place = os.path.relpath(home / (finding.file or ""), folder)
        why = f"`{finding.tensor}`: {finding.why}" if finding.tensor else finding.why
        yield replace(finding, file=place, tensor=None, why=why)


def _read_common(files: SourceFiles, faults: FaultCollector) -> Leaves:
    """Read the unsharded values in ``common.pt``, or return no leaves if it was not written.

    Objects of Megatron's classes become inert records.
    """
    if not is_present(files.root / COMMON):
        if is_common_recorded(files):
            why = f"{METADATA_JSON} states that Megatron wrote it"
            error = DamagedError(f"`{COMMON}` is missing", where=str(files.root), why=why)
            faults.add_or_raise(error, COMMON)
        return Leaves()
    return (
        faults.try_read(COMMON, lambda name: _read_dictionary(files, (name, 0, None))) or Leaves()
    )


def _read_common_object(files: SourceFiles, blob: Blob, faults: FaultCollector) -> Leaves:
    """Read the unsharded values from the object *blob*, which is a list with one dictionary."""
    try:
        return _read_dictionary(files, (blob.file or "", blob.offset, blob.nbytes), blob.name)
    except UNUSABLE_ERRORS as error:
        faults.add_or_raise(error, tensor=blob.name)
        return Leaves()


def _read_dictionary(
    files: SourceFiles, place: tuple[str, int, int | None], object_name: str | None = None
) -> Leaves:
    """Read the unsharded values from a pickled dictionary in a zip.

    Args:
        files: Files of the checkpoint.
        place: File, first byte and length of the zip that contains the dictionary.
        object_name: Name of the object that contains the dictionary in a list, or None if the zip
            contains the dictionary directly.

    Raises:
        UnsupportedError: The content is not a dictionary, or has too many values.
    """
    where = str(files.root / place[0])
    archive = read_archive(
        files, *place, unknown="inert", table=TABLE_WITH_UNREAD_TENSORS, max_values=MAX_VALUES
    )
    message = f"`{object_name or place[0]}` does not have the form that Megatron-Core writes"
    with wrap_malformed_errors(message, where):
        root = archive.root if object_name is None else read_as(tuple[object], archive.root)[0]
        content = read_as(dict[object, object], root)
    leaves = extract_leaves(content, place[0])
    leaves.notes[:0] = () if archive.checksums or object_name else (NO_CHECKSUMS,)
    return leaves


def extract_trainer_arguments(blobs: Mapping[str, Blob]) -> dict[str, object]:
    """Return Megatron's training arguments in the leaves of ``common.pt``, or an empty dict."""
    record = blobs[ARGUMENTS].value if ARGUMENTS in blobs else None
    state = record.state if isinstance(record, Inert) else record
    if isinstance(state, dict):
        return {key: value for key, value in state.items() if isinstance(key, str)}
    path_values = ((blob.path, blob.value) for blob in blobs.values())
    argument_items = (
        pair for pair in path_values if pair[0][:1] == (ARGUMENTS,) and len(pair[0]) == 2
    )
    return {str(path[1]): value for path, value in argument_items}


MAX_JSON_BYTES = 4 << 20
"""Maximum size of a JSON file in bytes. ``io.json`` contains every object that NeMo created."""
MAX_DEPTH, MAX_NODES = 64, 100_000
"""Maximum nesting depth and number of converted values, as references can form cycles."""
_ITEM_KEY = re.compile(r"(?:Attr\(name|Key\(key)='(.*)'\)", re.DOTALL)
_TARGET_KEY = "fn_or_cls"


def read_records(
    folder: TreePath, arguments: Mapping[str, Mapping[str, object]], faults: FaultCollector
) -> dict[str, Mapping[str, object]]:
    """Read the files in which the trainer recorded the configuration of the model in *folder*.

    Returns the content of each file by file name, including *arguments*, which map the name of an
    already read file to the trainer's arguments in it.
    """
    records_by_file = {name: values for name, values in arguments.items() if values}
    for name in RECORD_FILES:
        file = (
            folder.parent / name.removeprefix(PARENT_PREFIX)
            if name.startswith(PARENT_PREFIX)
            else folder / name
        )
        if is_present(file) and not (
            file.name == NEMO_CONFIG_FILE and RECORD_FILES[-2] in records_by_file
        ):
            record = faults.try_read(file.name, _make_record_reader(file.parent))
            if record:
                records_by_file[name] = record
    return records_by_file


def _make_record_reader(home: TreePath) -> Callable[[str], Mapping[str, object]]:
    def read_record(name: str) -> Mapping[str, object]:
        with source_files(home) as files:
            where = str(home / name)
            if name.endswith(".json"):
                content = read_json(files, name, MAX_JSON_BYTES, allow_nan=True)
                if isinstance(content, dict):
                    return parse_nemo_model(content, where) if name == NEMO_CONFIG_FILE else content
                raise UnsupportedError("this JSON is not a configuration", where=where)
            size = files.size(name)
            if size > MAX_TEXT_LENGTH:
                raise UnsupportedError(
                    "this YAML file is too large for a configuration",
                    where=where,
                    why=f"it has {pluralize(size, 'byte')}; the limit is {MAX_TEXT_LENGTH:,}",
                )
            return parse_yaml(files.read(name, 0, size).decode(errors="replace"), where)

    return read_record


def parse_nemo_model(document: Mapping[str, object], where: str) -> dict[str, object]:
    """Return the model configuration in NeMo 2's ``io.json``, or an empty dict if it has none.

    Raises:
        UnsupportedError: The document is not a configuration.
    """
    reader = _FiddleConverter(read_nested_or_none(dict[str, object], document, "objects") or {})
    try:
        items = dict(reader.iterate_items(reader.resolve_reference(document.get("root"))))
        model = reader.to_value(items.get("model"), 0)
    except (LookupError, TypeError, ValueError) as error:
        raise UnsupportedError(
            "this JSON is not a configuration", where=where, why=str(error)[:200]
        ) from error
    return model if isinstance(model, dict) else {}


class _FiddleConverter:
    """Converter of Fiddle's serialized objects to plain values."""

    def __init__(self, objects: Mapping[str, object]) -> None:
        self._objects, self._seen = objects, 0

    def resolve_reference(self, node: object) -> object:
        """Return the object that *node* refers to, or *node* itself if it is not a reference."""
        refers = isinstance(node, dict) and node.get("type") == "ref"
        return self._objects[str(node["key"])] if refers else node  # type: ignore[index]

    def iterate_items(self, node: object) -> Iterator[tuple[str, object]]:
        """Yield the children of an object by name, or by position for a list."""
        for step, part in read_nested_or_none(list[Any], node, "items") or ():
            match = _ITEM_KEY.fullmatch(str(step))
            yield (match[1] if match else str(step)), part

    def to_value(self, node: object, depth: int) -> object:
        """Convert *node* to plain Python values, or raise if it is too deep or too large."""
        self._seen += 1
        if depth > MAX_DEPTH or self._seen > MAX_NODES:
            raise ValueError("it contains more than a model configuration, or refers to itself")
        node = self.resolve_reference(node)
        if not isinstance(node, dict):
            return node
        if node.get("type") == "leaf":
            return node.get("value")
        if node.get("type") == "pyref":
            return {TARGET_KEY: _get_qualified_name(node)}
        children = {name: self.to_value(part, depth + 1) for name, part in self.iterate_items(node)}
        kind = _get_qualified_name(node.get("type"))
        if kind in ("builtins.list", "builtins.tuple"):
            return list(children.values())
        target = dict(self.iterate_items(self.resolve_reference(node.get("metadata")))).get(
            _TARGET_KEY
        )
        return children if target is None else {TARGET_KEY: _get_qualified_name(target), **children}


def _get_qualified_name(node: object) -> str:
    """Return the qualified name of the class or function that *node* refers to."""
    return f"{node.get('module')}.{node.get('name')}" if isinstance(node, dict) else ""
