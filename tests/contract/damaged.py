"""One healthy checkpoint per format, to be damaged."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import ckptctl
from ckptctl.errors import CkptError
from tests.checkpoints import (
    differences,
    tiny_llama,
)
from tests.contract.support import (
    WRITABLE,
    place,
    read,
)

STATE, CONFIG = tiny_llama("llama3", layers=1, hidden=32, heads=2, kv_heads=2, vocab=64, ffn=96)
DAMAGE = (3, 4, 5, 6, 9)


NORM = "model.norm.weight"
KINDS = (*WRITABLE, "bin")


def convert(source: Path, folder: Path, to: str = "torch", **options: Any) -> Path:
    target = place(folder / "outputs", to)
    ckptctl.convert(source, target, to=to, **options)
    return target


def data_files(source: Path) -> list[Path]:
    """Return the files that hold tensors or say where they are."""
    if source.is_file():
        return [source]
    papers = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer.model")
    return sorted(item for item in source.iterdir() if item.name not in papers)


def is_complete(path: Path) -> bool:
    """Return whether ``inspect`` takes *path* for a complete checkpoint."""
    try:
        return ckptctl.inspect(path).verdict == "complete"
    except CkptError:
        return False


def found_or_harmless(source: Path, folder: Path, assets: Path, what: str) -> None:
    """Expect an error of the right class, or the same tensors in the output."""
    try:
        target = convert(source, folder, "meta", assets=assets)
    except CkptError as error:
        assert error.exit_code in DAMAGE, what
    else:
        assert not differences(read(target, CONFIG), STATE), what
        shutil.rmtree(target)
    assert not list((folder / "outputs").iterdir()), what
