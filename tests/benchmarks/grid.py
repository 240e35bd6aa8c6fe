"""Prove the coverage of N × N boxes: ``python -m tests.benchmarks.grid N [--boxes-only]``."""

from __future__ import annotations

import sys

from ckptctl.catalog import Box
from ckptctl.planner.boxes import coverage

SIDE = 16


def main() -> None:
    """Make the boxes, and prove that they tile the tensor."""
    count = int(sys.argv[1])
    places = [(SIDE * row, SIDE * column) for row in range(count) for column in range(count)]
    boxes = [Box(place, (SIDE, SIDE)) for place in places]
    if "--boxes-only" not in sys.argv:
        assert coverage((SIDE * count, SIDE * count), boxes).exact


if __name__ == "__main__":
    main()
