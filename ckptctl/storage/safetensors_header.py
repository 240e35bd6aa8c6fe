"""Reader and writer of safetensors headers.

Format: eight bytes of little-endian length, that many bytes of JSON, the data
(https://huggingface.co/docs/safetensors; ``safetensors/src/tensor.rs``). The reader rejects
everything that the reference reader rejects. It also rejects violations of the specification that
the reference reader accepts: duplicate keys, leading white space, unknown fields, more than 64
dimensions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import NoReturn

from ckptctl import dtypes
from ckptctl.errors import DamagedError, RefusedError, UnsupportedError
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.json_reader import parse_json
from ckptctl.storage.schema import MalformedError, read_as, wrap_malformed_errors
from ckptctl.storage.stand_ins import describe_zeros, guess_file_kind, raise_if_placeholder
from ckptctl.units import pluralize

MAX_HEADER_BYTES = 100_000_000
MAX_RANK = 64
HEAD_BYTES = 4096
ALIGNMENT = 8
METADATA = "__metadata__"
PACKED_DTYPE = "float4_e2m1fn_x2"
_FIELDS = {"dtype", "shape", "data_offsets"}
_UNKNOWN = "unknown to every supported version of torch"
_U64_DIGITS = 20

TensorSpan = tuple[str, tuple[int, ...], int, int]


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """Parsed header of a safetensors file.

    Attributes:
        tensors: Torch dtype, torch shape, start and end of the byte range in the file of each
            tensor, by name, in the order of the header.
        metadata: Strings of ``__metadata__``, by key.
        data_start: File offset of the first byte of tensor data.
        unread: Names of tensors with an unknown dtype, whose dtype and shape in *tensors* are as
            written in the header.
    """

    tensors: dict[str, TensorSpan]
    metadata: dict[str, str]
    data_start: int
    unread: frozenset[str] = frozenset()


def read_safetensors_header(
    files: SourceFiles, name: str, *, allow_unknown_dtypes: bool = False, start: int = 0
) -> SafetensorsHeader:
    """Read the header of a safetensors file.

    Args:
        files: Files of the checkpoint.
        name: File name.
        allow_unknown_dtypes: Whether to include tensors of unknown dtypes instead of raising.
        start: File offset at which the header begins.

    Raises:
        DamagedError: The file is truncated.
        UnsupportedError: The file is malformed, or has tensors of unknown dtypes.
    """
    where = f"{files.root / name}" + (f", at byte {start:,}" if start else "")
    size = files.size(name) - start
    if size < 8:
        _raise_truncated(
            f"the file has {pluralize(size, 'byte')}" if size else "the file is empty", where
        )
    length = int.from_bytes(files.read(name, start, 8), "little")
    if length > MAX_HEADER_BYTES or length + 8 > size:
        raise_if_placeholder(files, name)
        starts_as_json = files.read(name, start + 8, min(1, size - 8)) in (b"{", b"")
        if length > MAX_HEADER_BYTES or not starts_as_json:
            head = files.read(name, start, min(size, HEAD_BYTES))
            kind, hint = guess_file_kind(head) or ("", None)
            raise UnsupportedError(
                "not a safetensors file: the first 8 bytes are not a plausible header length",
                where=where,
                why=f"it looks like {kind}" if kind else f"they encode {pluralize(length, 'byte')}",
                hint=hint,
            )
        _raise_truncated(
            f"a header of {pluralize(length, 'byte')} does not fit into a file of {size:,}", where
        )
    text = files.read(name, start + 8, length)
    if not length and not any(files.read(name, start, min(size, HEAD_BYTES))):
        _raise_truncated(describe_zeros(files, name), where)
    with wrap_malformed_errors("malformed safetensors file", where):
        if not text.startswith(b"{"):
            raise MalformedError("the header does not begin with `{`")
        try:
            entries = parse_json(
                text, where=where, max_bytes=MAX_HEADER_BYTES, parse_int=_parse_unsigned
            )
        except DamagedError as error:  # the header length is wrong, unless the file ends in zeros
            if text.endswith(b"\0"):
                raise
            raise MalformedError(error.why or error.what) from error
        assert isinstance(entries, dict)
        strings = entries.pop(METADATA, None)
        metadata = {} if strings is None else read_as(dict[str, str], strings, METADATA)
        tensors = {key: _parse_tensor(key, entry) for key, entry in entries.items()}
        _check_spans(tensors, size - length - 8, where)
    start += length + 8
    unknown_names = [key for key, (dtype, *_) in tensors.items() if dtype not in dtypes.BY_NAME]
    if unknown_names and not allow_unknown_dtypes:
        code = tensors[unknown_names[0]][0]
        raise UnsupportedError(
            f"the dtype {code[:40]!r} is not supported",
            where=where,
            why=f"tensor `{unknown_names[0]}`; {_UNKNOWN}",
        )
    return SafetensorsHeader(
        {key: (t[0], t[1], start + t[2], start + t[3]) for key, t in tensors.items()},
        metadata,
        start,
        frozenset(unknown_names),
    )


def unread_reason(code: str) -> str:
    """Return the reason why tensors with the safetensors dtype *code* cannot be read."""
    return f"the dtype {code[:40]!r} is not supported: {_UNKNOWN}"


def _raise_truncated(why: str, where: str) -> NoReturn:
    raise DamagedError("the safetensors file is truncated", where=where, why=why)


def _parse_unsigned(text: str) -> int:
    if text.startswith("-") or len(text) > _U64_DIGITS:
        raise ValueError(f"{text[:40]} is not an unsigned 64-bit integer")
    return int(text)


def _parse_tensor(key: str, entry: object) -> TensorSpan:
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise MalformedError(f"the entry of `{key}` does not have dtype, shape and data_offsets")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not _are_integers(shape) or len(shape) > MAX_RANK:
        raise MalformedError(f"the shape of `{key}` is not a list of at most {MAX_RANK} sizes")
    if not _are_integers(offsets) or len(offsets) != 2:
        raise MalformedError(f"the offsets of `{key}` are not two integers")
    if type(code) is not str or code in dtypes.BY_NAME:
        raise MalformedError(f"the dtype of `{key}` is {str(code)[:40]!r}")
    begin, end = offsets
    dtype_info = dtypes.BY_SAFETENSORS.get(code)
    if dtype_info is None:
        if end < begin:
            raise MalformedError(f"`{key}` has {pluralize(end - begin, 'byte')}")
        return code, tuple(shape), begin, end
    sizes, is_odd = tuple(shape), False
    if dtype_info.name == PACKED_DTYPE:  # torch counts two 4-bit elements as one
        is_odd = not shape or shape[-1] % 2 != 0
        sizes = sizes if is_odd else (*sizes[:-1], sizes[-1] // 2)
    if is_odd or end < begin or math.prod(sizes) * dtype_info.itemsize != end - begin:
        raise MalformedError(f"`{key}` is {code} {shape}, but has {pluralize(end - begin, 'byte')}")
    # The reference reader computes the running products in 64 bits.
    if any(size.bit_length() > 63 for size in (*shape, *accumulate(shape, mul))):
        raise MalformedError(f"the shape of `{key}` overflows")
    return dtype_info.name, sizes, begin, end


def _are_integers(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _check_spans(tensors: Mapping[str, TensorSpan], nbytes: int, where: str) -> None:
    """Raise unless the tensors fill the data of *nbytes* bytes without gaps or overlaps."""
    expected = 0
    for key, (_, _, begin, end) in sorted(tensors.items(), key=lambda item: item[1][2:]):
        if begin != expected:
            problem = "overlaps another tensor" if begin < expected else "leaves a gap before it"
            raise MalformedError(
                f"`{key}` {problem}: it starts at {begin:,}, expected {expected:,}"
            )
        expected = end
    if expected != nbytes:
        sizes_message = f"{pluralize(nbytes, 'byte')}, but the header describes {expected:,}"
        if expected > nbytes:
            _raise_truncated(f"the data is truncated: {sizes_message}", where)
        raise MalformedError(f"the data is followed by other bytes: {sizes_message}")


def encode_safetensors_header(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, tuple[int, ...]]:
    """Encode the header of a safetensors file.

    Args:
        tensors: Name, torch dtype and torch shape of each tensor, in file order.
        metadata: Strings of ``__metadata__``, by key.

    Returns:
        Encoded length and header, padded with spaces to align the data to 8 bytes, and the file
        offset of each tensor.
    """
    parts = [f'"{METADATA}":{_encode_text(dict(metadata))}'] if metadata else []
    names: set[str] = set()
    position = 0
    positions = []
    for name, dtype, shape in tensors:
        if name == METADATA or name in names:
            why = "two tensors have this name" if name in names else "the format reserves this name"
            raise RefusedError(f"safetensors cannot store a tensor named `{name}`", why=why)
        names.add(name)
        dtype_info = dtypes.BY_NAME.get(dtype)
        if dtype_info is None or dtype_info.safetensors is None:
            raise RefusedError(f"safetensors cannot store {dtype}", where=f"tensor `{name}`")
        end = position + math.prod(shape) * dtype_info.itemsize
        parts.append(
            f'{_encode_text(name)}:{{"dtype":"{dtype_info.safetensors}",'
            f'"shape":{_encode_shape(name, dtype, shape)},"data_offsets":[{position},{end}]}}'
        )
        positions.append(position)
        position = end
    raw = ("{" + ",".join(parts) + "}").encode("utf-8")
    raw += b" " * (-len(raw) % ALIGNMENT)
    if len(raw) > MAX_HEADER_BYTES:
        raise RefusedError(f"a safetensors header of {pluralize(len(raw), 'byte')} is too large")
    start = 8 + len(raw)
    return len(raw).to_bytes(8, "little") + raw, tuple(start + offset for offset in positions)


def _encode_text(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RefusedError(
            f"safetensors cannot store the text {ascii(value)[:100]}", why="unpaired surrogate"
        ) from None
    return text


def _encode_shape(name: str, dtype: str, shape: tuple[int, ...]) -> str:
    if dtype == PACKED_DTYPE:
        if not shape:
            raise RefusedError(f"safetensors cannot store a 0-d {dtype}", where=f"tensor `{name}`")
        shape = (*shape[:-1], shape[-1] * 2)
    if len(shape) > MAX_RANK:
        raise RefusedError(
            f"`{name}` has {pluralize(len(shape), 'dimension')}, but at most {MAX_RANK} are "
            "supported"
        )
    return "[" + ",".join(map(str, shape)) + "]"
