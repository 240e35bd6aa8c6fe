"""How ranks share the reading of a checkpoint that they verify."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from ckptctl.ranks.coordinator import RankCollectives
from ckptctl.storage.crc import crc32
from ckptctl.storage.files import source_files
from ckptctl.verbs.verification import data
from ckptctl.verbs.verification.data import (
    RecordedChecksum,
    compare_ranges,
    compute_crcs,
    split_into_blocks,
)
from ckptctl.verbs.verification.verify import verify_checkpoint
from ckptctl.verbs.verification.verify_options import VerifyOptions


@dataclass
class One:
    rank: int
    world: int


def test_large_range_is_split_among_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "BLOCK_BYTES", 1 << 20)
    content = bytes(range(256)) * (16 << 10)
    (tmp_path / "large").write_bytes(content)
    right = RecordedChecksum("large", 0, len(content), crc32(content), "w")
    found = []
    with source_files(tmp_path) as files:
        todo = data._ReadingPlan([right], [], [])
        for rank in range(2):
            ranks = cast(RankCollectives, One(rank, 2))
            some, _ = data._select_portion(files, todo, ranks)
            assert sum(block.nbytes for block in some) == len(content) // 2
            found += compute_crcs(files, todo.ranges, some, 1, None)
    assert compare_ranges(tmp_path, [right], reversed(found)) == ([], [])
    wrong = RecordedChecksum("large", 0, len(content), 1, "w")
    (finding,), bad = compare_ranges(tmp_path, [wrong], found)
    assert (finding.tensor, finding.file, bad) == ("w", "large", [wrong])


def test_verification_is_independent_of_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path("tests/data/dcp/dcp_2d/ckpt")
    whole = verify_checkpoint(source, VerifyOptions(level="full"))
    monkeypatch.setattr(data, "BLOCK_BYTES", 100)
    small = verify_checkpoint(source, VerifyOptions(level="full"))
    assert small.verified == whole.verified
    assert small.verdict == "complete"
    assert len(split_into_blocks([RecordedChecksum("f", 0, 250, 0)])) == 3
