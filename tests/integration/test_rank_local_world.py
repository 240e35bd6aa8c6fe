"""How many ranks saved for themselves is in the metadata of each: who is missing is named."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

import ckptctl
from ckptctl.errors import DamagedError, UnsupportedError
from ckptctl.verbs.consolidate_metadata import plan_metadata, run_metadata
from tests.checkpoints import differences, load_any_reference
from tests.gloo import run_on_ranks
from tests.integration import origin_ranks
from tests.integration.origin_ranks import state_at
from tests.integration.saving_ranks import stock_load

SAVES = [(world, words) for world in (2, 4) for words in ("S0", "R")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saves")
    run_on_ranks(origin_ranks.save_apart, [2, 4], root)
    return root


def without(saved: Path, world: int, words: str, tmp_path: Path, rank: int) -> Path:
    """Return a copy from which everything of *rank* is gone: it never wrote."""
    copy = tmp_path / f"{words}-{world}"
    shutil.copytree(saved / copy.name, copy)
    for path in (*copy.glob(f"__{rank}_*"), *copy.glob(f"__{rank}.*")):
        path.unlink()
    return copy


@pytest.mark.parametrize(("world", "words"), SAVES)
def test_missing_rank_metadata_is_damage(
    saved: Path, tmp_path: Path, world: int, words: str
) -> None:
    torn = without(saved, world, words, tmp_path, world - 1)
    name = f"__{world - 1}.metadata"
    found = ckptctl.verify(torn)
    assert found.verdict == "damaged"
    assert any(name in f"{one.file} {one.why}" for one in found.findings), found.findings
    assert name in str(ckptctl.inspect(torn).problems)
    for fails in (plan_metadata, lambda path: ckptctl.load(state_at(0), path)):
        with pytest.raises(
            DamagedError, match=f"of {world} ranks' metadata files are missing"
        ) as raised:
            fails(torn)
        assert name in str(raised.value.why)


@pytest.mark.parametrize(("world", "words"), SAVES)
def test_complete_rank_local_save_loads_with_stock_torch(
    saved: Path, tmp_path: Path, world: int, words: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(saved / f"{words}-{world}", copy)
    assert ckptctl.verify(copy).verdict == "complete"
    assert not any("does not record" in note for note in ckptctl.verify(copy).notes)
    for rank in range(world):
        said = pickle.loads((copy / f"__{rank}.metadata").read_bytes())
        assert said.ckptctl == {"world_size": world}
    run_metadata(plan_metadata(copy))
    expected: dict[str, Any] = state_at(1) | {"step": 1}
    assert not differences(load_any_reference(copy), expected)
    assert not differences(stock_load(copy, state_at(1)), state_at(1))


def test_rank_metadata_of_different_saves_is_refused(saved: Path, tmp_path: Path) -> None:
    mixed = tmp_path / "mixed"
    shutil.copytree(saved / "R-4", mixed)
    for path in (saved / "R-2").glob("__1*"):
        shutil.copyfile(path, mixed / path.name)
    with pytest.raises(UnsupportedError, match="different saves") as raised:
        ckptctl.load(state_at(0), mixed)
    assert "rank 1 of 2" in str(raised.value.why)
    found = ckptctl.verify(mixed)
    assert [one.file for one in found.findings][:1] == ["__1.metadata"]
