"""Files of an output that a format has laid out, filled with given tensors."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path

import torch

from ckptctl.formats.base import OutputLayout, OutputRequest, OutputTensor, make_content_file
from ckptctl.formats.mcore.mcore_writing import lay_out_checkpoint

Tensors = Mapping[str, torch.Tensor]


def laid_out(tensors: Tensors, **asked: object) -> OutputLayout:
    """Return where *tensors* go, whose names are those of layout ``mcore``."""
    wanted = [
        OutputTensor(name, str(one.dtype).removeprefix("torch."), tuple(one.shape), (name,))
        for name, one in tensors.items()
    ]
    return lay_out_checkpoint(OutputRequest("", wanted, **asked))  # type: ignore[arg-type]


def write(folder: Path, tensors: Tensors, **asked: object) -> Path:
    """Write *tensors* as a checkpoint of Megatron-Core; return its folder."""
    output = laid_out(tensors, **asked)
    inner = folder / output.folder
    inner.mkdir(parents=True)
    pieces = {
        place.record: _bytes_of(tensors[name], place.box.offsets, place.box.sizes)
        for name, places in output.boxes.items()
        for place in places
    }
    own = [make_content_file(name, content) for name, content in output.contents.items()]
    for file in (*output.files, *own):
        content = bytearray(file.size)
        for offset, frame in file.frame(lambda record: zlib.crc32(pieces[record])):
            content[offset : offset + len(frame)] = frame
        for number, record in enumerate(output.records):
            if record.file == file.path:
                content[record.offset : record.offset + record.nbytes] = pieces[number]
        (inner / file.path).write_bytes(content)
    for name, above in output.outer_files.items():
        (folder / name).write_bytes(above)
    return inner


def _bytes_of(whole: torch.Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> bytes:
    at = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
    return whole[at].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
