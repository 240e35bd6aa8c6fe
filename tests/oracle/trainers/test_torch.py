"""torch's own parallelisms and writers on one to four ranks: the live weights."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckptctl
from ckptctl import formats
from ckptctl.errors import DamagedError
from ckptctl.verbs.consolidate_metadata import plan_metadata, run_metadata
from tests.checkpoints.readers import differences
from tests.gloo import run_on_ranks
from tests.integration.dcp_ranks import check_on_ranks
from tests.oracle.trainers.outcome import CHECKPOINT, check, error, kept, tensors
from tests.oracle.trainers.torch_cases import kinds, writers
from tests.unit.formats.damage import converted

pytestmark = pytest.mark.oracle

JOB = "tests.oracle.trainers.jobs.torch_saves:save_all"
FORMATS = {
    "dcp": "dcp",
    "async": "dcp",
    "rank_local": "dcp-rank-local",
    "hf_shards": "hf-rank-shards",
    "hf_floats": "hf-rank-shards",
    "experimental": "rank-files",
    "files": "rank-files",
}
INTEGERS = "finfo() requires a floating point"


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def world(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def saved(world: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of what ``world`` ranks trained and saved."""
    folder = tmp_path_factory.mktemp("torch")
    run_on_ranks(JOB, [world], str(folder))
    return folder / str(world)


def cases(saved: Path, *chosen: str) -> list[Path]:
    return [
        saved / kind / writer
        for kind in kinds(int(saved.name))
        for writer in writers(kind)
        if writer in chosen
    ]


@pytest.mark.parametrize("writer", FORMATS)
def test_converted_weights_equal_live_model(saved: Path, tmp_path: Path, writer: str) -> None:
    for case in cases(saved, writer):
        assert ckptctl.inspect(case / CHECKPOINT).format == FORMATS[writer]
        check(case, tmp_path)


@pytest.mark.parametrize("writer", [name for name in FORMATS if "hf" not in name])
def test_converted_optimizer_equals_live_state(saved: Path, tmp_path: Path, writer: str) -> None:
    for case in cases(saved, writer):
        found = tensors(converted(case / CHECKPOINT, tmp_path, only="all"))
        assert not differences(found, kept(case, "all")), case


def test_stock_torch_agrees_on_global_metadata(saved: Path) -> None:
    for case in cases(saved, "dcp", "async"):
        assert not differences(kept(case, "peer"), kept(case, "all")), case


def test_stock_torch_misreads_rank_local_saves(saved: Path, world: int) -> None:
    for case in cases(saved, "rank_local"):
        assert not error(case, "peer")
        assert bool(differences(kept(case, "peer"), kept(case, "all"))) == (world > 1), case


def test_stock_torch_loads_rank_local_saves_after_metadata_command(saved: Path) -> None:
    local = cases(saved, "rank_local")
    for case in local:
        run_metadata(plan_metadata(case / CHECKPOINT))
    check_on_ranks([(case / CHECKPOINT, kept(case, "all")) for case in local], worlds=(1, 2, 3))
    for case in local:
        (case / CHECKPOINT / ".metadata").unlink()


def test_stock_torch_fails_to_consolidate_integers(saved: Path) -> None:
    for case in cases(saved, "hf_shards"):
        assert INTEGERS in error(case, "peer")


def test_stock_torch_turns_scalars_into_zero(saved: Path) -> None:
    for case in cases(saved, "hf_floats"):
        theirs, live = kept(case, "peer"), kept(case, "live")
        assert differences(theirs, live) == ["temperature: other bytes"]
        assert theirs["temperature"].item() == 0
        assert live["temperature"].item() == 0.25


def test_missing_hf_shard_is_damaged_unlike_in_stock_torch(saved: Path, world: int) -> None:
    for case in cases(saved, "hf_floats"):
        if world > 1:
            assert len(differences(kept(case, "short"), kept(case, "live"))) > 1, case
            with pytest.raises(DamagedError):
                formats.open_checkpoint(case / "short")
            assert ckptctl.inspect(case / "short").verdict == "damaged"
