"""Write ``tests/data/golden`` from tiny models of other programs: run it after the logits agree.

``python -m tests.oracle.make_golden [NAME...]``. A model that a missing package computes, such as
timm's tower of Gemma 3n, is named and keeps its file.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import ckptctl
from ckptctl.errors import CkptError
from ckptctl.families import load_families
from tests.checkpoints.golden import Golden, digest, family_of
from tests.checkpoints.readers import load_any_reference
from tests.oracle import deepseek_v41, hf_models, mlx_models
from tests.oracle.tiny import TINY


def main(chosen: list[str]) -> None:
    known = load_families()
    for name in chosen or (*TINY, *mlx_models.TINY, *deepseek_v41.NAMES):
        if family_of(name) in known:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    golden(name, Path(folder)).write(name)
                except pytest.skip.Exception as reason:
                    print(f"{name}: not written: {reason}")


def golden(name: str, folder: Path) -> Golden:
    """Return the golden model called *name*."""
    if name in deepseek_v41.NAMES:
        deepseek_v41.save(folder / "model", name)
    elif name in mlx_models.TINY:
        mlx_models.save(name, folder / "model")
    else:
        hf_models.save(hf_models.random_model(TINY[name]()), folder / "model")
    tensors = {
        key: (str(value.dtype).removeprefix("torch."), list(value.shape))
        for key, value in sorted(load_any_reference(folder / "model").items())
    }
    config = json.loads((folder / "model" / "config.json").read_text())
    config.pop("transformers_version", None)
    found = Golden(config, tensors, {})
    source = found.save(folder / "source")
    for layout in load_families()[family_of(name)].layouts:
        target = folder / f"{layout}.pt"
        try:
            ckptctl.convert(
                source, target, to="torch", to_layout=layout, model_type=family_of(name)
            )
        except CkptError as error:
            print(f"{name}: {layout}: {error}")
            continue
        found.digests[layout] = digest(torch.load(target, weights_only=True))
        print(name, layout, found.digests[layout][:12])
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
