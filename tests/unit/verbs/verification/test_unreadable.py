"""Files that may not be read: named among all that is wrong, and the other files still checked."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ckptctl.api import conversion
from ckptctl.errors import StorageError
from ckptctl.verbs.verification.verify import verify_checkpoint
from ckptctl.verbs.verification.verify_options import VerifyOptions
from tests.sweeps import one_in

DATA = Path(__file__).parents[3] / "data"
FILES = [
    ("dcp/dcp_2d/ckpt", "__1_0.distcp"),
    ("dcp-rank-local/w2/ckpt", "__1.metadata"),
    ("dcp-rank-local/w2/ckpt", "__1_0.distcp"),
    ("deepspeed/z3_fp32/ckpt", "global_step2/zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    ("hf-rank-shards/hf_sharded/ckpt", "shard-00002-model-00001-of-00001.safetensors"),
    ("megatron/tp2_ep2/ckpt", "iter_0000010/mp_rank_01_000/model_optim_rng.pt"),
    ("rank_files/verl/ckpt", "model_world_size_2_rank_1.pt"),
    ("torch_checkpointing/two_rank/ckpt", "model_1.pt"),
    ("torch_checkpointing/two_rank/ckpt", "raw_1.bin"),
    ("vescale/w2/ckpt", "model/__1_0.distcp"),
]


@pytest.fixture
def forbidden(monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """Paths that the system refuses to open; also for root, whom modes do not stop."""
    paths: set[Path] = set()
    real = os.open

    def refusing(path: str | Path, *args: int, **options: int) -> int:
        if Path(path) in paths:
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **options)

    monkeypatch.setattr("ckptctl.storage.files.os.open", refusing)
    return paths


@pytest.mark.parametrize("level", ["fast", "full"])
@pytest.mark.parametrize(("folder", "file"), one_in(3, FILES))
def test_unreadable_file_is_one_unknown_finding(
    forbidden: set[Path], folder: str, file: str, level: str
) -> None:
    forbidden.add(DATA / folder / file)
    rules = Path("megatron-core") if folder.startswith("megatron") else None
    found = verify_checkpoint(DATA / folder, VerifyOptions(level=level, rules=rules))  # type: ignore[arg-type]
    assert found.verdict == "unknown"
    assert found.tensors
    assert file not in found.files
    assert found.files or "raw_1" in file
    denied = [one for one in found.unknown if "EACCES" in one.what]
    assert [one.file for one in denied] == [file]
    assert not [one for one in found.findings if one.severity == "warning" and one.file == file]


def test_tensors_in_unreadable_file_need_allow_missing(
    forbidden: set[Path], tmp_path: Path
) -> None:
    source = DATA / "dcp/dcp_2d/ckpt"
    forbidden.add(source / "__1_0.distcp")
    with pytest.raises(StorageError, match="EACCES"):
        conversion.plan_conversion(source, tmp_path / "out", to="hf")
    plan = conversion.plan_conversion(source, tmp_path / "out", to="hf", allow_missing=True)
    assert "model.l1.weight" in plan.missing
    assert not [note for note in plan.notes if "__1_0.distcp" in note]


@pytest.mark.parametrize(
    ("folder", "file"),
    [
        ("dcp-rank-local/w2/ckpt", "__1.metadata"),
        ("hf-rank-shards/hf_sharded/ckpt", "shard-00001-model-00001-of-00001.safetensors"),
    ],
)
def test_hole_findings_name_possible_source_file(tmp_path: Path, folder: str, file: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(DATA / folder, copy)
    copy.chmod(0o755)
    (copy / file).unlink()
    found = verify_checkpoint(copy, VerifyOptions(level="fast"))
    holes = [one for one in found.errors if one.box is not None]
    assert holes
    assert {one.file for one in holes} == {file}
    assert all(f"`{file}` cannot be read" in (one.why or "") for one in holes)
