"""Folders of checkpoints, each as small as one can be, written by hand."""

from __future__ import annotations

import json
import os
from pathlib import Path

START = 1_750_000_000.0
"""When step 0 was written; a step takes a minute."""


def save_step(path: Path, time: float | None = None, files: int = 1, nbytes: int = 64) -> Path:
    """Write a Hugging Face folder of safetensors; its age follows from the number in its name.

    Args:
        path: The folder.
        time: When it was written; None: a minute per step.
        files: Number of files, with an index when there are several.
        nbytes: Bytes of the tensor in each.

    Returns:
        *path*.
    """
    path.mkdir(parents=True)
    names = [_name(number, files) for number in range(files)]
    for number, name in enumerate(names):
        header = {f"w{number}": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        content = len(text).to_bytes(8, "little") + text + bytes([number + 1]) * nbytes
        (path / name).write_bytes(content)
    if files > 1:
        index = {"metadata": {}, "weight_map": {f"w{n}": name for n, name in enumerate(names)}}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    digits = "".join(letter for letter in path.name if letter.isdigit())
    age(path, START + 60 * int(digits or 0) if time is None else time)
    return path


def age(path: Path, time: float) -> None:
    """Give *path* and all that it holds one time."""
    for item in (*path.rglob("*"), path):
        os.utime(item, (time, time), follow_symlinks=False)


def tear(path: Path, time: float = START) -> Path:
    """Cut the first file of tensors short, long ago unless *time* says otherwise."""
    file = sorted(path.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-5])
    age(path, time)
    return path


def _name(number: int, files: int) -> str:
    if files == 1:
        return "model.safetensors"
    return f"model-{number + 1:05d}-of-{files:05d}.safetensors"
