"""Every family, from real keys to every layout and back: nothing changes unnoticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl
from ckptctl.families import load_families
from ckptctl.planner.families.declarations import choose_field_alias, get_nested, has_field
from tests.checkpoints.golden import Golden, digest, family_of, names
from tests.sweeps import one_in

GOLDEN = {name: Golden.read(name) for name in names()}
CASES = [(name, layout) for name, golden in GOLDEN.items() for layout in golden.digests]


def test_golden_digests_have_only_known_layouts() -> None:
    known = load_families()
    unknown = [(n, layout) for n, layout in CASES if layout not in known[family_of(n)].layouts]
    assert not unknown, "run `python -m tests.oracle.make_golden`"


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_configs_state_all_model_sizes(name: str) -> None:
    """Only a head dimension may be silent, and what the model does not have is null."""
    family, config = load_families()[family_of(name)], GOLDEN[name].config
    names = {
        axis: choose_field_alias(config, named[0])
        for axis, named in family.sizes.items()
        if named[0]
    }
    silent = {axis for axis, one in names.items() if not has_field(config, one)}
    silent = {axis for axis in silent if has_module(config, names[axis])}
    assert silent <= {"e"} | LISTED.get(family.name, set())


LISTED = {"nemotron_h": {"i"}}
"""Sizes that transformers 5 leaves to the length of a list."""


def has_module(config: dict[str, Any], name: str) -> bool:
    """Whether *config* describes the part of the model that a size of this name belongs to."""
    module, dot, _ = name.rpartition(".")
    return not dot or get_nested(config, module) is not None


@pytest.mark.parametrize(("name", "layout"), one_in(29, CASES))
def test_golden_round_trip_matches_stored_digests(tmp_path: Path, name: str, layout: str) -> None:
    golden = GOLDEN[name]
    source = golden.save(tmp_path / "source")
    kind: Any = {"model_type": family_of(name)}
    ckptctl.convert(source, tmp_path / "there.pt", to="torch", to_layout=layout, **kind)
    there = torch.load(tmp_path / "there.pt", weights_only=True)
    assert digest(there) == golden.digests[layout]
    options: Any = kind | {"from_layout": layout, "to_layout": "hf", "assets": source}
    ckptctl.convert(tmp_path / "there.pt", tmp_path / "back.pt", to="torch", **options)
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert digest(back) == golden.digests["hf"]
