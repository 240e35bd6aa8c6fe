"""Writers for files of extracted tensors, in the formats safetensors, torch and NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckptctl.catalog import Box
from ckptctl.conversion.destinations import is_replaceable
from ckptctl.errors import RefusedError, UsageError, format_option
from ckptctl.formats.base import (
    OutputLayout,
    OutputRequest,
    OutputTensor,
    TensorPlace,
    make_constant_frame,
)
from ckptctl.formats.hf import FORMAT as HF
from ckptctl.formats.hf import SafetensorsLayoutBuilder
from ckptctl.formats.torch_file import FORMAT as TORCH
from ckptctl.planner.plan import OutputFile, Plan, Record
from ckptctl.save_load.loading.reading import PreparedRead
from ckptctl.storage.destinations import Replaceable, require_space
from ckptctl.storage.execution.execution_options import Execution, ExecutionOptions
from ckptctl.storage.execution.executor import execute_plan
from ckptctl.storage.outcome import require_in_range
from ckptctl.storage.publish import stage_output
from ckptctl.tree import TreePath
from ckptctl.units import pluralize
from ckptctl.verbs.extraction.extract_options import ExtractOptions
from ckptctl.verbs.extraction.slices import Slice

NPY_MAGIC = b"\x93NUMPY\x01\x00"
ALIGNMENT = 64
NUMPY_DTYPES = {
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


def encode_npy_header(dtype: str, shape: tuple[int, ...], name: str) -> bytes:
    """Encode the NumPy header of a row-major array."""
    numpy_dtype = NUMPY_DTYPES.get(dtype)
    if numpy_dtype is None:
        raise RefusedError(
            f"NumPy does not support {dtype}",
            where=f"`{name}`",
            hint=f"cast it with {format_option('--dtype fp32')}, or write a .safetensors or .pt "
            "file",
        )
    text = f"{{'descr': {numpy_dtype!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    header_bytes = len(NPY_MAGIC) + 2 + len(text) + 1
    text += " " * (-header_bytes % ALIGNMENT) + "\n"
    return NPY_MAGIC + len(text).to_bytes(2, "little") + text.encode("ascii")


def is_tensor_file(path: TreePath) -> bool:
    """Return whether *path* is a tensor file, which extraction may overwrite."""
    if not path.is_file() or path.suffix not in LAYOUTS_BY_SUFFIX:
        return False
    with path.open("rb") as file:
        return bool(file.read(len(NPY_MAGIC) - 2) == NPY_MAGIC[:-2]) or is_replaceable(path)


REPLACEABLE_TENSOR_FILE = Replaceable(is_tensor_file, "a file of tensors", is_file=True)


def _lay_out_safetensors(
    file: str, tensors: list[OutputTensor], metadata: Mapping[str, str]
) -> OutputLayout:
    HF.require_storable_dtypes(tensors)
    writer = SafetensorsLayoutBuilder({}, metadata)
    writer.add_file(file, tensors)
    return OutputLayout(tuple(writer.files), tuple(writer.records), writer.boxes)


def _lay_out_torch(file: str, tensors: list[OutputTensor], _: Mapping[str, str]) -> OutputLayout:
    return TORCH.lay_out(OutputRequest(file, tensors))


def _lay_out_npy(file: str, tensors: list[OutputTensor], _: Mapping[str, str]) -> OutputLayout:
    if len(tensors) > 1:
        raise UsageError(
            f"a .npy file stores one tensor, but {pluralize(len(tensors), 'tensor')} match",
            hint="select one tensor, or write a .safetensors or .pt file",
        )
    tensor = tensors[0]
    header = encode_npy_header(tensor.dtype, tensor.shape, tensor.name)
    record = Record(tensor.name, file, len(header), tensor.nbytes)
    output_file = OutputFile(file, len(header) + tensor.nbytes, make_constant_frame(header))
    return OutputLayout(
        (output_file,), (record,), {tensor.name: (TensorPlace(Box.whole(tensor.shape), 0),)}
    )


LAYOUTS_BY_SUFFIX: dict[
    str, Callable[[str, list[OutputTensor], Mapping[str, str]], OutputLayout]
] = {
    ".safetensors": _lay_out_safetensors,
    ".pt": _lay_out_torch,
    ".npy": _lay_out_npy,
}


@dataclass(frozen=True, slots=True)
class SelectedTensor:
    """Tensor or slice to extract, with its name and dtype in the output file."""

    name: str
    dtype: str
    full_shape: tuple[int, ...]
    selection: Slice

    @property
    def output(self) -> OutputTensor:
        """Name, dtype and shape of the tensor in the output file."""
        return OutputTensor(self.name, self.dtype, self.selection.shape, (self.name,))


def plan_tensor_file(
    reading: PreparedRead,
    selection: Sequence[SelectedTensor],
    target: Path,
    metadata: Mapping[str, str],
) -> Plan:
    """Plan the file *target* with the extracted tensors."""
    lay_out = LAYOUTS_BY_SUFFIX.get(target.suffix)
    if lay_out is None:
        raise UsageError(
            f"unknown file extension: `{target.name}`",
            why=f"supported extensions: {', '.join(LAYOUTS_BY_SUFFIX)}",
        )
    output = lay_out(target.name, [selected.output for selected in selection], metadata)
    selected_boxes = {selected.name: selected.selection.box for selected in selection}
    boxes = {
        name: tuple(place._replace(box=selected_boxes[name]) for place in places)
        for name, places in output.boxes.items()
    }
    dtypes_by_name = {selected.name: selected.dtype for selected in selection}
    return reading.plan_file(target, replace(output, boxes=boxes), dtypes_by_name)


def write_tensor_file(plan: Plan, target: Path, options: ExtractOptions) -> Execution:
    """Write the tensor file of *plan*, and publish it atomically as *target*."""
    execution_options = ExecutionOptions(jobs=options.jobs or 0, device=options.device)
    with stage_output(
        target, overwrite=options.overwrite, single_file=True, is_checkpoint=REPLACEABLE_TENSOR_FILE
    ) as stage:
        require_space(stage.data, plan.nbytes)
        execution = execute_plan(plan, stage.data, execution_options, lambda _: None)
        if not options.allow_overflow:
            require_in_range(
                execution.lost, f"pass {format_option('--allow-overflow')} to write them anyway"
            )
        stage.publish()
    return execution
