"""From samples to a Markdown table and a JSON document."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from tests.benchmarks.measure import Sample

GB = 1e9


@dataclass
class Measured:
    """All samples of one direction.

    Attributes:
        direction: Its name.
        nbytes: For each size asked for, the bytes of the source on disk.
        samples: For each contestant and size, one sample per round.
    """

    direction: str
    nbytes: dict[str, int] = field(default_factory=dict)
    samples: dict[str, dict[str, list[Sample]]] = field(default_factory=dict)

    def add(self, contestant: str, size: str, sample: Sample) -> None:
        """Append the sample of one round."""
        self.samples.setdefault(contestant, {}).setdefault(size, []).append(sample)

    def walls(self, contestant: str, size: str) -> list[float]:
        """Return the wall times, one per round."""
        return [sample.wall for sample in self.samples.get(contestant, {}).get(size, [])]

    def slopes(self, contestant: str) -> list[float]:
        """Return seconds per additional GB between the smallest and largest size, per round."""
        small, large = min(self.nbytes, key=self.nbytes.__getitem__), self.largest
        extra = (self.nbytes[large] - self.nbytes[small]) / GB
        if extra <= 0:
            return []
        pairs = zip(self.walls(contestant, small), self.walls(contestant, large), strict=True)
        return [(slow - quick) / extra for quick, slow in pairs]

    @property
    def largest(self) -> str:
        """Return the largest size."""
        return max(self.nbytes, key=self.nbytes.__getitem__)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return the median with the smallest and largest value, or a dash when there are none."""
    if not values:
        return "–"
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def ratio(mine: Sequence[float], theirs: Sequence[float]) -> float | None:
    """Return the ratio of the medians, or None when it means nothing."""
    if not mine or not theirs or statistics.median(theirs) <= 0:
        return None
    return statistics.median(mine) / statistics.median(theirs)


def markdown(results: Iterable[Measured]) -> str:
    """Return one table of wall times per size and contestant, one of slopes."""
    results = list(results)
    parts = [_walls(results)]
    if any(len(result.nbytes) > 1 for result in results):
        parts.append(_slopes(results))
    return "\n\n".join(parts)


def _walls(results: Sequence[Measured]) -> str:
    rows = []
    for result in results:
        for size, nbytes in result.nbytes.items():
            cp = result.walls("cp", size)
            for contestant, sizes in result.samples.items():
                walls = [sample.wall for sample in sizes.get(size, [])]
                if walls:
                    rss = max(sample.rss for sample in sizes[size]) / 1e6
                    cpu = spread([sample.cpu for sample in sizes[size]])
                    cells = (spread(walls), _times(ratio(walls, cp)), cpu, f"{rss:.0f}", len(walls))
                    rows.append((result.direction, f"{nbytes / GB:.2f}", contestant, *cells))
    head = ("direction", "GB", "who", "wall s: median (min–max)", "× cp")
    return table((*head, "CPU s", "peak RSS MB", "runs"), rows)


def _slopes(results: Sequence[Measured]) -> str:
    rows = []
    for result in results:
        cp, bare = result.slopes("cp"), result.slopes("bare")
        for contestant in result.samples:
            slopes = result.slopes(contestant)
            if slopes:
                ratios = _times(ratio(slopes, cp)), _times(ratio(slopes, bare))
                rows.append((result.direction, contestant, spread(slopes, 3), *ratios))
    head = ("direction", "who", "s per additional GB: median (min–max)", "× cp", "× bare loop")
    return table(head, rows)


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def document(results: Iterable[Measured], start: Mapping[str, list[Sample]]) -> dict[str, object]:
    """Return everything that was measured, every sample, for ``--json``."""
    return {
        "schema": 1,
        "directions": [asdict(result) for result in results],
        "startup": {name: [asdict(sample) for sample in runs] for name, runs in start.items()},
    }
