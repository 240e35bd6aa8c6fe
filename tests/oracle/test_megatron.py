"""The legacy format of Megatron, with models of Megatron-Core itself on gloo ranks."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import ckptctl
from ckptctl import formats
from ckptctl.formats.base import ReadOptions
from tests.checkpoints.readers import differences
from tests.oracle.mcore_install import run_on_megatron_ranks
from tests.oracle.megatron_ranks import CASES, Case
from tests.unit.formats.damage import converted

RULES = "megatron-core"
OUTPUT, EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"
JOBS = "tests.oracle.megatron_ranks"
pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
    ),
]
Saved = tuple[Path, Case]


@pytest.fixture(scope="module", params=CASES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder, case = tmp_path_factory.mktemp(request.param), CASES[request.param]
    run_on_megatron_ranks(f"{JOBS}:save", [case.world], folder, case)
    return folder, case


def test_legacy_megatron_tensors_match_live_model(saved: Saved, tmp_path: Path) -> None:
    folder, case = saved
    expected = torch.load(folder / "expected.pt", weights_only=True)
    if case.tied and case.pipeline > 1:  # the last stage has a copy of the embedding
        expected[OUTPUT] = expected[EMBEDDING]
    found = converted(folder / "checkpoint", tmp_path, rules=RULES)
    assert not differences(
        {key.removeprefix("model."): value for key, value in found.items()}, expected
    )


def test_consolidated_megatron_checkpoint_loads_on_one_rank(saved: Saved, tmp_path: Path) -> None:
    folder, case = saved
    whole = tmp_path / "whole.pt"
    ckptctl.convert(folder / "checkpoint", whole, to="torch", rules=RULES)
    run_on_megatron_ranks(f"{JOBS}:load", [1], whole, case)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_every_stored_element_is_tensor_or_replica(saved: Saved) -> None:
    """Every element that a rank saved is in the model or is a copy of one that is."""
    folder, case = saved
    catalog = formats.open_checkpoint(
        folder / "checkpoint", options=ReadOptions(rules=Path(RULES), replicas=True)
    )
    listed = [extent for entry in catalog.tensors.values() for extent in entry.extents]
    listed += [extent for found in catalog.replicas.values() for extent in found]
    stored = 0
    for name in catalog.files:
        content = torch.load(folder / "checkpoint" / name, weights_only=False)
        for key, state in content.items():
            if key.startswith("model"):
                stored += sum(value.nbytes for value in state.values() if value is not None)
    assert sum(extent.box.numel * 4 for extent in listed) == stored
    assert len(catalog.files) == case.world
