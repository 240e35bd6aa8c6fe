"""Executable plan of a conversion, with its output files, copies, manifest and digest.

``ckptctl.manifest.json`` lists the contents of an output, with a checksum for every box of every
tensor. ``docs/reference/manifest.md`` documents its schema. The manifest names no machine, user or
time, so that equal inputs and options give equal bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Literal

from ckptctl import dtypes
from ckptctl.catalog import MANIFEST, ComputedTensor, list_input_files
from ckptctl.columns import BoxColumns, iterate_digest_values
from ckptctl.conversion.checked_ranges import plan_checksum_verification
from ckptctl.conversion.draft import Draft
from ckptctl.conversion.transfers import (
    identify_read_files,
    list_read_entries,
    plan_transfers,
    read_identities,
)
from ckptctl.errors import RefusedError, format_option
from ckptctl.formats.base import (
    OutputLayout,
    OutputTensor,
    TensorPlace,
    make_content_file,
    make_copied_file,
)
from ckptctl.formats.checksums import SCHEMA
from ckptctl.formats.sidecar_files import find_file_kind
from ckptctl.planner.plan import (
    CheckedRange,
    CrcLookup,
    OutputFile,
    Plan,
    RawCopy,
    Record,
    Transfer,
)
from ckptctl.tree import TreePath
from ckptctl.version import __version__


def build_plan(draft: Draft) -> Plan:
    """Build the executable plan from a draft that all planning stages have completed."""
    output, catalog, root = draft.output_layout, draft.located, draft.located.root
    checksum, single_file = draft.options.checksum, draft.target.single_file
    sidecar_files = tuple(
        make_content_file(name, content) for name, content in draft.written.items()
    )
    sidecar_files += tuple(make_copied_file(copy.target, copy.nbytes) for copy in draft.copies)
    _require_distinct_files(output, sidecar_files)
    dtypes_by_name = {tensor.name: tensor.dtype for tensor in draft.tensors}
    raw_copies = (*output.raw_copies, *draft.copies)
    folder = f"{output.folder}/" if output.folder else ""
    if folder:
        records = tuple(replace(item, file=folder + item.file) for item in output.records)
        output = replace(output, records=records)
        raw_copies = tuple(replace(item, target=folder + item.target) for item in raw_copies)
    copies, virtual = plan_transfers(catalog, draft.mapped, output, dtypes_by_name)
    format_files = tuple(
        make_content_file(name, content) for name, content in output.contents.items()
    )
    files = (*output.files, *format_files, *sidecar_files)
    computed, sources = identify_read_files(root, copies, virtual, output.raw_copies)
    checked, checks = plan_checksum_verification(root, copies, computed)
    written = {
        **output.contents,
        **draft.written,
        "__metadata__": repr(sorted(draft.strings.items())).encode(),
        **{f"__above__/{name}": content for name, content in output.outer_files.items()},
    }
    digest = compute_digest(
        checksum, files, output.records, copies, raw_copies, written, computed, checks
    )
    if checksum and not single_file:
        names = {
            copy.target: copy.nbytes for copy in draft.copies if not find_file_kind(copy.target)
        }
        manifest_fields = {"source": build_provenance(draft), "plan": digest}
        manifest_fields |= {"carried": names} if names else {}
        files = (
            *files,
            build_manifest(
                manifest_fields, draft.tensors, output.boxes, draft.output_layout.records
            ),
        )
    if folder:
        files = tuple(replace(item, path=folder + item.path) for item in files)
    files += tuple(make_content_file(name, content) for name, content in output.outer_files.items())
    other_inputs = [
        (place, file) for place, file in sorted(list_input_files(computed)) if place != root
    ]
    return Plan(
        source_root=root,
        sources=sources,
        target=draft.destination.path,
        single_file=single_file,
        files=files,
        records=output.records,
        transfers=copies,
        raw_copies=raw_copies,
        digest=digest,
        computed=computed,
        inputs={
            (place, file): read_identities(place, (file,))[file] for place, file in other_inputs
        },
        checked=checked,
        checks=checks,
        opened=catalog.opened,
    )


def _require_distinct_files(output: OutputLayout, sidecar_files: Sequence[OutputFile]) -> None:
    """Raise if a sidecar file to copy has the same name as a file that the conversion writes."""
    written = {MANIFEST, *(file.path for file in output.files), *output.contents}
    duplicates = [file.path for file in sidecar_files if file.path in written]
    if duplicates:
        raise RefusedError(
            "a copied sidecar file would replace an output file",
            where=f"`{duplicates[0]}`",
            hint=f"pass a narrower GLOB to {format_option('--carry')} to skip it",
        )


def build_provenance(draft: Draft) -> dict[str, object]:
    """Build the manifest fields that describe the source checkpoint."""
    fields: dict[str, object] = {
        "name": get_checkpoint_name(draft.catalog.path),
        "format": draft.catalog.format,
        "layout": draft.model.layout,
        "model_type": draft.model.model_type,
    }
    if draft.quantization and draft.options.quantize:
        fields["quantized"] = draft.options.quantize
    if draft.missing:
        fields["missing"] = list(draft.missing)
    if draft.base and draft.filled_from:
        name, taken = get_checkpoint_name(draft.base.path), list(draft.filled_from)
        fields["filled"] = {"name": name, "format": draft.base.format, "tensors": taken}
    return fields


def get_checkpoint_name(path: TreePath) -> str:
    """Return the last component of a checkpoint's path, encodable as UTF-8."""
    return path.name.encode(errors="replace").decode()


def compute_digest(
    checksum: bool,
    files: Sequence[OutputFile],
    records: Sequence[Record],
    transfers: Sequence[Transfer],
    raw_copies: Sequence[RawCopy],
    contents: Mapping[str, bytes],
    computed: Mapping[str, ComputedTensor],
    checks: Sequence[CheckedRange] = (),
) -> str:
    """Compute a hexadecimal SHA-256 of everything in a plan that determines the output bytes.

    The bytes and directories of the source files are not included.
    """
    digest = hashlib.sha256(repr(checksum).encode())
    for file in files:
        digest.update(repr((file.path, file.size)).encode())
    for record in records:
        digest.update(repr(record).encode())
    for transfer in transfers:
        digest.update(repr((transfer.name, transfer.tensor, transfer.targets)).encode())
    text_of_boxes = lru_cache(maxsize=64)(repr)  # most tensors share a few of these columns
    for entry in list_read_entries(transfers):
        for part in (entry.name, entry.dtype, entry.shape, *iterate_digest_values(entry.extents)):
            text = text_of_boxes(part) if isinstance(part, BoxColumns) else repr(part)
            digest.update(text.encode())
    for raw in raw_copies:
        place = (raw.source, raw.offset, raw.nbytes, raw.target, raw.target_offset)
        digest.update(repr(place).encode())
    for name, content in contents.items():
        digest.update(repr((name, len(content))).encode() + content)
    for virtual, computed_tensor in computed.items():
        inputs = [input_tensor.entry for input_tensor in computed_tensor.inputs]
        computation = (
            virtual,
            computed_tensor.kind,
            computed_tensor.dtype,
            computed_tensor.shape,
            inputs,
            computed_tensor.arguments,
        )
        digest.update(repr(computation).encode())
    for check in checks:
        digest.update(repr(check.recorded).encode())
    return digest.hexdigest()


def build_manifest(
    manifest_fields: Mapping[str, object],
    tensors: Sequence[OutputTensor],
    boxes: Mapping[str, Sequence[TensorPlace]],
    records: Sequence[Record],
) -> OutputFile:
    """Build the manifest file, whose checksums are filled in after all records are written.

    Args:
        manifest_fields: Fields that precede ``tensors``, except the schema and version.
        tensors: Tensors of the output.
        boxes: Boxes of each tensor, with the record that stores each box.
        records: Records of the output.
    """
    copied_files = manifest_fields.get("carried")
    for name in copied_files if isinstance(copied_files, Mapping) else ():
        _encode_text(name, "file", name)

    def encode_manifest(crc_of: CrcLookup) -> Iterator[bytes]:
        document = {"schema": SCHEMA, "ckptctl": __version__, **manifest_fields, "tensors": {}}
        before, _, after = json.dumps(document, indent=1, ensure_ascii=False).rpartition("{}")
        listed = {t.name: t for t in tensors}.values()
        begin = before + "{"
        for tensor in listed:
            tensor_text = _format_tensor(tensor, boxes.get(tensor.name, ()), records, crc_of)
            yield _encode_text(
                f"{begin}\n  {_encode_string(tensor.name)}: {tensor_text}", "tensor", tensor.name
            )
            begin = ","
        yield (("\n }" if listed else begin + "}") + after + "\n").encode()

    def write_frame(crc_of: CrcLookup) -> Iterator[tuple[int, bytes]]:
        yield 0, b"".join(encode_manifest(crc_of))

    return OutputFile(MANIFEST, sum(map(len, encode_manifest(lambda _: 0))), write_frame)


def _encode_text(text: str, kind: Literal["file", "tensor"], name: str) -> bytes:
    """Encode *text*, the manifest entry of the file or tensor *name*, or raise naming that item."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        exclude_hint = f"{format_option('--exclude')} to skip the tensor"
        raise RefusedError(
            "the name is not valid text",
            where=f"{kind} `{name}`",
            why="it is not valid UTF-8, which the manifest requires",
            hint=f"pass {format_option('--no-checksum')} to write no manifest, or "
            f"{exclude_hint if kind == 'tensor' else 'rename the file'}",
        ) from None


def _format_tensor(
    tensor: OutputTensor,
    boxes: Sequence[TensorPlace],
    records: Sequence[Record],
    crc_of: CrcLookup,
) -> str:
    members = {
        "dtype": _encode_string(tensor.dtype),
        "shape": _format_json_numbers(tensor.shape, 4),
        **({"alias_of": _encode_string(tensor.alias_of)} if tensor.alias_of else {}),
    }
    chunks = []
    itemsize = dtypes.get_itemsize(tensor.dtype)
    for place in boxes:
        record, box = records[place.record], place.box
        # The checksum of a record with several boxes does not apply to any of them.
        is_single_box = record.nbytes == box.numel * itemsize
        chunk = {
            "offsets": _format_json_numbers(box.offsets, 6),
            "sizes": _format_json_numbers(box.sizes, 6),
            "file": _encode_string(record.file),
            "offset": str(record.offset + place.start * itemsize),
            **({"crc32": f'"{crc_of(place.record):08x}"'} if is_single_box else {}),
        }
        chunks.append(_format_indented(chunk, 5))
    return _format_indented({**members, "chunks": _format_indented(chunks, 4)}, 3)


_encode_string = json.JSONEncoder(ensure_ascii=False).encode
# The text is that of ``json.dumps(indent=1)``, which takes ten times as long.


@lru_cache(maxsize=4096)
def _format_json_numbers(values: tuple[int, ...], depth: int) -> str:
    return _format_indented([str(value) for value in values], depth)


def _format_indented(values: Mapping[str, str] | Sequence[str], depth: int) -> str:
    """Format a JSON object or array, indented for nesting *depth*.

    *values* are already JSON texts.
    """
    begin, end, items = "[", "]", values
    if isinstance(values, Mapping):
        begin, end, items = "{", "}", [f'"{name}": {value}' for name, value in values.items()]
    if not items:
        return begin + end
    line = "\n" + " " * depth
    return begin + line + f",{line}".join(items) + line[:-1] + end
