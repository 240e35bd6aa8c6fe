"""One file of tensors, by the end of its name: ``.safetensors``, ``.pt`` and ``.npy``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from ckptctl.catalog import Box
from ckptctl.errors import UsageError
from ckptctl.formats.base import Output, OutputRequest, OutputTensor, Place, constant
from ckptctl.formats.hf import FORMAT as HF
from ckptctl.formats.hf import Writer
from ckptctl.formats.torch_file import FORMAT as TORCH
from ckptctl.ops.destinations import replaceable
from ckptctl.planner.plan import OutputFile, Record
from ckptctl.storage.destinations import Replaceable
from ckptctl.storage.npy_header import MAGIC, encode_header

LayOut = Callable[[str, list[OutputTensor], Mapping[str, str]], Output]


def lay_out(target: Path, tensors: list[OutputTensor], metadata: Mapping[str, str]) -> Output:
    """Return where *tensors* go in the file *target*.

    Args:
        target: The file.
        tensors: What goes into it.
        metadata: Free-form strings, for files that have a place for them.

    Raises:
        UsageError: Its name ends in something else, or several tensors are to go into one array.
        RefusedError: The file cannot hold one of the dtypes.
    """
    kind = KINDS.get(target.suffix)
    if kind is None:
        raise UsageError(
            f"`{target.name}` says no format",
            why=f"known endings: {', '.join(KINDS)}",
        )
    return kind(target.name, tensors, metadata)


def is_tensor_file(path: Path) -> bool:
    """Return whether *path* is a file of tensors."""
    if not path.is_file() or path.suffix not in KINDS:
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC) - 2) == MAGIC[:-2] or replaceable(path)


OVERWRITABLE = Replaceable(is_tensor_file, "a file of tensors", file=True)


def _safetensors(file: str, tensors: list[OutputTensor], metadata: Mapping[str, str]) -> Output:
    HF.refuse_unheld(tensors)
    writer = Writer({}, metadata)
    writer.add(file, tensors)
    return Output(tuple(writer.files), tuple(writer.records), writer.boxes)


def _torch(file: str, tensors: list[OutputTensor], _: Mapping[str, str]) -> Output:
    return TORCH.lay_out(OutputRequest(file, tensors))


def _npy(file: str, tensors: list[OutputTensor], _: Mapping[str, str]) -> Output:
    if len(tensors) > 1:
        raise UsageError(
            f"{len(tensors):,} tensors do not fit into one .npy file",
            hint="name one tensor, or a .safetensors or .pt file",
        )
    one = tensors[0]
    header = encode_header(one.dtype, one.shape, one.name)
    record = Record(one.name, file, len(header), one.nbytes)
    whole = OutputFile(file, len(header) + one.nbytes, constant(header))
    return Output((whole,), (record,), {one.name: (Place(Box.whole(one.shape), 0),)})


KINDS: dict[str, LayOut] = {".safetensors": _safetensors, ".pt": _torch, ".npy": _npy}
