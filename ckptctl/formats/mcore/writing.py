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
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckptctl.catalog import Blob, Box
from ckptctl.errors import listed
from ckptctl.formats.base import Output, OutputRequest, OutputTensor, Place, document
from ckptctl.formats.dcp import METADATA
from ckptctl.formats.dcp.data_files import DataFiles, shards
from ckptctl.formats.dcp.metadata_writer import encode
from ckptctl.formats.mcore.common_file import common_file
from ckptctl.formats.mcore.described import describe
from ckptctl.formats.mcore.extra_states import extra_states
from ckptctl.formats.mcore.files import COMMON
from ckptctl.formats.mcore.layers import Layers, stacked
from ckptctl.formats.mcore.objects import stored_object
from ckptctl.formats.mcore.training import Training, is_state, training
from ckptctl.formats.megatron.files import POINTER
from ckptctl.formats.torch_file import ZipFrame
from ckptctl.planner.plan import OutputFile, Record
from ckptctl.storage.zips.writer import ZipLayout


def lay_out(request: OutputRequest) -> Output:
    """Say where everything of a model goes, whose tensors have the names of layout ``mcore``."""
    run = training(request.tensors, request.blobs, request.notes)
    request = replace(request, tensors=[t for t in request.tensors if t not in run.tensors])
    layers = stacked(request.tensors) if request.stack_layers else Layers()
    objects = _objects(request, run, layers)
    writer, places = DataFiles(), dict[str, list[Place]]()
    stored: dict[str, OutputTensor] = {}
    for position, shard in enumerate(shards(request)):
        writer.begin(f"__0_{position}.distcp")
        for tensor, box in shard:
            places.setdefault(tensor.name, []).append(Place(box, len(writer.records)))
            whole = layers.stored(tensor)
            whole = stored.setdefault(whole.name, whole)
            writer.add_tensor(whole, _box(box, layers.place(tensor.name)[1]))
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
    return Output(
        (*files, document(METADATA, content)),
        tuple(writer.records),
        {name: tuple(found) for name, found in places.items()},
        raw_copies=tuple(writer.raw_copies),
        contents=contents,
        folder=run.folder,
        above={POINTER: run.pointer.encode()},
        own=tuple(described.common),
    )


def _objects(request: OutputRequest, run: Training, layers: Layers) -> list[Blob]:
    """Return the objects that Megatron-Core asks for: those of the source, else empty ones."""
    model = [tensor for tensor in request.tensors if not is_state(tensor.name)]
    empty = {blob.name: blob for blob in extra_states(model, layers)}
    held = (stored_object(blob, layers) for blob in run.objects)
    return [*{**empty, **{blob.name: blob for blob in held}}.values()]


def _with_tensors(
    common: ZipLayout,
    tensors: Sequence[OutputTensor],
    records: list[Record],
    places: dict[str, list[Place]],
) -> OutputFile:
    """Return ``common.pt`` with *tensors* in it; adds where they lie."""
    first = len(records)
    for tensor, offset in zip(tensors, common.data_offsets, strict=True):
        places[tensor.name] = [Place(Box.whole(tensor.shape), len(records))]
        records.append(Record(tensor.name, COMMON, offset, tensor.nbytes))
    return OutputFile(COMMON, common.size, ZipFrame([(common, first, len(tensors))]))


def _box(box: Box, layer: int | None) -> Box:
    """Return a box of a tensor in what it is stored in."""
    return box if layer is None else Box((layer, *box.offsets), (1, *box.sizes))
