"""What ranks send each other arrives whole, whatever its length."""

from __future__ import annotations

import pytest

from tests.gloo import run_on_ranks
from tests.integration import message_ranks


@pytest.mark.parametrize(
    "function",
    [
        message_ranks.exchanged,
        message_ranks.as_torch_does,
        message_ranks.unpicklable,
        message_ranks.not_formed,
    ],
)
def test_rank_messages_arrive_complete(function: object) -> None:
    run_on_ranks(function, [2, 3])  # type: ignore[arg-type]
