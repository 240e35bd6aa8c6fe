"""A run's rules on several ranks: when it is saved, what of it is loaded and removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gloo import run_on_ranks
from tests.integration.policy_ranks import agree_when_to_save


@pytest.mark.slow
def test_ranks_agree_when_to_save(tmp_path: Path) -> None:
    run_on_ranks(agree_when_to_save, (2,), tmp_path)
