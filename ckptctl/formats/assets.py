"""Side files: configuration, tokenizer and whatever else lies beside the weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import cast

from ckptctl.errors import DamagedError
from ckptctl.formats.checksums import MANIFEST
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.json_reader import read_json

MAX_BYTES = 100_000_000
DOCUMENTS = ("config.json", "params.json")
_NOT_CARRIED = {MANIFEST, "SHA256SUMS", "checklist.chk", "params.json"}
_WEIGHTS = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".distcp",
    ".gguf",
    ".onnx",
    ".h5",
    ".msgpack",
)


def side_files(root: Path, exclude: Collection[str] = ()) -> dict[str, int]:
    """Return the side files directly in *root* with their sizes, in order of name.

    Weights, hidden files, checksum lists, files above 100 MB and ``params.json`` (which is always
    written anew for the weights it describes) are not among them.
    """
    return {
        item.name: item.stat().st_size
        for item in sorted(root.iterdir())
        if item.is_file() and item.name not in exclude and _carried(item)
    }


def documents(root: Path) -> dict[str, Mapping[str, object]]:
    """Return the parsed ``config.json`` and ``params.json`` in *root*, those that are there.

    Raises:
        DamagedError: One of them is not a JSON object.
    """
    found: dict[str, Mapping[str, object]] = {}
    with SourceFiles(root) as files:
        for name in DOCUMENTS:
            if (root / name).is_file():
                content = read_json(files, name)
                if not isinstance(content, dict):
                    raise DamagedError(f"`{name}` is not a JSON object", where=str(root / name))
                found[name] = cast("dict[str, object]", content)
    return found


def _carried(item: Path) -> bool:
    hidden = item.name.startswith(".")
    named = item.name in _NOT_CARRIED or item.name.endswith(_WEIGHTS)
    return not hidden and not named and item.stat().st_size <= MAX_BYTES
