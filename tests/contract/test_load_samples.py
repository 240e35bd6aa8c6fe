"""Every sample loads through ``ckptctl.load`` as ``ckptctl.convert`` writes it to a torch file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl
from ckptctl import formats
from tests.checkpoints.readers import differences, flatten
from tests.contract.samples import SAMPLES
from tests.sweeps import one_in

POISON = 0xA5


@pytest.mark.parametrize("name", one_in(3, [n for n, one in SAMPLES.items() if not one.refused]))
def test_load_of_sample_equals_its_conversion(data: Path, tmp_path: Path, name: str) -> None:
    sample = SAMPLES[name]
    path, out = sample.path(data), tmp_path / "out.pt"
    catalog = formats.open_checkpoint(path)  # the optimizer next to a model is not read
    source = str(catalog.path) if formats.list_unread_parts(catalog) else path
    only: Any = "model" if formats.list_unread_trainer_files(catalog) else "all"
    ckptctl.convert(source, out, to="torch", only=only, exclude=list(sample.exclude))
    truth = torch.load(out, weights_only=False)
    wanted = {n: one for n, one in flatten(truth).items() if isinstance(one, torch.Tensor)}
    state = poisoned(truth)
    report = ckptctl.load(state, path, strict=False)
    assert not report.missing, report.missing
    found = {n: one for n, one in flatten(state).items() if n in wanted}
    assert not differences(found, wanted)
    assert set(report.loaded) >= {n for n, one in wanted.items() if one.numel()}


def poisoned(leaf: Any) -> Any:
    """Return containers of the same shape whose tensors hold nothing of use, without others."""
    if isinstance(leaf, dict):
        inside = {key: poisoned(value) for key, value in leaf.items()}
        return {key: value for key, value in inside.items() if value is not None}
    if isinstance(leaf, list):
        listed = [poisoned(value) for value in leaf]
        return listed if any(value is not None for value in listed) else None
    if isinstance(leaf, torch.Tensor):
        raw = torch.full((leaf.nbytes,), POISON, dtype=torch.uint8)
        return raw.view(leaf.dtype).reshape(leaf.shape)
    return None
