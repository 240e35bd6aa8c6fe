"""Layers of a kind that repeat with a period, and the fields that shift or end the pattern."""

import pytest

from ckptctl.facts.layer_kinds import _find_layers_of_kind
from ckptctl.planner.families.demands import LayerKind

CONFIG = {"period": 3, "start": 1, "dense": 4, "end": 6, "open": -1, "flags": [0, 1, 1, 0]}
CONFIG |= {"numbers": [2, 5], "text": "3, 4,8"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"every": "period"}, {2, 5, 8}),
        ({"every": "period", "offset": "start"}, {1, 4, 7}),
        ({"after": "dense", "last": "end"}, {4, 5, 6}),
        ({"after": "dense", "every": "period", "last": "open"}, {5, 8}),
        ({"every": "period", "offset": "missing"}, None),
        ({"kinds": ("flags", 1)}, {1, 2}),
        ({"numbers": "numbers"}, {2, 5}),
        ({"numbers": "text"}, {3, 4, 8}),
    ],
)
def test_period_offset_and_last_select_layers(fields, expected):
    found = _find_layers_of_kind(LayerKind("moe", **fields), CONFIG, 9)
    assert found == expected
