"""Random families: what a conversion writes is what numpy makes of the tables, and back again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import ckptctl

AXES = {"x": 3, "a": 2, "b": 4, "c": 5, "g": 1, "h": 6}
ROWS = {"one": "xab", "two": "xcb", "left": "gbc", "right": "hbc", "flat": "a"}
PAIRS = (("one", "two"), ("left", "right"))
LAYERS = 2
Array: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
Arrays: TypeAlias = Mapping[str, Array]


@dataclass(frozen=True)
class Cell:
    """How a layout stores a row: the groups of axes in its dimensions, the first ones spread."""

    spread: str
    dims: tuple[str, ...]
    part: int | None = None
    along: int = 0
    within: str = ""

    def text(self, key: str) -> str:
        path = "".join(f".{{{axis}}}" for axis in self.spread)
        how = f"/{self.within}" if self.within else f".{self.along}"
        part = "" if self.part is None else f"#{self.part}{how}"
        dims = " ".join(f"({' '.join(group)})" for group in self.dims)
        return f"{key}{path}.weight{part} {dims}"


@st.composite
def cells(draw: st.DrawFn, axes: str) -> Cell:
    spread = "x" if "x" in axes and draw(st.booleans()) else ""
    order = draw(st.permutations([axis for axis in axes if axis not in spread]))
    cuts = draw(st.lists(st.booleans(), min_size=len(order), max_size=len(order)))
    groups = [order[0]]
    for axis, cut in zip(order[1:], cuts, strict=False):
        groups = [*groups, axis] if cut else [*groups[:-1], groups[-1] + axis]
    return Cell(spread, tuple(groups))


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, tuple[str, Cell]]:
    """Key and cell of each row; of a pair that is joined one dimension may differ."""
    found = {name: (name, draw(cells(axes))) for name, axes in ROWS.items()}
    for first, second in PAIRS:
        (mine,) = set(ROWS[first]) - set(ROWS[second])
        (other,) = set(ROWS[second]) - set(ROWS[first])
        cell = found[first][1]
        along = next(n for n, group in enumerate(cell.dims) if mine in group)
        if draw(st.booleans()):
            dims = tuple(group.replace(mine, other) for group in cell.dims)
            outer = cell.dims[0][0]
            can = not along and outer != mine
            within = outer if can and draw(st.booleans()) else ""
            found[first] = first + second, Cell(cell.spread, cell.dims, 0, along, within)
            found[second] = first + second, Cell(cell.spread, dims, 1, along, within)
    return found


def family(sides: Mapping[str, Mapping[str, tuple[str, Cell]]]) -> str:
    rows = [
        "  ".join(
            [name, " ".join(axes), *(side[name][1].text(side[name][0]) for side in sides.values())]
        )
        for name, axes in ROWS.items()
    ]
    head = "  ".join(["logical", "axes", *(f"{name}: {name}.{{i}}." for name in sides)])
    table = "\n".join([head, *rows])
    sizes = {axis: (f"size_{axis}", "") for axis in AXES}
    return (
        "from ckptctl.planner.layouts import Family\n"
        f"FAMILY = Family(name='random', title='Random', layouts={tuple(sides)!r}, "
        f"tables=({table!r},), architecture='Random', sizes={sizes!r})\n"
    )


def stored(side: Mapping[str, tuple[str, Cell]], name: str, logical: Arrays) -> dict[str, Array]:
    """Return what numpy makes of the table."""
    found: dict[str, dict[int, Array]] = {}
    for layer in range(LAYERS):
        for row, (key, cell) in side.items():
            order = [*cell.spread, *"".join(cell.dims)]
            whole = logical[f"{row}.{layer}"].transpose([ROWS[row].index(a) for a in order])
            for n in range(AXES["x"] if cell.spread else 1):
                path = f".{n}" if cell.spread else ""
                shape = [math.prod(AXES[axis] for axis in group) for group in cell.dims]
                if cell.within:
                    shape = [AXES[cell.within], shape[0] // AXES[cell.within], *shape[1:]]
                part = (whole[n] if cell.spread else whole).reshape(shape)
                found.setdefault(f"{name}.{layer}.{key}{path}.weight", {})[cell.part or 0] = part
    cells = dict(side.values())
    return {
        key: joined(cells[key.split(".")[2]], [parts[n] for n in sorted(parts)])
        for key, parts in found.items()
    }


def joined(cell: Cell, parts: list[Array]) -> Array:
    whole = np.concatenate(parts, 1 if cell.within else cell.along)
    if cell.within:
        whole = whole.reshape(-1, *whole.shape[2:])
    return np.ascontiguousarray(whole)


def same(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[k], other[k]) for k in one)


ALIKE = {
    "one": ("onetwo", Cell("x", ("ba",), 0, within="b")),
    "two": ("onetwo", Cell("x", ("bc",), 1, within="b")),
    "left": ("left", Cell("", ("gbc",))),
    "right": ("right", Cell("", ("hbc",))),
    "flat": ("flat", Cell("", ("a",))),
}
"""Parts that take turns in each of several tensors."""


@example(ALIKE, ALIKE, "hf")
@given(layouts(), layouts(), st.sampled_from(["hf", "dcp"]))
@settings(max_examples=20)
def test_random_family_conversion_matches_numpy(
    source: dict[str, tuple[str, Cell]], target: dict[str, tuple[str, Cell]], middle: str
) -> None:
    random = np.random.default_rng(1)
    logical = {
        f"{row}.{layer}": random.standard_normal([AXES[a] for a in axes]).astype(np.float32)
        for row, axes in ROWS.items()
        for layer in range(LAYERS)
    }
    before, after = stored(source, "p", logical), stored(target, "q", logical)
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "random.py").write_text(family({"p": source, "q": target}))
        options: dict[str, Any] = {
            "converter": folder / "random.py",
            "model_type": "random",
            "sizes": AXES,
        }
        save_file(before, folder / "in.safetensors")
        ckptctl.convert(
            folder / "in.safetensors", folder / "a", to=middle, to_layout="q", **options
        )
        ckptctl.convert(folder / "a", folder / "q", to="hf", to_layout="q", **options)
        ckptctl.convert(folder / "a", folder / "p", to="hf", to_layout="p", **options)
        assert same(load_file(folder / "q" / "model.safetensors"), after)
        assert same(load_file(folder / "p" / "model.safetensors"), before)
