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
from ckptctl.errors import MappingError, RefusedError, format_option, quote_names
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
    build_config_container,
    build_megatron_arguments,
    build_run_config,
)
from ckptctl.formats.base import (
    OutputLayout,
    OutputRequest,
    OutputTensor,
    TensorPlace,
    make_content_file,
)
from ckptctl.formats.dcp import METADATA
from ckptctl.formats.dcp.data_files import DataFileBuilder, assign_boxes_to_files
from ckptctl.formats.dcp.metadata_writer import encode_metadata
from ckptctl.formats.mcore.factors import list_exchanged_factors
from ckptctl.formats.mcore.fsdp import build_parameter_groups
from ckptctl.formats.mcore.layers import LayerStorage, build_stacked_storage
from ckptctl.formats.mcore.mcore_files import (
    COMMON,
    METADATA_JSON,
    RECORD_FILES,
    RELEASE,
    RUN_CONFIG,
    TORCH_DIST,
)
from ckptctl.formats.mcore.objects import is_sharded_object, make_extra_states, to_stored_object
from ckptctl.formats.megatron.megatron_folder import POINTER_FILE
from ckptctl.formats.shared.leaves import build_nested_object
from ckptctl.formats.shared.stored_leaves import make_pickled_tensor
from ckptctl.formats.torch_file import ZipFrame
from ckptctl.notes import Notes
from ckptctl.planner.config_facts import read_sizes
from ckptctl.planner.plan import OutputFile, Record
from ckptctl.storage.pickles.inert import Inert
from ckptctl.storage.pickles.pickle_writer import dump_pickle
from ckptctl.storage.schema import read_nested_or_none
from ckptctl.storage.yaml_text import dump_yaml
from ckptctl.storage.zips import zip_writer

EMBEDDING = "embedding.word_embeddings.weight"
METADATA_JSON_CONTENT = json.dumps(
    {
        "sharded_backend": TORCH_DIST,
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
).encode()
"""Content of ``metadata.json``, which Megatron-Core requires to recognize a checkpoint."""
CONTENT_KEY, SEPARATE_LAYERS_KEY = "content_metadata", "non_homogeneous_layers"
"""Keys in ``common.pt`` for the arguments of ``sharded_state_dict`` when loading."""
NO_STATE: Mapping[str, object] = {}
CHECKPOINT_VERSION = 3.0
"""Megatron's checkpoint version. Since 2.0, queries, keys and values share one tensor."""


def lay_out_checkpoint(request: OutputRequest) -> OutputLayout:
    """Lay out the checkpoint of a model whose tensors have Megatron-Core's canonical names."""
    training_state = separate_training_state(request.tensors, request.blobs, request.notes)
    request = replace(
        request, tensors=[t for t in request.tensors if t not in training_state.tensors]
    )
    layers = build_stacked_storage(request.tensors) if request.stack_layers else LayerStorage()
    # Megatron-Core requires extra states; those that the source does not have are empty.
    model_tensors = [
        tensor for tensor in request.tensors if tensor.shape and not is_optimizer_state(tensor.name)
    ]
    stored_objects = (to_stored_object(blob, layers) for blob in training_state.objects)
    objects = [
        *{
            blob.name: blob for blob in (*make_extra_states(model_tensors, layers), *stored_objects)
        }.values()
    ]
    writer, places = DataFileBuilder(), dict[str, list[TensorPlace]]()
    stored: dict[str, OutputTensor] = {}
    for position, shard in enumerate(assign_boxes_to_files(request)):
        writer.begin_file(f"__0_{position}.distcp")
        for tensor, box in shard:
            places.setdefault(tensor.name, []).append(TensorPlace(box, len(writer.records)))
            stored_tensor = layers.to_stored_tensor(tensor)
            stored_tensor = stored.setdefault(stored_tensor.name, stored_tensor)
            layer = layers.locate_leaf(tensor.name)[1]
            if layer is not None:
                box = Box((layer, *box.offsets), (1, *box.sizes))
            writer.add_tensor(stored_tensor, box)
        for stored_blob in () if position else objects:
            writer.add_blob(stored_blob)
        writer.finish_file()
    if aliases := [tensor.name for tensor in request.tensors if tensor.alias_of]:
        message = f"each is written in full: {quote_names(aliases)}"
        request.notes.add(f"mcore does not support tied tensors; {message}")
    description = build_metadata_files(request, training_state.common)
    common = lay_out_common_file(description.common, training_state.tensors)
    contents, files = description.contents, list(writer.files)
    if training_state.tensors:
        files.append(
            _lay_out_common_tensors(common, training_state.tensors, writer.records, places)
        )
    else:
        contents = {COMMON: b"".join(piece for _, piece in common.iterate_frame([])), **contents}
    content = encode_metadata(list(stored.values()), objects, writer.places_by_name, writer.items)
    return OutputLayout(
        (*files, make_content_file(METADATA, content)),
        tuple(writer.records),
        {name: tuple(tensor_places) for name, tensor_places in places.items()},
        raw_copies=tuple(writer.raw_copies),
        contents=contents,
        folder=training_state.folder,
        outer_files={POINTER_FILE: training_state.pointer.encode()},
        generated_keys=tuple(description.common),
    )


def _lay_out_common_tensors(
    common: zip_writer.ZipLayout,
    tensors: Sequence[OutputTensor],
    records: list[Record],
    places: dict[str, list[TensorPlace]],
) -> OutputFile:
    """Return the output file ``common.pt``, and add its *tensors* to *records* and *places*."""
    first = len(records)
    for tensor, offset in zip(tensors, common.data_offsets, strict=True):
        places[tensor.name] = [TensorPlace(Box.whole(tensor.shape), len(records))]
        records.append(Record(tensor.name, COMMON, offset, tensor.nbytes))
    return OutputFile(COMMON, common.size, ZipFrame([(common, first, len(tensors))]))


class MetadataFiles(NamedTuple):
    """Content of ``common.pt``, and of the files that describe the model without tensors."""

    common: Mapping[str, object]
    contents: Mapping[str, bytes]


def build_metadata_files(
    request: OutputRequest, training_state: Mapping[str, object]
) -> MetadataFiles:
    """Build the files that describe a model and its *training_state* without tensors."""
    if request.adapter is not None:
        return _build_adapter_files(request, request.adapter)
    arguments = None
    if "args" not in training_state:
        noun = f"the arguments in {COMMON}"
        recorded = request.extensions.get(MEGATRON, ())
        source_file = next((name for name in recorded if name not in RECORD_FILES), COMMON)
        arguments = _make_or_copy_config(
            request, build_megatron_arguments, carried.adapt_arguments, source_file, noun
        )
    noun = f"{RUN_CONFIG} (for Megatron-Bridge)"
    yaml = _make_or_copy_config(
        request, build_run_config, carried.adapt_run_config, RUN_CONFIG, noun
    )
    if training_state:
        arguments = arguments and {**arguments, "no_save_optim": False}
        saved = read_nested_or_none(dict[object, object], yaml, "checkpoint") or {}
        yaml = yaml and {**yaml, "checkpoint": {**saved, "save_optim": True}}
    common = build_common_content(
        arguments, stacked=request.stack_layers, training_state=training_state
    )
    contents = {METADATA_JSON: METADATA_JSON_CONTENT}
    if yaml is not None:
        contents[RUN_CONFIG] = dump_yaml(yaml)
    return MetadataFiles(common, contents)


def _build_adapter_files(request: OutputRequest, settings: Mapping[str, object]) -> MetadataFiles:
    """Build the files that describe an adapter and, if it is known, its base model."""
    noun = f"the model section of {RUN_CONFIG} (Megatron-Bridge reads the model from elsewhere)"
    yaml = _make_or_copy_config(
        request, build_run_config, carried.adapt_run_config, RUN_CONFIG, noun
    )
    yaml = yaml or build_config_container(ONE_RANK)
    shapes = {tensor.name: tensor.shape for tensor in request.tensors}
    yaml[PEFT_SECTION] = build_adapter_section(shapes, settings, request.sizes.get("i"))
    if layers := list_incomplete_layers(shapes):
        parts = "factors for query, key and value together, and for gate and up together"
        missing = f"some are missing in {quote_names(layers)}"
        request.notes.add(f"Megatron-Bridge 0.3 requires {parts}; {missing}")
    if exchanged := list_exchanged_factors(shapes):
        request.notes.add(
            "with several tensor-parallel ranks, Megatron-Bridge 0.3 swaps rows of these "
            f"factors; load them on one rank: {quote_names(exchanged)}"
        )
    common = build_common_content(None, stacked=request.stack_layers)
    return MetadataFiles(
        common, {METADATA_JSON: METADATA_JSON_CONTENT, RUN_CONFIG: dump_yaml(yaml)}
    )


def _make_or_copy_config(
    request: OutputRequest,
    make: Callable[..., dict[str, object]],
    copy_record: Callable[..., CopiedRecord],
    file: str,
    noun: str,
) -> dict[str, object] | None:
    """Make a configuration with *make*, or copy *file* from the source if that fails.

    Returns None if the source has no usable *file* either.
    """
    config, why_not = _make_config(request, make)
    if config is not None:
        return config
    recorded = request.extensions.get(MEGATRON, {})
    if file not in recorded:
        request.notes.add(f"skipped {noun}, because {why_not}")
        return None
    copied = copy_record(
        recorded[file], _get_padded_vocabulary_size(request), _find_main_dtype(request)
    )
    if copied.skipped:
        request.notes.add(
            f"omitted from {noun}, because they are not plain values: {quote_names(copied.skipped)}"
        )
    return copied.values


def _make_config(
    request: OutputRequest, make: Callable[..., dict[str, object]]
) -> tuple[dict[str, object] | None, str]:
    """Return a configuration made with *make*, or None with the reason why it cannot be made."""
    if request.config is None or request.family is None:
        if request.family is None:
            return None, f"the model type is unknown (set {format_option('--model-type')})"
        pointing = (
            f"pass {format_option('--assets DIR')} to copy it from the trained model's folder"
        )
        return None, f"config.json is missing; {pointing}"
    sizes, recorded_sizes = dict(request.sizes), read_sizes(request.family, request.config)
    if "v" in recorded_sizes:
        sizes["v"] = recorded_sizes["v"]  # the tensors may be padded
    rows, dtype = _get_padded_vocabulary_size(request), _find_main_dtype(request)
    try:
        return make(request.family, request.config, sizes, padded_rows=rows, dtype=dtype), ""
    except MappingError as error:
        return None, error.what


def _get_padded_vocabulary_size(request: OutputRequest) -> int | None:
    """Return the number of rows of the embedding, or None if the output has no embedding."""
    row_counts = (tensor.shape[0] for tensor in request.tensors if tensor.name == EMBEDDING)
    return next(row_counts, None)


def _find_main_dtype(request: OutputRequest) -> str | None:
    """Return the dtype with the most bytes in the model's tensors, or None without tensors."""
    total: dict[str, int] = {}
    for tensor in request.tensors:
        if not is_optimizer_state(tensor.name):
            total[tensor.dtype] = total.get(tensor.dtype, 0) + tensor.nbytes
    return max(total, key=lambda name: total[name], default=None)


def build_common_content(
    arguments: Mapping[str, object] | None,
    *,
    stacked: bool,
    training_state: Mapping[str, object] = NO_STATE,
) -> dict[str, object]:
    """Build the content of ``common.pt``.

    Args:
        arguments: Arguments of Megatron-LM by name, or None if unknown.
        stacked: Whether all layers are stacked in one tensor.
        training_state: Training state to add. Its arguments take precedence over *arguments*.
    """
    saved = training_state.get(CONTENT_KEY)
    sharding_arguments: dict[str, object] = {
        **(saved if isinstance(saved, dict) else {}),
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    sharding_arguments.pop(SEPARATE_LAYERS_KEY, None)
    if not stacked:
        sharding_arguments[SEPARATE_LAYERS_KEY] = True
    content = {
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": 0,
        **training_state,
        CONTENT_KEY: sharding_arguments,
    }
    if arguments is None:
        return content
    return {"args": Inert("argparse", "Namespace", (), dict(arguments), newobj=True), **content}


def lay_out_common_file(
    content: Mapping[str, object], tensors: Sequence[OutputTensor] = ()
) -> zip_writer.ZipLayout:
    """Compute the zip layout of ``common.pt``, whose *content* refers to *tensors*."""
    storages = [(str(position), tensor.nbytes) for position, tensor in enumerate(tensors)]
    return zip_writer.compute_zip_layout(dump_pickle(content), storages, folder="common")


STATE_NAME = re.compile(r"optimizer\.state\.\w+\.(.+)")
OPTIMIZER, SETTINGS_KEY, ITERATION_KEY = "optimizer", "param_groups", "iteration"
MAX_ITERATION = 10**12


class McoreTrainingState(NamedTuple):
    """Training state and sharded objects that are written with the model.

    Attributes:
        objects: Sharded objects, which are items of the DCP directory.
        tensors: Tensors in ``common.pt``. All other tensors are in the DCP directory.
        common: Training state in ``common.pt``. Empty if no run can resume from it.
    """

    objects: tuple[Blob, ...]
    tensors: tuple[OutputTensor, ...]
    common: Mapping[str, object]

    @property
    def folder(self) -> str:
        """Folder name of the save, which is ``release`` if no run can resume from it."""
        return f"iter_{self.common[ITERATION_KEY]:07d}" if self.common else RELEASE

    @property
    def pointer(self) -> str:
        """Content of the tracker file, which is the iteration number or ``release``."""
        return str(self.common[ITERATION_KEY]) if self.common else RELEASE


def separate_training_state(
    tensors: Sequence[OutputTensor], blobs: Iterable[Blob], notes: Notes
) -> McoreTrainingState:
    """Separate training state and sharded objects in *tensors* and *blobs* from the model.

    Raises:
        RefusedError: Megatron-Core cannot load the optimizer state.
    """
    objects, leaves = list[Blob](), list[Blob]()
    for blob in blobs:
        (objects if is_sharded_object(blob.name) else leaves).append(blob)
    if not any(is_optimizer_state(tensor.name) for tensor in tensors):
        why = "mcore can only store it together with an optimizer state"
        notes.explain("skipped", {blob.name: why for blob in leaves})
        return McoreTrainingState(tuple(objects), (), {})
    leaves = build_parameter_groups(leaves, [tensor.name for tensor in tensors])
    common_tensors = tuple(tensor for tensor in tensors if _is_common_tensor(tensor))
    model_names = {tensor.name for tensor in tensors if not is_optimizer_state(tensor.name)}
    for tensor in tensors:
        match = STATE_NAME.fullmatch(tensor.name)
        has_parameter = match is not None and match[1] in model_names
        if is_optimizer_state(tensor.name) and tensor not in common_tensors and not has_parameter:
            raise RefusedError(
                "Megatron-Core cannot load this optimizer state",
                where=f"tensor `{tensor.name}`",
                why="it requires names such as `optimizer.state.exp_avg.` followed by a parameter "
                "name",
                hint=f"pass {format_option('--only model')} to write only the weights",
            )
    return McoreTrainingState(
        tuple(objects), common_tensors, _build_common_state(leaves, common_tensors)
    )


def is_optimizer_state(name: str) -> bool:
    """Return whether the tensor *name* belongs to the optimizer state."""
    return name.startswith(f"{OPTIMIZER}.")


def _is_common_tensor(tensor: OutputTensor) -> bool:
    """Return whether a tensor belongs in ``common.pt``, such as a loss scale.

    Such tensors are in nested dictionaries, whereas weights and moments have full names as keys.
    """
    has_plain_keys = not any("." in str(key) for key in tensor.path)
    return len(tensor.path) > 1 and has_plain_keys and not STATE_NAME.fullmatch(tensor.name)


def _build_common_state(
    leaves: Sequence[Blob], tensors: Sequence[OutputTensor]
) -> Mapping[str, object]:
    stored = ((t.path, make_pickled_tensor(t, str(key))) for key, t in enumerate(tensors))
    values = ((blob.path, blob.value) for blob in leaves)
    pairs = ((_restore_integer_key(path), leaf) for path, leaf in (*values, *stored))
    content = cast("dict[str, object]", build_nested_object(pairs))
    settings_names = [blob.name for blob in leaves if SETTINGS_KEY in blob.path]
    iteration = content.get(ITERATION_KEY)
    if not settings_names or type(iteration) is not int or not 0 < iteration < MAX_ITERATION:
        missing = (
            "the iteration number" if settings_names else "the settings of the parameter groups"
        )
        raise RefusedError(
            "Megatron-Core cannot resume with this optimizer state",
            where=f"`{ITERATION_KEY if settings_names else SETTINGS_KEY}`",
            why=f"`common.pt` must contain {missing}, but the source does not",
            hint=f"pass {format_option('--only model')} to write only the weights",
        )
    return content


def _restore_integer_key(path: Path) -> Path:
    """Convert the optimizer index in *path* back to an integer, which DCP turned into a string."""
    head, *rest = path
    if head == OPTIMIZER and rest and str(rest[0]).isdecimal() and not isinstance(rest[0], Index):
        return (head, int(rest[0]), *rest[1:])
    return path
