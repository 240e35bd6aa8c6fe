"""Files of extracted tensors: safetensors, torch and NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckptctl.catalog import Box
from ckptctl.conversion.destinations import is_replaceable
from ckptctl.errors import RefusedError, UsageError, spell_option
from ckptctl.formats.base import (
    OutputLayout,
    OutputRequest,
    OutputTensor,
    TensorPlace,
    make_constant_frame,
)
from ckptctl.formats.hf import FORMAT as HF
from ckptctl.formats.hf import SafetensorsWriter
from ckptctl.formats.torch_file import FORMAT as TORCH
from ckptctl.planner.plan import OutputFile, Plan, Record
from ckptctl.save_load.loading.reading import Reading
from ckptctl.storage.destinations import Replaceable, require_space
from ckptctl.storage.execution.execution_options import Execution, ExecutionOptions
from ckptctl.storage.execution.executor import execute_plan
from ckptctl.storage.outcome import require_in_range
from ckptctl.storage.publish import stage_output
from ckptctl.tree import TreePath
from ckptctl.units import pluralize
from ckptctl.verbs.extraction.extract_options import ExtractOptions
from ckptctl.verbs.extraction.slices import Slice

MAGIC = b"\x93NUMPY\x01\x00"
ALIGNMENT = 64
DESCRIPTIONS = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "|i1",
    "uint64": "<u8",
    "uint32": "<u4",
    "uint16": "<u2",
    "uint8": "|u1",
    "bool": "|b1",
    "complex128": "<c16",
    "complex64": "<c8",
}


def encode_header(dtype: str, shape: tuple[int, ...], name: str) -> bytes:
    """Encode the NumPy header of a row-major array."""
    described = DESCRIPTIONS.get(dtype)
    if described is None:
        raise RefusedError(
            f"NumPy does not support {dtype}",
            where=f"`{name}`",
            hint=f"cast it with {spell_option('--dtype fp32')}, or write a .safetensors or .pt "
            "file",
        )
    text = f"{{'descr': {described!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    used = len(MAGIC) + 2 + len(text) + 1
    text += " " * (-used % ALIGNMENT) + "\n"
    return MAGIC + len(text).to_bytes(2, "little") + text.encode("ascii")


def is_tensor_file(path: TreePath) -> bool:
    """Return whether *path* is a file of tensors that may be replaced."""
    if not path.is_file() or path.suffix not in KINDS:
        return False
    with path.open("rb") as file:
        return bool(file.read(len(MAGIC) - 2) == MAGIC[:-2]) or is_replaceable(path)


OVERWRITABLE = Replaceable(is_tensor_file, "a file of tensors", file=True)


def _safetensors(
    file: str, tensors: list[OutputTensor], metadata: Mapping[str, str]
) -> OutputLayout:
    HF.check_dtypes(tensors)
    writer = SafetensorsWriter({}, metadata)
    writer.add_file(file, tensors)
    return OutputLayout(tuple(writer.files), tuple(writer.records), writer.boxes)


def _torch(file: str, tensors: list[OutputTensor], _: Mapping[str, str]) -> OutputLayout:
    return TORCH.lay_out(OutputRequest(file, tensors))


def _npy(file: str, tensors: list[OutputTensor], _: Mapping[str, str]) -> OutputLayout:
    if len(tensors) > 1:
        raise UsageError(
            f"a .npy file stores one tensor, but {pluralize(len(tensors), 'tensor')} match",
            hint="select one tensor, or write a .safetensors or .pt file",
        )
    one = tensors[0]
    header = encode_header(one.dtype, one.shape, one.name)
    record = Record(one.name, file, len(header), one.nbytes)
    whole = OutputFile(file, len(header) + one.nbytes, make_constant_frame(header))
    return OutputLayout((whole,), (record,), {one.name: (TensorPlace(Box.whole(one.shape), 0),)})


KINDS: dict[str, Callable[[str, list[OutputTensor], Mapping[str, str]], OutputLayout]] = {
    ".safetensors": _safetensors,
    ".pt": _torch,
    ".npy": _npy,
}


@dataclass(frozen=True, slots=True)
class Taken:
    """Tensor or slice to extract."""

    name: str
    dtype: str
    whole: tuple[int, ...]
    part: Slice

    @property
    def output(self) -> OutputTensor:
        """Tensor of the output file."""
        return OutputTensor(self.name, self.dtype, self.part.shape, (self.name,))


def plan_file(
    reading: Reading, taken: Sequence[Taken], target: Path, metadata: Mapping[str, str]
) -> Plan:
    """Plan a file of the extracted tensors."""
    kind = KINDS.get(target.suffix)
    if kind is None:
        raise UsageError(
            f"unknown file extension: `{target.name}`",
            why=f"supported extensions: {', '.join(KINDS)}",
        )
    output = kind(target.name, [one.output for one in taken], metadata)
    parts = {one.name: one.part.box for one in taken}
    boxes = {
        name: tuple(place._replace(box=parts[name]) for place in places)
        for name, places in output.boxes.items()
    }
    kinds = {one.name: one.dtype for one in taken}
    return reading.plan_file(target, replace(output, boxes=boxes), kinds)


def write_file(plan: Plan, target: Path, options: ExtractOptions) -> Execution:
    """Write the planned file and publish it atomically."""
    how = ExecutionOptions(jobs=options.jobs or 0)
    with stage_output(
        target, overwrite=options.overwrite, single_file=True, is_checkpoint=OVERWRITABLE
    ) as stage:
        require_space(stage.data, plan.nbytes)
        done = execute_plan(plan, stage.data, how, lambda _: None)
        if not options.allow_overflow:
            require_in_range(
                done.lost, f"pass {spell_option('--allow-overflow')} to write them anyway"
            )
        stage.publish()
    return done
