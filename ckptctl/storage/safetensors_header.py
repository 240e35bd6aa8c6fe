"""Reader and writer of safetensors headers.

Format: eight bytes of little-endian length, that many bytes of JSON, the data
(https://huggingface.co/docs/safetensors; ``safetensors/src/tensor.rs``). The reader rejects
everything that the reference reader rejects, and also violations of the specification that it
accepts: duplicate keys, leading white space, unknown fields, more than 64 dimensions.
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
from ckptctl.storage.json_reader import loads
from ckptctl.storage.schema import MalformedError, malformed, read_as
from ckptctl.storage.stand_ins import likely_kind, require_content, zeros
from ckptctl.units import counted

MAX_HEADER = 100_000_000
MAX_RANK = 64
HEAD = 4096
ALIGNMENT = 8
METADATA = "__metadata__"
PACKED = "float4_e2m1fn_x2"
_FIELDS = {"dtype", "shape", "data_offsets"}
_UNKNOWN = "unknown to every supported version of torch"
_U64_DIGITS = 20

Span = tuple[str, tuple[int, ...], int, int]


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """Parsed header of a safetensors file.

    Attributes:
        tensors: For each name, in the order of the header: the torch dtype, the torch shape, the
            first byte in the file and the byte after the last.
        metadata: The ``__metadata__`` strings.
        length: Bytes of the file before the data.
        unread: Names of tensors with an unknown dtype; *tensors* has their dtype and shape as
            written in the header.
    """

    tensors: dict[str, Span]
    metadata: dict[str, str]
    length: int
    unread: frozenset[str] = frozenset()


def read_header(
    files: SourceFiles, name: str, *, unread: bool = False, start: int = 0
) -> SafetensorsHeader:
    """Read the header of a safetensors file.

    With *unread*, tensors of unknown dtypes are included instead of raising. The header begins at
    byte *start* of the file. A truncated file raises DamagedError, any other malformed one
    UnsupportedError.
    """
    where = f"{files.root / name}" + (f", at byte {start:,}" if start else "")
    size = files.size(name) - start
    if size < 8:
        _torn(f"the file has {counted(size, 'byte')}" if size else "the file is empty", where)
    length = int.from_bytes(files.read(name, start, 8), "little")
    if length > MAX_HEADER or length + 8 > size:
        require_content(files, name)
        begins = files.read(name, start + 8, min(1, size - 8)) in (b"{", b"")
        if length > MAX_HEADER or not begins:
            head = files.read(name, start, min(size, HEAD))
            kind, hint = likely_kind(head) or ("", None)
            raise UnsupportedError(
                "not a safetensors file: the first 8 bytes are not a plausible header length",
                where=where,
                why=f"it looks like {kind}" if kind else f"they encode {counted(length, 'byte')}",
                hint=hint,
            )
        _torn(f"a header of {counted(length, 'byte')} does not fit into a file of {size:,}", where)
    text = files.read(name, start + 8, length)
    if not length and not any(files.read(name, start, min(size, HEAD))):
        _torn(zeros(files, name), where)
    with malformed("malformed safetensors file", where):
        if not text.startswith(b"{"):
            raise MalformedError("the header does not begin with `{`")
        try:
            found = loads(text, where=where, max_bytes=MAX_HEADER, parse_int=_unsigned)
        except DamagedError as error:  # the header length is wrong, unless the file ends in zeros
            if text.endswith(b"\0"):
                raise
            raise MalformedError(error.why or error.what) from error
        assert isinstance(found, dict)
        strings = found.pop(METADATA, None)
        metadata = {} if strings is None else read_as(dict[str, str], strings, METADATA)
        tensors = {key: _tensor(key, entry) for key, entry in found.items()}
        _check_spans(tensors, size - length - 8, where)
    start += length + 8
    strange = [key for key, (dtype, *_) in tensors.items() if dtype not in dtypes.BY_NAME]
    if strange and not unread:
        code = tensors[strange[0]][0]
        raise UnsupportedError(
            f"the dtype {code[:40]!r} is not supported",
            where=where,
            why=f"tensor `{strange[0]}`; {_UNKNOWN}",
        )
    return SafetensorsHeader(
        {key: (t[0], t[1], start + t[2], start + t[3]) for key, t in tensors.items()},
        metadata,
        start,
        frozenset(strange),
    )


def unread_reason(code: str) -> str:
    """Return why tensors with the header dtype *code* cannot be read."""
    return f"the dtype {code[:40]!r} is not supported: {_UNKNOWN}"


def _torn(why: str, where: str) -> NoReturn:
    raise DamagedError("the safetensors file is truncated", where=where, why=why)


def _unsigned(text: str) -> int:
    if text.startswith("-") or len(text) > _U64_DIGITS:
        raise ValueError(f"{text[:40]} is not an unsigned 64-bit integer")
    return int(text)


def _tensor(key: str, entry: object) -> Span:
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise MalformedError(f"the entry of `{key}` does not have dtype, shape and data_offsets")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not _integers(shape) or len(shape) > MAX_RANK:
        raise MalformedError(f"the shape of `{key}` is not a list of at most {MAX_RANK} sizes")
    if not _integers(offsets) or len(offsets) != 2:
        raise MalformedError(f"the offsets of `{key}` are not two integers")
    if type(code) is not str or code in dtypes.BY_NAME:
        raise MalformedError(f"the dtype of `{key}` is {str(code)[:40]!r}")
    begin, end = offsets
    found = dtypes.BY_SAFETENSORS.get(code)
    if found is None:
        if end < begin:
            raise MalformedError(f"`{key}` has {counted(end - begin, 'byte')}")
        return code, tuple(shape), begin, end
    sizes, odd = tuple(shape), False
    if found.name == PACKED:  # torch counts two 4-bit elements as one
        odd = not shape or shape[-1] % 2 != 0
        sizes = sizes if odd else (*sizes[:-1], sizes[-1] // 2)
    if odd or end < begin or math.prod(sizes) * found.itemsize != end - begin:
        raise MalformedError(f"`{key}` is {code} {shape}, but has {counted(end - begin, 'byte')}")
    # The reference reader computes the running products in 64 bits.
    if any(size.bit_length() > 63 for size in (*shape, *accumulate(shape, mul))):
        raise MalformedError(f"the shape of `{key}` overflows")
    return found.name, sizes, begin, end


def _integers(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _check_spans(tensors: Mapping[str, Span], nbytes: int, where: str) -> None:
    """Check that the tensors fill the data without gap or overlap."""
    expected = 0
    for key, (_, _, begin, end) in sorted(tensors.items(), key=lambda item: item[1][2:]):
        if begin != expected:
            kind = "overlaps another tensor" if begin < expected else "leaves a gap before it"
            raise MalformedError(f"`{key}` {kind}: it starts at {begin:,}, expected {expected:,}")
        expected = end
    if expected != nbytes:
        said = f"{counted(nbytes, 'byte')}, but the header describes {expected:,}"
        if expected > nbytes:
            _torn(f"the data is truncated: {said}", where)
        raise MalformedError(f"the data is followed by other bytes: {said}")


def encode_header(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, tuple[int, ...]]:
    """Encode the header of a safetensors file.

    Args:
        tensors: Name, torch dtype and torch shape of each tensor, in file order.
        metadata: The ``__metadata__`` strings.

    Returns:
        Length and header, padded with spaces to align the data to 8 bytes, and the file offset of
        each tensor.
    """
    parts = [f'"{METADATA}":{_text(dict(metadata))}'] if metadata else []
    names: set[str] = set()
    position = 0
    positions = []
    for name, dtype, shape in tensors:
        if name == METADATA or name in names:
            why = "two tensors have this name" if name in names else "the format reserves this name"
            raise RefusedError(f"safetensors cannot store a tensor named `{name}`", why=why)
        names.add(name)
        found = dtypes.BY_NAME.get(dtype)
        if found is None or found.safetensors is None:
            raise RefusedError(f"safetensors cannot store {dtype}", where=f"tensor `{name}`")
        end = position + math.prod(shape) * found.itemsize
        parts.append(
            f'{_text(name)}:{{"dtype":"{found.safetensors}",'
            f'"shape":{_shape_text(name, dtype, shape)},"data_offsets":[{position},{end}]}}'
        )
        positions.append(position)
        position = end
    raw = ("{" + ",".join(parts) + "}").encode("utf-8")
    raw += b" " * (-len(raw) % ALIGNMENT)
    if len(raw) > MAX_HEADER:
        raise RefusedError(f"a safetensors header of {counted(len(raw), 'byte')} is too large")
    start = 8 + len(raw)
    return len(raw).to_bytes(8, "little") + raw, tuple(start + at for at in positions)


def _text(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RefusedError(
            f"safetensors cannot store the text {ascii(value)[:100]}", why="unpaired surrogate"
        ) from None
    return text


def _shape_text(name: str, dtype: str, shape: tuple[int, ...]) -> str:
    if dtype == PACKED:
        if not shape:
            raise RefusedError(f"safetensors cannot store a 0-d {dtype}", where=f"tensor `{name}`")
        shape = (*shape[:-1], shape[-1] * 2)
    if len(shape) > MAX_RANK:
        raise RefusedError(
            f"`{name}` has {counted(len(shape), 'dimension')}, but at most {MAX_RANK} are supported"
        )
    return "[" + ",".join(map(str, shape)) + "]"
