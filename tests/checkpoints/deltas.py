"""The layout of deltas, read with numpy, zlib and zstandard, as ``delta.md`` describes it."""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard

from tests.checkpoints.readers import raw_bytes

State = dict[str, torch.Tensor]


def apply_delta(state: Mapping[str, torch.Tensor], folder: Path) -> dict[str, bytes]:
    """Return the bytes of all tensors of the result, without any code of ckptctl."""
    manifest = json.loads((folder / "ckptctl.delta.json").read_text())
    for name, record in manifest["files"].items():
        content = (folder / name).read_bytes()
        assert len(content) == record["size"]
        assert hashlib.sha256(content).hexdigest() == record["sha256"]
    files = {name: _read(folder / name) for name in manifest["files"] if name.startswith("delta-")}
    result: dict[str, bytes] = {}
    for name, change in manifest["tensors"].items():
        record = change["result"]
        if record is None or record["alias_of"]:
            continue
        if change["file"] is None:
            result[name] = raw_bytes(state[name])
        else:
            itemsize = getattr(torch, record["dtype"]).itemsize
            nbytes = itemsize * int(np.prod(record["shape"], dtype=np.int64))
            like = change["base"] and [change["base"][key] for key in ("dtype", "shape")]
            has_base = like == [record["dtype"], record["shape"]]
            base = raw_bytes(state[name]) if has_base else bytes(nbytes)
            payload = files[change["file"]][name]
            result[name] = _apply(base, payload, min(itemsize, 8), manifest)
        assert hashlib.sha256(result[name]).hexdigest() == record["sha256"], name
    for name, change in manifest["tensors"].items():
        if change["result"] and change["result"]["alias_of"]:
            result[name] = result[change["result"]["alias_of"]]
    return result


def _read(path: Path) -> dict[str, bytes]:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    spans = {k: v["data_offsets"] for k, v in header.items() if k != "__metadata__"}
    return {k: content[8 + length + a : 8 + length + b] for k, (a, b) in spans.items()}


def _apply(base: bytes, payload: bytes, word: int, manifest: Mapping[str, Any]) -> bytes:
    block_bytes, result, position = manifest["block_bytes"], b"", 0
    count = -(-len(base) // block_bytes)
    table = list(struct.iter_unpack("<BI", payload[: 5 * count]))
    position = 5 * count

    def unpack(data: bytes) -> bytes:
        if manifest["codec"] == "deflate":
            return zlib.decompress(data)
        return zstandard.ZstdDecompressor().decompress(data)

    def words(planes: bytes) -> np.ndarray:
        rows = np.frombuffer(planes, np.uint8).reshape(word, -1)
        result: np.ndarray = np.ascontiguousarray(rows.T).view(f"<u{word}").reshape(-1)
        return result

    def unzigzag(codes: np.ndarray) -> np.ndarray:
        one = codes.dtype.type(1)
        result: np.ndarray = (codes >> one) ^ (~(codes & one) + one)
        return result

    for number, (kind, nbytes) in enumerate(table):
        data, position = payload[position : position + nbytes], position + nbytes
        old = base[number * block_bytes : (number + 1) * block_bytes]
        values = np.frombuffer(old, f"<u{word}").copy()
        if kind == 1:
            changed, _, stored = struct.unpack("<III", data[:12])
            gaps = np.frombuffer(unpack(data[12 : 12 + stored]), np.uint8)
            ends = np.flatnonzero(gaps < 255)
            distances = np.add.reduceat(gaps, np.r_[0, ends[:-1] + 1], dtype=np.int64)
            places = np.cumsum(distances + 1) - 1
            assert len(places) == changed
            values[places] += unzigzag(words(unpack(data[12 + stored :])))
        elif kind == 2:
            values += unzigzag(words(unpack(data)))
        elif kind == 3:
            values = np.frombuffer(data, f"<u{word}")
        elif kind == 4:
            values = words(unpack(data))
        result += values.tobytes()
    assert position == len(payload)
    return result
