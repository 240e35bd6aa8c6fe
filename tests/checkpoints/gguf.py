"""GGUF files by their definition (``docs/gguf.md`` of ggml), hostile ones as well."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.checkpoints.readers import raw_bytes

ALIGNMENT = 32
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
KINDS = {bool: (7, "<?"), int: (4, "<I"), float: (6, "<f")}


@dataclass(frozen=True)
class Raw:
    """A tensor of bytes, as a header describes it: dimensions innermost first."""

    kind: int
    dims: Sequence[int]
    data: bytes


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(found: Any) -> bytes:
    """Return a value of metadata, its type first; bytes are given as they are."""
    if isinstance(found, bytes):
        return found
    if isinstance(found, str):
        return struct.pack("<I", 8) + text(found)
    if isinstance(found, list):
        inner = [value(one) for one in found]
        return (
            struct.pack("<I", 9)
            + inner[0][:4]
            + struct.pack("<Q", len(inner))
            + b"".join(one[4:] for one in inner)
        )
    kind, code = KINDS[type(found)]
    return struct.pack("<I", kind) + struct.pack(code, found)


def gguf_bytes(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor | Raw],
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    offsets: Mapping[str, int] | None = None,
) -> bytes:
    """Return a file.

    Args:
        metadata: By key.
        tensors: By name.
        version: In its head.
        counts: Of tensors and keys, if not the true ones.
        offsets: Where tensors are said to lie, if not where they do.
    """
    head = b"GGUF" + struct.pack("<I", version)
    head += struct.pack("<QQ", *(counts or (len(tensors), len(metadata))))
    head += b"".join(text(key) + value(one) for key, one in metadata.items())
    data = b""
    for name, one in tensors.items():
        raw = one
        if isinstance(one, torch.Tensor):
            raw = Raw(TYPES[one.dtype], one.shape[::-1], raw_bytes(one))
        assert isinstance(raw, Raw)
        place = (offsets or {}).get(name, len(data))
        head += text(name) + struct.pack(f"<I{len(raw.dims)}Q", len(raw.dims), *raw.dims)
        head += struct.pack("<IQ", raw.kind, place)
        data += raw.data + bytes(-len(raw.data) % ALIGNMENT)
    return head + bytes(-len(head) % ALIGNMENT) + data


def write_gguf(path: Path, *what: Any, **how: Any) -> Path:
    """Write what :func:`gguf_bytes` returns."""
    path.write_bytes(gguf_bytes(*what, **how))
    return path
