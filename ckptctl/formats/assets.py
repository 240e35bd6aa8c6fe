"""Side files: configuration, tokenizer and whatever else lies beside the weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import cast

from ckptctl.errors import DamagedError, listed
from ckptctl.formats.checksums import MANIFEST
from ckptctl.planner.configs.stated import plain
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
    ".metadata",
    ".metadata.tmp",
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


def with_folder(
    root: Path, folder: str, exclude: Collection[str] = ()
) -> tuple[dict[str, int], dict[str, Mapping[str, object]]]:
    """Return the side files and documents of *root*, and of a folder in it that belong beside them.

    Args:
        root: The checkpoint.
        folder: Its name; side files in it are called ``folder/name``, and end up beside the others.
        exclude: Names in *root* that are no side files.

    Raises:
        DamagedError: A document is not a JSON object.
    """
    found, described = side_files(root, exclude), documents(root)
    if not (root / folder).is_dir():
        return found, described
    inner = side_files(root / folder)
    more = {f"{folder}/{name}": size for name, size in inner.items() if name not in found}
    return {**found, **more}, {**documents(root / folder), **described}


def left_behind(root: Path, exclude: Collection[str] = ()) -> tuple[str, ...]:
    """Return notes on what lies in *root* and is too large to be carried, or is a directory."""
    items = [item for item in sorted(root.iterdir()) if not item.name.startswith(".")]
    large = [
        f"not carried along: `{item.name}` (above {MAX_BYTES // 1_000_000} MB)"
        for item in items
        if item.is_file() and item.name not in exclude and _is_side(item) and not _carried(item)
    ]
    folders = [item.name for item in items if item.is_dir() and item.name not in exclude]
    return (
        *large,
        *((f"not carried along: sub-directories {listed(folders)}",) if folders else ()),
    )


def amended(params: Mapping[str, object], name: str, value: object) -> dict[str, object]:
    """Return params.json with one value replaced in the part that describes the model."""
    inner = plain(params)
    changed = {**inner, name: value}
    return changed if inner is params else {**params, "model": changed}


def documents(root: Path) -> dict[str, Mapping[str, object]]:
    """Return the parsed ``config.json`` and ``params.json`` in *root*, those that are there.

    ``Infinity`` and ``NaN`` are accepted, as in the ``time_step_limit`` of Mamba-2.

    Raises:
        DamagedError: One of them is not a JSON object.
    """
    found: dict[str, Mapping[str, object]] = {}
    with SourceFiles(root) as files:
        for name in DOCUMENTS:
            if (root / name).is_file():
                content = read_json(files, name, constants=True)
                if not isinstance(content, dict):
                    raise DamagedError(f"`{name}` is not a JSON object", where=str(root / name))
                found[name] = cast("dict[str, object]", content)
    return found


def _is_side(item: Path) -> bool:
    hidden = item.name.startswith(".")
    return not hidden and item.name not in _NOT_CARRIED and not item.name.endswith(_WEIGHTS)


def _carried(item: Path) -> bool:
    return _is_side(item) and item.stat().st_size <= MAX_BYTES
