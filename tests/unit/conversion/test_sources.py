"""Finding the bytes of some tensors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ckptctl import formats
from ckptctl.catalog import Catalog
from ckptctl.conversion.sources import locate_tensors
from ckptctl.errors import CoverageError
from tests.checkpoints import save_dcp


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    save_dcp(tmp_path / "saved", {name: torch.ones(3, 2) for name in "abc"})
    return formats.open_checkpoint(tmp_path / "saved")


def test_only_named_tensors_are_located(catalog: Catalog) -> None:
    copies = {name: entry.extents for name, entry in catalog.tensors.items()}
    found = locate_tensors(replace(catalog, replicas=copies), ["c", "a", "c"])
    assert list(found.tensors) == ["c", "a"]
    assert not found.blobs and not found.replicas
    assert {e.extents[0].codec for e in found.tensors.values()} == {"raw"}
    assert catalog.tensors["a"].extents[0].codec == "torch"


def test_incomplete_named_tensor_is_a_coverage_error(catalog: Catalog) -> None:
    torn = replace(catalog.tensors["b"], extents=())
    catalog = replace(catalog, tensors={**catalog.tensors, "b": torn})
    assert locate_tensors(catalog, ["a"]).tensors
    with pytest.raises(CoverageError):
        locate_tensors(catalog, ["a", "b"])
