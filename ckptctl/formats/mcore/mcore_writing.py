"""Lay out checkpoints that ``megatron.core.dist_checkpointing`` loads.

::

    out/
      latest_checkpointed_iteration.txt   contains `release`, or 10
      release/                            or iter_0000010/, to resume a run from
        .metadata  __0_0.distcp ...       as in format dcp, with Megatron-Core's names
        common.pt  metadata.json  run_config.yaml
        config.json  tokenizer.json ...   sidecar files and the manifest

Everything except the tracker file is in the inner folder, which is a complete checkpoint for
loaders that do not read tracker files.

``common.pt`` contains the values that all ranks share: the arguments of the run, as an
``argparse.Namespace``, and the settings that determine the tensor names of a loader. It is a
``torch.save`` zip, which Megatron-Core loads with torch's restricted unpickler
(``megatron/core/dist_checkpointing/strategies/common.py``). ``metadata.json`` names the backend of
the other files (``dist_checkpointing/core.py``), and the tracker file above the folder names the
latest save (``megatron/training/checkpointing.py``).

The arguments of Megatron-LM and Bridge's YAML are derived from config.json. If it is missing, or
cannot be expressed in Megatron-Core's options, the tensors are still written, and the user passes
the options on the command line.

A run resumes from the optimizer state and related values. Megatron-Core names these tensors after
the parameters, ``optimizer.state.exp_avg.NAME``, if its optimizer is saved in the form that any
number of ranks can load (``fully_reshardable``; the other forms store ranges of elements per rank).
The optimizer's settings, the schedule and the counters are in ``common.pt``. None of this is loaded
from a folder called ``release``. Sources: ``megatron/core/optimizer/distrib_optimizer.py``
(``sharded_state_dict``) and ``load_checkpoint`` of Megatron-LM and Megatron-Bridge.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

from ckptctl.catalog import Blob, Box, Index, Path
from ckptctl.errors import MappingError, RefusedError, quote_names, spell_option
from ckptctl.facts import MEGATRON
from ckptctl.facts import megatron_carried as carried
from ckptctl.facts.megatron_adapter import (
    PEFT_SECTION,
    build_adapter_section,
    list_incomplete_layers,
)
from ckptctl.facts.megatron_carried import CopiedRecord
from ckptctl.facts.megatron_files import (
    ONE_RANK,
    build_arguments,
    build_container,
    build_run_config,
)
from ckptctl.formats.base import OutputLayout, OutputRequest, OutputTensor, TensorPlace, document
from ckptctl.formats.dcp import METADATA
from ckptctl.formats.dcp.data_files import DataFiles, shards
from ckptctl.formats.dcp.metadata_writer import encode
from ckptctl.formats.mcore.factors import halved
from ckptctl.formats.mcore.layers import Layers, stacked
from ckptctl.formats.mcore.mcore_files import (
    COMMON,
    COMMON_STATE,
    MARK,
    RELEASE,
    RUN_CONFIG,
    TORCH_DIST,
)
from ckptctl.formats.mcore.objects import extra_states, is_object, stored_object
from ckptctl.formats.megatron.megatron_folder import POINTER
from ckptctl.formats.shared.leaves import nest
from ckptctl.formats.shared.stored_leaves import stored_leaf
from ckptctl.formats.torch_file import ZipFrame
from ckptctl.notes import Notes
from ckptctl.planner.config_facts import read_sizes
from ckptctl.planner.plan import OutputFile, Record
from ckptctl.storage.pickles.inert import Inert
from ckptctl.storage.pickles.pickle_writer import dump_pickle
from ckptctl.storage.schema import find_member
from ckptctl.storage.yaml_text import dump_yaml
from ckptctl.storage.zips import zip_writer

EMBEDDING = "embedding.word_embeddings.weight"
MARK_FILE = json.dumps(
    {
        "sharded_backend": TORCH_DIST,
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
).encode()
"""Content of ``metadata.json``, without which Megatron-Core does not recognize a folder."""
CONTENT, APART = "content_metadata", "non_homogeneous_layers"
"""Keys of the arguments that Megatron-Core passes to ``sharded_state_dict`` for loading."""
NOTHING: Mapping[str, object] = {}
VERSION = 3.0
"""Checkpoint version; since 2.0, queries, keys and values are grouped in one tensor."""


def lay_out(request: OutputRequest) -> OutputLayout:
    """Lay out a model whose tensors have the names of layout ``mcore``."""
    run = training(request.tensors, request.blobs, request.notes)
    request = replace(request, tensors=[t for t in request.tensors if t not in run.tensors])
    layers = stacked(request.tensors) if request.stack_layers else Layers()
    # Megatron-Core requires these objects; those that the source does not have are empty.
    model = [tensor for tensor in request.tensors if tensor.shape and not is_state(tensor.name)]
    held = (stored_object(blob, layers) for blob in run.objects)
    objects = [*{blob.name: blob for blob in (*extra_states(model, layers), *held)}.values()]
    writer, places = DataFiles(), dict[str, list[TensorPlace]]()
    stored: dict[str, OutputTensor] = {}
    for position, shard in enumerate(shards(request)):
        writer.begin(f"__0_{position}.distcp")
        for tensor, box in shard:
            places.setdefault(tensor.name, []).append(TensorPlace(box, len(writer.records)))
            whole = layers.stored(tensor)
            whole = stored.setdefault(whole.name, whole)
            layer = layers.place(tensor.name)[1]
            if layer is not None:
                box = Box((layer, *box.offsets), (1, *box.sizes))
            writer.add_tensor(whole, box)
        for one in () if position else objects:
            writer.add_blob(one)
        writer.finish()
    if aliases := [tensor.name for tensor in request.tensors if tensor.alias_of]:
        written = f"each is written in full: {quote_names(aliases)}"
        request.notes.add(f"mcore does not support tied tensors; {written}")
    described = describe(request, run.common)
    common = common_file(described.common, run.tensors)
    contents, files = described.contents, list(writer.files)
    if run.tensors:
        files.append(_with_tensors(common, run.tensors, writer.records, places))
    else:
        contents = {COMMON: b"".join(piece for _, piece in common.frame([])), **contents}
    content = encode(list(stored.values()), objects, writer.boxes, writer.items)
    return OutputLayout(
        (*files, document(METADATA, content)),
        tuple(writer.records),
        {name: tuple(found) for name, found in places.items()},
        raw_copies=tuple(writer.raw_copies),
        contents=contents,
        folder=run.folder,
        above={POINTER: run.pointer.encode()},
        own=tuple(described.common),
    )


def _with_tensors(
    common: zip_writer.ZipLayout,
    tensors: Sequence[OutputTensor],
    records: list[Record],
    places: dict[str, list[TensorPlace]],
) -> OutputFile:
    """Lay out ``common.pt`` with *tensors*, and extend *records* and *places*."""
    first = len(records)
    for tensor, offset in zip(tensors, common.data_offsets, strict=True):
        places[tensor.name] = [TensorPlace(Box.whole(tensor.shape), len(records))]
        records.append(Record(tensor.name, COMMON, offset, tensor.nbytes))
    return OutputFile(COMMON, common.size, ZipFrame([(common, first, len(tensors))]))


class Described(NamedTuple):
    """Content of ``common.pt`` and of the other files without tensors."""

    common: Mapping[str, object]
    contents: Mapping[str, bytes]


def describe(request: OutputRequest, around: Mapping[str, object]) -> Described:
    """Return the files that describe a model, with *around* as the training state."""
    if request.adapter is not None:
        return _adapter(request, request.adapter)
    arguments = None
    if "args" not in around:
        what = f"the arguments in {COMMON}"
        recorded = request.extensions.get(MEGATRON, ())
        said = COMMON_STATE if COMMON_STATE in recorded else COMMON
        arguments = _told(request, build_arguments, carried.copy_arguments, said, what)
    what = f"{RUN_CONFIG} (for Megatron-Bridge)"
    yaml = _told(request, build_run_config, carried.copy_run_config, RUN_CONFIG, what)
    if around:
        arguments = arguments and {**arguments, "no_save_optim": False}
        saved = find_member(dict[object, object], yaml, "checkpoint") or {}
        yaml = yaml and {**yaml, "checkpoint": {**saved, "save_optim": True}}
    common = common_content(arguments, stacked=request.stack_layers, around=around)
    contents = {MARK: MARK_FILE}
    if yaml is not None:
        contents[RUN_CONFIG] = dump_yaml(yaml)
    return Described(common, contents)


def _adapter(request: OutputRequest, stated: Mapping[str, object]) -> Described:
    """Return the files that describe an adapter, and its base model if known."""
    what = f"the model section of {RUN_CONFIG} (Megatron-Bridge reads the model from elsewhere)"
    yaml = _told(request, build_run_config, carried.copy_run_config, RUN_CONFIG, what)
    yaml = yaml or build_container(ONE_RANK)
    shapes = {tensor.name: tensor.shape for tensor in request.tensors}
    yaml[PEFT_SECTION] = build_adapter_section(shapes, stated, request.sizes.get("i"))
    if layers := list_incomplete_layers(shapes):
        parts = "factors for query, key and value together, and for gate and up together"
        missing = f"some are missing in {quote_names(layers)}"
        request.notes.add(f"Megatron-Bridge 0.3 requires {parts}; {missing}")
    if exchanged := halved(shapes):
        request.notes.add(
            "with several tensor-parallel ranks, Megatron-Bridge 0.3 swaps rows of these "
            f"factors; load them on one rank: {quote_names(exchanged)}"
        )
    common = common_content(None, stacked=request.stack_layers)
    return Described(common, {MARK: MARK_FILE, RUN_CONFIG: dump_yaml(yaml)})


def _told(
    request: OutputRequest,
    make: Callable[..., dict[str, object]],
    carry: Callable[..., CopiedRecord],
    file: str,
    what: str,
) -> dict[str, object] | None:
    """Make a configuration with *make*, or else copy the source's *file* with *carry*."""
    made, why_not = _made(request, make)
    if made is not None:
        return made
    recorded = request.extensions.get(MEGATRON, {})
    if file not in recorded:
        request.notes.add(f"skipped {what}, because {why_not}")
        return None
    found = carry(recorded[file], _rows(request), _dtype(request))
    if found.skipped:
        request.notes.add(
            f"omitted from {what}, because they are not plain values: {quote_names(found.skipped)}"
        )
    return found.values


def _made(
    request: OutputRequest, make: Callable[..., dict[str, object]]
) -> tuple[dict[str, object] | None, str]:
    """Make a configuration with *make*, or return None and the reason for the failure."""
    if request.config is None or request.family is None:
        if request.family is None:
            return None, f"the model type is unknown (set {spell_option('--model-type')})"
        pointing = f"pass {spell_option('--assets DIR')} to copy it from the trained model's folder"
        return None, f"config.json is missing; {pointing}"
    sizes, stated = dict(request.sizes), read_sizes(request.family, request.config)
    if "v" in stated:
        sizes["v"] = stated["v"]  # the tensors may be padded
    rows, dtype = _rows(request), _dtype(request)
    try:
        return make(request.family, request.config, sizes, padded=rows, dtype=dtype), ""
    except MappingError as error:
        return None, error.what


def _rows(request: OutputRequest) -> int | None:
    """Return the padded size of the vocabulary, or None."""
    found = (tensor.shape[0] for tensor in request.tensors if tensor.name == EMBEDDING)
    return next(found, None)


def _dtype(request: OutputRequest) -> str | None:
    """Return the dtype of most bytes of the model, or None."""
    total: dict[str, int] = {}
    for tensor in request.tensors:
        if not is_state(tensor.name):
            total[tensor.dtype] = total.get(tensor.dtype, 0) + tensor.nbytes
    return max(total, key=lambda name: total[name], default=None)


def common_content(
    arguments: Mapping[str, object] | None, *, stacked: bool, around: Mapping[str, object] = NOTHING
) -> dict[str, object]:
    """Build the content of ``common.pt``.

    Args:
        arguments: Arguments of Megatron-LM by name, or None if unknown.
        stacked: Whether layers are stacked.
        around: Training state of a run; its arguments take precedence.
    """
    saved = around.get(CONTENT)
    handed: dict[str, object] = {
        **(saved if isinstance(saved, dict) else {}),
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    handed.pop(APART, None)
    if not stacked:
        handed[APART] = True
    content = {"checkpoint_version": VERSION, "iteration": 0, **around, CONTENT: handed}
    if arguments is None:
        return content
    return {"args": Inert("argparse", "Namespace", (), dict(arguments), newobj=True), **content}


def common_file(
    content: Mapping[str, object], tensors: Sequence[OutputTensor] = ()
) -> zip_writer.ZipLayout:
    """Lay out ``common.pt`` with *content*, in which *tensors* are stored."""
    storages = [(str(position), tensor.nbytes) for position, tensor in enumerate(tensors)]
    return zip_writer.lay_out(dump_pickle(content), storages, folder="common")


STATE = re.compile(r"optimizer\.state\.\w+\.(.+)")
OPTIMIZER, SETTINGS, ITERATION = "optimizer", "param_groups", "iteration"
MAX_ITERATION = 10**12


class Training(NamedTuple):
    """Training state and objects that are written with the model.

    Attributes:
        objects: Items of the DCP directory.
        tensors: Tensors in ``common.pt``; all others are in the DCP directory.
        common: Content of ``common.pt``; empty if no run can resume from it.
    """

    objects: tuple[Blob, ...]
    tensors: tuple[OutputTensor, ...]
    common: Mapping[str, object]

    @property
    def folder(self) -> str:
        """Folder name of the save."""
        return f"iter_{self.common[ITERATION]:07d}" if self.common else RELEASE

    @property
    def pointer(self) -> str:
        """Content of the tracker file."""
        return str(self.common[ITERATION]) if self.common else RELEASE


def training(tensors: Sequence[OutputTensor], blobs: Iterable[Blob], notes: Notes) -> Training:
    """Separate training state and objects from the model in *tensors* and *blobs*.

    Raises:
        RefusedError: Megatron-Core cannot load the optimizer state.
    """
    objects, leaves = list[Blob](), list[Blob]()
    for blob in blobs:
        (objects if is_object(blob.name) else leaves).append(blob)
    if not any(is_state(tensor.name) for tensor in tensors):
        why = "mcore can only store it together with an optimizer state"
        notes.explain("skipped", {blob.name: why for blob in leaves})
        return Training(tuple(objects), (), {})
    inside = tuple(tensor for tensor in tensors if _is_common(tensor))
    model = {tensor.name for tensor in tensors if not is_state(tensor.name)}
    for tensor in tensors:
        found = STATE.fullmatch(tensor.name)
        named = found is not None and found[1] in model
        if is_state(tensor.name) and tensor not in inside and not named:
            raise RefusedError(
                "Megatron-Core cannot load this optimizer state",
                where=f"tensor `{tensor.name}`",
                why="it requires names such as `optimizer.state.exp_avg.` followed by a parameter "
                "name",
                hint=f"pass {spell_option('--only model')} to write only the weights",
            )
    return Training(tuple(objects), inside, _common(leaves, inside))


def is_state(name: str) -> bool:
    """Return whether a tensor belongs to the optimizer."""
    return name.startswith(f"{OPTIMIZER}.")


def _is_common(tensor: OutputTensor) -> bool:
    """Return whether a tensor belongs into ``common.pt``, such as a loss scale.

    Such tensors are in nested dictionaries, whereas weights and moments have full names as keys.
    """
    plain = not any("." in str(key) for key in tensor.path)
    return len(tensor.path) > 1 and plain and not STATE.fullmatch(tensor.name)


def _common(leaves: Sequence[Blob], tensors: Sequence[OutputTensor]) -> Mapping[str, object]:
    stored = ((t.path, stored_leaf(t, str(key))) for key, t in enumerate(tensors))
    values = ((blob.path, blob.value) for blob in leaves)
    pairs = ((_numbered(path), leaf) for path, leaf in (*values, *stored))
    content = cast("dict[str, object]", nest(pairs))
    held = [blob.name for blob in leaves if SETTINGS in blob.path]
    iteration = content.get(ITERATION)
    if not held or type(iteration) is not int or not 0 < iteration < MAX_ITERATION:
        lacking = "the iteration number" if held else "the settings of the parameter groups"
        raise RefusedError(
            "Megatron-Core cannot resume with this optimizer state",
            where=f"`{ITERATION if held else SETTINGS}`",
            why=f"`common.pt` must contain {lacking}, but the source does not",
            hint=f"pass {spell_option('--only model')} to write only the weights",
        )
    return content


def _numbered(path: Path) -> Path:
    """Convert an optimizer's number in *path*, which DCP makes a string, back to an integer."""
    head, *rest = path
    if head == OPTIMIZER and rest and str(rest[0]).isdecimal() and not isinstance(rest[0], Index):
        return (head, int(rest[0]), *rest[1:])
    return path
