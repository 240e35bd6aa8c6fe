"""Laying out what ``megatron.core.dist_checkpointing`` loads.

::

    out/
      latest_checkpointed_iteration.txt   says `release`, or 10
      release/                            or iter_0000010/, which a run goes on from
        .metadata  __0_0.distcp ...       as in format dcp, under Megatron-Core's names
        common.pt  metadata.json  run_config.yaml
        config.json  tokenizer.json ...   what travels with the model, and the manifest

All but the tracker file lies in the inner folder, which is a checkpoint by itself: loaders that
know no tracker files are given that one.

``common.pt`` is what all ranks have in common: the arguments of the run, as an
``argparse.Namespace``, and what a loader needs to know to ask for the right names. It is a
``torch.save`` zip, which Megatron-Core reads with torch's own limits on what may be in it
(``megatron/core/dist_checkpointing/strategies/common.py``). ``metadata.json`` says how the rest was
written (``dist_checkpointing/core.py``), and the tracker file above the folder which save is the
newest (``megatron/training/checkpointing.py``).

The arguments of Megatron-LM and Bridge's YAML are made of config.json. Where there is none, or
Megatron-Core has no words for it, the tensors are written all the same: the programs take what they
are told on their own command lines.

A run goes on from the optimizer's state, and what goes with it. Megatron-Core asks for the tensors
by their parameters' names, ``optimizer.state.exp_avg.NAME``, where its optimizer is saved in the
form that any number of ranks loads (``fully_reshardable``; the other forms have the ranges of
elements that ranks had). The optimizer's settings, the schedule and the counters are in
``common.pt``. It looks for none of it in a folder called ``release``. Sources:
``megatron/core/optimizer/distrib_optimizer.py`` (``sharded_state_dict``) and ``load_checkpoint`` of
Megatron-LM and Megatron-Bridge.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

from ckptctl.catalog import Blob, Box, Index, Path
from ckptctl.errors import MappingError, RefusedError, listed, spell_option
from ckptctl.facts import MEGATRON
from ckptctl.facts import megatron_carried as carried
from ckptctl.facts.megatron_adapter import SECTION, lacking, section
from ckptctl.facts.megatron_carried import Carried
from ckptctl.facts.megatron_files import ONE_RANK, arguments_of, container, run_config
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
from ckptctl.storage.pickles.pickle_writer import dumps
from ckptctl.storage.schema import find
from ckptctl.storage.yaml_text import dumped
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
"""The content of ``metadata.json``; Megatron-Core takes a folder without it for something else."""
CONTENT, APART = "content_metadata", "non_homogeneous_layers"
"""What Megatron-Core hands to ``sharded_state_dict`` of a model that is to be loaded."""
NOTHING: Mapping[str, object] = {}
VERSION = 3.0
"""The order of queries, keys and values in one tensor: by groups since 2.0."""


def lay_out(request: OutputRequest) -> OutputLayout:
    """Say where everything of a model goes, whose tensors have the names of layout ``mcore``."""
    run = training(request.tensors, request.blobs, request.notes)
    request = replace(request, tensors=[t for t in request.tensors if t not in run.tensors])
    layers = stacked(request.tensors) if request.stack_layers else Layers()
    # The objects that Megatron-Core asks for: those of the source, else empty ones.
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
        written = f"each is written in full: {listed(aliases)}"
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
    """Return ``common.pt`` with *tensors* in it; adds where they lie."""
    first = len(records)
    for tensor, offset in zip(tensors, common.data_offsets, strict=True):
        places[tensor.name] = [TensorPlace(Box.whole(tensor.shape), len(records))]
        records.append(Record(tensor.name, COMMON, offset, tensor.nbytes))
    return OutputFile(COMMON, common.size, ZipFrame([(common, first, len(tensors))]))


class Described(NamedTuple):
    """What ``common.pt`` holds, and the other files without tensors."""

    common: Mapping[str, object]
    contents: Mapping[str, bytes]


def describe(request: OutputRequest, around: Mapping[str, object]) -> Described:
    """Return what describes the model of a request, and what is *around* it in ``common.pt``."""
    if request.adapter is not None:
        return _adapter(request, request.adapter)
    arguments = None
    if "args" not in around:
        what = f"the arguments in {COMMON}"
        recorded = request.extensions.get(MEGATRON, ())
        said = COMMON_STATE if COMMON_STATE in recorded else COMMON
        arguments = _told(request, arguments_of, carried.arguments, said, what)
    what = f"{RUN_CONFIG} (for Megatron-Bridge)"
    yaml = _told(request, run_config, carried.run_config, RUN_CONFIG, what)
    if around:
        arguments = arguments and {**arguments, "no_save_optim": False}
        saved = find(dict[object, object], yaml, "checkpoint") or {}
        yaml = yaml and {**yaml, "checkpoint": {**saved, "save_optim": True}}
    common = common_content(arguments, stacked=request.stack_layers, around=around)
    contents = {MARK: MARK_FILE}
    if yaml is not None:
        contents[RUN_CONFIG] = dumped(yaml)
    return Described(common, contents)


def _adapter(request: OutputRequest, stated: Mapping[str, object]) -> Described:
    """Return what describes low-rank factors, and the model that they change where it is known."""
    what = f"the model section of {RUN_CONFIG} (Megatron-Bridge reads the model from elsewhere)"
    yaml = _told(request, run_config, carried.run_config, RUN_CONFIG, what)
    yaml = yaml or container(ONE_RANK)
    shapes = {tensor.name: tensor.shape for tensor in request.tensors}
    yaml[SECTION] = section(shapes, stated, request.sizes.get("i"))
    if layers := lacking(shapes):
        parts = "factors for query, key and value together, and for gate and up together"
        missing = f"some are missing in {listed(layers)}"
        request.notes.add(f"Megatron-Bridge 0.3 requires {parts}; {missing}")
    if exchanged := halved(shapes):
        request.notes.add(
            "with several tensor-parallel ranks, Megatron-Bridge 0.3 swaps rows of these "
            f"factors; load them on one rank: {listed(exchanged)}"
        )
    common = common_content(None, stacked=request.stack_layers)
    return Described(common, {MARK: MARK_FILE, RUN_CONFIG: dumped(yaml)})


def _told(
    request: OutputRequest,
    make: Callable[..., dict[str, object]],
    carry: Callable[..., Carried],
    file: str,
    what: str,
) -> dict[str, object] | None:
    """Return what *make* makes, else what *carry* takes over of the source's *file*."""
    made, why_not = _made(request, make)
    if made is not None:
        return made
    recorded = request.extensions.get(MEGATRON, {})
    if file not in recorded:
        request.notes.add(f"skipped {what}, because {why_not}")
        return None
    found = carry(recorded[file], _rows(request), _dtype(request))
    if found.left_out:
        request.notes.add(
            f"omitted from {what}, because they are not plain values: {listed(found.left_out)}"
        )
    return found.values


def _made(
    request: OutputRequest, make: Callable[..., dict[str, object]]
) -> tuple[dict[str, object] | None, str]:
    """Return what *make* makes of the configuration, or None and the reason why it cannot."""
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
    """Return the rows of the vocabulary, with padding."""
    found = (tensor.shape[0] for tensor in request.tensors if tensor.name == EMBEDDING)
    return next(found, None)


def _dtype(request: OutputRequest) -> str | None:
    """Return the dtype that most bytes of the model are of."""
    total: dict[str, int] = {}
    for tensor in request.tensors:
        if not is_state(tensor.name):
            total[tensor.dtype] = total.get(tensor.dtype, 0) + tensor.nbytes
    return max(total, key=lambda name: total[name], default=None)


def common_content(
    arguments: Mapping[str, object] | None, *, stacked: bool, around: Mapping[str, object] = NOTHING
) -> dict[str, object]:
    """Return what is in ``common.pt``.

    Args:
        arguments: Those of Megatron-LM, by name; None: nobody knows them.
        stacked: Whether layers are stacked.
        around: What else of a run there is; its arguments are those that the run was given.
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
    """Return how ``common.pt`` lies that holds *content*, in which *tensors* are."""
    storages = [(str(position), tensor.nbytes) for position, tensor in enumerate(tensors)]
    return zip_writer.lay_out(dumps(content), storages, folder="common")


STATE = re.compile(r"optimizer\.state\.\w+\.(.+)")
OPTIMIZER, SETTINGS, ITERATION = "optimizer", "param_groups", "iteration"
MAX_ITERATION = 10**12


class Training(NamedTuple):
    """What travels beside the model.

    Attributes:
        objects: Items of the DCP directory.
        tensors: What of the tensors is in ``common.pt``; the others are in the DCP directory.
        common: What ``common.pt`` holds; empty: no run goes on from here.
    """

    objects: tuple[Blob, ...]
    tensors: tuple[OutputTensor, ...]
    common: Mapping[str, object]

    @property
    def folder(self) -> str:
        """Return the name of the save."""
        return f"iter_{self.common[ITERATION]:07d}" if self.common else RELEASE

    @property
    def pointer(self) -> str:
        """Return what the tracker file says of it."""
        return str(self.common[ITERATION]) if self.common else RELEASE


def training(tensors: Sequence[OutputTensor], blobs: Iterable[Blob], notes: Notes) -> Training:
    """Return what travels beside the model of *tensors*, among which are the optimizer's.

    Raises:
        RefusedError: There is an optimizer that Megatron-Core cannot load.
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
    """Return whether a tensor is the optimizer's."""
    return name.startswith(f"{OPTIMIZER}.")


def _is_common(tensor: OutputTensor) -> bool:
    """Return whether a tensor is a leaf of ``common.pt``, as the scale of a loss is.

    It lies in dictionaries, whereas those of a model and its moments have whole names as keys.
    """
    plain = not any("." in str(key) for key in tensor.path)
    return len(tensor.path) > 1 and plain and not STATE.fullmatch(tensor.name)


def _common(leaves: Sequence[Blob], tensors: Sequence[OutputTensor]) -> Mapping[str, object]:
    stored = ((one.path, stored_leaf(one, str(key))) for key, one in enumerate(tensors))
    found = (*((one.path, one.value) for one in leaves), *stored)
    content = cast("dict[str, object]", nest((_numbered(path), leaf) for path, leaf in found))
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
    """Return *path* with the number of one of several optimizers, which DCP makes a string."""
    head, *rest = path
    if head == OPTIMIZER and rest and str(rest[0]).isdecimal() and not isinstance(rest[0], Index):
        return (head, int(rest[0]), *rest[1:])
    return path
